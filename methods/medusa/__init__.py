"""Speculation by Medusa heads on the target."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from specexport.contract.methods.base import CheckpointOptions, Flag, RankedMethod, SourceKind
from specexport.contract.methods.suggestion import Suggestion, TargetProfile
from specexport.contract.model import BYTES_PER_WEIGHT, Positive, StoredAs
from specexport.contract.options import option, options
from specexport.contract.shapes import Size
from specexport.contract.tensors import CANDIDATES, Tensor
from specexport.contract.tree import TokenTree
from specexport.contract.values import counted
from specexport.runtime.backend import Array
from specexport.runtime.proposal import Ints, Opening, Proposal, Proposer, SlotProposer, SlotView, fill
from specexport.training.options import HiddenStateOptions, Report, Training, accuracy_table, ahead_option

_PUBLISHED_TREES = ((10e9, "mc_sim_7b_63"), (20e9, "vicuna_13b_stage1"), (math.inf, "vicuna_33b_stage1"))
"""Published trees by the greatest number of parameters of a model that they suit (FasterDecoding/Medusa)."""


class MedusaOptions(CheckpointOptions, frozen=True, kw_only=True, tag="medusa"):
    """Options of Medusa heads."""

    flag = Flag("--medusa", "model", "Medusa heads of the target (specexport train medusa)", "DIR")


class Medusa(RankedMethod, frozen=True, kw_only=True, tag="medusa"):
    """Heads on the target's last hidden state, in its step graph (Medusa, arXiv 2401.10774).

    Attributes:
        heads: number of heads, and the greatest depth of a tree.
    """

    model: str
    heads: Size
    parameters: Positive
    weights: StoredAs

    options = MedusaOptions
    sources: ClassVar[Mapping[str, SourceKind]] = {"model": "folder"}
    needs_training = "heads"
    branching = 2

    @classmethod
    def suggest(cls, target: TargetProfile) -> Suggestion | None:
        """See :class:`Method`; heads must be trained for this target, so an available draft ranks higher."""
        if target.device == "gpu":
            tree = next(tree for limit, tree in _PUBLISHED_TREES if target.parameters < limit)
            return Suggestion("medusa", f"tree {tree}", "four heads and a wide tree, where nodes are nearly free", 1)
        tree = "the tree that 'specexport tune tree' finds, 4 to 8 nodes"
        why = "no second model; heads have to be trained, and a CPU pays for every node"
        return Suggestion("medusa", tree, why, 1)

    @property
    def target_outputs(self) -> tuple[Tensor, ...]:
        return (CANDIDATES.sized(heads=self.heads, M=self.candidates),)

    @property
    def stored(self) -> frozenset[StoredAs]:
        return frozenset({self.weights})

    def describe(self) -> str:
        return f"medusa, {self.heads} heads ({self.parameters:,} parameters, {self.weights})"

    def validate_tree(self, tree: TokenTree) -> str | None:
        deep = f"depth {tree.depth}, with {self.heads} heads" if tree.depth > self.heads else None
        return super().validate_tree(tree) or deep

    def memory(self, files: Mapping[str, int], rows: int) -> int:
        return int(self.parameters * BYTES_PER_WEIGHT[self.weights])


_STAGE_2 = "together with the model (--stage 2)"
_heads, _together = (partial(option, group=group) for group in ("heads", _STAGE_2))


class MedusaTraining(HiddenStateOptions, frozen=True, kw_only=True):
    """Options of ``specexport train medusa``.

    Attributes:
        heads: number of heads; head i, from 0, predicts the token i + 2 positions ahead.
        layers: residual blocks a head.
        tie_lm_head: heads end in the model's own projection and are many times smaller.
        decay: head i counts D**i in the loss.
        stage: 1: heads alone; 2: first alone, then both.
        tune: how the model is trained.
        lora_rank: rank of the adapters.
        base_lr: the model's learning rate (default: lr/4 with LoRA, lr/50 with full tuning).
        heads_weight: the loss is the model's plus λ times the heads'.
        heads_first: share of the steps in which the heads are trained alone.
        lm_loss: the model's loss: cross-entropy, or divergence from the original model (default: ce; kl with
            --self-distill).
    """

    heads: Annotated[int, _heads("N", ge=1, le=16)] = 4
    layers: Annotated[int, _heads("N", ge=0, le=16)] = 1
    tie_lm_head: Annotated[bool, _heads()] = False
    decay: Annotated[float, ahead_option("D", gt=0, le=1)] = 0.8
    stage: Annotated[Literal[1, 2], _together()] = 1
    tune: Annotated[Literal["lora", "full"], _together()] = "lora"
    lora_rank: Annotated[int, _together("R", ge=1)] = 16
    base_lr: Annotated[float | None, _together("RATE", gt=0, le=1)] = None
    heads_weight: Annotated[float, _together("λ", gt=0)] = 0.2
    heads_first: Annotated[float, _together("SHARE", ge=0, le=0.95)] = 0.4
    lm_loss: Annotated[Literal["ce", "kl"] | None, _together()] = None

    def unused(self) -> Iterator[tuple[str, str]]:
        yield from super().unused()
        if self.stage == 1:
            for name, declared in options(type(self)).items():
                if name != "stage" and declared.about.get("group") == _STAGE_2:
                    yield name, "without --stage 2, which alone uses it"
        elif self.tune == "full":
            yield "lora_rank", "with --tune full, which has no adapters"


def _report(record: dict[str, Any]) -> Report:
    heads = record["head_accuracy"]
    yield f"{record['options']['output']}: {counted(len(heads), 'head')}; share of held-out tokens they predict"
    yield accuracy_table("head", heads)
    if "lm_loss" in record:
        before, after = record["lm_loss_before"], record["lm_loss"]
        yield f"held-out loss of the model {before:.4f} before, {after:.4f} now, in nats a token"


TRAINING = Training("medusa", "Train Medusa heads for a target, alone or together with it.", MedusaTraining, _report)


# --- proposing --------------------------------------------------------------------------------------------------------
class MedusaProposer(SlotProposer[Ints]):
    """Fills a tree with the heads' candidates at the last token in the target's cache, without a further call.

    Head i has read the text up to that token, t, and predicts token t+2+i. The root of the next step is t+1, so the
    candidates of head i belong to depth 1+i.
    """

    observes = frozenset({CANDIDATES})

    def propose(self, views: Sequence[SlotView]) -> dict[int, Proposal]:
        """See :class:`Proposer`; proposes nothing before the target's first step."""
        proposals = {}
        for view in views:
            candidates = self._slots.get(view.slot)
            if candidates is not None:
                tokens = fill(view.tree, candidates)
                proposals[view.slot] = Proposal(tokens, view.tree, None, candidates)
        return proposals

    def observe(self, slot: int, outputs: Mapping[str, Array], row: int) -> None:
        self._slots[slot] = outputs[CANDIDATES][:, row].copy()


def open_proposer(method: Medusa, opening: Opening) -> Proposer:
    return MedusaProposer()
