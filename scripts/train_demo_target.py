"""Train ``examples/models/demo-target`` on the sources of Python's standard library: an hour and a half on two cores.

    python scripts/train_demo_target.py
    python scripts/train_demo_target.py --smoke --examples DIR    # a quick check; the model is useless

The target first learns the sources alone, then together with the loss of Medusa heads, so that its hidden state suits
heads, which are not kept. An interrupted run resumes from the ``--work`` folder, which also gets the sources for
``specexport train``, ``learnt.jsonl`` and ``held-out.jsonl``.

The corpus consists of sources of the running Python's standard library, so nothing is downloaded. Files are held out by
their relative paths, so the same files are held out on every machine.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import platform
import random
import sysconfig
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specexport.graphs.layers import hidden_and_logits
from specexport.methods.draft_model.train import new_llama
from specexport.methods.medusa.train import head_losses, new_heads
from specexport.training.data import Windows, read_windows
from specexport.training.loop import Loss, Schedule, optimizers, train
from specexport.training.predictions import weighted_loss

VOCAB_SIZE, MAX_POSITIONS = 4096, 1024
TARGET_STEPS, JOINT_STEPS = 1800, 1000
"""Steps of 8 windows of 512 tokens: of the target alone, and together with the heads."""
HEADS_WEIGHT, HEADS_DECAY, HEAD_LAYERS = 0.3, 0.8, 2


# --- the corpus, its tokenizer and its prompts ------------------------------------------------------------------------
END_OF_TEXT = "<|endoftext|>"
EXCLUDED_PARTS = {"site-packages", "lib2to3", "idlelib", "pydoc_data", "encodings", "__pycache__"}
EXCLUDED_PREFIXES = ("_sysconfigdata", "config-")  # generated when Python was built
MAX_FILE_BYTES = 400_000
HELD_OUT_ONE_IN = 40


@dataclass(frozen=True)
class SourceFile:
    """A file of the corpus: its path relative to the standard library, and its text."""

    path: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the file is held out: about one in `HELD_OUT_ONE_IN`, by a hash of the path."""
        return int(hashlib.sha256(self.path.encode()).hexdigest()[:8], 16) % HELD_OUT_ONE_IN == 0


def read_corpus() -> list[SourceFile]:
    """The modules of the library and the top-level files of its test package, sorted by path.

    Deeper folders of tests are left out: they hold mostly data and deliberately broken sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        folders = relative.parts[:-1]
        if EXCLUDED_PARTS.intersection(folders) or any(part.startswith(EXCLUDED_PREFIXES) for part in relative.parts):
            continue
        if folders != ("test",) and {"test", "tests"}.intersection(folders):
            continue
        if not 200 <= path.stat().st_size <= MAX_FILE_BYTES:
            continue
        try:
            files.append(SourceFile(relative.as_posix(), path.read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue
    return files


def train_tokenizer(files: list[SourceFile], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer of `vocab_size` entries; encoding adds no special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((file.text for file in files), trainer, length=len(files))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def cut_prompts(
    tokenizer: PreTrainedTokenizerFast, files: list[SourceFile], count: int, tokens: int, seed: int
) -> list[dict[str, str]]:
    """Cuts `count` prompts that start at a function, a class, a decorator or an import of a held-out file.

    All prompts encode to exactly `tokens` ids, so that benchmarks can stack them. Files take turns, so that a long file
    does not fill the list.
    """
    rng = random.Random(seed)
    starts = ("def ", "class ", "@", "import ", "from ", "async def ")
    per_file: list[list[dict[str, str]]] = []
    for file in files:
        lines = file.text.splitlines(keepends=True)
        cut = []
        for number, line in enumerate(lines):
            if not line.lstrip().startswith(starts):
                continue
            ids = tokenizer.encode("".join(lines[number : number + 60]))[:tokens]
            text = tokenizer.decode(ids)
            if len(ids) == tokens and tokenizer.encode(text) == ids:
                cut.append({"id": "", "file": file.path, "text": text})
        rng.shuffle(cut)
        per_file.append(cut)
    prompts: list[dict[str, str]] = []
    while len(prompts) < count and any(per_file):
        prompts.extend(cut.pop() for cut in per_file if cut)
    prompts = prompts[:count]
    for number, prompt in enumerate(prompts):
        prompt["id"] = f"held-out-{number:02d}"
    return prompts


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes the model in float16, with its tokenizer and generation settings."""
    half = copy.deepcopy(model).to(torch.float16)
    end = tokenizer.eos_token_id
    half.generation_config = GenerationConfig(bos_token_id=end, eos_token_id=end, pad_token_id=end, do_sample=False)
    half.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    vocabulary = folder / "tokenizer.json"  # rewritten without line breaks, more than half of it
    compact = json.dumps(json.loads(vocabulary.read_text(encoding="utf-8")), ensure_ascii=False, separators=(",", ":"))
    vocabulary.write_text(compact + "\n", encoding="utf-8")
    settings_path = folder / "tokenizer_config.json"
    settings = json.loads(settings_path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name in transformers before 5
    settings_path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


# --- the training -----------------------------------------------------------------------------------------------------


def write_texts(files: list[SourceFile], path: Path) -> None:
    """Writes sources in the format of ``specexport train``."""
    path.write_text("".join(json.dumps({"text": file.text}) + "\n" for file in files), encoding="utf-8")


def train_target(args: argparse.Namespace, work: Path) -> str:
    """Trains and writes the target, about 6.0M parameters, with the held-out prompts; returns its results."""
    files = read_corpus()[:: 16 if args.smoke else 1]
    sources = {"learnt": [file for file in files if not file.held_out], "held-out": [f for f in files if f.held_out]}
    for name, texts in sources.items():
        write_texts(texts, work / f"{name}.jsonl")
    torch.manual_seed(args.seed)
    tokenizer = train_tokenizer(sources["learnt"], VOCAB_SIZE, MAX_POSITIONS)
    learnt, held_out = (
        read_windows([work / f"{name}.jsonl"], tokenizer, seq_len=513, seed=args.seed) for name in sources
    )
    model: Any = new_llama(VOCAB_SIZE, 256, heads=4, kv_heads=2, ffn=672, layers=7, positions=MAX_POSITIONS, end=0)
    heads = new_heads(4, HEAD_LAYERS, model, tied=True)
    alone, joint = (2, 2) if args.smoke else (TARGET_STEPS, JOINT_STEPS)

    def loss_of(windows: Windows, number: int, *, with_heads: bool) -> Loss:
        batch = windows.rows(windows.order(number, 8, args.seed))
        rows = batch.learnt_from(1)
        with torch.autocast("cpu", torch.bfloat16):
            hidden, logits = hidden_and_logits(model, batch.ids, rows)
            loss = F.cross_entropy(logits.float(), batch.ids.roll(-1, dims=1)[rows])
            if not with_heads:
                return loss, {}
            of_heads, figures = weighted_loss(head_losses(heads, hidden, batch, model.lm_head), HEADS_DECAY)
        return loss + HEADS_WEIGHT * of_heads, figures

    @torch.no_grad()
    def evaluate() -> str:
        losses = [loss_of(held_out, at, with_heads=False)[0].item() for at in range(-(-len(held_out) // 8))]
        return f"held-out {sum(losses) / len(losses):.4f}"

    parameters = dict(model.named_parameters()) | dict(heads.named_parameters(prefix="heads"))
    outer = (model.get_input_embeddings(), model.get_output_embeddings())
    trained = train(
        "target",
        parameters,
        optimizers("muon", parameters.values(), outer, 4e-3),
        Schedule(alone + joint, warmup=50, decay=0.35),
        lambda number: loss_of(learnt, number, with_heads=number >= alone),
        checkpoint=work / "target.pt",
        log=partial(print, flush=True),
        evaluate=evaluate,
    )
    export(model.eval(), tokenizer, args.examples / "models" / "demo-target")
    prompts = cut_prompts(tokenizer, sources["held-out"], 64, 128, args.seed)
    path = args.examples / "prompts" / "held_out.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in prompts), encoding="utf-8")
    return f"{evaluate()} nats a token, after {trained.seconds / 60:.0f} minutes"


def main() -> None:
    """Trains the target and writes it with its card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--examples", type=Path, default=Path("examples"), help="folder with models/ and prompts/")
    parser.add_argument("--work", type=Path, default=Path("build/demo-target"), help="folder to resume from")
    parser.add_argument("--smoke", action="store_true", help="a quick check; the model is useless")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    work = args.work / "smoke" if args.smoke else args.work
    work.mkdir(parents=True, exist_ok=True)
    report = train_target(args, work)
    command = f"python scripts/train_demo_target.py --seed {args.seed} --threads {args.threads}"
    card = (Path(__file__).parent / "cards" / "demo.md").read_text(encoding="utf-8")
    text = card.format(python=platform.python_version(), command=command, report=report)
    (args.examples / "models" / "demo-target" / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
