"""``specexport bench``: compares a bundle's methods on the same requests."""

from __future__ import annotations

import importlib
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from specexport.building import progress_bars
from specexport.commands import MeasuringOptions, read_text, report
from specexport.commands.inspect import about
from specexport.contract.errors import UNREADABLE, RequestError, explained
from specexport.contract.methods import Method
from specexport.contract.options import option
from specexport.contract.values import Progress
from specexport.runtime import Engine
from specexport.runtime.params import SamplingParams
from specexport.runtime.request import Completion
from specexport.runtime.speculative import PLAIN, Speculative
from specexport.tables import Table, bytes_text

_FILES = ("queue.py", "heapq.py", "shlex.py", "textwrap.py", "sched.py", "fnmatch.py", "bisect.py", "colorsys.py")
"""Files of Python's standard library."""
_TOPICS = ("objects", "typesmapping", "exceptions", "formatstrings", "naming", "yield", "class", "import")
"""Topics of Python's help texts (``pydoc_data.topics``), which are prose."""
_SKIPPED = 200
"""Number of tokens left out at the start of a file, with licences and lists of names."""
_COPIED = 48
"""Number of tokens that the prompt of an edit has of the copy."""

Encode = Callable[[str], list[int]]
DEFAULT = "default"
"""Name for requests that name no method, whose steps draft as many tokens as pay."""
_WARM_UP = 12
"""Number of output tokens of a warm-up."""
_MAX_NOISE = 1.1
"""Factor by which times may be wrong on an idle machine."""


@dataclass(frozen=True)
class Task:
    """One request of a workload.

    Attributes:
        hypothesis: the expected output, for methods that read it; None if unknown.
    """

    workload: str
    prompt: list[int]
    hypothesis: list[int] | None = None


def built_in_tasks(encode: Encode, count: int, tokens: int) -> list[Task]:
    """Tasks of three workloads: ``completion`` continues code, ``edit`` copies code, ``text`` continues prose.

    There are ``count`` of each, at most eight, with prompts of ``tokens`` tokens; edits also have the beginning of the
    copy.
    """
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    tasks: list[Task] = []
    for name in _FILES[:count]:
        try:
            code = encode((stdlib / name).read_text(encoding="utf-8"))[_SKIPPED:]
        except OSError as error:
            raise RequestError(
                f"{stdlib / name}: {error}; this Python has no sources to measure on; pass --data"
            ) from error
        tasks.append(Task("completion", code[:tokens]))
        body = code[:tokens]
        tasks.append(Task("edit", [*body, *body[:_COPIED]], body[_COPIED:]))
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    tasks += [Task("text", encode(topics[name])[:tokens]) for name in _TOPICS[:count]]
    return tasks


class Line(msgspec.Struct):
    """A line of a ``.jsonl`` file; other keys are ignored."""

    text: str
    workload: str = "data"
    hypothesis: str | None = None


def read_lines(path: Path) -> Iterator[Line]:
    """The objects of a file of JSON lines; empty lines are skipped."""
    # Not str.splitlines, which also splits at characters that texts in JSON may contain.
    for number, line in enumerate(read_text(path, "a file of JSON lines").split("\n"), start=1):
        if line.strip():
            try:
                yield msgspec.json.decode(line.encode(), type=Line)
            except UNREADABLE as error:
                raise RequestError(
                    f"{path}: line {number}: {explained(error)}; a line is an object with a text"
                ) from error


def read_tasks(encode: Encode, files: Sequence[Path], count: int, tokens: int) -> list[Task]:
    """Tasks from files of JSON lines; see :class:`Line`."""
    tasks: list[Task] = []
    for path in files:
        for line in read_lines(path):
            if sum(task.workload == line.workload for task in tasks) < count:
                expected = encode(line.hypothesis) if line.hypothesis is not None else None
                tasks.append(Task(line.workload, encode(line.text)[-tokens:], expected))
    if not tasks:
        raise RequestError(f"{', '.join(map(str, files))}: no text; expected JSON lines with a text each")
    return tasks


@dataclass
class Result:
    """Measurements of a method on one workload.

    Attributes:
        plain_seconds: time of plain decoding of the same requests, in turns with the method.
        differences: index of the first token that differs from plain decoding's, for each differing request.
    """

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0
    plain_tokens: int = 0
    requests: int = 0
    differences: list[int] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> float:
        """The acceptance length."""
        return self.tokens / self.steps

    @property
    def plain_tokens_per_second(self) -> float:
        return self.plain_tokens / self.plain_seconds

    @property
    def speed_up(self) -> float:
        """Tokens per second over plain decoding's."""
        return self.tokens / self.seconds / self.plain_tokens_per_second

    @property
    def contradictory(self) -> bool:
        """Whether the speed-up is impossible, as another program slowed down plain decoding.

        It is at most the acceptance length, as steps are no faster than plain steps.
        """
        return self.speed_up > _MAX_NOISE * self.tokens_per_step

    def add(self, completion: Completion, plain: Completion) -> None:
        stats = completion.stats
        self.steps += stats.steps
        self.tokens += stats.output_tokens
        self.seconds += stats.decode_seconds
        self.plain_seconds += plain.stats.decode_seconds
        self.plain_tokens += plain.stats.output_tokens
        self.requests += 1
        if completion.token_ids != plain.token_ids:
            pairs = enumerate(zip(completion.token_ids, plain.token_ids, strict=False))
            shorter = min(len(completion.token_ids), len(plain.token_ids))
            self.differences.append(next((at for at, (a, b) in pairs if a != b), shorter))


@dataclass(frozen=True)
class MethodRow:
    """A method's row in the comparison.

    Attributes:
        memory: bytes in addition to the target and its cache, with a cache for the longest text.
        results: results by workload, for workloads that the method can run.
        chosen: number of steps by the method that proposed, plain steps included.
    """

    method: str
    training: str | None
    memory: int
    results: dict[str, Result]
    chosen: Mapping[str, int]

    @property
    def lossless(self) -> bool:
        """Whether all texts equal plain decoding's, token for token."""
        return not any(result.differences for result in self.results.values())


def compare(
    engine: Engine, names: Sequence[str], tasks: Sequence[Task], max_tokens: int, progress: Progress
) -> list[MethodRow]:
    """Decodes every task greedily, plainly and with each method in turns, so that drift affects all equally.

    Methods use their default trees; ``DEFAULT`` stands for requests that name no method.
    """
    manifest, methods = engine.manifest, _named_methods(engine, names)
    for task in tasks:
        if len(task.prompt) + max_tokens > manifest.max_seq_len:
            raise RequestError(
                f"a prompt of {len(task.prompt)} tokens ({task.workload}) and {max_tokens} more do not fit this "
                f"bundle's context of {manifest.max_seq_len}; ask for fewer",
                param="max_tokens",
            )
    results: dict[str, dict[str, Result]] = {name: {} for name in methods}
    chosen: dict[str, Counter[str]] = {name: Counter() for name in methods}
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)

    def decode_all(
        doing: str, tasks: Sequence[Task], params: SamplingParams
    ) -> Iterator[tuple[str, str, Completion, Completion]]:
        """Yields a method, a workload, and the outputs with the method and without."""
        for index, task in enumerate(tasks):
            plain = engine.generate(task.prompt, params, PLAIN)
            for name, method in methods.items():
                if not method.takes_hypothesis or task.hypothesis is not None:
                    completion = engine.generate(task.prompt, params, _speculative(name, method, task))
                    yield name, task.workload, completion, plain
            progress(doing, index + 1, len(tasks))

    for _ in decode_all("warming up", tasks[:1], params.replace(max_tokens=min(_WARM_UP, max_tokens))):
        pass
    for name, workload, completion, plain in decode_all("decoding", tasks, params):
        results[name].setdefault(workload, Result()).add(completion, plain)
        for method_name, steps in completion.stats.steps_by_draft.items():
            chosen[name][method_name] += sum(steps.values())
    files = {entry.path: entry.size for entry in manifest.files}
    return [
        MethodRow(name, method.needs_training, method.memory(files, manifest.max_seq_len), results[name], chosen[name])
        for name, method in methods.items()
    ]


def _named_methods(engine: Engine, names: Sequence[str]) -> dict[str, Method]:
    """The methods of these names; ``DEFAULT`` stands for the first that needs no hypothesis."""
    methods: dict[str, Method] = {}
    defaults = [method for method in engine.methods.values() if not method.takes_hypothesis]
    for name in names:
        if name not in engine.methods and not (name == DEFAULT and engine.methods):
            raise RequestError(
                f"--methods has {name!r}; the bundle has {', '.join(engine.methods)}, and {DEFAULT}; plain decoding is "
                "always measured",
                param="methods",
            )
        methods[name] = defaults[0] if name == DEFAULT else engine.methods[name]
    return methods


def _speculative(name: str, method: Method, task: Task) -> Speculative | None:
    """The speculation of a task with a method and its default tree."""
    if name == DEFAULT:
        return None
    expected = tuple(task.hypothesis or ()) if method.takes_hypothesis else None
    size = len(method.token_trees()[0]) - 1
    return Speculative(method=name, num_speculative_tokens=size, hypothesis=expected)


class BenchOptions(MeasuringOptions, frozen=True, kw_only=True):
    """Options of ``specexport bench``.

    Attributes:
        methods: methods of the bundle and methods without a graph, each with its default tree; 'default' names no
            method, so that steps draft as many tokens as pay.
        data: lines such as {"text": "...", "workload": "chat", "hypothesis": "..."}, the last two optional (default:
            code completion, copying edits and prose from Python's sources and help texts).
        prompts: prompts per workload.
        prompt_tokens: maximum number of tokens of a prompt.
        max_tokens: tokens to generate for each prompt.
        calibrate: measure the costs of steps on this machine, by which steps of 'default' choose how much to draft.
    """

    methods: Annotated[str, option("NAME[,NAME...]")] = "all"
    data: Annotated[tuple[Path, ...], option("FILE.jsonl")] = ()
    prompts: Annotated[int, option("N", ge=1)] = 4
    prompt_tokens: Annotated[int, option("N", ge=2)] = 128
    max_tokens: Annotated[int, option("N", short="-n", ge=2)] = 64
    calibrate: Annotated[
        bool, option(group="the engine", off="do not measure the costs of steps; leaves out 'default'")
    ] = True


def bench_command(command: BenchOptions) -> int:
    """Compare a bundle's methods on this machine: tokens a step, speed-up, memory, and whether texts are equal.

    Example:
        specexport bench qwen3/ --methods draft_model,ngram --data prompts.jsonl --plot bench.html
    """
    with Engine.load(command.bundle, calibrate=command.calibrate, threads=command.threads) as engine:
        names = command.methods.split(",")
        if command.methods == "all":
            names = [*([DEFAULT] if engine.costs is not None else []), *engine.methods]
        sizes = (command.prompts, command.prompt_tokens)
        if not command.data:
            tasks = built_in_tasks(engine.encode, *sizes)
        else:
            tasks = read_tasks(engine.encode, command.data, *sizes)
        with progress_bars() as progress:
            rows = compare(engine, names, tasks, command.max_tokens, progress)
        device, manifest = engine.backend.device, engine.manifest
    comparison = table(rows, list(dict.fromkeys(task.workload for task in tasks)))
    command.show({"bundle": str(command.bundle), "rows": list(map(_as_dict, rows))}, comparison)
    if command.plot is not None:
        speed = _bars("tokens a second over plain decoding's", rows, "speed_up", ("plain", 1.0))
        charts = (report.Figure("Speed-up", speed), report.Figure("Acceptance length", _bars("tokens a step", rows)))
        parts = (device, comparison, *charts, *about(command.bundle, manifest))
        report.write(command.plot, f"bench: {command.bundle}", parts)
    for row in rows:
        for workload, result in row.results.items():
            if result.contradictory:
                print(
                    f"{row.method}: {workload}: {result.speed_up:.2f}x cannot follow from {result.tokens_per_step:.2f} "
                    "tokens a step: another process ran beside plain decoding; measure again on an idle machine",
                    file=sys.stderr,
                )
            if result.differences:
                print(
                    f"{row.method}: {workload}: {len(result.differences)} of {result.requests} texts differ from plain "
                    f"decoding's, the first after {min(result.differences)} tokens; 'specexport verify' tells whether "
                    "two tokens tied there",
                    file=sys.stderr,
                )
    return 0 if all(row.lossless for row in rows) else 1


def table(rows: list[MethodRow], names: list[str]) -> Table:
    """The comparison, with tokens a step and the speed-up over plain decoding for each workload."""
    comparison = Table(
        "greedy, in turns with plain decoding: tokens a step, speed-up",
        ("method", "training", "extra memory", *names, "lossless"),
        "lll" + "r" * len(names) + "l",
    )
    results = {name: result for row in rows for name, result in row.results.items()}
    speeds = [f"{results[name].plain_tokens_per_second:.0f} tokens/s" if name in results else "-" for name in names]
    comparison.add_row("plain decoding", "none", "none", *speeds, "")
    for row in rows:
        cells = [
            f"{result.tokens_per_step:.2f}, {result.speed_up:.2f}x" if (result := row.results.get(name)) else "-"
            for name in names
        ]
        requests = sum(result.requests for result in row.results.values())
        tokens = sum(result.tokens for result in row.results.values())
        differing = sum(len(result.differences) for result in row.results.values())
        lossless = f"yes: {tokens} tokens" if row.lossless else f"{differing} of {requests} differ"
        verdict = lossless if requests else "not tried"
        memory = bytes_text(row.memory) if row.memory else "none"
        name = row.method
        if name == DEFAULT:
            name += f" (steps: {', '.join(f'{name} {steps}' for name, steps in row.chosen.items())})"
        comparison.add_row(name, row.training or "none", memory, *cells, verdict)
    return comparison


def _bars(
    label: str, rows: list[MethodRow], name: str = "tokens_per_step", level: tuple[str, float] | None = None
) -> str:
    """A bar chart of a figure for each method and workload."""
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        for workload, result in row.results.items():
            groups.setdefault(workload, {})[row.method] = getattr(result, name)
    return report.bars(label, groups, level)


def _as_dict(row: MethodRow) -> dict[str, Any]:
    figures = ("tokens_per_step", "plain_tokens_per_second", "speed_up", "contradictory")
    workloads = {
        name: asdict(result) | {figure: getattr(result, figure) for figure in figures}
        for name, result in row.results.items()
    }
    about: dict[str, Any] = {"method": row.method, "training": row.training, "extra_memory_bytes": row.memory}
    return about | {"steps_by_method": dict(row.chosen), "lossless": row.lossless, "workloads": workloads}
