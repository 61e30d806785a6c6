"""Skips steps of ``torch.onnx.export`` that change nothing for our modules.

For every export, torch reads its translations, decomposes the program, and runs it to promote types. Decomposing traces
the whole program a second time and takes a third of an export's time, although nearly all operators of a transformer
have translations of their own.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._higher_order_ops.scan import scan_op
from torch.onnx._internal.exporter import _fx_passes, _registration
from torch.onnx._internal.fx.passes import type_promotion

_ATEN = torch.ops.aten
_SAME: dict[Any, Any] = {
    _ATEN.__and__.Tensor: _ATEN.bitwise_and.Tensor,
    _ATEN.__or__.Tensor: _ATEN.bitwise_or.Tensor,
    _ATEN.contiguous.default: _ATEN.clone.default,
    _ATEN.reshape.default: _ATEN.view.default,
    _ATEN.square.default: _ATEN.pow.Tensor_Scalar,
}
"""Operators, with the operators that they decompose to."""
_WHOLE = (_ATEN.chunk.default, _ATEN.flatten.using_ints, _ATEN.narrow.default, _ATEN.unflatten.int)
"""Composite operators with a good translation."""
_CONVERTS = (_ATEN.to.dtype, _ATEN.to.device, _ATEN.to.dtype_layout)
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_CHECKS = (_ATEN._assert_scalar.default, _ATEN._assert_tensor_metadata.default)

_Passes: Any = _fx_passes
_Registry: Any = _registration.ONNXRegistry
_read_registry = functools.cache(_Registry.from_torchlib)
_Promotion: Any = type_promotion._TypePromotionInterpreter


@contextmanager
def fast_trace() -> Iterator[None]:
    """Context in which ``torch.onnx.export`` decomposes only programs that it could not translate otherwise.

    To promote types, it runs only operators with a promotion rule, as the results of others are known. Translations are
    read once per process, which takes a second. torch's cache of results without data is off: it takes a third of the
    trace of a small model, and gains nothing with sixteen layers either.
    """
    decompose, run_node = _Passes.decompose_with_registry, _Promotion.run_node

    def decompose_if_needed(program: torch.export.ExportedProgram, registry: Any) -> torch.export.ExportedProgram:
        # The bodies of scans are modules of their own.
        modules = [module for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
        graphs = [module.graph for module in modules]
        composites = torch.export.default_decompositions()
        if not all(_stays(node, registry, composites) for graph in graphs for node in graph.nodes):
            return decompose(program, registry)
        for module in modules:
            for node in list(module.graph.nodes):
                _lower(module.graph, node)
            module.graph.eliminate_dead_code()
        return program

    def promote(self: Any, node: torch.fx.Node) -> Any:
        rule = type_promotion.get_type_promotion_rule(node, self.type_promotion_table)
        has_value = node.op == "call_function" and "val" in node.meta
        return node.meta["val"] if has_value and rule is None else run_node(self, node)

    with (
        mock.patch.object(_Passes, "decompose_with_registry", decompose_if_needed),
        mock.patch.object(_Promotion, "run_node", promote),
        mock.patch.object(_Registry, "from_torchlib", staticmethod(_registry)),
        torch._dynamo.config.patch(fake_tensor_cache_enabled=False),
    ):
        yield


def _registry(opset_version: int) -> Any:
    """A copy of an opset's translations, to which the caller may add."""
    registry = _Registry()
    vars(registry).update(vars(_read_registry(opset_version=opset_version)))
    registry.functions = {target: [*overloads] for target, overloads in registry.functions.items()}
    return registry


def _stays(node: torch.fx.Node, registry: Any, composites: Container[Any]) -> bool:
    """Whether decomposing a node would do the same as :func:`_lower`; ``composites`` are not decomposed."""
    target = _SAME.get(node.target, node.target)
    if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable and _writes_unaliased(node):
        target = _functional(target)
    if node.op != "call_function" or target is operator.getitem or target in (*_CONVERTS, *_CHECKS):
        return True
    if target is _ATEN.dropout.default:
        return not node.args[2] and not _is_returned(node)
    if not isinstance(target, torch._ops.OpOverload):
        # Arithmetic of sizes; or operators that run a body, which decomposing takes apart, except scan.
        return target is scan_op or not isinstance(target, torch._ops.HigherOrderOperator)
    if target._schema.is_mutable or not (target.namespace == "onnx" or registry.is_registered(target)):
        return False
    if target is _ATEN.chunk.default and len(node.meta["val"]) != node.args[1]:
        return False  # ONNX's Split has a fixed number of parts
    return target in composites or target in _WHOLE or not target.has_kernel_for_dispatch_key(_COMPOSITE)


def _functional(target: torch._ops.OpOverload) -> Any:
    """``add.Tensor`` for ``add_.Tensor``; the operator itself if there is none."""
    packet = getattr(_ATEN, target._schema.name.partition("::")[2].removesuffix("_"), None)
    return getattr(packet, target._overloadname, target)


def _writes_unaliased(node: torch.fx.Node) -> bool:
    """Whether a node writes into a tensor without views, and keeps its type."""
    written, *others = node.args
    if not isinstance(written, torch.fx.Node) or not _is_unaliased(written):
        return False
    kind = written.meta["val"].dtype
    values = [other.meta["val"] for other in others if isinstance(other, torch.fx.Node)]
    kinds = [value.dtype for value in values if isinstance(value, torch.Tensor)]
    return all(other == kind or (kind.is_floating_point and not other.is_floating_point) for other in kinds) and all(
        user is node or node < user or _is_unaliased(user) for user in written.users
    )


def _is_unaliased(node: torch.fx.Node) -> bool:
    """Whether a node's results share no memory with its inputs; each of several results must have a single getitem."""
    target = node.target
    if target is operator.getitem:
        several = node.args[0]
        assert isinstance(several, torch.fx.Node)
        return _is_unaliased(several) and [user.args for user in several.users].count(node.args) == 1
    return isinstance(target, torch._ops.OpOverload) and all(
        result.alias_info is None for result in target._schema.returns
    )


def _is_returned(node: torch.fx.Node) -> bool:
    """Whether a node is a result of the program, which has its name."""
    return any(user.op == "output" for user in node.users)


def _lower(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
        written = node.args[0]
        assert isinstance(written, torch.fx.Node)
        written.replace_all_uses_with(node, lambda user: node < user)
        node.target = _functional(node.target)
    if node.target is _ATEN.reshape.default:  # a size of -1 is ambiguous if another is 0
        source, sizes = node.args
        dims = zip(sizes, node.meta["val"].shape, strict=True)  # type: ignore[arg-type]
        node.args = (source, [number if isinstance(number, int) else size for size, number in dims])
    if node.target is _ATEN.square.default:
        node.args = (*node.args, 2)
    node.target = _SAME.get(node.target, node.target)
    if node.target in _CHECKS:
        graph.erase_node(node)
    elif node.target is _ATEN.dropout.default:
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        graph.erase_node(node)
    elif node.target in _CONVERTS:
        source, result = node.args[0], node.meta["val"]
        assert isinstance(source, torch.fx.Node)
        if source.meta["val"].dtype == result.dtype and not _is_returned(node):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
        else:
            node.target, node.args, node.kwargs = _ATEN._to_copy.default, (source,), {"dtype": result.dtype}
