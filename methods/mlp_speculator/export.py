"""Reads, writes and exports MLP speculators in the layout of ``ibm-fms`` (``foundation-model-stack/fms-extras``).

A folder holds ``config.json`` (``model_type`` ``mlp_speculator``) and safetensors with ``speculator.emb.{i}.weight``,
``.proj.{i}.weight``, ``.head.{i}.weight``, ``.ln.{i}.weight`` and ``.ln.{i}.bias`` for every stage; tensors that tied
stages share may be stored once or for each stage.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import onnx_ir as ir
import torch
from msgspec import Meta

from specexport.contract import tensors
from specexport.contract.errors import BuildError
from specexport.contract.methods.suggestion import Device
from specexport.contract.model import LoweredAs
from specexport.contract.shapes import ShapePoint, Size
from specexport.contract.signature import stage_outputs
from specexport.contract.tree import TokenTree
from specexport.exporter import trace
from specexport.exporter.build_state import Build, BuildPlan
from specexport.exporter.checkpoints.accuracy import HeadAccuracy, MeasuredConfig, accuracy_config, assumed_chance
from specexport.exporter.checkpoints.checkpoint import Checkpoint, load_reference, reference_states
from specexport.exporter.checkpoints.documents import CONFIG, read_config, require_trained_for
from specexport.exporter.checkpoints.locate import locate
from specexport.exporter.checkpoints.stored import (
    StoredTensor,
    head_tensors,
    require_tensors,
    save_head_tensors,
    shapes_of,
)
from specexport.exporter.method import Array, MethodExporter, TargetInfo, Verification
from specexport.graphs.propose import MAX_CANDIDATES
from specexport.methods.mlp_speculator import MAX_STAGES, MlpSpeculator, MlpSpeculatorOptions, speculator_inputs
from specexport.methods.mlp_speculator.graph import SpeculatorModule, SpeculatorStages

WIDTHS = (5, 4, 3)
"""Default of ``top_k_tokens_per_head``, as in fms-extras; further stages repeat the last width."""

_PREFIX = "speculator."

_Width = Annotated[int, Meta(ge=1, le=MAX_CANDIDATES)]
_STAGE_ACCURACY = 0.6
"""Assumed accuracy of a stage after correct tokens."""
_NEVER_SEEN = 1e-6
"""Weight of a path that was never right when accuracy was measured, relative to its assumed probability."""


class _Config(MeasuredConfig, kw_only=True):
    """The fields that are read from ``config.json``; other keys are ignored.

    One of these is ``n_candidates``, the number of paths that fms-extras keeps, which the tree determines here.
    """

    model_type: Literal["mlp_speculator"]
    vocab_size: Size
    emb_dim: Size
    n_predict: Annotated[int, Meta(ge=1, le=MAX_STAGES)]
    inner_dim: Annotated[int, Meta(ge=0, le=2**24)] = 0
    top_k_tokens_per_head: list[_Width] | None = None
    scale_input: bool = False
    tie_weights: bool = False


@dataclass(frozen=True)
class SpeculatorOutline:
    """A speculator checkpoint's configuration.

    Attributes:
        vocab: V, see :class:`~specexport.methods.mlp_speculator.graph.SpeculatorStages` for the sizes.
        hidden: H of the target that it was trained for.
        widths: most children of a node at each stage, ``top_k_tokens_per_head``.
        accuracy: the stages' accuracy after correct tokens, if training measured it.
    """

    path: Path
    vocab: int
    hidden: int
    inner: int
    stages: int
    widths: tuple[int, ...]
    scale_input: bool
    tied: bool
    accuracy: HeadAccuracy | None

    def make(self) -> SpeculatorStages:
        """New stages of these sizes, with torch's default initialization."""
        return SpeculatorStages(
            self.vocab, self.hidden, self.inner, self.stages, scale_input=self.scale_input, tied=self.tied
        )

    def require_fit(self, *, hidden: int, vocab: int) -> None:
        """Checks a speculator, by its files' headers, against a target's hidden size and vocabulary."""
        sizes = {"emb_dim": (self.hidden, hidden), "vocab_size": (self.vocab, vocab)}
        require_trained_for(self.path / CONFIG, "speculator", sizes)
        stored = self._stored()
        with torch.device("meta"):
            stages = self.make()
        tied = " that share their weights" if self.tied else ""
        what = (
            f"a speculator of {self.stages} stages{tied}, as {CONFIG} says (n_predict), with names such as "
            f"'{_PREFIX}emb.0.weight', vocab_size {self.vocab}, emb_dim {self.hidden} and inner_dim {self.inner}"
        )
        optional = {name for names in _shared(stages) for name in names[1:]}
        optional |= {names[0] for names in _shared(stages) if stored.keys() & names[1:]}
        require_tensors(self.path, stored, shapes_of(stages), what, optional, lambda name: f"'{_PREFIX}{name}'")

    def load(self) -> SpeculatorStages:
        """Loads a speculator that has passed :meth:`require_fit`, in fp32 and evaluation mode."""
        stored = self._stored()
        with torch.device("meta"):
            stages = self.make()
        state: dict[str, torch.Tensor] = {}
        for names in _shared(stages):
            first, *others = [stored[name] for name in names if name in stored]
            tensor = first.finite(self.path)
            for other in others:
                if not torch.equal(tensor, other.read().to(torch.float32)):
                    raise BuildError(
                        f"{self.path}: tie_weights is true, but {other.name!r} and {first.name!r} differ; expected one "
                        "for all"
                    )
            state |= dict.fromkeys(names, tensor)
        stages.load_state_dict(state, assign=True)
        return stages.eval().requires_grad_(False)

    def _stored(self) -> dict[str, StoredTensor]:
        """The tensors by the stages' parameter names."""
        return {tensor.name.removeprefix(_PREFIX): tensor for tensor in head_tensors(self.path)}


def read_speculator(source: str) -> SpeculatorOutline:
    """Reads a speculator's configuration from a folder or hub id, without its weights."""
    folder = locate(source)
    path = folder / CONFIG
    config = read_config(path, _Config, "an MLP speculator")
    stages = config.n_predict
    widths = tuple(config.top_k_tokens_per_head or default_widths(stages))
    if len(widths) != stages:
        raise BuildError(
            f"{path}: top_k_tokens_per_head is {list(widths)} and n_predict {stages}; expected a width for each stage"
        )
    return SpeculatorOutline(
        path=folder,
        vocab=config.vocab_size,
        hidden=config.emb_dim,
        inner=config.inner_dim or config.emb_dim,
        stages=stages,
        widths=widths,
        scale_input=config.scale_input,
        tied=config.tie_weights,
        accuracy=config.accuracy(path, stages, "stages"),
    )


def default_widths(stages: int) -> tuple[int, ...]:
    """The default ``top_k_tokens_per_head``."""
    return tuple(WIDTHS[min(stage, len(WIDTHS) - 1)] for stage in range(stages))


def _shared(speculator: SpeculatorStages) -> list[list[str]]:
    """The names of each parameter; tied parameters have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in speculator.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def save_speculator(
    folder: Path,
    speculator: SpeculatorStages,
    *,
    widths: Sequence[int] | None = None,
    accuracy: HeadAccuracy | None = None,
) -> None:
    """Writes a speculator in the layout of ``fms-extras`` and vLLM; tied tensors are stored once.

    ``widths`` is ``top_k_tokens_per_head``; None for :func:`default_widths`. The accuracy is stored under keys that
    other readers ignore.
    """
    stages = len(speculator)
    config: dict[str, Any] = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": speculator.vocab,
        "emb_dim": speculator.hidden,
        "inner_dim": speculator.inner,
        "n_predict": stages,
        "top_k_tokens_per_head": list(widths or default_widths(stages)),
        "n_candidates": 5,
        "scale_input": speculator.scale_input,
        "tie_weights": speculator.tied,
        "torch_dtype": str(next(speculator.parameters()).dtype).removeprefix("torch."),
        **accuracy_config(accuracy),
    }
    state = {f"{_PREFIX}{name}": tensor.detach() for name, tensor in speculator.named_parameters()}
    save_head_tensors(folder, config, state)


class MlpSpeculatorExporter(MethodExporter[MlpSpeculatorOptions, MlpSpeculator]):
    """Exports stages that draft from the target's last hidden state."""

    def resolve(self, options: MlpSpeculatorOptions, target: TargetInfo) -> MlpSpeculator:
        outline = read_speculator(options.model)
        outline.require_fit(hidden=target.hidden, vocab=target.vocab)
        return MlpSpeculator(
            trees=(),
            model=options.model,
            stages=outline.stages,
            hidden=outline.hidden,
            candidates=min(MAX_CANDIDATES, outline.vocab),
        )

    def tree_of_size(self, method: MlpSpeculator, size: int) -> TokenTree:
        """See :class:`MethodExporter`; no wider than the speculator's widths."""
        outline = read_speculator(method.model)

        def weight(path: tuple[int, ...]) -> float:
            if any(rank >= width for rank, width in zip(path, outline.widths, strict=False)):
                return 0.0
            assumed = assumed_chance(path, [_STAGE_ACCURACY])
            return assumed if outline.accuracy is None else outline.accuracy.paths.get(path, _NEVER_SEEN * assumed)

        tree = TokenTree.best(weight, size + 1, max(outline.widths), outline.stages)
        if len(tree) != size + 1:
            raise BuildError(
                f"num_speculative_tokens is {size}, and the widest tree of {outline.path} has {len(tree) - 1}: its "
                f"top_k_tokens_per_head is {list(outline.widths)}. Ask for fewer, or name a tree",
                param="num_speculative_tokens",
            )
        return tree

    def default_trees(self, method: MlpSpeculator, device: Device) -> tuple[TokenTree, ...]:
        widest = sum(itertools.accumulate(read_speculator(method.model).widths, operator.mul))
        return (self.tree_of_size(method, min(*method.default_sizes, widest)),)

    def points(self, method: MlpSpeculator, plan: BuildPlan) -> tuple[ShapePoint, ...]:
        """See :class:`MethodExporter`: every depth of its trees at every width of their levels; there is no cache."""
        widths = sorted({1, *(tree.level_width for tree in method.token_trees())})
        shapes = itertools.product(plan.depths(method), widths, plan.batches)
        return plan.at_caches([(batch, width, 0, depth) for depth, width, batch in shapes], (0,))

    def plan(self, options: MlpSpeculatorOptions, target: TargetInfo) -> MlpSpeculator:
        """See :class:`MethodExporter`; stages beyond the deepest tree are never used."""
        planned = super().plan(options, target)
        return msgspec.structs.replace(planned, stages=max(tree.depth for tree in planned.token_trees()))

    def load(self, method: MlpSpeculator, build: Build) -> Checkpoint:
        with build.during("loading the speculator"):
            outline = read_speculator(method.model)
            stages = outline.load()
            stages.keep_first(method.stages)
        return Checkpoint(
            source=method.model,
            path=outline.path,
            family=method.name,
            model=stages,
            cache=(),
            vocab_size=outline.vocab,
            input_vocab=outline.vocab,
            max_positions=build.max_positions,
        )

    def trace(self, method: MlpSpeculator, draft: Checkpoint, build: Build) -> ir.Model:
        return trace_speculator(draft.model, build.options.lowering)

    def compare(self, method: MlpSpeculator, run: Verification) -> Iterator[tuple[Array, Array]]:
        """See :class:`MethodExporter`; each token must be its stage's most probable one."""
        manifest = run.bundle.manifest
        checkpoint, speculator = run.source(None), run.source(method)
        recorded = run.recorded(method)
        outline = read_speculator(str(speculator))
        outline.require_fit(hidden=method.hidden, vocab=manifest.target.vocab_size)
        model, stages = load_reference(checkpoint, manifest.target), outline.load()
        for text, drafted in recorded:
            # The target's cache holds all tokens except the last, which is the root.
            _, hidden = reference_states(model, np.array(text[:-1]))
            with torch.no_grad():
                expected = stages.logits(hidden[-1], torch.tensor([text[-1], *drafted[:-1].tolist()]))
            yield expected.numpy(), drafted


def trace_speculator(speculator: SpeculatorStages, lowering: LoweredAs) -> ir.Model:
    """The propose graph of an MLP speculator (:class:`~specexport.methods.mlp_speculator.graph.SpeculatorModule`)."""
    inputs: trace.Inputs = [*speculator_inputs(len(speculator), speculator.hidden), tensors.SAMPLING]
    outputs = stage_outputs("M", len(speculator), "T")
    return trace.trace_module(SpeculatorModule(speculator), inputs, outputs, lowering)


EXPORTER = MlpSpeculatorExporter()
