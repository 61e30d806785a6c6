"""The propose graph: K draft tokens in one call.

:class:`DraftPass` runs the draft over the tokens that it has not read and draws the next token. The exporter puts it
into a loop, so that weights are stored and packed once, however many tokens are drafted.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from specexport.contract.model import StateLayer
from specexport.graphs.attention import TwoPartLowering
from specexport.graphs.recurrent import StepStates
from specexport.graphs.step import flat, pairs, run_model

MAX_CANDIDATES = 64
"""Number of tokens that q keeps, the most probable. Speculative sampling is exact for any q, as long as acceptance gets
the q from which the token was drawn; cutting off the tail costs a little acceptance at high temperatures, and saves
moving K vocabularies of probabilities."""
MAX_TOP_K = 10
"""Maximum number of candidates of a head; published trees use no more."""
_LARGE = 1 << 14
"""A plain TopK is faster for smaller vocabularies."""
_BLOCKS = range(128, 15, -1)


def most_probable(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The greatest logits and their tokens, sorted, ties by lower id, as ``torch.topk`` returns them.

    Large vocabularies are divided into blocks, and only the ``count`` blocks with the greatest maxima are searched:
    other blocks cannot contain the ``count`` greatest logits. A GPU computes the TopK of a row on one processor, but
    maxima on all of them; CPUs compute maxima by vector instructions.

    Logits are float32 ``[..., V]``; the results are float32 and int64 ``[..., count]``, with ``count`` at most V.
    """
    vocab = logits.shape[-1]
    size = next((size for size in _BLOCKS if vocab % size == 0), vocab)
    if vocab < _LARGE or vocab // size < count:
        best, ids = torch.topk(logits, count, dim=-1)
        return best, ids
    blocks = logits.reshape(*logits.shape[:-1], vocab // size, size)
    chosen = torch.topk(blocks.amax(-1), count, dim=-1).indices
    # In the order of the vocabulary, which decides between equal logits.
    chosen = torch.topk(chosen, count, dim=-1, largest=False).values[..., None]
    gathered = blocks.gather(-2, chosen.expand(*chosen.shape[:-1], size))
    best, place = torch.topk(gathered.flatten(-2), count, dim=-1)
    ids = chosen * size + torch.arange(size)
    return best, ids.flatten(-2).gather(-1, place)


def draw_candidate(
    logits: torch.Tensor,
    uniform: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draws one token from the draft's distribution after temperature, top-k, top-p and min-p.

    For greedy decoding ``top_k`` is 1: q is then 1 at the most probable token, whatever the noise.

    Args:
        logits: float32 ``[..., V]``.
        uniform: float32 ``[...]`` in [0,1).
        temperature: float32 ``[...]``, like the following parameters; above 0.
        top_k: int64; 0 keeps all.
        top_p: float32.
        min_p: float32, relative to the most probable token.

    Returns:
        The token, int64 ``[...]``; the candidates, int64 ``[..., M]``, most probable first; q of each, float32
        ``[..., M]``.
    """
    # As few operators as possible, as they take a notable part of a small draft's pass.
    candidates = min(MAX_CANDIDATES, logits.shape[-1])
    best, ids = most_probable(logits, candidates)
    rank = torch.arange(candidates)
    in_top_k = (rank < top_k[..., None]) | (top_k[..., None] < 1)  # not == 0: ONNX Runtime's Equal came late to CUDA
    lowest = torch.finfo(best.dtype).min
    scaled = torch.where(in_top_k, best / temperature[..., None], lowest)
    probs = scaled.softmax(-1)
    before = probs.cumsum(-1) - probs
    keep = (before < top_p[..., None]) & (probs >= min_p[..., None] * probs[..., :1])  # always the first
    q = torch.where(keep, scaled, lowest).softmax(-1)
    # The last kept candidate whose share begins at or below the noise: rounding cannot lead past the last kept one.
    begun = (q.cumsum(-1) - q <= uniform[..., None]) & (q > 0)
    # Not by a maximum, which takes four times as many launches on GPUs.
    choice = torch.topk(torch.where(begun, rank, 0), 1, dim=-1).values
    token = torch.gather(ids, -1, choice)[..., 0]
    return token, ids, q


def draw_next(
    logits: torch.Tensor, uniform: torch.Tensor, sampling: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`draw_candidate` from the logits ``[B,1,V]`` of one row a slot: ``(token [B], ids [B,M], probs [B,M])``."""
    # The row's axis stays up to the end: with one slot, GPUs then write the outputs without copies.
    token, ids, probs = draw_candidate(logits, uniform[:, None], *(parameter[:, None] for parameter in sampling))
    return token.squeeze(1), ids.squeeze(1), probs.squeeze(1)


def place_of_rank(ids: torch.Tensor, drawn: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
    """The index of the candidate with a given rank, if the drawn token has rank 0 and the others follow in order.

    ``ids`` are the candidates, most probable first, int64 ``[..., M]``; the drawn token is one of them. It, the ranks
    and the indices are int64 ``[...]``.
    """
    # Without ==, as in draw_candidate.
    is_drawn = (ids <= drawn[..., None]) & (ids >= drawn[..., None])
    place = (is_drawn * torch.arange(ids.shape[-1])).sum(-1)
    beside = torch.where(ranks <= place, ranks - 1, ranks)
    return torch.where(ranks < 1, place, beside)


class DraftPass(torch.nn.Module):
    """One pass of the draft model.

    Args:
        model: the draft, loaded with ``attn_implementation=ATTENTION_NAME``.
        vocab_size: number of tokens that may be proposed: the lesser width of the target's and the draft's logits.
        input_vocab: number of rows of the draft's embedding, if the target has larger token ids, which are read as the
            last row; otherwise None.
        max_positions: number of positions that the draft supports; later positions are read as the last.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        vocab_size: int,
        input_vocab: int | None,
        max_positions: int,
        states: Mapping[int, StateLayer] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.states = states or {}
        self.vocab_size = vocab_size
        self.input_vocab = input_vocab
        self.max_positions = max_positions

    def forward(
        self,
        input_ids: torch.Tensor,
        logits_row: torch.Tensor,
        uniform: torch.Tensor,
        past_length: torch.Tensor,
        sampling: list[torch.Tensor],
        past: list[torch.Tensor],
        rows: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """Runs the draft over ``input_ids [B,T]``, which follow the cache and the R rows that are not in it yet.

        ``sampling`` holds the last arguments of :func:`draw_candidate`. ``past`` and ``rows`` end with the inputs of
        :class:`~specexport.graphs.recurrent.StepStates`.

        Returns:
            ``(token [B], ids [B,M], probs [B,M], rows...)``, with ``rows`` extended to ``[B,Hkv,R+T,D]``, followed by
            the outputs of ``StepStates``.
        """
        done = rows[0].shape[2]
        tokens = input_ids.shape[1]
        # The new rows are a chain: each token sees those before it and itself.
        fresh = torch.arange(done + tokens)
        seen = (fresh[None, None, :] <= fresh[-tokens:][None, :, None]).expand(past_length.shape[0], -1, -1)
        positions = past_length[:, None] + fresh[None, :]
        position_ids = positions[:, -tokens:].clamp(max=self.max_positions - 1)
        states = StepStates(self.states, past, past_length, rows)
        count = len(past) - states.input_count
        two_part = TwoPartLowering(pairs(past[:count]), past_length, seen, positions, pairs(rows[:count]), states)
        if self.input_vocab is not None:
            input_ids = input_ids.clamp(max=self.input_vocab - 1)
        logits, _ = run_model(self.model, two_part, input_ids, position_ids, logits_row[:, None])
        drawn = draw_next(logits[..., : self.vocab_size], uniform, sampling)
        return (*drawn, *flat(two_part.returned), *states.returned)
