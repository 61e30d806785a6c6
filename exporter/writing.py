"""Loads and traces drafts, and writes models: a weights file, and the graphs that share it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import onnx_ir as ir
from tokenizers import Tokenizer

from specexport.contract.errors import BuildError
from specexport.contract.model import CacheLayer, GraphFiles, Model, PrecisionInfo, QuantizedBefore
from specexport.contract.shapes import ShapePoint
from specexport.exporter.build_state import Build
from specexport.exporter.checkpoints import parity
from specexport.exporter.checkpoints.checkpoint import Checkpoint, load_checkpoint
from specexport.exporter.checkpoints.config import read_model_config
from specexport.exporter.checkpoints.locate import locate
from specexport.exporter.checkpoints.tokenizer import load_tokenizer, require_same_tokenizer
from specexport.exporter.options import QUANTIZED, Storage
from specexport.exporter.pipeline import run_passes, write_passes
from specexport.exporter.weights import WeightsFile, WeightsReport


@dataclass(frozen=True)
class TracedGraph:
    """A graph of a checkpoint's layers, all or the first ones.

    Attributes:
        points: its shape points.
    """

    name: str
    model: ir.Model
    points: tuple[ShapePoint, ...]
    cache: tuple[CacheLayer, ...]
    parameters: int


def write_models(
    build: Build,
    role: str,
    graphs: list[TracedGraph],
    checkpoint: Checkpoint,
    storage: Storage,
    heads: Storage | None = None,
) -> list[Model]:
    """Writes one weights file, and the graphs that share it, into the folder ``role``; graphs are rewritten in place.

    ``heads`` is the storage of Medusa heads; None for ``storage``.

    Returns:
        The manifest's entry of each.
    """
    folder, title = build.folder / role, f"writing the {role}'s weights ({storage.kind})"
    folder.mkdir(parents=True)
    total = 4 * checkpoint.parameters
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done = min(total, done + size)
        build.progress(title, done, total)

    models: list[Model] = []
    with WeightsFile(folder / "weights.bin", advance) as weights:
        for graph in graphs:
            weights.report = WeightsReport()
            store = partial(weights.externalize, storage=storage, heads=heads, checkpoint=checkpoint.tensors)
            run_passes(graph.model, write_passes(store, branches=storage.branches))
            ir.save(graph.model, folder / f"{graph.name}.onnx")
            models.append(
                Model(
                    family=checkpoint.family,
                    source=_absolute(checkpoint.source),
                    parameters=graph.parameters,
                    vocab_size=checkpoint.vocab_size,
                    max_positions=checkpoint.max_positions,
                    precision=_precision_info(storage, weights.report, checkpoint),
                    cache=graph.cache,
                    weights=f"{role}/weights.bin",
                    graph=GraphFiles(master=f"{role}/{graph.name}.onnx", points=graph.points),
                )
            )
    build.progress(title, total, total)
    return models


def _precision_info(storage: Storage, report: WeightsReport, checkpoint: Checkpoint) -> PrecisionInfo:
    quantized = storage.kind in QUANTIZED
    block = report.kept_block or (storage.block_size if storage.kind != "fp8" else None)
    quantized_before = None
    if checkpoint.quantized_in:
        quantized_before = QuantizedBefore(
            format=checkpoint.quantized_in,
            kept=len(report.kept),
            converted=len(report.converted),
            converted_rms_error=report.rounded_again.rms if report.converted else None,
            rest=storage.rest,
        )
    return PrecisionInfo(
        weights=storage.kind,
        compute="fp32",
        cache="fp32",
        block_size=block if quantized else None,
        weight_rms_error=report.rounding.rms if quantized else None,
        not_quantized=report.not_quantized,
        quantized_before=quantized_before,
        only_cpu=report.any_scales,
    )


def _absolute(source: str) -> str:
    """The absolute path of a folder or file; a hub id is unchanged."""
    return str(Path(source).resolve()) if Path(source).exists() else source


def require_tokenizer(source: str, target: Path, tokenizer: Tokenizer) -> None:
    """Refuses a draft whose tokenizer differs from the target's."""
    path = locate(source)
    require_same_tokenizer(tokenizer, load_tokenizer(path).tokenizer, target, path)


def require_length(source: str, max_seq_len: int) -> None:
    """Refuses a draft that was made for shorter texts, by its configuration: before the target is written."""
    positions = getattr(read_model_config(locate(source)), "max_position_embeddings", None)
    if isinstance(positions, int):
        _require_positions(source, positions, max_seq_len)


def _require_positions(source: str, positions: int, max_seq_len: int) -> None:
    if positions < max_seq_len:
        raise BuildError(
            f"max_seq_len (max_model_len) is {max_seq_len}, but the draft {source} was made for {positions} positions; "
            f"set it to at most {positions}, or choose another draft"
        )


def load_draft(source: str, build: Build) -> Checkpoint:
    """Loads a draft and checks that our lowering computes the same.

    Raises:
        BuildError: it supports only shorter texts, or cannot be lowered.
    """
    with build.during("loading the draft"):
        draft = load_checkpoint(source)
    if draft.states and build.options.backend != "onnxruntime":
        raise BuildError(
            f"{draft.source}: model family '{draft.family}' has layers without attention, which run on the CPU alone "
            "yet; choose another draft, or build it with --backend onnxruntime"
        )
    _require_positions(source, draft.max_positions, build.plan.max_seq_len)
    with build.during("checking the draft's lowering"):
        parity.same_as_eager(draft, build.options.lowering)
    return draft


def write_draft(
    draft: Checkpoint,
    build: Build,
    tracer: Callable[[], ir.Model],
    points: tuple[ShapePoint, ...],
    *,
    role: str = "draft",
    title: str = "draft",
    name: str = "propose",
) -> Model:
    """Writes the graph that ``tracer`` returns into the bundle's folder ``role``; ``title`` is shown as progress.

    Raises:
        BuildError: torch cannot trace it.
    """
    with build.during(f"tracing the {title}"):
        graph = TracedGraph(name, trace_checkpoint(draft, tracer), points, draft.cache, draft.parameters)
    (model,) = write_models(build, role, [graph], draft, build.options.draft_storage)
    return model


def trace_checkpoint(checkpoint: Checkpoint, tracer: Callable[[], ir.Model]) -> ir.Model:
    """Calls ``tracer``; errors name the checkpoint.

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
