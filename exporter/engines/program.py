"""Writes the step program's own graphs into a bundle: accept, fill and commit. Needs torch, as they are traced."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import onnx_ir as ir

from specexport.contract.engines import Accept, Commit, Fill, ProgramGraph
from specexport.contract.methods import Method
from specexport.contract.model import CacheLayer, LoweredAs
from specexport.exporter import trace

FOLDER = "program"


@functools.lru_cache(maxsize=8)
def _accept(rule: Literal["lossless", "typical"], max_children: int, candidates: int) -> bytes:
    """A traced accept graph: hundreds of nodes that take long to trace and are the same for every model."""
    serialized: bytes = ir.to_proto(trace.trace_accept(rule, max_children, candidates)).SerializeToString()
    return serialized


def write_program(
    folder: Path, methods: Sequence[Method], cache: Sequence[CacheLayer], lowering: LoweredAs
) -> tuple[ProgramGraph, ...]:
    """Traces what the methods need into a folder ``program`` of the bundle.

    Portable graphs write no cache: their rows are copied by the runtime.

    Returns:
        The graphs, without engines; none for plain decoding.
    """
    trees = [tree for method in methods for tree in method.token_trees()]
    if not trees:
        return ()
    (folder / FOLDER).mkdir(exist_ok=True)

    def save(name: str, model: ir.Model) -> str:
        file = f"{FOLDER}/{name}.onnx"
        ir.save(model, folder / file)
        return file

    children = max(max(tree.parents.count(node) for node in range(len(tree))) for tree in trees)
    drawn = [method.support for method in methods if method.support]
    supports = {*drawn, *([1] if len(drawn) < len(methods) else [])}
    made: list[ProgramGraph] = []
    for support in sorted(supports):
        file = f"{FOLDER}/accept.m{support}.onnx"
        (folder / file).write_bytes(_accept("lossless", children, support))
        made.append(Accept(file=file, rule="lossless", candidates=support, max_children=children))
    file = f"{FOLDER}/accept.typical.onnx"
    (folder / file).write_bytes(_accept("typical", 1, 1))
    made.append(Accept(file=file, rule="typical", candidates=1, max_children=children))
    for method in methods:
        if method.drafts_chain and not all(tree.is_chain for tree in method.token_trees()):
            file = save("fill", trace.trace_fill(method.support))
            made.append(Fill(file=file, candidates=method.support))
    if lowering == "native" and not all(tree.is_chain for tree in trees):
        made.append(Commit(file=save("commit", trace.trace_commit(cache)), model="target"))
    return tuple(made)
