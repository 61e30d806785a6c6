"""Adapters of peft's: merged into the model that they are for, or refused by name; never left out."""

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specexport.contract.errors import BuildError
from specexport.exporter.build import build
from specexport.exporter.checkpoints.config import load_causal_lm, read_model_config, require_stored
from specexport.exporter.checkpoints.documents import ADAPTER
from specexport.exporter.checkpoints.locate import locate
from specexport.exporter.checkpoints.tokenizer import load_tokenizer
from specexport.exporter.options import BuildOptions
from specexport.methods.draft_model import DraftModelOptions
from specexport.runtime import Engine, SamplingParams
from tests.checkpoints import GROUPED, make_checkpoint, tokenizer
from tests.hub import hub

pytestmark = pytest.mark.exporter

IDS = torch.randint(3, 200, (1, 12), generator=torch.Generator().manual_seed(1))
LORA: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "down_proj"]}
UNTIED = {"tie_word_embeddings": False}
EXPERTS = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}


def adapter(folder: Path, base: Path, config: Any) -> tuple[Path, Any]:
    """An adapter that changes much, and peft's model with it."""
    model: Any = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager", dtype=torch.float32), config
    )
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.eval().save_pretrained(folder)
    return folder, model


def logits_of(source: Path) -> torch.Tensor:
    path = locate(str(source))
    config = read_model_config(path)
    require_stored(path, config)
    model, loaded, _ = load_causal_lm(path, config, dtype=torch.float32, attn_implementation="eager")
    assert not loaded["missing_keys"]
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(IDS).logits
    return logits


def require_same(logits: torch.Tensor, model: Any) -> None:
    with torch.no_grad():
        expected = model(IDS).logits
        with model.disable_adapter():
            base = model(IDS).logits
    spread = expected.abs().max()
    assert (logits - expected).abs().max() / spread < 1e-4
    assert (base - expected).abs().max() / spread > 0.05, "the adapter changes nothing"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base") / "model", "llama")


KINDS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "all layers": ("llama", {}, peft.LoraConfig(r=4, target_modules="all-linear")),
    "patterns": (
        "llama",
        {},
        peft.LoraConfig(**LORA, use_rslora=True, rank_pattern={"q_proj": 2}, alpha_pattern={"down_proj": 3}),
    ),
    "dora": ("llama", {}, peft.LoraConfig(**LORA, use_dora=True)),
    "transposed": ("gpt2", {}, peft.LoraConfig(r=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)),
    "a head": ("llama", UNTIED, peft.LoraConfig(**LORA, modules_to_save=["lm_head"])),
    "an embedding": ("llama", UNTIED, peft.LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"])),
    "tokens": ("llama", UNTIED, peft.LoraConfig(**LORA, trainable_token_indices=[3, 4])),
    "experts": ("mixtral", EXPERTS, peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"])),
    "ia3": ("llama", {}, peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])),
    "loha": ("llama", {}, peft.LoHaConfig(r=4, target_modules=["q_proj"])),
    "lokr": ("llama", {}, peft.LoKrConfig(r=4, target_modules=["q_proj"])),
    "oft": ("llama", {}, peft.OFTConfig(r=4, oft_block_size=0, target_modules=["q_proj"])),
    "vera": ("llama", {}, peft.VeraConfig(r=4, target_modules=["q_proj"])),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_merged_as_peft_runs_it(base, tmp_path, kind):
    family, settings, config = KINDS[kind]
    plain = base if (family, settings) == ("llama", {}) else make_checkpoint(tmp_path / "base", family, **settings)
    folder, model = adapter(tmp_path / "adapter", plain, config)
    require_same(logits_of(folder), model)


def test_an_adapter_beside_its_model_is_merged(base, tmp_path):
    """Into that model, whatever the adapter says where it is from; pickled or not."""
    folder, model = adapter(tmp_path / "adapter", base, peft.LoraConfig(**LORA))
    neighbour = shutil.copytree(base, tmp_path / "beside")
    for file in folder.glob("adapter_*"):
        shutil.copy(file, neighbour)
    document = json.loads((neighbour / ADAPTER).read_text(encoding="utf-8"))
    (neighbour / ADAPTER).write_text(json.dumps(document | {"base_model_name_or_path": "no/where"}), encoding="utf-8")
    require_same(logits_of(neighbour), model)
    torch.save(load_file(neighbour / "adapter_model.safetensors"), neighbour / "adapter_model.bin")
    (neighbour / "adapter_model.safetensors").unlink()
    require_same(logits_of(neighbour), model)


def test_an_adapter_that_changes_is_read_again(base, tmp_path):
    folder, _ = adapter(tmp_path / "adapter", base, peft.LoraConfig(**LORA))
    first = logits_of(folder)
    weights = load_file(folder / "adapter_model.safetensors")
    save_file({name: -tensor for name, tensor in weights.items()}, folder / "adapter_model.safetensors")
    assert torch.equal(logits_of(folder), first)  # twice negative
    negated = {name: -tensor if "lora_A" in name else tensor for name, tensor in weights.items()}
    save_file(negated, folder / "adapter_model.safetensors")
    assert not torch.allclose(logits_of(folder), first)


def test_adapters_tokenizers_take_precedence(base, tmp_path):
    folder, _ = adapter(tmp_path / "adapter", base, peft.LoraConfig(**LORA))
    assert load_tokenizer(locate(str(folder))).chat_templates == {}
    tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("its own", encoding="utf-8")
    assert load_tokenizer(locate(str(folder))).chat_templates == {"default": "its own"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "peft_type is 'PROMPT_TUNING'"),
        (peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "peft_type is 'PREFIX_TUNING'"),
        (peft.LNTuningConfig(target_modules=["input_layernorm"]), "peft_type is 'LN_TUNING'; expected .* LORA, IA3"),
        (peft.LoraConfig(**LORA, init_lora_weights="pissa"), "init_lora_weights is 'pissa'.*merge_and_unload"),
        (peft.LoraConfig(**LORA, bias="all"), "bias is 'all'"),
        (peft.LoraConfig(**LORA, layer_replication=[[0, 2], [1, 2]]), "layer_replication"),
    ],
)
def test_unmergeable_adapters_are_refused_by_name(base, tmp_path, config, message):
    folder, _ = adapter(tmp_path / "adapter", base, config)
    with pytest.raises(BuildError, match=rf"adapter/adapter_config\.json: {message}") as caught:
        logits_of(folder)
    assert "\n" not in str(caught.value)


def test_a_table_that_is_embedding_and_head_is_not_changed(tmp_path):
    tied = make_checkpoint(tmp_path / "tied", "qwen2")
    folder, _ = adapter(tmp_path / "adapter", tied, peft.LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"]))
    with pytest.raises(BuildError, match=r"changes 'model\.embed_tokens', .* as its embedding and as its head"):
        logits_of(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / ADAPTER).write_text("{", encoding="utf-8"), "not JSON"),
        (lambda folder: (folder / ADAPTER).write_text('{"peft_type": "LORA"}', encoding="utf-8"), "is None; expected"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 64), "peft cannot put it on"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "peft cannot put it on"),
    ],
)
def test_broken_adapters_are_named(base, tmp_path, change, message):
    folder, _ = adapter(tmp_path / "adapter", base, peft.LoraConfig(**LORA))
    change(folder)
    with pytest.raises(BuildError, match=rf"adapter_config\.json: .*{message}"):
        logits_of(folder)


@pytest.mark.parametrize("of", ["no/where/at/all", "./gone", "itself"])
def test_adapters_without_their_model_are_named(base, tmp_path, of):
    folder, _ = adapter(tmp_path / "adapter", base, peft.LoraConfig(**LORA))
    document = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))
    where = str(folder) if of == "itself" else of
    (folder / ADAPTER).write_text(json.dumps(document | {"base_model_name_or_path": where}), encoding="utf-8")
    for weights in (True, False):
        with pytest.raises(BuildError, match=r"adapter"):
            locate(str(folder), weights=weights)


def test_an_adapter_of_another_model_is_refused(base, tmp_path):
    folder, _ = adapter(tmp_path / "adapter", base, peft.LoraConfig(**LORA))
    other = make_checkpoint(tmp_path / "other", "llama", hidden_size=48, head_dim=16)
    for file in folder.glob("adapter_*"):
        shutil.copy(file, other)
    with pytest.raises(BuildError, match=r"adapter_config\.json: peft cannot put it on its model"):
        logits_of(other)


def test_an_adapter_on_the_hub_is_fetched_with_its_model(base, tmp_path):
    root = tmp_path / "hub"
    folder, model = adapter(root / "owner" / "adapter", base, peft.LoraConfig(**LORA))
    shutil.copytree(base, root / "owner" / "base")
    document = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))
    (folder / ADAPTER).write_text(json.dumps(document | {"base_model_name_or_path": "owner/base"}), encoding="utf-8")
    (folder / "optimizer.pt").write_bytes(b"no")
    with hub(root, tmp_path / "cache") as fetched:
        require_same(logits_of(Path("owner/adapter")), model)
    assert {file for file in fetched if file.startswith("owner/adapter/")} == {
        "owner/adapter/adapter_config.json",
        "owner/adapter/adapter_model.safetensors",
    }


def test_targets_and_drafts_are_built_with_their_adapters(tmp_path, cli):
    """The target's texts are those of peft's model, and a draft that is the same model is always right.

    The model is large enough for its matrices to stay in their files until they are written.
    """
    base = make_checkpoint(tmp_path / "base", "llama", hidden_size=512, intermediate_size=512, head_dim=16)
    folder, model = adapter(tmp_path / "adapter", base, peft.LoraConfig(**LORA))
    methods = (DraftModelOptions(model=str(folder), num_speculative_tokens=2),)
    out = build(BuildOptions(str(folder), tmp_path / "bundle", methods, draft_precision="fp32", max_seq_len=256))
    expected = model.generate(
        input_ids=IDS, attention_mask=torch.ones_like(IDS), do_sample=False, max_new_tokens=24, eos_token_id=None
    )
    with Engine.load(out, threads=1) as engine:
        completion = engine.generate(IDS[0].tolist(), SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    assert list(completion.token_ids) == expected[0, IDS.shape[1] :].tolist()
    assert completion.stats.accepted == completion.stats.drafted > 0
    assert engine.manifest.target.source == str(folder)
    for words in (
        ["suggest", "--target", str(folder), "--draft", str(folder)],
        ["plan", "--target", str(folder), "--draft", str(folder), "--device", "orin-nano-8gb"],
    ):
        assert "parameters" in cli(*words).out
