"""Run every engine on the same prompts and show what they reached."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.common import new_table, open_console, write_report
from benchmarks.peers.convert import OPTIONS, ROLES, convert, last_lines
from benchmarks.peers.job import UNCOUNTED, Job, thread_environment
from benchmarks.peers.setup import SEPARATE, python_of

REPO = Path(__file__).resolve().parents[2]
NAMES = {
    "specexport": "specexport",
    "transformers": "transformers",
    "ort": "ONNX Runtime GenAI",
    "openvino": "OpenVINO GenAI",
}
# Plain decoding with either attention implementation; the better one counts. Drafts allow only the first.
PLAIN_OPTIONS: dict[str, list[dict[str, str]]] = {"openvino": [{"attention": "PA"}, {"attention": "SDPA"}]}


@dataclass
class Variant:
    """One engine at one precision, with drafts of k tokens or, where k is 0, without."""

    engine: str
    precision: str
    k: int
    version: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    prompts: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    def speed(self, kind: str) -> float:
        """Tokens per second over all prompts together, `kind` being decode or end_to_end."""
        return len(self.prompts) / sum(1 / float(prompt[f"{kind}_tokens_per_s"]) for prompt in self.prompts)

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens that one step of the target gave."""
        return statistics.mean(float(prompt["tokens_per_step"]) for prompt in self.prompts)

    def same_as(self, other: Variant) -> int:
        """How many prompts both continued with the same tokens."""
        pairs = zip(self.prompts, other.prompts, strict=True)
        return sum(mine["tokens"] == theirs["tokens"] for mine, theirs in pairs)


def read_prompts(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The prompts as token ids, all of the same length."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.target)
    prompts = []
    with args.prompts.open(encoding="utf-8") as lines:
        for line in lines:
            prompt = json.loads(line)
            tokens = tokenizer(prompt["text"])["input_ids"][: args.prompt_tokens]
            if len(tokens) == args.prompt_tokens:
                prompts.append({"id": prompt["id"], "tokens": tokens})
            if len(prompts) == args.num_prompts:
                return prompts
    raise ValueError(
        f"{args.prompts} has {len(prompts)} prompts of at least {args.prompt_tokens} tokens, not {args.num_prompts}"
    )


def check(args: argparse.Namespace) -> None:
    """Raise a ValueError that says what is missing or cannot be measured."""
    for folder in (args.target, args.draft):
        if not (folder / "model.safetensors").is_file():
            raise ValueError(f"{folder} has no model.safetensors")
    if args.new_tokens <= (UNCOUNTED + 1) * (max(args.k, default=0) + 1):
        raise ValueError("--new-tokens is too small for the draft lengths: the first steps are not counted")
    for engine in args.engines:
        if engine in SEPARATE and not python_of(engine).is_file():
            raise ValueError(f"{engine} has no environment; make it with: python -m benchmarks.peers.setup {engine}")


def run_job(engine: str, job: Job) -> list[Variant]:
    """Run one process; its failure becomes the variants' error."""
    variants = [Variant(engine, job.precision, k) for k in job.ks or [0]]
    command = [str(python_of(engine)), "-m", f"benchmarks.peers.run_{engine}"]
    environment = thread_environment(job.threads)
    done = subprocess.run(command, input=job.to_json(), env=environment, cwd=REPO, capture_output=True, text=True)
    if done.returncode:
        for variant in variants:
            variant.error = last_lines(done.stderr) or f"exit status {done.returncode}"
        return variants
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    for variant, result in zip(variants, answer["results"], strict=True):
        variant.version, variant.settings = answer["version"], answer["settings"]
        variant.prompts = result["prompts"]
    return variants


def run_engine(engine: str, precision: str, args: argparse.Namespace, prompts: list[list[int]]) -> list[Variant]:
    """Convert the pair for an engine at a precision and measure it plainly and with each draft length."""
    try:
        folders = convert(engine, precision, {"target": args.target, "draft": args.draft}, args.cache, args.threads)
    except (OSError, RuntimeError) as error:
        return [Variant(engine, precision, 0, error=str(error))]
    target, draft = (str(folders[role].resolve()) for role in ROLES)
    jobs: list[tuple[list[int], dict[str, str]]] = [([], options) for options in PLAIN_OPTIONS.get(engine, [{}])]
    if args.k:
        jobs.append((args.k, {}))
    variants = []
    for ks, options in jobs:
        job = Job(target, draft, ks, prompts, args.new_tokens, args.threads, args.repeats, precision, options)
        variants += run_job(engine, job)
    return variants


def best(variants: list[Variant]) -> list[Variant]:
    """The fastest plain and the fastest drafting variant of each engine and precision, and what failed entirely."""
    groups: dict[tuple[str, str, bool], list[Variant]] = {}
    for variant in variants:
        groups.setdefault((variant.engine, variant.precision, variant.k > 0), []).append(variant)
    chosen = []
    for group in groups.values():
        measured = [variant for variant in group if variant.prompts]
        chosen.append(max(measured, key=lambda variant: variant.speed("decode")) if measured else group[0])
    return chosen


def table(variants: list[Variant], everything: list[Variant]) -> Table:
    """Show variants side by side with how far their tokens agree with the reference and with their own plain form."""
    reference = find_reference(everything)
    numbers = ("decode", "end to end", "tokens per step", "as fp32 greedy", "as its own greedy")
    shown = new_table("Tokens per second", ("engine", "weights", "drafts of"), numbers)
    for variant in variants:
        name = [NAMES[variant.engine], variant.precision, str(variant.k or "-")]
        if not variant.prompts:
            shown.add_row(*name, f"failed: {variant.error}")
            continue
        plain = find_plain(everything, variant)
        shown.add_row(
            *name,
            f"{variant.speed('decode'):.1f}",
            f"{variant.speed('end_to_end'):.1f}",
            f"{variant.tokens_per_step:.2f}",
            _agreement(variant, reference),
            _agreement(variant, plain),
        )
    return shown


def _agreement(variant: Variant, other: Variant | None) -> str:
    return "-" if other is None else f"{variant.same_as(other)}/{len(variant.prompts)}"


def find_plain(variants: list[Variant], like: Variant) -> Variant | None:
    """The measured plain variant of the same engine and precision."""
    kind = (like.engine, like.precision, 0)
    return next((v for v in variants if v.prompts and (v.engine, v.precision, v.k) == kind), None)


def find_reference(variants: list[Variant]) -> Variant | None:
    """Greedy search of transformers at full precision, if it was measured."""
    return find_plain(variants, Variant("transformers", "fp32", 0))


def report(variants: list[Variant], args: argparse.Namespace, prompts: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything measured, for the JSON file."""
    chosen = [id(variant) for variant in best(variants)]
    reference = find_reference(variants)
    entries = []
    for variant in variants:
        entry: dict[str, Any] = {"engine": variant.engine, "precision": variant.precision, "k": variant.k}
        if variant.prompts:
            plain = find_plain(variants, variant)
            entry |= {
                "best": id(variant) in chosen,
                "decode_tokens_per_s": variant.speed("decode"),
                "end_to_end_tokens_per_s": variant.speed("end_to_end"),
                "tokens_per_step": variant.tokens_per_step,
                "same_as_fp32_greedy": None if reference is None else variant.same_as(reference),
                "same_as_own_greedy": None if plain is None else variant.same_as(plain),
                "version": variant.version,
                "settings": variant.settings,
                "conversion": OPTIONS.get((variant.engine, variant.precision), []),
                "prompts": [
                    # Whether the texts are the same is said above; they would be most of the file.
                    {"id": prompt["id"], **{name: value for name, value in measured.items() if name != "tokens"}}
                    for prompt, measured in zip(prompts, variant.prompts, strict=True)
                ],
            }
        else:
            entry["error"] = variant.error
        entries.append(entry)
    arguments = ("num_prompts", "prompt_tokens", "new_tokens", "threads", "repeats")
    return {
        "target": args.target.name,
        "draft": args.draft.name,
        **{name: getattr(args, name) for name in arguments},
        "variants": entries,
    }


def compare(args: argparse.Namespace) -> int:
    """Measure, print the table, write the JSON; 0 if everything ran."""
    console = open_console()
    try:
        check(args)
        prompts = read_prompts(args)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    variants: list[Variant] = []
    for engine in args.engines:
        for precision in ["fp32"] if engine == "transformers" else args.precisions:
            with console.status(f"{NAMES[engine]}, {precision}"):
                variants += run_engine(engine, precision, args, [prompt["tokens"] for prompt in prompts])
    console.print(table(best(variants), variants))
    write_report(args.json, report(variants, args, prompts))
    failed = [variant for variant in variants if not variant.prompts]
    for variant in failed:
        print(f"error: {variant.engine} {variant.precision} k={variant.k}: {variant.error}", file=sys.stderr)
    return 1 if failed else 0
