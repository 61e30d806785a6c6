"""A stream, and work on it that is captured once and launched many times."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence

from specexport.contract.errors import BackendError
from specexport.runtime.cuda.api import Cuda


class CudaStream:
    """Work that the device does in the order it was given.

    It lives until it is closed: libraries that were given its handle may use it in their own destructors, and what is
    collected first is not ours to say.

    Attributes:
        handle: what libraries take for it.
        waits: how often its work was waited for; for measurements.
        capturing: whether what it is given is recorded.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._closed = False
        self.handle = cuda.create_stream()
        self.waits = 0
        self.capturing = False

    def synchronize(self) -> None:
        """Waits for everything given so far."""
        self._cuda.synchronize(self.handle)
        self.waits += 1

    def capture(self, enqueue: Callable[[], None]) -> Captured:
        """Records what a function gives to this stream, without doing it.

        Nothing may be allocated and nothing waited for meanwhile, and every address must stay valid for as long as the
        graph is launched.

        Raises:
            BackendError: something that cannot be captured was given to the stream; it is usable as before.
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
        """Captures every piece of work, or none where one cannot be: then why not."""
        captured: list[Captured] = []
        try:
            for enqueue in work:
                captured.append(self.capture(enqueue))  # noqa: PERF401  # those before a failure are to be closed
        except BackendError as error:
            for graph in captured:
                graph.close()
            return error
        return captured

    def close(self) -> None:
        """Gives the stream back after its work; then does nothing."""
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
        """Gives all of it to its stream in one call."""
        self._cuda.launch(self._executable, self._stream)

    def close(self) -> None:
        """Gives the graph back; then does nothing."""
        self._close()
