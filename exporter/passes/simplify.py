"""Runs onnxscript's optimizer, and names weights afterwards.

The optimizer's rule for pairs of slices searches the whole graph at every node, which in deep models takes longer than
everything else.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
from onnxscript import optimizer, rewriter
from onnxscript.optimizer import FOLDED_FROM_KEY
from onnxscript.rewriter.rules import common

from specexport.exporter.passes.linear import transposes_weight

_ROUNDS = 2
LARGEST_FOLDED = 1 << 13
"""Largest size of a weight whose numbers a graph may depend on; larger ones are never folded or compared."""
_TAKEN_FOR_ZERO = 1e-8
_PREFIXES = ("model.", "additions.")
"""Prefixes that traced modules add to the names in checkpoints."""


def _split_slices() -> rewriter.RewriteRule:
    """The rule that turns two slices into a Split, tried only at a Slice."""
    rule = copy.copy(common.slice_split_rule)
    vars(rule)["try_rewrite"] = lambda model, graph, node, **how: (
        common.slice_split_rule.try_rewrite(model, graph, node, **how) if node.op_type == "Slice" else None
    )
    return rule


_RULES = rewriter.RewriteRuleSet(
    [_split_slices() if rule is common.slice_split_rule else rule for rule in rewriter._DEFAULT_REWRITE_RULES]
)


def simplify(model: ir.Model) -> None:
    """Folds constants, removes nodes without effect, and lifts constants into initializers, in place."""
    keep_epsilons(model)
    passes.InlinePass()(model)
    for _ in range(_ROUNDS):
        # A folded Transpose would leave a weight without a name; canonical_weights handles them all.
        folded = optimizer.fold_constants_ir(
            model,
            onnx_shape_inference=True,
            input_size_limit=LARGEST_FOLDED,
            should_fold=lambda node: False if transposes_weight(node) else None,
        )
        changed = _RULES.apply_to_model(model)
        passes.RemoveUnusedNodesPass()(model)
        if not (folded.modified or changed):
            break
    ir.passes.Sequential(
        passes.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
        passes.RemoveUnusedOpsetsPass(),
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.LiftSubgraphInitializersToMainGraphPass(),
        passes.DeduplicateInitializersPass(min(1024, LARGEST_FOLDED)),
        passes.CommonSubexpressionEliminationPass(),
        passes.OutputFixPass(),
        passes.NameFixPass(),
    )(model)


def keep_epsilons(model: ir.Model) -> None:
    """Gives scalar constants of at most 1e-8 an axis, as the optimizer treats such scalars as zero and drops them."""
    # So is a scalar whose float32 is slightly above 1e-8.
    for node in model.graph.all_nodes():
        value = node.attributes.get("value") if node.op_type == "Constant" else None
        if value is not None:
            array = value.as_tensor().numpy()
            if array.dtype == np.float32 and array.ndim == 0 and 0 < abs(float(array)) <= _TAKEN_FOR_ZERO * 1.01:
                node.attributes["value"] = ir.AttrTensor("value", ir.Tensor(array.reshape(1)))
                node.outputs[0].shape = ir.Shape([1])


def name_weights(model: ir.Model, aliases: Mapping[str, str]) -> None:
    """Renames the initializers of a graph that was just traced and optimized.

    Parameters lose the traced module's prefixes. A constant folded from a single parameter (Gemma's norms are
    1 + weight) is named after it, with the suffix ``.folded``. ``aliases`` maps names in the traced module to other
    names of the same parameters, which are used instead.
    """
    for value in list(model.graph.initializers.values()):
        name = _in_checkpoint(aliases.get(value.name or "", value.name)) or _folded(value.meta.get(FOLDED_FROM_KEY, ()))
        if name is not None:
            value.name = _free(model.graph, name)


def _in_checkpoint(name: str | None) -> str | None:
    """A parameter's name in the checkpoint; None for other values."""
    return next((name.removeprefix(prefix) for prefix in _PREFIXES if name and name.startswith(prefix)), None)


def _folded(sources: Iterable[str]) -> str | None:
    parameters = [name for name in map(_in_checkpoint, sources) if name is not None]
    return f"{parameters[0]}.folded" if len(parameters) == 1 else None


def _free(graph: ir.Graph, name: str) -> str:
    number, free = 1, name
    while free in graph.initializers:
        number += 1
        free = f"{name}.{number}"
    return free
