"""GGUF files: what they hold is built as it is; transformers reading the same file is the oracle."""

import contextlib
import errno
import json
import math
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import Metaspace
from transformers import AutoModelForCausalLM, AutoTokenizer

from specexport.contract.errors import BuildError
from specexport.contract.model import StoredAs
from specexport.contract.reading import read_manifest
from specexport.exporter.build import build
from specexport.exporter.checkpoints.checkpoint import load_checkpoint, plain_transformers, reference_logits
from specexport.exporter.checkpoints.gguf.header import read_header
from specexport.exporter.checkpoints.gguf.tensors import KEPT, scales_of
from specexport.exporter.checkpoints.locate import find, locate
from specexport.exporter.checkpoints.stored import QuantizedTensor, read_weights
from specexport.exporter.checkpoints.tokenizer import load_tokenizer, require_same_tokenizer
from specexport.exporter.options import BuildOptions
from specexport.llm import LLM
from specexport.runtime import Engine, SamplingParams
from specexport.verify.bundle import verify
from tests.checkpoints import GROUPED, make_checkpoint, with_swapped_tokens
from tests.gguf_files import WIDE, Type, make_gguf
from tests.hub import hub

pytestmark = pytest.mark.exporter

PROMPT = "the water of my day"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of which files are made."""
    return make_checkpoint(tmp_path_factory.mktemp("llama") / "model", "llama", **WIDE, tie_word_embeddings=True)


def _built(source: Path, output: Path, precision: StoredAs | None = None, **options: Any) -> Path:
    sizes = {"max_batch_size": 1, "max_seq_len": 128}
    return build(BuildOptions(target=str(source), output=output, precision=precision, **sizes, **options))


def _require_same_text(file: Path, bundle: Path, tokens: int = 24) -> None:
    """Compares a bundle's greedy text with that of transformers reading the same file."""
    where: dict[str, Any] = {"gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, attn_implementation="eager", **where)
    ids = tokenizer(PROMPT).input_ids
    with torch.no_grad():
        inputs = torch.tensor([ids])
        text = model.eval().generate(
            inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=tokens, pad_token_id=2
        )
    expected = text[0, len(ids) :].tolist()
    with Engine.load(bundle, threads=1) as engine:
        assert engine.tokenizer.encode(PROMPT).ids == ids
        completion = engine.generate(ids, SamplingParams(temperature=0.0, max_tokens=tokens)).token_ids
    assert list(completion) == expected[: len(completion)] and len(completion) >= len(expected) - 1


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_gguf_families_equal_transformers(tmp_path, family):
    sizes: dict[str, Any] = {"head_dim": 128} if family == "qwen3" else {}  # transformers' mapping knows no other
    checkpoint = make_checkpoint(tmp_path / "model", family, tie_word_embeddings=family != "llama", **sizes)
    file = make_gguf(tmp_path / "tiny.gguf", checkpoint, Type.F16)
    bundle = _built(file, tmp_path / "bundle", "fp32")
    _require_same_text(file, bundle)
    assert verify(bundle).passed


@pytest.mark.parametrize("kind", KEPT, ids=lambda kind: kind.name)
def test_integers_scales_and_offsets_are_those_of_the_file(llama, tmp_path, kind):
    file = make_gguf(tmp_path / "tiny.gguf", llama, kind)
    tensor = read_header([file]).tensors["blk.0.ffn_up.weight"]
    restored = gguf.dequantize(tensor.data, kind).T
    scales = scales_of(tensor.data, kind)
    group = scales.group
    scale = np.repeat(scales.scale.values(), group, axis=0)
    offset = 0 if scales.offset is None else np.repeat(scales.offset.values(), group, axis=0)
    integers = np.rint((restored - offset) / np.where(scale == 0, 1, scale))
    low, high = (-128, 127) if scales.kind == "int8" else (0, 15) if scales.offset is not None else (-8, 7)
    assert integers.min() >= low and integers.max() <= high and len(np.unique(integers)) > 3
    np.testing.assert_array_equal(scale * integers.astype(np.float32) + offset, restored)


def test_blocks_are_kept_at_the_bits_of_the_file(llama, tmp_path):
    """Several types in a file, of which most are kept in the bits that they have; what is converted is said."""
    others = {
        "attn_v.weight": Type.Q6_K, "ffn_down.weight": Type.Q4_1, "attn_output.weight": Type.Q8_0,
        "token_embd.weight": Type.Q6_K, "blk.1.ffn_up.weight": Type.IQ2_XXS,
    }  # fmt: skip
    file = make_gguf(tmp_path / "tiny.gguf", llama, Type.Q4_K, others)
    bundle = _built(file, tmp_path / "bundle")
    precision = read_manifest(bundle).target.precision
    before = precision.quantized_before
    assert precision.weights == "stored" and before is not None and before.format.startswith("GGUF (")
    assert (before.kept, before.converted) == (15, 1) and 0 < (before.converted_rms_error or 0) < 0.02
    names = {tensor.name: tensor for tensor in load_checkpoint(str(file)).tensors.values()}
    assert isinstance(names["model.layers.1.mlp.up_proj.weight"], QuantizedTensor)
    assert verify(bundle).passed
    size = (bundle / "target.bin").stat().st_size
    weights = sum(place.data.nbytes for place in read_header([file]).tensors.values())
    pages = 4096 * len(list(read_header([file]).tensors)) * 3
    assert size < 1.25 * weights + pages


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q5_K, Type.BF16], ids=lambda kind: kind.name)
def test_a_file_of_one_type_says_the_same(llama, tmp_path, kind):
    file = make_gguf(tmp_path / "tiny.gguf", llama, kind)
    bundle = _built(file, tmp_path / "bundle")
    _require_same_text(file, bundle)


# --- where files lie --------------------------------------------------------------------------------------------------


def test_files_folders_and_splits_are_found(target, tmp_path):
    first = make_gguf(tmp_path / "split" / "tiny.gguf", target, Type.F16, parts=3)
    (tmp_path / "split" / "mmproj-tiny.gguf").write_bytes(b"of pictures")
    whole = load_checkpoint(str(tmp_path / "split"))
    other = load_checkpoint(str(first.with_name("tiny-00002-of-00003.gguf")))
    for name, tensor in whole.tensors.items():
        assert torch.equal(tensor.read(), other.tensors[name].read())
    assert sorted(file.name for file in find(str(first)).glob("*.gguf")) == [
        f"tiny-0000{number}-of-00003.gguf" for number in (1, 2, 3)
    ]
    first.with_name("tiny-00003-of-00003.gguf").rename(tmp_path / "split" / "away.bin")
    with pytest.raises(BuildError, match=r"the model is in 3 files, and tiny-00003-of-00003.gguf is missing"):
        locate(str(first))


def test_of_several_models_one_is_to_be_named(target, tmp_path):
    for name in ("tiny-Q4_0.gguf", "tiny-Q8_0.gguf"):
        make_gguf(tmp_path / name, target, Type.F16)
    with pytest.raises(BuildError) as raised:
        locate(str(tmp_path))
    assert str(raised.value) == (
        f"{tmp_path}: holds 2 GGUF models; name the one to build: {tmp_path}/FILE.gguf, FILE being one of "
        "tiny-Q4_0.gguf, tiny-Q8_0.gguf"
    )
    with pytest.raises(BuildError, match="no such file"):
        locate(str(tmp_path / "other.gguf"))


def test_too_little_memory_for_a_file_is_said(tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(30))
    monkeypatch.setattr("specexport.exporter.checkpoints.gguf.header.mmap.mmap", refuse)
    with pytest.raises(BuildError, match=r"^there is not enough memory$"):
        read_header([file])


def test_repositories_of_the_hub(target, tmp_path):
    make_gguf(tmp_path / "hub" / "owner" / "one" / "tiny-Q8_0.gguf", target, Type.F16)
    for name in ("a/tiny-Q4_0.gguf", "b/tiny-Q8_0.gguf"):
        make_gguf(tmp_path / "hub" / "owner" / "two" / name, target, Type.F16)
    with hub(tmp_path / "hub", tmp_path / "cache") as fetched:
        assert load_checkpoint("owner/one").family == "llama"
        with pytest.raises(BuildError, match=r"owner/two/FILE.gguf, FILE being one of a/tiny-Q4_0.gguf, b/tiny-Q8_0"):
            locate("owner/two")
        assert load_checkpoint("owner/two/b/tiny-Q8_0.gguf").family == "llama"
        with pytest.raises(BuildError, match=r"owner/two: has no file c.gguf; its GGUF files: a/tiny-Q4_0.gguf, b/"):
            locate("owner/two/c.gguf")
    assert fetched == {"owner/one/tiny-Q8_0.gguf", "owner/two/b/tiny-Q8_0.gguf"}


def test_a_target_and_a_draft_are_built_on_first_use(target, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECEXPORT_CACHE", str(tmp_path / "cache"))
    file = make_gguf(tmp_path / "tiny.gguf", target, Type.Q8_0)
    draft = {"model": str(file), "num_speculative_tokens": 3}
    options: dict[str, Any] = {"max_model_len": 128, "max_batch_size": 1, "calibrate": False}
    texts = []
    for _ in range(2):
        with LLM(model=str(file), speculative_config=draft, **options) as llm:
            texts.append(llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=12))[0].outputs[0].text)
    bundles = list((tmp_path / "cache" / "bundles").glob("tiny.gguf-*"))
    assert len(bundles) == 1 and texts[0] == texts[1]
    manifest = read_manifest(bundles[0])
    assert manifest.target.source == str(file) and manifest.target.precision.weights == "stored"
    make_gguf(file, target, Type.Q4_0)
    with LLM(model=str(file), **options) as llm:
        llm.generate([PROMPT], SamplingParams(max_tokens=2))
    assert len(list((tmp_path / "cache" / "bundles").glob("tiny.gguf-*"))) == 2


# --- what a file says -------------------------------------------------------------------------------------------------


def test_template_ends_and_sampling_are_those_of_the_file(target, tmp_path):
    model = json.loads((target / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].get)[:-2], "<end_of_turn>", "<|im_end|>"]
    last = len(tokens) - 1
    kinds = [3 if index in (0, 1, 2, last) else 1 for index in range(len(tokens))]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]][:-2]
    file = make_gguf(
        tmp_path / "tiny.gguf", target, Type.F32,
        metadata={
            "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.eot_token_id": 9,
            "tokenizer.ggml.merges": merges, "general.sampling.temp": 0.5, "general.sampling.top_k": 40,
        },
    )  # fmt: skip
    folder = locate(str(file))
    checkpoint, tokenizer = load_checkpoint(str(file)), load_tokenizer(folder)
    assert checkpoint.eos_token_ids == (1, 9, last - 1, last)  # stated; stated for turns; by their names
    assert (checkpoint.generation.temperature, checkpoint.generation.top_k) == (0.5, 40)
    assert tokenizer.chat_templates["default"].startswith("{% for m in messages %}")
    assert tokenizer.special_tokens["bos_token"] == "<s>" and tokenizer.eos_token_id == 1
    assert tokenizer.tokenizer.encode("<|im_end|>").ids == [last]
    assert tokenizer.tokenizer.encode("<end_of_turn>").ids == [last - 1]  # a normal token, by the file
    assert tokenizer.tokenizer.get_vocab_size() == len(tokens)  # without transformers' own <|endoftext|>


def test_scaled_rotary_frequencies_of_llama_3(target, tmp_path):
    """A file has the factors alone; transformers reads none of them."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    other = shutil.copytree(target, tmp_path / "scaled")
    config["rope_parameters"] = {**scaling, "rope_theta": config["rope_parameters"]["rope_theta"]}
    config["max_position_embeddings"] = 512
    (other / "config.json").write_text(json.dumps(config), encoding="utf-8")
    expected = load_checkpoint(str(other)).model
    frequencies = 1 / config["rope_parameters"]["rope_theta"] ** (torch.arange(8) / 8)
    factors = frequencies / expected.model.rotary_emb.inv_freq
    file = make_gguf(tmp_path / "tiny.gguf", target, Type.F32, tensors={"rope_freqs.weight": factors.numpy()})
    loaded = load_checkpoint(str(file)).model
    torch.testing.assert_close(loaded.model.rotary_emb.inv_freq, expected.model.rotary_emb.inv_freq)
    odd = make_gguf(tmp_path / "odd.gguf", target, Type.F32, tensors={"rope_freqs.weight": 1 + factors.numpy()})
    with pytest.raises(BuildError, match=r"odd.gguf: tensor 'rope_freqs.weight' holds other factors than Llama 3's"):
        load_checkpoint(str(odd))


def test_digits_are_split_as_the_file_states(target, tmp_path):
    """Transformers does not know SmolLM's way, and would take GPT-2's."""
    file = make_gguf(tmp_path / "tiny.gguf", target, Type.F32, metadata={"tokenizer.ggml.pre": "smollm"})
    split = load_tokenizer(locate(str(file))).tokenizer.pre_tokenizer.pre_tokenize_str("x  12 y")
    assert [part for part, _ in split] == ["x", "ĠĠ", "1", "2", "Ġy"]


def test_qwens_files_that_split_texts_otherwise_are_refused(tmp_path):
    """Transformers splits all of them like Qwen 2."""
    checkpoint = make_checkpoint(tmp_path / "model", "qwen2")
    for kind, known in (("qwen2", True), ("deepseek-r1-qwen", True), ("smollm", False), ("llama-bpe", False)):
        file = make_gguf(tmp_path / f"{kind}.gguf", checkpoint, Type.F32, metadata={"tokenizer.ggml.pre": kind})
        refusal = pytest.raises(BuildError, match=f"is '{kind}', a way to split text that transformers does not know")
        with contextlib.nullcontext() if known else refusal:
            load_tokenizer(locate(str(file)))


def test_words_that_are_tokens_are_taken_whole_as_in_llama_3(target, tmp_path):
    for kind, tokens in (("llama-bpe", ["Ġthe"]), ("default", ["Ġ", "t", "he"])):
        metadata = {"tokenizer.ggml.pre": kind, "tokenizer.ggml.merges": ["h e"]}
        file = make_gguf(tmp_path / f"{kind}.gguf", target, Type.F32, metadata=metadata)
        assert load_tokenizer(locate(str(file))).tokenizer.encode(" the").tokens == tokens


def test_templates_with_names_are_read(target, tmp_path):
    metadata = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "{{ tools }}"}
    file = make_gguf(tmp_path / "tiny.gguf", target, Type.F32, metadata=metadata)
    assert load_tokenizer(locate(str(file))).chat_templates["tool_use"] == "{{ tools }}"


@pytest.mark.parametrize(("prefix", "tokens"), [(None, [4, 261]), (True, [4, 261]), (False, [260, 261])])
def test_a_space_is_put_before_texts_as_the_file_states(target, tmp_path, prefix, tokens):
    """Sentencepiece's tokenizers, as llama.cpp reads them."""
    pieces = ["<unk>", "<s>", "</s>", "▁", "▁a", *(f"<0x{byte:02X}>" for byte in range(255)), "a", "b"]
    metadata = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": pieces, "tokenizer.ggml.merges": None,
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, *[6] * 255, 1, 1], "tokenizer.ggml.scores": [0.0] * len(pieces),
        "tokenizer.ggml.add_space_prefix": prefix, "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.padding_token_id": None,
    }  # fmt: skip
    tokenizer = load_tokenizer(locate(str(make_gguf(tmp_path / "m.gguf", target, metadata=metadata)))).tokenizer
    assert tokenizer.encode("ab").ids == tokens and tokenizer.decode(tokens) == "ab"
    assert tokenizer.decode(tokenizer.encode(" a").ids) == " a"
    other = Tokenizer.from_str(tokenizer.to_str())
    other.normalizer, other.pre_tokenizer = None, Metaspace(prepend_scheme="first", split=False)
    if prefix is not False:  # transformers' form of the same
        require_same_tokenizer(tokenizer, other, "the draft")
    assert tokenizer.encode("<s>ab").ids == [1, *tokens]


_THETA = {"rope_type": "default", "rope_theta": 300000.0}
_LONG = {
    "short_factor": [1.0, 1.125, 1.25, 1.5, 2.0, 3.0], "long_factor": [1.0, 2.0, 3.0, 4.0, 6.0, 8.0],
    "original_max_position_embeddings": 256,
}  # fmt: skip
_YARN = _THETA | {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8.0, "beta_slow": 2.0,
    "attention_factor": 2 * (0.1 * math.log(4) + 1),
}  # fmt: skip
_LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, **_LONG}


@pytest.mark.parametrize(
    ("family", "config", "metadata"),
    [
        ("phi3", {"partial_rotary_factor": 0.5, "sliding_window": 8}, {"rope.dimension_count": 8}),
        ("phi3", {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 256, "rope_parameters": _LONGROPE},
         {"rope.dimension_count": 12, "rope.scaling.original_context_length": 256}),
        ("starcoder2", {**GROUPED, "rope_parameters": _THETA}, {}),
        ("nemotron", {**GROUPED, "partial_rotary_factor": 0.25}, {"rope.dimension_count": 4}),
        ("gemma2", {"query_pre_attn_scalar": 256}, {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 3.0}),
        ("gemma3", {"query_pre_attn_scalar": 16, "num_hidden_layers": 62, "sliding_window": 8,
                    "layer_types": [("full" if at % 6 == 5 else "sliding") + "_attention" for at in range(62)]}, {}),
        ("gemma3", {"query_pre_attn_scalar": 256, "num_hidden_layers": 6, "sliding_window": 8,
                    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
                    "rope_parameters": {"sliding_attention": _THETA, "full_attention": _THETA | {"rope_theta": 1e6}}},
         {"rope.freq_base_swa": 300000.0, "rope.freq_base": 1e6}),
        ("llama", {"rope_parameters": _YARN}, {
            "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64,
            "rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_beta_slow": 2.0,
            "rope.scaling.yarn_attn_factor": 2.0,
        }),
        ("llama", {"rope_parameters": _THETA | {"rope_type": "linear", "factor": 4.0}}, {"rope.scale_linear": 4.0}),
    ],
    ids=["window", "long", "starcoder2", "part", "caps", "27B", "bases", "yarn", "old"],
)  # fmt: skip
def test_attention_is_that_of_the_file(tmp_path, family, config, metadata):
    """Transformers' mapping leaves these settings at defaults, so the checkpoint is the oracle."""
    checkpoint = make_checkpoint(tmp_path / "model", family, **config)
    tensors = {
        f"rope_factors_{length}.weight": np.array(_LONG[f"{length}_factor"], np.float32) for length in ("short", "long")
    } if config.get("rope_parameters") is _LONGROPE else None  # fmt: skip
    metadata = {f"{family}.{key}": value for key, value in metadata.items()}
    file = make_gguf(tmp_path / "tiny.gguf", checkpoint, Type.F32, metadata=metadata, tensors=tensors)
    logits = []
    for source in (checkpoint, file):
        model = load_checkpoint(str(source)).model
        with read_weights(model), plain_transformers(model):
            logits.append(reference_logits(model, np.arange(3, 43)))
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.block_count": 5}, r"llama.block_count is 5; expected 1 to 2, the layers in it"),
        ({"llama.attention.head_count_kv": 0}, r"llama.attention.head_count_kv is 0; expected at least 1"),
        ({"llama.embedding_length": 1 << 30}, r"hidden_size is 1073741824; expected at most"),
        ({"llama.feed_forward_length": 128}, r"tensor 'blk.0.ffn_down.weight' \[64, 96\] does not fit \[64, 128\]"),
        ({"llama.rope.scaling.type": "yarn"}, r"llama.rope.scaling.type is 'yarn'; expected none, linear, or yarn or"),
        (
            {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.original_context_length": 8},
            r"tensor 'rope_factors_short.weight' is missing",
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 8,
                "llama.rope.scaling.yarn_ext_factor": 0.5,
            },
            r"llama.rope.scaling.yarn_ext_factor is 0.5; expected 1",
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": -4.0,
                "llama.rope.scaling.original_context_length": 8,
                "llama.rope.scaling.yarn_attn_factor": 2.0,
            },
            r"llama.rope.scaling.factor is -4; expected a number above 0",
        ),
        ({"tokenizer.ggml.pre": "deepseek-llm"}, r"tokenizer.ggml.pre is 'deepseek-llm', a way to split text"),
        ({"tokenizer.ggml.model": "bert"}, r"its tokenizer could not be read: .*'bert'"),
        ({"general.alignment": 24}, r"general.alignment is 24; expected a power of two"),
    ],
)
def test_mismatches_are_refused_by_name(target, tmp_path, metadata, message):
    file = make_gguf(tmp_path / "tiny.gguf", target, Type.F32, metadata=metadata)
    with pytest.raises(BuildError, match=message) as raised:
        load_tokenizer(locate(str(file)))
        load_checkpoint(str(file))
    assert str(file) in str(raised.value)


def test_a_draft_is_named_by_its_file(target, tmp_path, cli):
    """Not by the folder of links that it is read from."""
    other = with_swapped_tokens(make_checkpoint(tmp_path / "target", "llama"))
    draft = make_gguf(tmp_path / "tiny.gguf", target, Type.F32)
    printed = cli("build", "--target", other, "--draft", draft, "-o", tmp_path / "out", status=1)
    assert f"the method universal_draft:{draft}" in printed.err


def test_a_draft_and_other_precisions(target, tmp_path, cli):
    file = make_gguf(tmp_path / "tiny.gguf", target, Type.Q8_0)
    words = ["build", "--target", str(file), "--max-seq-len", "128", "--max-batch-size", "1", "-o"]
    errors = cli(*words, tmp_path / "int4", "--precision", "int4").err
    assert "matrices were rounded again, to int4, as their scales do not fit: error" in errors
    printed = cli(*words, tmp_path / "stored", "--precision", "stored", "--lowering", "portable", status=2)
    assert "precision is 'stored' with lowering portable" in printed.err
