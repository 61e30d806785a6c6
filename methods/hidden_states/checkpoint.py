"""What the checkpoints of EAGLE-3 and of DFlash drafts, and of MTP layers, have in common.

A folder holds ``config.json``, which describes decoder layers, and safetensors. A draft that proposes only some of the
target's tokens has ``d2t``, of each how far its number there is above its own, and ``t2d``, which of the target's they
are. What it shares with the target may be left out: ``embed_tokens.weight`` and ``lm_head.weight``.
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
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specexport.contract.errors import BuildError
from specexport.contract.model import CacheLayer
from specexport.exporter.checkpoints.checkpoint import Checkpoint
from specexport.exporter.checkpoints.config import stored_table
from specexport.exporter.checkpoints.quiet import quiet
from specexport.exporter.checkpoints.stored import CONFIG, StoredTensor, head_tensors
from specexport.graphs.attention import ATTENTION_NAME
from specexport.graphs.rotary import freeze_frequencies
from specexport.methods.hidden_states.spec import MAX_STATES

CONFIGS: dict[str, Any] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
"""Configurations of layers by ``model_type``."""
D2T, T2D, EMBEDDING, HEAD = "d2t", "t2d", "embed_tokens.weight", "lm_head.weight"
_MAX_LAYERS = 16
_UNREAD = ("verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")
"""What training leaves behind, and what follows from the configuration."""

Size = Annotated[int, Meta(ge=1, le=2**24)]
States = Annotated[list[Annotated[int, Meta(ge=0, le=4096)]], Meta(min_length=1, max_length=MAX_STATES)]


class Layer(msgspec.Struct, kw_only=True):
    """What is read of a layer's configuration, a Llama's or a Qwen3's."""

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
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    layer_types: list[str] | None = None
    sliding_window: Size | None = None


@dataclass(frozen=True)
class DraftOutline(ABC):
    """A draft's configuration, without its weights.

    Attributes:
        path: the folder.
        layer: the layers' configuration, as transformers reads it.
        vocab: of the target it was trained for.
        draft_vocab: tokens it may propose.
        target_hidden: the target's hidden size.
    """

    path: Path
    layer: Any
    vocab: int
    draft_vocab: int
    target_hidden: int

    def cache(self, draft: Any) -> tuple[CacheLayer, ...]:
        """Heads and sizes of the keys and values of each of a draft's layers."""
        size = self.layer.head_dim
        row = CacheLayer(heads=self.layer.num_key_value_heads, key_size=size, value_size=size)
        return (row,) * int(self.layer.num_hidden_layers)

    @abstractmethod
    def seen(self, layers: int) -> tuple[int, ...]:
        """After how many of a target's ``layers`` it sees the residual stream.

        Raises:
            BuildError: the target has fewer.
        """

    @abstractmethod
    def make(self, layers: int) -> Any:
        """A draft of these sizes for a target of ``layers`` layers, on torch's meta device."""

    @abstractmethod
    def require_fit(self, *, hidden: int, vocab: int, layers: int) -> None:
        """Checks a draft against a target's hidden size, width of logits and layers, by the headers of its files.

        Raises:
            BuildError: a tensor is missing, of another shape or type or none of a draft's, or it was made for another
                target; names the file and the tensor or field.
        """

    @abstractmethod
    def load(self, target: Path, layers: int, positions: int) -> Any:
        """Reads a draft that :meth:`require_fit` let pass, in fp32 and for evaluation.

        Args:
            target: the target's folder, for what the draft shares with it.
            layers: the target's.
            positions: the longest text; the rotary frequencies of drafts that change them for long ones are those of
                the beginning.

        Raises:
            BuildError: numbers are not finite, or the target has no tensor to share; names the tensor.
        """


@dataclass(frozen=True)
class OwnFilesOutline(DraftOutline):
    """The configuration of a draft with a checkpoint of its own.

    Attributes:
        states: after how many of the target's layers it sees the residual stream; None for the usual ones.
        tied: its head are rows of its embedding.
    """

    states: tuple[int, ...] | None
    tied: bool

    what: ClassVar[str]
    """Its description for error messages, with names of some of its tensors."""
    keys: ClassVar[str]
    """Fields of the configuration that name ``states``."""
    same: ClassVar[Mapping[str, str]] = {}
    """See :func:`parts_of`."""

    @abstractmethod
    def usual_states(self, layers: int) -> tuple[int, ...]:
        """The default ``states`` for a target of ``layers`` layers."""

    def seen(self, layers: int) -> tuple[int, ...]:
        seen = self.usual_states(layers) if self.states is None else self.states
        if not all(0 <= count <= layers for count in seen):
            raise BuildError(
                f"{self.path / CONFIG}: the draft sees states after {list(seen)} layers "
                f"({'as none are named' if self.states is None else self.keys}), but the target has {layers}; this "
                "draft was trained for another model"
            )
        return seen

    def require_fit(self, *, hidden: int, vocab: int, layers: int) -> None:
        for field, found, wanted in (
            ("target_hidden_size", self.target_hidden, hidden),
            ("vocab_size", self.vocab, vocab),
        ):
            if found != wanted:
                raise BuildError(
                    f"{self.path / CONFIG}: {field} is {found}, and the target's is {wanted}; this draft was trained "
                    "for another model"
                )
        shared = {EMBEDDING, HEAD} if self.layer.hidden_size == hidden else {HEAD} if self.tied else set()
        shapes = shapes_of(self.make(layers))
        require_parts(self, parts_of(self, self.same), shapes, shared, self.what, same=self.same)

    def load(self, target: Path, layers: int, positions: int) -> Any:
        made = self.make(layers)
        fill(made, self, parts_of(self, self.same), target, positions, tied=self.tied)
        return made


def layer_config(path: Path, layer: Layer, kinds: AbstractSet[str] = CONFIGS.keys(), made: str | None = None) -> Any:
    """The configuration of layers as transformers has it.

    Args:
        path: the file it was read from.
        layer: what was read.
        kinds: values of ``model_type`` that are known.
        made: the one that the layers are of whatever is written; None for the one that is.

    Raises:
        BuildError: it is of another kind, or transformers refuses it; names the file.
    """
    if layer.model_type not in kinds:
        raise BuildError(f"{path}: model_type is {layer.model_type!r}; expected one of {', '.join(sorted(kinds))}")
    kind = made or layer.model_type
    given = {name: value for name, value in msgspec.structs.asdict(layer).items() if value is not None}
    windows = "sliding_attention" in (layer.layer_types or ())
    if windows and (kind != "qwen3" or layer.sliding_window is None):
        raise BuildError(f"{path}: layer_types has 'sliding_attention'; expected it with a sliding_window in a qwen3")
    given |= {"num_key_value_heads": layer.num_key_value_heads or layer.num_attention_heads}
    given |= {
        "head_dim": layer.head_dim or layer.hidden_size // layer.num_attention_heads,
        "use_sliding_window": windows,
    }
    del given["model_type"]
    try:
        with quiet():
            config = CONFIGS[kind](**given, attn_implementation=ATTENTION_NAME)
            LlamaRotaryEmbedding(config)
            return config
    except Exception as error:  # transformers raises whatever it finds wrong
        raise BuildError(f"{path}: {error or type(error).__name__}") from error


def parts_of(outline: DraftOutline, same: Mapping[str, str] = {}) -> dict[str, StoredTensor]:
    """The tensors by what a draft's modules call them; ``same`` are beginnings of names, and what they stand for.

    Raises:
        BuildError: a part is there twice; names the tensors.
    """
    found: dict[str, StoredTensor] = {}
    for tensor in head_tensors(outline.path):
        name = tensor.name.removeprefix("model.")
        for start, stands_for in same.items():
            name = stands_for + name.removeprefix(start) if name.startswith(start) else name
        if name.endswith(_UNREAD):
            continue
        if name in found:
            raise BuildError(
                f"{outline.path}: tensors {found[name].name!r} and {tensor.name!r} are the same part; expected one"
            )
        found[name] = tensor
    return found


def shapes_of(draft: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of a draft's tensors by name; it may lie on torch's meta device."""
    return {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()}


def require_parts(
    outline: DraftOutline,
    stored: Mapping[str, StoredTensor],
    shapes: Mapping[str, tuple[int, ...]],
    shared: AbstractSet[str],
    what: str,
    *,
    same: Mapping[str, str] = {},
) -> None:
    """Checks that a draft's tensors are all there, and nothing else, by the headers of its files.

    Args:
        outline: of the draft.
        stored: its tensors.
        shapes: of the tensors of its modules; see :func:`shapes_of`.
        shared: what may be left out, as the target has it.
        what: its description for error messages, with names of some tensors.
        same: see :func:`parts_of`.

    Raises:
        BuildError: a tensor is missing, of another shape or type or none of a draft's; names it.
    """
    maps = {D2T: (outline.draft_vocab,), T2D: (outline.vocab,)}
    for name, tensor in stored.items():
        if name not in shapes and name not in maps:
            raise BuildError(f"{outline.path}: tensor {tensor.name!r} is no part of {what}")
        shape = shapes.get(name) or maps[name]
        if tensor.shape != shape:
            raise BuildError(
                f"{outline.path}: tensor {tensor.name!r} is {list(tensor.shape)}, expected {list(shape)} by {CONFIG}"
            )
        if name in shapes and not tensor.floating:
            raise BuildError(
                f"{outline.path}: tensor {tensor.name!r} holds no floating-point numbers; expected weights that are "
                "not quantized"
            )
    needed = shapes.keys() - shared
    if outline.draft_vocab != outline.vocab:
        needed = {*needed, D2T}
    for name in sorted(needed - stored.keys()):
        others = [start + name.removeprefix(for_) for start, for_ in same.items() if name.startswith(for_)]
        names = " or ".join(map(repr, (name, *others)))
        raise BuildError(f"{outline.path}: no tensor {names}; {CONFIG} asks for it")
    _target_ids(outline, stored)


def _target_ids(outline: DraftOutline, stored: Mapping[str, StoredTensor]) -> torch.Tensor | None:
    """The target's number of each of the draft's tokens, int64 ``[draft_vocab]``; None where they are alike.

    Raises:
        BuildError: it is none of the target's, or not one that ``t2d`` says; names the tensor.
    """
    if D2T not in stored or outline.draft_vocab == outline.vocab:
        return None
    offsets = stored[D2T].read()
    if offsets.dtype not in (torch.int64, torch.int32):
        raise BuildError(f"{outline.path}: tensor {D2T!r} is {offsets.dtype}; expected int64")
    ids = torch.arange(outline.draft_vocab) + offsets
    if int(ids.min()) < 0 or int(ids.max()) >= outline.vocab or len(set(ids.tolist())) != len(ids):
        raise BuildError(
            f"{outline.path}: tensor {D2T!r} leads to tokens that are not there, or to one twice; expected "
            f"{outline.draft_vocab} different ones below {outline.vocab}"
        )
    if T2D in stored:
        known = stored[T2D].read()
        if known.dtype != torch.bool or not torch.equal(known.nonzero()[:, 0], ids.sort().values):
            raise BuildError(f"{outline.path}: tensor {T2D!r} is no mask (bool) of the tokens that {D2T!r} leads to")
    return ids


def fill(
    draft: Any, outline: DraftOutline, stored: Mapping[str, StoredTensor], target: Path, positions: int, *, tied: bool
) -> None:
    """Gives a draft on torch's meta device its numbers, in fp32 and for evaluation.

    Args:
        draft: with ``embed_tokens``, ``lm_head``, ``rotary_emb`` and ``target_ids``.
        outline: of it.
        stored: its tensors, which :func:`require_parts` let pass.
        target: the target's folder, for what the draft shares with it.
        positions: see :meth:`DraftOutline.load`.
        tied: its head are rows of its embedding.

    Raises:
        BuildError: numbers are not finite, or the target has no tensor to share; names the tensor.
    """
    ids = _target_ids(outline, stored)
    state = {name: stored[name].finite(outline.path) for name in draft.state_dict() if name in stored}
    if EMBEDDING not in state:
        state[EMBEDDING] = _table(target, outline, head=False)
    if HEAD not in state:
        rows = state[EMBEDDING] if tied else _table(target, outline, head=True)
        state[HEAD] = rows if ids is None else rows[ids]
    draft.load_state_dict(state, assign=True)
    draft.rotary_emb = type(draft.rotary_emb)(outline.layer)  # computed, not stored: on meta it has no numbers
    draft.target_ids = ids
    freeze_frequencies(draft, positions)
    draft.eval().requires_grad_(False)


def _table(target: Path, outline: DraftOutline, *, head: bool) -> torch.Tensor:
    tensor = stored_table(target, head=head)
    wanted = (outline.vocab, outline.layer.hidden_size)
    if tensor.shape != wanted:
        raise BuildError(
            f"{outline.path}: has no {HEAD if head else EMBEDDING!r}, and the target's {tensor.name!r} is "
            f"{list(tensor.shape)}; expected {list(wanted)}"
        )
    return tensor.finite(target)


def as_checkpoint(
    outline: DraftOutline, family: str, source: str, draft: torch.nn.Module, positions: int
) -> Checkpoint:
    """A draft as a model to write beside the target, whose longest sequence has ``positions`` tokens.

    ``source`` is what the user named.
    """
    return Checkpoint(
        source=source,
        path=outline.path,
        family=family,
        model=draft,
        cache=outline.cache(draft),
        vocab_size=outline.draft_vocab,
        input_vocab=outline.vocab,
        max_positions=positions,
        parameters=sum(parameter.numel() for parameter in draft.parameters()),
        eos_token_ids=(),
    )
