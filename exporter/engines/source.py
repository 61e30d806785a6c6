"""Writes the ONNX graph that a device runs, or from which an engine is compiled: a master with its types decided."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from specexport.contract.engines import ComputedIn
from specexport.contract.errors import BuildError
from specexport.contract.shapes import ShapePoint
from specexport.exporter.cut import cut
from specexport.exporter.passes.sizes import fix_sizes
from specexport.exporter.pipeline import for_device, run_passes
from specexport.exporter.weights import INLINE_BYTES, WeightsFile


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
    """Writes the graph, and beside it the weights that had to be converted.

    Weights that stay as they are stay in the master's weights file.

    Args:
        master: a step or propose graph.
        output: in its folder.
        compute: what activations and the KV cache are to be.
        drafts: draft tokens of a propose graph, one, or its stages; 0 for a step graph.
        sizes: the symbolic dimensions that are the same in every profile. Without B, several slots may run.
        compiled: whether TensorRT compiles it: then tables that rows are looked up in are not quantized, products
            see the tokens of several slots as rows, and ranks meet inside.
        ranks: among how many the model is split whose part this is; 0 where it is not.

    Raises:
        BuildError: a weight does not fit ``compute``, or the graph has control flow.
    """
    model = ir.load(master)
    if any(node.op_type == "If" for node in ir.traversal.RecursiveGraphIterator(model.graph)):
        raise BuildError(
            f"{master}: its experts are branches, which only CPUs run; build it with the --backend that it is to run on"
        )
    converted = output.with_suffix(".bin")
    with WeightsFile(converted) as file:

        def store(name: str, dtype: ir.DataType, array: npt.NDArray[np.generic]) -> ir.TensorProtocol:
            if array.nbytes <= INLINE_BYTES:
                return ir.tensor(array, dtype, name=name)
            return file.write(name, dtype, array.shape, iter([array.view(np.uint16)]))  # NumPy knows no bfloat16

        run_passes(model, for_device(compute, drafts, sizes, store, compiled=compiled, ranks=ranks))
    model.graph.name = output.stem
    ir.save(model, output)
    if not converted.stat().st_size:
        converted.unlink()


def write_segments(source: Path, sizes: dict[str, int]) -> list[Path]:
    """Cuts a rank's graph for ONNX Runtime where the ranks meet; the segments lie beside it.

    Args:
        source: as :func:`write_source` wrote it.
        sizes: as there.

    Raises:
        BuildError: what goes from one segment to another is of no size that a shape point says.
    """
    segments, written = cut(ir.load(source), sizes_apart=True), []
    try:
        for value in [value for segment in segments for value in segment.graph.outputs]:
            list(map(ShapePoint(1, 1, 1).size, map(str, value.shape or ("?",))))
    except KeyError as unknown:
        raise BuildError(
            f"{source}: {value.name}, which goes from one segment to another, has an axis of unknown size, {unknown}; "
            "choose --backend onnxruntime, or build without --tensor-parallel"
        ) from None
    for at, segment in enumerate(segments):
        fix_sizes(segment, sizes)
        written.append(source.with_name(f"{source.stem}.{at:03}.onnx"))
        ir.save(segment, written[-1])
    return written
