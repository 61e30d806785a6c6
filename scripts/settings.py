"""Write the table in docs/settings.md from the list of settings in exporter/checkpoints/settings.py."""

from __future__ import annotations

from pathlib import Path

from specexport.exporter.checkpoints.settings import SETTINGS

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"
BEGIN, END = "<!-- settings: made by scripts/settings.py -->", "<!-- settings end -->"


def table() -> str:
    """The page's part between its two marks."""
    rows = ["| file | settings | here | |", "|---|---|---|---|"]
    for setting in SETTINGS:
        keys = ", ".join(f"`{key}`" for key in setting.keys)
        rows.append(f"| {setting.file} | {keys} | {setting.handling} | {setting.note} |")
    return "\n".join(rows)


def with_table(page: str) -> str:
    """A page with the table between its marks made anew."""
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
