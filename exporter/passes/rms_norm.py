"""Fuses the seven primitive operators of an RMS norm in torch's export into one RMSNormalization (opset 23)."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import pattern

from specexport.exporter.passes.editing import constant


class _Norm(pattern.RewriteRuleClassBase):  # type: ignore[misc]
    """Replaces ``x / sqrt(mean(x^2) + epsilon)`` over a last axis of known size with a norm with weights of one."""

    def pattern(self, op: Any, x: Any, epsilon: Any) -> Any:
        shifted = op.Add(op.ReduceMean(op.Pow(x, 2.0), [-1]), epsilon)
        return op.Mul(x, pattern.OrValue([op.Reciprocal(op.Sqrt(shifted)), op.Pow(shifted, -0.5)]))

    def check(self, context: Any, x: ir.Value, epsilon: ir.Value) -> bool:
        self._graph, self._epsilon = context.graph_or_function, ir.convenience.get_const_tensor(epsilon)
        static = x.shape is not None and isinstance(x.shape[-1], int)
        return static and self._epsilon is not None and self._epsilon.size == 1

    def rewrite(self, op: Any, x: ir.Value, **_: Any) -> Any:
        assert x.shape is not None and self._epsilon is not None
        size, epsilon = int(str(x.shape[-1])), float(self._epsilon.numpy().item())
        ones = constant(self._graph, f"ones.{size}", np.ones(size, np.float32))
        return op.RMSNormalization(x, ones, axis=-1, epsilon=epsilon)


class _Weight(pattern.RewriteRuleClassBase):  # type: ignore[misc]
    """Makes a factor of a norm the norm's weight."""

    def pattern(self, op: Any, x: Any, ones: Any, weight: Any, epsilon: Any) -> Any:
        return op.Mul(op.RMSNormalization(x, ones, axis=-1, epsilon=epsilon), weight)

    def check(self, context: Any, ones: ir.Value, weight: ir.Value, **_: Any) -> bool:
        return weight.const_value is not None and weight.const_value.shape == ones.shape

    def rewrite(self, op: Any, x: ir.Value, weight: ir.Value, epsilon: ir.Attr, **_: Any) -> Any:
        return op.RMSNormalization(x, weight, axis=-1, epsilon=epsilon)


_RULES = [pattern.RewriteRuleSet([rule.rule()], commute=True) for rule in (_Norm, _Weight)]


def fuse_rms_norm(model: ir.Model) -> None:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis becomes ``RMSNormalization(x, weight)``.

    Norms without weights get weights of one.
    """
    for rules in _RULES:
        rules.apply_to_model(model)
