"""Ways to propose draft tokens. One protocol, so that the engine's loop does not know which one it runs."""

from __future__ import annotations

from specexport.contract.manifest import (
    DraftModel,
    Hypothesis,
    Lookahead,
    Medusa,
    Method,
    Ngram,
    Suffix,
    UniversalDraft,
)
from specexport.runtime.backend import candidates_buffers, open_graph, propose_buffers
from specexport.runtime.bundle import Bundle
from specexport.runtime.proposers.base import Proposal, Proposer, SlotView
from specexport.runtime.proposers.draft_model import DraftModelProposer
from specexport.runtime.proposers.hypothesis import HypothesisProposer
from specexport.runtime.proposers.lookahead import LookaheadProposer
from specexport.runtime.proposers.medusa import MedusaProposer
from specexport.runtime.proposers.medusa_draft import MedusaDraftProposer
from specexport.runtime.proposers.ngram import NgramProposer
from specexport.runtime.proposers.suffix import OutputStore, SuffixProposer
from specexport.runtime.proposers.universal import UniversalDraftProposer

__all__ = ["Proposal", "Proposer", "SlotView", "open_proposer"]


def open_proposer(
    bundle: Bundle, method: Method, slots: int, threads: int | None, suffix_store_tokens: int = 0
) -> Proposer:
    """Loads what a method needs.

    Args:
        bundle: the bundle.
        method: one of its methods.
        slots: how many.
        threads: for CPU backends; None for every core this process may use.
        suffix_store_tokens: most tokens of earlier outputs that suffix decoding keeps; 0 for none.

    Raises:
        BackendError: the backend is not installed or refuses a graph.
        RequestError: the store would be too small for any output.
    """
    if isinstance(method, Ngram):
        return NgramProposer(method)
    if isinstance(method, Suffix):
        return SuffixProposer(method, OutputStore(suffix_store_tokens) if suffix_store_tokens else None)
    if isinstance(method, Hypothesis):
        return HypothesisProposer(method)
    if isinstance(method, Lookahead):
        return LookaheadProposer(method)
    if isinstance(method, Medusa):
        return MedusaProposer()
    if isinstance(method, DraftModel):
        graph = open_graph(bundle, method.draft, slots, propose_buffers(method), threads)
        drafter = DraftModelProposer(graph, bundle.manifest)
        if isinstance(method, UniversalDraft):
            own = bundle.tokenizer(method.tokenizer)
            room = bundle.manifest.max_seq_len
            return UniversalDraftProposer(drafter, bundle.tokenizer(), own, method.token_trees(), room)
        return drafter
    graph = open_graph(bundle, method.draft, slots, candidates_buffers(method), threads)
    return MedusaDraftProposer(graph, bundle.manifest, method)
