"""For tests of drafts that see the target's hidden states: formulas, runs of their graphs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
import torch

from specexport.contract import tensors
from specexport.contract.methods import Method
from specexport.contract.shapes import ShapePoint
from specexport.runtime import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
_CANDIDATES, _UNIFORM, _ROWS = 64, 0.7, 32


class Formulas:
    """Parts of a layer by the papers' formulas, for one row.

    Attributes:
        weights: tensors by name.
        epsilon: of RMS norms.
        theta: of rotary embeddings.
        share: of each head's channels that are rotated, the first ones.
    """

    weights: dict[str, torch.Tensor]
    epsilon: float
    theta: float
    share: float = 1.0

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.epsilon) * self.weights[f"{name}.weight"]

    def rotated(self, x: torch.Tensor, position: int) -> torch.Tensor:
        half = int(x.shape[-1] * self.share) // 2
        angle = position * self.theta ** (-torch.arange(half) / half)
        first, second, others = x[:, :half], x[:, half : 2 * half], x[:, 2 * half :]
        turned = [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()]
        return torch.cat([*turned, others], 1)


class TwoSlots:
    """A propose graph in a bare session, with two slots: the first is greedy, the second samples.

    Args:
        graph: the propose graph.
        method: its method.
        states: the target's states ``[2,N,H]`` at the tokens of two texts.
        write_ids: writes what the graph reads beside states into a run's inputs, for a slot, its past rows and its
            new ones.
    """

    def __init__(
        self,
        graph: ir.Model,
        folder: Path,
        method: Method,
        states: npt.NDArray[np.float32],
        write_ids: Callable[[dict[str, Any], int, int, int], None],
    ) -> None:
        ir.save(graph, folder / "propose.onnx")
        self._session = onnxruntime.InferenceSession(folder / "propose.onnx")
        self._make = method.signature.buffers
        self._states, self._write_ids = states, write_ids
        self._outputs = [tensor.name for tensor in self._session.get_outputs()]
        caches = [tensor for tensor in self._session.get_inputs() if tensor.name.startswith(tensors.CACHES)]
        self._caches = {kept.name: np.zeros((2, kept.shape[1], _ROWS, kept.shape[3]), np.float32) for kept in caches}

    def run(
        self, width: int, drafts: int, pasts: tuple[int, int], counts: tuple[int, int], **more: Any
    ) -> dict[str, Any]:
        """Runs the graph on so many new rows behind past ones, padded to a width; its outputs by name."""
        inputs, _ = self._make(ShapePoint(2, width, _ROWS, 0, drafts))
        for slot, (past, count) in enumerate(zip(pasts, counts, strict=True)):
            self._write_ids(inputs, slot, past, count)
            inputs[tensors.LAYER_STATES][slot, :count] = self._states[slot, past : past + count]
            inputs[tensors.LAYER_STATES][slot, count:] = 9.0  # padding
            inputs[tensors.PAST_LENGTH][slot], inputs[tensors.LAST_ROW][slot] = past, count - 1
        inputs[tensors.UNIFORM][1], inputs[tensors.TOP_K][1] = _UNIFORM, 0
        for name, value in more.items():
            inputs[name][:] = value
        outputs = dict(zip(self._outputs, self._session.run(self._outputs, inputs | self._caches), strict=True))
        for name, rows in self._caches.items():
            present = outputs.get(name.replace("past", "present"))
            new = outputs[name.replace("past", "new")] if present is None else present
            for slot, (past, count) in enumerate(zip(pasts, counts, strict=True)):
                start = 0 if present is None else past
                rows[slot, :, past : past + count] = new[slot, :, start : start + count]
        return outputs


def require_drafted(
    outputs: dict[str, Any], depth: int, slot: int, logits: torch.Tensor, target_ids: torch.Tensor | None = None
) -> int:
    """Checks candidates, q and the token of a depth of a slot of :class:`TwoSlots`; returns the token.

    Args:
        outputs: of a run.
        depth: of the draft token, from 0.
        slot: the first or second.
        logits: by the formulas, ``[draft_vocab]``.
        target_ids: the target's number of each of the draft's tokens; None where they are the same.
    """
    ids, probs = outputs[tensors.DRAFT_IDS][depth, slot], outputs[tensors.DRAFT_PROBS][depth, slot]
    token, best = int(outputs[tensors.DRAFT_TOKENS][depth, slot]), logits.topk(_CANDIDATES)
    candidates = best.indices if target_ids is None else target_ids[best.indices]
    q = best.values.softmax(0).numpy() if slot else np.eye(_CANDIDATES)[0]
    np.testing.assert_array_equal(ids[:5], candidates[:5])
    np.testing.assert_allclose(probs, q, atol=2e-4)
    assert token == (ids[int((probs.cumsum() - probs <= _UNIFORM).nonzero()[0][-1])] if slot else ids[0])
    return token
