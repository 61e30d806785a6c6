"""Train the DFlash draft of the demonstration target, as `specexport train dflash` does.

    python scripts/train_demo_dflash.py        # writes examples/models/demo-dflash

As in `train_demo_models.py`, the prompts come from files of the standard library that are not held out, and the draft
learns the target's own texts. A second run with the same options resumes from the `--work` folder.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from functools import partial
from pathlib import Path

import torch
from demo_corpus import card, read_corpus
from train_demo_eagle3 import write_texts

from specexport.methods.dflash.train import train_dflash
from specexport.methods.dflash.train_options import DFlashOptions


def main() -> None:
    """Trains the draft and writes it with its card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=1400, help="of 16 texts of 48 and 144 tokens")
    parser.add_argument("--sampled", type=int, default=4096, help="texts sampled from the target")
    parser.add_argument("--anchors", type=int, default=24, help="blocks learnt in each text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", type=Path, default=Path("examples/models"), help="has demo-target")
    parser.add_argument("--work", type=Path, help="to go on from (default: a temporary folder by options)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    work = args.work or Path(tempfile.gettempdir()) / f"demo-dflash-{args.steps}-{args.sampled}-{args.seed}"
    work.mkdir(parents=True, exist_ok=True)
    files = read_corpus()
    options = DFlashOptions(
        target=str(args.models / "demo-target"),
        data=[write_texts(work / "learnt.jsonl", [file for file in files if not file.held_out])],
        held_out=str(write_texts(work / "held-out.jsonl", [file for file in files if file.held_out])),
        output=args.models / "demo-dflash",
        overwrite=True,
        work=work / "training",
        seq_len=192,
        prompt_len=48,
        self_distill=args.sampled,
        batch_size=16,
        steps=args.steps,
        warmup=0.03,
        layers=2,
        states=(2, 4, 7),
        intermediate_size=512,
        draft_block=8,
        anchors=args.anchors,
        optimizer="muon",
        seed=args.seed,
    )
    record = train_dflash(options, partial(print, flush=True))
    ranks = (1, 2, 3, 5, 10)
    table = [f"| token | {' | '.join(f'top-{rank}' for rank in ranks)} |", "|---" * (len(ranks) + 1) + "|"]
    table += [
        f"| {n} | " + " | ".join(f"{sum(row[:rank]):.3f}" for rank in ranks) + " |"
        for n, row in enumerate(record["accuracy"], 1)
    ]
    readme = card(
        "dflash",
        python=platform.python_version(),
        sampled=args.sampled,
        steps=args.steps,
        anchors=args.anchors,
        minutes=f"{record['draft']['seconds'] / 60:.0f}",
        threads=args.threads,
        seed=args.seed,
        length=f"{record['acceptance_length']:.2f}",
        table="\n".join(table),
    )
    (options.output / "README.md").write_text(readme, encoding="utf-8")


if __name__ == "__main__":
    main()
