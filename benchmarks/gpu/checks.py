"""Whether a GPU computes what the CPU does, and decodes with speculation what it decodes without."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.gpu.timing import Watch, on_device
from specexport.contract import tensors
from specexport.contract.engines import ComputedIn
from specexport.contract.tree import TokenTree
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.buffers import buffers
from specexport.runtime.bundle import Bundle
from specexport.runtime.graph import Graph
from specexport.runtime.opening import open_graph
from specexport.runtime.speculative import PLAIN

GAP_US = 50.0
LEAST_P = 1e-4


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        backend: that ran it.
        name: what was looked at.
        passed: None where it is a measurement without a bar.
        found: what came out.
        expected: the bar.
    """

    backend: str
    name: str
    passed: bool | None
    found: str
    expected: str = ""


@dataclass(frozen=True)
class Tolerance:
    """How far a GPU may be from the fp32 of the CPU.

    Attributes:
        logits: largest difference, relative to the largest logit.
        tokens: least share of positions with the same most probable token.
        texts: whether greedy texts must be the same, which one turned tie would part.
    """

    logits: float
    tokens: float
    texts: bool


# Products are summed in other orders; half precision resolves 2^-11, bfloat16 2^-8.
TOLERANCES: dict[ComputedIn, Tolerance] = {
    "fp32": Tolerance(2e-4, 1.0, True),
    "fp16": Tolerance(2e-2, 0.98, False),
    "bf16": Tolerance(1e-1, 0.9, False),
}


def parity(folder: Path, backend: str, compute: ComputedIn, texts: Sequence[str]) -> list[Check]:
    """Logits of one text on the GPU and on the CPU, at every width, and greedy texts."""
    allowed = TOLERANCES[compute]
    with Engine.load(folder, backend="onnxruntime") as cpu, Engine.load(folder, backend=backend) as gpu:
        reference = open_graph(
            Bundle.open(folder), cpu.manifest.target, 1, buffers(cpu.manifest.target_signature), None
        )
        tokens = cpu.encode(texts[0])[:100]
        largest, scale, same, rows = 0.0, 1.0, 0, 0
        for width in widths(cpu):
            ours, theirs = (read(graph, tokens, width) for graph in (on_device(gpu).graphs[0], reference))
            largest = max(largest, float(np.abs(ours - theirs).max()))
            scale = max(scale, float(np.abs(theirs).max()))
            same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
            rows += len(ours)
        equal = sum(
            gpu.generate(text, greedy(48)).token_ids == cpu.generate(text, greedy(48)).token_ids for text in texts
        )
    found = largest / scale
    return [
        Check(backend, "largest difference of logits", found <= allowed.logits, f"{found:.1e}",
              f"<= {allowed.logits:g} of the largest"),
        Check(backend, "same most probable token", same >= allowed.tokens * rows, f"{same} of {rows}",
              f">= {allowed.tokens:.0%}"),
        Check(backend, "same greedy text as on the CPU", equal == len(texts) if allowed.texts else None,
              f"{equal} of {len(texts)}", "all" if allowed.texts else ""),
    ]  # fmt: skip


def widths(engine: Engine) -> list[int]:
    """T of the steps that give logits of all their tokens, but for plain ones; ascending."""
    points = engine.manifest.target.graph.points
    return sorted({point.tokens for point in points if point.rows == point.tokens > 1})


def read(graph: Graph, tokens: Sequence[int], width: int, past: int = 0) -> np.ndarray:
    """Reads a text ``width`` tokens at a time behind ``past`` rows: logits ``[n, V]``; a rest too short is left out."""
    found = []
    graph.shrink_cache(1)
    chain = TokenTree.chain(width)
    for start in range(0, len(tokens) - width + 1, width):
        found.append(step(graph, tokens[start : start + width], past + start, chain))
        graph.commit(0, past + start, range(width))
    return np.concatenate(found)


def step(graph: Graph, tokens: Sequence[int], past: int, tree: TokenTree) -> np.ndarray:
    """One step over the nodes of a tree behind ``past`` rows, not committed: logits ``[T, V]``."""
    width = len(tree)
    graph.reserve(past + width)
    given = graph.inputs(width, width)
    given[tensors.INPUT_IDS][0] = tokens
    given[tensors.POSITION_IDS][0] = past + tree.depths
    given[tensors.TREE_MASK][0] = tree.mask
    given[tensors.PAST_LENGTH][0] = past
    given[tensors.LOGITS_ROWS][0] = np.arange(width)
    logits: np.ndarray = graph.run(width, width)[tensors.LOGITS][0].copy()
    return logits


def tree_commit(folder: Path, backend: str, compute: ComputedIn, text: str) -> list[Check]:
    """A step over a branching tree whose last path is kept, against the same tokens read one after another."""
    with Engine.load(folder, backend=backend) as gpu:
        graph, width = on_device(gpu).graphs[0], widths(gpu)[-1]
        tree = TokenTree(tuple((node - 1) // 2 if node else -1 for node in range(width)))
        tokens = gpu.encode(text)
        past = min(len(tokens) // (3 * width), 4) * width
        nodes, after = tokens[past : past + width], tokens[past + width : past + 2 * width]
        path = tree.leaf_paths[-1]
        read(graph, tokens[:past], width)
        step(graph, nodes, past, tree)
        graph.commit(0, past, path)
        kept = step(graph, after, past + len(path), TokenTree.chain(width))
        graph.shrink_cache(1)
        read(graph, tokens[:past], width)
        chain = [nodes[node] for node in path]
        step(graph, [*chain, *after[: width - len(chain)]], past, TokenTree.chain(width))
        graph.commit(0, past, range(len(chain)))
        expected = step(graph, after, past + len(chain), TokenTree.chain(width))
    found = float(np.abs(kept - expected).max() / max(1.0, np.abs(expected).max()))
    allowed = TOLERANCES[compute].logits
    return [Check(backend, "logits behind a committed tree path", found <= allowed, f"{found:.1e}", f"<= {allowed:g}")]


def lossless(folder: Path, backend: str, texts: Sequence[str], samples: int) -> list[Check]:
    """Speculative against plain decoding on the GPU: greedily token for token, sampled by a test on two samples."""
    with Engine.load(folder, backend=backend) as engine:
        name = next(iter(engine.speculations))
        equal = sum(
            engine.generate(text, greedy(64)).token_ids == engine.generate(text, greedy(64), PLAIN).token_ids
            for text in texts
        )
        prompt = engine.encode(texts[0])[:40]
        counts = [
            Counter(
                engine.generate(prompt, _sampled(seed + 10**6 * speculation), None if speculation else PLAIN).token_ids
                for seed in range(samples)
            )
            for speculation in (True, False)
        ]
    p = same_distribution(*counts)
    return [
        Check(backend, f"{name}: greedy text equal to plain", equal == len(texts), f"{equal} of {len(texts)}", "all"),
        Check(backend, f"{name}: sampled like plain", p >= LEAST_P, f"p = {p:.3f}, {samples} each",
              f"p >= {LEAST_P:g}"),
    ]  # fmt: skip


def together(folder: Path, backend: str, slots: int, compute: ComputedIn, texts: Sequence[str]) -> list[Check]:
    """Several requests at once against each alone, by the same engine: greedy, two of three with speculation."""
    with Engine.load(folder, backend=backend, max_batch_size=slots) as engine:
        asks = [(text, greedy(24 + 8 * at), at % 3 != 2) for at, text in enumerate([*texts, *texts][: 2 * slots])]
        alone = [
            engine.generate(text, params, None if speculation else PLAIN).token_ids
            for text, params, speculation in asks
        ]
        streams = [engine.stream(text, params, None if speculation else PLAIN) for text, params, speculation in asks]
        for stream in streams:
            stream.start()
        said = [tuple(token for chunk in stream for token in chunk.token_ids) for stream in streams]
        execution = streams[0].stats.execution
    equal = sum(ours == theirs for ours, theirs in zip(said, alone, strict=True))
    # Alone they verify wider trees, which round differently: in half precision a tie may turn.
    passed = equal == len(asks) if TOLERANCES[compute].texts else None
    what = f"{slots} at once, the same texts as alone, {execution}"
    return [Check(backend, what, passed, f"{equal} of {len(asks)}", "all" if TOLERANCES[compute].texts else "")]


def same_distribution(a: Counter[tuple[int, ...]], b: Counter[tuple[int, ...]]) -> float:
    """The p-value of a chi-square test that two samples of texts come from one distribution; rare texts are one."""
    from scipy.stats import chi2_contingency

    common = [text for text in a | b if a[text] + b[text] >= 20]
    rows = np.array([[counts[text] for text in common] for counts in (a, b)])
    rest = np.array([[sum(counts.values())] for counts in (a, b)]) - rows.sum(1, keepdims=True)
    rows = np.concatenate([rows, rest], 1)
    rows = rows[:, rows.sum(0) > 0]
    return float(chi2_contingency(rows)[1]) if rows.shape[1] > 1 else 1.0


def launches(folder: Path, backend: str, texts: Sequence[str]) -> list[Check]:
    """Whether steps are captured, and how long the GPU stands still a step, between its graphs and between steps."""
    with Engine.load(folder, backend=backend) as engine:
        there = on_device(engine)
        watch = Watch(there)
        done = engine.generate(texts[0], greedy(128))
        gaps = watch.gaps()
    per_step = gaps.per_step(max(1, done.stats.steps))
    found = f"{per_step:.0f} us" + (f", {statistics.median(gaps.queued):.0f} us between graphs" if gaps.queued else "")
    captured = done.stats.execution != "plain"
    return [
        Check(backend, "capture active", captured, done.stats.execution, "captured" + f" {there.fallback}".rstrip()),
        Check(backend, "host gaps a step", per_step <= GAP_US, found, f"<= {GAP_US:g} us"),
    ]


def greedy(tokens: int) -> SamplingParams:
    """So many tokens, the most probable ones."""
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def _sampled(seed: int) -> SamplingParams:
    # Few texts are common enough to count: three tokens of the three most probable.
    return SamplingParams(max_tokens=3, temperature=1.0, top_k=3, seed=seed, ignore_eos=True)
