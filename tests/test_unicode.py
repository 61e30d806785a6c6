"""Bytes that are not UTF-8, and text that standard output cannot show: one line, or a replacement."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specexport.contract.errors import BundleError
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.bundle import Bundle

NAME = "llama-near"
WRONG = b"ab\xff"
NAMED = "the byte 0xff at position 2 is not UTF-8; send text in UTF-8"


def command(
    *words: object, stdin: bytes = b"", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1", **(env or {})}
    encoded = [os.fsencode(word) if isinstance(word, Path) else word for word in words]
    command = [sys.executable, "-m", "specexport", *encoded]
    return subprocess.run(command, input=stdin, env=environment, capture_output=True, check=False)


@pytest.mark.parametrize(
    ("words", "stdin", "named"),
    [
        (["-n", "2"], WRONG, f"standard input: {NAMED}"),
        (["-n", "2", "-p", WRONG], b"", f"prompt: {NAMED}"),
        (["-n", "2", b"--prompt=" + WRONG], b"", f"prompt: {NAMED}"),
        (["-p", "a", "--stop", WRONG], b"", f"stop: {NAMED}"),
        (["-p", "a", "--method", WRONG], b"", f"method: {NAMED}"),
    ],
)
def test_text_that_is_not_utf8_is_explained_in_one_line(bundle, words, stdin, named):
    done = command("run", bundle(NAME), *words, stdin=stdin)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode() == f"specexport: error: {named}\n"


def test_another_encoding_is_that_of_standard_input(bundle):
    words = ("run", bundle(NAME), "-n", "2", "--temperature", "0", "--json", "--no-calibrate")
    latin = command(*words, stdin="ab\xff".encode("latin-1"), env={"PYTHONIOENCODING": "latin-1"})
    assert latin.returncode == 0
    output = [json.loads(done.stdout) for done in (latin, command(*words, "-p", "ab\xff"))]
    assert output[0]["prompt"] == "ab\xff"
    assert output[0]["token_ids"] == output[1]["token_ids"]
    done = command(*words, stdin=WRONG, env={"PYTHONIOENCODING": "ascii"})
    assert done.stderr == b"specexport: error: standard input: the byte 0xff is not ASCII; send text in ASCII\n"


@pytest.mark.parametrize(
    ("words", "content"),
    [
        (["run", "BUNDLE", "-p", "a", "--hypothesis", "FILE"], WRONG),
        (["bench", "BUNDLE", "--data", "FILE"], WRONG),
        pytest.param(["tune", "tree", "BUNDLE", "--data", "FILE"], WRONG, marks=pytest.mark.exporter),
        (["inspect", "FILE", "--tree"], WRONG),
        (["draw", "FILE", "-o", "out.svg"], b'{"parents": "\xff"}'),
        (["serve", "BUNDLE", "--api-key", WRONG], b""),
        (["build", "--target", WRONG, "-o", "out"], b""),
    ],
)
def test_files_and_options_that_are_not_utf8_are_named(bundle, tmp_path, words, content):
    (tmp_path / "data.jsonl").write_bytes(content)
    known: dict[object, object] = {"BUNDLE": bundle(NAME), "FILE": tmp_path / "data.jsonl"}
    done = command(*(known.get(word, word) for word in words))
    assert done.returncode == 1
    line = done.stderr.decode()
    assert line.startswith("specexport: error: ")
    assert line.count("\n") == 1
    assert ("data.jsonl" if "FILE" in words else NAMED) in line


@pytest.mark.exporter
@pytest.mark.parametrize(
    "file", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_a_checkpoint_that_is_not_utf8_is_refused(tmp_path, file):
    from tests.checkpoints import make_checkpoint

    model = make_checkpoint(tmp_path / "model", "llama", num_hidden_layers=1)
    path = model / file
    path.write_bytes((path.read_bytes() if path.exists() else b"") + WRONG)
    done = command("build", "--target", model, "-o", tmp_path / "out")
    assert done.returncode == 1, file
    lines = [line for line in done.stderr.decode().splitlines() if line.startswith("specexport: error: ")]
    assert len(lines) == 1
    assert str(model) in lines[0]
    assert b"Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_may_have_any_name_that_is_text(bundle, tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + WRONG))
    shutil.copytree(bundle(NAME), folder)
    with pytest.raises(BundleError, match="the folder's name is not UTF-8; rename it"):
        Bundle.open(folder)
    assert b"the folder's name is not UTF-8; rename it" in command("run", folder, "-p", "a").stderr
    shutil.move(folder, tmp_path / "🙂 ü")
    with Engine.load(tmp_path / "🙂 ü", threads=1) as engine:
        assert engine.generate("a", SamplingParams(max_tokens=2, ignore_eos=True)).token_ids


def test_unprintable_characters_are_replaced(bundle):
    words = ("run", bundle(NAME), "-p", "🙂 ü", "-n", "24", "--temperature", "0", "--ignore-eos", "--no-calibrate")
    shown = command(*words).stdout.decode()
    assert not shown.isascii()  # else this would show nothing
    plain = command(*words, env={"PYTHONIOENCODING": "ascii"})
    assert (plain.returncode, plain.stderr) == (0, b"")
    assert plain.stdout.decode("ascii") == "".join(letter if letter.isascii() else "?" for letter in shown)
    table = command("inspect", bundle(NAME), env={"PYTHONIOENCODING": "ascii"})
    assert table.returncode == 0
