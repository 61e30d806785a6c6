"""A second process that exports the models that draft, while the first one exports the target."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from specexport.contract.errors import BuildError, SpecExportError

if TYPE_CHECKING:
    from specexport.contract.methods import Method
    from specexport.exporter.writing import Progress

_CODE = "from specexport.exporter.second_process import main; main()"
_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class SecondProcess:
    """Started before the exporter is imported, so that both processes import it at the same time.

    It is no more than a head start: what it has not done when it ends, ``build`` does itself. It ends with the first
    process, however that ends.

    Args:
        methods: of the build; nothing is started where none has a graph, or on one core.
    """

    def __init__(self, methods: Iterable[Method]) -> None:
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._begun = False
        self._process: subprocess.Popen[bytes] | None = None
        if _cores > 1 and sys.executable and any(method.needs_graph for method in methods):
            threads = os.environ.get("OMP_NUM_THREADS", str(_cores // 2))
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _CODE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # an interrupt from the keyboard is for the first one
                env={**os.environ, "OMP_NUM_THREADS": threads},
            )

    def __enter__(self) -> SecondProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def begin(self, *build: Any) -> None:
        """Has it export what is not the target's; ``build`` are the arguments of :class:`Build` but for progress."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended, as it does where the exporter cannot be imported
            pickle.dump(build, self._process.stdin)
            self._process.stdin.flush()
        self._begun = True
        threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True).start()

    def _listen(self, replies: Any) -> None:
        try:
            while True:
                self._messages.put(pickle.load(replies))
        except (EOFError, pickle.UnpicklingError):  # it ended, or was ended
            self._messages.put(None)

    def finish(self, progress: Progress) -> None:
        """Waits until it is done.

        Raises:
            BuildError: what it exports was refused; says why.
        """
        while self._begun:
            message = self._messages.get()
            if isinstance(message, str):
                raise BuildError(message)
            if message is None:
                self._begun = False
            else:
                progress(*message)


def main() -> None:
    """The second process: reads a build on standard input, and writes progress, or why it was refused."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no reply

    def reply(*message: Any) -> None:
        pickle.dump(message[0] if len(message) == 1 else message, replies)
        replies.flush()

    from specexport.exporter.build import export_beside

    build = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_together, daemon=True).start()
    try:
        export_beside(*build, reply)
    except SpecExportError as error:
        reply(str(error))
    replies.close()
    os._exit(0)  # without waiting for the thread that reads


def _end_together() -> None:
    sys.stdin.buffer.read()  # until the first process closes it, or ends
    os._exit(1)
