"""Targets that are split among processes: their texts, and what becomes of them when one of the processes ends."""

import json
import mmap
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specexport import LLM
from specexport.contract.errors import BackendError, BuildError, BundleError
from specexport.contract.manifest import MANIFEST_NAME
from specexport.contract.reading import read_manifest
from specexport.exporter.build import build
from specexport.exporter.checkpoints.checkpoint import load_checkpoint
from specexport.exporter.checkpoints.split import require_split_parity
from specexport.exporter.options import BuildOptions
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.backends import ranks as runtime_ranks
from specexport.runtime.backends.ranks import ORPHANED
from specexport.runtime.speculative import PLAIN
from tests.checkpoints import GROUPED, make_checkpoint
from tests.manifests import put
from tests.ranks import followers, split_bundle
from tests.streams import started, tokens_of
from tests.threads import JOIN, wait_until

pytestmark = pytest.mark.exporter

PROMPTS = [[5, 6, 7, 5, 6, 7, 9], [11, 4, 8], list(range(3, 120))]
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=1)
Built = Callable[[str, int, str], Path]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A bundle of a family with a draft, for so many ranks, in a precision."""
    return partial(split_bundle, tmp_path_factory.mktemp("ranks"), max_seq_len=256)


@pytest.fixture
def split(built: Built) -> Iterator[Engine]:
    with Engine.load(built("llama", 2, "fp32"), threads=2, calibrate=False) as engine:
        yield engine


@pytest.mark.parametrize(
    ("family", "ranks", "precision"),
    [
        ("llama", 2, "fp32"),
        ("qwen2", 2, "fp32"),  # biases, tied embeddings
        ("gemma2", 4, "fp32"),  # scaled embeddings, capped logits
        ("qwen3", 2, "int8"),
        ("qwen3", 2, "int4"),
    ],
)
def test_texts_are_those_of_one_process(built, family, ranks, precision):
    """In fp32 token for token the whole model's; and whatever is stored, speculation changes no bit of them."""
    alone, split = built(family, 1, precision), built(family, ranks, precision)
    texts, scores = [], []
    for bundle in (alone, split):
        with Engine.load(bundle, threads=2, calibrate=False) as engine:
            plain = [engine.generate(prompt, GREEDY, PLAIN) for prompt in PROMPTS]
            for method in ("draft_model", "ngram", "suffix"):
                streams = started(engine.stream(prompt, GREEDY, method) for prompt in PROMPTS)  # two run at once
                for stream, expected in zip(streams, plain, strict=True):
                    assert tokens_of(stream) == expected.token_ids
            texts.append([entry.token_ids for entry in plain])
            scores.append([entry.logprob for text in plain for entry in text.logprobs])
    assert len(texts[1][0]) == 40
    if precision == "fp32":  # elsewhere a share of a matrix may be rounded by other blocks
        assert texts[0] == texts[1]
        np.testing.assert_allclose(scores[0], scores[1], atol=1e-4)


def test_verify_runs_every_rank(built, cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    bundle = built("llama", 2, "fp32")
    cli("verify", bundle)
    assert "split among 2 processes" in cli("inspect", bundle).out


def test_mixtures_are_split_by_the_columns_of_their_experts(tmp_path):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    make_checkpoint(tmp_path / "mixture", "qwen3_moe", **GROUPED, head_dim=16, **experts)
    require_split_parity(load_checkpoint(str(tmp_path / "mixture")), 2)
    options = {"max_seq_len": 128, "max_batch_size": 1}
    texts = []
    for ranks in (1, 2):
        build(BuildOptions(str(tmp_path / "mixture"), tmp_path / str(ranks), tensor_parallel=ranks, **options))
        with Engine.load(tmp_path / str(ranks), threads=1, calibrate=False) as engine:
            texts.append(engine.generate(PROMPTS[0], GREEDY).token_ids)
    assert texts[0] == texts[1]


def test_a_rank_that_ends_ends_the_others(split):
    processes = followers()
    assert len(processes) == 1
    stream = split.stream(PROMPTS[0], GREEDY.replace(max_tokens=200))
    next(stream)
    os.kill(processes[0], signal.SIGKILL)
    with pytest.raises(BackendError, match=r"rank 1 ended by signal 9 of the 2 processes.*Load the bundle again"):
        list(stream)
    with pytest.raises(BackendError, match="rank 1 ended"):
        split.generate(PROMPTS[0], GREEDY)
    assert followers() == []


def test_a_silent_rank_counts_as_lost(built, monkeypatch):
    monkeypatch.setattr(runtime_ranks, "_TIMEOUT", 1.0)
    monkeypatch.setattr(runtime_ranks, "_SHUTDOWN", 0.1)
    with Engine.load(built("llama", 2, "fp32"), threads=2, calibrate=False) as engine:
        (process,) = followers()
        os.kill(process, signal.SIGSTOP)
        with pytest.raises(BackendError, match="rank 1 has been silent for 1 seconds"):
            engine.generate(PROMPTS[0], GREEDY)
        assert followers() == []


def test_ranks_end_with_the_first(built):
    """Whether it closes its engine, only ends, or is killed."""
    code = (
        "import sys, time; from specexport.runtime import Engine\n"
        f"engine = Engine.load({str(built('gemma2', 4, 'fp32'))!r}, threads=1, calibrate=False)\n"
        "print('there', flush=True); sys.stdin.read()"
    )
    for ending in (None, signal.SIGKILL):
        pipe = subprocess.PIPE
        first = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True)
        assert first.stdout.readline() == "there\n"
        processes = followers(first.pid)
        assert len(processes) == 3
        if ending is not None:
            first.send_signal(ending)
        first.stdin.close()
        first.wait(JOIN)
        for folder in (Path(f"/proc/{process}") for process in processes):
            wait_until(lambda folder=folder: not folder.exists(), "a rank is left")
        first.stdout.close()


def test_large_parts_are_combined_piece_by_piece(monkeypatch):
    monkeypatch.setattr(runtime_ranks, "_BLOCK", 8)
    memory, ends = mmap.mmap(-1, 2 * 2 * 8 * 4), socket.socketpair()
    groups = [runtime_ranks.ProcessGroup(rank, {1 - rank: ends[rank]}, memory) for rank in range(2)]
    parts = np.random.default_rng(0).random((2, 3, 7), np.float32)

    def together(rank: int) -> list[np.ndarray[Any, Any]]:
        results = []
        for name, columns in (("sum.0", 7), ("join.1", 14), ("sum.2", 7)):
            results.append(np.empty((3, columns), np.float32))
            groups[rank](name, parts[rank], results[-1])
        return results

    with ThreadPoolExecutor(2) as pool:
        for wholes in pool.map(together, range(2)):
            for whole, expected in zip(wholes, (parts.sum(0), np.concatenate(parts, 1), parts.sum(0)), strict=True):
                np.testing.assert_array_equal(whole, expected)
    for end in ends:
        end.close()


def test_unsplittable_models_are_refused(built, tmp_path):
    built("llama", 1, "fp32")
    target = str(built("llama", 1, "fp32").parent / "llama")
    phi3 = make_checkpoint(tmp_path / "phi3", "phi3", num_key_value_heads=4)
    hybrid = make_checkpoint(tmp_path / "lfm2", "lfm2")
    for options, words in (
        ({"target": target, "tensor_parallel": 3}, "it has 4 key/value heads; choose a number that divides them"),
        ({"target": target, "tensor_parallel": 0}, "tensor_parallel is 0; expected a whole number from 1 to 16"),
        ({"target": target, "tensor_parallel": 2, "methods": ("self_draft:1",)}, "layers of the target"),
        ({"target": str(phi3), "tensor_parallel": 2}, "model family 'phi3' cannot be split among 2 ranks"),
        ({"target": str(hybrid), "tensor_parallel": 2}, "it has layers without attention"),
    ):
        with pytest.raises(BuildError, match=words):
            build(BuildOptions(output=tmp_path / "out", **options))
        assert not (tmp_path / "out").exists()


def test_ranks_of_a_manifest_must_fit(built, tmp_path):
    bundle = built("llama", 2, "fp32")
    shutil.copy(bundle / MANIFEST_NAME, tmp_path)
    first, second = json.loads((bundle / MANIFEST_NAME).read_text())["target"]["ranks"]
    for ranks, words in (
        ([first], "two or more"),
        ([first, second | {"segments": second["segments"][:-1]}], "as many segments each"),
        ([first, first, second], "an equal share of its heads"),
        ([first, second | {"weights": "../weights.bin"}], "not listed under files"),
    ):
        put(tmp_path, "target.ranks", ranks)
        with pytest.raises(BundleError, match=words):
            read_manifest(tmp_path)


def test_llm_splits_a_model(built, monkeypatch, tmp_path):
    monkeypatch.setenv("SPECEXPORT_CACHE", str(tmp_path))
    target = built("llama", 1, "fp32").parent / "llama"
    with LLM(target, tensor_parallel_size=2, max_model_len=128, calibrate=False) as llm:
        assert "2 ranks" in llm._frontend.engine.backend.device
        (split,) = llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False)
    with Engine.load(built("llama", 1, "fp32"), calibrate=False) as engine:
        assert split.outputs[0].token_ids == engine.generate(PROMPTS[0], GREEDY, PLAIN).token_ids


def test_a_message_that_the_first_rank_could_not_finish_ends_a_rank_quietly():
    words = [sys.executable, "-m", "specexport.runtime.backends.follower"]
    for message in (b"", pickle.dumps(["a message"])[:-3]):
        ended = subprocess.run(words, input=message, capture_output=True, check=False)
        assert (ended.returncode, ended.stderr) == (ORPHANED, b"")
