"""Train the EAGLE-3 draft of the demonstration target, as `specexport train eagle3` does.

    python scripts/train_demo_eagle3.py        # writes examples/models/demo-eagle3

As in `train_demo_models.py`, the prompts come from files of the standard library that are not held out, and the draft
learns the target's own texts. A second run with the same options resumes from the `--work` folder.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from functools import partial
from pathlib import Path

import torch
from demo_corpus import SourceFile, card, read_corpus
from safetensors.torch import load_file

from specexport.exporter.build import build
from specexport.exporter.options import BuildOptions
from specexport.methods.eagle3.train import train_eagle3
from specexport.methods.eagle3.train_options import Eagle3Options
from specexport.runtime import Engine, SamplingParams


def write_texts(path: Path, files: list[SourceFile]) -> Path:
    """Writes sources in the format of `specexport train`."""
    path.write_text("".join(json.dumps({"text": file.text}) + "\n" for file in files), encoding="utf-8")
    return path


def acceptance_table(models: Path, work: Path, prompts: Path) -> str:
    """A Markdown table of the acceptance lengths of all drafts of `demo-target`, over greedy texts."""
    sizes = {"eagle3": (1, 2, 3, 4, 5, 6), "draft_model": (1, 2, 3, 4, 5, 6), "medusa": (4, 8, 16)}
    helpers = {"eagle3": "demo-eagle3", "draft_model": "demo-draft", "medusa": "demo-medusa"}
    methods = tuple(
        {"method": name, "model": str(models / helper), "num_speculative_tokens": sizes[name]}
        for name, helper in helpers.items()
    )
    folder = work / "bundle"
    target = str(models / "demo-target")
    build(BuildOptions(target=target, output=folder, methods=methods, max_seq_len=512, overwrite=True))
    params = SamplingParams(max_tokens=96, temperature=0.0, ignore_eos=True)
    texts = [json.loads(line)["text"] for line in prompts.read_text(encoding="utf-8").splitlines()]
    lines = ["| | draft tokens a step: acceptance length |", "|---|---|"]
    with Engine.load(folder, threads=1, calibrate=False) as engine:
        for name, helper in helpers.items():
            lengths = []
            for size in sizes[name]:
                options_ = {"method": name, "num_speculative_tokens": size}
                done = [engine.generate(engine.encode(text)[:128], params, options_).stats for text in texts]
                length = 1 + sum(stats.accepted for stats in done) / sum(stats.steps for stats in done)
                lengths.append(f"{size}: {length:.2f}")
            lines.append(f"| `{helper}`, {'trees' if name == 'medusa' else 'chains'} | {', '.join(lengths)} |")
    return "\n".join(lines)


def main() -> None:
    """Trains the draft and writes it with its card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=1300, help="of 16 texts of 48 and 144 tokens")
    parser.add_argument("--sampled", type=int, default=4608, help="texts sampled from the target")
    parser.add_argument("--ttt-steps", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", type=Path, default=Path("examples/models"), help="has demo-target")
    parser.add_argument("--work", type=Path, help="to go on from (default: a temporary folder by options)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    work = args.work or Path(tempfile.gettempdir()) / f"demo-eagle3-{args.steps}-{args.sampled}-{args.seed}"
    work.mkdir(parents=True, exist_ok=True)
    files = read_corpus()
    options = Eagle3Options(
        target=str(args.models / "demo-target"),
        data=[write_texts(work / "learnt.jsonl", [file for file in files if not file.held_out])],
        held_out=str(write_texts(work / "held-out.jsonl", [file for file in files if file.held_out])),
        output=args.models / "demo-eagle3",
        overwrite=True,
        work=work / "training",
        seq_len=192,
        prompt_len=48,
        self_distill=args.sampled,
        batch_size=16,
        steps=args.steps,
        warmup=0.03,
        states=(2, 4, 7),
        intermediate_size=1024,
        tie_lm_head=True,
        ttt_steps=args.ttt_steps,
        optimizer="muon",
        seed=args.seed,
    )
    record = train_eagle3(options, partial(print, flush=True))
    ranks = (1, 2, 3, 5, 10)
    table = [f"| token | {' | '.join(f'top-{rank}' for rank in ranks)} |", "|---" * (len(ranks) + 1) + "|"]
    table += [
        f"| {n} | " + " | ".join(f"{sum(row[:rank]):.3f}" for rank in ranks) + " |"
        for n, row in enumerate(record["accuracy"], 1)
    ]
    readme = card(
        "eagle3",
        python=platform.python_version(),
        sampled=args.sampled,
        steps=args.steps,
        ttt_steps=args.ttt_steps,
        minutes=f"{record['draft']['seconds'] / 60:.0f}",
        threads=args.threads,
        seed=args.seed,
        parameters=sum(tensor.numel() for tensor in load_file(options.output / "model.safetensors").values()),
        table="\n".join(table),
        acceptance=acceptance_table(args.models, work, args.models.parent / "prompts" / "held_out.jsonl"),
    )
    (options.output / "README.md").write_text(readme, encoding="utf-8")


if __name__ == "__main__":
    main()
