"""The states between a target's layers as outputs of its step graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from transformers import AutoModelForCausalLM

from specexport.contract import tensors
from specexport.contract.model import LoweredAs
from specexport.exporter import trace
from specexport.exporter.checkpoints.checkpoint import load_checkpoint
from specexport.graphs.layers import recorded_states
from specexport.graphs.step import StepModule
from tests.checkpoints import make_checkpoint

pytestmark = pytest.mark.exporter

TOKENS, ROWS = [5, 9, 2, 31, 7], 16


@pytest.mark.parametrize(("family", "lowering"), [("llama", "native"), ("gpt2", "native"), ("gemma2", "portable")])
def test_steps_output_layer_states(tmp_path: Path, family: str, lowering: LoweredAs) -> None:
    loaded = load_checkpoint(str(make_checkpoint(tmp_path / family, family)))
    names = [tensors.LAYER_STATES.at(count) for count in (0, 1, 2)]
    module = StepModule(loaded.model, outputs=[tensors.LOGITS, *names], lowering=lowering)
    ir.save(trace.trace_step(module, loaded.cache), tmp_path / "step.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "step.onnx")
    assert [tensor.name for tensor in session.get_outputs()][:4] == [tensors.LOGITS, *names]
    fields = {
        tensors.INPUT_IDS: np.array([TOKENS]),
        tensors.POSITION_IDS: np.arange(len(TOKENS))[None],
        tensors.TREE_MASK: np.tri(len(TOKENS), dtype=bool)[None],
        tensors.PAST_LENGTH: np.array([0]),
        tensors.LOGITS_ROWS: np.array([[len(TOKENS) - 1]]),
    }
    for layer, shape in enumerate(loaded.cache):
        for name, size in ((tensors.PAST_KEY, shape.key_size), (tensors.PAST_VALUE, shape.value_size)):
            fields[name.at(layer)] = np.zeros((1, shape.heads, ROWS, size), np.float32)
    outputs = session.run(names, fields)

    plain = AutoModelForCausalLM.from_pretrained(tmp_path / family, attn_implementation="eager").eval()
    with torch.no_grad(), recorded_states(plain, [2]) as last:
        states = plain(torch.tensor([TOKENS]), output_hidden_states=True, use_cache=False).hidden_states
    for output, expected in zip(outputs, (states[0], states[1], last[2]), strict=True):
        np.testing.assert_allclose(output, expected.numpy(), rtol=1e-4, atol=1e-4)
    assert not np.allclose(last[2].numpy(), states[2].numpy())  # that is after the final norm


def test_layers_that_are_not_there_are_refused(tmp_path: Path) -> None:
    loaded = load_checkpoint(str(make_checkpoint(tmp_path / "llama", "llama")))
    wrong = pytest.raises(ValueError, match="it has 2 layers; expected the states after 0 to 2 of them")
    with wrong, recorded_states(loaded.model, [1, 3]):
        pass
