"""What commands print: tables, sentences and their styles. Texts are shown as they are: nothing in them is markup."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tabulate import SEPARATING_LINE, tabulate

_CODES = {"bold": "1", "red": "31", "green": "32", "yellow": "33"}
"""ANSI's numbers of styles."""
_NARROWEST = 10
"""Characters below which no column is shortened."""


class Styled(NamedTuple):
    """A sentence, or a cell of a table, and words of its style: bold, red, green, yellow."""

    text: str
    style: str = ""


@dataclass
class Table:
    """Cells in rows.

    Attributes:
        title: the line above it, if there is one.
        columns: their names; with none there is no header.
        align: l or r for each column: cells on its left or right; the last letter holds for all columns behind it.
        rows: as many cells as columns each.
    """

    title: str = ""
    columns: Sequence[str] = ()
    align: str = "l"
    rows: list[list[Styled]] = field(default_factory=list)

    def add_row(self, *cells: str | Styled) -> None:
        self.rows.append([cell if isinstance(cell, Styled) else Styled(cell) for cell in cells])

    def sides(self) -> list[Literal["left", "right"]]:
        """Where the cells of each column are."""
        count = len(self.columns) or max(map(len, self.rows), default=0)
        return ["right" if letter == "r" else "left" for letter in self.align.ljust(count, self.align[-1])]

    def text(self, width: int | None = None, colours: bool = False) -> str:
        """Lines for a terminal.

        Args:
            width: characters of a line; longer cells, the widest first, are broken into several. None: of any length.
            colours: whether styles are shown.
        """
        head = [[Styled(name) for name in self.columns]] if self.columns else []
        grid = [*head, *self.rows]
        widths = [
            max(len(line) for cell in column for line in cell.text.split("\n")) for column in zip(*grid, strict=True)
        ]
        while width is not None and sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > _NARROWEST:
            widths[widths.index(max(widths))] -= 1
        lines: list[Sequence[str]] = [
            [
                _painted(Styled(_broken(cell.text, most), cell.style), colours)
                for cell, most in zip(row, widths, strict=True)
            ]
            for row in grid
        ]
        # As a row: tabulate makes a column two characters wider than its header.
        lines[len(head) : len(head)] = [SEPARATING_LINE] * len(head)
        drawn = tabulate(lines, tablefmt="simple", disable_numparse=True, colalign=self.sides())
        title = [_painted(Styled(self.title, "bold"), colours)] if self.title else []
        return "\n".join([*title, *(line.rstrip() for line in drawn.split("\n")[1:-1])])  # the first and last are rules


def show(*parts: Table | Styled | str) -> None:
    """Prints one below the other: as wide as the terminal, and coloured if ``NO_COLOR`` is not set, if it is one."""
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else None
    colours = terminal and not os.environ.get("NO_COLOR")
    for part in parts:
        if isinstance(part, Table):
            print(part.text(width, colours))
        else:
            print(_painted(part, colours) if isinstance(part, Styled) else part)


def _broken(text: str, width: int) -> str:
    """A text in lines of at most so many characters."""
    return "\n".join("\n".join(textwrap.wrap(line, width)) for line in text.split("\n"))


def _painted(said: Styled, colours: bool) -> str:
    """A text with the codes of its style, in each of its lines by itself."""
    if not colours or not said.style:
        return said.text
    codes = ";".join(_CODES[word] for word in said.style.split())
    return "\n".join(f"\x1b[{codes}m{line}\x1b[0m" for line in said.text.split("\n"))
