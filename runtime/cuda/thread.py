"""The one thread that calls a device's library, for all threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class DeviceThread:
    """One thread, for everything that a library does on a device.

    onnxruntime keeps handles and their scratch memory for every thread that runs a session, and gives them back when
    the thread ends. What was captured goes on using them, so the thread must live as long as the captured graphs.
    Launching one of those is no call of a library: any thread may do it.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="specexport-device")
        self._ident = self._pool.submit(threading.get_ident).result()

    def run(self, work: Callable[[], T]) -> T:
        """Does some work there and waits for it; what it raises is raised here."""
        if threading.get_ident() == self._ident:
            return work()
        return self._pool.submit(work).result()

    def close(self) -> None:
        """Ends the thread."""
        self._pool.shutdown()
