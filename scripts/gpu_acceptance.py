"""Checks and measures everything that needs a GPU, on a machine that has one.

    python scripts/gpu_acceptance.py [--params 1e9] [--quick]

Finds what can run here, builds bundles of the demo models and of a benchmark-size pair (the demo pair, enlarged without
changing what it says), and for each backend compares with the CPU, compares speculative with plain decoding, measures
the gaps between launches, a step against what the memory's bandwidth allows, and speculation against plain decoding and
against transformers on the same GPU. Writes ``benchmarks/results/<gpu>-<date>.json`` and prints a table.

Exits with 0 if every check passed, with 1 if one failed, and with 2 where there is no GPU: then nothing was checked.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import importlib.util
import itertools
import json
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks is no installed package

from specexport.contract import tensors  # noqa: E402
from specexport.contract.errors import SpecExportError  # noqa: E402
from specexport.runtime import Completion, Engine, SamplingParams  # noqa: E402
from specexport.runtime.backend import Graph, open_graph, step_buffers  # noqa: E402
from specexport.runtime.bundle import Bundle  # noqa: E402
from specexport.runtime.cuda.api import Cuda  # noqa: E402
from specexport.runtime.cuda.backend import CudaBackend  # noqa: E402
from specexport.runtime.cuda.executor import Enqueue  # noqa: E402
from specexport.runtime.cuda.memory import Budget, Plan  # noqa: E402
from specexport.runtime.cuda.ort import import_onnxruntime  # noqa: E402
from specexport.runtime.cuda.stream import Stream  # noqa: E402

LARGEST_DIFFERENCE = 2e-3
"""Of fp32 logits between CPU and GPU: products are summed in other orders."""
FLOOR, GAP_US, SPEED_UP, ACCEPTANCE, OVER_TRANSFORMERS = 0.7, 50.0, 2.0, 0.75, 2.0
LEAST_P = 1e-4
K = 4
COPIED = 1 << 30


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs everything; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=1e9, help="of the enlarged target (default: 1e9)")
    parser.add_argument("--draft-params", type=float, default=60e6, help="of the enlarged draft (default: 60e6)")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "fp16", "int8", "int4"))
    parser.add_argument("--lowerings", default="native,portable", help="which graphs to check (default: %(default)s)")
    parser.add_argument("--models", type=Path, default=ROOT / "examples" / "models")
    parser.add_argument("--prompts", type=Path, default=ROOT / "examples" / "prompts" / "held_out.jsonl")
    parser.add_argument("--work", type=Path, default=ROOT / ".cache" / "gpu", help="keeps models and bundles")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--quick", action="store_true", help="the demo models only, and fewer samples")
    args = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 140)
    try:
        cuda = Cuda.load()
    except SpecExportError as error:
        console.print(f"no GPU can be used here, so nothing was checked: {error}", soft_wrap=True)
        return 2
    console.print(f"[bold]{cuda.device}[/bold], {cuda.device.total / 2**30:.1f} GiB")
    backends, missing = find(cuda)
    for name, why in missing.items():
        console.print(f"{name}: not here ({why})", soft_wrap=True)
    if not backends:
        console.print("no library here can run a bundle on this GPU, so nothing was checked")
        return 2
    bandwidth = copy_bandwidth(cuda)
    console.print(f"copies on the device move {bandwidth / 1e9:.0f} GB/s, read and written")
    texts = [json.loads(line)["text"] for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    texts = texts[: 3 if args.quick else 12]
    checks: list[Check] = []
    for backend in backends:
        for title, run in plan(args, backend, texts, bandwidth):
            console.print(f"{backend}: {title}")
            try:
                checks += [dataclasses.replace(check, name=f"{title.split(',')[0]}: {check.name}") for check in run()]
            except Exception as error:  # one failure must not hide what the others would say
                checks.append(Check(backend, title, False, f"{type(error).__name__}: {error}", "no error"))
    report = {
        "device": asdict(cuda.device),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "backends": backends,
        "missing": missing,
        "copy_bandwidth_gb_s": bandwidth / 1e9,
        "options": {name: str(value) for name, value in vars(args).items()},
        "checks": [asdict(check) for check in checks],
    }
    console.print(table(checks))
    where = args.out / f"{_slug(cuda.device.name)}-{datetime.date.today().isoformat()}.json"
    where.parent.mkdir(parents=True, exist_ok=True)
    where.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    failed = [check for check in checks if check.passed is False]
    console.print(f"{where}: {len(checks)} results, {len(failed)} failed")
    return 1 if failed else 0


def find(cuda: Cuda) -> tuple[dict[str, str], dict[str, str]]:
    """The backends that can run on this device with their versions, and why the others cannot."""
    found, missing = {}, {}
    try:
        found["onnxruntime-cuda"] = str(import_onnxruntime().__version__)
    except SpecExportError as error:
        missing["onnxruntime-cuda"] = str(error)
    for name in ("tensorrt", "tensorrt_rtx"):
        installed = importlib.util.find_spec(name) is not None
        missing[name.replace("_", "-")] = (
            f"installed; the demo bundles hold no engines for {cuda.device}: specexport compile makes them"
            if installed
            else "not installed"
        )
    return found, missing


def plan(
    args: argparse.Namespace, backend: str, texts: list[str], bandwidth: float
) -> list[tuple[str, Callable[[], list[Check]]]]:
    """What is done with a backend, in order."""
    from benchmarks.pair import built  # torch and transformers come with it

    samples = 400 if args.quick else 3000
    made: list[tuple[str, Callable[[], list[Check]]]] = []
    for lowering in args.lowerings.split(","):
        demo, medusa = (
            functools.partial(
                built,
                args.work / f"demo-{name}-{lowering}",
                args.models / "demo-target",
                **given,
                draft_precision="fp32",
                max_seq_len=512,
                max_batch_size=1,
                lowering=lowering,
            )
            for name, given in (
                ("draft", {"draft": str(args.models / "demo-draft"), "num_speculative_tokens": K}),
                ("medusa", {"medusa": str(args.models / "demo-medusa")}),
            )
        )
        made += [
            (f"{lowering}, demo pair: logits", functools.partial(_with, parity, demo, backend, texts)),
            (f"{lowering}, demo pair: texts", functools.partial(_with, lossless, demo, backend, texts, samples)),
            (
                f"{lowering}, demo target with heads",
                functools.partial(_with, lossless, medusa, backend, texts, samples),
            ),
            (f"{lowering}, demo pair: launches", functools.partial(_with, launches, demo, backend, texts)),
        ]
        if not args.quick:
            run = functools.partial(benchmark, args, lowering, backend, texts, bandwidth)
            made.append((f"{lowering}, benchmark-size pair", run))
    return made


def _with(check: Callable[..., list[Check]], folder: Callable[[], Path], *given: Any) -> list[Check]:
    return check(folder(), *given)


def copy_bandwidth(cuda: Cuda, rounds: int = 10) -> float:
    """Bytes a second that a copy within the device's memory reads and writes."""
    stream, needs = Stream(cuda), Plan()
    nbytes = min(COPIED, Budget(cuda, 0.5).left // 4)
    needs.add("from", nbytes)
    needs.add("to", nbytes)
    memory = needs.allocate(cuda, Budget(cuda, 1.0), "the bandwidth test")
    start, end = cuda.create_event(), cuda.create_event()
    times = []
    for _ in range(rounds):
        cuda.record(start, stream.handle)
        cuda.copy(memory["to"].address, memory["from"].address, nbytes, stream.handle)
        cuda.record(end, stream.handle)
        cuda.wait(end)
        times.append(cuda.milliseconds(start, end))
    for event in (start, end):
        cuda.destroy_event(event)
    memory.close()
    stream.close()
    return 2e3 * nbytes / min(times)


def parity(folder: Path, backend: str, texts: list[str]) -> list[Check]:
    """Logits of one text on the GPU and on the CPU, at every width, and greedy texts."""
    with Engine.load(folder, backend="onnxruntime") as cpu, Engine.load(folder, backend=backend) as gpu:
        reference = open_graph(Bundle.open(folder), cpu.manifest.target, 1, step_buffers(cpu.manifest), None)
        tokens = cpu.encode(texts[0])[:100]
        largest, same, rows = 0.0, 0, 0
        for width in sorted({graph.point.tokens for graph in cpu.manifest.target.graph.points if graph.point.rows > 1}):
            ours, theirs = (_logits(graph, tokens, width) for graph in (_target(gpu), reference))
            largest = max(largest, float(np.abs(ours - theirs).max()))
            same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
            rows += len(ours)
        equal = sum(
            gpu.generate(text, _greedy(48)).token_ids == cpu.generate(text, _greedy(48)).token_ids for text in texts
        )
    return [
        Check(backend, "largest difference of logits", largest <= LARGEST_DIFFERENCE, f"{largest:.1e}",
              f"<= {LARGEST_DIFFERENCE:g}"),
        Check(backend, "same most probable token", same == rows, f"{same} of {rows}", "all"),
        Check(backend, "same greedy text as on the CPU", equal == len(texts), f"{equal} of {len(texts)}", "all"),
    ]  # fmt: skip


def _gpu(engine: Engine) -> CudaBackend:
    assert isinstance(engine.backend, CudaBackend)
    return engine.backend


def _target(engine: Engine) -> Graph:
    return _gpu(engine).graphs[0]


def _logits(graph: Graph, tokens: list[int], width: int) -> np.ndarray:
    """Logits ``[n, V]`` of a text that is read ``width`` tokens at a time."""
    found = []
    graph.fit(1)
    for past in range(0, len(tokens) - width + 1, width):
        graph.reserve(past + width)
        given = graph.inputs(width, width)
        given[tensors.INPUT_IDS][0] = tokens[past : past + width]
        given[tensors.POSITION_IDS][0] = np.arange(past, past + width)
        given[tensors.TREE_MASK][0] = np.tri(width, dtype=np.bool_)
        given[tensors.PAST_LENGTH][0] = past
        given[tensors.LOGITS_ROWS][0] = np.arange(width)
        found.append(graph.run(width, width)[tensors.LOGITS][0].copy())
        graph.commit(0, past, range(width))
    return np.concatenate(found)


def lossless(folder: Path, backend: str, texts: list[str], samples: int) -> list[Check]:
    """Speculative against plain decoding on the GPU: greedily token for token, sampled by a test on two samples."""
    with Engine.load(folder, backend=backend) as engine:
        name = next(iter(engine.speculations))
        equal = sum(
            engine.generate(text, _greedy(64)).token_ids
            == engine.generate(text, _greedy(64), speculation=False).token_ids
            for text in texts
        )
        prompt = engine.encode(texts[0])[:40]
        counts = [
            Counter(
                engine.generate(prompt, _sampled(seed + 10**6 * speculation), speculation=speculation).token_ids
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


def same_distribution(a: Counter[tuple[int, ...]], b: Counter[tuple[int, ...]]) -> float:
    """The p-value of a chi-square test that two samples of texts come from one distribution; rare texts are one."""
    from scipy.stats import chi2_contingency

    common = [text for text in a | b if a[text] + b[text] >= 20]
    rows = np.array([[counts[text] for text in common] for counts in (a, b)])
    rest = np.array([[sum(counts.values())] for counts in (a, b)]) - rows.sum(1, keepdims=True)
    rows = np.concatenate([rows, rest], 1)
    rows = rows[:, rows.sum(0) > 0]
    return float(chi2_contingency(rows)[1]) if rows.shape[1] > 1 else 1.0


def launches(folder: Path, backend: str, texts: list[str]) -> list[Check]:
    """Whether steps are captured, and how long the GPU waits between the graphs of a step and between steps."""
    with Engine.load(folder, backend=backend) as engine:
        there = _gpu(engine)
        watch = Watch(there)
        done = engine.generate(texts[0], _greedy(128))
        gaps = watch.gaps_us()
        calls = len(gaps) + 1
    per_step = statistics.median(gaps) * calls / max(1, done.stats.steps)
    captured = done.stats.execution != "plain"
    return [
        Check(backend, "capture active", captured, done.stats.execution, "captured" + f" {there.fallback}".rstrip()),
        Check(backend, "host gaps a step", per_step <= GAP_US, f"{per_step:.0f} us", f"<= {GAP_US:g} us"),
    ]


class Watch:
    """Events around everything that is launched; for measuring what lies between.

    Args:
        backend: an open one.
        most: launches that can be watched.
    """

    def __init__(self, backend: CudaBackend, most: int = 4096) -> None:
        self._cuda, self._stream = backend.cuda, backend.stream
        self._events = [(self._cuda.create_event(), self._cuda.create_event()) for _ in range(most)]
        self._used = 0
        backend.watch(self._around)

    def _around(self, launch: Enqueue) -> None:
        start, end = self._events[self._used % len(self._events)]
        self._used += 1
        self._cuda.record(start, self._stream.handle)
        launch()
        self._cuda.record(end, self._stream.handle)

    def gaps_us(self) -> list[float]:
        """Microseconds from the end of each launch's work to the beginning of the next; then forgets them."""
        self._stream.synchronize()
        used = self._events[: min(self._used, len(self._events))]
        gaps = [1e3 * self._cuda.milliseconds(a[1], b[0]) for a, b in itertools.pairwise(used)]
        for pair in self._events:
            for event in pair:
                self._cuda.destroy_event(event)
        return gaps


def benchmark(args: argparse.Namespace, lowering: str, backend: str, texts: list[str], bandwidth: float) -> list[Check]:
    """The benchmark-size pair: a plain step against the bandwidth, speculation against plain and transformers."""
    from benchmarks.inflate import DRAFT_WIDTH_PER_LAYER, WIDTH_PER_LAYER
    from benchmarks.pair import built, inflated_pair

    sizes = {"demo-target": (args.params, WIDTH_PER_LAYER), "demo-draft": (args.draft_params, DRAFT_WIDTH_PER_LAYER)}
    target, draft = inflated_pair(args.models, args.work, sizes=sizes)
    folder = built(
        args.work / f"bench.{target.name}.{args.precision}.{lowering}",
        target,
        draft=str(draft),
        num_speculative_tokens=K,
        precision=args.precision,
        draft_precision=args.precision,
        max_seq_len=512,
        max_batch_size=1,
        lowering=lowering,
    )
    with Engine.load(folder, backend=backend, check_hashes=False) as engine:
        model = engine.manifest.target
        prompts = [engine.encode(text)[:128] for text in texts]
        milliseconds = step_milliseconds(_target(engine), 200)
        read = (folder / model.weights).stat().st_size + _target(engine).cache_bytes
        floor = 1e3 * read / bandwidth
        runs = {
            speculation: [engine.generate(prompt, _greedy(96), speculation=speculation) for prompt in prompts]
            for speculation in (True, False)
        }
        plain, ours = _speed(runs[False]), _speed(runs[True])
        rate = sum(run.stats.accepted for run in runs[True]) / sum(run.stats.drafted for run in runs[True])
        equal = sum(a.token_ids == b.token_ids for a, b in zip(runs[True], runs[False], strict=True))
        gpu = engine.backend.execution
    gain = ours / plain
    checks = [
        Check(backend, "plain step over bandwidth floor", floor / milliseconds >= FLOOR,
              f"{floor / milliseconds:.0%} ({milliseconds:.2f} ms, {read / 1e9:.2f} GB)", f">= {FLOOR:.0%}"),
        Check(backend, "plain decoding", None, f"{plain:.1f} tokens/s"),
        Check(backend, f"speculative decoding, K = {K}, {gpu}", None, f"{ours:.1f} tokens/s, acceptance {rate:.2f}"),
        Check(backend, "speculative over plain", gain >= SPEED_UP if rate >= ACCEPTANCE else None, f"{gain:.2f}x",
              f">= {SPEED_UP:g}x where acceptance >= {ACCEPTANCE:g}"),
        Check(backend, "same text with and without", equal == len(texts), f"{equal} of {len(texts)}", "all"),
    ]  # fmt: skip
    theirs = transformers_speed(target, draft, prompts)
    if theirs is None:
        return [*checks, Check(backend, "transformers' assisted generation", None, "torch sees no GPU here")]
    return [
        *checks,
        Check(backend, "transformers' assisted generation", None, f"{theirs:.1f} tokens/s"),
        Check(backend, "over transformers", ours / theirs >= OVER_TRANSFORMERS, f"{ours / theirs:.2f}x",
              f">= {OVER_TRANSFORMERS:g}x"),
    ]  # fmt: skip


def step_milliseconds(graph: Graph, past: int, rounds: int = 50) -> float:
    """The median time of a plain step, its inputs' and results' way included."""
    graph.reserve(past + 1)
    given = graph.inputs(1, 1)
    given[tensors.INPUT_IDS][:] = 50
    given[tensors.POSITION_IDS][:] = past
    given[tensors.PAST_LENGTH][:] = past
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        graph.run(1, 1)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def transformers_speed(target: Path, draft: Path, prompts: list[list[int]]) -> float | None:
    """Tokens a second of ``generate(assistant_model=...)`` on the same GPU, after a first text; None without torch."""
    import torch

    if not torch.cuda.is_available():
        return None
    from transformers import AutoModelForCausalLM, GenerationConfig

    models: list[Any] = []
    for folder in (target, draft):
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda().eval()
        model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
        models.append(model)
    models[1].generation_config.num_assistant_tokens = K
    models[1].generation_config.num_assistant_tokens_schedule = "constant"
    models[1].generation_config.assistant_confidence_threshold = 0.0
    tokens, seconds = 0, 0.0
    with torch.inference_mode():
        for index, prompt in enumerate([prompts[0], *prompts]):
            ids = torch.tensor([prompt], device="cuda")
            torch.cuda.synchronize()
            start = time.perf_counter()
            made = models[0].generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=96, assistant_model=models[1]
            )
            torch.cuda.synchronize()
            if index:
                seconds += time.perf_counter() - start
                tokens += made.shape[1] - len(prompt)
    return tokens / seconds


def table(checks: list[Check]) -> Table:
    """The results, one a row."""
    shown = Table(title="GPU acceptance", title_justify="left")
    for name in ("backend", "what", "found", "expected", ""):
        shown.add_column(name)
    words = {True: "[green]passed[/green]", False: "[red]FAILED[/red]", None: ""}
    for check in checks:
        shown.add_row(check.backend, check.name, check.found, check.expected, words[check.passed])
    return shown


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def _sampled(seed: int) -> SamplingParams:
    # Few texts are common enough to count: three tokens of the three most probable.
    return SamplingParams(max_tokens=3, temperature=1.0, top_k=3, seed=seed, ignore_eos=True)


def _speed(runs: list[Completion]) -> float:
    return sum(run.stats.output_tokens for run in runs) / sum(run.stats.decode_seconds for run in runs)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main())
