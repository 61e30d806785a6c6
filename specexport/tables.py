"""Output of commands: tables and sentences with styles. Texts are printed literally, without markup."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TextIO

from tabulate import SEPARATING_LINE, tabulate

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}
"""ANSI codes of styles."""
_LONG_WORD, _MIN_WIDTH = 16, 10
"""Narrowed columns keep the width of their longest word up to the first, and, if that is too wide, the second."""


class Styled(NamedTuple):
    """A sentence or the text of a cell, with its styles, separated by spaces: bold, dim, red, green, yellow."""

    text: str
    style: str = ""

    def render(self, width: int | None, colours: bool) -> str:
        """The text, wrapped to ``width`` characters; None does not wrap."""
        lines = self.text.split("\n")
        if width is not None:
            lines = [part for line in lines for part in textwrap.wrap(line, width) or [""]]
        if colours and self.style:
            codes = ";".join(_CODES[word] for word in self.style.split())
            lines = [f"\x1b[{codes}m{line}\x1b[0m" for line in lines]
        return "\n".join(lines)


@dataclass
class Table:
    """A table of styled cells.

    Attributes:
        title: the line above the table; empty for none.
        columns: the header; empty for none.
        align: l or r for each column; the last letter applies to all further columns.
    """

    title: str = ""
    columns: Sequence[str] = ()
    align: str = "l"
    rows: list[list[Styled]] = field(default_factory=list)

    def add_row(self, *cells: str | Styled) -> None:
        self.rows.append([cell if isinstance(cell, Styled) else Styled(cell) for cell in cells])

    def sides(self) -> list[Literal["left", "right"]]:
        """The alignment of each column."""
        count = len(self.columns) or max(map(len, self.rows), default=0)
        return ["right" if letter == "r" else "left" for letter in self.align.ljust(count, self.align[-1])[:count]]

    def render(self, width: int | None, colours: bool) -> str:
        """The table, with long cells wrapped to fit ``width`` characters; None does not wrap."""
        head = [[Styled(name) for name in self.columns]] if self.columns else []
        grid, sides = [*head, *self.rows], self.sides()
        widths = _widths([[cell.text for cell in column] for column in zip(*grid, strict=True)], sides, width)
        lines: list[Sequence[str]] = [
            [cell.render(column, colours) for cell, column in zip(row, widths, strict=True)] for row in grid
        ]
        # The header is a row, as tabulate makes columns two characters wider than their headers.
        lines[len(head) : len(head)] = [SEPARATING_LINE] * len(head)
        drawn = tabulate(lines, tablefmt="simple", disable_numparse=True, colalign=sides).split("\n")
        title = [Styled(self.title, "bold").render(width, colours)] if self.title else []
        return "\n".join([*title, *(line.rstrip() for line in drawn[1:-1])])  # without the rules around it


def show(*parts: Table | Styled | str) -> None:
    """Prints parts one below the other; on a terminal, wrapped to its width and perhaps in colour."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for part in parts:
        drawn = Styled(part) if isinstance(part, str) else part
        print(drawn.render(width, uses_colours(sys.stdout)))


def understands_escapes() -> bool:
    """Whether terminals understand escape sequences."""
    return os.environ.get("TERM", "dumb" if os.name == "posix" else "") != "dumb"


def uses_colours(stream: TextIO) -> bool:
    """Whether to write colours to a stream: a terminal that understands them, unless ``NO_COLOR`` is set."""
    return stream.isatty() and understands_escapes() and not os.environ.get("NO_COLOR")


def _widths(columns: Sequence[Sequence[str]], sides: Sequence[str], limit: int | None) -> list[int]:
    """The width of each column.

    If rows are longer than ``limit``, the widest columns are narrowed: first text columns, down to their longest words;
    then columns of numbers; then columns with long words.
    """
    widths = [max(1, *(len(line) for cell in cells for line in cell.split("\n"))) for cells in columns]
    words = [
        min(_LONG_WORD, max((len(word) for cell in cells for word in cell.split()), default=1)) for cells in columns
    ]
    if limit is None:
        return widths
    numbers = [width if side == "right" else word for width, word, side in zip(widths, words, sides, strict=True)]
    for minimums in (numbers, words, [_MIN_WIDTH] * len(widths)):
        while sum(widths) + 2 * (len(widths) - 1) > limit:
            longer = [at for at, width in enumerate(widths) if width > minimums[at]]
            if not longer:
                break
            widths[max(longer, key=widths.__getitem__)] -= 1
    return widths


def bytes_text(count: float) -> str:
    """A number of bytes with its unit."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
