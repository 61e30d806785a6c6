"""HTML reports that open offline: the tables that a command prints, and charts of the same values as SVG."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from pathlib import Path
from typing import NamedTuple

from specexport.contract.errors import RequestError
from specexport.contract.folders import write_file
from specexport.tables import Styled, Table
from specexport.version import full_version


class Figure(NamedTuple):
    """A picture: a caption and trusted SVG."""

    caption: str
    svg: str


Part = Table | Styled | str | Figure
"""A part of a page: output of a command, or a picture."""
Points = Sequence[tuple[float, float]]
"""(x, y), in the order of x; finite and not negative."""

_WIDTH, _HEIGHT, _LEFT_MARGIN, _RIGHT_MARGIN, _ROW = 640, 280, 56, 24, 20
"""Pixels: size of a line chart, its left and right margins, and the height of a bar."""
_COLOURS = 6
"""Number of colours of lines, in ``assets/chart.css``."""


def asset(name: str) -> str:
    """The text of a file in ``assets``."""
    return Path(__file__).with_name("assets").joinpath(name).read_text(encoding="utf-8")


_FORMATS = {".html", ".svg", ".png", ".jpg", ".jpeg", ".pdf", ".json", ".csv", ".md", ".txt"}
"""Suffixes that name a format."""


def check_suffix(flag: str, path: Path, suffix: str) -> None:
    """Refuses the name of another format than the one that is written."""
    if path.suffix.lower() in _FORMATS - {suffix}:
        raise RequestError(
            f"{flag} is {path}, but {suffix[1:].upper()} is written; name it {path.with_suffix(suffix)}",
            param=flag.removeprefix("--"),
        )


def check_path(flag: str, path: Path | None) -> None:
    """Refuses a path that cannot be written, before the report takes hours."""
    if path is None:
        return
    check_suffix(flag, path, ".html")
    parent = path.absolute().parent
    if path.is_dir() or not parent.is_dir():
        raise RequestError(f"{flag} is {path}; expected a file to write, in an existing folder")
    if not os.access(path if path.exists() else parent, os.W_OK):
        raise RequestError(f"{flag} is {path}, which cannot be written; expected a file in a folder that can")


def write(path: Path, title: str, parts: Iterable[Part]) -> None:
    """Writes a page without scripts or external resources; replaces an existing file."""
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    page = asset("report.html").format(
        title=escape(title),
        style=asset("report.css"),
        parts="\n".join(map(_html, parts)),
        version=escape(full_version()),
        date=date,
    )
    write_file(path, page.encode())


def _html(part: Part) -> str:
    if isinstance(part, Figure):
        return f"<figure><figcaption>{escape(part.caption)}</figcaption>{part.svg}</figure>"
    if not isinstance(part, Table):
        sentence = part if isinstance(part, Styled) else Styled(part)
        return f'<p class="{sentence.style}">{escape(sentence.text)}</p>' if sentence.text else ""
    sides = part.sides()
    html = ["<div><table>", f"<caption>{escape(part.title)}</caption>" if part.title else ""]
    if part.columns:
        heads = (
            f'<th scope="col" class="{side}">{escape(name)}</th>'
            for side, name in zip(sides, part.columns, strict=True)
        )
        html.append(f"<thead><tr>{''.join(heads)}</tr></thead>")
    html.append("<tbody>")
    for row in part.rows:
        cells = (
            f'<td class="{side} {cell.style}">{escape(cell.text)}</td>' for side, cell in zip(sides, row, strict=True)
        )
        html.append(f"<tr>{''.join(cells)}</tr>")
    return "\n".join([*html, "</tbody></table></div>"])


def lines(x_label: str, y_label: str, series: Mapping[str, Points], level: tuple[str, float] | None = None) -> str:
    """A line chart as SVG; both axes begin at 0. ``level`` is a dashed line across the chart, for comparison."""
    points = [point for line in series.values() for point in line]
    x_ticks = _ticks(max((x for x, _ in points), default=0), whole=all(float(x).is_integer() for x, _ in points))
    y_ticks = _ticks(max([y for _, y in points] + ([level[1]] if level is not None else []), default=0))
    top = 36 + _ROW * math.ceil(len(series) / 4)
    bottom = top + _HEIGHT

    def place(x: float, y: float) -> tuple[str, str]:
        across = _LEFT_MARGIN + (_WIDTH - _LEFT_MARGIN - _RIGHT_MARGIN) * x / x_ticks[-1]
        return f"{across:.1f}", f"{bottom - _HEIGHT * y / y_ticks[-1]:.1f}"

    elements = [f'<text x="4" y="{top - 12}">{escape(y_label)}</text>']
    for y in y_ticks:
        at = place(0, y)[1]
        elements.append(f'<line x1="{_LEFT_MARGIN}" x2="{_WIDTH - _RIGHT_MARGIN}" y1="{at}" y2="{at}"/>')
        elements.append(f'<text class="tick end" x="{_LEFT_MARGIN - 6}" y="{float(at) + 4:.1f}">{y:g}</text>')
    elements += [f'<text class="tick middle" x="{place(x, 0)[0]}" y="{bottom + 16}">{x:g}</text>' for x in x_ticks]
    elements.append(f'<text class="end" x="{_WIDTH - _RIGHT_MARGIN}" y="{bottom + 36}">{escape(x_label)}</text>')
    if level is not None:
        at = place(0, level[1])[1]
        elements.append(f'<line class="level" x1="{_LEFT_MARGIN}" x2="{_WIDTH - _RIGHT_MARGIN}" y1="{at}" y2="{at}"/>')
        label = f"{escape(level[0])}: {level[1]:.4g}"
        elements.append(f'<text class="tick end" x="{_WIDTH - _RIGHT_MARGIN}" y="{float(at) - 5:.1f}">{label}</text>')
    for number, (name, line) in enumerate(series.items()):
        left, up = 4 + number % 4 * 156, 14 + number // 4 * _ROW
        colour = f"s{number % _COLOURS}"
        elements.append(f'<rect class="{colour}" x="{left}" y="{up - 9}" width="10" height="10"/>')
        elements.append(f'<text x="{left + 16}" y="{up}">{escape(name)}</text>')
        path = " ".join(",".join(place(x, y)) for x, y in line)
        elements.append(f'<polyline style="stroke: var(--{colour})" points="{path}"/>')
        for x, y in line:
            (cx, cy), label = place(x, y), f"{escape(name)}: {y:.4g} at {x:g}"
            elements.append(f'<circle class="{colour}" cx="{cx}" cy="{cy}" r="3"><title>{label}</title></circle>')
    return _svg(bottom + 44, f"{y_label} by {x_label}", elements)


def bars(label: str, groups: Mapping[str, Mapping[str, float]], level: tuple[str, float] | None = None) -> str:
    """A bar chart as SVG: the bars of each group one below the other, with their names and values.

    Values that are not finite are left out. ``level`` is a dashed line, for comparison.
    """
    finite = {
        group: {name: value for name, value in bars.items() if math.isfinite(value)} for group, bars in groups.items()
    }
    values = [value for bars in finite.values() for value in bars.values()]
    ticks = _ticks(max(values + ([level[1]] if level is not None else []), default=0))
    left, width = 160, _WIDTH - 160 - 64
    elements, y = [f'<text x="4" y="14">{escape(label)}</text>'], 24
    for group, bars in finite.items():
        elements.append(f'<text class="tick" x="4" y="{y + 14}">{escape(group)}</text>')
        y += _ROW
        for name, value in bars.items():
            length = width * max(0.0, value) / ticks[-1]
            elements.append(f'<text class="end" x="{left - 8}" y="{y + 14}">{escape(name)}</text>')
            elements.append(f'<rect class="s0" x="{left}" y="{y + 4}" width="{length:.1f}" height="{_ROW - 8}"/>')
            elements.append(f'<text x="{left + length + 6:.1f}" y="{y + 14}">{value:.4g}</text>')
            y += _ROW
    for tick in ticks:
        at = f"{left + width * tick / ticks[-1]:.1f}"
        elements.insert(0, f'<line x1="{at}" x2="{at}" y1="24" y2="{y + 4}"/>')
        elements.append(f'<text class="tick middle" x="{at}" y="{y + 20}">{tick:g}</text>')
    if level is not None:
        at = f"{left + width * level[1] / ticks[-1]:.1f}"
        elements.append(f'<line class="level" x1="{at}" x2="{at}" y1="24" y2="{y + 4}"/>')
        elements.append(f'<text class="tick middle" x="{at}" y="{y + 36}">{escape(level[0])}: {level[1]:g}</text>')
    return _svg(y + 44, label, elements)


def _svg(height: float, title: str, elements: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {_WIDTH} {height:g}" width="{_WIDTH}" '
        f'role="img"><title>{escape(title)}</title><style>{asset("chart.css")}</style>'
    )
    return "\n".join([head, *elements, "</svg>"])


def _ticks(largest: float, whole: bool = False) -> list[float]:
    """Round numbers at equal distances, from 0 to the first that is at least ``largest``."""
    largest = largest or 1.0
    power = 10.0 ** math.floor(math.log10(largest / 5))
    step = next(factor * power for factor in (1, 2, 5, 10) if largest <= 6 * factor * power)
    step = max(1.0, step) if whole else step
    return [step * count for count in range(math.ceil(largest / step - 1e-9) + 1)]
