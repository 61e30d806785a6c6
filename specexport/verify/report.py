"""The report of ``specexport verify``, as data and as a table."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specexport.tables import Styled, Table

Numbers = dict[str, float]

_STYLES = {"passed": "green", "failed": "bold red", "not run": "yellow"}


@dataclass(frozen=True)
class Check:
    """One check and its result.

    Attributes:
        name: ``files``, ``graphs``, ``engines``, ``logits``, ``quality``, ``embeds``, the name of a method, or
            ``speculation``.
        passed: None if it could not be run.
        sentence: the finding, or why it was not run.
    """

    name: str
    passed: bool | None
    sentence: str
    numbers: Numbers = field(default_factory=dict)

    @property
    def result(self) -> str:
        """The result in words."""
        return "not run" if self.passed is None else "passed" if self.passed else "failed"


@dataclass(frozen=True)
class VerifyReport:
    """Every check of a bundle, in order."""

    bundle: Path
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(check.passed is not False for check in self.checks)

    @property
    def verdict(self) -> str:
        """The verdict in words."""
        if not self.passed:
            return "failed"
        return "passed" if all(check.passed for check in self.checks) else "passed what could be checked"

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON; numbers that are not finite, which JSON lacks, are null."""
        checks = [
            {
                "name": check.name,
                "result": check.result,
                "sentence": check.sentence,
                "numbers": {name: x if math.isfinite(x) else None for name, x in check.numbers.items()},
            }
            for check in self.checks
        ]
        return {"bundle": str(self.bundle), "verdict": self.verdict, "passed": self.passed, "checks": checks}


def numbers(report: VerifyReport) -> Table:
    """A table of the measurements of all checks."""
    table = Table("what was measured", ("check", "figure", "value"), "llr")
    for check in report.checks:
        for name, value in check.numbers.items():
            table.add_row(check.name, name.replace("_", " "), f"{value:.6g}" if value % 1 else f"{value:.0f}")
    return table


def render(report: VerifyReport) -> list[Table | Styled | str]:
    """The report as a table with a verdict below it."""
    table = Table(str(report.bundle), ("check", "result", "what was found"))
    for check in report.checks:
        table.add_row(check.name, Styled(check.result, _STYLES[check.result]), check.sentence)
    style = _STYLES["failed" if not report.passed else "passed" if report.verdict == "passed" else "not run"]
    return [table, "", Styled(f"verdict: {report.verdict}", style)]
