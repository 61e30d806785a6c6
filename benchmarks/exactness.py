"""Checks that greedy text with speculation equals plain decoding token for token, on an untuned model.

The target is a Llama of random weights: 292.6 M parameters, hidden size 1152, 20 layers, 18 heads and 6 key/value heads
of 64. Its draft has 23.5 M and the same tokenizer. Heads and speculator are random too, so that theirs and the draft's
tokens are mostly rejected; look-ups and hypotheses are accepted, as such a model soon repeats itself. All are built
into one bundle for each precision, in blocks of 32. Every method and tree, alone and in a batch of 4, with an
artificial cost curve that makes speculation free, is compared with plain decoding of the same engine.

Results are stored in ``--json`` cell by cell, and another run resumes there. Exits with 1 if texts differ.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.common import machine, new_table, read_texts, write_report
from specexport.contract.reading import read_manifest
from specexport.contract.tree import TokenTree
from specexport.runtime import Completion, Engine, SamplingParams, Stream
from specexport.runtime.request import complete
from specexport.runtime.speculative import PLAIN, Speculative
from specexport.tables import show

Sizes = dict[str, int]
Texts = list[tuple[tuple[int, ...], list[float]]]
"""The tokens of each prompt's text, and the margin of each token's logit over the second largest."""

SHAPES: dict[str, tuple[Sizes, Sizes, int]] = {
    "292M": (
        {"hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 20, "num_attention_heads": 18,
         "num_key_value_heads": 6},
        {"hidden_size": 512, "intermediate_size": 1280, "num_hidden_layers": 7, "num_attention_heads": 8,
         "num_key_value_heads": 4},
        5,
    ),
    "tiny": (
        {"hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 3,
         "num_key_value_heads": 1},
        {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 1,
         "num_key_value_heads": 1},
        1,
    ),
}  # fmt: skip
"""Sizes of the target and of its draft, both with heads of 64, and the number of layers of the self-draft."""
HEADS = 3
CHAINS = (4, 2, 8)
BATCH = 4
MAX_SEQ_LEN = 512
ERROR = 9
"""Distance of the wrong tokens in a hypothesis."""
_SPINE = TokenTree.from_choices([[0], [1], [0, 0], [0, 1], [0, 0, 0]])
_BUSHY = TokenTree.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0], [0, 1, 0]])
_SMALL = TokenTree.from_choices([[0], [1], [0, 0], [0, 0, 0]])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``python -m benchmarks exactness``."""
    parser.add_argument("--shape", choices=tuple(SHAPES), default="292M", help="tiny: to try this out")
    parser.add_argument("--precisions", default="fp32,int8,int4")
    parser.add_argument("--only", default="", metavar="WORDS", help="cells whose name holds this")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokenizer", type=Path, default=Path("examples/models/demo-target"), help="whose it is")
    parser.add_argument("--prompts", type=Path, default=Path("examples/prompts/held_out.jsonl"))
    parser.add_argument("--work", type=Path, default=Path(".cache/bench/exactness"), help="keeps models and bundles")
    parser.add_argument(
        "--json", type=Path, default=Path("benchmarks/results/exactness.json"), help="what is done, and goes on"
    )


@dataclass(frozen=True)
class Cell:
    """A way to decode: with the method's tree of ``tokens`` draft tokens; 0 is plain."""

    precision: str
    method: str
    tokens: int
    load: str

    def __str__(self) -> str:
        return f"{self.precision}, {self.method}, {self.tokens}, {self.load}"


@dataclass
class Row:
    """The result of a cell.

    Attributes:
        texts: number of texts.
        equal: number of texts that equal plain decoding's.
        drafted: draft tokens verified.
        accepted: draft tokens accepted.
        first: the earliest difference, if any: its prompt, its position, plain decoding's token, the cell's token, and
            the margin between plain decoding's two largest logits.
        seconds: run time.
    """

    precision: str
    method: str
    tokens: int
    load: str
    texts: int
    equal: int
    drafted: int
    accepted: int
    first: dict[str, float] | None
    seconds: float


def main(args: argparse.Namespace) -> int:
    """Runs the missing cells and prints the table; returns 1 if texts differ."""
    report = json.loads(args.json.read_text(encoding="utf-8")) if args.json.exists() else {}
    names = ("shape", "num_prompts", "prompt_tokens", "new_tokens", "threads")
    options = {name: getattr(args, name) for name in names}
    here = machine(args.threads)
    if report and (report["options"], report["machine"]) != (options, here):
        raise SystemExit(
            f"{args.json}: holds rows of {report['options']} on {report['machine']}, and this is {options} on {here}; "
            "name another file with --json"
        )
    rows = [Row(**row) for row in report.get("rows", ())]
    done = {Cell(row.precision, row.method, row.tokens, row.load) for row in rows}
    print(here, flush=True)
    for precision in args.precisions.split(","):
        folder = _bundle(args, precision)
        left = [cell for cell in cells(folder, precision) if args.only in str(cell) and cell not in done]
        if not left:
            continue
        with _open(folder, args) as engine:
            prompts = [engine.encode(text)[: args.prompt_tokens] for text in read_texts(args.prompts)]
            if len(prompts) < args.num_prompts:
                raise SystemExit(f"{args.prompts}: {len(prompts)} prompts, and --num-prompts is {args.num_prompts}")
            prompts = prompts[: args.num_prompts]
            expected = _plain(engine, prompts, args.new_tokens)
            for cell in left:
                rows.append(run(engine, cell, prompts, expected))
                print(f"{cell}: {rows[-1].equal} of {rows[-1].texts}, {rows[-1].seconds:.0f} s", flush=True)
                write_report(args.json, {"machine": here, "options": options, "rows": [asdict(row) for row in rows]})
    _print(rows)
    return int(any(row.equal < row.texts for row in rows))


def cells(folder: Path, precision: str) -> list[Cell]:
    """Every method of a bundle with each of its trees, alone and in a batch; and plain decoding in a batch."""
    ways = [("plain", 0), *((m.name, len(tree) - 1) for m in read_manifest(folder).methods for tree in m.token_trees())]
    ordered = [Cell(precision, method, tokens, load) for method, tokens in ways for load in ("alone", "batch")]
    return [cell for cell in ordered if (cell.method, cell.load) != ("plain", "alone")]


def _open(folder: Path, args: argparse.Namespace) -> Engine:
    from tests.manifests import curve

    costs = curve(read_manifest(folder), lambda *_: 1.0)
    return Engine.load(folder, threads=args.threads, check_hashes=False, costs=costs)


def _bundle(args: argparse.Namespace, precision: str) -> Path:
    """The bundle of a precision, built, with its models, if it does not exist."""
    from benchmarks.pair import built
    from tests.checkpoints import make_heads, make_speculator

    work = args.work / args.shape
    target, draft, early = SHAPES[args.shape]
    for seed, (name, sizes) in enumerate((("target", target), ("draft", draft))):
        _checkpoint(work / name, args.tokenizer, seed, sizes)
    folder: Path = work / precision
    if not (work / "heads").exists():
        make_heads(work / "heads", work / "target", HEADS, tied=True)
    if not (work / "speculator").exists():
        make_speculator(work / "speculator", work / "target", HEADS)
    heads = {"trees": (_BUSHY, _SMALL, TokenTree.chain(HEADS + 1))}
    drafts = {"num_speculative_tokens": CHAINS, "trees": (_SPINE,)}
    built(
        folder,
        work / "target",
        methods=(
            {"method": "draft_model", "model": str(work / "draft"), **drafts},
            {"method": "self_draft", "layers": early, **drafts},
            {"method": "medusa", "model": str(work / "heads"), **heads},
            {"method": "mlp_speculator", "model": str(work / "speculator"), **heads},
            {"method": "ngram", "num_speculative_tokens": CHAINS},
            {"method": "suffix", "num_speculative_tokens": CHAINS},
            {"method": "hypothesis", "num_speculative_tokens": CHAINS},
            {"method": "lookahead", "preset": "cpu"},
        ),
        precision=precision,
        max_seq_len=MAX_SEQ_LEN,
        max_batch_size=BATCH,
    )
    return folder


def _checkpoint(folder: Path, tokenizer: Path, seed: int, sizes: Sizes) -> None:
    """A Llama with transformers' initial weights."""
    if folder.exists():
        return
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    known = AutoTokenizer.from_pretrained(tokenizer)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(known), head_dim=64, **sizes))
    print(f"{folder}: {sum(weight.numel() for weight in model.parameters()) / 1e6:.1f} M parameters", flush=True)
    known.save_pretrained(folder)
    model.save_pretrained(folder)


def _plain(engine: Engine, prompts: Sequence[list[int]], count: int) -> Texts:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=2)
    done = [engine.generate(prompt, params, PLAIN) for prompt in prompts]
    return [
        (completion.token_ids, [entry.top[0][1] - entry.top[1][1] for entry in completion.logprobs])
        for completion in done
    ]


def run(engine: Engine, cell: Cell, prompts: Sequence[list[int]], expected: Texts) -> Row:
    """Decodes all prompts of a cell and compares the texts."""
    start = time.monotonic()
    done = list(_decode(engine, cell, prompts, expected))
    differences = [
        {"prompt": at, "after": after, "plain": plain[after], "said": completion.token_ids[after], "gap": gaps[after]}
        for at, (completion, (plain, gaps)) in enumerate(zip(done, expected, strict=True))
        if (after := next((i for i, token in enumerate(plain) if completion.token_ids[i] != token), None)) is not None
    ]
    return Row(
        **asdict(cell),
        texts=len(done),
        equal=len(done) - len(differences),
        drafted=sum(completion.stats.drafted for completion in done),
        accepted=sum(completion.stats.accepted for completion in done),
        first=min(differences, key=lambda completion: completion["after"], default=None),
        seconds=round(time.monotonic() - start, 1),
    )


def _decode(engine: Engine, cell: Cell, prompts: Sequence[list[int]], expected: Texts) -> Iterator[Completion]:
    """The texts in order; in a batch, a request starts whenever another ends."""
    running: deque[Stream] = deque()
    takes = cell.tokens and engine.methods[cell.method].takes_hypothesis
    for prompt, (plain, _) in zip(prompts, expected, strict=True):
        speculation = PLAIN
        if cell.tokens:
            wrong = tuple(token ^ (at % ERROR == ERROR - 1) for at, token in enumerate(plain)) if takes else None
            speculation = Speculative(method=cell.method, num_speculative_tokens=cell.tokens, hypothesis=wrong)
        params = SamplingParams(temperature=0.0, max_tokens=len(plain), ignore_eos=True)
        if len(running) == (1 if cell.load == "alone" else BATCH):
            yield complete(running.popleft())
        running.append(engine.stream(prompt, params, speculation))
        running[-1].start()
    yield from map(complete, running)


def _print(rows: Sequence[Row]) -> None:
    words, numbers = ("cell", "first difference"), ("equal", "texts", "accepted", "of drafted")
    table = new_table("Greedy texts against plain decoding", words, numbers)
    for row in rows:
        first = row.first
        difference = (
            "" if first is None else f"prompt {first['prompt']}, token {first['after']}, gap {first['gap']:.2g}"
        )
        name = str(Cell(row.precision, row.method, row.tokens, row.load))
        table.add_row(name, difference, *map(str, (row.equal, row.texts, row.accepted, row.drafted)))
    show(table, f"{sum(row.equal for row in rows)} of {sum(row.texts for row in rows)} texts are equal")
