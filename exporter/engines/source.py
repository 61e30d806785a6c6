"""The engines that a bundle needs, their shapes, and the source graphs that they are compiled from.

A source graph is a master graph with fixed types; onnxruntime runs it unchanged on GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from specexport.contract.engines import ComputedIn, ProgramGraph
from specexport.contract.errors import BuildError
from specexport.contract.manifest import Manifest, program_points, program_sizes
from specexport.contract.model import LoweredAs, Model
from specexport.contract.shapes import CATCH_UP_TOKENS, ShapePoint, uncached_points
from specexport.exporter.external_data import INLINE_BYTES, DataFile
from specexport.exporter.passes.fix_sizes import fix_sizes
from specexport.exporter.passes.ranks import cut
from specexport.exporter.pipeline import device_passes

_CACHE_STEP = 4
_SMALL_CACHE = 1024


@dataclass(frozen=True)
class CompileJob:
    """An engine to compile.

    Attributes:
        vocab: V, for graphs in which it is symbolic.
    """

    profiles: tuple[ShapePoint, ...]
    vocab: int = 1

    @property
    def drafts(self) -> int:
        """The K of a propose graph with the same K in every profile; 0 for other graphs."""
        numbers = {profile.drafts for profile in self.profiles}
        return numbers.pop() if len(numbers) == 1 else 0

    @property
    def several(self) -> bool:
        """Whether it runs several slots at once; B then stays symbolic, as prompts are read in single slots."""
        return any(profile.batch > 1 for profile in self.profiles)

    @property
    def sizes(self) -> list[dict[str, int]]:
        """The sizes of every symbolic dimension, for each profile."""
        return [program_sizes(profile, self.vocab) for profile in self.profiles]

    @property
    def fixed(self) -> dict[str, int]:
        """The symbolic dimensions with the same size in all profiles: B if it is 1, S if there is one cache size."""
        rows = {profile.cache for profile in self.profiles}
        return ({} if self.several else {"B": 1}) | ({"S": rows.pop()} if len(rows) == 1 else {})


def model_jobs(model: Model, manifest: Manifest, batches: Sequence[int], *, plain: bool) -> list[CompileJob]:
    """The engines of a model, for steps of these batch sizes and for prompts, which are read in single slots.

    With ``plain``, an engine for wider steps also has profiles for one token at a time.
    """
    chunk = manifest.prefill_chunk
    if not model.cache:
        return [CompileJob(tuple(point for point in uncached_points(model.graph.points) if point.batch in batches))]
    points = [p for p in model.graph.points if p.batch in batches or (p.batch, p.tokens) == (1, chunk)]
    caches = engine_caches(sorted({point.cache for point in points}), manifest.lowering)
    points = sorted(point for point in points if point.cache in caches)
    if not any(point.drafts for point in points):
        wide = [point for point in points if point.rows == point.tokens > 1]
        kept = points if plain or not wide else [point for point in points if point.tokens > 1]
        return [CompileJob(tuple(kept))]
    owner = next((method for method in manifest.methods if method.draft == model), None)
    tokens = frozenset({CATCH_UP_TOKENS}) if owner is None else owner.call_widths
    if not tokens:
        return [CompileJob(tuple(points))]
    # One token per call, K calls per step: TensorRT would store the weights for each of K unrolled passes (5.4 times
    # their size at K = 4). It would store them again for passes over one token, so a draft's call reads two tokens.
    runs = [*((batch, width) for batch in batches for width in tokens), (1, chunk)]
    return [CompileJob(tuple(sorted(ShapePoint(batch, width, s, 0, 1) for batch, width in runs for s in caches)))]


def engine_caches(sizes: list[int], lowering: LoweredAs) -> list[int]:
    """The cache sizes that engines are compiled for, among those that a bundle declares.

    The native lowering has one, as TensorRT requires a fixed size for a cache that it writes in place. Portable caches
    grow fourfold: attention costs the whole cache, but on a GPU that is little beside the weights at short contexts.
    """
    kept = [sizes[-1]]
    if lowering == "portable":
        for size in reversed(sizes):
            if _SMALL_CACHE <= size <= kept[0] // _CACHE_STEP:
                kept.insert(0, size)
    return kept


def program_jobs(graph: ProgramGraph, manifest: Manifest, batches: Sequence[int]) -> list[CompileJob]:
    """The engines of a graph of the step program, for all trees and batch sizes that need it."""
    caches = sorted({point.cache for point in manifest.target.graph.points})
    cache = engine_caches(caches, manifest.lowering)[-1]
    points = sorted(point for batch in batches for point in program_points(graph, manifest, batch, cache))
    return [CompileJob(tuple(points), manifest.target.vocab_size)] if points else []


def write_source(
    master: Path,
    output: Path,
    compute: ComputedIn,
    drafts: int,
    sizes: dict[str, int],
    *,
    compiled: bool,
    ranks: int = 0,
) -> None:
    """Writes the graph and, beside it, the weights that had to be converted; others stay in the master's weights file.

    Args:
        master: a step or propose graph.
        output: a file in the master's folder.
        drafts: draft tokens of a propose graph: 1, or the number of its stages; 0 for a step graph.
        sizes: the symbolic dimensions that are the same in every profile; without B, several slots may run.
        compiled: whether TensorRT compiles it. Tables are then in floating point, products read the tokens of several
            slots as the rows of a matrix, and ranks combine their parts within the graph.
        ranks: number of ranks that the model is split among; 0 if it is not split.
    """
    model = ir.load(master)
    if any(node.op_type == "If" for node in ir.traversal.RecursiveGraphIterator(model.graph)):
        raise BuildError(
            f"{master}: its experts are branches, which only CPUs run; build it with the --backend that will run it"
        )
    converted = output.with_suffix(".bin")
    with DataFile(converted) as file:

        def store(name: str, dtype: ir.DataType, array: npt.NDArray[np.generic]) -> ir.TensorProtocol:
            if array.nbytes <= INLINE_BYTES:
                return ir.tensor(array, dtype, name=name)
            return file.write(name, dtype, array.shape, iter([array.view(np.uint16)]))  # NumPy knows no bfloat16

        device_passes(model, compute, drafts, sizes, store, compiled=compiled, ranks=ranks)
    model.graph.name = output.stem
    ir.save(model, output)
    if not converted.stat().st_size:
        converted.unlink()


def write_segments(source: Path, sizes: dict[str, int]) -> list[Path]:
    """Cuts a rank's graph for ONNX Runtime where ranks combine their parts, and writes the segments beside it.

    ``sizes`` are those of symbolic dimensions that are the same in every profile.
    """
    segments, written = cut(ir.load(source), repeat_sizes=True), []
    try:
        for value in [value for segment in segments for value in segment.graph.outputs]:
            list(map(ShapePoint(1, 1, 1).size, map(str, value.shape or ("?",))))
    except KeyError as unknown:
        raise BuildError(
            f"{source}: {value.name}, which is passed between segments, has an axis of unknown size, {unknown}; "
            "choose --backend onnxruntime, or build without --tensor-parallel"
        ) from None
    for at, segment in enumerate(segments):
        fix_sizes(segment, sizes)
        written.append(source.with_name(f"{source.stem}.{at:03}.onnx"))
        ir.save(segment, written[-1])
    return written
