"""Tables, styles and progress, on terminals and in files."""

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
import time

import pytest

from specexport.building import progress_bars
from specexport.tables import Styled, Table, show

MARKUP = "a [bold]b[/] {c} \\d %s <e>"


def table() -> Table:
    sheet = Table("title", ("name", "value", "what"), "lrl")
    sheet.add_row(MARKUP, "1", "True")
    sheet.add_row(Styled("x", "bold red"), "100", "one\ntwo")
    return sheet


def on_terminal(program: str, columns: int = 80, **environment: str) -> str:
    """What a program writes to standard output and error if both are a terminal of so many columns."""
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    setting = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    setting |= {"COLUMNS": str(columns), "PYTHONIOENCODING": "utf-8", "TERM": "xterm", **environment}
    subprocess.run([sys.executable, "-c", program], stdout=theirs, stderr=theirs, env=setting, check=True, timeout=60)
    output = os.read(ours, 1 << 16).decode()
    os.close(theirs)
    os.close(ours)
    return output.replace("\r\n", "\n")


def test_a_table_is_text_where_there_is_no_terminal(capsys):
    show(table(), "", Styled("done", "green"))
    indent = " " * (len(MARKUP) - 2)
    assert capsys.readouterr().out.splitlines() == [
        "title",
        f"name{indent}value  what",
        f"{'-' * len(MARKUP)}  -----  ----",
        f"{MARKUP}      1  True",
        f"x   {indent}  100  one",
        f"    {indent}       two",
        "",
        "done",
    ]


def test_a_table_without_names_or_rows():
    without = Table()
    assert without.render(80, False) == ""
    without.add_row("a", "long " * 40)
    without.add_row("longer", "b")
    assert without.render(None, False).splitlines() == [f"a       {('long ' * 40).strip()}", "longer  b"]
    assert Table("title", ("a", "b")).render(80, False) == "title\na  b\n-  -"


@pytest.mark.parametrize("width", [40, 80, 120])
def test_long_cells_are_broken_where_a_line_ends(width):
    sheet = Table("", ("name", "sentence", "n"), "llr")
    words = [f"word{n}" for n in range(40)]
    sheet.add_row("a/path/" * 4, " ".join(words), "123")
    lines = sheet.render(width, False).splitlines()
    assert width - len("word10") < max(map(len, lines)) <= width
    assert re.findall(r"word\d+", " ".join(lines)) == words
    first = lines[1].index(" ")  # its rule
    assert "".join(line[:first].strip() for line in lines[2:]) == "a/path/" * 4


def test_words_are_broken_last_and_numbers_before_them():
    sheet = Table("", ("method", "speed"), "lr")
    sheet.add_row("draft_model and ngram", "1.42, 1.17x, 22")
    assert sheet.render(28, False).splitlines()[2:] == ["draft_model  1.42, 1.17x, 22", "and ngram"]
    assert sheet.render(27, False).splitlines()[2:] == ["draft_model  1.42, 1.17x,", "and ngram              22"]
    assert sheet.render(10, False).splitlines()[2:] == [
        "draft_mode   1.42,",
        "l and       1.17x,",
        "ngram           22",
    ]


def test_a_terminal_shows_styles_and_its_width():
    program = (
        "from specexport.tables import Styled, Table, show\n"
        "made = Table('title', ('name', 'what'))\n"
        "made.add_row(Styled('[b]x[/b]', 'bold red'), 'word ' * 20)\n"
        "show(made, Styled('fine', 'green'))\n"
    )
    output = on_terminal(program, 40)
    assert "\x1b[1;31m[b]x[/b]\x1b[0m  word" in output
    assert output.endswith("\x1b[32mfine\x1b[0m\n")
    plain = on_terminal(program, 40, NO_COLOR="1")
    assert on_terminal(program, 40, TERM="dumb") == plain
    assert re.sub("\x1b\\[[0-9;]*m", "", output) == plain
    assert max(map(len, plain.splitlines())) <= 40


def steps(pause: float = 0.0) -> None:
    with progress_bars() as progress:
        progress("[a] {step}", 0, 2)
        progress("writing", 0, 3 << 20)
        progress("[a] {step}", 1, 2)
        time.sleep(pause)  # a terminal's bar is drawn ten times a second
        progress("writing", 1 << 20, 3 << 20)
        progress("[a] {step}", 2, 2)
        for _ in range(2):
            progress("writing", 3 << 20, 3 << 20)
        progress("at once", 1, 1)
        progress("never done", 1, 2)


def test_progress_is_one_line_per_step_without_a_terminal(capsys):
    steps()
    output = capsys.readouterr()
    assert output.out == ""
    lines = output.err.splitlines()
    assert [re.split("  +", line)[0] for line in lines] == ["[a] {step}", "writing", "at once"]
    assert all("100%" in line for line in lines)
    assert [line.endswith("3.00MB of 3.00MB") for line in lines] == [False, True, False]


def test_a_terminal_shows_bars_as_they_grow():
    output = on_terminal("from tests.test_tables import steps; steps(0.2)")
    bars = re.split("[\r\n]+", output)
    assert any(re.search(r"^writing +33% .* 1\.00MB of 3\.00MB, \S+ left", bar) for bar in bars)
    assert any(re.search(r"^never done +50%", bar) for bar in bars)
    assert [bar for bar in bars if "left" in bar and "100%" in bar] == []


def test_a_step_may_be_done_again(capsys):
    with progress_bars() as progress:
        for done in (1, 2, 0, 2):
            progress("twice", done, 2)
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_steps_that_silence_libraries_are_shown(capsys):
    with progress_bars() as progress, contextlib.redirect_stderr(io.StringIO()):
        progress("rounding", 2, 2)
    assert capsys.readouterr().err.startswith("rounding ")


def test_bars_end_with_an_error(capsys):
    with pytest.raises(OSError, match="full"), progress_bars() as progress:
        progress("begun", 0, 1)
        raise OSError("full")
    assert capsys.readouterr().err == ""
