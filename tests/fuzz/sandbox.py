"""Runs targets in a process of their own, with bounds on memory and time: a library that crashes is a finding."""

import contextlib
import importlib
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MEMORY = 3 << 30
"""Bytes of address space that a target may take beside the libraries'."""
CPU_SECONDS, SECONDS = 20.0, 600.0
"""For one input: of the processor, and on the clock, as machines may be busy; milliseconds do where all is well."""


class Sandbox:
    """A process that calls targets: functions named ``module:name`` that take bytes and a folder of their own."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # as long as this object
        self._folder = tempfile.TemporaryDirectory(prefix="specexport-fuzz-")

    def call(self, target: str, seed: str, data: bytes) -> str:
        """What became of one input: ``loaded`` or ``refused``.

        Raises:
            AssertionError: the target raised what is none of our errors, crashed, or took too long.
        """
        process = self._process or self._start()
        pickle.dump((target, seed, data), process.stdin)
        process.stdin.flush()
        if not select.select([process.stdout], [], [], SECONDS)[0]:
            self.close()
            raise AssertionError(f"{target}: no answer in {SECONDS:.0f} s")
        try:
            outcome, detail = pickle.load(process.stdout)
        except EOFError:
            code = process.wait()
            self._process = None
            raise AssertionError(f"{target}: the process ended with {code}: {self._said()}") from None
        assert outcome != "finding", f"{target}: {detail}"
        return str(outcome)

    def _start(self) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "tests.fuzz.sandbox", self._folder.name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            words, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
        )
        return self._process

    def _said(self) -> str:
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 2000))
        return self._errors.read().decode(errors="replace")

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextlib.contextmanager
def sandbox() -> Iterator[Sandbox]:
    """A sandbox, closed in the end."""
    box = Sandbox()
    try:
        yield box
    finally:
        box.close()


def _outcome(function: Any, seed: str, data: bytes, folder: Path) -> tuple[str, str]:
    from specexport.contract.errors import SpecExportError

    try:
        function(seed, data, folder)
    except SpecExportError as error:
        message = str(error)
        line = message and message.isprintable() and len(message) < 5000
        return ("refused", "") if line else ("finding", f"no line of text: {message!r}")
    except BaseException as error:  # panics of libraries in Rust are no Exception
        import traceback

        where = "".join(traceback.format_exception(error)[-6:])
        return "finding", f"{type(error).__name__}: {str(error)[:500]}\n{where[-3000:]}"
    return "loaded", ""


def main() -> None:
    """Answers calls until there are no more."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # libraries may print
    targets: dict[str, Any] = {}
    while True:
        try:
            name, seed, data = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        if name not in targets:
            module, _, function = name.partition(":")
            most = resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            targets[name] = getattr(importlib.import_module(module), function)
            folder = Path(sys.argv[1]) / function
            folder.mkdir(exist_ok=True)
            targets[name](seed, None, folder)  # imports what it needs, and sees that the seed itself is taken
            taken = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, most))
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # SIGPROF ends the process
        answer = _outcome(targets[name], seed, data, Path(sys.argv[1]) / name.partition(":")[2])
        signal.setitimer(signal.ITIMER_PROF, 0)
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
