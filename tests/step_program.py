"""What tests of the step program share, whichever library runs it."""

from pathlib import Path
from typing import Any

from specexport.contract.engines import ProgramGraph
from specexport.contract.reading import read_manifest
from specexport.exporter.engines.bundle import compile_bundle
from specexport.exporter.options import CompileOptions
from specexport.exporter.trace import write_program
from specexport.runtime import SamplingParams

GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95, top_k=40, seed=5, ignore_eos=True)
TYPICAL = SAMPLED.replace(acceptance="typical", posterior_threshold=0.3)


def program_of(folder: Path) -> tuple[ProgramGraph, ...]:
    """Traces the step program's graphs into a bundle."""
    manifest = read_manifest(folder)
    return write_program(folder, manifest.methods, manifest.target.cache, manifest.lowering)


def for_onnxruntime(folder: Path) -> Path:
    """Makes a bundle one for onnxruntime-cuda that computes in fp32, as ``specexport compile`` does."""
    compile_bundle(folder, CompileOptions("onnxruntime-cuda", compute="fp32"))
    return folder


def same(ours: Any, theirs: Any) -> None:
    """Checks that two requests said the same, in the same steps."""
    assert ours.token_ids == theirs.token_ids
    assert (ours.stats.steps, ours.stats.drafted, ours.stats.accepted, ours.stats.accepted_at) == (
        theirs.stats.steps,
        theirs.stats.drafted,
        theirs.stats.accepted,
        theirs.stats.accepted_at,
    )
