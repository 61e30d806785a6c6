"""What a log of the null CUDA libraries says of the steps that a backend took, and what is wrong with them.

Between the calls lie marks, which ``dry_run`` writes: ``load`` before an engine is loaded, ``run FILE DIGEST`` and
``ran`` around a run of an onnxruntime session over bound memory and around opening one, ``step WAY`` and ``stepped``
around a step.
"""

import ctypes
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

LAUNCHES = ("kernel", "cublas", "cudnn", "nccl", "cudaMemcpy", "cudaMemset", "cudaLaunchHostFunc")
"""What calls that give work to a stream begin with, but for ``SETUP``."""
SETUP = ("cublasCreate", "cublasDestroy", "cublasLtMatmulAlgoGetHeuristic", "cudnnCreate", "cudnnDestroy")
MEMORY = ("cudaMalloc", "cudaHostAlloc", "cudaFree", "cublasCreate", "cudnnCreate", "cudaMemPoolCreate")
"""What calls that take memory or give it back begin with."""
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
WAITING_COPIES = ("cudaMemcpy", "cudaMemset", "cudaMemcpyFromSymbol")
ROLES = ("draft", "target", "accept", "commit", "copies")
"""What launches belong to; copies are those between graphs, and to and from the host."""


@dataclass(frozen=True)
class Call:
    """A line of the log; the name is a kernel's (mangled) with grid and block, a copy's places, or a graph's number."""

    thread: int
    capture: int
    status: int
    illegal: str
    call: str
    nbytes: int
    name: str

    @property
    def launches(self) -> bool:
        """Whether it gives work to a stream."""
        return self.call.startswith(LAUNCHES) and self.call not in SETUP

    @property
    def takes_memory(self) -> bool:
        """Whether it takes memory or gives it back."""
        return self.call.startswith(MEMORY)

    @property
    def waits(self) -> bool:
        """Whether the host waits in it: for the device, or because a copy's memory is not pinned."""
        return self.call in WAITS or self.call in WAITING_COPIES or "pageable" in self.name

    def __str__(self) -> str:
        return f"{self.call} {demangled(self.name)}".strip() + (f" ({self.nbytes} bytes)" if self.nbytes else "")


@dataclass
class Work:
    """What a capture recorded, or a step did.

    Attributes:
        launches: by role.
        runs: files and digests of the sessions' runs, and what lies between them.
    """

    launches: Counter[str] = field(default_factory=Counter)
    runs: list[str] = field(default_factory=list)


@dataclass
class Step(Work):
    """A step.

    Attributes:
        way: how it was asked for, ``medusa greedy``.
        graphs: how many CUDA graphs were launched.
        memory: calls that take memory or give it back.
        waits: those between the first launch and the last.
    """

    way: str = ""
    graphs: int = 0
    memory: list[Call] = field(default_factory=list)
    waits: list[Call] = field(default_factory=list)


@dataclass
class Report:
    """What happened between ``load`` and the next one, or the log's end.

    Attributes:
        threads: those on which onnxruntime opened or ran sessions.
        captures: what each recorded, by its number.
        steps: in order.
        illegal: calls that CUDA would refuse, or do something else than was meant.
    """

    threads: set[int] = field(default_factory=set)
    captures: dict[int, Work] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    illegal: list[Call] = field(default_factory=list)

    @property
    def captured_twice(self) -> list[str]:
        """Runs of which two captures recorded the same, over the same memory."""
        seen = Counter(tuple(work.runs) for work in self.captures.values())
        return [" + ".join(run.split()[0] for run in runs) for runs, times in seen.items() if times > 1 and runs]


def read(path: Path) -> Iterator[Call]:
    """The lines of a log."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            thread, capture, _, status, illegal, call, nbytes, name = line.rstrip("\n").split("\t")
            yield Call(int(thread), int(capture), int(status), illegal, call, int(nbytes), name)


def reports(calls: Iterable[Call]) -> list[Report]:
    """What happened, a report each ``load``."""
    results: list[Report] = []
    for call in calls:
        if call.call == "mark" and call.name == "load":
            results.append(Report())
            reader = _Reader(results[-1])
        elif results:
            reader.read(call)
    return results


class _Reader:
    def __init__(self, report: Report) -> None:
        self._report = report
        self._running: dict[int, str] = {}  # thread: file and digest
        self._step: Step | None = None
        self._launched = False
        self._since: list[Call] = []  # waits and memory since the step's last launch

    def read(self, call: Call) -> None:
        if call.call == "mark":
            self._mark(call)
            return
        report = self._report
        if call.thread in self._running:
            report.threads.add(call.thread)
        if call.illegal:
            report.illegal.append(call)
        if call.call == "cudaStreamBeginCapture" and not call.status:
            report.captures[call.capture] = Work()
            if running := self._running.get(call.thread):  # a session that captures its own runs
                report.captures[call.capture].runs.append(running)
        role = _role(self._running.get(call.thread, ""))
        if call.capture in report.captures and call.launches:
            work = report.captures[call.capture]
            work.launches[role] += 1
            if role == "copies":
                work.runs.append(f"{call.call} {call.nbytes} {call.name}")
        elif self._step is not None:
            self._in_step(self._step, call, role)

    def _in_step(self, step: Step, call: Call, role: str) -> None:
        if call.call == "cudaGraphLaunch":
            step.graphs += 1
            recorded = self._report.captures.get(int(call.name.split()[-1]))
            if recorded is not None:
                step.launches += recorded.launches
        elif call.launches:
            step.launches[role] += 1
        if call.call == "cudaGraphLaunch" or call.launches:
            step.memory += [each for each in self._since if each.takes_memory and self._launched]
            step.waits += [each for each in self._since if each.waits and self._launched]
            self._since.clear()
            self._launched = True
        if call.waits or call.takes_memory:
            self._since.append(call)

    def _mark(self, call: Call) -> None:
        kind, _, rest = call.name.partition(" ")
        if kind == "run":
            self._running[call.thread] = rest
            if call.capture in self._report.captures:
                self._report.captures[call.capture].runs.append(rest)
        elif kind == "ran":
            del self._running[call.thread]
        elif kind == "step":
            self._step, self._launched = Step(way=rest), False
            self._since.clear()
        elif kind == "stepped" and self._step is not None:
            self._step.memory += [each for each in self._since if each.takes_memory]
            self._report.steps.append(self._step)
            self._step = None


def _role(run: str) -> str:
    """What a session's run is for, by its file in the bundle."""
    if not run:
        return "copies"
    folder, _, file = run.split()[0].rpartition("/")
    if folder.endswith("program"):
        return next((role for role in ("accept", "commit") if file.startswith(role)), "draft")
    return "target" if file.startswith("target.") and not file.startswith("target.self_draft.") else "draft"


@cache
def demangled(name: str) -> str:
    """A kernel's name as it is written in C++, without its grid."""
    mangled = name.split(" ")[0]
    if not mangled.startswith("_Z"):
        return name
    demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    demangle.restype = ctypes.c_char_p  # leaks the text, once a name
    status = ctypes.c_int()
    actual = demangle(mangled.encode(), None, None, ctypes.byref(status))
    return actual.decode() if actual else mangled
