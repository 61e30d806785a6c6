"""The command line: what users type and what they read back."""

import argparse
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

import specexport.exporter
from specexport.building import needs_extra
from specexport.cli import _with_flag, main, parser
from specexport.commands.flags import UsageError, add_method_arguments, requested_methods
from specexport.contract.errors import BuildError
from specexport.contract.methods import MethodOptions, known, method_type, options_type, read_methods
from specexport.contract.reading import read_manifest, write_manifest
from specexport.exporter.checkpoints import locate
from tests.fixtures import Bundles

PROMPT = "one two three"


@pytest.fixture
def folder(bundle: Bundles) -> str:
    return str(bundle("llama-near"))


def test_run_prints_the_same_text_streamed_and_as_json(folder, cli):
    words = ["run", folder, "--prompt", PROMPT, "-n", "12", "--temperature", "0", "--no-calibrate"]
    streamed = cli(*words).out
    result = cli(*words, "--json").json
    assert result["text"] + "\n" == streamed
    assert result["prompt"] == PROMPT
    assert len(result["token_ids"]) == result["stats"]["output_tokens"]
    assert result["params"]["temperature"] == 0


def test_run_without_speculation_says_the_same(folder, cli):
    words = ["run", folder, "--prompt", PROMPT, "-n", "12", "--temperature", "0"]
    flags = ((), ("--no-calibrate",), ("--no-speculation",))
    free, fast, plain = (cli(*words, "--json", *speculation).json for speculation in flags)
    assert free["token_ids"] == fast["token_ids"] == plain["token_ids"]
    assert fast["stats"]["drafted"] > 0 == plain["stats"]["drafted"]
    captured = cli(*words, "--stats")
    chosen = r"chosen      .*\d steps? .*\(\d+\.\d\d ms\); in brackets the cost of verifying a step here"
    assert re.search(chosen, captured.err)
    assert " of 0 " not in captured.err
    assert "acceptance length" in captured.err and "acceptance length" not in captured.out


@pytest.mark.parametrize(
    ("name", "ways", "lines"),
    [
        (
            "qwen3-lookup",
            ("--method ngram", "--method suffix --num-speculative-tokens 4"),
            (
                "ngram, matches of 4 to 2 tokens: up to 8 draft tokens a step in a chain",
                "suffix, at most 1.5 a matched token",
                "hypothesis: up to 16 draft tokens a step in a chain",
            ),
        ),
        (
            "qwen3-lookahead",
            ("--method lookahead",),
            ("lookahead, window 5, n-grams of 4, seeded from the prompt: up to 12 draft", "verified 27 at a time"),
        ),
    ],
)
def test_methods_over_text_say_the_same_and_are_shown(name, ways, lines, bundle, cli):
    words = ["run", bundle(name), "-p", "one two one two one", "-n", "16", "--temperature", "0", "--json"]
    plain, *texts = (cli(*words, "--no-calibrate", *way.split()).json for way in ("--no-speculation", *ways))
    assert all(text["token_ids"] == plain["token_ids"] for text in texts)
    shown = cli("inspect", bundle(name)).words
    assert all(line in shown for line in lines)


def test_trees_of_methods_over_text(bundle, tmp_path, cli):
    printed = cli("inspect", bundle("qwen3-lookup"), "--tree", "--method", "suffix")
    assert "9 nodes with the root, depth 8, 1 path\n" in printed.out
    manifest = read_manifest(bundle("qwen3-lookup"))
    write_manifest(tmp_path, msgspec.structs.replace(manifest, methods=()))
    plain = str(tmp_path)  # look-ups verify chains in every bundle
    assert " nodes with the root, depth " in cli("inspect", plain, "--tree", "--method", "ngram").out
    printed = cli("draw", plain, "-o", tmp_path / "tree.svg", status=1)
    assert "built without a method; name one of hypothesis, ngram, suffix as --method" in printed.err
    assert not (tmp_path / "tree.svg").exists()
    printed = cli("draw", "mc_sim_7b_63", "-o", "tree.pdf", status=2)
    assert "--output is tree.pdf, but SVG is written; name it tree.svg" in printed.err
    for name, method in (("dice-ngram", "ngram"), ("qwen3-lookahead", "lookahead")):
        printed = cli("tune", "tree", bundle(name), "--dry-run", "--data", tmp_path / "any", status=1)
        assert f"--method is '{method}', whose steps follow from its options" in printed.err


def test_run_reads_standard_input(folder, cli, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    assert cli("run", folder, "-n", "4", "--temperature", "0", "--json", "--no-calibrate").json["prompt"] == PROMPT


def test_underscores_and_dashes_are_the_same_flag(folder, cli):
    result = cli("run", folder, "--prompt=a_b", "--max_tokens=3", "--top_p", "0.5", "--json", "--no-calibrate").json
    assert result["prompt"] == "a_b"
    assert (result["params"]["max_tokens"], result["params"]["top_p"]) == (3, 0.5)


@pytest.mark.parametrize(("words", "said"), [([], True), (["--max-tokens", "128"], False)])
def test_a_terminal_shows_that_the_text_was_cut(folder, words, said, cli, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    printed = cli("run", folder, "--prompt", "def", "--ignore-eos", "--no-calibrate", *words)
    assert ("(ended after 128 tokens, set by --max-tokens)" in printed.err) == said


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--top-p", "3"], "--top-p is 3.0; expected a number in [0, 1]"),
        (["--temperature", "-1"], "--temperature is -1.0; expected a number >= 0"),
        (["--threads", "0"], "--threads is 0; expected a whole number >= 1"),
        (["--method", "magic"], "--method is 'magic'; the bundle has draft_model"),
        (["--method", "ngram:prompt_lookup_max=2"], "options are set by --speculative-config ngram:prompt_lookup_max"),
        (["--stop-token-ids", "99999"], "--stop-token-ids has token 99999; the model has tokens 0 to"),
        (["--grammar", "start: /a/", "--json-schema", "{}"], "--grammar was given with --json-schema; give one"),
        (["--chat"], "the model has no chat template, so it cannot read messages"),
    ],
)
def test_a_bad_request_is_explained_in_one_line(folder, words, named, cli):
    captured = cli("run", folder, "--prompt", PROMPT, *words, status=1 if words == ["--chat"] else 2)
    assert named in captured.err
    assert captured.err.startswith("specexport: error: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("words", "flag"), [(["build", "--target", "x", "-o", "y"], "--max-seq-len"), (["run", "x"], "--max-model-len")]
)
def test_of_two_names_an_error_has_the_commands_flag(words, flag):
    arguments = parser(words).parse_args(words)
    error = BuildError("max_seq_len (max_model_len) is 9, but", param="max_seq_len")
    assert _with_flag(error, arguments) == f"{flag} is 9, but"


def test_a_command_names_itself_and_the_extra_that_it_needs(folder, monkeypatch, cli):
    monkeypatch.setitem(sys.modules, "specexport.exporter.build", None)
    monkeypatch.delattr(specexport.exporter, "build", raising=False)
    assert "error: verifying needs the [export] extra (" in cli("verify", folder, status=1).err


def test_a_model_is_not_downloaded_where_it_cannot_be_built(monkeypatch):
    monkeypatch.setattr(locate, "find_spec", lambda name: None)
    with pytest.raises(BuildError, match=r"^a/b: no such folder, and building .* needs the \[export\] extra; install"):
        locate.find("a/b")


def test_a_missing_extra_names_what_failed():
    message = r"\[train\] extra \(module 'a' has no attribute 'b'\); one of its libraries fails; see whether a file or"
    with pytest.raises(BuildError, match=message), needs_extra("it", "train"):
        raise ImportError("hidden") from AttributeError("module 'a' has no attribute 'b'")


def test_inspect_of_a_tree_names_the_flag(tmp_path, cli):
    tree, other = tmp_path / "tree.json", tmp_path / "other"
    tree.write_text("[[0]]")
    other.touch()
    for name in ("mc_sim_7b_63", str(tree)):
        assert f"{name}: a token tree, which --tree draws; give --tree" in cli("inspect", name, status=1).err
    assert f"{other}: is no folder; expected a bundle" in cli("inspect", other, status=1).err


def test_inspect_shows_the_manifest(folder, cli):
    shown = cli("inspect", folder).out
    assert "draft_model: 4 draft tokens a step in a chain" in shown
    assert "target.bin" in shown
    assert cli("inspect", folder, "--json").json == json.loads((Path(folder) / "specexport.json").read_text())


def test_a_folder_that_is_no_bundle_is_explained(tmp_path, cli):
    for command in (["inspect"], ["run", "--prompt", "x"]):
        assert "specexport.json" in cli(command[0], tmp_path, *command[1:], status=1).err


@pytest.mark.exporter
@pytest.mark.parametrize(
    ("words", "status", "named"),
    [
        ([], 1, "nowhere: no such folder"),
        (["--num-speculative-tokens", "3"], 2, "without a method"),
        (["--block-size", "5"], 2, "--block-size is 5; expected one of 16, 32, 64, 128, 256"),
        (
            ["--backend", "tensorrt", "--compute-capability", "x"],
            2,
            "--compute-capability is 'x'; expected something like",
        ),
        (["--lowering", "portable", "--precision", "int4"], 2, "--precision is 'int4'"),
        (["--lowering", "portable", "--block-size", "32"], 2, "opset 20 knows no blocks"),
        (["--precision", "bf16", "--block-size", "32"], 2, "--block-size was given, and only int8"),
        (["--ngram", "--draft-precision", "int8"], 2, "--draft-precision was given without"),
        (["--draft", "x", "--num-speculative-tokens", "99"], 2, "num_speculative_tokens: expected a whole"),
    ],
)
def test_a_bad_build_is_explained_and_leaves_nothing(words, status, named, tmp_path, cli):
    assert named in cli("build", "--target", "nowhere", *words, "-o", tmp_path / "out", status=status).err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exporter
@pytest.mark.parametrize("method", ["draft_model:elsewhere", "eagle3"])
def test_a_method_that_a_model_is_built_without_is_refused_before_the_build(method, tmp_path, cli, monkeypatch):
    from tests.checkpoints import make_checkpoint  # imports torch

    monkeypatch.setattr("specexport.building._build", lambda *_, **__: pytest.fail("built"))
    target = make_checkpoint(tmp_path / "target", "llama")
    shown = cli("run", target, "-p", "one", "--method", method, status=2).err
    assert f"--method is {method!r}, but {target} would be built without it" in shown
    assert f"--speculative-config {method}" in shown


@pytest.mark.parametrize(("name", "warned"), [("llama-near", True), ("gemma2-self", False)])
def test_a_draft_that_is_not_smaller_than_its_target_is_warned_of(bundle, tmp_path, cli, monkeypatch, name, warned):
    def build(options, *_):
        shutil.copytree(bundle(name), options.output)

    monkeypatch.setattr("specexport.commands.build.exporter", lambda: SimpleNamespace(build=build))
    shown = cli("build", "--target", "small", "--draft", "large", "-o", tmp_path / "out").err
    assert ("warning: the draft has " in shown and "(were they swapped?)" in shown) == warned


@pytest.mark.exporter
def test_blocks_are_refused_where_the_checkpoint_has_none(tmp_path, cli):
    """Without --precision the checkpoint says how matrices are stored: this one is not quantized."""
    from tests.checkpoints import make_checkpoint  # imports torch

    target = make_checkpoint(tmp_path / "target", "llama")
    printed = cli("build", "--target", target, "--block-size", "64", "-o", tmp_path / "out", status=2)
    assert "--block-size was given, and only int8 and int4 have blocks" in printed.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["build", "--target", "x", "-o", "y", "--num-speculative-tokens", "many"], "not a whole number"),
        (["run", "x", "--max-tok", "3"], "unrecognized arguments: --"),  # flags are written out
        (["tune", "tree", "x", "--data", "y", "--dry"], "unrecognized arguments: --"),
        (["run", "x", "-p", "one", "--prompt", "two"], "--prompt: it was given twice"),
    ],
)
def test_wrong_usage_exits_with_2(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["run", "x", "--frob"], "run"),
        (["serve", "x", "--frob=1"], "serve"),
        (["tune", "tree", "x", "--data", "y", "--frob"], "tune tree"),
        (["export", "triton", "x", "-o", "y", "too much"], "export"),
    ],
)
def test_an_unknown_flag_names_its_command(words, command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    errors = capsys.readouterr().err
    assert stopped.value.code == 2
    name = f"specexport {command}"
    assert errors == f"{name}: error: unrecognized arguments: {words[-1]}; see {name} --help\n"


def test_no_command_at_all_shows_the_help(cli):
    assert "Show the content of a bundle." in cli(status=2).err


def test_closed_streams_are_empty(folder):
    words = f"{sys.executable} -m specexport run {folder} -n 4"
    assert subprocess.run(f"{words} <&- >&- 2>&-", shell=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("program", "status", "printed"),
    [
        ("raise KeyboardInterrupt", 130, b""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGBUS)", -signal.SIGBUS, b"Fatal Python error: Bus error\n"),
    ],
)
def test_ends_while_the_command_line_is_imported(tmp_path, program, status, printed):
    (tmp_path / "msgspec.py").write_text(program)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    words = [sys.executable, "-m", "specexport", "inspect", "x"]
    ended = subprocess.run(words, env=environment, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr[: len(printed) or None]) == (status, b"", printed)


# --- methods: one spelling, and flags that stand for it --------------------------------------------------------------


def parsed_methods(*words: str) -> tuple[MethodOptions, ...]:
    """The methods that ``build`` is asked for."""
    parser = argparse.ArgumentParser()
    add_method_arguments(parser)
    return requested_methods(parser.parse_args(words))


@pytest.mark.parametrize(
    ("text", "mapping"),
    [
        ("ngram", {"method": "ngram"}),
        ("ngram:4", {"method": "ngram", "num_speculative_tokens": 4}),
        ("ngram:prompt_lookup_max=4", {"method": "ngram", "prompt_lookup_max": 4}),
        ("ngram,prompt_lookup_max=4", {"method": "ngram", "prompt_lookup_max": 4}),
        (
            "ngram:prompt_lookup_max=5,prompt_lookup_min=2,num_speculative_tokens=8,num_speculative_tokens=4",
            {"method": "ngram", "prompt_lookup_max": 5, "prompt_lookup_min": 2, "num_speculative_tokens": [8, 4]},
        ),
        ("medusa:heads/", {"method": "medusa", "model": "heads/"}),
        ("medusa:heads/,trees=mc_sim_7b_63", {"method": "medusa", "model": "heads/", "trees": "mc_sim_7b_63"}),
        ("medusa:model=heads/,trees=mc_sim_7b_63", {"method": "medusa", "model": "heads/", "trees": ["mc_sim_7b_63"]}),
        ("draft_model:Org/Name", {"model": "Org/Name"}),
        ("medusa_draft:d,medusa=h", {"method": "medusa_draft", "model": "d", "medusa": "h"}),
        ("suffix:store_tokens=9,max_spec_factor=2.5", {"method": "suffix", "store_tokens": 9, "max_spec_factor": 2.5}),
        ("lookahead:4,3,4", {"method": "lookahead", "preset": "4,3,4"}),
        (
            "lookahead:window=4,ngram=3,guesses=4,prompt_seeding=false",
            {"method": "lookahead", "window": 4, "ngram": 3, "guesses": 4, "prompt_seeding": False},
        ),
        ("self_draft:8,num_speculative_tokens=3", {"method": "self_draft", "layers": 8, "num_speculative_tokens": 3}),
        ("draft_model:d,num_speculative_tokens=5", {"model": "d", "num_speculative_tokens": 5}),
        ("universal_draft:d", {"method": "universal_draft", "model": "d"}),
        ("mlp_speculator:s", {"method": "mlp_speculator", "model": "s"}),
        ("eagle3:e,num_speculative_tokens=3", {"method": "eagle3", "model": "e", "num_speculative_tokens": 3}),
        ("dflash:d,num_speculative_tokens=7", {"method": "dflash", "model": "d", "num_speculative_tokens": 7}),
        ("suffix", {"method": "suffix"}),
        ("hypothesis", {"method": "hypothesis"}),
        ("lookahead", {"method": "lookahead"}),
    ],
)
def test_a_method_is_spelled_in_one_way_everywhere(text, mapping):
    """As ``--method``, as JSON in ``--speculative-config``, and as the mapping that ``LLM`` takes."""
    method = options_type(method_type(mapping.get("method", "draft_model")))
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in mapping.items()}
    if "trees" not in mapping:  # which are read
        assert read_methods(mapping) == (method(**{key: fields[key] for key in fields.keys() - {"method"}}),)
    assert parsed_methods("--method", text) == read_methods(json.dumps(mapping)) == read_methods(mapping)
    assert read_methods(text) == read_methods(mapping)


@pytest.mark.parametrize(
    ("flags", "spelled"),
    [
        (["--draft", "d"], ["draft_model:d"]),
        (
            ["--draft", "d", "--num-speculative-tokens", "4,2"],
            ["draft_model:d,num_speculative_tokens=4,num_speculative_tokens=2"],
        ),
        (["--draft", "d", "--tree", "mc_sim_7b_63"], ["draft_model:d,trees=mc_sim_7b_63"]),
        (["--draft", "d", "--draft-medusa", "h"], ["medusa_draft:d,medusa=h"]),
        (["--universal-draft", "d"], ["universal_draft:d"]),
        (["--medusa", "h", "--draft", "d"], ["medusa:h", "draft_model:d"]),
        # The widest trees are the heads'; the draft has its own.
        (["--medusa", "h", "--draft", "d", "--tree", "mc_sim_7b_63"], ["medusa:h,trees=mc_sim_7b_63", "draft_model:d"]),
        (["--mlp-speculator", "s"], ["mlp_speculator:s"]),
        (["--eagle3", "e"], ["eagle3:e"]),
        (["--dflash", "d"], ["dflash:d"]),
        (["--self-draft-layers", "8"], ["self_draft:8"]),
        (["--ngram"], ["ngram"]),
        (["--suffix"], ["suffix"]),
        (["--hypothesis"], ["hypothesis"]),
        (["--lookahead"], ["lookahead:cpu"]),
        (["--lookahead", "gpu"], ["lookahead:gpu"]),
        (["--suffix", "--method", "ngram"], ["suffix", "ngram"]),
        (["--method", "ngram", "--suffix"], ["ngram", "suffix"]),
        # A method that says how many itself keeps that.
        (["--ngram", "--method", "suffix:2", "--num-speculative-tokens", "6"], ["ngram:6", "suffix:2"]),
    ],
)
def test_flags_stand_for_methods_in_their_order(flags, spelled):
    assert parsed_methods(*flags) == parsed_methods(*(word for text in spelled for word in ("--method", text)))


def test_every_method_has_a_flag():
    flags = [options_type(method_type(name)).flag for name in known()]
    names = [flag.name for flag in flags if flag is not None]
    assert len(set(names)) == len(flags)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--method", "magic"], "--method magic: method is 'magic'; expected one of dflash, draft_model, eagle3"),
        (["--method", "ngram:prompt_lookup_max=many"], "prompt_lookup_max is a text; expected a whole number"),
        (["--method", "ngram:prompt_lookup_max=3,5"], "'5' is not key=value"),
        (["--method", "ngram,3"], "'3' is not key=value"),
        (["--method", "ngram", "--method", "ngram:4"], "--method ngram: it was given twice"),
        (["--method", "ngram", "--ngram"], "--method ngram: it was given twice"),
        (["--draft-medusa", "h"], "--draft-medusa was given without --draft"),
        (["--self-draft-layers", "many"], "--self-draft-layers: layers is a text; expected a whole number"),
        (["--ngram", "--num-speculative-tokens", "0"], "--num-speculative-tokens: num_speculative_tokens: expected a"),
        (["--ngram", "--tree", "mc_sim_7b_63"], "--tree was given, but no method proposes trees (ngram)"),
        (["--tree", "mc_sim_7b_63"], "--tree was given without a method"),
        (["--lookahead", "--num-speculative-tokens", "4"], "the methods set it by options of their own (lookahead)"),
    ],
)
def test_impossible_requests_are_named(words, named):
    with pytest.raises(UsageError) as caught:
        parsed_methods(*words)
    assert named in str(caught.value)


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Those of the commands, and of theirs."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield command
                yield from parsers(command)


@pytest.mark.parametrize("command", parsers(parser()), ids=lambda command: command.prog.removeprefix("specexport "))
def test_help_describes_commands(command):
    """What every option is for, the default of what has a value, and examples, which are right."""
    shown = command.format_help()
    assert "True" not in shown and "None" not in shown and "==SUPPRESS==" not in shown
    for action in command._actions:
        assert action.help or isinstance(action, argparse._SubParsersAction), action.option_strings
        if action.option_strings and action.nargs != 0 and not action.required and action.dest != "methods":
            text = command._get_formatter()._expand_help(action)
            states = "(default: " in text or "repeatable" in text or text == "the same, as a flag"
            assert states, (action.option_strings, text)
    examples = [line for line in shown.partition("\nExample")[2].split("\n") if line.startswith("    ")]
    assert examples
    for line in examples:
        program, *words = shlex.split(line.partition("<")[0])
        assert program == "specexport"
        parsed_methods = parser().parse_args(words)
        assert parsed_methods.main is not None
        assert line.strip().startswith(command.prog)


@pytest.mark.exporter
def test_build_help_knows_every_method(capsys):
    with pytest.raises(SystemExit):
        main(["build", "--help"])
    shown = capsys.readouterr().out
    for name in known():
        assert name in shown
        flag = options_type(method_type(name)).flag
        assert flag is not None and flag.name in shown


@pytest.mark.parametrize(
    ("does", "status", "shown"),
    [
        (
            "warnings.warn('there is no writable home folder', stacklevel=2)",
            0,
            "warning: there is no writable home folder",
        ),
        ("bytearray(1 << 62)", 1, "specexport: error: there is not enough memory"),
    ],
)
def test_warnings_and_want_of_memory_are_one_line(does, status, shown):
    program = f"""
import sys, warnings
import specexport.cli
from specexport.__main__ import main
def run():
    {does}
    return 0
specexport.cli.main = run
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (status, f"{shown}\n")
