"""What all trainings over a target share: refused options, runs that go on where they stopped, bundles of them."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from specexport.contract.errors import BuildError, SpecExportError
from specexport.contract.folders import write_lock
from specexport.exporter.build import build
from specexport.exporter.options import BuildOptions
from specexport.methods.dflash.export import read_dflash
from specexport.methods.eagle3.export import read_eagle3
from specexport.methods.mlp_speculator.export import read_speculator
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.speculative import PLAIN
from tests.checkpoints import VOCAB
from tests.training import TRAININGS, silent, train_whole_and_parted, training_options, write_words

pytestmark = [pytest.mark.exporter, pytest.mark.slow]


@pytest.mark.parametrize(
    ("method", "changed", "expected"),
    [
        ("dflash", {"draft_block": 1}, "draft_block is 1; expected a whole number from 2 to 33"),
        ("dflash", {"draft_block": 16, "seq_len": 16}, "--draft-block is 16; expected 2 to 15, one less than --seq-le"),
        ("dflash", {"mask_token_id": 400}, "--mask-token-id is 400; expected 0 to 319, the target's last token"),
        ("dflash", {"states": (0, 2)}, "--states is 0; expected 1 to 2, the target's layers"),
        ("dflash", {"states": (1, 1)}, "--states is 1 1; expected one number of layers or several different ones"),
        ("dflash", {"states": (1, 3)}, r"--states is 1 3; expected .*, from 0 to the target's 2, such as --states 1$"),
        ("dflash", {"anchors": 0}, "anchors is 0; expected a whole number >= 1"),
        ("eagle3", {"ttt_steps": 0}, "ttt_steps is 0; expected a whole number from 1 to 16"),
        ("eagle3", {"ttt_steps": 15, "seq_len": 16}, "--ttt-steps is 15; expected 1 to 14, two less than --seq-len"),
        ("eagle3", {"draft_vocab_size": 400}, "--draft-vocab-size is 400; expected 1 to 320, the target's vocabulary"),
        ("eagle3", {"states": None}, "--states is 2 1 -1 by default, as the target has few layers; expected one"),
        ("eagle3", {"states": (1, 1)}, "--states is 1 1; expected one number of layers or several different ones"),
        ("eagle3", {"optimizer": "sgd"}, "optimizer is 'sgd'; expected one of adamw, muon"),
        ("medusa", {"heads": 0}, "heads is 0; expected a whole number from 1 to 16"),
        ("medusa", {"lr": 0.0}, r"lr is 0.0; expected a number in \(0, 1\]"),
        ("medusa", {"seq_len": 4096}, "--seq-len is 4096; expected 16 to 512, the model's max_position_embeddings"),
        ("medusa", {"prompt_len": 30, "self_distill": 4}, "--prompt-len is 30; expected 1 to 24"),
        ("medusa", {"prompt_len": 8}, "--prompt-len was given without --self-distill"),
        ("eagle3", {"sample_batch": 8}, "--sample-batch was given without --self-distill"),
        ("medusa", {"steps": 2, "epochs": 1.0}, "--epochs was given with --steps, which is used instead"),
        ("medusa", {"held_out": "0.9"}, r"--held-out is 0.9; expected a file, or a share in \(0, 0.5\]"),
        ("medusa", {"data": [Path("/")]}, "--data: /: is a folder; expected a file of text, .jsonl or .json"),
        ("medusa", {"held_out": "none.txt"}, "--held-out: none.txt: no such file"),
        ("medusa", {"lora_rank": 4}, "--lora-rank was given without --stage 2"),
        ("medusa", {"lora_rank": 4, "stage": 2, "tune": "full"}, "--lora-rank was given with --tune full"),
        ("medusa", {"target": "/nowhere"}, "/nowhere: no such folder"),
        ("medusa", {"data": []}, "--data: no files"),
        ("medusa", {"output": Path("/usr"), "overwrite": True}, r"/usr: exists and was not trained here \(no training"),
        ("mlp_speculator", {"n_predict": 0}, "n_predict is 0; expected a whole number from 1 to 16"),
        ("mlp_speculator", {"n_predict": 15, "seq_len": 16}, "--n-predict is 15; expected 1 to 14, two less than"),
        ("mlp_speculator", {"inner_dim": 8}, "inner_dim is 8; expected a whole number >= 16"),
        ("mlp_speculator", {"data_first": 0.3}, "--data-first was given without --self-distill"),
        ("mlp_speculator", {"data_first": 1.5}, r"data_first is 1.5; expected a number in \[0, 1\]"),
        ("mlp_speculator", {"target": "/nowhere"}, "/nowhere: no such folder"),
    ],
)
def test_options_out_of_range_are_refused_by_name(target, tmp_path, method, changed, expected):
    with pytest.raises(SpecExportError, match=expected):
        TRAININGS[method].train(training_options(method, target, tmp_path, **changed), silent)
    assert not (tmp_path / "out.work").exists()  # which would hold the wrong options against the right ones


def test_a_work_folder_is_for_one_training_at_a_time(target, tmp_path):
    options = training_options("medusa", target, tmp_path)
    with write_lock(tmp_path / "out.work"), pytest.raises(BuildError, match=r"process \d+ is writing .*out\.work"):
        TRAININGS["medusa"].train(options, silent)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("method", "flags", "drafted", "precision"),
    [
        ("dflash", "--layers 1 --draft-block 4 --anchors 4", 3, "fp32"),
        ("eagle3", "--states 1 2 --ttt-steps 2", 2, "fp32"),
        ("mlp_speculator", "", 3, "int4"),
    ],
)
def test_trained_folders_are_built(target, tmp_path, cli, method, flags, drafted, precision):
    trained, data = tmp_path / "trained", write_words(tmp_path)
    words = ["train", method.replace("_", "-"), "--target", str(target), "--data", str(data), "-o", str(trained)]
    shown = cli(*words, "--seq-len", "32", "--steps", "3", *flags.split()).words
    assert f"accuracy of {drafted} draft tokens on held-out texts" in shown
    assert f"a chain of {drafted} would commit" in shown
    methods = ({"method": method, "model": str(trained)},)
    bundle = tmp_path / "bundle"
    build(BuildOptions(str(target), bundle, methods, precision=precision, max_seq_len=64, max_batch_size=1))
    with Engine.load(bundle, threads=1) as engine:
        greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        text = engine.generate([5, 6, 7], greedy)
        assert text.stats.drafted > 0
        assert text.token_ids == engine.generate([5, 6, 7], greedy, PLAIN).token_ids


def check_dflash(folder: Path, settings: dict[str, Any]) -> None:
    outline = read_dflash(str(folder))
    assert outline.states == ((2,) if "layers" in settings else (1, 2))
    assert (outline.block_size, outline.causal) == (4, (False,) * settings.get("layers", 2))
    assert outline.mask_token == settings.get("mask_token_id", outline.mask_token)
    state = load_file(folder / "model.safetensors")
    assert "layers.0.self_attn.q_norm.weight" in state
    assert not {"lm_head.weight", "embed_tokens.weight"} & state.keys()


def check_eagle3(folder: Path, settings: dict[str, Any]) -> None:
    outline = read_eagle3(str(folder))
    assert (outline.states, outline.draft_vocab) == ((0, 1, 2), settings.get("draft_vocab_size", VOCAB))
    state = load_file(folder / "model.safetensors")
    assert "midlayer.self_attn.q_proj.weight" in state
    assert ("lm_head.weight" in state) is ("tie_lm_head" not in settings)
    assert {"d2t", "t2d"} <= state.keys() if "draft_vocab_size" in settings else not {"d2t", "t2d"} & state.keys()


def check_speculator(folder: Path, settings: dict[str, Any]) -> None:
    outline = read_speculator(str(folder))
    assert (outline.stages, outline.inner, outline.accuracy is None) == (2, 32, False)
    assert (outline.tied, outline.scale_input) == ("tie_weights" in settings, "scale_input" in settings)


CHECKS = {"dflash": check_dflash, "eagle3": check_eagle3, "mlp_speculator": check_speculator}


@pytest.mark.parametrize(
    ("method", "settings", "stopped_at"),
    [
        ("dflash", {"self_distill": 16, "accumulate": 2, "mask_token_id": 5}, "draft: step 4"),
        ("dflash", {"optimizer": "muon", "states": None, "layers": 1}, "draft: step 6"),
        ("eagle3", {"self_distill": 16, "accumulate": 2, "draft_vocab_size": 100}, "draft: step 4"),
        ("eagle3", {"optimizer": "muon", "tie_lm_head": True}, "draft: step 6"),
        ("medusa", {"self_distill": 24, "cache_hidden": True, "accumulate": 2}, "heads: step 6"),
        ("medusa", {"stage": 2, "tie_lm_head": True, "heads_first": 0.5, "lm_loss": "kl"}, "joint: step 3"),
        ("mlp_speculator", {"self_distill": 16, "cache_hidden": True}, "texts: step 4"),
        ("mlp_speculator", {"tie_weights": True, "scale_input": True, "accumulate": 2}, "data: step 6"),
    ],
)
def test_resumed_runs_equal_uninterrupted_ones(target, tmp_path, method, settings, stopped_at):
    options = partial(training_options, method, target, tmp_path)
    record, whole, parted = train_whole_and_parted(method, options, settings, stopped_at)
    if method in CHECKS:
        CHECKS[method](parted, settings)
        assert json.loads((whole / "training.json").read_text()) == record
    if method in ("dflash", "eagle3"):
        assert len(record["accuracy"]) == 3
