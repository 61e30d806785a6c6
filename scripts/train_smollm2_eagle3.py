"""Train the EAGLE-3 draft of SmolLM2-135M-Instruct on the model's own answers to generated questions.

    python scripts/train_smollm2_eagle3.py --target FOLDER        # writes examples/models/smollm2-eagle3

``chat_prompts.py`` generates the questions; every other answer is greedy, the rest are sampled at temperature 0.7. A
second run with the same options resumes from the ``--work`` folder.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import random
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from chat_prompts import Question, about, questions
from demo_corpus import card
from safetensors.torch import load_file, save_file

from specexport import LLM, SamplingParams
from specexport.exporter.build import build
from specexport.exporter.options import BuildOptions
from specexport.methods.eagle3.train import train_eagle3
from specexport.methods.eagle3.train_options import Eagle3Options

TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
_AT_ONCE = 64
"""Number of conversations per file, which are generated together."""
_MOST_TOKENS = 192
_GROUP = 32
"""Number of neighbouring weights that share a scale."""
_TEMPERATURES = (0.0, 0.7)


def _answers(llm: LLM, chats: list[list[dict[str, str]]], temperatures: list[float], seed: int) -> list[str]:
    if not chats:
        return []
    params = [
        SamplingParams(max_tokens=_MOST_TOKENS, temperature=temperature, seed=seed + number)
        for number, temperature in enumerate(temperatures)
    ]
    return [output.outputs[0].text for output in llm.chat(chats, params, use_tqdm=False)]


def write_conversations(llm: LLM, questions: Iterable[Question], folder: Path, seed: int) -> Iterator[dict[str, Any]]:
    """Generates the model's answers in files of :data:`_AT_ONCE` conversations, except existing files."""
    folder.mkdir(parents=True, exist_ok=True)
    source = iter(questions)
    for number in itertools.count():
        group = list(itertools.islice(source, _AT_ONCE))
        if not group:
            return
        path = folder / f"{number:03d}.jsonl"
        if not path.exists():
            temperatures = [_TEMPERATURES[at % len(_TEMPERATURES)] for at in range(len(group))]
            talks = [[{"role": "user", "content": question.text}] for question in group]
            first = _answers(llm, talks, temperatures, seed + number * _AT_ONCE)
            for talk, answer in zip(talks, first, strict=True):
                talk.append({"role": "assistant", "content": answer})
            going_on = [at for at, question in enumerate(group) if question.then is not None]
            for at in going_on:
                talks[at].append({"role": "user", "content": group[at].then or ""})
            second = _answers(llm, [talks[at] for at in going_on], [temperatures[at] for at in going_on], seed + number)
            for at, answer in zip(going_on, second, strict=True):
                talks[at].append({"role": "assistant", "content": answer})
            lines = [
                json.dumps({"kind": question.kind, "messages": talk}) + "\n"
                for question, talk in zip(group, talks, strict=True)
            ]
            partial_path = path.with_suffix(".tmp")
            partial_path.write_text("".join(lines), encoding="utf-8")
            partial_path.replace(path)
            print(f"{folder.name}: {(number + 1) * _AT_ONCE} conversations", flush=True)
        yield from (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())


def texts_of(llm: LLM, work: Path, *, held_out: bool, count: int, summaries: int, seed: int) -> Path:
    """Writes conversations for ``specexport train``: a number of the first three kinds, and a number of summaries."""
    questions_ = list(questions(held_out))
    random.Random(seed).shuffle(questions_)
    name = "held-out" if held_out else "learnt"
    talks = list(write_conversations(llm, questions_[:count], work / name, seed))
    # Summaries are of the model's own answers.
    written = [talk["messages"][1]["content"] for talk in talks if talk["kind"] == "chat"]
    long = [text for text in written if len(text) > 300][:summaries]
    talks += write_conversations(llm, about(long, seed), work / f"{name}-summaries", seed + 500_000)
    path = work / f"{name}.jsonl"
    path.write_text("".join(json.dumps(talk) + "\n" for talk in talks), encoding="utf-8")
    return path


def some_of_each_kind(texts: Path, count: int) -> Path:
    """A file of the first ``count`` conversations of each kind: measuring all at every checkpoint takes too long."""
    kept: dict[str, list[str]] = {}
    for line in texts.read_text(encoding="utf-8").splitlines(keepends=True):
        kept.setdefault(json.loads(line)["kind"], []).append(line)
    path = texts.with_name(f"{texts.stem}-{count}-of-each{texts.suffix}")
    path.write_text("".join(line for lines in kept.values() for line in lines[:count]), encoding="utf-8")
    return path


def store_in_int8(folder: Path) -> int:
    """Rounds a draft's matrices to int8, as compressed-tensors stores them, and returns the number of parameters."""
    file, config = folder / "model.safetensors", folder / "config.json"
    stored: dict[str, torch.Tensor] = {}
    parameters = 0
    for name, tensor in load_file(file).items():
        parameters += tensor.numel() if tensor.is_floating_point() else 0
        if tensor.ndim != 2:
            stored[name] = tensor
            continue
        groups = tensor.float().unflatten(1, (-1, _GROUP))
        scales = (groups.abs().amax(-1) / 127).half().clamp(min=2.0**-14)
        stored[name] = (groups / scales.float()[..., None]).round().clamp(-127, 127).char().flatten(1)
        stored[f"{name}_scale"] = scales
    save_file(stored, file, metadata={"format": "pt"})
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group", "group_size": _GROUP}
    document = json.loads(config.read_text(encoding="utf-8"))
    document["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    config.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return parameters


def measure(bundle: Path, held_out: Path) -> list[dict[str, Any]]:
    """The acceptance length of each kind of held-out conversation, greedy and sampled, with four tokens drafted."""
    talks = [json.loads(line) for line in held_out.read_text(encoding="utf-8").splitlines()]
    rows: list[dict[str, Any]] = []
    method = {"method": "eagle3", "num_speculative_tokens": 4}
    llm = LLM(bundle=str(bundle), speculative_config=method, calibrate=False)
    for kind in ("chat", "code", "edit", "summary"):
        prompts = [talk["messages"][:1] for talk in talks if talk["kind"] == kind][:16]
        row: dict[str, Any] = {"kind": kind, "conversations": len(prompts)}
        for temperature in _TEMPERATURES:
            params = SamplingParams(max_tokens=96, temperature=temperature, seed=1)
            # One at a time, as together few draft tokens would pay.
            outputs = [llm.chat([prompt], params, use_tqdm=False)[0] for prompt in prompts]
            done = [output.outputs[0].metrics for output in outputs]
            accepted, steps = sum(stats.accepted for stats in done), sum(stats.steps for stats in done)
            row[f"T={temperature}"] = round(1 + accepted / steps, 3)
        rows.append(row)
    llm.close()
    return rows


def main() -> None:
    """Generates the texts, trains and measures the draft, and writes it with its card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--target", required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--conversations", type=int, default=2944, help="of questions about topics, code and edits")
    parser.add_argument("--summaries", type=int, default=512)
    parser.add_argument("--steps", type=int, default=600, help="of 8 windows of 256 tokens")
    parser.add_argument("--ttt-steps", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=8192, help="tokens that the draft may propose")
    parser.add_argument("--intermediate-size", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, default=Path("examples/models/smollm2-eagle3"))
    parser.add_argument("--work", type=Path, default=Path("build/smollm2-eagle3"), help="to go on from")
    parser.add_argument("--texts-only", action="store_true", help="stop before training")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    writer = args.work / "writer"
    if not (writer / "specexport.json").exists():
        build(BuildOptions(target=args.target, output=writer, precision="int8", max_seq_len=1024, max_batch_size=8))
    llm = LLM(bundle=str(writer), calibrate=False)
    held_out = texts_of(llm, args.work, held_out=True, count=320, summaries=64, seed=args.seed + 1_000_000)
    learnt = texts_of(
        llm, args.work, held_out=False, count=args.conversations, summaries=args.summaries, seed=args.seed
    )
    llm.close()
    if args.texts_only:
        return
    options = Eagle3Options(
        target=args.target,
        data=[learnt],
        held_out=str(some_of_each_kind(held_out, 12)),
        output=args.output,
        overwrite=True,
        work=args.work / "training",
        seq_len=256,
        batch_size=8,
        steps=args.steps,
        save_every=25,
        warmup=0.03,
        intermediate_size=args.intermediate_size,
        draft_vocab_size=args.vocab,
        tie_lm_head=True,
        ttt_steps=args.ttt_steps,
        optimizer="muon",
        seed=args.seed,
    )
    record = train_eagle3(options, partial(print, flush=True))
    parameters = store_in_int8(args.output)
    # The folders of this machine mean nothing to others.
    record["options"] |= {"target": TARGET, "data": [learnt.name], "held_out": held_out.name, "work": None}
    (args.output / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    bundle = args.work / "bundle"
    methods = ({"method": "eagle3", "model": str(args.output), "num_speculative_tokens": 4},)
    build(BuildOptions(target=args.target, output=bundle, precision="int8", methods=methods, overwrite=True))
    rows = measure(bundle, held_out)
    (args.work / "acceptance.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    table = ["| held-out conversations | greedy | temperature 0.7 |", "|---|---|---|"]
    table += [f"| {row['kind']} ({row['conversations']}) | {row['T=0.0']:.2f} | {row['T=0.7']:.2f} |" for row in rows]
    curve = [point for point in record["draft"]["history"] if "evaluation" in point]
    readme = card(
        "smollm2-eagle3",
        python=platform.python_version(),
        torch=torch.__version__,
        windows=record["windows"],
        held_out_windows=record["held_out_windows"],
        steps=args.steps,
        flags=f"--conversations {args.conversations} --summaries {args.summaries} --steps {args.steps}",
        ttt_steps=args.ttt_steps,
        minutes=f"{record['draft']['seconds'] / 60:.0f}",
        seed=args.seed,
        parameters=parameters,
        acceptance="\n".join(table),
        curve="\n".join(f"| {point['step']} | {point['evaluation'].split()[-1]} |" for point in curve),
    )
    (args.output / "README.md").write_text(readme, encoding="utf-8")


if __name__ == "__main__":
    main()
