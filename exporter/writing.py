"""A traced model written: one weights file, and its graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import onnx_ir.passes.common as passes

from specexport.contract.model import CacheLayer, GraphFiles, LoweredAs, Model, PrecisionInfo, QuantizedBefore
from specexport.contract.shapes import ShapePoint
from specexport.exporter.checkpoints.checkpoint import Checkpoint
from specexport.exporter.options import QUANTIZED, Storage
from specexport.exporter.passes.experts import lower_experts
from specexport.exporter.weights import WeightsFile, WeightsReport

Progress = Callable[[str, int, int], None]
"""Called with a step's name, how much of it is done, and how much there is in all."""


@dataclass(frozen=True)
class Part:
    """A traced graph of a checkpoint: all of its layers or the first ones."""

    name: str
    model: ir.Model
    at: tuple[ShapePoint, ...]
    cache: tuple[CacheLayer, ...]
    parameters: int


def write_models(
    folder: Path,
    role: str,
    parts: list[Part],
    checkpoint: Checkpoint,
    stored: Storage,
    heads: Storage | None,
    lowering: LoweredAs,
    progress: Progress,
) -> list[Model]:
    """Writes one weights file and masters into a folder of the bundle, ``role``, and describes them."""
    (folder / role).mkdir(parents=True)
    total = 4 * checkpoint.parameters
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done = min(total, done + size)
        progress(f"writing the {role}'s weights ({stored.kind})", done, total)

    reports = []
    with WeightsFile(folder / role / "weights.bin", advance) as weights:
        for part in parts:
            lower_experts(part.model, branches=stored.branches)
            weights.externalize(part.model.graph, stored, heads, checkpoint.tensors)
            reports.append(weights.report)
            weights.report = WeightsReport()
    progress(f"writing the {role}'s weights ({stored.kind})", total, total)
    made = []
    for part, report in zip(parts, reports, strict=True):
        passes.RemoveUnusedNodesPass()(part.model)
        for node in ir.traversal.RecursiveGraphIterator(part.model.graph):
            node.name = node.outputs[0].name  # else some count what the process made before
        master = folder / role / f"{part.name}.onnx"
        ir.save(part.model, master)
        made.append(
            Model(
                family=checkpoint.family,
                source=_absolute(checkpoint.source),
                parameters=part.parameters,
                vocab_size=checkpoint.vocab_size,
                max_positions=checkpoint.max_positions,
                precision=_precision_info(stored, report, checkpoint),
                cache=part.cache,
                weights=f"{role}/weights.bin",
                graph=GraphFiles(master=f"{role}/{part.name}.onnx", points=part.at),
            )
        )
    return made


def _precision_info(stored: Storage, report: WeightsReport, checkpoint: Checkpoint) -> PrecisionInfo:
    quantized = stored.kind in QUANTIZED
    block = report.kept_block or (stored.block_size if stored.kind != "fp8" else None)
    before = None
    if checkpoint.quantized_in:
        before = QuantizedBefore(
            format=checkpoint.quantized_in,
            kept=len(report.kept),
            converted=len(report.converted),
            converted_rms_error=report.converted_error if report.converted else None,
            rest=stored.rest,
        )
    return PrecisionInfo(
        weights=stored.kind,
        compute="fp32",
        cache="fp32",
        block_size=block if quantized else None,
        weight_rms_error=report.rms_error if quantized else None,
        not_quantized=report.left,
        quantized_before=before,
        only_cpu=report.any_scales,
    )


def _absolute(source: str) -> str:
    """A folder or file by its place, whichever it is seen from; a hub id as it is."""
    return str(Path(source).resolve()) if Path(source).exists() else source
