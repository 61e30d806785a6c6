"""A draft with another tokenizer: it reads the text in its own tokens, and its text is read in the target's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from specexport.contract.tree import TokenTree
from specexport.methods.draft_model import propose as draft_model
from specexport.methods.universal_draft.spec import UniversalDraft
from specexport.runtime.params import SamplingParams
from specexport.runtime.proposal import Chains, Proposal, Proposer, SlotProposer, SlotView
from specexport.runtime.proposers import Opening
from specexport.runtime.text import TextStream

_GREEDY = SamplingParams(temperature=0.0)
_OVERLAP = 12
"""Tokens before a continuation that are read together with it: how text becomes tokens depends on what is before."""
_UNFINISHED = "\ufffd"


@dataclass
class _Text:
    """A slot's text as it is read so far.

    Attributes:
        stream: turns the target's tokens into text.
        whole: whether the last token said something; within a character it does not.
    """

    stream: TextStream
    text: str = ""
    read: int = 0
    whole: bool = True

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            piece = self.stream.push(token)
            self.text += piece
            self.whole = bool(piece)
        self.read += len(tokens)


class UniversalDraftProposer(SlotProposer[_Text]):
    """Lets a draft model go on with the text, and proposes what that is in the target's tokens (universal assisted
    decoding, Timor et al., arXiv 2502.05202).

    The draft takes its most probable tokens whatever the request samples, so that what is proposed depends on the text
    alone (q = 1). The text is given to the draft's tokenizer anew each step; the draft itself reads only what changed.
    Where a text ends within a character nothing is proposed, nor where it is longer than the draft's cache.
    """

    def __init__(
        self, drafter: Proposer, target: Tokenizer, draft: Tokenizer, trees: Sequence[TokenTree], longest: int
    ) -> None:
        super().__init__()
        self._drafter = drafter
        self.reads_along = drafter.reads_along
        self._target = target
        self._draft = draft
        self._chains = Chains(trees)
        self._longest = longest

    def propose(self, views: Sequence[SlotView]) -> dict[int, Proposal]:
        wanted = {view.slot: view for view in views}
        translations = [view for view in map(self._translated, views) if view is not None]
        texts = {view.slot: view.tokens for view in translations}
        made = {}
        for slot, proposal in self._drafter.propose(translations).items():
            tokens = self._tokens(wanted[slot].tokens, texts[slot], proposal.tokens.tolist())
            if (translated := self._chains.proposal(wanted[slot].tree, tokens)) is not None:
                made[slot] = translated
        return made

    def prefill(self, view: SlotView, max_deferred: int = 0) -> bool:
        translated = self._translated(view)
        return translated is not None and self._drafter.prefill(translated, max_deferred)

    def _translated(self, view: SlotView) -> SlotView | None:
        """What the draft sees of a slot; None where there is nothing it could go on with."""
        text = self._slots.setdefault(view.slot, _Text(TextStream(self._target)))
        text.extend(view.tokens[text.read :])
        tokens = list(self._draft.encode(text.text).ids) if text.whole else []
        tree = TokenTree.chain(len(view.tree))
        if not 1 < len(tokens) <= self._longest - len(tree):
            return None
        return SlotView(view.slot, tokens, _GREEDY, view.random, tree)

    def _tokens(self, before: list[int], drafted_after: list[int], drafted: list[int]) -> list[int]:
        """The target's tokens for what the draft said, from its tokens before and those it drafted."""
        known = drafted_after[-_OVERLAP:]
        old, new = self._said(self._draft, known), self._said(self._draft, [*known, *drafted])
        said = new[len(old) :] if new.startswith(old) else ""
        said = said.rstrip(_UNFINISHED)
        if not said:
            return []
        last = before[-_OVERLAP:]
        together = list(self._target.encode(self._said(self._target, last) + said, add_special_tokens=False).ids)
        if together[: len(last)] == last:
            return together[len(last) :]
        return list(self._target.encode(said, add_special_tokens=False).ids)

    @staticmethod
    def _said(tokenizer: Tokenizer, tokens: list[int]) -> str:
        text: str = tokenizer.decode(tokens, skip_special_tokens=True)
        return text

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
    drafter = draft_model.open_proposer(method, opening)
    own = bundle.tokenizer(method.tokenizer, split_special_tokens=method.split_special_tokens)
    return UniversalDraftProposer(drafter, bundle.tokenizer(), own, method.token_trees(), bundle.manifest.max_seq_len)
