"""Speculation by a smaller model with another tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from specexport.contract.methods.base import CHECKPOINT, CheckpointOptions, Flag, not_a_chain
from specexport.contract.tree import TokenTree
from specexport.methods.draft_model import ChainDraft
from specexport.methods.draft_model import open_proposer as open_drafter
from specexport.runtime.params import SamplingParams
from specexport.runtime.proposal import Opening, Proposal, Proposer, SlotProposer, SlotView, longest_chain
from specexport.runtime.text import TextStream


class UniversalDraftOptions(CheckpointOptions, frozen=True, kw_only=True, tag="universal_draft"):
    """Options of a draft model with another tokenizer."""

    flag = Flag(
        "--universal-draft",
        "model",
        "smaller model with another tokenizer, translated through text; accepted less often, so prefer --draft",
        "DIR_OR_ID",
    )


class UniversalDraft(ChainDraft, frozen=True, kw_only=True, tag="universal_draft"):
    """A smaller model with its own tokenizer drafts; text is translated both ways (Timor et al., arXiv 2502.05202).

    Proposals depend only on the text, as no tokens are drawn. A step verifies a shorter chain if the draft's text has
    fewer tokens in the target's vocabulary.

    Attributes:
        tokenizer: the file of its tokenizer in the bundle.
        split_special_tokens: whether that encodes special tokens in a text as plain text.
    """

    model: str
    tokenizer: str
    split_special_tokens: bool

    options = UniversalDraftOptions
    sources = CHECKPOINT
    needs_training = "a smaller model"
    whole_model = True
    branching = 0
    default_sizes = (4, 2, 1)  # a token may be several of the target's, or a part of one

    @property
    def files(self) -> tuple[str, ...]:
        return (self.tokenizer,)

    def device_run(self, tree: TokenTree) -> tuple[int, int] | None:
        return None

    def validate_tree(self, tree: TokenTree) -> str | None:
        return not_a_chain(tree)


# --- proposing --------------------------------------------------------------------------------------------------------
_GREEDY = SamplingParams(temperature=0.0)
_OVERLAP = 12
"""Tokens before a continuation that are encoded with it, as a tokenization depends on the text before."""
_UNFINISHED = "\ufffd"


@dataclass
class _Text:
    """The decoded text of a slot.

    Attributes:
        read: number of tokens decoded so far.
        complete: whether the text ends at a character's end.
    """

    stream: TextStream
    text: str = ""
    read: int = 0
    complete: bool = True

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            piece = self.stream.push(token)
            self.text += piece
            self.complete = bool(piece)
        self.read += len(tokens)


class UniversalDraftProposer(SlotProposer[_Text]):
    """Proposes a draft model's continuation in the target's tokens (Timor et al., arXiv 2502.05202).

    The draft takes its most probable tokens, whatever the request's sampling, so that proposals depend only on the text
    (q = 1). Each step encodes the whole text with the draft's tokenizer; the draft reads only the changed tokens.
    It proposes nothing if the text ends within a character or does not fit the draft's cache.
    """

    def __init__(
        self, drafter: Proposer, target: Tokenizer, draft: Tokenizer, trees: Sequence[TokenTree], longest: int
    ) -> None:
        super().__init__()
        self._drafter = drafter
        self.reads_along = drafter.reads_along
        self._target = target
        self._draft = draft
        self._trees = trees
        self._longest = longest

    def propose(self, views: Sequence[SlotView]) -> dict[int, Proposal]:
        views_by_slot = {view.slot: view for view in views}
        translations = [view for view in map(self._translated, views) if view is not None]
        texts = {view.slot: view.tokens for view in translations}
        proposals = {}
        for slot, proposal in self._drafter.propose(translations).items():
            tokens = self._tokens(views_by_slot[slot].tokens, texts[slot], proposal.tokens.tolist())
            if (translated := longest_chain(self._trees, views_by_slot[slot].tree, tokens)) is not None:
                proposals[slot] = translated
        return proposals

    def prefill(self, view: SlotView, max_deferred: int = 0) -> bool:
        translated = self._translated(view)
        return translated is not None and self._drafter.prefill(translated, max_deferred)

    def _translated(self, view: SlotView) -> SlotView | None:
        """A slot with its text in the draft's tokens; None if the draft cannot continue it."""
        text = self._slots.setdefault(view.slot, _Text(TextStream(self._target)))
        text.extend(view.tokens[text.read :])
        tokens = list(self._draft.encode(text.text).ids) if text.complete else []
        tree = TokenTree.chain(len(view.tree))
        if not 1 < len(tokens) <= self._longest - len(tree):
            return None
        return SlotView(view.slot, tokens, _GREEDY, view.random, tree)

    def _tokens(self, before: list[int], drafted_after: list[int], drafted: list[int]) -> list[int]:
        """The target's tokens for drafted text, from both tokenizers' tokens before it and the drafted tokens."""
        context = drafted_after[-_OVERLAP:]
        old, new = self._decoded(self._draft, context), self._decoded(self._draft, [*context, *drafted])
        text = new[len(old) :] if new.startswith(old) else ""
        text = text.rstrip(_UNFINISHED)
        if not text:
            return []
        last = before[-_OVERLAP:]
        together = list(self._target.encode(self._decoded(self._target, last) + text, add_special_tokens=False).ids)
        if together[: len(last)] == last:
            return together[len(last) :]
        return list(self._target.encode(text, add_special_tokens=False).ids)

    @staticmethod
    def _decoded(tokenizer: Tokenizer, tokens: list[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=True)

    def move(self, source: int, to: int) -> None:
        super().move(source, to)
        self._drafter.move(source, to)

    def shrink_cache(self, rows: int) -> None:
        self._drafter.shrink_cache(rows)

    def release(self, slot: int) -> None:
        super().release(slot)
        self._drafter.release(slot)


def open_proposer(method: UniversalDraft, opening: Opening) -> Proposer:
    bundle = opening.bundle
    drafter = open_drafter(method, opening)
    tokenizer = bundle.tokenizer(method.tokenizer, split_special_tokens=method.split_special_tokens)
    return UniversalDraftProposer(
        drafter, bundle.tokenizer(), tokenizer, method.token_trees(), bundle.manifest.max_seq_len
    )
