"""``specexport plan``: memory by counting, speed by bandwidth, and models by their configurations alone."""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from specexport.contract.errors import BuildError
from specexport.contract.methods import MethodOptions, read_method
from specexport.contract.reading import read_manifest
from specexport.contract.shapes import cache_buckets
from specexport.exporter.checkpoints.config import meta_model
from specexport.exporter.options import PREFILL_CHUNK
from specexport.exporter.plan import DEVICES, EFFICIENCY, DeviceLimits, DevicePlan, plan
from tests.checkpoints import GROUPED, make_checkpoint, make_dflash, make_eagle3, make_heads, make_mtp
from tests.hub import hub
from tests.test_mixtures import MIXTURES
from tests.threads import python

pytestmark = pytest.mark.exporter

CONTEXT = 300
DEVICE = DeviceLimits(memory=10**9, bandwidth=10**9, capability="8.7", reserved=10**8)


def drafted(draft: Path) -> MethodOptions:
    return read_method({"method": "draft_model", "model": str(draft)})


def planned(folder: Path, method: MethodOptions | None = None, **options: Any) -> DevicePlan:
    """In fp16 for :data:`DEVICE`, half of all draft tokens accepted, unless said otherwise."""
    device, settings = options.pop("device", DEVICE), {"precision": "fp16", "acceptance": 0.5}
    return plan(str(folder), method, device, context=CONTEXT, **settings | options)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tied"), "qwen3")


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("untied"), "llama")


def test_memory_is_counted(tied, untied):
    vocab, hidden, heads, layers = 320, 64, 2, 2
    for folder, size in ((tied, 24), (untied, 16)):
        (estimate,) = planned(folder).models
        assert estimate.weights == 2 * estimate.parameters
        assert estimate.read == estimate.weights - (0 if folder == tied else 2 * vocab * hidden)
        assert estimate.cache_row == layers * heads * 2 * size * 2
        assert estimate.cache == estimate.cache_row * cache_buckets(CONTEXT, PREFILL_CHUNK)[-1]
    (whole,) = planned(untied).models
    (quarter,) = planned(untied, precision="int4").models
    table, norms = 2 * vocab * hidden, 2 * hidden * (2 * layers + 1)
    assert quarter.read - norms == (whole.read - norms) / 2 * (0.5 + 2 / 32)
    assert quarter.weights == quarter.read + table
    ada = dataclasses.replace(DEVICE, capability="8.9")
    (eighth,) = planned(untied, device=ada, precision="fp8").models
    columns = 2 * (layers * (2 * 64 + 2 * 32 + 2 * 96 + 64) + vocab)
    assert eighth.read - norms == (whole.read - norms) / 2 + columns
    # A tied embedding is looked up in fp16 and multiplied as integers: two matrices.
    (both,) = planned(tied, precision="int8").models
    assert both.weights == both.read + table


def test_memory_of_onnxruntime_is_counted(tied):
    """As it was seen over null CUDA: a tied head again, transposed, and integers undone into 16 bits."""
    vocab, hidden, widest = 320, 64, 320
    deciding = 18 * 9 * vocab * 4  # plainly and by look-ups: of the root and at most 8 draft tokens
    half, eighth = (
        [planned(tied, precision=precision, backend=backend) for backend in ("tensorrt", "onnxruntime-cuda")]
        for precision in ("fp16", "int8")
    )
    (engine,), (session,) = (estimates.models for estimates in half)
    assert session.weights == engine.weights + 2 * vocab * hidden
    assert (session.read, session.scratch) == (engine.read, engine.scratch + deciding)
    (engine,), (session,) = (estimates.models for estimates in eighth)
    assert session.weights == session.read + vocab * hidden * (1 + 2 / 32)
    assert session.scratch == engine.scratch + deciding + 2 * 2 * widest * hidden


def test_speed_follows_the_bandwidth_and_the_acceptance(tied, untied):
    estimate = planned(untied, drafted(tied))
    target, draft = estimate.models
    steps = [
        (model.read + model.cache_row * CONTEXT / 2) / (EFFICIENCY * DEVICE.bandwidth) for model in (target, draft)
    ]
    assert len(estimate.speeds) == 9
    assert estimate.speeds[0] == pytest.approx(1 / steps[0])
    assert estimate.speeds[2] == pytest.approx((1 + 0.5 + 0.25) / (steps[0] + 2 * steps[1]))
    never = planned(untied, drafted(tied), acceptance=0.0)
    assert never.best_k == 0


def test_plan_counts_drafts_by_their_checkpoints(tmp_path, tied):
    """EAGLE-3 and MTP a pass a token, DFlash one for all of them."""
    experts = make_mtp(tmp_path / "experts", "glm4_moe", **MIXTURES["glm4_moe"])
    eagle3, dflash = make_eagle3(tmp_path / "eagle3", tied, states=(0, 1)), make_dflash(tmp_path / "dflash", tied)
    drafts = {"eagle3": (tied, eagle3), "dflash": (tied, dflash), "mtp": (experts, None)}
    for name, (target, folder) in drafts.items():
        method = read_method({"method": name} | ({"model": str(folder)} if folder else {}))
        estimate = planned(target, method)
        draft = estimate.models[1]
        if folder is not None:  # an embedding and a head of its own are stored in any case
            stored = {key: tensor for key, tensor in load_file(folder / "model.safetensors").items() if "2" not in key}
            shared = [key for key in ("embed_tokens.weight", "lm_head.weight") if key not in stored]
            whole = sum(tensor.numel() for tensor in stored.values()) + len(shared) * 320 * 64
            assert draft.parameters == whole
        passes = 1 if name == "dflash" else 3
        read = estimate.models[0].step(4, CONTEXT / 2) + passes * draft.step(1, CONTEXT / 2)
        assert estimate.speeds[3] == pytest.approx(1.875 * EFFICIENCY * DEVICE.bandwidth / read)
        assert draft.cache_row > 0 and draft.active <= draft.parameters
    assert draft.active < draft.parameters  # of its experts a token uses some
    other = make_checkpoint(tmp_path / "other", "llama", hidden_size=96)
    with pytest.raises(BuildError, match="trained for another model"):
        planned(other, read_method({"method": "eagle3", "model": str(eagle3)}))
    with pytest.raises(BuildError, match=r"describes no model of its own.*pass the folder with --eagle3"):
        planned(tied, drafted(Path("examples/models/demo-eagle3")))
    make_heads(tmp_path / "heads", tied, 2, tied=True)
    with pytest.raises(BuildError, match="which has no model of its own to plan for; expected draft_model"):
        planned(tied, read_method({"method": "medusa", "model": str(tmp_path / "heads")}))


def test_a_mixture_reads_the_experts_of_its_tokens(tmp_path, tied):
    config = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    folder = make_checkpoint(tmp_path, "qwen3_moe", head_dim=16, **{**GROUPED, **config})
    estimate = planned(folder, drafted(tied), precision="int8")
    mixture, draft = estimate.models
    experts = 2 * 8 * 3 * 64 * 32
    assert mixture.active == mixture.parameters - experts * 6 // 8
    assert mixture.step(1, 0) == mixture.read == mixture.read_limit - 2 * experts * 6 // 8
    assert mixture.step(3, 0) == mixture.read + 2 * 2 * experts * 2 // 8
    assert mixture.step(4, 0) == mixture.step(9, 0) == mixture.read_limit
    seconds = (mixture.step(2, CONTEXT / 2) + draft.step(1, CONTEXT / 2)) / (EFFICIENCY * DEVICE.bandwidth)
    assert estimate.speeds[1] == pytest.approx(1.5 / seconds)


def test_the_cache_of_latent_attention_has_keys_and_values_of_their_own_sizes(tmp_path):
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    folder = make_checkpoint(tmp_path, "minicpm3", **{**GROUPED, "num_key_value_heads": 4}, **latent)
    (estimate,) = planned(folder).models
    assert estimate.cache_row == 2 * 4 * (24 + 16) * 2


def test_models_that_do_not_fit_are_reported(tied, cli):
    small = DeviceLimits(memory=10**6, bandwidth=10**9, capability="8.7", reserved=10**6 - 10)
    assert not planned(tied, device=small).fits
    line = ["plan", "--target", str(tied), "--device", "orin-nano-8gb", "--max-seq-len", str(CONTEXT)]
    shown = cli(*line, "--draft", tied, "--json").json
    assert shown["fits"] and shown["needed"] == sum(
        model["weights"] + model["cache"] + model["scratch"] for model in shown["models"]
    )
    assert "not measured" in cli(*line).out
    assert "expected one of orin-nano-4gb" in cli("plan", "--target", tied, "--device", "abacus", status=2).err


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"precision": "fp8"}, "8.7, and fp8 weights need 8.9"),
        ({"context": 513}, "max_seq_len .* is 513, but .* was made for 512 positions"),
    ],
)
def test_plans_that_make_no_sense_are_refused(tied, change, reason):
    arguments: dict[str, object] = {"precision": "int4", "context": CONTEXT, "acceptance": 0.5, **change}
    with pytest.raises(BuildError, match=reason):
        plan(str(tied), None, DEVICES["orin-nano-8gb"], **arguments)


def test_the_default_context_is_one_that_can_be_built(tied):
    device = DEVICES["orin-nano-8gb"]
    assert plan(str(tied), None, device, precision="int4", context=None, acceptance=0.5).context == 512


def test_invalid_configurations_are_named(tmp_path):
    with pytest.raises(BuildError, match=r"empty: no such folder"):
        planned(tmp_path / "empty")


# --- bundles ----------------------------------------------------------------------------------------------------------


def test_a_bundle_is_planned_for_without_torch(bundle):
    folder = bundle("llama-near")
    assert answered("suggest", folder)
    words = ["plan", "--target", folder, "--device", "orin-nano-8gb", "--acceptance", "0.5", "--json"]
    document = json.loads(answered(*words))
    target, draft = document["models"]
    assert target["weights"] == (folder / "target.bin").stat().st_size
    assert draft["weights"] == (folder / "draft.bin").stat().st_size
    manifest = read_manifest(folder)
    assert target["parameters"] == manifest.target.parameters
    assert target["cache"] >= target["cache_row"] * manifest.max_seq_len
    assert len(document["speeds"]) == 8  # plain, and up to the 7 draft tokens that it was built for


def test_options_fixed_by_a_bundle_are_refused(bundle, cli):
    words = ["plan", "--target", str(bundle("llama-near")), "--device", "orin-nano-8gb"]
    for more in (["--precision", "int8"], ["--max-seq-len", "64"], ["--method", "mtp"]):
        assert f"{more[0]} was given with a bundle, which is built already" in cli(*words, *more, status=2).err


def test_plan_of_a_bundle_names_its_drafts(bundle, cli):
    text = {"llama-near": "draft_model gains nothing", "qwen3-medusa": "medusa: part of the target's graph"}
    for name, line in text.items():
        shown = cli("plan", bundle(name), "--device", "orin-nano-8gb").out
        assert line in shown and "fp32" in shown and "as built" in shown
    printed = cli("plan", bundle("qwen3-medusa"), "--device", "orin-nano-8gb", "--acceptance", "0.5", status=2)
    assert "--acceptance was given without a draft" in printed.err


def test_a_bundle_is_no_model_to_draft_with(tied, bundle, cli):
    folder = str(bundle("llama-near"))
    for words in (["suggest", str(tied), "--draft", folder], ["build", "--target", folder, "-o", "never"]):
        assert f"{folder}: a bundle, which is built already" in cli(*words, status=1).err


def test_suggest_takes_a_bundle(bundle, monkeypatch, cli):
    folder = bundle("llama-near")
    for words in (["--target", str(folder)], [str(folder)]):
        shown = cli("suggest", *words).out
        manifest = read_manifest(folder)
        draft = manifest.models["draft"]
        assert f"{manifest.target.parameters:,} parameters" in shown
        rows = {row.split()[0]: row for row in shown.splitlines() if row}
        assert " built " in rows["draft_model"] and " always " in rows["ngram"] and " not built " in rows["eagle3"]
        assert f"specexport bench {folder} --methods all" in shown
        assert shown.rstrip().endswith("other methods need another build of the target")
        assert "1.0 times smaller, the same tokenizer" in rows["draft_model"]
    monkeypatch.setattr("specexport.exporter.suggest._USABLE", (0.5, 50))
    shown = cli("suggest", folder, "--draft", draft.source).out
    assert "other methods need another build of the target, for instance:\n" in shown
    assert shown.rstrip().endswith(f"--draft {draft.source} --num-speculative-tokens 4 --precision fp32 -o bundle/")


# --- without weights --------------------------------------------------------------------------------------------------


def answered(*words: object) -> str:
    """What a command prints in a process of its own, where none of these can be imported."""
    program = (
        "import sys\nsys.modules |= dict.fromkeys(('torch', 'transformers', 'onnxruntime'))\n"
        "from specexport.cli import main\nsys.exit(main(sys.argv[1:]))"
    )
    return python(program, *words)


def test_a_configuration_is_all_that_suggest_and_plan_need(tmp_path, tied, cli):
    """Weights may be cut off, or not there at all."""
    large = make_checkpoint(tmp_path / "large", "qwen3", num_hidden_layers=16)
    weights = large / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(large / name, bare / name)
    for folder in (large, bare):
        assert f"--draft {tied} --num-speculative-tokens 4" in cli("suggest", folder, "--draft", tied).out
        shown = cli("plan", folder, "--draft", tied, "--device", "orin-nano-8gb").out
        assert f"{meta_model(large).num_parameters():,}" in shown
        assert "with draft_model" in shown


def test_of_the_hub_no_weights_are_fetched(tmp_path, tied, cli):
    shutil.copytree(tied, tmp_path / "hub" / "owner" / "model")
    with hub(tmp_path / "hub", tmp_path / "cache") as fetched:
        assert "times smaller than the target" in cli("suggest", "owner/model", "--draft", "owner/model").out
        cli("plan", "owner/model", "--device", "orin-nano-8gb")
    assert "owner/model/config.json" in fetched and not any("safetensors" in file for file in fetched)
