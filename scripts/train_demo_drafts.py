"""Train the EAGLE-3 or the DFlash draft of the demonstration target, as `specexport train` does.

    python scripts/train_demo_drafts.py eagle3        # writes examples/models/demo-eagle3
    python scripts/train_demo_drafts.py dflash        # writes examples/models/demo-dflash

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
from typing import Any

import torch
from demo_corpus import SourceFile, accuracy_table, card, read_corpus
from safetensors.torch import load_file

from specexport.exporter.build import build
from specexport.exporter.options import BuildOptions
from specexport.methods.dflash.train import train_dflash
from specexport.methods.dflash.train_options import DFlashTraining
from specexport.methods.eagle3.train import train_eagle3
from specexport.methods.eagle3.train_options import Eagle3Training
from specexport.runtime import Engine, SamplingParams

STEPS = {"eagle3": 1300, "dflash": 1400}
SAMPLED = {"eagle3": 4608, "dflash": 4096}


def write_texts(path: Path, files: list[SourceFile]) -> str:
    """Writes sources in the format of `specexport train`; returns the path."""
    path.write_text("".join(json.dumps({"text": file.text}) + "\n" for file in files), encoding="utf-8")
    return str(path)


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
                speculative = {"method": name, "num_speculative_tokens": size}
                done = [engine.generate(engine.encode(text)[:128], params, speculative).stats for text in texts]
                length = 1 + sum(stats.accepted for stats in done) / sum(stats.steps for stats in done)
                lengths.append(f"{size}: {length:.2f}")
            lines.append(f"| `{helper}`, {'trees' if name == 'medusa' else 'chains'} | {', '.join(lengths)} |")
    return "\n".join(lines)


def main() -> None:
    """Trains a draft and writes it with its card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=tuple(STEPS))
    parser.add_argument("--steps", type=int, help=f"of 16 texts of 48 and 144 tokens (default: {STEPS})")
    parser.add_argument("--sampled", type=int, help=f"texts sampled from the target (default: {SAMPLED})")
    parser.add_argument("--ttt-steps", type=int, default=4, help="of EAGLE-3 (default: 4)")
    parser.add_argument("--anchors", type=int, default=24, help="of DFlash: blocks learnt in each text (default: 24)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", type=Path, default=Path("examples/models"), help="has demo-target")
    parser.add_argument("--work", type=Path, help="to resume from (default: a temporary folder by options)")
    args = parser.parse_args()
    kind, steps, sampled = args.kind, args.steps or STEPS[args.kind], args.sampled or SAMPLED[args.kind]
    torch.set_num_threads(args.threads)
    work = args.work or Path(tempfile.gettempdir()) / f"demo-{kind}-{steps}-{sampled}-{args.seed}"
    work.mkdir(parents=True, exist_ok=True)
    files = read_corpus()
    output = args.models / f"demo-{kind}"
    shared: dict[str, Any] = {
        "target": str(args.models / "demo-target"),
        "data": [Path(write_texts(work / "learnt.jsonl", [file for file in files if not file.held_out]))],
        "held_out": write_texts(work / "held-out.jsonl", [file for file in files if file.held_out]),
        "output": output,
        "overwrite": True,
        "work": work / "training",
        "seq_len": 192,
        "prompt_len": 48,
        "self_distill": sampled,
        "batch_size": 16,
        "steps": steps,
        "warmup": 0.03,
        "states": (2, 4, 7),
        "optimizer": "muon",
        "seed": args.seed,
    }
    log = partial(print, flush=True)
    if kind == "eagle3":
        options = Eagle3Training(**shared, intermediate_size=1024, tie_lm_head=True, ttt_steps=args.ttt_steps)
        record = train_eagle3(options, log)
        facts = {
            "ttt_steps": args.ttt_steps,
            "parameters": sum(tensor.numel() for tensor in load_file(output / "model.safetensors").values()),
            "acceptance": acceptance_table(args.models, work, args.models.parent / "prompts" / "held_out.jsonl"),
        }
    else:
        record = train_dflash(
            DFlashTraining(**shared, layers=2, intermediate_size=512, draft_block=8, anchors=args.anchors), log
        )
        facts = {"anchors": args.anchors, "length": f"{record['acceptance_length']:.2f}"}
    readme = card(
        kind,
        python=platform.python_version(),
        sampled=sampled,
        steps=steps,
        minutes=f"{record['draft']['seconds'] / 60:.0f}",
        seed=args.seed,
        threads=args.threads,
        table=accuracy_table("token", record["accuracy"], 1),
        **facts,
    )
    (output / "README.md").write_text(readme, encoding="utf-8")


if __name__ == "__main__":
    main()
