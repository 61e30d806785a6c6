"""Every tensor name of every graph in a bundle, with its type, shape and meaning.

Symbols: ``B`` slots of the batch, ``T`` query tokens, ``R`` rows whose logits are wanted, ``S`` cache rows, ``Hkv``
key/value heads, ``D`` head size, ``V`` vocabulary (width of the target's logits), ``K`` draft tokens, ``M`` candidate
tokens of a draft distribution or of a head, ``N`` heads, ``L`` layers, ``H`` width of an embedding, ``F`` tokens fed to
a model in one call: ``T`` for a step, ``T + K - 1`` for a propose graph, whose last draft token is not fed.
"""

from __future__ import annotations

from collections.abc import Sequence

from specexport.contract.model import LoweredAs, StateLayer

# --- step graph (the target's prefill, decode and verify) -------------------------------------------------------------
INPUT_IDS = "input_ids"  # int64 [B,T]    tokens of this step: a chain, a tree, or a prefill chunk
POSITION_IDS = "position_ids"  # int64 [B,T]    absolute positions; siblings in a tree share one
TREE_MASK = "tree_mask"  # bool  [B,T,T]  row t may see column u among the new tokens (ancestors and itself)
PAST_LENGTH = "past_length"  # int64 [B]      valid cache rows; also the row where this step's rows are written
LOGITS_ROWS = "logits_rows"  # int64 [B,R]    which of the T tokens logits are computed for (one, in prefill)
LOGITS = "logits"  # float32 [B,R,V]; not from a draft with Medusa heads
INPUTS_EMBEDS = "inputs_embeds"  # float32 [B,T,H]  only where prompts may hold embeddings: read instead of tokens
EMBEDS_MASK = "embeds_mask"  # bool [B,T]     with inputs_embeds: at which of the T positions it is read
CANDIDATES = "candidates"  # int64 [B,N,R,M]  with Medusa heads: each head's most probable tokens, best first
HIDDEN = "hidden_states"  # float32 [B,R,H]  with an MLP speculator: what the language-model head reads
LAYER_STATES = "layer_states"  # see layer_states()
KNOWN_TOKENS = (
    "known_tokens"  # int64 [B]  with recurrent layers: how many of the T tokens are text, whatever is accepted
)
CELL_ROWS = "cell_rows"  # int64 [C,B,G]  alike: see contract.states

# --- propose graph (the draft: first pass over T tokens, then single-token passes, in one call) -----------------------
NUM_DRAFT_TOKENS = "num_draft_tokens"  # int64 []     K, how many tokens to draft (the loop's trip count)
LAST_ROW = "last_row"  # int64 [B]    which of the T tokens is the last real one
UNIFORM = "uniform"  # float32    noise in [0,1): [B,K] for propose, [B,N] for accept
TEMPERATURE = "temperature"  # float32 [B]  > 0; greedy is expressed as top_k = 1
TOP_K = "top_k"  # int64 [B]    0 keeps every token
TOP_P = "top_p"  # float32 [B]  1 keeps every token
MIN_P = "min_p"  # float32 [B]  0 keeps every token
DRAFT_TOKENS = "draft_tokens"  # int64 [K,B] out of propose, [B,N-1] into accept
DRAFT_IDS = "draft_ids"  # int64 [K,B,M] / [B,N-1,M]  the tokens q gives probability to, most probable first
DRAFT_PROBS = "draft_probs"  # float32, as DRAFT_IDS       q of those tokens; sums to 1 over M

# --- propose graph of an MLP speculator (takes INPUT_IDS [B,1] and the sampling inputs above, with UNIFORM [B,D,T]) ---
# Of D stages the first looks at the tree's root, stage d at the T nodes at depth d that have children; of those after a
# tree's depth nothing is read. DRAFT_TOKENS, DRAFT_IDS and DRAFT_PROBS of stage d are [B,T], [B,T,M], with one row
# for the first stage.
HIDDEN_STATE = "hidden_state"  # float32 [B,H]  what the target's head read at the last token in its cache
LEVEL_PARENTS = "level_parents"  # int64 [B,D,T]  of each node, which one of the level before; not read for the root
LEVEL_RANKS = "level_ranks"  # int64 [B,D,T]  which of that one's continuations it is: 0 the drawn one, then the best

# --- propose graph of an EAGLE-3 draft (also takes LAYER_STATES [B,T,n*H], those of n layers side by side) ------------
OWN_STATE = "own_state"  # float32 [B,H]  what the first row sees instead, where READS_OWN says so: a NEXT_STATE
READS_OWN = "reads_own"  # bool [B]
NEXT_STATE = "next_state"  # float32 [B,1,H]  what the row after the last one may see

# --- propose graph of a DFlash draft (also takes INPUT_IDS [B,1], a tree's root, and LAYER_STATES as EAGLE-3's does) --
BLOCK_ROWS = "block_rows"  # int64 [B]  rows of the slot's block: the root and its draft tokens, at most 1 + K

DRAFTED = (DRAFT_TOKENS, DRAFT_IDS, DRAFT_PROBS)
"""A draft's outputs for its tokens."""

# --- accept graph (logits of the N verified nodes of a tree in, the step's tokens out; also takes TREE_MASK) ----------
THRESHOLD = "posterior_threshold"  # float32 [B]  epsilon of typical acceptance
ALPHA = "posterior_alpha"  # float32 [B]  its alpha
PARENTS = "parents"  # int64 [B,N]    the tree: parent of each node, -1 for the root
NUM_ACCEPTED = "num_accepted"  # int64 [B]      draft tokens accepted
TOKENS = "tokens"  # int64 [B,N]    accepted tokens, then the bonus token at index num_accepted, then 0
PATH = "path"  # int64 [B,N]    their nodes: the root, then the accepted ones, then 0

# --- fill graph (a tree, from DRAFT_TOKENS, DRAFT_IDS and DRAFT_PROBS as propose gives them) --------------------------
TREE_ROWS = "tree_rows"  # int64 [B,N-1]  of each node but the root, which of the drafted rows says its q
TREE_RANKS = "tree_ranks"  # int64 [B,N-1]  of each among its siblings
TREE_TOKENS = "tree_tokens"  # int64 [B,N-1]  into accept as DRAFT_TOKENS, and into the step as INPUT_IDS
TREE_IDS = "tree_ids"  # int64 [B,N-1,M]  into accept as DRAFT_IDS
TREE_PROBS = "tree_probs"  # float32, as TREE_IDS; into accept as DRAFT_PROBS

# --- commit graph (takes PAST_LENGTH, PATH and the caches; returns the caches, bound to the same memory) --------------


def past_key(layer: int) -> str:
    """Static key cache of one layer, float32 ``[B,Hkv,S,D]``; the same memory as ``present_key``."""
    return f"past_key.{layer}"


def past_value(layer: int) -> str:
    """Static value cache of one layer, alike."""
    return f"past_value.{layer}"


def layer_states(layers: int) -> str:
    """Of a step graph: the residual stream after its first ``layers`` layers, float32 ``[B,T,H]``; 0: the embeddings.

    After all of them the final norm is still to come.
    """
    return f"{LAYER_STATES}.{layers}"


def state_names(layers: Sequence[StateLayer]) -> list[str]:
    """``[past_conv.0, past_updates.0, past_state.0, past_conv.1, ...]``; a convolution alone has the first of them.

    float32 ``[B,kept_rows,C]``, ``[B,R,U]``, of which the row of the token at position p is the one at p modulo their
    number, and ``[B,H,Dk,Dv]``.
    """
    return _of_states(layers, "past_conv", "past_updates", "past_state")


def returned_state_names(layers: Sequence[StateLayer]) -> list[str]:
    """``[new_conv.0, new_updates.0, new_state.0, new_conv.1, ...]``, of the inputs above.

    New rows are float32 ``[B,F,C]`` and ``[B,F,U]``; a state has seen all whole cells of known tokens.
    """
    return _of_states(layers, "new_conv", "new_updates", "new_state")


def _of_states(layers: Sequence[StateLayer], conv: str, *recurrent: str) -> list[str]:
    kinds = [(conv, *(recurrent if layer.recurrence is not None else ())) for layer in layers]
    return [f"{kind}.{index}" for index, names in enumerate(kinds) for kind in names]


CACHES = ("past_key.", "past_value.", "present_key.", "present_value.", "new_key.", "new_value.")
"""What the names of caches and of their rows begin with."""
STATES = ("past_conv.", "past_updates.", "past_state.", "new_conv.", "new_updates.", "new_state.")
"""And those of what layers without attention keep."""
MEETINGS = ("sum.", "join.")
"""And those of what the ranks of a split model put together: added up, or joined along the last axis."""
CARRIED = "carried."
"""And those of what a later segment of such a model reads of an earlier one."""
MEETING_DOMAIN = "specexport"
"""Of the operators that stand for that until a graph is cut there."""


def of_stage(name: str, stage: int) -> str:
    """An output of one stage of an MLP speculator, such as ``draft_tokens.0``."""
    return f"{name}.{stage}"


def cache_names(layers: int) -> list[str]:
    """``[past_key.0, past_value.0, past_key.1, ...]``."""
    return [name(layer) for layer in range(layers) for name in (past_key, past_value)]


def returned_names(layers: int, lowering: LoweredAs) -> list[str]:
    """What a graph returns of its cache: ``[present_key.0, present_value.0, ...]``, or ``[new_key.0, ...]``.

    Lowered natively these are the caches with this call's rows written at ``past_length``; lowered portably the rows
    alone, float32 ``[B,Hkv,F,D]``, which the runtime copies into the cache.
    """
    made = "present" if lowering == "native" else "new"
    return [f"{made}_{kind}.{layer}" for layer in range(layers) for kind in ("key", "value")]
