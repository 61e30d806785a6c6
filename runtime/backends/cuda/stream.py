"""A stream, and work on it that is captured once and launched many times."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence

from specexport.contract.errors import BackendError
from specexport.runtime.backends.cuda.api import Cuda


class CudaStream:
    """A queue of work that the device does in order.

    It has no finalizer, but lives until it is closed: libraries may use its handle in their destructors, and the order
    of collection is undefined.

    Attributes:
        handle: its form for libraries.
        waits: number of waits for its work; for measurements.
        capturing: whether its work is being recorded.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._closed = False
        self.handle = cuda.create_stream()
        self.waits = 0
        self.capturing = False

    def synchronize(self) -> None:
        """Waits for all work so far."""
        self._cuda.synchronize(self.handle)
        self.waits += 1

    def capture(self, enqueue: Callable[[], None]) -> Captured:
        """Records the work that a function enqueues, without doing it.

        The function must not allocate or wait, and all its addresses must stay valid for as long as the graph is
        launched.

        Raises:
            BackendError: some of the work cannot be captured; the stream stays usable.
        """
        self._cuda.begin_capture(self.handle)
        self.capturing = True
        try:
            enqueue()
        except BaseException:
            with contextlib.suppress(BackendError):
                self._cuda.abandon_capture(self.handle)
            raise
        finally:
            self.capturing = False
        return Captured(self._cuda, self.handle, self._cuda.instantiate(self._cuda.end_capture(self.handle)))

    def capture_all(self, work: Sequence[Callable[[], None]]) -> list[Captured] | BackendError:
        """Captures every piece of work, or none: then returns the error."""
        captured: list[Captured] = []
        try:
            for enqueue in work:
                captured.append(self.capture(enqueue))  # noqa: PERF401  # those before a failure must be closed
        except BackendError as error:
            for graph in captured:
                graph.close()
            return error
        return captured

    def close(self) -> None:
        """Destroys the stream after its work; later calls do nothing."""
        if not self._closed:
            self._closed = True
            self._cuda.destroy_stream(self.handle)


class Captured:
    """A CUDA graph of work on one stream."""

    def __init__(self, cuda: Cuda, stream: int, executable: int) -> None:
        self._cuda = cuda
        self._stream = stream
        self._executable = executable
        self._close = weakref.finalize(self, cuda.destroy_executable, executable)
        self._close.atexit = False  # the driver frees everything when a process ends

    def launch(self) -> None:
        """Enqueues all of it in one call."""
        self._cuda.launch(self._executable, self._stream)

    def close(self) -> None:
        """Destroys the graph; later calls do nothing."""
        self._close()
