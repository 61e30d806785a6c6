"""The cost of a step of T tokens on our kernels and on onnxruntime's, in turns, and its ratio to reading the weights.

The target's step graph runs at every T, with 100 tokens in the cache, on one session of each kind; its products with
weights also alone, at T = 1. The reading speed is that of all threads summing an array larger than their caches.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
from onnx.external_data_helper import ExternalDataInfo
from onnx.shape_inference import infer_shapes
from onnx.utils import Extractor

from benchmarks import common
from benchmarks.pair import bundle, inflated_pair
from specexport.contract import tensors
from specexport.contract.errors import BackendError
from specexport.runtime.backend import Graph, RunShape, open_target
from specexport.runtime.backends.onnxruntime.kernels import SWITCH, PackedWeights, kernels
from specexport.runtime.backends.onnxruntime.session import open_session
from specexport.runtime.bundle import Bundle
from specexport.tables import show

PAST, CHOICES = 100, (4, 1, 2, 3, 6, 8)
READ_BYTES = 256 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``python -m benchmarks kernels``."""
    common.add_common_arguments(parser)
    parser.add_argument("--precisions", default="fp32,bf16,int8,int4")
    parser.add_argument("--tokens", default="1,2,3,5,8,16", help="T, the first to compare the others with")
    parser.add_argument("--rounds", type=int, default=30)


def main(args: argparse.Namespace) -> int:
    """Prints a table for each precision."""
    if not kernels().devices:
        raise BackendError(f"there is nothing to compare: {kernels().described}")
    target, draft = inflated_pair(args.models, args.work)
    widths, results = tuple(map(int, args.tokens.split(","))), {}
    reading = _reading(args.threads)  # once: later arrays may lie in smaller pages
    for precision in args.precisions.split(","):
        opened = Bundle.open(bundle(target, draft, args.work, precision, CHOICES, 512, 32), check_hashes=False)
        ours, theirs = _open(opened, args.threads, "1"), _open(opened, args.threads, "0")
        times: dict[str, list[list[float]]] = {"ours": [[] for _ in widths], "onnxruntime": [[] for _ in widths]}
        for _ in range(args.rounds):
            for name, graph in (("ours", ours), ("onnxruntime", theirs)):
                for of_width, more in zip(times[name], runs(graph, widths, 1), strict=True):
                    of_width += more
        medians = {name: [statistics.median(part) for part in parts] for name, parts in times.items()}
        weights = opened.file(opened.manifest.target.weights).stat().st_size
        results[precision] = {
            "reading": reading,
            "weights": weights,
            "seconds": medians,
            "products": _products(opened, args.threads, args.rounds),
        }
        _show(precision, widths, results[precision])
    report = {"machine": common.machine(args.threads), "kernels": kernels().instruction_set, "tokens": widths}
    common.write_report(args.json, {**report, "results": results})
    return 0


def _show(precision: str, widths: tuple[int, ...], result: dict[str, Any]) -> None:
    table = common.new_table(
        f"{precision}, {result['weights'] / 1e6:.0f} MB of weights; reading {result['reading'] / 1e9:.1f} GB/s, "
        f"products {result['products'] / 1e9:.1f}",
        ["T"],
        ["ours, ms", "onnxruntime, ms", "ours / onnxruntime", "c(T) / c(1)", "of onnxruntime's", "of reading"],
    )
    ours, theirs = result["seconds"]["ours"], result["seconds"]["onnxruntime"]
    for T, mine, other in zip(widths, ours, theirs, strict=True):
        read = result["weights"] / mine / result["reading"]
        ratios = (f"{mine / other:.2f}", f"{mine / ours[0]:.2f}", f"{other / theirs[0]:.2f}", f"{read:.0%}")
        table.add_row(str(T), f"{1e3 * mine:.2f}", f"{1e3 * other:.2f}", *ratios)
    show(table)


def _open(opened: Bundle, threads: int, kernels: str) -> Graph:
    with patch.dict(os.environ, {SWITCH: kernels}):
        graph = open_target(opened, threads=threads)
    graph.reserve(PAST + 64)
    return graph


def _products(opened: Bundle, threads: int, rounds: int) -> float:
    """Bytes of weights a second that the products of the target's step read on our kernels, with one row each."""
    model = opened.manifest.target
    path = opened.file(model.graph.master)
    graph = infer_shapes(onnx.load(path, load_external_data=False))
    constant = {tensor.name for tensor in graph.graph.initializer}
    for node in graph.graph.node:  # in an order in which inputs come first
        if constant.issuperset(name for name in node.input if name):
            constant.update(node.output)
    products = [node for node in graph.graph.node if node.op_type == "MatMul" and node.input[1] in constant]
    part = Extractor(graph).extract_model([node.input[0] for node in products], [node.output[0] for node in products])
    stored = sum(ExternalDataInfo(tensor).length or 0 for tensor in part.graph.initializer if tensor.external_data)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        weights = opened.file(model.weights)
        os.link(weights, Path(folder) / weights.name)
        onnx.save(part, Path(folder) / path.name)
        packed = PackedWeights.of(opened.files_hash, False)  # the step's: the same matrices in the same order
        lowering, stored_as = opened.manifest.lowering, model.precision.weights
        session = open_session(Path(folder) / path.name, threads, lowering, stored_as, packed=packed)
    inputs = {value.name: np.ones((1, 1, value.shape[-1]), np.float32) for value in session.get_inputs()}
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        session.run(None, inputs)
        times.append(time.perf_counter() - start)
    return stored / statistics.median(times[1:])


def _reading(threads: int) -> float:
    """The median reading speed in bytes a second."""
    parts = [np.ones(READ_BYTES // 4 // threads, np.float32) for _ in range(threads)]
    taken = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(9):
            start = time.perf_counter()
            list(pool.map(lambda part: np.dot(part, part), parts))  # faster than memory, unlike np.sum
            taken.append(time.perf_counter() - start)
    return READ_BYTES / statistics.median(taken)


def runs(graph: Graph, widths: tuple[int, ...], rounds: int) -> list[list[float]]:
    """Seconds of every run except the first, for each width, in turns."""
    times: list[list[float]] = [[] for _ in widths]
    for turn in range(rounds + 1):
        for T, of_width in zip(widths, times, strict=True):
            inputs = graph.inputs(RunShape(T, T))
            inputs[tensors.PAST_LENGTH][:] = PAST
            inputs[tensors.POSITION_IDS][:] = PAST + np.arange(T)
            inputs[tensors.TREE_MASK][:] = np.tri(T, dtype=np.bool_)
            start = time.perf_counter()
            graph.run(RunShape(T, T))
            if turn:
                of_width.append(time.perf_counter() - start)
    return times
