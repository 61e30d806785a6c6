"""Checks and measures everything that needs a GPU, on a machine that has one.

    python -m benchmarks.gpu [--params 1e9] [--quick]

Finds what can run here (ONNX Runtime's CUDA provider, TensorRT, TensorRT-RTX), builds bundles of the demo models and
of a benchmark-size pair (the demo pair, enlarged without changing what it says), and compiles engines of them for this
GPU. For each library it compares with the CPU, compares speculative with plain decoding, checks that tree paths are
committed, and measures the gaps between launches, a step against what the memory's bandwidth allows, and speculation
against plain decoding and against transformers on the same GPU. Writes ``benchmarks/results/<gpu>-<date>.json`` and
prints a table.

Exits with 0 if every check passed, with 1 if one failed, and with 2 where there is no GPU: then nothing was checked.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gpu.checks import Check, launches, lossless, parity, together, tree_commit
from benchmarks.gpu.machine import Folder, Found, compiled, find
from benchmarks.gpu.timing import copy_bandwidth
from specexport.contract.engines import ComputedIn
from specexport.contract.errors import SpecExportError
from specexport.runtime.cuda.api import Cuda, CudaDevice

ROOT = Path(__file__).resolve().parents[2]
K = 4
SLOTS = 4
SAMPLES, QUICK_SAMPLES = 3000, 400


@dataclass(frozen=True)
class Work:
    """One thing to do: what it is called, and what does it."""

    title: str
    run: Callable[[], list[Check]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs everything; see the module."""
    args = _parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 140)
    try:
        cuda = Cuda.load()
    except SpecExportError as error:
        console.print(f"no GPU can be used here, so nothing was checked: {error}", soft_wrap=True)
        return 2
    console.print(f"[bold]{cuda.device}[/bold], {cuda.device.total / 2**30:.1f} GiB")
    libraries, missing = find(cuda)
    for name, why in missing.items():
        console.print(f"{name}: not here ({why})", soft_wrap=True)
    if not libraries:
        console.print("no library here can run a bundle on this GPU, so nothing was checked")
        return 2
    bandwidth = copy_bandwidth(cuda)
    console.print(f"copies on the device move {bandwidth / 1e9:.0f} GB/s, read and written")
    texts = [json.loads(line)["text"] for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    texts = texts[: 3 if args.quick else 12]
    checks: list[Check] = []
    for found in libraries:
        for work in plan(args, found, cuda.device, texts, bandwidth):
            console.print(f"{found.backend}: {work.title}")
            checks += attempt(found.backend, work)
    report = {
        "device": asdict(cuda.device),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "backends": {found.backend: found.version for found in libraries},
        "missing": missing,
        "copy_bandwidth_gb_s": bandwidth / 1e9,
        "options": {name: str(value) for name, value in vars(args).items()},
        "checks": [asdict(check) for check in checks],
    }
    console.print(table(checks))
    where = args.out / f"{_slug(cuda.device.name)}-{datetime.date.today().isoformat()}.json"
    where.parent.mkdir(parents=True, exist_ok=True)
    where.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    failed = [check for check in checks if check.passed is False]
    console.print(f"{where}: {len(checks)} results, {len(failed)} failed")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=1e9, help="of the enlarged target (default: 1e9)")
    parser.add_argument("--draft-params", type=float, default=60e6, help="of the enlarged draft (default: 60e6)")
    parser.add_argument(
        "--precision",
        default="fp16",
        choices=("fp32", "fp16", "bf16", "int8", "int4", "fp8"),
        help="of the enlarged pair's weights (default: fp16, which ONNX Runtime computes in fp32)",
    )
    parser.add_argument("--lowerings", default="native,portable", help="which graphs to check (default: %(default)s)")
    parser.add_argument("--models", type=Path, default=ROOT / "examples" / "models")
    parser.add_argument("--prompts", type=Path, default=ROOT / "examples" / "prompts" / "held_out.jsonl")
    parser.add_argument("--work", type=Path, default=ROOT / ".cache" / "gpu", help="keeps models and bundles")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--quick", action="store_true", help="the demo models only, and fewer samples")
    return parser


def attempt(backend: str, work: Work) -> list[Check]:
    """Does one thing; what goes wrong in it is its result, and hides nothing of what the others say."""
    try:
        return [dataclasses.replace(check, name=f"{work.title.split(',')[0]}: {check.name}") for check in work.run()]
    except Exception as error:
        return [Check(backend, work.title, False, f"{type(error).__name__}: {error}", "no error")]


def plan(args: argparse.Namespace, found: Found, device: CudaDevice, texts: list[str], bandwidth: float) -> list[Work]:
    """What is done with a library, in order."""
    made: list[Work] = []
    for lowering in args.lowerings.split(","):
        for compute in found.computes:
            made += _on_demo_models(args, found, device, texts, lowering, compute)
        if not args.quick:
            run = functools.partial(_benchmark, args, found, device, texts, bandwidth, lowering)
            made.append(Work(f"{lowering}, benchmark-size pair", run))
    return made


def _on_demo_models(
    args: argparse.Namespace, found: Found, device: CudaDevice, texts: list[str], lowering: str, compute: ComputedIn
) -> list[Work]:
    samples = QUICK_SAMPLES if args.quick else SAMPLES

    def demo(name: str, slots: int = 1, **speculation: Any) -> Folder:
        def make() -> Path:
            from benchmarks.pair import built  # torch and transformers come with it

            return built(
                args.work / f"demo-{name}-{lowering}-{compute}",
                args.models / "demo-target",
                **speculation,
                precision=compute,
                draft_precision=compute,
                max_seq_len=512,
                max_batch_size=slots,
                lowering=lowering,
                backend="onnxruntime-cuda",  # with the step program's graphs; engines of those are compiled too
            )

        return lambda: compiled(make, found, device, compute, slots)

    pair = demo("draft", draft=str(args.models / "demo-draft"), num_speculative_tokens=K)
    batch = demo("draft-batch", SLOTS, draft=str(args.models / "demo-draft"), num_speculative_tokens=K)
    heads = demo("medusa", medusa=str(args.models / "demo-medusa"))
    backend, name = found.backend, f"{lowering} {compute}"
    return [
        Work(f"{name}, demo pair: logits", lambda: parity(pair(), backend, compute, texts)),
        Work(f"{name}, demo pair: texts", lambda: lossless(pair(), backend, texts, samples)),
        Work(f"{name}, demo target with heads: texts", lambda: lossless(heads(), backend, texts, samples)),
        Work(f"{name}, demo target with heads: commits", lambda: tree_commit(heads(), backend, compute, texts[0])),
        Work(f"{name}, demo pair: requests", lambda: together(batch(), backend, SLOTS, compute, texts)),
        Work(f"{name}, demo pair: launches", lambda: launches(pair(), backend, texts)),
    ]


def _benchmark(
    args: argparse.Namespace, found: Found, device: CudaDevice, texts: list[str], bandwidth: float, lowering: str
) -> list[Check]:
    from benchmarks.gpu.decoding import Pair, benchmark
    from benchmarks.inflate import DRAFT_WIDTH_PER_LAYER, WIDTH_PER_LAYER
    from benchmarks.pair import built, inflated_pair
    from specexport.exporter.engines.bundle import default_compute

    sizes = {"demo-target": (args.params, WIDTH_PER_LAYER), "demo-draft": (args.draft_params, DRAFT_WIDTH_PER_LAYER)}
    target, draft = inflated_pair(args.models, args.work, sizes=sizes)

    def make() -> Path:
        return built(
            args.work / f"bench.{target.name}.{args.precision}.{lowering}",
            target,
            draft=str(draft),
            num_speculative_tokens=K,
            precision=args.precision,
            draft_precision=args.precision,
            max_seq_len=512,
            max_batch_size=1,
            lowering=lowering,
            backend="onnxruntime-cuda",
        )

    compute: ComputedIn = "fp32" if found.engines is None else default_compute(args.precision)
    folder = compiled(make, found, device, compute)
    return benchmark(Pair(target, draft, folder, K, compute), found.backend, texts, bandwidth)


def table(checks: list[Check]) -> Table:
    """The results, one a row."""
    shown = Table(title="GPU acceptance", title_justify="left")
    for name in ("backend", "what", "found", "expected", ""):
        shown.add_column(name)
    words = {True: "[green]passed[/green]", False: "[red]FAILED[/red]", None: ""}
    for check in checks:
        shown.add_row(check.backend, check.name, check.found, check.expected, words[check.passed])
    return shown


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main())
