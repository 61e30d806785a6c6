"""The most probable tokens of vocabularies of any size, in ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from specexport.graphs.propose import most_probable

pytestmark = pytest.mark.exporter


class MostProbable(torch.nn.Module):
    def forward(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return most_probable(logits, 10)


@pytest.mark.parametrize(
    ("vocab", "block"), [(1 << 14, 128), (29 * 600, 120), (29 * 1733, 29), (16_411, None), (11, None)]
)
def test_the_most_probable_tokens_are_found_and_ties_go_to_the_lower_id(
    tmp_path: Path, vocab: int, block: int | None
) -> None:
    program = torch.onnx.export(
        MostProbable().eval(), (torch.zeros(2, 3, vocab),), dynamo=True, opset_version=20, verbose=False
    )
    program.save(tmp_path / "model.onnx")
    shapes = [value.shape for node in ir.load(tmp_path / "model.onnx").graph for value in node.outputs]
    divided = [tuple(shape) for shape in shapes if shape is not None and len(shape) > 3]
    assert divided[:1] == ([(2, 3, vocab // block, block)] if block else [])
    random, session = np.random.default_rng(vocab), ort.InferenceSession(str(tmp_path / "model.onnx"))
    for spread in (0.3, 3.0, 300.0):  # many ties, some, and few
        logits = np.rint(random.standard_normal((2, 3, vocab)) * spread).astype(np.float32)
        best, ids = session.run(None, {session.get_inputs()[0].name: logits})
        expected = np.argsort(-logits, axis=-1, kind="stable")[..., :10]
        assert np.array_equal(ids, expected)
        assert np.array_equal(best, np.take_along_axis(logits, expected, -1))
