"""The comparison of a bundle's methods, what is suggested for a target, and ``python -m benchmarks``."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import COMMANDS
from specexport.commands.bench import Result, built_in_tasks, compare, read_tasks
from specexport.contract.errors import RequestError
from specexport.contract.reading import read_manifest
from specexport.runtime import Engine
from specexport.runtime import step as step_module
from specexport.runtime.request import Completion

NAME = "qwen3-lookup"


def test_the_workloads_are_there(engine):
    tasks = built_in_tasks(engine(NAME).encode, 2, 60)
    assert [task.workload for task in tasks] == ["completion", "edit", "completion", "edit", "text", "text"]
    edit = tasks[1]
    assert edit.prompt[:60] == edit.prompt[60:] + edit.hypothesis  # the copy that has begun, and the rest of it
    assert all(len(task.prompt) == 60 for task in tasks if task.workload != "edit")


def test_tasks_are_read(engine, tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"text": "one two"}\n\n{"text": "three", "workload": "chat", "hypothesis": "four"}\n')
    encode = engine(NAME).encode
    first, second = read_tasks(encode, [path], 4, 64)
    assert (first.workload, first.prompt, first.hypothesis) == ("data", encode("one two"), None)
    assert (second.workload, second.hypothesis) == ("chat", encode("four"))
    path.write_text('{"text": "one\u2028two"}\n', encoding="utf-8")  # a line end of Unicode is part of the text
    assert [task.prompt for task in read_tasks(encode, [path], 4, 64)] == [encode("one\u2028two")]
    for content, reason in (("", "no text"), ('{"txt": "one"}', "line 1: "), ("no json", "line 1: ")):
        path.write_text(content)
        with pytest.raises(RequestError, match=reason):
            read_tasks(encode, [path], 4, 64)
    with pytest.raises(RequestError, match=r"none\.jsonl"):
        read_tasks(encode, [tmp_path / "none.jsonl"], 4, 64)


def test_bench(bundle, cli, monkeypatch):
    # The default is compared where costs are measured, as they are outside these tests.
    monkeypatch.setitem(Engine.load.__func__.__kwdefaults__, "calibrate", True)
    folder = str(bundle(NAME))
    words = ["bench", folder, "--methods", "all", "--prompts", "1", "--prompt-tokens", "64", "-n", "24"]
    rows = {row["method"]: row for row in cli(*words, "--json").json["rows"]}
    assert list(rows) == ["default", "draft_model", "ngram", "suffix", "hypothesis"]
    for name, row in rows.items():
        assert row["lossless"]
        assert set(row["workloads"]) == ({"edit"} if name == "hypothesis" else {"completion", "edit", "text"})
        for result in row["workloads"].values():
            assert (result["requests"], result["tokens"], result["differences"]) == (1, 24, [])
            assert result["tokens_per_step"] >= 1
    # The draft is the target itself.
    assert all(workload["tokens_per_step"] > 3 for workload in rows["draft_model"]["workloads"].values())
    assert sum(rows["draft_model"]["steps_by_method"].values()) < 3 * 24
    assert rows["default"]["steps_by_method"].keys() <= {"plain", "draft_model", "ngram"}
    assert (rows["ngram"]["training"], rows["draft_model"]["training"]) == (None, "a smaller model")
    shown = cli(*words[:3], "ngram,suffix", *words[4:]).words
    assert "completion" in shown
    assert re.search(r"plain decoding none none \d+ tokens/s \d+ tokens/s \d+ tokens/s ngram", shown)
    assert "yes: 72 tokens" in shown
    for more, status, reason in (
        (["--methods", "medusa"], 2, "--methods has 'medusa'; the bundle has draft_model, ngram"),
        (["--methods", "plain"], 2, "and default; plain decoding is always measured"),
        (["--plot", "x.png"], 2, "--plot is x.png, but HTML is written; name it x.html"),
        (["--prompts", "0"], 2, "--prompts is 0; expected a whole number >= 1"),
        (["-n", "500"], 2, "do not fit this bundle's context of 512"),
    ):
        assert reason in cli(*words, *more, status=status).err


def test_lossy_methods_are_detected(engine, monkeypatch, bundle, cli):
    real = step_module.accept_greedy

    def too_kind(logits: Any, tree: Any, tokens: Any) -> tuple[list[int], int]:
        path, token = real(logits, tree, tokens)
        return path, (token + 1) % 300 if len(tree) > 1 else token

    monkeypatch.setattr(step_module, "accept_greedy", too_kind)
    tasks = built_in_tasks(engine(NAME).encode, 1, 40)
    (row,) = compare(engine(NAME), ["draft_model"], tasks, 12, lambda *_: None)
    assert not row.lossless
    output = cli("bench", bundle(NAME), "--methods", "draft_model", "--prompts", "1", "-n", "12", status=1)
    assert "3 of 3 differ" in output.out
    assert "texts differ from plain decoding's" in output.err


def test_figures_that_contradict_each_other_are_named(bundle, monkeypatch, cli):
    words = ["bench", str(bundle(NAME)), "--methods", "suffix", "--prompts", "1", "--prompt-tokens", "32", "-n", "8"]
    real = Result.add

    def beside_another(self: Result, done: Completion, plain: Completion) -> None:
        """As if plain decoding had shared the machine, and what is compared with it had not."""
        real(self, done, plain)
        self.seconds, self.plain_seconds = 1.0, 2.66 * self.tokens_per_step

    monkeypatch.setattr(Result, "add", beside_another)
    output = cli(*words, "--json")
    idle = "tokens a step: another process ran beside plain decoding; measure again on an idle machine"
    assert output.err.count(idle) == 3
    results = json.loads(output.out)["rows"][0]["workloads"]
    assert all(result["contradictory"] for result in results.values())

    def alone(self: Result, done: Completion, plain: Completion) -> None:
        real(self, done, plain)
        self.seconds, self.plain_seconds = 1.0, 1.05 * self.tokens_per_step

    monkeypatch.setattr(Result, "add", alone)
    assert "another process" not in cli(*words, "--json").err


def test_memory_is_that_of_weights_and_cache(bundle):
    manifest = read_manifest(bundle(NAME))
    draft, ngram, *_ = manifest.methods
    files = {file.path: file.size for file in manifest.files}
    assert ngram.memory(files, manifest.max_seq_len) == 0
    weights = (bundle(NAME) / "draft.bin").stat().st_size
    layers = manifest.target.cache  # the draft is the target
    cache = sum(4 * layer.heads * (layer.key_size + layer.value_size) for layer in layers) * manifest.max_seq_len
    assert draft.memory(files, manifest.max_seq_len) == weights + cache
    medusa = read_manifest(bundle("qwen3-medusa"))
    (heads,) = medusa.methods
    assert heads.memory({}, medusa.max_seq_len) == heads.parameters * 4


@pytest.mark.exporter
def test_suggest(tmp_path, cli):
    from tests.checkpoints import make_checkpoint

    # Sixteen layers against one are about ten times the parameters beside the embeddings.
    target = str(make_checkpoint(tmp_path / "target", "llama", num_hidden_layers=16))
    draft = str(make_checkpoint(tmp_path / "draft", "llama", num_hidden_layers=1))
    near = str(make_checkpoint(tmp_path / "near", "llama", num_hidden_layers=12))
    shown = cli("suggest", "--target", target, "--draft", near, "--draft", draft).words
    assert "times smaller, the same tokenizer" in shown
    assert f"not {near}: 1." in shown
    assert f"specexport build --target {target} --draft {draft} --num-speculative-tokens 4 -o bundle/" in shown
    assert "suffix chains of 8,4,2 free; gains" in shown.replace("│", "").replace("  ", " ")
    shown = cli("suggest", "--target", target, "--device", "gpu").words
    assert "look for a model of the same family" in shown
    assert "W,N,G = 15,5,15: 120 nodes a step" in shown
    assert "tree mc_sim_7b_63" in shown
    assert "eagle3" in shown and "one layer over the target's own states" in shown
    assert "neither config.json" in cli("suggest", "--target", tmp_path, status=1).err


@pytest.mark.exporter
def test_a_mixture_is_compared_by_the_parameters_that_a_token_uses(tmp_path, cli):
    from tests.checkpoints import GROUPED, make_checkpoint

    config = {**GROUPED, "num_hidden_layers": 4, "num_local_experts": 16, "num_experts_per_tok": 1}
    target = make_checkpoint(tmp_path / "target", "mixtral", **config)
    draft = make_checkpoint(tmp_path / "draft", "llama", num_hidden_layers=1)
    shown = cli("suggest", "--target", target, "--draft", draft).words
    assert "a token uses" in shown and "speculation gains less" in shown
    assert f"not {draft}: 2." in shown  # by all parameters it is more than 10 times smaller


@pytest.mark.exporter
def test_a_draft_with_another_tokenizer_is_not_suggested(tmp_path):
    from specexport.exporter.checkpoints.config import meta_model
    from specexport.exporter.suggest import suggest
    from tests.checkpoints import make_checkpoint, with_swapped_tokens

    target = make_checkpoint(tmp_path / "target", "llama", num_hidden_layers=16)
    other = with_swapped_tokens(make_checkpoint(tmp_path / "other", "llama", num_hidden_layers=1))
    advice = suggest(str(target), [str(other)], "cpu")
    assert "different tokenizers" in advice.refused[str(other)]
    assert f"the method universal_draft:{other}" in advice.refused[str(other)]
    assert advice.parameters == meta_model(target).num_parameters() > 5 * meta_model(other).num_parameters()


# --- ``python -m benchmarks`` -----------------------------------------------------------------------------------------


ROOT = Path(__file__).resolve().parents[1]
OTHERS = ("cuda", "openai", "hypothesis", "pytest")
"""Packages that ``make demo`` does not install."""
NEEDS = {"families": "pytest", "gpu-host": "cuda", "serve": "openai"}
"""By benchmark: the first of them without which it cannot run."""
DEMO = f"""
import contextlib, io, json, sys
sys.modules |= dict.fromkeys({OTHERS})  # as if they were not there
from benchmarks.__main__ import main
ends = {{}}
for name in sys.argv[1:]:
    sys.argv = ["benchmarks", name, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            main()
        except SystemExit as stopped:
            ends[name] = [stopped.code, said.getvalue()]
print(json.dumps(ends))
"""


def test_help_imports_no_benchmark():
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-X", "importtime", "-m", "benchmarks", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    done = run("--help")
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS)
    assert "numpy" not in done.stderr
    assert (wrong := run("nothing")).returncode == 2
    assert "invalid choice: 'nothing'" in wrong.stderr


@pytest.mark.exporter
def test_a_benchmark_needs_nothing_of_the_others():
    done = subprocess.run(
        [sys.executable, "-c", DEMO, *COMMANDS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    ends = json.loads(done.stdout)
    assert list(ends) == list(COMMANDS)
    for name, (code, text) in ends.items():
        if name in NEEDS:
            assert code.startswith("benchmarks: error: ") and NEEDS[name] in code, code
            assert code.endswith("pip install -e '.[dev]'")
        else:
            assert code == 0, (name, code)
            assert text.startswith(f"usage: python -m benchmarks {name}")


@pytest.mark.exporter
def test_bundles_of_an_older_format_are_built_again(tmp_path, bundle, monkeypatch):
    from benchmarks import pair, real

    builds = []
    monkeypatch.setattr(pair, "build", lambda options, progress: builds.append(options))
    folder = shutil.copytree(bundle(NAME), tmp_path / "model-int8")
    assert real._bundle(tmp_path / "model.gguf", "int8", tmp_path, None) == folder
    assert builds == []
    manifest = json.loads((folder / "specexport.json").read_text())
    (folder / "specexport.json").write_text(json.dumps(manifest | {"format_version": manifest["format_version"] - 1}))
    real._bundle(tmp_path / "model.gguf", "int8", tmp_path, None)
    assert [(options.output, options.overwrite) for options in builds] == [(folder, True)]
