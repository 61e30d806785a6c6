"""Lowers the attention layers of transformers models: the only hook between model code and our graphs.

transformers lets models use an attention function that is registered by name, so we need no model code of our own: the
model calls :func:`attend` with its new queries, keys and values, and the active *lowering* combines these with the
static cache. There are two lowerings:

* :class:`NativeLowering`: TensorScatter into the cache, then Attention over it (opset 24).
* :class:`TwoPartLowering`: MatMul and Softmax over two parts, the old cache and the new rows. The cache is only read,
  and the new rows are returned. Portable step graphs use it, as it needs only opset 20; so do all propose graphs, as a
  graph can write a cache in place only once.
"""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache

from specexport.contract.errors import BuildError
from specexport.contract.model import CacheLayer
from specexport.graphs.ops import tensor_scatter

if TYPE_CHECKING:
    from specexport.graphs.recurrent import States

ATTENTION_NAME = "specexport"

# Arguments of attention functions that have no effect here: masks are built by lowerings, dropout is off in evaluation
# mode, and rotary positions have been applied.
_HARMLESS = {
    "attention_mask", "cache_position", "dropout", "head_mask", "is_causal", "output_attentions",
    "output_hidden_states", "position_embeddings", "position_ids", "return_dict", "use_cache",
}  # fmt: skip

KeyValues = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""The keys and values of each layer."""


class AttentionCall(NamedTuple):
    """The arguments of one layer's attention.

    The G heads of a group share keys and values, so their queries become rows of one matrix. The cache is then read
    once per group, and even a single token has several rows: onnxruntime multiplies one row with another kernel, whose
    sums round differently.

    Attributes:
        query: new queries ``[B,Hkv,G*T,D]``.
        key: new keys ``[B,Hkv,T,D]``.
        value: new values ``[B,Hkv,T,D]``.
        softcap: bound of the scores, by tanh.
        window: number of positions that a token sees, its own included.
        sink: an additional score ``[1,Hkv,G*T,1]`` that takes its share of the softmax.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    group: int
    scaling: float
    softcap: float | None
    window: int | None
    sink: torch.Tensor | None = None


class Lowering(ABC):
    """Traces the attention of layers into a graph.

    Attributes:
        states: the states that layers without attention read and write; None if the model must not have such layers.
    """

    states: States | None = None

    @abstractmethod
    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Attention over the cache and the new rows, ``[B,Hkv,G*T,D]``."""


_active: Lowering | None = None


def active_states() -> States | None:
    """The states of the current run."""
    return None if _active is None else _active.states


class Probe(Lowering):
    """A lowering that only records the shapes of each layer's keys and values."""

    def __init__(self, states: States | None = None) -> None:
        self.seen: dict[int, CacheLayer] = {}
        self.states = states

    def attend(self, call: AttentionCall) -> torch.Tensor:
        sizes = CacheLayer(heads=call.key.shape[1], key_size=call.key.shape[3], value_size=call.value.shape[3])
        self.seen[call.layer] = sizes
        return call.query.new_zeros((*call.query.shape[:3], sizes.value_size))


@contextlib.contextmanager
def lowering(active: Lowering) -> Iterator[None]:
    """Context in which ``active`` lowers all models loaded with ``attn_implementation=ATTENTION_NAME``."""
    global _active
    previous, _active = _active, active
    try:
        yield
    finally:
        _active = previous


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls (see ``transformers.AttentionInterface``).

    Returns:
        ``[B,T,H,D]``, and no weights.
    """
    if _active is None:
        raise BuildError("attention was called outside a lowering; this is a defect of specexport, please report it")
    unknown = sorted(
        name
        for name, argument in kwargs.items()
        if argument is not None and not isinstance(argument, bool) and name not in _HARMLESS
    )
    if unknown:
        raise BuildError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, which specexport cannot trace; "
            "this model family is not supported"
        )
    layer = getattr(module, "cache_index", None)
    if layer is None:
        layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise BuildError(f"{type(module).__name__} has no layer_idx; this model family is not supported")
    if attention_mask is not None:
        _require_known_mask(module, attention_mask, sliding_window)
    scale = float(scaling if scaling is not None else query.shape[-1] ** -0.5)
    batch, heads, tokens, size = query.shape
    group = heads // key.shape[1]
    grouped = query.reshape(batch, key.shape[1], group * tokens, size) if group > 1 else query
    sink = None
    if s_aux is not None:
        each = s_aux.reshape(1, -1, group, 1).expand(-1, -1, -1, tokens)
        sink = each.reshape(1, -1, group * tokens, 1)
    out = _active.attend(AttentionCall(layer, grouped, key, value, group, scale, softcap, sliding_window, sink))
    return (out.reshape(batch, heads, tokens, -1) if group > 1 else out).transpose(1, 2), None


AttentionInterface.register(ATTENTION_NAME, attend)


@contextlib.contextmanager
def sample_masks(max_positions: int) -> Iterator[None]:
    """Context in which models pass two rows of their mask, far into the longest text, to their attention.

    Lowerings build masks from the window that a model passes to its attention. Some families pass no window and rely on
    the mask, or mask by other rules. Short texts would not show that, so :func:`attend` compares these rows with its
    own. The model must be called with two tokens.
    """
    queries = torch.tensor(_sampled_queries(max_positions))[None, None, :, None]
    keys = torch.arange(max_positions)[None, None, None, :]
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)

    def rows(*, mask_function: Any, **_: Any) -> torch.Tensor:
        return mask_function(zero, zero, queries, keys).expand(1, 1, 2, max_positions)

    AttentionMaskInterface.register(ATTENTION_NAME, rows)
    try:
        yield
    finally:
        # Without a function of this name, transformers creates no masks.
        del AttentionMaskInterface._global_mapping[ATTENTION_NAME]


def _sampled_queries(max_positions: int) -> list[int]:
    # At the last position alone, attention within chunks would look like a sliding window.
    return [max_positions * 5 // 7, max_positions - 1]


def _require_known_mask(module: torch.nn.Module, mask: torch.Tensor, window: int | None) -> None:
    """Compares a mask of :func:`sample_masks` with the one that lowerings would build."""
    positions = mask.shape[-1]
    distance = torch.tensor(_sampled_queries(positions))[:, None] - torch.arange(positions)
    ours = (distance >= 0) & (distance < (positions if window is None else window))
    if mask.dtype != torch.bool or mask.shape[-2:] != ours.shape or not bool((mask == ours).all()):
        raise BuildError(
            f"{type(module).__name__} masks its attention by rules of its own, which specexport cannot trace; "
            "this model family is not supported"
        )


class _CacheLayer:
    """A layer of a cache; model code asks for these values, but they have no effect."""

    is_sliding = False
    is_compileable = True

    def get_seq_length(self) -> int:
        return 0


class PassThroughCache(Cache):  # type: ignore[misc]
    """A ``Cache`` that passes new keys and values to the attention function, whose lowering stores them."""

    def __init__(self, layers: int) -> None:
        self.layers = [_CacheLayer() for _ in range(layers)]
        self.layer_class_to_replicate = None
        self.offloading = False

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: positions are explicit inputs."""
        return 0

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None: :class:`~specexport.graphs.recurrent.States` reads the states."""

    get_recurrent_state = get_conv_state

    def update_conv_state(self, conv_states: Any, layer_idx: int, *, conv_kernel_size: int, **_: Any) -> Any:
        """The inputs of a convolution, preceded by the earlier inputs that it reads."""
        states = active_states()
        if states is None:
            raise BuildError("it has layers without attention, which are supported only in targets")
        return states.convolve(layer_idx, conv_states, conv_kernel_size)

    def update_recurrent_state(self, recurrent_states: Any, *_: Any, **__: Any) -> None:
        """Does nothing, as :class:`~specexport.graphs.recurrent.States` stores the state."""
        if recurrent_states is not None and recurrent_states.numel():
            raise BuildError("its recurrent layers follow a rule that specexport does not know")

    def get_mask_sizes(self, query_length: Any, layer_idx: int) -> tuple[Any, int]:
        """The size of the new rows alone: lowerings build masks themselves."""
        return query_length, 0


def full_mask(tree_mask: torch.Tensor, past_length: torch.Tensor, cache_rows: int) -> torch.Tensor:
    """The mask of the cache's rows, once the new rows are written: bool ``[B,T,S]``, true for rows that a token sees.

    All tokens see the rows before ``past_length``; ``tree_mask`` applies to the next T rows; no token sees the rest.
    """
    tokens = tree_mask.shape[1]
    seen = (torch.arange(cache_rows) < past_length[:, None])[:, None, :].expand(-1, tokens, -1)
    # Without arithmetic on sizes, whose results would be copied to a GPU in every step.
    return seen.scatter(2, _new_rows(past_length, tokens)[:, None, :].expand(-1, tokens, -1), tree_mask)


def key_positions(position_ids: torch.Tensor, past_length: torch.Tensor, cache_rows: int) -> torch.Tensor:
    """The position of the token in each cache row, int64 ``[B,S]``; the positions of committed rows are in order."""
    row = torch.arange(cache_rows)[None, :].expand(past_length.shape[0], -1)
    return row.scatter(1, _new_rows(past_length, position_ids.shape[1]), position_ids)


def _new_rows(past_length: torch.Tensor, tokens: int) -> torch.Tensor:
    """The cache rows that new tokens are written to, int64 ``[B,T]``."""
    return past_length[:, None] + torch.arange(tokens)


def _capped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _weights(scores: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    """The softmax of scores ``[B,Hkv,G*T,S]``, less the share of a sink."""
    if sink is None:
        return scores.softmax(-1)
    return torch.cat([scores, sink.expand(scores.shape[0], -1, -1, -1)], -1).softmax(-1)[..., :-1]


class NativeLowering(Lowering):
    """TensorScatter into the static cache, then Attention over it with a boolean mask.

    Attributes:
        returned: the (key, value) cache of each layer; it includes the new rows after the model has run.
    """

    def __init__(
        self,
        past: KeyValues,
        tree_mask: torch.Tensor,
        position_ids: torch.Tensor,
        past_length: torch.Tensor,
        states: States | None = None,
    ) -> None:
        self.states = states
        self._past = past
        self._past_length = past_length
        self._position_ids = position_ids
        self._rows = past[0][0].shape[2]
        self._seen = full_mask(tree_mask, past_length, self._rows)
        self._mask = functools.cache(self._new_mask)
        self.returned = list(past)

    def _new_mask(self, group: int, window: int | None) -> torch.Tensor:
        """The mask ``[B,1,G*T,S]``."""
        seen = self._seen
        if window is not None:
            keys = key_positions(self._position_ids, self._past_length, self._rows)
            seen = seen & (self._position_ids[:, :, None] - keys[:, None, :] < window)
        # Not repeat(), which becomes a Tile: onnxruntime has none for booleans on GPUs.
        return torch.cat([seen[:, None]] * group, 2)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        past_key, past_value = self._past[call.layer]
        keys = tensor_scatter(past_key, call.key, self._past_length)
        values = tensor_scatter(past_value, call.value, self._past_length)
        self.returned[call.layer] = keys, values
        mask = self._mask(call.group, call.window)
        if call.softcap is None and call.sink is None and call.query.shape[3] == call.value.shape[3]:
            return torch.onnx.ops.attention(call.query, keys, values, mask, scale=call.scaling)[0]
        # ONNX's Attention has no sinks, TensorRT's parser does not support its softcap attribute, and torch expects
        # values as wide as keys; such layers are spelled out.
        scores = _capped(torch.matmul(call.query, keys.transpose(2, 3)) * call.scaling, call.softcap)
        return torch.matmul(_weights(torch.where(mask, scores, torch.finfo(scores.dtype).min), call.sink), values)


_HIDDEN = torch.finfo(torch.float32).min / 2
"""Added to the score of a hidden row; half of the lowest number, so that adding a score cannot overflow."""


class TwoPartLowering(Lowering):
    """Attention with one softmax over the cache, which is only read, and over new rows that are not in it yet.

    Args:
        past: the (key, value) cache of each layer, ``[B,Hkv,S,D]``.
        past_length: number of valid rows of the cache, int64 ``[B]``.
        seen: mask of the new rows that each token sees, bool ``[B,T,F]``.
        positions: positions of the new rows, int64 ``[B,F]``, with the T tokens last; committed rows are in order.
        rows: the (key, value) rows of earlier passes in each layer, ``[B,Hkv,F-T,D]``; None if F = T.

    Attributes:
        returned: the (key, value) new rows of each layer, ``[B,Hkv,F,D]``, after the model has run.
    """

    def __init__(
        self,
        past: KeyValues,
        past_length: torch.Tensor,
        seen: torch.Tensor,
        positions: torch.Tensor,
        rows: KeyValues | None = None,
        states: States | None = None,
    ) -> None:
        self.states = states
        self._past = past
        self._past_length = past_length[:, None, None]
        self._seen = seen
        self._positions = positions
        self._rows = rows
        self._bias = functools.cache(self._new_bias)
        self.returned = list(past)

    def _new_bias(self, group: int, window: int | None) -> torch.Tensor:
        """The bias of the scores, ``[B,1,G*T,S+F]``: 0 for rows that a token sees, ``_HIDDEN`` for hidden rows."""
        tokens = self._seen.shape[1]
        cached = torch.arange(self._past[0][0].shape[2])[None, None, :]
        in_cache, among_new = (cached < self._past_length).expand(-1, tokens, -1), self._seen
        if window is not None:
            query = self._positions[:, -tokens:, None]
            in_cache = in_cache & (query - cached < window)
            among_new = among_new & (query - self._positions[:, None, :] < window)
        seen = torch.cat([in_cache, among_new], dim=-1)[:, None]
        return torch.cat([torch.where(seen, 0.0, _HIDDEN)] * group, dim=2)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Attention in few operators, as their number determines the cost of a draft's pass."""
        past_key, past_value = self._past[call.layer]
        new_key, new_value = call.key, call.value
        if self._rows is not None:
            key, value = self._rows[call.layer]
            new_key, new_value = torch.cat([key, new_key], dim=2), torch.cat([value, new_value], dim=2)
        self.returned[call.layer] = new_key, new_value
        # Each product is scaled separately, as ONNX Runtime fuses a product with its scaling.
        parts = [torch.matmul(call.query, k.transpose(2, 3)) * call.scaling for k in (past_key, new_key)]
        scores = _capped(torch.cat(parts, dim=-1), call.softcap)
        weights = _weights(scores + self._bias(call.group, call.window), call.sink)
        of_past, of_new = torch.split(weights, [past_key.shape[2], new_key.shape[2]], dim=-1)
        return torch.matmul(of_past, past_value) + torch.matmul(of_new, new_value)
