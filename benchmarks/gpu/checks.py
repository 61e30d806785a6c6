"""Checks on a GPU: same numbers as the CPU, same texts with speculation as without, and speed."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import statistics
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.prepared import PAIRS, PLAN, WEIGHTS, K, filled
from benchmarks.gpu.timing import LaunchTimer, copy_bandwidth, graph_per_engine, on_device, uncaptured
from specexport.contract import tensors
from specexport.contract.engines import ComputedIn
from specexport.contract.model import Model
from specexport.contract.tree import TokenTree
from specexport.runtime import Completion, Engine, SamplingParams
from specexport.runtime.backend import Graph, RunShape, open_target
from specexport.runtime.backends.cuda.api import Cuda
from specexport.runtime.bundle import Bundle
from specexport.runtime.sampling import target_distribution
from specexport.runtime.speculative import PLAIN

BACKEND = "onnxruntime-cuda"
FLOOR = 0.7
"""Minimum share of the memory bandwidth that a plain step of a large model must reach."""
LEAST_GAIN = 0.97
"""Least speed of the engine's choice of how to speculate, relative to plain decoding."""
LEAKED = 4 << 20
GAP_US = 50.0
LEAST_P = 1e-4


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    Attributes:
        name: the property.
        passed: None for a measurement without a limit.
        found: the measured value.
        expected: the limit.
    """

    name: str
    passed: bool | None
    found: str
    expected: str = ""


@dataclass(frozen=True)
class Tolerance:
    """Tolerances of a GPU relative to the CPU's fp32.

    Attributes:
        logits: maximum difference, relative to the largest logit.
        tokens: minimum share of positions with the same most probable token.
        texts: whether greedy texts must be equal; one reversed tie makes them differ.
        positions: share of positions at which logits are compared, those with the smallest differences.
    """

    logits: float
    tokens: float
    texts: bool
    positions: float = 1.0


# Sums have other orders; half precision resolves 2^-11, bfloat16 2^-8.
TOLERANCES: dict[ComputedIn, Tolerance] = {
    "fp32": Tolerance(2e-4, 1.0, True),
    "fp16": Tolerance(2e-2, 0.98, False),
    "bf16": Tolerance(1e-1, 0.9, False),
}
QUANTIZED = Tolerance(5e-2, 0.95, False)
MIXTURE_POSITIONS = 0.95
"""For mixtures that do not compute in fp32. Of the dry run's, 0.3 % of tokens choose other experts in fp16, where two
are nearly equally good; a logit then differs by up to 0.3 of the largest."""


def open_gpu(folder: Path, calibrate: bool = False, **options: Any) -> Engine:
    """An engine on the GPU, which speculates by default unless it calibrates.

    Omitted weights of a bundle are generated first, and hashes not checked.
    """
    filled(folder)
    checked = not (folder / WEIGHTS).exists()
    return Engine.load(folder, backend=BACKEND, check_hashes=checked, calibrate=calibrate, **options)


def loads(folder: Path) -> list[Finding]:
    """Opens a bundle; steps of every method must give the same from this thread and from another."""
    start = time.perf_counter()
    with open_gpu(folder) as engine:
        seconds = time.perf_counter() - start
        backend, prompt = on_device(engine), engine.encode("def add(first, second):")[:16]
        captured = "graph per step" if engine.manifest.program else "graph per engine"
        texts: list[list[tuple[int, ...]]] = []

        def go() -> None:
            texts.append([engine.generate(prompt, greedy(24), way).token_ids for way in ways(engine, prompt)])

        go()
        other = threading.Thread(target=go)
        other.start()
        other.join()
        execution, fallback = backend.execution, backend.fallback
    return [
        Finding("opened", None, f"{seconds:.1f} s"),
        Finding("capture", execution == captured, f"{execution} {fallback}".rstrip(), captured),
        Finding("same texts from a second thread", len(texts) == 2 and texts[0] == texts[1],
                "same" if texts[0] == texts[-1] else "others", "same"),
    ]  # fmt: skip


def ways(engine: Engine, expected: Sequence[int]) -> list[Any]:
    """All ways of an engine to decode, plain first; the hypothesis is ``expected``."""
    methods = engine.methods.items()
    return [
        PLAIN,
        *({"hypothesis": list(expected)} if method.takes_hypothesis else name for name, method in methods),
    ]


def memory(folder: Path) -> list[Finding]:
    """The device memory of an open pair, against the estimate of ``specexport plan``.

    The estimate does not include the memory of the device's libraries.
    """
    filled(folder)
    gc.collect()  # an engine of an earlier check that holds some
    cuda = Cuda.load()
    before = cuda.memory()[0]
    with open_gpu(folder):
        taken = before - cuda.memory()[0]
    planned = sum(json.loads((folder / PLAN).read_text()).values())
    measured = f"{taken / 1e6:.1f} MB and {planned / 1e6:.1f} MB ({taken / planned - 1:+.1%})"
    return [Finding("taken, and planned", None, measured)]


def parity(folder: Path, texts: Sequence[str]) -> list[Finding]:
    """Compares logits on the GPU and on the CPU at every width, and the greedy texts of every way to decode."""
    with Engine.load(folder, backend="onnxruntime", calibrate=False) as cpu, open_gpu(folder) as gpu:
        allowed = tolerance(cpu.manifest.target)
        reference = cpu_target(folder)
        prompts = [cpu.encode(text)[: cpu.manifest.max_seq_len // 2] for text in texts]
        tokens = prompts[0][:100]
        ours, theirs = (
            np.concatenate([read(graph, tokens, width) for width in widths(cpu)])
            for graph in (on_device(gpu).graphs[0], reference)
        )
        cpu_texts = [cpu.generate(prompt, greedy(48), PLAIN).token_ids for prompt in prompts]
        here = [
            [gpu.generate(prompt, greedy(48), way).token_ids for way in ways(gpu, text)]
            for prompt, text in zip(prompts, cpu_texts, strict=True)
        ]
    difference = largest_difference(ours, theirs, allowed.positions)
    rows, same = len(ours), int((ours.argmax(-1) == theirs.argmax(-1)).sum())
    return [
        Finding("largest difference of logits", difference <= allowed.logits, f"{difference:.1e}",
                f"<= {allowed.logits:g} of the largest at {allowed.positions:.0%}"),
        Finding("same most probable token", same >= allowed.tokens * rows, f"{same} of {rows}",
                f">= {allowed.tokens:.0%}"),
        _all_equal("same greedy text as on the CPU", [plain for plain, *_ in here], cpu_texts, allowed),
        _all_equal("same greedy text as plain, with every method", [text for _, *others in here for text in others],
                   [plain for plain, *others in here for _ in others], allowed),
    ]  # fmt: skip


def _all_equal(name: str, ours: Sequence[object], theirs: Sequence[object], allowed: Tolerance) -> Finding:
    """Counts equal texts; in half precision ties may reverse at other widths, so the count is only reported."""
    equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
    passed = equal == len(ours) if allowed.texts else None
    return Finding(name, passed, f"{equal} of {len(ours)}", "all" if allowed.texts else "")


def largest_difference(ours: np.ndarray, theirs: np.ndarray, positions: float) -> float:
    """The largest difference of logits ``[n, V]`` at this share of positions, relative to the largest logit.

    It is infinite if any logit is not finite.
    """
    errors = np.sort(np.abs(ours - theirs).max(-1))
    if not np.isfinite(errors).all():
        return math.inf
    return float(errors[math.ceil(positions * len(errors)) - 1] / max(1.0, np.abs(theirs).max()))


def tolerance(target: Model) -> Tolerance:
    """The tolerance for a target: by its type, for integer weights by the CPU's rounding, and by whether it routes."""
    (engine,) = (engine for engine in target.engines if engine.runtime == BACKEND)
    allowed = QUANTIZED if target.precision.weights in ("int8", "int4") else TOLERANCES[engine.compute]
    mixture = "moe" in target.family and engine.compute != "fp32"
    return replace(allowed, positions=MIXTURE_POSITIONS) if mixture else allowed


def cpu_target(folder: Path) -> Graph:
    """The target's graph on the CPU."""
    return open_target(Bundle.open(folder, check_hashes=False))


def widths(engine: Engine) -> list[int]:
    """T of the steps that give logits of all their tokens, but for plain ones; ascending."""
    points = engine.manifest.target.graph.points
    return sorted({point.tokens for point in points if point.rows == point.tokens > 1})


def read(graph: Graph, tokens: Sequence[int], width: int, past: int = 0) -> np.ndarray:
    """Reads a text ``width`` tokens at a time after ``past`` rows: logits ``[n, V]``, without a shorter remainder."""
    parts = []
    graph.shrink_cache(1)
    chain = TokenTree.chain(width)
    for start in range(0, len(tokens) - width + 1, width):
        parts.append(step(graph, tokens[start : start + width], past + start, chain))
        graph.commit(0, past + start, range(width))
    return np.concatenate(parts)


def step(graph: Graph, tokens: Sequence[int], past: int, tree: TokenTree) -> np.ndarray:
    """One uncommitted step over the nodes of a tree after ``past`` rows: logits ``[T, V]``."""
    width = len(tree)
    graph.reserve(past + width)
    inputs = graph.inputs(RunShape(width, width))
    inputs[tensors.INPUT_IDS][0] = tokens
    inputs[tensors.POSITION_IDS][0] = past + tree.depths
    inputs[tensors.TREE_MASK][0] = tree.mask
    inputs[tensors.PAST_LENGTH][0] = past
    inputs[tensors.LOGITS_ROWS][0] = np.arange(width)
    logits: np.ndarray = graph.run(RunShape(width, width))[tensors.LOGITS][0].copy()
    return logits


def tree_commit(folder: Path, texts: Sequence[str]) -> list[Finding]:
    """Compares a step over a branching tree that keeps its last path with reading the same tokens one by one."""
    with open_gpu(folder) as gpu:
        graph, width = on_device(gpu).graphs[0], widths(gpu)[-1]
        tree = TokenTree(tuple((node - 1) // 2 if node else -1 for node in range(width)))
        tokens = gpu.encode(" ".join(texts))[: 6 * width]
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
        allowed = tolerance(gpu.manifest.target).logits
    difference = float(np.abs(kept - expected).max() / max(1.0, np.abs(expected).max()))
    return [
        Finding("logits behind a committed tree path", difference <= allowed, f"{difference:.1e}", f"<= {allowed:g}")
    ]


def together(folder: Path, texts: Sequence[str]) -> list[Finding]:
    """Compares four requests at once with each alone, greedily, two of three with speculation."""
    with open_gpu(folder, max_batch_size=4) as engine:
        prompts = [engine.encode(text)[: engine.manifest.max_seq_len // 2] for text in [*texts, *texts][:8]]
        asks = [(prompt, greedy(24 + 8 * at), at % 3 != 2) for at, prompt in enumerate(prompts)]
        alone = [engine.generate(text, params, None if spec else PLAIN).token_ids for text, params, spec in asks]
        streams = [engine.stream(text, params, None if spec else PLAIN) for text, params, spec in asks]
        for stream in streams:
            stream.start()
        streamed = [tuple(token for chunk in stream for token in chunk.token_ids) for stream in streams]
        return [_all_equal("four at once, the same texts as alone", streamed, alone, tolerance(engine.manifest.target))]


def capture(folder: Path, texts: Sequence[str], steps: int = 1000) -> list[Finding]:
    """Captured steps must equal uncaptured runs bit for bit, and must not allocate memory."""
    logits, captured_texts = [], []
    for captured in (False, True):
        with contextlib.ExitStack() as stack:
            if not captured:
                stack.enter_context(uncaptured())
            engine = stack.enter_context(open_gpu(folder))
            graph = on_device(engine).graphs[0]
            tokens = engine.encode(" ".join(texts))[:200]
            logits.append([read(graph, tokens, width) for width in widths(engine)])
            graph.shrink_cache(1)
            arguments = [
                (text, params) for text in texts[:3] for params in (greedy(64), _sampled(1).replace(max_tokens=64))
            ]
            captured_texts.append([engine.generate(text, params).token_ids for text, params in arguments])
            execution = on_device(engine).execution
            if captured:
                before, done = _memory(on_device(engine).cuda), 0
                while done < steps:
                    done += engine.generate(texts[0], greedy(128)).stats.steps
                grown = [now - then for now, then in zip(_memory(on_device(engine).cuda), before, strict=True)]
    same = sum(np.array_equal(a, b, equal_nan=True) for a, b in zip(*logits, strict=True))
    equal = sum(a == b for a, b in zip(*captured_texts, strict=True))
    return [
        Finding("capture", execution == "graph per step", execution, "graph per step"),
        Finding("same logits as uncaptured, bit for bit", same == len(logits[0]),
                f"at {same} of {len(logits[0])} widths", "all"),
        Finding("same texts as uncaptured, greedy and sampled", equal == len(captured_texts[0]),
                f"{equal} of {len(captured_texts[0])}", "all"),
        Finding(f"memory taken in {done} steps", max(grown) <= LEAKED,
                f"{grown[0] / 2**20:.1f} MiB of the device, {grown[1] / 2**20:.1f} MiB of the host",
                f"<= {LEAKED >> 20} MiB"),
    ]  # fmt: skip


def _memory(cuda: Cuda) -> tuple[int, int]:
    """Bytes in use on the device and by this process."""
    free, total = cuda.memory()
    return total - free, int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def events(folder: Path, texts: Sequence[str], parts: Sequence[str]) -> list[Finding]:
    """The time of each graph of a step by the device's clock, and that of the whole step as one graph.

    ``parts`` are the names of the graphs in order.
    """
    with graph_per_engine(), open_gpu(folder) as engine:
        taken, _ = _timed(engine, texts, 128)
    if len(taken) != len(parts):
        return [Finding("graphs a step", False, str(len(taken)), f"{len(parts)}: {', '.join(parts)}")]
    with open_gpu(folder) as engine:
        whole, _ = _timed(engine, texts, 128)
        watch = LaunchTimer(on_device(engine))
        done = engine.generate(engine.encode(texts[0])[:64], greedy(128))
        gap = watch.gaps().per_step(max(1, done.stats.steps))
    return [
        *(_time(name, times) for name, times in zip(parts, taken, strict=True)),
        _time("step, one graph", whole[0]),
        Finding("gaps between launches a step", gap <= GAP_US, f"{gap:.0f} us", f"<= {GAP_US:g} us"),
    ]


def _time(name: str, milliseconds: Sequence[float]) -> Finding:
    return Finding(name, None, f"{1e3 * statistics.median(milliseconds):.0f} us")


def _timed(engine: Engine, texts: Sequence[str], tokens: int, way: Any = None) -> tuple[list[list[float]], Completion]:
    """The milliseconds of the launches of one greedy text's steps, and the text."""
    watch = LaunchTimer(on_device(engine))
    done = engine.generate(engine.encode(texts[0])[:64], greedy(tokens), way)
    return watch.milliseconds(), done


def pair(folder: Path, texts: Sequence[str]) -> list[Finding]:
    """Compares a large pair's plain and speculative steps with the limit of the memory bandwidth.

    The weights are random, so drafts are seldom accepted; the gain of speculation is computed from the step times, for
    acceptance rates of trained pairs.
    """
    with open_gpu(folder, calibrate=True) as engine:
        bandwidth = copy_bandwidth(on_device(engine).cuda)
        manifest = engine.manifest
        (plain, *_), alone = _timed(engine, texts, 96, PLAIN)
        (ours, *_), done = _timed(engine, texts, 96, {"num_speculative_tokens": K})
        prompts = [engine.encode(text)[:64] for text in texts]
        chosen = [_rate(engine, prompts, 96, way) for way in (PLAIN, None)]
        models = [model for model in manifest.models.values() if model.weights]
        read_target, *others = ((folder / model.weights).stat().st_size for model in models)
    floor = 1e3 * read_target / bandwidth
    slow, fast = statistics.median(plain), statistics.median(ours)
    together = 1e3 * (read_target + K * sum(others)) / bandwidth
    rates = [run.stats.output_tokens / run.stats.decode_seconds for run in (alone, done)]
    gains = {share: (1 - share ** (K + 1)) / (1 - share) * slow / fast for share in (0.6, 0.75, 0.9)}
    return [
        Finding("memory bandwidth of copies", None, f"{bandwidth / 1e9:.0f} GB/s"),
        Finding("plain step against the floor", floor / slow >= FLOOR,
                f"{floor / slow:.0%}: {slow:.2f} ms, {read_target / 1e9:.2f} GB", f">= {FLOOR:.0%}"),
        Finding(f"speculative step, K = {K}, against the floor", None, f"{together / fast:.0%}: {fast:.2f} ms"),
        Finding("tokens a second, plain and speculative (random weights)", None,
                f"{rates[0]:.1f} and {rates[1]:.1f}, {done.stats.accepted} of {done.stats.drafted} accepted"),
        Finding("speculative over plain, from the steps' times", None,
                ", ".join(f"{gain:.2f}x where {share:.0%} are accepted" for share, gain in gains.items())),
        _default_over_plain(*chosen),
    ]  # fmt: skip


def _rate(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, way: Any) -> float:
    """Tokens a second of one request at a time, greedily; the first prompt is decoded once before."""
    runs = [engine.generate(prompt, greedy(tokens), way).stats for prompt in [prompts[0], *prompts]][1:]
    return sum(run.output_tokens for run in runs) / sum(run.decode_seconds for run in runs)


def _default_over_plain(plain: float, default: float) -> Finding:
    return Finding("default over plain", default >= LEAST_GAIN * plain, f"{default / plain:.2f}x", f">= {LEAST_GAIN:g}")


def sampled(folder: Path, texts: Sequence[str], samples: int = 3000) -> list[Finding]:
    """A chi-square test of two tokens of many seeded requests against the exact distribution of the CPU's logits."""
    with Engine.load(folder, backend="onnxruntime", calibrate=False) as cpu:
        reference, prompt, params = cpu_target(folder), list(cpu.encode(texts[0])[:24]), _sampled(0)

        def p(behind: Sequence[int]) -> dict[int, float]:
            reference.shrink_cache(1)
            kept = target_distribution(read(reference, [*prompt, *behind], 1)[-1], params)
            ids = range(len(kept.probs)) if kept.ids is None else kept.ids.tolist()
            return {token: share for token, share in zip(ids, kept.probs.tolist(), strict=True) if share}

        exact = {(a, b): share * then for a, share in p([]).items() for b, then in p([a]).items()}
    with open_gpu(folder) as engine:
        runs = [engine.generate(prompt, _sampled(seed)) for seed in range(samples)]
    rate = sum(run.stats.accepted for run in runs) / max(1, sum(run.stats.drafted for run in runs))
    value = chi_square_p(Counter(run.token_ids for run in runs), exact)
    return [
        Finding("texts from their exact distribution", value >= LEAST_P, f"p = {value:.4f}, {samples} texts, "
                f"{rate:.0%} of draft tokens accepted", f"p >= {LEAST_P:g}"),
    ]  # fmt: skip


def chi_square_p(counts: Counter[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> float:
    """The p-value of counts (Wilson and Hilferty's approximation); 0 if an impossible text occurs."""
    total = sum(counts.values())
    if any(text not in exact for text in counts):
        return 0.0
    pairs = [(counts[text], total * share) for text, share in exact.items()]
    rare = [pair for pair in pairs if pair[1] < 5]
    cells = [pair for pair in pairs if pair[1] >= 5]
    if rare:
        cells.append((sum(count for count, _ in rare), sum(expected for _, expected in rare)))
    free = len(cells) - 1
    if free < 1:
        return 1.0
    square = sum((count - expected) ** 2 / expected for count, expected in cells)
    z = ((square / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))
    return math.erfc(z / math.sqrt(2)) / 2


def oracle(folder: Path, texts: Sequence[str], models: Path) -> list[Finding]:
    """Compares greedy texts with those of transformers' generate, in fp32 on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(models / "demo-target", dtype=torch.float32).eval()
    equal = 0
    with open_gpu(folder) as engine:
        for text in texts:
            ids = torch.tensor([engine.encode(text)])
            theirs = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, eos_token_id=None,
                                    pad_token_id=0, min_new_tokens=48, max_new_tokens=48)  # fmt: skip
            equal += engine.generate(text, greedy(48)).token_ids == tuple(theirs[0, ids.shape[1] :].tolist())
    return [Finding("same greedy text as transformers", equal == len(texts), f"{equal} of {len(texts)}", "all")]


def transformers(folder: Path, texts: Sequence[str], models: Path) -> list[Finding]:
    """Compares the tokens a second with those of transformers on the same GPU, greedily, in fp16.

    A random pair is compared with a model of its sizes, which only decodes plainly.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokens = 128

    def loaded(name: str) -> Any:
        if folder.name in PAIRS:
            pair = PAIRS[folder.name]
            sizes: dict[str, Any] = {"vocab_size": pair["vocab_size"], "head_dim": 64, **pair["sizes"][0]}
            with torch.device("cuda"):
                model: Any = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True, dtype="float16")).half()
        else:
            model = AutoModelForCausalLM.from_pretrained(models / name, dtype=torch.float16).to("cuda")
        model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
        return model.eval()

    class Clock:
        """Notes when tokens arrive; the prompt comes first, and converting a token waits for the device."""

        def __init__(self) -> None:
            self.arrived: list[tuple[int, float]] = []

        def put(self, value: Any) -> None:
            self.arrived.append((len(value.flatten().tolist()), time.perf_counter()))

        def end(self) -> None:
            """Nothing is buffered."""

        def rate(self) -> tuple[int, float]:
            """Tokens behind the first ones, and their seconds."""
            _, (_, first), *rest = self.arrived
            return sum(count for count, _ in rest), rest[-1][1] - first

    with open_gpu(folder, calibrate=True) as engine:
        prompts = [engine.encode(text)[:64] for text in texts]
        named = {name: name for name, method in engine.methods.items() if not method.takes_hypothesis}
        all_ways: dict[str, Any] = {"plain": PLAIN, "default": None, **named}
        rates = {name: _rate(engine, prompts, tokens, way) for name, way in all_ways.items()}
    target = loaded("demo-target")

    def theirs(**options: Any) -> float:
        done = []
        for prompt in [prompts[0], *prompts]:
            ids, clock = torch.tensor([prompt], device="cuda"), Clock()
            with torch.inference_mode():
                target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, streamer=clock,
                                **options)  # fmt: skip
            done.append(clock.rate())
        return sum(count for count, _ in done[1:]) / sum(seconds for _, seconds in done[1:])

    others = {"plain": theirs()}
    if folder.name not in PAIRS:
        draft = loaded("demo-draft")
        draft.generation_config.num_assistant_tokens = K
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        others["with the draft model"] = theirs(assistant_model=draft)
    with contextlib.suppress(Exception):  # wants a compiler
        others["plain, compiled"] = theirs(cache_implementation="static")
    best, best_plain = max(others.values()), max(rate for name, rate in others.items() if "plain" in name)
    return [
        *(Finding(f"ours, {name}, tokens a second", None, f"{rate:.0f}") for name, rate in rates.items()),
        *(Finding(f"transformers, {name}", None, f"{rate:.0f}") for name, rate in others.items()),
        _default_over_plain(rates["plain"], rates["default"]),
        Finding("plain over their plain", None, f"{rates['plain'] / best_plain:.2f}x"),
        Finding("default over their best", rates["default"] > best, f"{rates['default'] / best:.2f}x", "> 1"),
    ]


def greedy(tokens: int) -> SamplingParams:
    """Greedy sampling of ``tokens`` tokens."""
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def _sampled(seed: int) -> SamplingParams:
    # With two tokens of the three most probable, all texts are common enough to count.
    return SamplingParams(max_tokens=2, temperature=1.0, top_k=3, seed=seed, ignore_eos=True)
