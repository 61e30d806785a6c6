"""The command line: what users type and what they read back."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from specexport.cli import main

PROMPT = "one two three"


@pytest.fixture
def folder(bundle: Callable[[str], Path]) -> str:
    return str(bundle("llama-near"))


def test_run_prints_the_same_text_streamed_whole_and_as_json(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", folder, "--prompt", PROMPT, "-n", "12", "--temperature", "0"]) == 0
    streamed = capsys.readouterr().out
    assert main(["run", folder, "--prompt", PROMPT, "-n", "12", "--temperature", "0", "--no-stream"]) == 0
    assert capsys.readouterr().out == streamed
    assert main(["run", folder, "--prompt", PROMPT, "-n", "12", "--temperature", "0", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["text"] + "\n" == streamed
    assert result["prompt"] == PROMPT
    assert len(result["token_ids"]) == result["stats"]["output_tokens"]
    assert result["params"]["temperature"] == 0


def test_run_without_speculation_says_the_same(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", folder, "--prompt", PROMPT, "-n", "12", "--temperature", "0", "--json"]
    main(words)
    fast = json.loads(capsys.readouterr().out)
    main([*words, "--no-speculation"])
    plain = json.loads(capsys.readouterr().out)
    assert fast["token_ids"] == plain["token_ids"]
    assert fast["stats"]["drafted"] > 0 == plain["stats"]["drafted"]


def test_run_reads_standard_input(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    assert main(["run", folder, "-n", "4", "--temperature", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == PROMPT


def test_the_same_seed_gives_the_same_text(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("3", "3", "4"):
        main(["run", folder, "--prompt", PROMPT, "-n", "24", "--temperature", "1", "--seed", seed, "--ignore-eos"])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_underscores_and_dashes_are_the_same_flag(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", folder, "--prompt=a_b", "--max_tokens=3", "--top_p", "0.5", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["prompt"] == "a_b"
    assert (result["params"]["max_tokens"], result["params"]["top_p"]) == (3, 0.5)


def test_stats_go_to_standard_error(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["run", folder, "--prompt", PROMPT, "-n", "12", "--stats"])
    captured = capsys.readouterr()
    assert "acceptance length" in captured.err
    assert "acceptance length" not in captured.out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--top-p", "3"], "top_p is 3.0; expected a number in (0, 1]"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--threads", "0"], "--threads is 0"),
        (["--prompt", "word " * 3000], "this bundle's context holds"),
    ],
)
def test_a_bad_request_is_explained_in_one_line(
    folder: str, words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", folder, "--prompt", PROMPT, *words]) == 1
    captured = capsys.readouterr()
    assert named in captured.err
    assert captured.err.startswith("specexport: error: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_inspect_shows_the_manifest(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", folder]) == 0
    shown = capsys.readouterr().out
    assert "draft_model: 4 draft tokens a step in a chain" in shown
    assert "target/weights.bin" in shown
    assert main(["inspect", folder, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((Path(folder) / "specexport.json").read_text())


def test_a_folder_that_is_no_bundle_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["inspect"], ["run", "--prompt", "x"]):
        assert main([command[0], str(tmp_path), *command[1:]]) == 1
        assert "no specexport.json; expected a bundle made by 'specexport build'" in capsys.readouterr().err


@pytest.mark.exporter
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--target", "nowhere"], "nowhere: no such folder"),
        (["--target", "nowhere", "--num-speculative-tokens", "3"], "without a draft or Medusa heads"),
        (["--target", "nowhere", "--block-size", "5"], "block_size is 5"),
        (["--target", "nowhere", "--lowering", "portable", "--precision", "int4"], "precision is 'int4'"),
        (["--target", "nowhere", "--lowering", "portable", "--block-size", "32"], "opset 20 knows no blocks"),
        (["--target", "nowhere", "--draft", "x", "--num-speculative-tokens", "99"], "num_speculative_tokens is 99"),
    ],
)
def test_a_bad_build_is_explained_and_leaves_nothing(
    words: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", *words, "-o", str(tmp_path / "out")]) == 1
    assert named in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_wrong_usage_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["build", "--target", "x", "-o", "y", "--num-speculative-tokens", "many"])
    assert stopped.value.code == 2
    assert "not a whole number" in capsys.readouterr().err
