"""Speculation by a smaller model with the target's tokenizer."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from specexport.contract import tensors
from specexport.contract.methods.base import DEFAULT_DRAFT_TOKENS, Flag, RankedMethod, SourceKind
from specexport.contract.model import Model, Size
from specexport.contract.signature import SAMPLING, GraphSignature, Signature, Spec
from specexport.contract.suggestions import SMALLER, Suggestion, Wanted
from specexport.contract.tree import TokenTree

_SIZES = (DEFAULT_DRAFT_TOKENS, 6, 8)
"""Default draft tokens of a step: the first, or by measured costs any of them."""

_GPU_DRAFT_TOKENS = 5
MAX_STATES = 16


class ChainDraft(RankedMethod, frozen=True, kw_only=True):
    """A model drafts a chain, a pass a token (Leviathan 2023, Chen 2023); a tree may add less probable tokens beside
    each token of that chain.

    Attributes:
        draft: the model, as a propose graph.
    """

    draft: Model | None = None

    built: ClassVar[frozenset[str]] = RankedMethod.built | {"draft"}
    role: ClassVar[str] = "draft"
    branching: ClassVar[Literal[0, 1, 2]] = 1
    drafts_on_device: ClassVar[bool] = True

    def default_trees(self) -> tuple[TokenTree, ...]:
        return tuple(TokenTree.chain(size + 1) for size in _SIZES)

    @property
    def models(self) -> dict[str, Model]:
        return {} if self.draft is None else {self.role: self.draft}

    @property
    def support(self) -> int:
        return self.candidates

    @property
    def signatures(self) -> dict[str, GraphSignature]:
        """See :class:`Method`: the propose graph, first a pass over T tokens, then one of a single token each."""
        inputs = {
            tensors.INPUT_IDS: Spec("int64", ("B", "T")),
            tensors.PAST_LENGTH: Spec("int64", ("B",)),
            tensors.LAST_ROW: Spec("int64", ("B",)),
            tensors.NUM_DRAFT_TOKENS: Spec("int64", ()),
            tensors.UNIFORM: Spec("float32", ("B", "K")),
            **SAMPLING,
        }
        if self.draft is not None and any(layer.recurrence for layer in self.draft.states):
            inputs[tensors.KNOWN_TOKENS] = Spec("int64", ("B",))
        outputs = {
            tensors.DRAFT_TOKENS: Spec("int64", ("K", "B")),
            tensors.DRAFT_IDS: Spec("int64", ("K", "B", self.candidates)),
            tensors.DRAFT_PROBS: Spec("float32", ("K", "B", self.candidates)),
        }
        return {self.role: GraphSignature(inputs, outputs, "F")}

    def validate_tree(self, tree: TokenTree) -> str | None:
        spine = "only the most probable token of each depth can have children"
        return super().validate_tree(tree) or (None if tree.has_spine else spine)

    def drafted_lengths(self) -> frozenset[int] | None:
        return frozenset(point.drafts for point in self.draft.graph.points) if self.draft is not None else None


class StatesDraft(ChainDraft, frozen=True, kw_only=True):
    """A draft that reads states between the target's layers.

    Attributes:
        states: after how many of the target's layers it sees the residual stream.
        hidden: the target's hidden size.
        rows: that a run which drafts makes of a text, at most: as many as a step of its deepest tree can accept.
        dynamic_tree: whether the nodes of a tree are chosen anew in each step, by how probable the draft finds the
            paths to them: at most as many, and at most as deep, as those of the chosen tree (EAGLE-2, arXiv
            2406.16858, section 4).
    """

    dynamic_tree: bool = False
    states: Annotated[tuple[Annotated[int, Meta(ge=0, le=4096)], ...], Meta(max_length=MAX_STATES)] = ()
    hidden: Size = 1
    rows: Size = 1

    built: ClassVar[frozenset[str]] = ChainDraft.built | {"states", "hidden", "rows"}

    @property
    def target_outputs(self) -> Signature:
        return {tensors.layer_states(count): Spec("float32", ("B", "T", self.hidden)) for count in self.states}

    @property
    def catch_up(self) -> int:
        return self.rows

    def describe(self) -> str:
        dynamic = ", dynamic trees" if self.dynamic_tree else ""
        return f"{self.name}, states after {', '.join(map(str, self.states))} of the target's layers{dynamic}"


class OwnStateDraft(StatesDraft, frozen=True, kw_only=True):
    """One that reads its own state at tokens that the target has not read yet, a pass a token.

    Attributes:
        draft_hidden: H of the draft's own states.
    """

    draft_hidden: Size = 1

    built: ClassVar[frozenset[str]] = StatesDraft.built | {"draft_hidden"}

    def validate(self) -> str | None:
        if self.dynamic_tree and self.trees and all(tree.is_chain for tree in self.token_trees()):
            return "dynamic_tree: its trees are chains, which leave nothing to choose; give trees of more nodes (trees)"
        return super().validate()

    @property
    def follow_up(self) -> int:
        return 1  # it continues from its own state, without reading tokens again

    @property
    def signatures(self) -> dict[str, GraphSignature]:
        (chain,) = super().signatures.values()
        states = {tensors.LAYER_STATES: Spec("float32", ("B", "T", len(self.states) * self.hidden))}
        inputs = states | {
            tensors.OWN_STATE: Spec("float32", ("B", self.draft_hidden)),
            tensors.READS_OWN: Spec("bool", ("B",)),
        }
        outputs = {tensors.NEXT_STATE: Spec("float32", ("B", 1, self.draft_hidden))}
        return {self.role: GraphSignature(chain.inputs | inputs, chain.outputs | outputs, chain.fed)}


class DraftModel(ChainDraft, frozen=True, kw_only=True, tag="draft_model"):
    """A smaller model with the target's tokenizer drafts.

    Attributes:
        model: its folder or hub id.
    """

    model: str

    main: ClassVar[str] = "model"
    flags: ClassVar[tuple[Flag, ...]] = (
        Flag("--draft", "model", "smaller model with the same tokenizer", "DIR_OR_ID"),
    )
    sources: ClassVar[dict[str, SourceKind]] = {"model": "checkpoint"}
    needs_training: ClassVar[str | None] = "a smaller model"
    whole_model: ClassVar[bool] = True

    @classmethod
    def suggest(cls, wanted: Wanted) -> Suggestion | None:
        K = DEFAULT_DRAFT_TOKENS if wanted.device == "cpu" else _GPU_DRAFT_TOKENS
        least, most = SMALLER
        if not wanted.drafts:
            low, high = wanted.parameters / most / 1e6, wanted.parameters / least / 1e6
            why = (
                f"look for a model of the same family and tokenizer with {low:,.4g} to {high:,.4g} million parameters, "
                "and pass it with --draft; 'specexport train draft' makes it agree with this target more often"
            )
            return Suggestion("draft_model", f"K = {K}", why, 0)
        name, ratio = wanted.drafts[0]
        why = f"{ratio:.1f} times smaller, the same tokenizer"
        if not least <= ratio <= most:
            why += f"; {least:g} to {most:g} times would be better"
        flags = ("--draft", name, "--num-speculative-tokens", str(K))
        return Suggestion("draft_model", f"{name}, K = {K}", why, 0, flags)
