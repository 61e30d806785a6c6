"""The table of families in docs/support.md says what its results say."""

from __future__ import annotations

import json

import pytest

from scripts.families import HELP, PAGE, RESULTS, TITLES, families, with_table
from tests.test_families import REFUSED

pytestmark = pytest.mark.exporter

FOUND: dict[str, dict[str, str]] = json.loads(RESULTS.read_text(encoding="utf-8"))


def test_the_table_is_that_of_the_results() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page, FOUND) == page


def test_what_other_tests_refuse_is_refused_in_it_and_nothing_else_is_wrong() -> None:
    assert FOUND.keys() <= families().keys()
    refused = {name for name, found in FOUND.items() if "refused" in found}
    assert refused >= {f"{name}, {why}" for why, (name, _) in REFUSED.items()} and refused <= HELP.keys()
    assert len(FOUND) - len(refused) >= 30
    for name, found in FOUND.items():
        assert name in refused or (found.keys() <= TITLES.keys() and found["fp32"] == found["greedy"] == "yes"), name
