"""Corpus, tokenizer, held-out prompts and model cards of the demonstration models.

The corpus consists of sources of the running Python's standard library, so nothing is downloaded. Files are held out by
their relative paths, so the same files are held out on every machine.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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


def card(name: str, /, **facts: object) -> str:
    """Fills in the template of a model card."""
    return (Path(__file__).parent / "cards" / f"{name}.md").read_text(encoding="utf-8").format(**facts)
