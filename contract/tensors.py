"""Declares every input and output of a bundle's graphs once: name, type, shape and meaning.

A :class:`Tensor` is a string, its name, so that it indexes the arrays of a run. :mod:`specexport.contract.signature`
says which graph has which tensors. Example inputs for tracing, the runtime's buffers and their initial values, the
checks of opened graphs and the tables of ``docs/graph-contract.md`` follow from these declarations.

Symbols: ``B`` slots of the batch, ``T`` query tokens, ``R`` rows with logits, ``S`` cache rows, ``Hkv`` key/value
heads, ``D`` head size, ``V`` vocabulary (width of the target's logits), ``K`` draft tokens, ``M`` candidate tokens of a
draft distribution or of a head, ``N`` nodes of a tree, ``H`` width of an embedding, ``F`` tokens fed to a model in one
call: ``T`` for a step, ``T + K - 1`` for a propose graph, whose last draft token is not fed. ``C`` cells of ``G``
tokens each, ``U`` size of a token's update: see :mod:`specexport.runtime.states`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

Dtype = Literal["int64", "float32", "bool"]
Dim = int | str
"""A size, or a symbol of :attr:`~specexport.contract.shapes.ShapePoint.sizes` or of this module's description."""
Shape = tuple[int, ...]
Sizes = Mapping[str, int]
Initial = Callable[[Shape, Sizes], npt.ArrayLike]
"""A tensor's initial value at a shape, with the sizes of the graph's symbols."""
Array = npt.NDArray[Any]


class Tensor(str):
    """A tensor's name, with the rest of its declaration.

    Attributes:
        meaning: one line for docs.
        initial: a valid value of an input before anything is written: a number, or a function of shape and sizes.
        field: the manifest's field that its sizes come from.
        stage: the stage of a propose graph that returns it; points with fewer stages lack it.
    """

    __slots__ = ("dims", "dtype", "field", "initial", "meaning", "stage")

    dtype: Dtype
    dims: tuple[Dim, ...]
    meaning: str
    initial: Initial | float
    field: str
    stage: int

    def __new__(
        cls,
        name: str,
        dtype: Dtype,
        dims: tuple[Dim, ...],
        meaning: str = "",
        initial: Initial | float = 0,
        field: str = "methods",
        stage: int = 0,
    ) -> Tensor:
        self = super().__new__(cls, name)
        self.dtype, self.dims, self.meaning, self.initial = dtype, dims, meaning, initial
        self.field, self.stage = field, stage
        return self

    def _with(self, **changes: Any) -> Tensor:
        declared = {slot: getattr(self, slot) for slot in self.__slots__}
        return Tensor(**({"name": str(self)} | declared | changes))

    def shaped(self, *dims: Dim) -> Tensor:
        """The tensor with another shape, as in some graphs."""
        return self._with(dims=dims)

    def sized(self, **sizes: Dim) -> Tensor:
        """The tensor with numbers in place of these symbols, as in a model's graphs."""
        return self._with(dims=tuple(sizes.get(str(dim), dim) for dim in self.dims))

    def at(self, index: int) -> Tensor:
        """The tensor of one layer, such as ``past_key.0``."""
        return self._with(name=f"{self}.{index}")

    def of_stage(self, stage: int) -> Tensor:
        """The output of one stage of an MLP speculator, such as ``draft_tokens.0``."""
        return self._with(name=f"{self}.{stage}", stage=stage)

    def shape(self, sizes: Sizes) -> Shape:
        """The shape, given the sizes of the symbols."""
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.dims)

    def zeros(self, sizes: Sizes) -> Array:
        return np.zeros(self.shape(sizes), self.dtype)

    def array(self, sizes: Sizes) -> Array:
        """A new array with the initial value."""
        array = self.zeros(sizes)
        array[...] = self.initial(array.shape, sizes) if callable(self.initial) else self.initial
        return array


def _tensor(name: str, spec: str, meaning: str, initial: Initial | float = 0, field: str = "methods") -> Tensor:
    """Declares a tensor; ``spec`` is its type and shape, such as ``int64[B,T]``."""
    dtype, _, dims = spec.removesuffix("]").partition("[")
    sizes = tuple(int(dim) if dim.isdecimal() else dim for dim in dims.split(",") if dim)
    return Tensor(name, cast(Dtype, dtype), sizes, meaning, initial, field)


def _range(shape: Shape, _: Sizes) -> npt.ArrayLike:
    return np.arange(shape[-1])


def _chain_mask(shape: Shape, _: Sizes) -> npt.ArrayLike:
    return np.tri(shape[-1], dtype=np.bool_)


# --- step graph (the target's prefill, decode and verify) -------------------------------------------------------------
INPUT_IDS = _tensor("input_ids", "int64[B,T]", "tokens of this run")
POSITION_IDS = _tensor("position_ids", "int64[B,T]", "absolute positions; siblings in a tree share one")
TREE_MASK = _tensor(
    "tree_mask", "bool[B,T,T]", "row t may see column u among the new tokens: ancestors and itself", _chain_mask
)
PAST_LENGTH = _tensor("past_length", "int64[B]", "valid cache rows; this run's rows belong from there on")
LOGITS_ROWS = _tensor("logits_rows", "int64[B,R]", "which of the T tokens logits are computed for", _range)
LOGITS = _tensor("logits", "float32[B,R,V]", "one row for each of `logits_rows`", field="vocab_size")
INPUTS_EMBEDS = _tensor(
    "inputs_embeds", "float32[B,T,H]", "only with `--inputs-embeds`: read instead of tokens", field="embedding_size"
)
EMBEDS_MASK = _tensor("embeds_mask", "bool[B,T]", "at which of the T positions they are read", field="embedding_size")
CANDIDATES = _tensor(
    "candidates",
    "int64[B,heads,R,M]",
    "with Medusa heads: the most probable tokens of each, best first",
    field="heads and candidates",
)
HIDDEN = _tensor(
    "hidden_states", "float32[B,R,H]", "with an MLP speculator: the input of the language-model head", field="hidden"
)
LAYER_STATES = _tensor(
    "layer_states",
    "float32[B,T,H]",
    "the residual stream after the first i layers, before the final norm; 0: the embeddings",
    field="hidden",
)

# --- caches: each layer has its tensors, with its number as suffix ----------------------------------------------------
PAST_KEY = _tensor("past_key", "float32[B,Hkv,S,D]", "keys of the cache", field="cache")
PAST_VALUE = _tensor("past_value", "float32[B,Hkv,S,D]", "values of the cache", field="cache")
PRESENT_KEY = PAST_KEY._with(name="present_key", meaning="native: the cache with this run's rows, in the same memory")
PRESENT_VALUE = PAST_VALUE._with(name="present_value", meaning="native: likewise")
NEW_KEY = _tensor("new_key", "float32[B,Hkv,F,D]", "portable: this run's rows alone", field="cache")
NEW_VALUE = _tensor("new_value", "float32[B,Hkv,F,D]", "portable: likewise", field="cache")

# --- layers without attention (specexport.runtime.states) ------------------------------------------------------------
KNOWN_TOKENS = _tensor(
    "known_tokens",
    "int64[B]",
    "how many of the T tokens are text, whatever is accepted: 1 in a step, all in a prefill chunk",
)
CELL_ROWS = _tensor(
    "cell_rows",
    "int64[C,B,G]",
    "the place of each cell's updates among the kept rows and the T new rows",
    field="states",
)
PAST_CONV = _tensor(
    "past_conv", "float32[B,W-1,C]", "inputs of a convolution of width W at the last tokens", field="states"
)
PAST_UPDATES = _tensor(
    "past_updates",
    "float32[B,R,U]",
    "each token's keys and values, and each head's decay (Kimi Linear: one for each number of a key) and strength",
    field="states",
)
PAST_STATE = _tensor("past_state", "float32[B,H,Dk,Dv]", "the recurrent state", field="states")
NEW_CONV = _tensor("new_conv", "float32[B,F,C]", "inputs of the convolution at the tokens fed", field="states")
NEW_UPDATES = _tensor("new_updates", "float32[B,F,U]", "updates of the tokens fed", field="states")
NEW_STATE = PAST_STATE._with(name="new_state", meaning="the state after all whole cells of known tokens")

# --- propose graph (the draft: first pass over T tokens, then single-token passes, in one call) -----------------------
NUM_DRAFT_TOKENS = _tensor(
    "num_draft_tokens",
    "int64[]",
    "K, the loop's trip count; not an input of engines, which run one pass a call",
    lambda _, sizes: sizes["K"],
)
LAST_ROW = _tensor(
    "last_row", "int64[B]", "which of the T tokens is the last real one", lambda _, sizes: sizes["T"] - 1
)
UNIFORM = _tensor("uniform", "float32[B,K]", "noise in [0,1): the same noise draws the same tokens")
TEMPERATURE = _tensor("temperature", "float32[B]", "above 0; greedy is `top_k` = 1", 1)
TOP_K = _tensor("top_k", "int64[B]", "0 keeps every token", 1)
TOP_P = _tensor("top_p", "float32[B]", "1 keeps every token", 1)
MIN_P = _tensor("min_p", "float32[B]", "0 keeps every token")
SAMPLING = (TEMPERATURE, TOP_K, TOP_P, MIN_P)
DRAFT_TOKENS = _tensor("draft_tokens", "int64[K,B]", "the tokens drawn")
DRAFT_IDS = _tensor(
    "draft_ids", "int64[K,B,M]", "tokens that q gives probability to, most probable first", _range, field="candidates"
)
DRAFT_PROBS = _tensor(
    "draft_probs",
    "float32[K,B,M]",
    "q of those tokens; sums to 1 over M",
    lambda shape, _: np.eye(1, shape[-1]),
    field="candidates",
)
DRAFTED = (DRAFT_TOKENS, DRAFT_IDS, DRAFT_PROBS)
"""A draft's outputs for its tokens."""

# --- propose graph of an MLP speculator -------------------------------------------------------------------------------
# The first stage runs at the tree's root, stage d at the T nodes of depth d that have children. Further stages' outputs
# are not read.
HIDDEN_STATE = _tensor(
    "hidden_state", "float32[B,H]", "the target's `hidden_states` at the last token in its cache", field="hidden"
)
LEVEL_PARENTS = _tensor(
    "level_parents", "int64[B,stages,T]", "each node's parent in the level above; not read for the root"
)
LEVEL_RANKS = _tensor(
    "level_ranks",
    "int64[B,stages,T]",
    "each node's rank among its parent's continuations: 0 the drawn token, then the most probable others",
)

# --- propose graphs of EAGLE-3, MTP and DFlash drafts -----------------------------------------------------------------
OWN_STATE = _tensor("own_state", "float32[B,H]", "input of the first row where `reads_own`: an earlier `next_state`")
READS_OWN = _tensor("reads_own", "bool[B]", "whether the draft continues from its own state")
NEXT_STATE = _tensor("next_state", "float32[B,1,H]", "state for the row after the last one")
BLOCK_ROWS = _tensor(
    "block_rows", "int64[B]", "1 + the slot's draft tokens, at most 1 + K: the block's other rows are hidden"
)

# --- accept graph -----------------------------------------------------------------------------------------------------
THRESHOLD = _tensor("posterior_threshold", "float32[B]", "epsilon of typical acceptance")
ALPHA = _tensor("posterior_alpha", "float32[B]", "alpha of typical acceptance")
PARENTS = _tensor(
    "parents", "int64[B,N]", "parent of each node, -1 for the root", lambda shape, _: np.arange(-1, shape[-1] - 1)
)
NUM_ACCEPTED = _tensor("num_accepted", "int64[B]", "draft tokens accepted")
TOKENS = _tensor("tokens", "int64[B,N]", "accepted tokens, then the bonus token at `num_accepted`, then 0")
PATH = _tensor("path", "int64[B,N]", "their nodes: the root, the accepted ones, then 0")

# --- fill graph -------------------------------------------------------------------------------------------------------
TREE_ROWS = _tensor(
    "tree_rows",
    "int64[B,N-1]",
    "the drafted row that has each node's q: its depth less 1; of a speculator its parent, counted through all levels",
)
TREE_RANKS = _tensor(
    "tree_ranks", "int64[B,N-1]", "each node's rank among its siblings: 0 the drawn token, then the most probable"
)
TREE_TOKENS = _tensor("tree_tokens", "int64[B,N-1]", "`draft_tokens` of accept, `input_ids` of the step")
TREE_IDS = _tensor("tree_ids", "int64[B,N-1,M]", "`draft_ids` of accept")
TREE_PROBS = _tensor("tree_probs", "float32[B,N-1,M]", "`draft_probs` of accept")

DECLARED: dict[str, Tensor] = {str(tensor): tensor for tensor in tuple(vars().values()) if isinstance(tensor, Tensor)}
"""All tensors by name; those of layers and stages without a number."""
CACHES = tuple(f"{tensor}." for tensor in DECLARED.values() if tensor.field == "cache")
"""Prefixes of the names of caches and their rows."""
STATES = tuple(f"{tensor}." for tensor in DECLARED.values() if tensor.field == "states" and tensor is not CELL_ROWS)
"""Prefixes of the names of states of layers without attention."""
COLLECTIVES = ("sum.", "join.")
"""Prefixes of the outputs that the ranks of a split model combine: summed, or joined along the last axis."""
CARRIED = "carried."
"""Prefix of tensors that a later segment of such a model reads from an earlier one."""
COLLECTIVE_DOMAIN = "specexport"
"""Domain of the operators that stand for this until a graph is cut into segments."""
