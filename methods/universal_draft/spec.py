"""Speculation by a smaller model with another tokenizer."""

from __future__ import annotations

from typing import ClassVar, Literal

from specexport.contract.methods.base import CheckpointOptions, Flag, MethodOptions, SourceKind, not_a_chain
from specexport.contract.tree import TokenTree
from specexport.methods.draft_model.spec import ChainDraft


class UniversalDraftOptions(CheckpointOptions, frozen=True, kw_only=True, tag="universal_draft"):
    """Options of a draft model with another tokenizer."""

    flag: ClassVar[Flag | None] = Flag(
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
        model: its folder or hub id.
        tokenizer: the file of its tokenizer in the bundle.
        split_special_tokens: whether that encodes special tokens in a text as plain text.
    """

    model: str
    tokenizer: str
    split_special_tokens: bool

    options: ClassVar[type[MethodOptions]] = UniversalDraftOptions
    sources: ClassVar[dict[str, SourceKind]] = {"model": "checkpoint"}
    needs_training: ClassVar[str | None] = "a smaller model"
    whole_model: ClassVar[bool] = True
    branching: ClassVar[Literal[0, 1, 2]] = 0
    default_sizes: ClassVar[tuple[int, ...]] = (4, 2, 1)  # a token may be several of the target's, or a part of one

    @property
    def files(self) -> tuple[str, ...]:
        return (self.tokenizer,)

    def device_run(self, tree: TokenTree) -> tuple[int, int] | None:
        return None

    def validate_tree(self, tree: TokenTree) -> str | None:
        return not_a_chain(tree)
