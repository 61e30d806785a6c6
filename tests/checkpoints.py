"""Tiny random checkpoints of every supported model family, as Hugging Face folders.

They say nothing sensible, but everything a family's code can do differently occurs in them: every layer type, norms and
biases that are not what they are initialised to, windows shorter than a test's texts.
"""

import json
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from specexport.graphs.layers import hidden_and_logits
from specexport.methods.medusa.export import save_medusa
from specexport.methods.medusa.graph import MedusaHeads
from specexport.methods.mlp_speculator.export import save_speculator
from specexport.methods.mlp_speculator.graph import SpeculatorStages
from specexport.methods.mlp_speculator.train import stage_losses
from specexport.training.data import Windows
from specexport.training.predictions import weighted_loss

VOCAB = 320
MAX_POSITIONS = 512
WINDOW = 8
BOS, EOS, PAD = 0, 1, 2

_SPECIAL = ["<s>", "</s>", "<pad>"]
_TEXT = """
    the of and to in is that it was for on are as with his they at be this from have or by one had not but what all were
    when we there can an your which their said if do will each about how up out them then she many some so these would
    other into has more her two like him see time could no make than first been its who now people my made over did down
    only way find use may water long little very after words called just where most know get through back much before go
    good new write our used me man too any day same right look think also around another came come work three word must
    because does part even place well such here take why things help put years different away again off went old number
"""

# Four heads of 16, two of them sharing keys and values, unless the family knows no such thing.
GROUPED: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
}
_UNGROUPED = {key: value for key, value in GROUPED.items() if key != "num_key_value_heads"}

_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **GROUPED},
    "mistral": {"model_type": "mistral", **GROUPED, "sliding_window": WINDOW},
    "qwen2": {"model_type": "qwen2", **GROUPED, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **GROUPED, "head_dim": 24, "tie_word_embeddings": True},
    "gemma2": {
        "model_type": "gemma2",
        **GROUPED,
        "head_dim": 24,
        "query_pre_attn_scalar": 20,
        "sliding_window": WINDOW,
        # Low enough to bend what random weights make.
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **GROUPED,
        "head_dim": 24,
        "query_pre_attn_scalar": 20,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi3": {"model_type": "phi3", **GROUPED, "partial_rotary_factor": 0.5},
    "opt": {"model_type": "opt", **_UNGROUPED, "ffn_dim": 96, "word_embed_proj_dim": 48},
    "gpt2": {"model_type": "gpt2", **_UNGROUPED, "n_inner": 96},
    "gpt_neox": {"model_type": "gpt_neox", **_UNGROUPED, "rotary_pct": 0.25},
    "granite": {
        "model_type": "granite",
        **GROUPED,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.6,
        "logits_scaling": 2.0,
        "tie_word_embeddings": True,
    },
    "smollm3": {"model_type": "smollm3", **GROUPED, "no_rope_layers": [1, 0], "tie_word_embeddings": True},
    "olmo2": {"model_type": "olmo2", **GROUPED},
}

FAMILIES: tuple[str, ...] = tuple(_CONFIGS)
_MIXED = {**GROUPED, "num_hidden_layers": 3}
_CONVOLVED = {**_MIXED, "layer_types": ["conv", "full_attention", "conv"]}
_DELTA = {
    **_MIXED,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 32}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24, "mamba_d_conv": 4}
HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": _CONVOLVED,
    "lfm2_moe": {**_CONVOLVED, **_EXPERTS, "num_dense_layers": 1},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_SHARED},
    "qwen3_next": {**_DELTA, **_SHARED},
    "olmo_hybrid": {**_DELTA, "linear_num_key_heads": 4},
    "kimi_linear": {
        **_DELTA,
        **_EXPERTS,
        "num_key_value_heads": 4,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "n_group": 1,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "granitemoehybrid": {
        **_MIXED,
        **_MAMBA,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    },
    "nemotron_h": {
        **_MIXED,
        "head_dim": 16,
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 24,
    },
    "bamba": {**_MIXED, **_MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**GROUPED, **_MAMBA, "head_dim": 16, "mamba_d_ssm": 128},
}
"""Families with layers without attention; those of the last have both in every layer."""
LAYERS_DIFFER = ("gemma2", "gemma3", "smollm3")
"""Families whose two layers are of two types; those of the others are alike."""


@lru_cache(maxsize=1)
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with at most ``VOCAB`` tokens, the same in every process."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": VOCAB, "special_tokens": _SPECIAL, "initial_alphabet": letters, "show_progress": False}
    trainer = trainers.BpeTrainer(**options)
    words, draw = _TEXT.split(), random.Random(0)
    trained.train_from_iterator((" ".join(draw.choices(words, k=12)) for _ in range(400)), trainer)
    bos, eos, pad = _SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=trained, bos_token=bos, eos_token=eos, pad_token=pad, clean_up_tokenization_spaces=False
    )


def make_model(family: str, *, seed: int = 0, calm: bool = False, **config: Any) -> torch.nn.Module:
    """A random model; ``family`` is one of ``FAMILIES`` or any ``model_type`` whose sizes ``config`` gives.

    Its texts are chaotic. The layers of a calm model add little to the embeddings, so that what comes two tokens later
    can be learnt too.
    """
    settings = {
        "vocab_size": VOCAB,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        **_CONFIGS.get(family, {"model_type": family, **HYBRIDS.get(family, {})}),
        **config,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # recurrent layers draw what is kept in part
        model: torch.nn.Module = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(settings.pop("model_type"), **settings), attn_implementation="eager"
        )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Matrices are drawn anew; norms and biases are moved away from ones and zeros.
            parameter.copy_(0.25 * noise if parameter.ndim > 1 else parameter + 0.2 * noise)
        for name, parameter in model.named_parameters():
            if calm and name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter *= 0.1
    return model.eval()


def make_checkpoint(folder: Path, family: str, *, seed: int = 0, calm: bool = False, **config: Any) -> Path:
    """Writes a random model and its tokenizer into ``folder`` the way ``save_pretrained`` does; returns ``folder``.

    Args:
        folder: made if it does not exist.
        family: see :func:`make_model`.
        seed: of the weights; two seeds make two models with one tokenizer.
        calm: see :func:`make_model`.
        config: settings of the family's configuration to replace.
    """
    model: Any = make_model(family, seed=seed, calm=calm, **config)
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def changed(folder: Path, weights: Mapping[str, torch.Tensor | None] | None = None, **config: Any) -> str:
    """Replaces tensors of a checkpoint, where None takes one away, and fields of its configuration."""
    if weights is not None:
        state = load_file(folder / "model.safetensors") | dict(weights)
        kept = {name: tensor for name, tensor in state.items() if tensor is not None}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    if config:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | config), encoding="utf-8")
    return str(folder)


def with_swapped_tokens(checkpoint: Path) -> Path:
    """Changes a checkpoint's tokenizer: two tokens exchange their numbers."""
    file = checkpoint / "tokenizer.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = document["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(document), encoding="utf-8")
    return checkpoint


def make_heads(folder: Path, checkpoint: Path, heads: int, *, tied: bool) -> Path:
    """Writes Medusa heads for a model: fitted to its own greedy texts by least squares, or, tied, random ones.

    A tiny random model soon repeats itself, so fitted heads are right about half of the time.
    """
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager").eval()
    head: Any = model.get_output_embeddings()
    vocab, hidden = head.weight.shape
    medusa = MedusaHeads(heads, 1, hidden, vocab, tied=tied)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        if tied:
            for parameter in medusa.parameters():
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
        else:
            prompts = torch.randint(3, vocab, (24, 12), generator=generator)
            texts = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=48)
            taken: list[torch.Tensor] = []
            hook = head.register_forward_pre_hook(lambda _, args: taken.append(args[0]))
            model(texts, use_cache=False)
            hook.remove()
            for index in range(heads):
                ahead = texts[:, 2 + index :]
                x = taken[0][:, : ahead.shape[1]].reshape(-1, hidden)
                y = torch.nn.functional.one_hot(ahead.reshape(-1), vocab).float()
                gram = x.T @ x + 0.1 * torch.eye(hidden)
                medusa[index][-1].weight.copy_(torch.linalg.solve(gram, x.T @ y).T)
    save_medusa(folder, medusa, head.weight, base=str(checkpoint))
    return folder


@torch.random.fork_rng()  # so that what a test draws does not depend on who made it
def make_speculator(
    folder: Path, checkpoint: Path, stages: int, *, inner: int = 48, steps: int = 0, **form: bool
) -> Path:
    """Writes an MLP speculator for a model: a random one, or one that learnt so many steps of its greedy texts.

    Norms are moved away from ones and zeros; ``form`` is ``tied`` and ``scale_input``.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager").eval()
    vocab, hidden = model.get_output_embeddings().weight.shape
    torch.manual_seed(6)
    speculator = SpeculatorStages(vocab, hidden, inner, stages, **{"scale_input": False, "tied": False} | form)
    with torch.no_grad():
        for parameter in speculator.parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(noise / inner**0.5 if parameter.ndim > 1 else parameter + 0.1 * noise)
    if steps:
        model.requires_grad_(False)
        prompts = torch.randint(3, vocab, (32, 12))
        ids = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=36)
        windows = Windows(ids.int(), torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids).int())
        states, _ = hidden_and_logits(model, ids)
        optimizer = torch.optim.Adam(speculator.parameters(), 1e-2)
        for _ in range(steps):
            loss, _ = weighted_loss(stage_losses(speculator, states, windows.rows(torch.arange(len(ids)))), 1.0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    save_speculator(folder, speculator)
    return folder


class _Draw:
    """Random tensors of drafts that see the target's hidden states."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, *shape: int) -> torch.Tensor:
        return 2 * torch.randn(shape, generator=self._generator) / shape[-1] ** 0.5

    def norm(self, width: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(width, generator=self._generator)

    def layer(self, name: str, H: int, inputs: int, size: int, *, qk_norms: bool) -> dict[str, torch.Tensor]:
        """A decoder layer whose attention reads ``inputs`` numbers a token."""
        tensors = {f"{norm}_layernorm": self.norm(H) for norm in ("input", "post_attention")}
        heads = {"q": _HEADS, "k": _SHARED_HEADS, "v": _SHARED_HEADS}
        tensors |= {f"self_attn.{part}_proj": self.matrix(count * size, inputs) for part, count in heads.items()}
        tensors["self_attn.o_proj"] = self.matrix(H, _HEADS * size)
        if qk_norms:
            tensors |= {f"self_attn.{part}_norm": self.norm(size) for part in "qk"}
        tensors |= {f"mlp.{part}_proj": self.matrix(_INNER, H) for part in ("gate", "up")}
        tensors["mlp.down_proj"] = self.matrix(H, _INNER)
        return {f"{name}.{part}.weight": tensor for part, tensor in tensors.items()}


_HEADS, _SHARED_HEADS, _INNER = 4, 2, 48


def _layer_sizes(model_type: str, H: int, V: int, layers: int, size: int) -> dict[str, Any]:
    """The configuration of a draft's layers."""
    return {
        "model_type": model_type,
        "hidden_size": H,
        "intermediate_size": _INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _SHARED_HEADS,
        "head_dim": size,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "vocab_size": V,
        "attention_bias": False,
    }


def _speculators(
    algorithm: str, architecture: str, checkpoint: Path, sizes: dict[str, Any], draft_vocab: int, tokens: int
) -> dict[str, Any]:
    """What configurations of vllm-project/speculators have in common."""
    return {
        "architectures": [architecture],
        "speculators_model_type": algorithm,
        "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": str(checkpoint)},
        },
        "transformer_layer_config": sizes | {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}},
        "draft_vocab_size": draft_vocab,
        "target_hidden_size": None,
        "torch_dtype": "float32",
    }


def _saved(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_dflash(
    folder: Path,
    checkpoint: Path,
    *,
    published: Literal["z-lab", "speculators"] = "z-lab",
    states: Sequence[int] = (1, 2),
    layers: int = 2,
    windows: Sequence[bool] = (),
    block: int = 8,
    draft_vocab: int | None = None,
    size: int = 8,
    **more: Any,
) -> Path:
    """Writes a random DFlash draft for a model, in the files and under the names of who publishes such.

    Args:
        folder: made.
        checkpoint: the model.
        published: whose layout.
        states: after how many of the model's layers it sees the residual stream.
        layers: of the draft.
        windows: which of them see a block's length back at most; by default none do.
        block: tokens of a block.
        draft_vocab: tokens it may propose, every other one of the model's first; None for all.
        size: of its attention heads.
        more: keys of its configuration; z-lab's of ``dflash_config``.
    """
    config = AutoConfig.from_pretrained(checkpoint)
    H, V, Vd, draw = config.hidden_size, config.vocab_size, draft_vocab or config.vocab_size, _Draw(9)
    tensors = {
        "fc.weight": draw.matrix(H, len(states) * H), "hidden_norm.weight": draw.norm(H), "norm.weight": draw.norm(H)
    }  # fmt: skip
    for at in range(layers):
        tensors |= draw.layer(f"layers.{at}", H, H, size, qk_norms=True)
    if Vd != V:
        tensors |= {"lm_head.weight": draw.matrix(Vd, H), **_vocabulary(V, Vd)}
    sizes = _layer_sizes("qwen3", H, V, layers, size) | {
        "layer_types": ["sliding_attention" if state else "full_attention" for state in windows or [False] * layers],
        "sliding_window": block if any(windows) else None,
        "use_sliding_window": any(windows),
        "max_window_layers": layers,
    }
    mask = V - 1
    if published == "z-lab":
        whole = {
            "architectures": ["DFlashDraftModel"],
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            **sizes,
            "rope_theta": 5000.0,
            "rope_scaling": None,
            "block_size": block,
            "dflash_config": {"mask_token_id": mask, "target_layer_ids": [state - 1 for state in states], **more},
            "num_target_layers": config.num_hidden_layers,
            "tie_word_embeddings": True,
            "dtype": "float32",
        }
    else:
        whole = {
            **_speculators("dflash", "DFlashSpeculator", checkpoint, sizes, Vd, block - 1),
            "block_size": block,
            "aux_hidden_state_layer_ids": list(states),
            "mask_token_id": mask,
            "sliding_window_non_causal": False,
            "projector_type": "dflash",
            "sample_from_anchor": False,
            "shift_label": False,
            **more,
        }
    return _saved(folder, whole, tensors)


def _vocabulary(vocab: int, kept: int) -> dict[str, torch.Tensor]:
    """``d2t`` and ``t2d`` of a draft that proposes so many of a model's tokens, every other one first."""
    ids = torch.cat([torch.arange(0, vocab, 2), torch.arange(1, vocab, 2)])[:kept].sort().values
    known = torch.zeros(vocab, dtype=torch.bool).scatter_(0, ids, torch.ones(kept, dtype=torch.bool))
    return {"d2t": ids - torch.arange(kept), "t2d": known}


def make_mtp(folder: Path, family: str, *, published: Literal["deepseek", "qwen"] = "deepseek", **config: Any) -> Path:
    """Writes a random model whose checkpoint holds an MTP layer, under the names of who publishes such.

    The layer is one more of the family's own, of which the configuration says nothing.

    Args:
        folder: made.
        family: of the model; see :func:`make_model`.
        published: whose names.
        config: see :func:`make_model`; ``num_hidden_layers`` are those without it.
    """
    layers = config["num_hidden_layers"]
    kinds = {name: value for name, value in config.items() if name.endswith("layer_types")}
    more = {name: [*value, value[-1]] for name, value in kinds.items()}
    make_checkpoint(folder, family, **{**config, **more, "num_hidden_layers": layers + 1})
    path = folder / "config.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    document |= {"num_hidden_layers": layers, **kinds, "num_nextn_predict_layers": 1}
    path.write_text(json.dumps(document), encoding="utf-8")
    behind, H = f"model.layers.{layers}.", document["hidden_size"]
    draw = _Draw(11)
    norms, joined = [draw.norm(H) for _ in range(3)], draw.matrix(H, 2 * H)
    stored = load_file(folder / "model.safetensors")
    if published == "qwen":
        stored = {name.replace(behind, "mtp.layers.0."): tensor for name, tensor in stored.items()}
        names = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", "mtp.fc")
    else:
        names = (f"{behind}enorm", f"{behind}hnorm", f"{behind}shared_head.norm", f"{behind}eh_proj")
        stored[f"{behind}embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
        stored[f"{behind}shared_head.head.weight"] = stored["lm_head.weight"].clone()
    stored |= {f"{name}.weight": tensor for name, tensor in zip(names, (*norms, joined), strict=True)}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_eagle3(
    folder: Path,
    checkpoint: Path,
    *,
    published: Literal["SafeAILab", "speculators"] = "SafeAILab",
    states: Sequence[int] = (0, 1, 2),
    draft_vocab: int | None = None,
    embedding: bool = True,
    model_type: str = "llama",
    size: int = 8,
    **switches: bool,
) -> Path:
    """Writes a random EAGLE-3 draft for a model, in the files and under the names of who publishes such.

    Args:
        folder: made.
        checkpoint: the model.
        published: whose layout.
        states: after how many of the model's layers it sees the residual stream.
        draft_vocab: tokens it may propose, every other one of the model's first; None for all.
        embedding: whether it has one of its own.
        model_type: of its layer.
        size: of its attention heads.
        switches: norms that it has or does not have; see ``specexport.methods.eagle3.graph``.
    """
    config = AutoConfig.from_pretrained(checkpoint)
    H, V, Vd, draw = config.hidden_size, config.vocab_size, draft_vocab or config.vocab_size, _Draw(8)
    layer = "midlayer" if published == "SafeAILab" else "layers.0"
    tensors = {"fc.weight": draw.matrix(H, len(states) * H), f"{layer}.hidden_norm.weight": draw.norm(H)}
    tensors |= draw.layer(layer, H, 2 * H, size, qk_norms=model_type == "qwen3")
    tensors |= {"norm.weight": draw.norm(H), "lm_head.weight": draw.matrix(Vd, H)}
    if embedding:
        tensors["embed_tokens.weight"] = draw.matrix(V, H)
    if switches.get("norm_before_fc"):
        tensors["input_norm.weight"] = draw.norm(len(states) * H)
    if switches.get("fc_norm"):
        tensors |= {f"fc_norm.{at}.weight": draw.norm(H) for at in range(len(states))}
    if Vd != V:
        tensors |= _vocabulary(V, Vd)
    sizes = _layer_sizes(model_type, H, V, 1, size)
    if published == "SafeAILab":
        whole = {"architectures": ["LlamaForCausalLM"], **sizes, "draft_vocab_size": Vd}
    else:
        whole = _speculators("eagle3", "Eagle3DraftModel", checkpoint, sizes, Vd, 3)
    whole |= {"eagle_aux_hidden_state_layer_ids": list(states), "tie_word_embeddings": False, **switches}
    return _saved(folder, whole, tensors)
