"""Ways to propose draft tokens. One protocol, so that the engine's loop does not know which one it runs."""

from __future__ import annotations

from specexport.contract.methods import (
    DraftModel,
    Hypothesis,
    Lookahead,
    Medusa,
    Method,
    MlpSpeculator,
    Ngram,
    Suffix,
    UniversalDraft,
)
from specexport.runtime.backend import Backend, candidates_buffers, propose_buffers, speculator_buffers
from specexport.runtime.bundle import Bundle
from specexport.runtime.proposers.base import Proposal, Proposer, SlotView
from specexport.runtime.proposers.draft_model import DraftModelProposer
from specexport.runtime.proposers.hypothesis import HypothesisProposer
from specexport.runtime.proposers.lookahead import LookaheadProposer
from specexport.runtime.proposers.medusa import MedusaProposer
from specexport.runtime.proposers.medusa_draft import MedusaDraftProposer
from specexport.runtime.proposers.mlp_speculator import MlpSpeculatorProposer
from specexport.runtime.proposers.ngram import NgramProposer
from specexport.runtime.proposers.suffix import OutputStore, SuffixProposer
from specexport.runtime.proposers.universal import UniversalDraftProposer

__all__ = ["Proposal", "Proposer", "SlotView", "open_proposer"]


def open_proposer(
    bundle: Bundle, method: Method, slots: int, backend: Backend, suffix_store_tokens: int = 0
) -> Proposer:
    """Loads what a method needs.

    Args:
        bundle: the bundle.
        method: one of its methods.
        slots: how many.
        backend: runs its model, if it has one.
        suffix_store_tokens: most tokens of earlier outputs that suffix decoding keeps; 0 for none.

    Raises:
        BackendError: the backend refuses a graph.
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
    if isinstance(method, MlpSpeculator):
        return MlpSpeculatorProposer(backend.open(method.draft, slots, speculator_buffers(method)))
    if isinstance(method, DraftModel):
        graph = backend.open(method.draft, slots, propose_buffers(method))
        drafter = DraftModelProposer(graph, bundle.manifest)
        if isinstance(method, UniversalDraft):
            own = bundle.tokenizer(method.tokenizer)
            room = bundle.manifest.max_seq_len
            return UniversalDraftProposer(drafter, bundle.tokenizer(), own, method.token_trees(), room)
        return drafter
    graph = backend.open(method.draft, slots, candidates_buffers(method))
    return MedusaDraftProposer(graph, bundle.manifest, method)
