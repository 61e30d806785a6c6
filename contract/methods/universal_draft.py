"""Speculation by a smaller model with another tokenizer."""

from __future__ import annotations

from typing import ClassVar, Literal

from specexport.contract.methods.base import Flag, SourceKind, not_a_chain
from specexport.contract.methods.draft_model import ChainDraft
from specexport.contract.tree import TokenTree


class UniversalDraft(ChainDraft, frozen=True, kw_only=True, tag="universal_draft"):
    """A smaller model with its own tokenizer drafts; text is translated both ways (Timor et al., arXiv 2502.05202).

    What is proposed follows from the text alone, without drawing. A step verifies a shorter chain where the draft's
    tokens make fewer of the target's.

    Attributes:
        model: its folder or hub id.
        tokenizer: the draft's ``tokenizer.json``.
        split_special_tokens: whether it reads special tokens in a text as text.
    """

    model: str
    tokenizer: str = ""
    split_special_tokens: bool = False

    main: ClassVar[str] = "model"
    built: ClassVar[frozenset[str]] = ChainDraft.built | {"tokenizer", "split_special_tokens"}
    flags: ClassVar[tuple[Flag, ...]] = (
        Flag(
            "--universal-draft",
            "model",
            "smaller model with another tokenizer, translated through text; accepted less often, so prefer --draft",
            "DIR_OR_ID",
        ),
    )
    sources: ClassVar[dict[str, SourceKind]] = {"model": "checkpoint"}
    needs_training: ClassVar[str | None] = "a smaller model"
    whole_model: ClassVar[bool] = True
    branching: ClassVar[Literal[0, 1, 2]] = 0
    drafts_on_device: ClassVar[bool] = False

    @property
    def files(self) -> tuple[str, ...]:
        return (self.tokenizer,)

    def default_trees(self) -> tuple[TokenTree, ...]:
        """See :class:`Method`; the draft's tokens make more or fewer of the target's, so shorter chains are there."""
        return tuple(TokenTree.chain(size + 1) for size in (4, 2, 1))

    def validate_tree(self, tree: TokenTree) -> str | None:
        return not_a_chain(tree)
