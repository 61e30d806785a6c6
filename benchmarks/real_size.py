"""The costs of builds, bundles and steps for models of common sizes.

Weights are random, in the shapes of Qwen3-0.6B, 1.7B and 4B with their vocabulary of 151,936 tokens: time, memory and
bytes do not depend on the values. Acceptance does, so the speed-up is computed for given acceptance lengths: length *
c(1) / (c(K+1) + d(K) + host), from steps that ran in turns. Builds run in separate processes; their peak is the largest
resident set without pages of the checkpoint, which the system may drop.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks import common
from benchmarks.decode import step_costs
from specexport.contract.reading import read_manifest
from specexport.methods.draft_model import DraftModelProposer
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.speculative import PLAIN
from specexport.tables import Table, show

VOCAB = 151_936
SHAPES: dict[str, dict[str, int]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
"""Sizes of Qwen3 models, each with 8 key/value heads of 128 and tied embeddings."""
LENGTHS = (1.5, 2.0, 3.0, 4.0, 5.0)
_AS_A_MODEL = 0.125
"""Temperature that gives the logits of random weights, with a spread of about 1, the spread of a trained model's."""
_SHARD = 1 << 30
_MB = 1e6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``python -m benchmarks real-size``."""
    parser.add_argument("--targets", default="1.7B,4B", help="shapes of targets")
    parser.add_argument("--draft", default="0.6B", choices=tuple(SHAPES), help="shape of the draft")
    parser.add_argument("--precisions", default="int8,int4")
    parser.add_argument("--k", default="2,4", help="draft tokens a step")
    parser.add_argument("--steps", type=int, default=24, help="that are timed of each kind")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path(".cache/bench/real-size"), help="keeps models and bundles")
    parser.add_argument("--json", type=Path, help="write everything measured to this file, after each pair")


@dataclass
class Report:
    """The results of a pair at one precision.

    Attributes:
        checkpoint_mb: of the target and of the draft, in their own dtype.
        build_seconds: of the bundle's build, in this run or an earlier one.
        build_peak_mb: peak memory of the build's process, without pages of files.
        bundle_mb: size of its files.
        open_seconds: from the start of a process to the first token of a short prompt.
        resident_mb: of that process then, including pages of files.
        step_ms: c(T) by T, the target's bare graph.
        propose_ms: d(K) by K.
        host_ms: time of a step outside the graphs, greedy and sampled with top-p 0.95.
        gigabytes_a_second: the target's weights over c(1).
        speed_up: by K and acceptance length.
    """

    target: str
    precision: str
    checkpoint_mb: tuple[float, float]
    build_seconds: float
    build_peak_mb: float
    bundle_mb: float
    open_seconds: float
    resident_mb: float
    step_ms: dict[int, float]
    propose_ms: dict[int, float]
    host_ms: dict[str, float]
    gigabytes_a_second: float
    speed_up: dict[int, dict[str, float]]


def main(args: argparse.Namespace) -> int:
    """Creates missing models and bundles, and measures each pair."""
    args.work.mkdir(parents=True, exist_ok=True)
    draft, reports = checkpoint(args.draft, args.work), []
    for shape in args.targets.split(","):
        target = checkpoint(shape, args.work)
        for precision in args.precisions.split(","):
            reports.append(_measure(args, shape, precision, target, draft))
            show(_table(reports[-1]))
            common.write_report(
                args.json,
                {"machine": common.machine(args.threads), "draft": args.draft, "pairs": [asdict(r) for r in reports]},
            )
    return 0


# --- models -----------------------------------------------------------------------------------------------------------
def checkpoint(shape: str, work: Path) -> Path:
    """A checkpoint with random weights in bf16, written tensor by tensor."""
    out = work / f"qwen3-{shape}"
    if (out / "model.safetensors.index.json").is_file():
        return out
    print(f"making {out}", file=sys.stderr)
    config = Qwen3Config(
        **SHAPES[shape], num_key_value_heads=8, head_dim=128, vocab_size=VOCAB, max_position_embeddings=4096,
        tie_word_embeddings=True, dtype="bfloat16", bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(out)
    _tokenizer(work).save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    generator, placed, shard, held = torch.Generator().manual_seed(0), {}, {}, 0

    def flush() -> None:
        name = f"model-{len(set(placed.values())):05}.safetensors"
        save_file(shard, out / name, {"format": "pt"})
        placed.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            shard[name] = torch.ones(parameter.shape, dtype=torch.bfloat16)
        else:
            spread = parameter.shape[1] ** -0.5
            shard[name] = torch.randn(parameter.shape, generator=generator).mul_(spread).to(torch.bfloat16)
        held += 2 * parameter.numel()
        if held > _SHARD:
            flush()
            held = 0
    flush()
    index = {"metadata": {}, "weight_map": placed}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    return out


def _tokenizer(work: Path) -> Tokenizer:
    """A byte-level tokenizer trained on Python's standard library, cached."""
    path = work / "tokenizer.json"
    if not path.is_file():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer, tokenizer.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
        )
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=VOCAB - 300, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(_library(), trainer)
        tokenizer.save(str(path))
    return Tokenizer.from_file(str(path))


def _library() -> Iterator[str]:
    for path in sorted(Path(json.__file__).parents[1].glob("**/*.py")):
        if "site-packages" not in path.parts:
            yield path.read_text(encoding="utf-8", errors="ignore")


# --- measuring --------------------------------------------------------------------------------------------------------
def _measure(args: argparse.Namespace, shape: str, precision: str, target: Path, draft: Path) -> Report:
    ks = tuple(int(k) for k in args.k.split(","))
    out = args.work / f"{shape}-{args.draft}-{precision}-k{'-'.join(map(str, ks))}"
    built = args.work / f"{out.name}.json"
    if not (out / "specexport.json").is_file():
        flags = ["--draft", str(draft), "--precision", precision, "--max-seq-len", "1024", "-o", str(out)]
        tokens = ["--num-speculative-tokens", ",".join(map(str, ks))]
        command = [sys.executable, "-m", "specexport.cli", "build", "--target", str(target), *flags, *tokens]
        built.write_text(json.dumps(_watched(command)))
    build_seconds, build_peak = json.loads(built.read_text())
    opened = json.loads(
        subprocess.run(
            [sys.executable, "-m", "benchmarks.real_size", str(out), str(args.threads)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    )
    manifest = read_manifest(out)
    with Engine.load(out, threads=args.threads, check_hashes=False, calibrate=False) as engine:
        proposer = engine.proposers["draft_model"]
        assert isinstance(proposer, DraftModelProposer)
        costs: dict[int, list[tuple[float, float]]] = {k: [] for k in (0, *ks)}
        for _ in range(3):
            for k, pairs in costs.items():
                draft_graph = proposer.graph if k else None
                pairs += step_costs(engine._target, draft_graph, k, args.prompt_tokens, args.steps // 3)
        step = {k + 1: statistics.median(verify for verify, _ in pairs) for k, pairs in costs.items()}
        propose = {k: statistics.median(draft_ms for _, draft_ms in costs[k]) for k in ks}
        host = {
            name: _host(engine, params, args)
            for name, params in (
                ("greedy", SamplingParams(temperature=0.0)),
                ("top-p", SamplingParams(temperature=_AS_A_MODEL, top_p=0.95, seed=1)),
            )
        }
    sizes = {entry.path: entry.size for entry in manifest.files}
    return Report(
        target=shape,
        precision=precision,
        checkpoint_mb=(_size(target) / _MB, _size(draft) / _MB),
        build_seconds=build_seconds,
        build_peak_mb=build_peak,
        bundle_mb=sum(sizes.values()) / _MB,
        open_seconds=opened["seconds"],
        resident_mb=opened["resident_mb"],
        step_ms=step,
        propose_ms=propose,
        host_ms=host,
        gigabytes_a_second=sizes[manifest.target.weights] / step[1] / _MB,
        speed_up={
            k: {
                str(length): length * (step[1] + host["greedy"]) / (step[k + 1] + propose[k] + host["greedy"])
                for length in LENGTHS
                if length <= k + 1
            }
            for k in ks
        },
    )


def _host(engine: Engine, params: SamplingParams, args: argparse.Namespace) -> float:
    """Milliseconds of a plain step outside the graph."""
    prompt = np.arange(args.prompt_tokens).tolist()
    limited = params.replace(max_tokens=args.steps, ignore_eos=True)
    stats = [engine.generate(prompt, limited, PLAIN).stats for _ in range(3)][1:]
    return statistics.median((stat.host + stat.accept) / stat.steps * 1e3 for stat in stats)


def _watched(command: list[str]) -> tuple[float, float]:
    """Runs a command; returns its seconds and its peak memory in megabytes."""
    began, most = time.perf_counter(), 0.0
    with subprocess.Popen(command, stdout=sys.stderr) as process:

        def watch() -> None:
            nonlocal most
            while process.poll() is None:
                most = max(most, _held(process.pid, "RssAnon"))
                time.sleep(0.05)

        thread = threading.Thread(target=watch)
        thread.start()
        code = process.wait()
        thread.join()
    if code:
        raise SystemExit(f"{' '.join(command)}: exit code {code}")
    return time.perf_counter() - began, most


def _held(process: int | str, kind: str) -> float:
    """Memory of a process in megabytes, from /proc."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
    except OSError:  # the process has ended
        return 0.0
    return next((float(line.split()[1]) * 1024 / _MB for line in lines if line.startswith(f"{kind}:")), 0.0)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _table(report: Report) -> Table:
    title = f"Qwen3-{report.target}, {report.precision}"
    table = common.new_table(title, ("what",), ("value",))
    for name, value in asdict(report).items():
        if name not in ("target", "precision"):
            table.add_row(name, json.dumps(_rounded(value)))
    return table


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return round(value, 2) if isinstance(value, float) else value


def _open(bundle: str, threads: str) -> None:
    """Opens a bundle and decodes a token; runs in a separate process."""
    began = time.perf_counter()
    with Engine.load(bundle, threads=int(threads), check_hashes=False, calibrate=False) as engine:
        engine.generate([1, 2, 3, 4], SamplingParams(temperature=0.0, max_tokens=1))
        print(json.dumps({"seconds": time.perf_counter() - began, "resident_mb": _held("self", "VmRSS")}))


if __name__ == "__main__":
    _open(*sys.argv[1:])
