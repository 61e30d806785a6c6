"""A thread that makes all calls of a device's library."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class DeviceThread:
    """One thread for all calls of a device's library.

    onnxruntime keeps handles and scratch memory for every thread that runs a session, and frees them when the thread
    ends. Captured graphs use them, so the thread must live as long as they do. Any thread may launch a captured graph.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="specexport-device")
        self._ident = self._pool.submit(threading.get_ident).result()

    def run(self, work: Callable[[], T]) -> T:
        """Runs a function in the thread and waits for it; its exceptions are raised here."""
        if threading.get_ident() == self._ident:
            return work()
        return self._pool.submit(work).result()

    def close(self) -> None:
        """Ends the thread."""
        self._pool.shutdown()
