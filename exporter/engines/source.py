"""The ONNX graph that a device runs, or that an engine for it is compiled from: a master with its types decided."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from specexport.contract import tensors
from specexport.contract.engines import ComputedIn
from specexport.contract.errors import BuildError
from specexport.contract.shapes import ShapePoint
from specexport.exporter.cut import cut
from specexport.exporter.passes.collectives import join_along_first, use_collectives
from specexport.exporter.passes.compute_type import compute_in
from specexport.exporter.passes.flatten_products import flatten_products
from specexport.exporter.passes.lookup_tables import restore_tables
from specexport.exporter.passes.one_token import fix_drafts
from specexport.exporter.weights import INLINE_BYTES, WeightsFile

_NARROW: dict[ComputedIn, ir.DataType] = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}


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
    if drafts:
        fix_drafts(model, drafts)
    if ranks:
        (use_collectives if compiled else join_along_first)(model, ranks)
    interface = [value.name or "" for value in (*model.graph.inputs, *model.graph.outputs)]
    caches = {name for name in interface if name.startswith(tensors.CACHES)}
    converted = output.with_suffix(".bin")
    with WeightsFile(converted) as file:

        def store(name: str, dtype: ir.DataType, array: npt.NDArray[np.generic]) -> ir.TensorProtocol:
            if array.nbytes <= INLINE_BYTES:
                return ir.tensor(array, dtype, name=name)
            return file.write(name, dtype, array.shape, iter([array.view(np.uint16)]))  # NumPy knows no bfloat16

        if compiled:
            restore_tables(model, store)
        if compiled and "B" not in sizes:
            flatten_products(model.graph)
        if compute in _NARROW:
            compute_in(model, _NARROW[compute], caches, store, narrow_norms=not compiled)
    _fix(model.graph, sizes)
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
        _fix(segment.graph, sizes)
        written.append(source.with_name(f"{source.stem}.{at:03}.onnx"))
        ir.save(segment, written[-1])
    return written


def _fix(graph: ir.Graph, sizes: dict[str, int]) -> None:
    """Gives symbolic dimensions of a graph's inputs and outputs their sizes; those not named stay symbolic."""
    for value in (*graph.inputs, *graph.outputs):
        if value.shape is not None:
            dims = [dim if isinstance(dim, int) else sizes.get(str(dim.value), dim) for dim in value.shape]
            value.shape = ir.Shape(dims)
