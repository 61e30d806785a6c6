"""Simplifies a traced graph by onnxscript's optimizer, and names its weights."""

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
"""Largest number of elements of a weight that is folded or compared; graphs do not depend on larger weights."""
_TAKEN_FOR_ZERO = 1e-8 * 1.01
"""The optimizer drops scalars of at most 1e-8, in float32, as if they were zero."""
_PREFIXES = ("model.", "additions.")
"""Prefixes that traced modules add to the names in checkpoints."""


def _split_slices() -> rewriter.RewriteRule:
    """The rule that turns two slices into a Split, tried only at a Slice.

    It searches the whole graph at every node, which would take most of the time in deep models.
    """
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
    """Gives tiny scalar constants an axis, so that the optimizer does not take them for zero and drop them."""
    for node in model.graph.all_nodes():
        value = node.attributes.get("value") if node.op_type == "Constant" else None
        if value is not None:
            array = value.as_tensor().numpy()
            if array.dtype == np.float32 and array.ndim == 0 and 0 < abs(float(array)) <= _TAKEN_FOR_ZERO:
                node.attributes["value"] = ir.AttrTensor("value", ir.Tensor(array.reshape(1)))
                node.outputs[0].shape = ir.Shape([1])


def name_weights(model: ir.Model, aliases: Mapping[str, str]) -> None:
    """Renames the initializers of a traced and optimized graph.

    Parameters lose the prefixes of the traced module. A constant folded from a single parameter (Gemma's norms are
    1 + weight) gets the parameter's name with the suffix ``.folded``. ``aliases`` maps names in the traced module to
    preferred names of the same parameters.
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
