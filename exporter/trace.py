"""Traces the modules of ``specexport.graphs`` into ``onnx_ir`` models with symbolic B, T, S: the master graphs.

The step program's graphs (accept, fill, commit) hardly depend on the model; :func:`write_program` writes them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from specexport.contract import tensors
from specexport.contract.engines import Accept, AcceptRule, Commit, Fill, ProgramGraph
from specexport.contract.manifest import filled_trees, fills
from specexport.contract.methods import Method
from specexport.contract.model import OPSETS, CacheLayer, LoweredAs, StateLayer
from specexport.contract.signature import (
    COMMIT,
    STEP_INPUTS,
    accept_signature,
    cache_outputs,
    caches,
    cells,
    embedding_inputs,
    fill_signature,
    known_tokens,
    new_states,
    states,
)
from specexport.contract.tensors import Tensor
from specexport.exporter.checkpoints.quiet import gc_paused, quiet
from specexport.exporter.fast_trace import fast_trace
from specexport.exporter.pipeline import export_passes, trace_passes
from specexport.exporter.trace_cache import cached_trace
from specexport.graphs.ops import translations
from specexport.graphs.program import AcceptModule, CommitModule, FillModule, GreedyModule, TypicalModule
from specexport.graphs.propose import DraftPass
from specexport.graphs.rotary import fused_rotary
from specexport.graphs.step import StepModule

PROGRAM_OPSET = 18
"""Opset of the accept and fill graphs, all of whose operators have CUDA kernels in ONNX Runtime. Equal changed in opset
19, ReduceMax and ReduceMin in 20, and their new versions got kernels late."""
_FOLDER = "program"
_SIZES = {"B": 2, "R": 3, "N-1": 4, "T": 5, "N": 5, "C": 6, "K": 7, "S": 24, "V": 40}
"""Sizes to trace with. Within a graph they differ from each other, and from 0 and 1, on which torch.export would
specialize."""
Inputs = Sequence[Tensor | Sequence[Tensor]]
"""A module's inputs in the order of its parameters; a sequence stands for a parameter that is a list of tensors."""
PASS_INPUTS = (tensors.INPUT_IDS, tensors.LAST_ROW, tensors.UNIFORM.shaped("B"), tensors.PAST_LENGTH)
"""The first inputs of every draft's pass."""


def trace_step(module: StepModule, cache: Sequence[CacheLayer], embedding_size: int | None = None) -> ir.Model:
    """The step graph of a target, or of a draft with Medusa heads.

    With an ``embedding_size`` H it can also read embeddings instead of tokens.
    """
    layers = list(module.states.values())
    inputs: Inputs = [*STEP_INPUTS, _past(cache, layers), *embedding_inputs(embedding_size)]
    outputs = [*module.output_names, *cache_outputs(cache, layers, module.lowering, "T")]
    return trace_module(module, inputs, outputs, module.lowering, rotary=module.model)


def trace_draft_pass(draft: DraftPass, cache: Sequence[CacheLayer], lowering: LoweredAs = "native") -> ir.Model:
    """A pass of a draft, which becomes a loop's body.

    Its inputs are the propose graph's and the rows of earlier passes (:func:`row_inputs`).
    """
    layers = list(draft.states.values())
    rows = row_inputs(cache, layers)
    inputs: Inputs = [*PASS_INPUTS, tensors.SAMPLING, _past(cache, layers), rows]
    outputs = [*tensors.DRAFTED, *(f"{row}.grown" for row in rows)]
    return trace_module(draft, inputs, outputs, lowering, rotary=draft.model)


def trace_accept(rule: AcceptRule, max_children: int, candidates: int) -> ir.Model:
    """The accept graph of a rule.

    ``max_children`` and ``candidates``, the number of tokens in the support of q, matter only to lossless acceptance.
    """
    modules: dict[AcceptRule, Callable[[], torch.nn.Module]] = {
        "greedy": GreedyModule,
        "lossless": lambda: AcceptModule(max_children),
        "typical": TypicalModule,
    }
    module, signature = modules[rule](), accept_signature(rule, candidates)
    return trace_module(module, signature.inputs, signature.outputs, opset=PROGRAM_OPSET)


def trace_fill(candidates: int, stages: int = 0) -> ir.Model:
    """The fill graph for M = ``candidates``, of a draft or of a speculator with ``stages``."""
    signature, count = fill_signature(candidates, stages), len(tensors.DRAFTED)
    drafted, layout = signature.inputs[: count * max(1, stages)], signature.inputs[count * max(1, stages) :]
    inputs: Inputs = [*(drafted[kind::count] for kind in range(count)), *layout]
    return trace_module(FillModule(stages), inputs, signature.outputs, opset=PROGRAM_OPSET)


def trace_commit(cache: Sequence[CacheLayer]) -> ir.Model:
    """The commit graph of a model in the native lowering."""
    return trace_module(CommitModule(), [*COMMIT.inputs, caches(cache)], cache_outputs(cache, (), "native", "T"))


def row_inputs(cache: Sequence[CacheLayer], layers: Sequence[StateLayer] = ()) -> tuple[Tensor, ...]:
    """A pass's inputs for the R tokens of earlier passes, whose rows are not in the cache yet: ``row.key.0, ...``.

    For layers without attention, they are the rows and states that the pass before returned.
    """
    keys, values = (Tensor(f"row.{kind}", "float32", ("B", "Hkv", "R", "D")) for kind in ("key", "value"))
    kept = [Tensor(name.replace("new_", "row.", 1), "float32", name.dims) for name in new_states(layers, "R")]
    return (*caches(cache, keys, values), *kept)


def _past(cache: Sequence[CacheLayer], layers: Sequence[StateLayer]) -> tuple[Tensor, ...]:
    return (*caches(cache), *known_tokens(layers), *cells(layers), *states(layers))


@gc_paused()
def trace_module(
    module: torch.nn.Module,
    inputs: Inputs,
    outputs: Sequence[str],
    lowering: LoweredAs = "native",
    *,
    opset: int | None = None,
    rotary: torch.nn.Module | None = None,
) -> ir.Model:
    """Traces a module.

    Args:
        opset: the opset; None for the lowering's.
        rotary: the submodule whose rotary embedding to fuse; None for none.
    """
    flat = [tensor for entry in inputs for tensor in ([entry] if isinstance(entry, Tensor) else entry)]
    names = list(map(str, flat))
    dimensions = _dimensions({dim for tensor in flat for dim in tensor.dims if isinstance(dim, str)})

    def example(tensor: Tensor) -> torch.Tensor:
        return torch.zeros(tensor.shape(_SIZES), dtype=getattr(torch, tensor.dtype))

    def dynamic(tensor: Tensor) -> dict[int, Any]:
        return {axis: dimensions[dim] for axis, dim in enumerate(tensor.dims) if isinstance(dim, str)}

    examples, dims = (tuple(_nested(of, entry) for entry in inputs) for of in (example, dynamic))
    outputs = list(map(str, outputs))

    def make() -> ir.Model:
        with (
            quiet(),
            fast_trace(),
            fused_rotary(rotary) if rotary is not None and lowering == "native" else contextlib.nullcontext(),
            torch.no_grad(),
        ):
            try:
                program = torch.onnx.export(
                    module,
                    examples,
                    dynamo=True,
                    opset_version=opset or OPSETS[lowering],
                    custom_translation_table=translations(),
                    dynamic_shapes=dims,
                    input_names=names,
                    output_names=outputs,
                    optimize=False,
                    verbose=False,
                )
            except torch.onnx.OnnxExporterError as error:
                raise RuntimeError(str(_root_cause(error))) from error
            assert program is not None
            export_passes(program.model, _aliases(module))
        return program.model

    module.eval()
    about = ([(tensor.dtype, tensor.dims) for tensor in flat], names, outputs, lowering, opset)
    model = cached_trace(module, about, make)
    trace_passes(model, lowering)
    return model


def _nested(of: Callable[[Tensor], Any], entry: Tensor | Sequence[Tensor]) -> Any:
    return of(entry) if isinstance(entry, Tensor) else list(map(of, entry))


def _dimensions(symbols: Collection[str]) -> dict[str, Any]:
    """``torch.export.Dim`` of each symbol; N is derived from N-1, as torch derives only larger dimensions."""
    dimensions: dict[str, Any] = {symbol: torch.export.Dim(symbol) for symbol in symbols if symbol != "N-1"}
    if "N-1" in symbols:
        drafts = torch.export.Dim("drafts")
        dimensions |= {"N-1": drafts, "N": drafts + 1}
    return dimensions


def _aliases(module: torch.nn.Module) -> dict[str, str]:
    """The names of tied parameters, mapped to the name of the first of them, which checkpoints use."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    named = module.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in named if name != first[id(parameter)]}


def _root_cause(error: BaseException) -> BaseException:
    """The original cause of an error; torch's exporter wraps it in advice to its own users."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


@functools.lru_cache(maxsize=8)
def _accept(rule: AcceptRule, max_children: int, candidates: int) -> bytes:
    """A serialized accept graph, which takes long to trace and is the same for every model."""
    return ir.to_proto(trace_accept(rule, max_children, candidates)).SerializeToString()


def write_program(
    folder: Path, methods: Sequence[Method], cache: Sequence[CacheLayer], lowering: LoweredAs
) -> tuple[ProgramGraph, ...]:
    """Traces the step program's graphs into the folder ``program`` of a bundle.

    Portable bundles have no commit graph, as the runtime copies their cache rows.
    """
    trees = [tree for method in methods for tree in method.token_trees()]
    (folder / _FOLDER).mkdir(exist_ok=True)

    def save(name: str, model: ir.Model) -> str:
        file = f"{_FOLDER}/{name}.onnx"
        ir.save(model, folder / file)
        return file

    children = max((tree.parents.count(node) for tree in trees for node in range(len(tree))), default=1)
    drawn = [method.support for method in methods if method.support]
    supports = {*drawn, *([1] if len(drawn) < len(methods) or not methods else [])}
    accepts: list[tuple[str, AcceptRule, int]] = [
        ("greedy", "greedy", 1),
        *((f"m{support}", "lossless", support) for support in sorted(supports)),
        ("typical", "typical", 1),
    ]
    graphs: list[ProgramGraph] = []
    for name, rule, support in accepts:
        file = f"{_FOLDER}/accept.{name}.onnx"
        (folder / file).write_bytes(_accept(rule, children if rule == "lossless" else 1, support))
        graphs.append(Accept(file=file, rule=rule, candidates=support, max_children=children))
    for method in methods:
        if filled_trees(method) and not any(isinstance(graph, Fill) and fills(graph, method) for graph in graphs):
            support, stages = method.support, method.drafted_stages
            file = save(f"fill.m{support}" + (f".s{stages}" if stages else ""), trace_fill(support, stages))
            graphs.append(Fill(file=file, candidates=support, stages=stages))
    if lowering == "native" and not all(tree.is_chain for tree in trees):
        graphs.append(Commit(file=save("commit", trace_commit(cache))))
    return tuple(graphs)
