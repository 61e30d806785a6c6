"""Reads checkpoints of EAGLE-3, DFlash and MTP drafts.

A folder holds ``config.json``, which describes decoder layers, and safetensors. A draft with a smaller vocabulary than
the target's has ``d2t``, each token's offset to its id in the target, and may have ``t2d``, a mask of the target's
tokens that it shares. ``embed_tokens.weight`` and ``lm_head.weight`` may be missing if they are the target's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
import torch
from msgspec import Meta
from transformers import LlamaConfig, Qwen3Config
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specexport.contract.errors import BuildError
from specexport.contract.shapes import Size
from specexport.contract.values import shown
from specexport.exporter.checkpoints.checkpoint import Checkpoint
from specexport.exporter.checkpoints.config import read_model_config, stored_table
from specexport.exporter.checkpoints.documents import CONFIG, read_config, read_object, require_trained_for
from specexport.exporter.checkpoints.locate import locate
from specexport.exporter.checkpoints.quantized import dequantize_tensors
from specexport.exporter.checkpoints.quiet import failing_as, quiet
from specexport.exporter.checkpoints.stored import StoredTensor, head_tensors, require_tensors, shapes_of
from specexport.graphs.attention import ATTENTION_NAME
from specexport.graphs.rotary import freeze_frequencies
from specexport.methods.hidden_states import MAX_STATES

CONFIGS: dict[str, Any] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
"""Configuration classes by ``model_type``."""
D2T, T2D, EMBEDDING, HEAD = "d2t", "t2d", "embed_tokens.weight", "lm_head.weight"
_MAX_LAYERS = 16
_IGNORED = ("verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")
"""Suffixes of tensors to ignore: leftovers of training, and tensors that follow from the configuration."""

States = Annotated[list[Annotated[int, Meta(ge=0, le=4096)]], Meta(max_length=MAX_STATES)]


class Layer(msgspec.Struct, kw_only=True):
    """The fields that are read from the configuration of Llama or Qwen3 layers."""

    hidden_size: Size
    intermediate_size: Size
    num_attention_heads: Annotated[int, Meta(ge=1, le=4096)]
    vocab_size: Size
    model_type: str = "llama"
    num_key_value_heads: Annotated[int, Meta(ge=1, le=4096)] | None = None
    head_dim: Annotated[int, Meta(ge=1, le=4096)] | None = None
    num_hidden_layers: Annotated[int, Meta(ge=1, le=_MAX_LAYERS)] = 1
    max_position_embeddings: Size = 2048
    hidden_act: str = "silu"
    rms_norm_eps: Annotated[float, Meta(gt=0.0, lt=1.0)] = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: Annotated[float, Meta(gt=0.0)] | None = None
    partial_rotary_factor: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    layer_types: list[str] | None = None
    sliding_window: Size | None = None


class _Config(msgspec.Struct, kw_only=True):
    """The fields that EAGLE-3's and DFlash's ``config.json`` share.

    SafeAILab, z-lab and SpecForge describe the layers at the top level, the ``speculators`` library in
    ``transformer_layer_config``.
    """

    architectures: list[str] | None = None
    transformer_layer_config: Layer | None = None
    speculators_model_type: str | None = None
    draft_vocab_size: Size | None = None
    target_hidden_size: Size | None = None


def read_draft(
    source: str, method: str, description: str, architectures: Mapping[str, str]
) -> tuple[Layer, bool, dict[str, Any]]:
    """Reads the configuration of a draft in its own checkpoint.

    Args:
        method: the expected ``speculators_model_type``.
        architectures: the kind of layers of each architecture; it outweighs ``model_type``, which may be the target's.

    Returns:
        The configuration of the layers; whether it has the layout of the ``speculators`` library; and the fields of
        :class:`CheckpointOutline` that all such drafts share.
    """
    folder = locate(source)
    path = folder / CONFIG
    config = read_config(path, _Config, description)
    layer, stated = config.transformer_layer_config, config.speculators_model_type
    if stated not in (None, method) or (layer is None) != (stated is None):
        raise BuildError(
            f"{path}: speculators_model_type is {stated!r}; expected {method!r} with a transformer_layer_config, or "
            "neither"
        )
    layer = layer or read_config(path, Layer, description)
    layer.model_type = next(
        (architectures[name] for name in config.architectures or () if name in architectures), layer.model_type
    )
    if layer.hidden_act not in ACT2FN:
        raise BuildError(f"{path}: hidden_act is {shown(layer.hidden_act)}, which transformers does not know")
    fields = {
        "path": folder,
        "vocab": layer.vocab_size,
        "draft_vocab": config.draft_vocab_size or layer.vocab_size,
        "target_hidden": config.target_hidden_size or layer.hidden_size,
    }
    return layer, stated is not None, fields


@dataclass(frozen=True)
class DraftOutline(ABC):
    """A draft's configuration, without its weights.

    Attributes:
        vocab: vocabulary size of the target that it was trained for.
        target_hidden: hidden size of the target that it was trained for.
        states: the numbers of layers after which it reads the target's residual stream; None for the default.
        tied: whether its head consists of rows of its embedding.
    """

    path: Path
    layer: Any
    vocab: int
    draft_vocab: int
    target_hidden: int
    states: tuple[int, ...] | None
    tied: bool

    what: ClassVar[str]
    """The expected kind of draft, for error messages, with examples of tensors' names."""
    keys: ClassVar[str] = ""
    """The configuration fields that ``states`` comes from."""

    @staticmethod
    @abstractmethod
    def default_states(draft_layers: int, layers: int) -> tuple[int, ...]:
        """The default ``states`` of a draft with ``draft_layers`` layers, for a target with ``layers`` layers."""

    @abstractmethod
    def make(self, layers: int) -> Any:
        """A draft of these sizes for a target with ``layers`` layers, on torch's meta device.

        It has ``embed_tokens``, ``lm_head``, ``rotary_emb``, ``target_ids`` and ``cache()``.
        """

    @property
    def prefixes(self) -> Mapping[str, str]:
        """Prefixes of stored names, with the corresponding prefixes in the draft's modules."""
        return {}

    def seen(self, layers: int) -> tuple[int, ...]:
        """The numbers of layers after which it reads the residual stream of a target with ``layers`` layers."""
        seen = self.default_states(self.layer.num_hidden_layers, layers) if self.states is None else self.states
        if not all(0 <= count <= layers for count in seen):
            raise BuildError(
                f"{self.path / CONFIG}: the draft sees states after {list(seen)} layers "
                f"({'as none are named' if self.states is None else self.keys}), but the target has {layers}; this "
                "draft was trained for another model"
            )
        if len(set(seen)) < len(seen):  # vLLM and SGLang read the states after a layer once
            raise BuildError(
                f"{self.path / CONFIG}: the draft sees states after {list(seen)} layers "
                f"({'as none are named' if self.states is None else self.keys}); expected each number once"
            )
        return seen

    def stored(self) -> dict[str, StoredTensor]:
        """The stored tensors by the names of the draft's modules."""
        stored: dict[str, StoredTensor] = {}
        path = self.path / CONFIG
        for tensor in dequantize_tensors(path, read_object(path), head_tensors(self.path)):
            name = tensor.name.removeprefix("model.")
            for start, to in self.prefixes.items():
                name = to + name.removeprefix(start) if name.startswith(start) else name
            if name.endswith(_IGNORED):
                continue
            if name in stored:
                raise BuildError(
                    f"{self.path}: tensors {stored[name].name!r} and {tensor.name!r} are the same part; expected one"
                )
            stored[name] = tensor
        return stored

    def parts(
        self, name: str, shape: tuple[int, ...], stored: Mapping[str, StoredTensor]
    ) -> dict[str, tuple[int, ...]]:
        """The tensors that a tensor of the draft is stored as, one behind the other, with their shapes."""
        return {name: shape}

    def require_fit(self, *, hidden: int, vocab: int, layers: int) -> None:
        """Checks a draft, by its files' headers, against a target's hidden size, vocabulary and number of layers."""
        sizes = {"target_hidden_size": (self.target_hidden, hidden), "vocab_size": (self.vocab, vocab)}
        require_trained_for(self.path / CONFIG, "draft", sizes)
        stored, shapes = self.stored(), dict[str, tuple[int, ...]]()
        for name, shape in shapes_of(self.make(layers)).items():
            shapes |= self.parts(name, shape, stored)
        maps = {D2T: (self.draft_vocab,), T2D: (self.vocab,)}
        # The target has tensors that may be left out.
        shared = {EMBEDDING, HEAD} if self.layer.hidden_size == hidden else {HEAD} if self.tied else set()
        optional = {T2D, *shared} if self.draft_vocab != self.vocab else {*maps, *shared}

        def spelled(name: str) -> str:
            others = (start + name.removeprefix(to) for start, to in self.prefixes.items() if name.startswith(to))
            return " or ".join(map(repr, (name, *others)))

        require_tensors(self.path, stored, {**shapes, **maps}, self.what, optional, spelled, maps.keys())
        self._target_ids(stored)

    def load(self, target: Path, layers: int, positions: int) -> Any:
        """Loads a draft that has passed :meth:`require_fit`, in fp32 and evaluation mode.

        Tensors that it shares with the target (:meth:`shared`) are in the folder ``target``; if its head is its
        embedding, both are one parameter. Rotary frequencies that would change for texts longer than ``positions`` are
        fixed.
        """
        draft, stored = self.make(layers), self.stored()
        ids = self._target_ids(stored)
        state: dict[str, torch.Tensor] = {}
        for name, shape in shapes_of(draft).items():
            parts = [stored[part].finite(self.path) for part in self.parts(name, shape, stored) if part in stored]
            if parts:
                state[name] = parts[0] if len(parts) == 1 else torch.cat(parts).reshape(shape)
        shared = self.shared(target)
        if EMBEDDING in shared:
            state[EMBEDDING] = shared[EMBEDDING].finite(target)
        if HEAD not in state:
            theirs = shared.get(HEAD)
            tied = theirs is None or (EMBEDDING in shared and theirs.name == shared[EMBEDDING].name)
            rows = state[EMBEDDING] if tied else shared[HEAD].finite(target)
            state[HEAD] = rows if ids is None else rows[ids]
        draft.load_state_dict(state, assign=True)
        if state[HEAD] is state[EMBEDDING]:
            draft.lm_head.weight = draft.embed_tokens.weight
        # Recreated off the meta device, as its buffers are computed rather than stored.
        draft.rotary_emb = type(draft.rotary_emb)(self.layer)
        draft.target_ids = ids
        freeze_frequencies(draft, positions)
        return draft.eval().requires_grad_(False)

    def _target_ids(self, stored: Mapping[str, StoredTensor]) -> torch.Tensor | None:
        """The target's ids of the draft's tokens, int64 ``[draft_vocab]``; None if the vocabularies are the same."""
        if D2T not in stored or self.draft_vocab == self.vocab:
            return None
        offsets = stored[D2T].read()
        if offsets.dtype not in (torch.int64, torch.int32):
            raise BuildError(f"{self.path}: tensor {D2T!r} is {offsets.dtype}; expected int64")
        ids = torch.arange(self.draft_vocab) + offsets
        if int(ids.min()) < 0 or int(ids.max()) >= self.vocab or len(set(ids.tolist())) != len(ids):
            raise BuildError(
                f"{self.path}: tensor {D2T!r} maps to tokens that do not exist, or several to one; expected "
                f"{self.draft_vocab} different ones below {self.vocab}"
            )
        if T2D in stored:
            in_draft_vocab = stored[T2D].read()
            if in_draft_vocab.dtype != torch.bool or not torch.equal(in_draft_vocab.nonzero()[:, 0], ids.sort().values):
                raise BuildError(f"{self.path}: tensor {T2D!r} is not a boolean mask of the tokens in {D2T!r}")
        return ids

    def shared(self, target: Path) -> dict[str, StoredTensor]:
        """The embedding and the head that a draft lacks, as the target in the folder ``target`` has them."""
        stored, expected = self.stored(), (self.vocab, self.layer.hidden_size)
        shared = {
            name: stored_table(target, head=name == HEAD)
            for name in (EMBEDDING, HEAD)
            if name not in stored and not (self.tied and name == HEAD)
        }
        for name, tensor in shared.items():
            if tensor.shape != expected:
                raise BuildError(
                    f"{self.path}: has no {name!r}, and the target's {tensor.name!r} is {list(tensor.shape)}; expected "
                    f"{list(expected)}"
                )
        return shared


def layer_config(
    path: Path, layer: Layer, kinds: AbstractSet[str] = CONFIGS.keys(), built_as: str | None = None
) -> Any:
    """Converts the configuration of layers to transformers' configuration.

    ``kinds`` are the supported values of ``model_type``; ``built_as`` is used instead of the file's.
    """
    if layer.model_type not in kinds:
        raise BuildError(f"{path}: model_type is {layer.model_type!r}; expected one of {', '.join(sorted(kinds))}")
    kind = built_as or layer.model_type
    fields = {name: value for name, value in msgspec.structs.asdict(layer).items() if value is not None}
    windows = "sliding_attention" in (layer.layer_types or ())
    if windows and (kind != "qwen3" or layer.sliding_window is None):
        raise BuildError(f"{path}: layer_types has 'sliding_attention'; expected it with a sliding_window in a qwen3")
    if fields.get("rope_scaling", {}).get("type") == "mrope":  # the positions of text are the usual ones
        del fields["rope_scaling"]
    fields |= {
        "num_key_value_heads": layer.num_key_value_heads or layer.num_attention_heads,
        "head_dim": layer.head_dim or layer.hidden_size // layer.num_attention_heads,
        "use_sliding_window": windows,
    }
    del fields["model_type"]
    with failing_as(lambda error: f"{path}: {error or type(error).__name__}"), quiet():
        config = CONFIGS[kind](**fields, attn_implementation=ATTENTION_NAME)
        LlamaRotaryEmbedding(config)
        return config


def load_draft(outline: DraftOutline, target: Path, positions: int, *, family: str, source: str) -> Checkpoint:
    """Loads a draft as a model to write beside the target; see :meth:`DraftOutline.load`.

    ``family`` is its kind in the manifest, ``source`` the user's name for it.
    """
    draft = outline.load(target, int(read_model_config(target).num_hidden_layers), positions)
    shared = outline.shared(target)
    if draft.target_ids is not None:  # its head has other rows
        shared.pop(HEAD, None)
    return Checkpoint(
        source=source,
        path=outline.path,
        family=family,
        model=draft,
        cache=draft.cache(),
        vocab_size=outline.draft_vocab,
        input_vocab=outline.vocab,
        max_positions=positions,
        tensors=shared,
    )
