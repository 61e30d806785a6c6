"""Speculation by a smaller model with the target's tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from specexport.contract.errors import TrainError
from specexport.contract.methods.base import (
    DEFAULT_DRAFT_TOKENS,
    SMALLER,
    CheckpointOptions,
    DraftingMethod,
    Flag,
    MethodOptions,
    SourceKind,
    Suggestion,
    TargetProfile,
)
from specexport.contract.signature import GraphSignature, propose_signature
from specexport.contract.tree import TokenTree
from specexport.training.options import Divergence, DraftRunOptions, Report, Training, draft_option

_GPU_DRAFT_TOKENS = 5


class ChainDraft(DraftingMethod, frozen=True, kw_only=True):
    """A model drafts a chain, with a pass per token (Leviathan 2023, Chen 2023); a tree may add less probable tokens
    beside each token of the chain.
    """

    role: ClassVar[str] = "draft"
    branching: ClassVar[Literal[0, 1, 2]] = 1
    default_sizes: ClassVar[tuple[int, ...]] = (DEFAULT_DRAFT_TOKENS, 6, 8)  # measured costs decide among them

    @property
    def support(self) -> int:
        return self.candidates

    @property
    def signature(self) -> GraphSignature:
        """See :class:`Method`: the propose graph, first a pass over T tokens, then one of a single token each."""
        return propose_signature(self.candidates, () if self.draft is None else self.draft.states)

    def validate_tree(self, tree: TokenTree) -> str | None:
        spine = "only the most probable token of each depth can have children"
        return super().validate_tree(tree) or (None if tree.has_spine else spine)

    def device_run(self, tree: TokenTree) -> tuple[int, int] | None:
        return self.catch_up, tree.depth

    def drafted_lengths(self) -> frozenset[int] | None:
        return frozenset(point.drafts for point in self.draft.graph.points) if self.draft is not None else None


class DraftModelOptions(CheckpointOptions, frozen=True, kw_only=True, tag="draft_model"):
    """Options of a draft model."""

    flag: ClassVar[Flag | None] = Flag("--draft", "model", "smaller model with the same tokenizer", "DIR_OR_ID")


class DraftModel(ChainDraft, frozen=True, kw_only=True, tag="draft_model"):
    """A smaller model with the target's tokenizer drafts.

    Attributes:
        model: its folder or hub id.
    """

    model: str

    options: ClassVar[type[MethodOptions]] = DraftModelOptions
    sources: ClassVar[dict[str, SourceKind]] = {"model": "checkpoint"}
    needs_training: ClassVar[str | None] = "a smaller model"
    whole_model: ClassVar[bool] = True

    @classmethod
    def suggest(cls, target: TargetProfile) -> Suggestion | None:
        K = DEFAULT_DRAFT_TOKENS if target.device == "cpu" else _GPU_DRAFT_TOKENS
        least, most = SMALLER
        if not target.drafts:
            low, high = target.parameters / most / 1e6, target.parameters / least / 1e6
            why = (
                f"look for a model of the same family and tokenizer with {low:,.2g} to {high:,.2g} million parameters, "
                "and pass it with --draft; 'specexport train draft' makes it agree with this target more often"
            )
            return Suggestion("draft_model", f"K = {K}", why, 0)
        name, ratio = target.drafts[0]
        why = f"{ratio:.1f} times smaller, the same tokenizer"
        if not least <= ratio <= most:
            why += f"; {least:g} to {most:g} times would be better"
        flags = ("--draft", name, "--num-speculative-tokens", str(K))
        return Suggestion("draft_model", f"{name}, K = {K}", why, 0, flags)


class DraftTraining(DraftRunOptions, frozen=True, kw_only=True):
    """Options of ``specexport train draft``.

    Attributes:
        draft: model to start from, with the target's tokenizer (default: a new Llama).
        layers: layers of a new Llama; required without --draft (default: none).
        hidden: hidden size of a new Llama; required without --draft (default: none).
        divergence: divergence between the target's and the draft's next-token distributions to minimize.
        samples: what to learn: texts of the target, texts of the draft at that step (on-policy), or the data; prompts
            are cut from the data.
        texts: number of texts sampled from the target.
    """

    draft: Annotated[str | None, draft_option("DIR_OR_ID")] = None
    layers: Annotated[int | None, draft_option("N", ge=1, le=64)] = None
    hidden: Annotated[int | None, draft_option("H", ge=32, le=8192)] = None
    divergence: Annotated[Divergence, draft_option()] = "forward_kl"
    samples: Annotated[Literal["target", "draft", "data"], draft_option()] = "target"
    texts: Annotated[int, draft_option("N", ge=1)] = 1024

    def check(self) -> None:
        super().check()
        new = [f"--{name}" for name in ("layers", "hidden") if getattr(self, name) is not None]
        if self.draft is not None and new:
            raise TrainError(f"--draft was given together with {new[0]}, which is for a new draft")
        if self.draft is None and len(new) < 2:
            raise TrainError("no draft to train; expected --draft, or --layers and --hidden for a new one")

    def unused(self) -> Iterator[tuple[str, str]]:
        yield from super().unused()
        if self.samples != "target":
            yield "texts", f"with --samples {self.samples}, which samples none beforehand"


def _report(record: dict[str, Any]) -> Report:
    from specexport.tables import Table  # running a bundle needs none

    options, acceptance = record["options"], record["acceptance"]
    table = Table("", ("draft tokens a step", *map(str, range(1, 7))))
    for name in acceptance["after"]:
        for when in ("before", "after"):
            table.add_row(f"{name}, {when}", *(f"{length:.2f}" for length in acceptance[when][name]))
    yield f"{options['output']}: a draft of {options['target']}; acceptance length over held-out prompts"
    yield table


TRAINING = Training("draft", "Distil a target into a draft model.", DraftTraining, _report, " --layers 4 --hidden 512")
