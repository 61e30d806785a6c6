"""Keeps epsilons of at most 1e-8, which the optimizer would take for zero and drop."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

_TAKEN_FOR_ZERO = 1e-8


def keep_epsilons(model: ir.Model) -> None:
    """Gives tiny scalar constants one axis: the optimizer looks for scalars alone, and sums broadcast either way.

    To be called before the optimizer.
    """
    # A scalar that is only almost 1e-8 in float32 is taken for zero as well.
    for node in model.graph.all_nodes():
        value = node.attributes.get("value") if node.op_type == "Constant" else None
        if value is not None:
            array = value.as_tensor().numpy()
            if array.dtype == np.float32 and array.ndim == 0 and 0 < abs(float(array)) <= _TAKEN_FOR_ZERO * 1.01:
                node.attributes["value"] = ir.AttrTensor("value", ir.Tensor(array.reshape(1)))
                node.outputs[0].shape = ir.Shape([1])
