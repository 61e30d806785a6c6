"""Quantized targets say bit for bit the same one token at a time and several at a time.

Integer kernels round activations, so sums that differ in their last bit upstream become logits that differ in their
second digit. Speculation is lossless for such targets only because no sum depends on how many tokens a step has.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specexport.contract import tensors
from specexport.runtime.buffers import buffers
from specexport.runtime.bundle import Bundle
from specexport.runtime.graph import Graph
from specexport.runtime.opening import open_graph
from tests.checkpoints import VOCAB, make_checkpoint
from tests.ways import ways

pytestmark = pytest.mark.exporter

WIDTH, TOKENS = 5, 60


def _avx512_vnni() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "avx512_vnni" in cpuinfo.read_text(encoding="utf-8")


@pytest.fixture(scope="module", params=["int8", "int4"])
def quantized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from specexport.exporter.build import build
    from specexport.exporter.options import BuildOptions

    folder = tmp_path_factory.mktemp(request.param)
    model = make_checkpoint(folder / "llama", "llama")
    return build(
        BuildOptions(str(model), folder / "bundle", ways(draft=model, sizes=(WIDTH - 1,)), precision=request.param)
    )


def logits_of(graph: Graph, text: np.ndarray, width: int) -> np.ndarray:
    """Logits after every token of the text, ``width`` tokens a step."""
    found = []
    for past in range(0, len(text), width):
        given = graph.inputs(width, width)
        given[tensors.INPUT_IDS][0] = text[past : past + width]
        given[tensors.POSITION_IDS][0] = past + np.arange(width)
        given[tensors.PAST_LENGTH][0] = past
        found.append(graph.run(width, width)[tensors.LOGITS][0].copy())
    return np.concatenate(found)


@pytest.mark.skipif(not _avx512_vnni(), reason="which kernels are row-exact is only known for AVX-512 VNNI")
@pytest.mark.parametrize("threads", [1, 2])
def test_one_token_or_several_make_the_same_logits(quantized: Path, threads: int) -> None:
    bundle = Bundle.open(quantized)
    target = bundle.manifest.target
    text = np.random.default_rng(0).integers(3, VOCAB, TOKENS)
    one, several = (
        logits_of(open_graph(bundle, target, 1, buffers(bundle.manifest.target_signature), threads), text, width)
        for width in (1, WIDTH)
    )
    np.testing.assert_array_equal(one, several)


def test_the_build_says_what_rounding_did(quantized: Path) -> None:
    precision = Bundle.open(quantized).manifest.target.precision
    assert precision.logits_rms_error is not None
    assert precision.same_choice is not None
    low, high = (0.005, 0.15) if precision.weights == "int8" else (0.05, 0.9)
    assert low < precision.logits_rms_error < high
    assert precision.same_choice > 0.1
