"""The dry run's table: a row a bundle and number of slots, then what the steps of each method launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.null_cuda.log import ROLES

_COLUMNS = ("bundle", "loads", "captures", *ROLES, "graphs", "in-step waits", "in-step memory", "verdict")


def print_table(reporter: Any, cells: Sequence[Sequence[Any]]) -> None:
    """Prints what ``test_dry_run`` recorded: cell, loads, captures, counts by way, memory calls in steps, problems.

    Launches are the most of any step, greedy/sampled where they differ.
    """
    rows = [_COLUMNS]
    for cell, loads, captures, used, memory, problems in sorted(cells):
        most = {
            sampling: [max(column) for column in zip(*counts, strict=True)]
            for sampling in ("greedy", "sampled")
            if (counts := [counts for way, counts in used.items() if way.endswith(sampling)])
        }
        columns = zip(*most.values(), strict=True) if most else [("-",)] * (len(ROLES) + 2)
        shown = ["/".join(map(str, dict.fromkeys(column))) for column in columns]
        rows.append((cell, loads, captures, *shown, memory, f"{problems} problems" if problems else "ok"))
    widths = [max(len(str(row[at])) for row in rows) for at in range(len(_COLUMNS))]
    reporter.write_sep("-", "GPU dry run: onnxruntime-gpu over null CUDA; launches a step, greedy/sampled")
    for row in rows:
        first, *rest = (str(cell) for cell in row)
        numbers = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        reporter.write_line("  ".join([first.ljust(widths[0]), *numbers]))
