"""A checkpoint's configurations, and a draft's, are refused by field, before anything is made of them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specexport.contract.errors import BuildError
from specexport.exporter.build import build
from specexport.exporter.checkpoints.checkpoint import load_checkpoint
from specexport.exporter.options import BuildOptions
from tests.checkpoints import changed, make_checkpoint, make_heads

pytestmark = pytest.mark.exporter


@pytest.fixture
def model(target: Path, tmp_path: Path) -> Path:
    """A checkpoint to do harm to."""
    return shutil.copytree(target, tmp_path / "model")


def change(path: Path, **fields: Any) -> None:
    document = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.write_text(json.dumps(document | fields), encoding="utf-8")


def refused(model: Path, *words: str) -> None:
    """Checks that a build is refused as it loads, with one line that holds these words, and writes nothing."""
    steps: list[str] = []
    with pytest.raises(BuildError) as caught:
        build(BuildOptions(target=str(model), output=model.parent / "out"), lambda step, *_: steps.append(step))
    assert set(steps) <= {"loading the target"}
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)
    assert list(model.parent.iterdir()) == [model]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("top_k", "x", "top_k is a text; expected a whole number"),
        ("top_k", -1, ">= 0"),
        ("temperature", -1, ">= 0"),
        ("temperature", "1", "temperature is a text; expected a number"),
        ("top_p", -0.5, ">= 0"),
        ("min_p", 2, "<= 1"),
        ("do_sample", "yes", "do_sample is a text; expected true or false"),
        ("eos_token_id", [1, "a"], "eos_token_id[1]"),
        ("eos_token_id", -1, ">= 0"),
        ("eos_token_id", 10**9, "expected a token of the model, which has 320"),
        ("eos_token_id", [1, 320], "eos_token_id is 320"),
    ],
)
def test_a_generation_default_is_named_with_its_file(model, field, value, message):
    change(model / "generation_config.json", **{"do_sample": True, field: value})
    refused(model, str(model / "generation_config.json"), field, message)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_hidden_layers", 10**9, "num_hidden_layers is 1000000000; expected at most 4096"),
        ("num_hidden_layers", 3, "num_hidden_layers is 3, but the weights have 2 layers"),
        ("hidden_size", 10**9, "hidden_size is 1000000000; expected at most"),
        ("hidden_size", 128, "'model.embed_tokens.weight' [320, 128], but the weights hold [320, 64]"),
        ("hidden_size", "64", "hidden_size"),
        ("intermediate_size", 2**20, "mlp.gate_proj.weight"),
        ("vocab_size", 1000, "[1000, 64], but the weights hold [320, 64]"),
        ("num_attention_heads", 0, "config.json"),
        ("num_key_value_heads", 4, "k_proj.weight"),
        ("eos_token_id", 10**9, "eos_token_id is 1000000000"),
        ("model_type", "no-such-model", "model_type is 'no-such-model', which transformers"),
        ("model_type", "gpt2", "config.json"),
        ("attention_bias", True, "config.json"),
        ("max_position_embeddings", 10**12, "max_position_embeddings"),
        ("rope_parameters", {"factors": [[{"head_dim": 1e9}]]}, "head_dim is 1000000000; expected at most 16777216"),
    ],
)
def test_absurd_or_wrong_sizes_are_named(model, field, value, message):
    (model / "generation_config.json").unlink()
    change(model / "config.json", **{field: value})
    refused(model, "config.json", message)


DEEP = b'{"do_sample": ' + b"[" * 200_000
NO_TEXT = b'{"eos_token_id": "\xff"}'


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", NO_TEXT, DEEP, b" " * (17 << 20)], ids=range(6))
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_invalid_configurations_are_named(model, name, raw):
    (model / name).write_bytes(raw)
    refused(model, str(model / name))


def test_code_beside_a_checkpoint_is_not_run(model, tmp_path, capsys):
    (model / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\n", encoding="utf-8")
    auto = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C"}
    change(model / "config.json", auto_map=auto, model_type="mine")
    refused(model, "config.json", "trust_remote_code")
    assert not (tmp_path / "ran").exists()


Q, NORM = "model.layers.0.self_attn.q_proj", "model.layers.{}.self_attn.q_norm.weight"
FP8 = {f"{Q}.weight": torch.zeros(64, 64, dtype=torch.float8_e4m3fn), f"{Q}.weight_scale": torch.tensor(3.0)}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, "the weights lack 'model.layers.1.mlp.up_proj.weight'"),
        ({f"{Q}.bias": torch.full((64,), 0.5)}, f"the weights have '{Q}.bias', which"),
        ({f"{Q}.bias": torch.zeros(64)}, None),
        ({NORM.format(0): torch.ones(16)}, f"the weights have '{NORM.format(0)}', which"),
        ({NORM.format(2): torch.ones(16)}, None),
        (FP8, f"the weights have '{Q}.weight_scale', which"),
    ],
    ids=["missing", "bias", "bias of zeros", "norm", "norm of a draft's layer", "scale without a quantization"],
)
def test_tensors_that_the_configuration_does_not_name_are_refused(model, weights, message):
    changed(model, weights)
    if message is None:
        load_checkpoint(str(model))
    else:
        refused(model, message)


# --- weights in several files -----------------------------------------------------------------------------------------


@pytest.fixture
def sharded(model: Path) -> Path:
    """The same weights in two files and an index."""
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    placed = {}
    for number, name in enumerate(sorted(weights)):
        placed[name] = f"model-{1 + number % 2}.safetensors"
    for file in set(placed.values()):
        save_file({name: weights[name] for name in placed if placed[name] == file}, model / file, {"format": "pt"})
    change(model / "model.safetensors.index.json", metadata={}, weight_map=placed)
    return model


def test_weights_in_several_files_are_the_same(sharded, target):
    placed = json.loads((sharded / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    for file in set(placed.values()):  # with older copies of what the index places in the other
        weights = {name: torch.zeros(3) for name in placed} | load_file(sharded / file)
        save_file(weights, sharded / file, {"format": "pt"})
    whole, parts = load_checkpoint(str(target)).model.state_dict(), load_checkpoint(str(sharded)).model.state_dict()
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


HARMS: dict[str, tuple[Callable[[dict[str, Any], Path], object], str]] = {
    "outside": (lambda placed, model: placed.update({min(placed): "../other.safetensors"}), "'../other.safetensors'"),
    "absolute": (lambda placed, model: placed.update({min(placed): "/etc/passwd"}), "'/etc/passwd'"),
    "missing": (lambda placed, model: placed.update({min(placed): "absent.safetensors"}), "missing, and"),
    "of no kind": (lambda placed, model: placed.update({min(placed): 3}), "weight_map is not an object"),
    "cut short": (lambda placed, model: (model / "model-1.safetensors").write_bytes(b"x" * 20), "model-1.safetensors"),
    "a huge header": (
        lambda placed, model: (model / "model-1.safetensors").write_bytes((2**60).to_bytes(8, "little") + b"{}"),
        "model-1.safetensors",
    ),
}


@pytest.mark.parametrize("harm", HARMS)
def test_an_index_that_leads_elsewhere_is_refused(sharded, harm):
    path = sharded / "model.safetensors.index.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    (sharded.parent / "model" / "more").mkdir()
    HARMS[harm][0](document["weight_map"], sharded)
    path.write_text(json.dumps(document), encoding="utf-8")
    refused(sharded, HARMS[harm][1])


# --- drafts -----------------------------------------------------------------------------------------------------------


DEMO = Path(__file__).resolve().parents[1] / "examples" / "models"


@pytest.mark.parametrize("method", ["draft_model:{}", "universal_draft:{}", "medusa_draft:{},medusa={}-heads"])
def test_a_draft_for_shorter_texts(tmp_path, method):
    draft = make_checkpoint(tmp_path / "draft", "llama", seed=1, max_position_embeddings=128)
    make_heads(tmp_path / "draft-heads", draft, 2, tied=True)
    draft_refused(tmp_path, method.format(draft, draft), f"is 256, but the draft {draft} was made for 128 positions")


@pytest.mark.parametrize(("folder", "flag"), [("eagle3", "--eagle3"), ("dflash", "--dflash"), ("medusa", "--medusa")])
def test_what_another_method_drafts_with(tmp_path, folder, flag):
    message = f"what another method drafts with; pass the folder with {flag}"
    draft_refused(tmp_path, f"draft_model:{DEMO}/demo-{folder}", message)


def test_heads_of_another_draft(tmp_path):
    draft, other = (
        make_checkpoint(tmp_path / name, "llama", seed=1, hidden_size=size) for name, size in (("a", 64), ("b", 32))
    )
    heads = make_heads(tmp_path / "heads", other, 2, tied=True)
    message = "heads of other sizes were trained for another model"
    draft_refused(tmp_path, f"medusa_draft:{draft},medusa={heads}", message)


def draft_refused(tmp_path: Path, method: str, message: str) -> None:
    target = make_checkpoint(tmp_path / "target", "llama", seed=0)
    steps: list[str] = []
    options = BuildOptions(target=str(target), output=tmp_path / "out", methods=method, max_seq_len=256)
    with pytest.raises(BuildError, match=message):
        build(options, lambda step, done, total: steps.append(step))
    assert set(steps) <= {"loading the target"}
    assert not (tmp_path / "out").exists()
