"""Train the EAGLE-3 draft of SmolLM2-135M-Instruct on the model's own answers to generated questions.

    python scripts/train_smollm2_eagle3.py --target FOLDER        # writes examples/models/smollm2-eagle3

There are four kinds of questions: ``chat`` (about many topics, some with a second turn), ``code`` (functions to write),
``edit`` (changes to existing code), ``summary`` (of an earlier answer of the model). Every tenth topic and task is held
out of training. A fifth kind, used only for training, is ``self-asked``: questions that the model writes in place of
the user (Magpie, arXiv 2406.08464). Every other answer is greedy, the rest are sampled at temperature 0.7. A second run
with the same options resumes from the ``--work`` folder.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from specexport import LLM, SamplingParams
from specexport.cli import HelpFormatter
from specexport.contract.folders import write_file
from specexport.exporter.build import build
from specexport.exporter.options import BuildOptions
from specexport.methods.eagle3 import Eagle3Training
from specexport.methods.eagle3.train import train_eagle3

Kind = Literal["chat", "code", "edit", "summary", "self-asked"]
TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
_AT_ONCE = 64
"""Number of questions per file; these are answered together."""
_MOST_TOKENS = 192
_MAX_QUESTION = 96
"""Maximum number of tokens of a question that the model writes."""
_ASKING = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n"
)
"""Text of the chat template before a question."""
_GROUP = 32
"""Number of neighbouring weights that share a scale."""
_TEMPERATURES = (0.0, 0.7)
_CONVERSATIONS, _SUMMARIES = 2944, 512
"""Numbers of conversations to learn: about topics, code and edits; and of summaries of an answer."""
_DRAFT_TOKENS = 4


@dataclass(frozen=True)
class Question:
    """The question of the first turn, and of the second, if there is one."""

    kind: Kind
    text: str
    follow_up: str | None = None


_WORDS: dict[str, Any] = json.loads(Path(__file__).with_name("smollm2_questions.json").read_text(encoding="utf-8"))
"""The topics, the tasks and the forms of questions."""


def _part(things: list[str], held_out: bool) -> list[str]:
    """Every tenth item if held out, else all others."""
    return [thing for number, thing in enumerate(things) if (number % 10 == 0) == held_out]


def _follow_ups() -> Iterator[str | None]:
    """Yields the second turns: a question for every third first turn, else None."""
    return itertools.cycle(text for second in _WORDS["second_turns"] for text in (None, None, second))


def questions(held_out: bool) -> Iterator[Question]:
    """The held-out questions of the first three kinds, or all others, in a fixed order."""
    follow_ups = _follow_ups()
    for group, forms in _WORDS["forms"].items():
        for topic, form in itertools.product(_part(_WORDS["topics"][group], held_out), forms):
            yield Question("chat", form.format(topic), next(follow_ups))
    tasks, forms, languages = _part(_WORDS["functions"], held_out), _WORDS["code_forms"], _WORDS["languages"]
    for task, form, language in itertools.product(tasks, forms, languages):
        yield Question("code", form.format(task=task, language=language))
    for snippet, edit in itertools.product(_part(_WORDS["snippets"], held_out), _WORDS["edits"]):
        yield Question("edit", f"{edit}:\n```\n{snippet}\n```")


def about(texts: list[str], seed: int) -> Iterator[Question]:
    """Asks for a summary of each text."""
    draw = random.Random(seed)
    for text in texts:
        yield Question("summary", f"{draw.choice(_WORDS['summaries'])}\n\n{text}")


def self_asked_questions(llm: LLM, seed: int) -> list[Question]:
    """Questions that the model writes; those that mention a held-out topic or do not end are left out."""
    params = [
        SamplingParams(max_tokens=_MAX_QUESTION, temperature=1.0, top_p=0.95, seed=seed + number)
        for number in range(_AT_ONCE)
    ]
    learnable = (*_WORDS["topics"].values(), _WORDS["functions"])
    held_out = [topic for topics in learnable for topic in _part(topics, True)]
    outputs = [output.outputs[0] for output in llm.generate([_ASKING] * _AT_ONCE, params, use_tqdm=False)]
    texts = [output.text.strip() for output in outputs if output.finish_reason == "stop"]
    kept = [text for text in texts if text and not any(topic.lower() in text.lower() for topic in held_out)]
    return [Question("self-asked", text, follow_up) for text, follow_up in zip(kept, _follow_ups(), strict=False)]


def _answers(llm: LLM, chats: list[list[dict[str, str]]], temperatures: list[float], seed: int) -> list[str]:
    if not chats:
        return []
    params = [
        SamplingParams(max_tokens=_MOST_TOKENS, temperature=temperature, seed=seed + number)
        for number, temperature in enumerate(temperatures)
    ]
    return [output.outputs[0].text for output in llm.chat(chats, params, use_tqdm=False)]


def in_files(questions: Iterable[Question]) -> list[Callable[[], list[Question]]]:
    """Functions that return the questions of each file, :data:`_AT_ONCE` at a time."""
    every = list(questions)
    return [partial(every.__getitem__, slice(at, at + _AT_ONCE)) for at in range(0, len(every), _AT_ONCE)]


def write_conversations(
    llm: LLM, files: Iterable[Callable[[], list[Question]]], folder: Path, seed: int
) -> Iterator[dict[str, Any]]:
    """Generates the model's answers to the questions of each file, unless it exists; yields the conversations."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, questions_of_file in enumerate(files):
        path = folder / f"{number:03d}.jsonl"
        if not path.exists():
            group = questions_of_file()
            temperatures = [_TEMPERATURES[at % len(_TEMPERATURES)] for at in range(len(group))]
            conversations = [[{"role": "user", "content": question.text}] for question in group]
            first = _answers(llm, conversations, temperatures, seed + number * _AT_ONCE)
            for conversation, answer in zip(conversations, first, strict=True):
                conversation.append({"role": "assistant", "content": answer})
            continued = [at for at, question in enumerate(group) if question.follow_up is not None]
            for at in continued:
                conversations[at].append({"role": "user", "content": group[at].follow_up or ""})
            second = _answers(
                llm, [conversations[at] for at in continued], [temperatures[at] for at in continued], seed + number
            )
            for at, answer in zip(continued, second, strict=True):
                conversations[at].append({"role": "assistant", "content": answer})
            lines = [
                json.dumps({"kind": question.kind, "messages": conversation}) + "\n"
                for question, conversation in zip(group, conversations, strict=True)
            ]
            write_file(path, "".join(lines).encode())
            print(f"{folder.name}: file {number + 1} of {len(group)} conversations", flush=True)
        yield from (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())


def texts_of(
    llm: LLM, work: Path, *, held_out: bool, count: int, summaries: int, self_asked_files: int, seed: int
) -> Path:
    """Writes conversations for ``specexport train``, and returns their file.

    The arguments are the numbers of questions of the first three kinds, of summaries, and of files of questions that
    the model writes.
    """
    questions_ = list(questions(held_out))
    random.Random(seed).shuffle(questions_)
    name = "held-out" if held_out else "learnt"
    conversations = list(write_conversations(llm, in_files(questions_[:count]), work / name, seed))
    # The model summarizes its own answers.
    written = [
        conversation["messages"][1]["content"] for conversation in conversations if conversation["kind"] == "chat"
    ]
    long = [text for text in written if len(text) > 300][:summaries]
    conversations += write_conversations(llm, in_files(about(long, seed)), work / f"{name}-summaries", seed + 500_000)
    files = [
        partial(self_asked_questions, llm, seed + 600_000 + number * _AT_ONCE) for number in range(self_asked_files)
    ]
    conversations += write_conversations(llm, files, work / f"{name}-self-asked", seed + 700_000)
    path = work / f"{name}.jsonl"
    path.write_text("".join(json.dumps(conversation) + "\n" for conversation in conversations), encoding="utf-8")
    return path


def some_of_each_kind(texts: Path, count: int) -> Path:
    """Writes the first ``count`` conversations of each kind: measuring all at every checkpoint takes too long."""
    kept: dict[str, list[str]] = {}
    for line in texts.read_text(encoding="utf-8").splitlines(keepends=True):
        kept.setdefault(json.loads(line)["kind"], []).append(line)
    path = texts.with_name(f"{texts.stem}-{count}-of-each{texts.suffix}")
    path.write_text("".join(line for lines in kept.values() for line in lines[:count]), encoding="utf-8")
    return path


def store_in_int8(folder: Path) -> int:
    """Rounds a draft's matrices to int8 in compressed-tensors' format; returns the number of parameters."""
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
    """Acceptance lengths of four draft tokens on each kind of held-out conversation, greedy and sampled."""
    conversations = [json.loads(line) for line in held_out.read_text(encoding="utf-8").splitlines()]
    rows: list[dict[str, Any]] = []
    method = {"method": "eagle3", "num_speculative_tokens": _DRAFT_TOKENS}
    llm = LLM(bundle=str(bundle), speculative_config=method, calibrate=False)
    for kind in ("chat", "code", "edit", "summary"):
        prompts = [conversation["messages"][:1] for conversation in conversations if conversation["kind"] == kind][:16]
        row: dict[str, Any] = {"kind": kind, "conversations": len(prompts)}
        for temperature in _TEMPERATURES:
            params = SamplingParams(max_tokens=96, temperature=temperature, seed=1)
            # One by one, as few draft tokens pay in a batch.
            outputs = [llm.chat([prompt], params, use_tqdm=False)[0] for prompt in prompts]
            done = [output.outputs[0].metrics for output in outputs]
            accepted, steps = sum(stats.accepted for stats in done), sum(stats.steps for stats in done)
            row[f"T={temperature}"] = round(1 + accepted / steps, 3)
        rows.append(row)
    llm.close()
    return rows


def main() -> None:
    """Generates the texts, trains and measures the draft, and writes it with its card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--target", required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument(
        "--self-asked-files", type=int, default=128, help="files of up to 64 questions that the model writes"
    )
    parser.add_argument("--steps", type=int, default=600, help="training steps, of 8 windows of 256 tokens")
    parser.add_argument("--draft", help="draft to start from, with the same vocabulary (default: a new one)")
    parser.add_argument("--lr", type=float, help="learning rate (default: the optimizer's)")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("examples/models/smollm2-eagle3"), help="folder to write"
    )
    parser.add_argument("--work", type=Path, default=Path("build/smollm2-eagle3"), help="folder to resume from")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    writer = args.work / "writer"
    if not (writer / "specexport.json").exists():
        build(BuildOptions(target=args.target, output=writer, precision="int8", max_seq_len=1024, max_batch_size=8))
    llm = LLM(bundle=str(writer), calibrate=False)
    texts = partial(texts_of, llm, args.work)
    held_out = texts(held_out=True, count=320, summaries=64, self_asked_files=0, seed=args.seed + 1_000_000)
    learnt = texts(
        held_out=False,
        count=_CONVERSATIONS,
        summaries=_SUMMARIES,
        self_asked_files=args.self_asked_files,
        seed=args.seed,
    )
    llm.close()
    options = Eagle3Training(
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
        intermediate_size=1536,
        draft=args.draft,
        draft_vocab_size=None if args.draft else 8192,
        lr=args.lr,
        tie_lm_head=True,
        ttt_steps=_DRAFT_TOKENS,
        optimizer="muon",
        seed=args.seed,
    )
    record = train_eagle3(options, partial(print, flush=True))
    parameters = store_in_int8(args.output)
    # Without the folders of this machine.
    record["options"] |= {"target": TARGET, "data": [learnt.name], "held_out": held_out.name, "work": None}
    record["options"] |= {"output": args.output.name, "draft": args.draft and Path(args.draft).name}
    (args.output / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    bundle = args.work / "bundle"
    methods = ({"method": "eagle3", "model": str(args.output), "num_speculative_tokens": _DRAFT_TOKENS},)
    build(BuildOptions(target=args.target, output=bundle, precision="int8", methods=methods, overwrite=True))
    rows = measure(bundle, held_out)
    (args.work / "acceptance.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    table = ["| held-out conversations | greedy | temperature 0.7 |", "|---|---|---|"]
    table += [f"| {row['kind']} ({row['conversations']}) | {row['T=0.0']:.2f} | {row['T=0.7']:.2f} |" for row in rows]
    curve = [point for point in record["draft"]["history"] if "evaluation" in point]
    card = (Path(__file__).parent / "cards" / "smollm2-eagle3.md").read_text(encoding="utf-8")
    readme = card.format(
        python=platform.python_version(),
        torch=torch.__version__,
        windows=record["windows"],
        held_out_windows=record["held_out_windows"],
        steps=args.steps,
        flags=f"--self-asked-files {args.self_asked_files} --steps {args.steps}",
        ttt_steps=_DRAFT_TOKENS,
        minutes=f"{record['draft']['seconds'] / 60:.0f}",
        seed=args.seed,
        parameters=parameters,
        acceptance="\n".join(table),
        curve="\n".join(f"| {point['step']} | {point['evaluation'].split()[-1]} |" for point in curve),
    )
    (args.output / "README.md").write_text(readme, encoding="utf-8")


if __name__ == "__main__":
    main()
