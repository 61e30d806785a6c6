"""Work in other threads and processes that must not hang."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

Answer = TypeVar("Answer")

JOIN = 120.0
"""Seconds after which a thread that should have ended is taken to hang."""


def python(program: str, *words: object) -> str:
    """What a program prints in a process of its own, which is to succeed without a word on standard error."""
    command = [sys.executable, "-c", program, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=5 * JOIN)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def wait_until(done: Callable[[], Answer], otherwise: str, every: float = 0.01) -> Answer:
    """Waits until something is true; gives what it is then."""
    end = time.monotonic() + JOIN
    while not (answer := done()):
        assert time.monotonic() < end, otherwise
        time.sleep(every)
    return answer


def in_thread(work: Callable[[], Any]) -> Any:
    """Does something in another thread and gives back what it returned or raised."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(JOIN)
    assert not thread.is_alive(), "hangs"
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def in_threads(count: int, requests: int, answer: Callable[[int], Answer]) -> list[Answer]:
    """Answers requests, by their numbers, in ``count`` threads at once; gives the answers in order."""
    answers: dict[int, Answer] = {}

    def work(first: int) -> None:
        for number in range(first, requests, count):
            answers[number] = answer(number)

    threads = [threading.Thread(target=work, args=(first,), daemon=True) for first in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN)
        assert not thread.is_alive(), "hangs"
    return [answers[number] for number in range(requests)]
