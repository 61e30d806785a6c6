"""Plain steps of our graph and of ONNX Runtime GenAI's, in one process and in turns.

`peers` compares whole engines. Here both target graphs are sessions of the same onnxruntime and alternate, so that the
ratio is that of the graphs themselves.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from benchmarks.decode import step_costs
from benchmarks.peers.convert import convert
from specexport.contract.manifest import Manifest
from specexport.runtime import Engine

ROUNDS, STEPS = 16, 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``python -m benchmarks turns``."""
    parser.add_argument("--target", type=Path, required=True, help="folder of the target checkpoint")
    parser.add_argument("--draft", type=Path, required=True, help="folder of the draft checkpoint")
    parser.add_argument("--precisions", default="fp32,int8,int4")
    parser.add_argument("--rows", type=int, default=176, help="valid cache rows")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=Path(".cache/peers"), help="converted models")


def main(args: argparse.Namespace) -> int:
    """Prints the times of a plain step of both graphs, and their ratio."""
    pair = {"target": args.target, "draft": args.draft}
    for precision in args.precisions.split(","):
        ours = convert("specexport", precision, pair, args.cache, args.threads)["target"]
        theirs = convert("ort", precision, pair, args.cache, args.threads)["target"]
        with Engine.load(ours, threads=args.threads, check_hashes=False, calibrate=False) as engine:
            run = genai_step(theirs / "model.onnx", engine.manifest, args.rows, args.threads)
            mine, others = [], []
            for _ in range(ROUNDS):
                costs = step_costs(engine._target, None, 0, args.rows, repeats=STEPS, warm=1)
                mine.append(statistics.mean(verify for verify, _ in costs))
                run()
                start = time.perf_counter()
                for _ in range(STEPS):
                    run()
                others.append((time.perf_counter() - start) / STEPS * 1e3)
        ratio = statistics.median(a / b for a, b in zip(mine, others, strict=True))
        print(
            f"{precision}: specexport {statistics.median(mine):.2f} ms, ONNX Runtime GenAI's graph "
            f"{statistics.median(others):.2f} ms a plain step: {ratio:.2f}x the time"
        )
    return 0


def genai_step(path: Path, manifest: Manifest, rows: int, threads: int) -> Callable[[], Any]:
    """One plain step of a graph of ONNX Runtime GenAI's builder, with buffers bound once, as in its runtime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry(
        "session.force_spinning_stop", "1"
    )  # as ours does, or it would spin during our turn
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    inputs = {
        "input_ids": np.array([[50]]),
        "attention_mask": np.ones((1, rows + 1), np.int64),
        "position_ids": np.array([[rows]]),
    }
    binding = session.io_binding()
    layer = manifest.target.cache[0]
    for wanted in session.get_inputs():
        if wanted.name in inputs:
            binding.bind_cpu_input(wanted.name, inputs[wanted.name])
            continue
        cache = np.zeros((1, layer.heads, manifest.max_seq_len, layer.key_size), np.float32)
        value = onnxruntime.OrtValue.ortvalue_from_numpy(cache)
        binding.bind_ortvalue_input(wanted.name, value)
        binding.bind_ortvalue_output(wanted.name.replace("past_key_values", "present"), value)
    binding.bind_output("logits")
    return lambda: session.run_with_iobinding(binding)
