"""Lowers layers without attention: short convolutions, and recurrent states with a decay.

transformers' model code passes the inputs of a layer's convolution to its cache, and queries, keys and values to a
function of the layer's module. Both are redirected here, so we need no model code of our own.
:mod:`specexport.runtime.states` describes the rows that a step keeps.

The gated delta rule (Yang et al. 2024, "Gated Delta Networks"), for a head with state ``S [Dk,Dv]``::

    S_t = exp(g_t) S_{t-1} + k_t u_t^T      u_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)      o_t = S_t^T q_t

Over a cell of G tokens, with ``c`` the sum of ``g`` so far, the ``u`` solve a unit lower triangular system (Yang et al.
2024, "Parallelizing Linear Transformers with the Delta Rule")::

    (I + L) U = beta (V - exp(c) K S)       L_ij = beta_i exp(c_i - c_j) k_i.k_j  for j < i

Kimi Delta Attention (Kimi Team 2025, "Kimi Linear") has a decay for each number of a key: ``exp(c_i - c_j)`` is then a
factor within the sum over these numbers.

Mamba-2 (Dao and Gu 2024) has the same state without the correction: ``u_t = v_t``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch._higher_order_ops.scan import scan
from transformers.activations import ACT2FN

from specexport.contract.model import CELL, Recurrence, StateLayer
from specexport.graphs.attention import active_states
from specexport.graphs.ops import take_rows

_EPSILON = 1e-6
"""Epsilon of the norm of keys, as in transformers."""


class Updates(NamedTuple):
    """The updates of a layer's state by T tokens, and the tokens' queries.

    Attributes:
        query: scaled queries ``[B,T,Hk,Dk]``.
        key: ``[B,T,Hk,Dk]``.
        value: ``[B,T,H,Dv]``.
        decay: g, ``[B,T,H]`` or ``[B,T,H,Dk]``.
        strength: beta, ``[B,T,H]``; None if the state is not corrected.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    decay: torch.Tensor
    strength: torch.Tensor | None


class States(Protocol):
    """The states of layers without attention, from which a run continues."""

    def convolve(self, layer: int, inputs: torch.Tensor, width: int) -> torch.Tensor:
        """The inputs of a convolution, ``[B,C,T]``, preceded by the ``width - 1`` earlier inputs that it reads."""

    def read(self, updates: Updates) -> torch.Tensor:
        """The output, ``[B,T,H,Dv]``, of the layer that called :meth:`convolve` last."""


def patch_recurrence(model: torch.nn.Module) -> None:
    """Patches a model's code so that its recurrent layers use the active states, if there are any."""
    for name in {type(module).__module__ for module in model.modules()}:
        code: Any = sys.modules[name]
        for rule, ours in _RULES.items():
            original = getattr(code, rule, None)
            if original is not None and not isinstance(original, _Patched):
                setattr(code, rule, _Patched(original, ours))


class _Patched:
    """A function of model code that calls ours while states are active, and otherwise the original."""

    def __init__(self, own: Callable[..., Any], ours: Callable[..., Any]) -> None:
        self._own = own
        self._ours = ours

    def __call__(self, *args: Any, **how: Any) -> Any:
        states = active_states()
        return self._own(*args, **how) if states is None else self._ours(states, *args, **how)


def _convolution(
    _: States,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **__: Any,
) -> torch.Tensor:
    """The last T outputs for inputs ``[B,C,W-1+T]``; not a Conv, as onnxruntime takes 0.2 ms for 6,144 channels."""
    width = weight.shape[1]
    tokens = hidden_states.shape[2] - width + 1
    convolved = sum(hidden_states[:, :, at : at + tokens] * weight[:, at : at + 1] for at in range(width))
    assert isinstance(convolved, torch.Tensor)
    if bias is not None:
        convolved = convolved + bias[:, None]
    return convolved if activation is None else ACT2FN[activation](convolved)


def _gated_delta_rule(
    states: States,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    if use_qk_l2norm_in_kernel:
        query, key = _unit(query), _unit(key)
    read = states.read(Updates(query * query.shape[-1] ** -0.5, key, value, g, beta))
    return read, read.new_zeros(0)  # model code converts the state, so it cannot be None


def _mamba2(
    states: States,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> tuple[torch.Tensor, None]:
    if dt_bias is not None:
        dt = dt + dt_bias
    if dt_softplus:
        dt = torch.nn.functional.softplus(dt)
    dt = dt.clamp(*dt_limit)
    read = states.read(Updates(C, B, hidden_states * dt[..., None], A * dt, None))
    return (read if D is None else read + D[:, None] * hidden_states), None


_RULES: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "chunk_kimi_delta_attention": _gated_delta_rule,
    "mamba2_chunk_scan": _mamba2,
}
"""Our functions, by the names of the functions in model code that they replace."""


def _unit(rows: torch.Tensor) -> torch.Tensor:
    return rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + _EPSILON)


class StateProbe:
    """States that only record their shapes, by the layer's index."""

    def __init__(self) -> None:
        self.seen: dict[int, StateLayer] = {}
        self._layer = 0

    def convolve(self, layer: int, inputs: torch.Tensor, width: int) -> torch.Tensor:
        self._layer = layer
        self.seen[layer] = StateLayer(conv_size=inputs.shape[1], conv_rows=width - 1)
        return torch.nn.functional.pad(inputs, (width - 1, 0))

    def read(self, updates: Updates) -> torch.Tensor:
        _, _, heads, value_size = updates.value.shape
        _, _, key_heads, key_size = updates.key.shape
        sizes = {"heads": heads, "key_heads": key_heads, "key_size": key_size, "value_size": value_size}
        state = Recurrence(**sizes, rows=CELL, decays=1 if updates.decay.ndim == 3 else key_size)
        layer = self.seen[self._layer]
        self.seen[self._layer] = StateLayer(conv_size=layer.conv_size, conv_rows=layer.conv_rows, recurrence=state)
        return torch.zeros_like(updates.value)


class StepStates:
    """The states of a step graph, or of one pass of a draft.

    Args:
        layers: the layers without attention, by their index in the model.
        past: inputs of the graph, of which the last are ``known_tokens`` and ``cell_rows``, if a layer is recurrent,
            and ``signature.states``.
        past_length: int64 ``[B]``.
        rows: for a pass of a draft, outputs of the previous pass, of which the last are the rows ``[B,P,C]`` and
            ``[B,P,U]`` of the P tokens read so far, for each layer. ``cell_rows`` then refers to the tokens of all
            passes.

    Attributes:
        input_count: number of inputs of states at the end of ``past``.
        returned: the tensors of ``signature.new_states`` after the model has run; in a draft, with the earlier rows.
    """

    def __init__(
        self,
        layers: Mapping[int, StateLayer],
        past: Sequence[torch.Tensor],
        past_length: torch.Tensor,
        rows: Sequence[torch.Tensor] = (),
    ) -> None:
        counts = {index: 1 if layer.recurrence is None else 3 for index, layer in layers.items()}
        before = iter(rows[len(rows) - sum(counts.values()) :])
        self._before = {index: [next(before) for _ in range(count)] for index, count in counts.items()} if rows else {}
        self._done = next(iter(self._before.values()))[0].shape[1] if self._before else 0
        recurrent = 2 if any(layer.recurrence for layer in layers.values()) else 0
        self.input_count = recurrent + sum(counts.values())
        inputs = iter(past[len(past) - self.input_count :])
        if recurrent:
            self._known, self._cells = next(inputs), next(inputs)
        self._inputs = {index: [next(inputs) for _ in range(count)] for index, count in counts.items()}
        self._layers = layers
        self._past_length = past_length
        self._layer = 0
        self._results: dict[int, list[torch.Tensor]] = {}

    @property
    def returned(self) -> list[torch.Tensor]:
        return [tensor for index in self._layers for tensor in self._results[index]]

    def convolve(self, layer: int, inputs: torch.Tensor, width: int) -> torch.Tensor:
        self._layer = layer
        new = self._after_earlier(0, inputs.transpose(1, 2).contiguous())
        self._results[self._layer] = [new]
        rows = width - 1
        positions = self._past_length[:, None] - rows + torch.arange(rows)
        kept = self._inputs[self._layer][0]
        place = (positions % kept.shape[1])[:, :, None].expand(-1, -1, kept.shape[2])
        before = torch.gather(kept, 1, place) * (positions >= 0)[:, :, None]
        if not self._before:
            return torch.cat([before.transpose(1, 2), inputs], 2)
        return torch.cat([before, new], 1).narrow(1, self._done, rows + inputs.shape[2]).transpose(1, 2)

    def _after_earlier(self, kind: int, new: torch.Tensor) -> torch.Tensor:
        """The rows of the current layer, after the rows of earlier passes."""
        return torch.cat([self._before[self._layer][kind], new], 1) if self._before else new

    def read(self, updates: Updates) -> torch.Tensor:
        shape = self._layers[self._layer].recurrence
        assert shape is not None
        _, kept, state = self._inputs[self._layer]
        batch, tokens = updates.value.shape[:2]
        strength = torch.ones_like(updates.decay) if updates.strength is None else updates.strength
        packed = torch.cat([updates.key.flatten(2), updates.value.flatten(2), updates.decay.flatten(2), strength], -1)
        new = self._after_earlier(1, packed)
        present, places = self._cells >= 0, self._cells.clamp(min=0)
        query_rows = (self._cells - shape.rows).clamp(min=0)
        if self._before:  # leave out the tokens of later passes
            present = present & (self._cells < shape.rows + new.shape[1])
            places = torch.where(present, places, 0)
            query_rows = torch.where(present, self._cells - shape.rows - self._done, 0).clamp(min=0)
        rows = take_rows(torch.cat([kept, new], 1), places) * present[..., None]  # [C,B,G,U]
        queries = take_rows(updates.query.flatten(2), query_rows)  # [C,B,G,Hk*Dk]
        pending = (present & (self._cells < shape.rows)).transpose(0, 1).flatten(1).sum(-1)  # [B]
        complete = (pending + self._known) // CELL
        keeps = torch.arange(self._cells.shape[0])[:, None] < complete
        state, out = _through_cells(shape, updates.strength is not None, state, rows, queries, keeps)
        # out is [C,B,H,G,Dv]; a slot's tokens follow its pending rows.
        by_slot = out.permute(1, 0, 3, 2, 4).reshape(batch, -1, shape.heads * shape.value_size)
        read = (pending[:, None] + self._done + torch.arange(tokens))[None]
        self._results[self._layer] += [new, state]
        return take_rows(by_slot, read).reshape(batch, tokens, shape.heads, shape.value_size)


def _through_cells(
    shape: Recurrence,
    corrected: bool,
    state: torch.Tensor,
    rows: torch.Tensor,
    queries: torch.Tensor,
    keeps: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs a layer's state through cells, one after the other.

    Args:
        shape: the sizes of the state.
        corrected: whether the state follows the delta rule.
        state: ``[B,H,Dk,Dv]`` before the first cell.
        rows: updates ``[C,B,G,U]``, zeros for missing tokens.
        queries: ``[C,B,G,Hk*Dk]``.
        keeps: bool ``[C,B]``, whether the state after a cell is kept.

    Returns:
        The state after the last kept cell, and the tokens' outputs, ``[C,B,H,G,Dv]``.
    """
    heads, keys = shape.heads, shape.key_heads
    sizes = [keys * shape.key_size, heads * shape.value_size, heads * shape.decays, heads]

    def by_head(flat: torch.Tensor, count: int) -> torch.Tensor:
        """``[B,G,count*D]`` as ``[B,H,G,D]``."""
        split = flat.reshape(flat.shape[0], CELL, count, -1).transpose(1, 2)
        if count == heads:
            return split
        each = split[:, :, None].expand(-1, -1, heads // count, -1, -1)
        return each.reshape(split.shape[0], heads, CELL, -1)

    def cell(
        states: tuple[torch.Tensor, torch.Tensor], cell_inputs: tuple[torch.Tensor, ...]
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        (seen, kept), (updates, flat_query, keep) = states, cell_inputs
        flat_key, flat_value, decay, strength = torch.split(updates, sizes, -1)
        query, key, value = by_head(flat_query, keys), by_head(flat_key, keys), by_head(flat_value, heads)
        earlier = torch.ones(CELL, CELL).tril()
        # A product per slot, as a cumulative sum would add in another order with several slots.
        so_far = by_head(torch.matmul(earlier, decay), heads)  # [B,H,G,1] or [B,H,G,Dk]
        between = so_far[:, :, :, None] - so_far[:, :, None]
        faded = torch.where(earlier[..., None] > 0, between, -torch.inf).exp()  # [B,H,G,G,1] or [B,H,G,G,Dk]
        since, until = so_far.exp(), (so_far[:, :, -1:] - so_far).exp()

        def with_keys(rows: torch.Tensor) -> torch.Tensor:
            """Products ``[B,H,G,G]`` of ``[B,H,G,Dk]`` with the decayed keys of earlier tokens and the token itself."""
            if shape.decays == 1:
                return torch.matmul(rows, key.transpose(2, 3)) * faded[..., 0]
            return (rows[:, :, :, None] * key[:, :, None] * faded).sum(-1)

        both = torch.cat([query, key], 2) * torch.cat([since, since], 2)
        of_state = torch.matmul(both, seen)
        read, remembered = torch.split(of_state, CELL, 2)
        deltas = value
        if corrected:
            beta = strength.transpose(1, 2)[..., None]
            lower = with_keys(key) * beta * earlier.tril(-1)
            deltas = torch.matmul(_inverse(lower), beta * (value - remembered))
        out = read + torch.matmul(with_keys(query), deltas)
        after = seen * so_far[:, :, -1].exp()[..., None] + torch.matmul((key * until).transpose(2, 3), deltas)
        return (after, torch.where(keep[:, None, None, None], after, kept)), out

    cells = (rows, queries, keeps)
    if torch.compiler.is_exporting():
        (_, kept), out = scan(cell, (state, state.clone()), cells)
        return kept, out
    carried, outputs = (state, state), []
    for cell_inputs in zip(*cells, strict=True):
        carried, output = cell(carried, cell_inputs)
        outputs.append(output)
    return carried[1], torch.stack(outputs)


def _inverse(lower: torch.Tensor) -> torch.Tensor:
    """``(I + L)^-1`` for strictly lower triangular L ``[..., 8, 8]``, whose eighth power is 0."""
    unit = torch.ones(CELL, CELL).tril().triu()  # eye has no translation, so that the whole trace would be decomposed
    square = torch.matmul(lower, lower)
    product = torch.matmul(unit - lower, unit + square)
    return torch.matmul(product, unit + torch.matmul(square, square))
