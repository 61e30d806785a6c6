"""Loads and writes draft models, for all methods that have one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
from tokenizers import Tokenizer

from specexport.contract.errors import BuildError
from specexport.contract.model import Model
from specexport.contract.shapes import ShapePoint
from specexport.exporter.build_state import Build
from specexport.exporter.checkpoints import parity
from specexport.exporter.checkpoints.checkpoint import Checkpoint, load_checkpoint, load_tokenizer
from specexport.exporter.checkpoints.locate import locate
from specexport.exporter.checkpoints.tokens import require_same_tokenizer
from specexport.exporter.writing import Part, write_models


def require_tokenizer(source: str, target: Path, tokenizer: Tokenizer) -> None:
    """Refuses a draft with another tokenizer than the target's."""
    path = locate(source)
    require_same_tokenizer(tokenizer, load_tokenizer(path).tokenizer, target, path)


def load_draft(source: str, build: Build) -> Checkpoint:
    """Loads a draft and checks that our lowering computes what it does.

    Raises:
        BuildError: it was made for shorter texts, or cannot be lowered.
    """
    with build.during("loading the draft"):
        draft = load_checkpoint(source)
    if draft.states and build.options.backend != "onnxruntime":
        raise BuildError(
            f"{draft.source}: model family '{draft.family}' has layers without attention, which run on the CPU alone "
            "yet; choose another draft, or build it with --backend onnxruntime"
        )
    longest = build.plan.max_seq_len
    if draft.max_positions < longest:
        raise BuildError(
            f"max_seq_len is {longest}, but the draft {draft.source} was made for {draft.max_positions} positions; "
            f"pass --max-seq-len {draft.max_positions} or choose another draft"
        )
    with build.during("checking the draft's lowering"):
        parity.same_as_eager(draft, build.options.lowering)
    return draft


def write_draft(
    draft: Checkpoint, build: Build, name: str, tracer: Callable[[], ir.Model], points: tuple[ShapePoint, ...]
) -> Model:
    """Traces a draft's graph and writes it into the bundle's folder ``draft``."""
    with build.during("tracing the draft"):
        part = Part(name, traced(draft, tracer), points, draft.cache, draft.parameters)
    (model,) = write_models(build, "draft", [part], draft, build.options.proposing)
    return model


def traced(checkpoint: Checkpoint, tracer: Callable[[], ir.Model]) -> ir.Model:
    """The graph that ``tracer`` returns, with errors that name the checkpoint.

    Raises:
        BuildError: torch cannot trace the model.
    """
    try:
        return tracer()
    except BuildError:
        raise
    except Exception as error:  # torch.export raises many unrelated types
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BuildError(
            f"{checkpoint.source}: model family '{checkpoint.family}' cannot be traced into a static graph: {reason}"
        ) from error
