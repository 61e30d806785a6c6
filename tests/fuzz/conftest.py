"""How long fuzzing goes on, and what it says in the end."""

import collections
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest

from tests.fuzz.sandbox import Sandbox, sandbox

MINUTES = float(os.environ.get("SPECEXPORT_FUZZ_MINUTES", "0"))
"""For all targets together; 0 for what every run of the tests does, in about a minute."""
COUNTS: collections.Counter[tuple[str, str]] = collections.Counter()
"""Inputs by their target and what became of them."""

_ALL = {"deadline": None, "database": None, "suppress_health_check": list(hypothesis.HealthCheck), "print_blob": True}
hypothesis.settings.register_profile("ci", derandomize=True, **_ALL)
hypothesis.settings.register_profile("fuzz", derandomize=False, **_ALL)

Fuzz = Callable[[str, Any, Callable[[Any], str], int], None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lets every target have the same share of the time."""
    fuzzing = [pair for pair in items if "fuzz" in getattr(pair, "fixturenames", ())]
    for pair in fuzzing:
        pair.user_properties.append(("seconds", MINUTES * 60 / len(fuzzing)))


@pytest.fixture(scope="session")
def box() -> Iterator[Sandbox]:
    """A process for targets that may crash."""
    with sandbox() as box:
        yield box


@pytest.fixture
def fuzz(request: pytest.FixtureRequest) -> Fuzz:
    """Gives a function that tries inputs: a target's name, a strategy, what says what became of one, and how many."""
    seconds = dict(request.node.user_properties).get("seconds", 0)

    def run(name: str, strategy: Any, check: Callable[[Any], str], examples: int) -> None:
        end = time.monotonic() + seconds

        def tried(arguments: Any) -> None:
            COUNTS[name, check(arguments)] += 1

        profile = hypothesis.settings.get_profile("fuzz" if seconds else "ci")
        test = hypothesis.settings(profile, max_examples=examples)(hypothesis.given(strategy)(tried))
        test()
        while time.monotonic() < end:
            hypothesis.seed(random.getrandbits(64))(test)()

    return run


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many inputs each target had."""
    names = sorted({name for name, _ in COUNTS})
    if not names:
        return
    terminalreporter.section("fuzzing")
    for name in names:
        outcomes = {outcome: count for (target, outcome), count in sorted(COUNTS.items()) if target == name}
        words = ", ".join(f"{count:,} {outcome}" for outcome, count in outcomes.items())
        terminalreporter.write_line(f"{name:20} {sum(outcomes.values()):>9,} inputs: {words}")
    terminalreporter.write_line(f"{'all':20} {sum(COUNTS.values()):>9,} inputs")
