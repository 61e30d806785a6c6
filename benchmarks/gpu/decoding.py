"""Decoding with a benchmark-size pair on a GPU: against the memory's bandwidth, plain decoding and transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import same_texts, speed
from benchmarks.gpu.checks import Check, greedy
from benchmarks.gpu.timing import on_device, step_milliseconds, transformers_speed
from specexport.contract.engines import ComputedIn
from specexport.contract.model import Model
from specexport.runtime import Engine
from specexport.runtime.speculative import PLAIN

FLOOR, SPEED_UP, ACCEPTANCE, OVER_TRANSFORMERS = 0.7, 2.0, 0.75, 2.0
_BYTES: dict[ComputedIn, int] = {"fp32": 4, "fp16": 2, "bf16": 2}
_FLOATS = ("fp32", "fp16", "bf16")


@dataclass(frozen=True)
class Pair:
    """A target and a draft, and a bundle of them.

    Attributes:
        target: the checkpoint.
        draft: likewise.
        folder: the bundle.
        drafts: K.
        compute: what the bundle is computed in.
    """

    target: Path
    draft: Path
    folder: Path
    drafts: int
    compute: ComputedIn


def benchmark(pair: Pair, backend: str, texts: Sequence[str], bandwidth: float) -> list[Check]:
    """Measures a pair.

    Args:
        pair: what to run.
        backend: that runs it.
        texts: prompts.
        bandwidth: bytes a second that the device's memory reads and writes.
    """
    with Engine.load(pair.folder, backend=backend, check_hashes=False) as engine:
        prompts = [engine.encode(text)[:128] for text in texts]
        graph = on_device(engine).graphs[0]
        milliseconds = step_milliseconds(graph, 200)
        read = weights_read(pair.folder, engine.manifest.target, pair.compute) + graph.cache_bytes
        floor = 1e3 * read / bandwidth
        runs = {
            speculation: [engine.generate(prompt, greedy(96), None if speculation else PLAIN) for prompt in prompts]
            for speculation in (True, False)
        }
        plain, ours = speed(runs[False]), speed(runs[True])
        rate = sum(run.stats.accepted for run in runs[True]) / sum(run.stats.drafted for run in runs[True])
        equal = same_texts(runs[True], runs[False])
        gpu = engine.backend.execution
    gain = ours / plain
    checks = [
        Check(backend, "plain step over bandwidth floor", floor / milliseconds >= FLOOR,
              f"{floor / milliseconds:.0%} ({milliseconds:.2f} ms, {read / 1e9:.2f} GB)", f">= {FLOOR:.0%}"),
        Check(backend, "plain decoding", None, f"{plain:.1f} tokens/s"),
        Check(backend, f"speculative decoding, K = {pair.drafts}, {gpu}", None,
              f"{ours:.1f} tokens/s, acceptance {rate:.2f}"),
        Check(backend, "speculative over plain", gain >= SPEED_UP if rate >= ACCEPTANCE else None, f"{gain:.2f}x",
              f">= {SPEED_UP:g}x where acceptance >= {ACCEPTANCE:g}"),
        Check(backend, "same text with and without", equal == len(texts), f"{equal} of {len(texts)}", "all"),
    ]  # fmt: skip
    theirs = transformers_speed(pair.target, pair.draft, prompts, pair.compute, pair.drafts)
    if theirs is None:
        return [*checks, Check(backend, "transformers' assisted generation", None, "torch sees no GPU here")]
    return [
        *checks,
        Check(backend, "transformers' assisted generation", None, f"{theirs:.1f} tokens/s"),
        Check(backend, "over transformers", ours / theirs >= OVER_TRANSFORMERS, f"{ours / theirs:.2f}x",
              f">= {OVER_TRANSFORMERS:g}x"),
    ]  # fmt: skip


def weights_read(folder: Path, model: Model, compute: ComputedIn) -> int:
    """Bytes of weights a step reads: as they are stored where that is less than what they are computed in."""
    stored = (folder / model.weights).stat().st_size
    return model.parameters * _BYTES[compute] if model.precision.weights in _FLOATS else stored
