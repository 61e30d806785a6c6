"""What tests of the step program share, whichever library runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specexport.contract.engines import ProgramGraph
from specexport.contract.reading import read_manifest
from specexport.exporter.engines.bundle import compile_bundle
from specexport.exporter.engines.options import CompileOptions
from specexport.exporter.trace import write_program
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.speculative import PLAIN

GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95, top_k=40, seed=5, ignore_eos=True)
TYPICAL = SAMPLED.replace(acceptance="typical", posterior_threshold=0.3)
WAYS = {
    "dice-near": ("draft_model",),
    "dice-mixed": ("draft_model", "ngram"),
    "dice-mixed-portable": ("draft_model", "ngram"),
    "dice-self": ("self_draft",),
    "dice-medusa": ("medusa",),
    "dice-medusa-draft": ("medusa_draft",),
    "dice-mlp": ("mlp_speculator",),
    "dice-eagle3": ("eagle3",),
    "dice-dflash": ("dflash",),
    "dice-mtp-cuda": ("mtp",),
}
"""Bundles, and the methods of theirs whose steps stay on the device."""


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


def says_what_it_says(on_gpu: Engine, cpu: Engine, methods: tuple[str, ...], execution: str) -> None:
    """Checks greedy, lossless and typical acceptance of chains and trees: the same noise, the same tokens."""
    for params, prompt in ((GREEDY, [7, 9, 11]), (SAMPLED, list(range(12)) * 2), (TYPICAL, [5] * 20), (GREEDY, [5])):
        for method in (*methods, None):
            ours = on_gpu.generate(prompt, params, method or PLAIN)
            same(ours, cpu.generate(prompt, params, method or PLAIN))
            assert ours.stats.execution == execution
    for count in (len(tree) - 1 for tree in on_gpu.methods[methods[0]].token_trees()):
        ours, theirs = (
            engine.generate([7, 9, 11], SAMPLED, {"method": methods[0], "num_speculative_tokens": count})
            for engine in (on_gpu, cpu)
        )
        same(ours, theirs)
