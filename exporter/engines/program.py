"""Writes the step program's own graphs into a bundle: accept, fill and commit. Needs torch, as they are traced."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from specexport.contract.engines import Accept, AcceptRule, Commit, Fill, ProgramGraph
from specexport.contract.manifest import filled_trees, fills
from specexport.contract.methods import Method
from specexport.contract.model import CacheLayer, LoweredAs
from specexport.exporter import trace

FOLDER = "program"


@functools.lru_cache(maxsize=8)
def _accept(rule: AcceptRule, max_children: int, candidates: int) -> bytes:
    """A traced accept graph: hundreds of nodes that take long to trace and are the same for every model."""
    serialized: bytes = ir.to_proto(trace.trace_accept(rule, max_children, candidates)).SerializeToString()
    return serialized


def write_program(
    folder: Path, methods: Sequence[Method], cache: Sequence[CacheLayer], lowering: LoweredAs
) -> tuple[ProgramGraph, ...]:
    """Traces what the methods need, and those that every bundle has, into a folder ``program`` of the bundle.

    Portable graphs write no cache: their rows are copied by the runtime.

    Returns:
        The graphs, without engines.
    """
    trees = [tree for method in methods for tree in method.token_trees()]
    (folder / FOLDER).mkdir(exist_ok=True)

    def save(name: str, model: ir.Model) -> str:
        file = f"{FOLDER}/{name}.onnx"
        ir.save(model, folder / file)
        return file

    children = max((tree.parents.count(node) for tree in trees for node in range(len(tree))), default=1)
    drawn = [method.support for method in methods if method.support]
    supports = {*drawn, *([1] if len(drawn) < len(methods) or not methods else [])}
    accepts: list[tuple[str, AcceptRule, int]] = [
        ("greedy", "greedy", 1),
        *((f"m{support}", "lossless", support) for support in sorted(supports)),
        ("typical", "typical", 1),
    ]
    graphs: list[ProgramGraph] = []
    for name, rule, support in accepts:
        file = f"{FOLDER}/accept.{name}.onnx"
        (folder / file).write_bytes(_accept(rule, children if rule == "lossless" else 1, support))
        graphs.append(Accept(file=file, rule=rule, candidates=support, max_children=children))
    for method in methods:
        if filled_trees(method) and not any(isinstance(graph, Fill) and fills(graph, method) for graph in graphs):
            support, stages = method.support, method.drafted_stages
            file = save(f"fill.m{support}" + (f".s{stages}" if stages else ""), trace.trace_fill(support, stages))
            graphs.append(Fill(file=file, candidates=support, stages=stages))
    if lowering == "native" and not all(tree.is_chain for tree in trees):
        graphs.append(Commit(file=save("commit", trace.trace_commit(cache)), model="target"))
    return tuple(graphs)
