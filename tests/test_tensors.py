"""Tensors are declared once, and docs/graph-contract.md shows the declarations."""

import numpy as np
import pytest

from specexport.contract import tensors
from specexport.contract.shapes import ShapePoint
from specexport.contract.signature import accept_signature, propose_signature, step_signature
from specexport.contract.tensors import DECLARED, Tensor


@pytest.mark.exporter
def test_every_tensor_has_a_meaning_and_is_on_the_page():
    from scripts.docs import TENSOR_TABLES

    assert all(tensor.meaning for tensor in DECLARED.values())
    assert {str(tensor) for table in TENSOR_TABLES.values() for tensor in table} == DECLARED.keys()


def test_a_tensor_is_its_name():
    key = tensors.PAST_KEY.at(3).sized(Hkv=2, D=4)
    assert key == "past_key.3" and {"past_key.3": 1}[key] == 1 and type(str(key)) is str
    assert key.shape({"B": 1, "S": 8}) == (1, 2, 8, 4) and key.dtype == "float32"
    assert tensors.PAST_KEY.dims == ("B", "Hkv", "S", "D")


def test_a_shape_without_a_size_is_refused():
    with pytest.raises(KeyError, match="V"):
        tensors.LOGITS.zeros({"B": 1, "R": 2})


def test_buffers_hold_valid_inputs_from_the_start():
    inputs, outputs = propose_signature(4).buffers(ShapePoint(2, 3, 128, 0, 5))
    assert inputs["num_draft_tokens"] == 5 and inputs["last_row"].tolist() == [2, 2]
    assert inputs["temperature"].tolist() == [1, 1] and inputs["top_k"].tolist() == [1, 1]
    assert inputs["uniform"].shape == (2, 5) and outputs["draft_probs"].shape == (5, 2, 4)
    assert not any(array.any() for array in outputs.values())
    steps, _ = step_signature([tensors.LOGITS.sized(V=9)], 6).buffers(ShapePoint(1, 3, 128, 3))
    assert np.array_equal(steps["tree_mask"], np.tri(3, dtype=bool)[None]) and steps["logits_rows"].tolist() == [
        [0, 1, 2]
    ]
    assert steps["inputs_embeds"].shape == (1, 3, 6) and steps["embeds_mask"].dtype == np.bool_
    assert all(type(name) is str for name in (*inputs, *outputs, *steps))


@pytest.mark.parametrize(("rule", "noise"), [("greedy", None), ("lossless", (1, 4)), ("typical", (1, 1))])
def test_accept_graphs_take_what_their_rule_reads(rule, noise):
    sizes = {"B": 1, "N": 4, "N-1": 3, "V": 9}
    arrays: dict[Tensor, np.ndarray] = {t: t.array(sizes) for t in accept_signature(rule, 2).inputs}
    assert arrays[tensors.PARENTS].tolist() == [[-1, 0, 1, 2]]
    assert (arrays[tensors.UNIFORM].shape if tensors.UNIFORM in arrays else None) == noise
    if rule == "lossless":
        assert arrays[tensors.DRAFT_IDS].tolist() == [[[0, 1]] * 3]
        assert arrays[tensors.DRAFT_PROBS].tolist() == [[[1, 0]] * 3]
