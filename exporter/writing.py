"""Writes traced models: a weights file, and the graphs that share it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from specexport.contract.model import (
    BYTES_PER_WEIGHT,
    CacheLayer,
    GraphFiles,
    Model,
    PrecisionInfo,
    QuantizedBefore,
    StateLayer,
)
from specexport.contract.shapes import ShapePoint
from specexport.exporter.build_state import Build
from specexport.exporter.checkpoints.checkpoint import Checkpoint
from specexport.exporter.checkpoints.quiet import failing_as, first_line
from specexport.exporter.external_data import Places
from specexport.exporter.options import QUANTIZED, Storage
from specexport.exporter.pipeline import write_passes
from specexport.exporter.weights import WeightsFile, WeightsReport


@dataclass(frozen=True)
class TracedGraph:
    """A graph of all or the first layers of a checkpoint, with what the manifest records of it.

    Attributes:
        name: the name of a second graph over the same weights; empty for the first.
    """

    model: ir.Model
    points: tuple[ShapePoint, ...]
    cache: tuple[CacheLayer, ...]
    parameters: int
    states: tuple[StateLayer, ...] = ()
    embedding_size: int | None = None
    name: str = ""


def write_models(
    build: Build,
    role: str,
    name: str,
    graphs: list[TracedGraph],
    checkpoint: Checkpoint,
    storage: Storage,
    heads: Storage | None = None,
    shared: Places | None = None,
) -> list[Model]:
    """Writes a weights file and the graphs that share it, which are rewritten in place.

    Args:
        role: the stem of their files.
        heads: the storage of Medusa heads; None for ``storage``.
        shared: tensors of the target that the model may share.

    Returns:
        The manifest's entry of each graph.
    """
    file, title = build.folder / f"{role}.bin", f"writing the {name}'s weights ({storage.kind})"
    total = int(BYTES_PER_WEIGHT[storage.kind] * checkpoint.parameters)  # an estimate; the last report is exact
    done = 0.0

    def advance(size: int) -> None:
        nonlocal done
        done += size / 4 * BYTES_PER_WEIGHT[storage.kind]
        build.progress(title, min(total - 1, int(done)), total)

    models: list[Model] = []
    with WeightsFile(file, storage, heads, checkpoint.tensors, advance, shared) as weights:
        for graph in graphs:
            weights.report = WeightsReport()
            write_passes(graph.model, weights.externalize, branches=storage.branches)
            master = f"{role}.{graph.name}.onnx" if graph.name else f"{role}.onnx"
            ir.save(graph.model, build.folder / master)
            models.append(
                Model(
                    family=checkpoint.family,
                    source=_absolute(checkpoint.source),
                    parameters=graph.parameters,
                    vocab_size=checkpoint.vocab_size,
                    max_positions=checkpoint.max_positions,
                    precision=_precision_info(storage, weights.report, checkpoint),
                    cache=graph.cache,
                    weights=file.name,
                    shared_bytes=weights.shared_bytes,
                    graph=GraphFiles(master=master, points=graph.points),
                    embedding_size=graph.embedding_size,
                    states=graph.states,
                )
            )
    written = file.stat().st_size
    build.progress(title, max(1, written), max(1, written))
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
        block_size=block if quantized else None,
        weight_rms_error=report.rounding.rms if quantized else None,
        not_quantized=report.not_quantized,
        quantized_before=quantized_before,
        only_cpu=report.any_scales,
    )


def _absolute(source: str) -> str:
    """The absolute path of a folder or file; a hub id is unchanged."""
    return str(Path(source).resolve()) if Path(source).exists() else source


def tracing(checkpoint: Checkpoint) -> AbstractContextManager[None]:
    """Context in which a checkpoint is traced; errors name it."""
    named = f"{checkpoint.source}: model family '{checkpoint.family}'"
    return failing_as(lambda error: f"{named} cannot be traced into a static graph: {first_line(error)}")
