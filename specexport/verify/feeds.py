"""Synthetic but valid inputs for one run of a graph at a shape point."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx

from specexport.contract import tensors
from specexport.contract.engines import Accept, Commit, ComputedIn, Fill, ProgramGraph
from specexport.contract.manifest import GenerationDefaults
from specexport.contract.model import Model
from specexport.contract.shapes import ShapePoint
from specexport.contract.tensors import Array
from specexport.contract.tree import TokenTree
from specexport.exporter.engines.profiles import CompileJob

Feed = dict[str, Array]
_Values = dict[str, npt.ArrayLike]

CACHE_TYPES: dict[ComputedIn, npt.DTypeLike] = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}
_PAST = 40
"""Most rows that the cache holds before a run."""
FIRST_CHOICES = 3
"""Number of most probable tokens that a speculator's levels continue."""
_SPREAD = 3.0
"""Standard deviation of random logits, such that some draft tokens are accepted and some are not."""


@dataclass(frozen=True)
class GraphRun:
    """One run of a graph.

    Attributes:
        tree: the tree of its tokens, one node a token.
    """

    graph: onnx.GraphProto
    of: Model | ProgramGraph
    point: ShapePoint
    tree: TokenTree
    vocab: int
    compute: ComputedIn
    random: np.random.Generator

    @property
    def past(self) -> int:
        """Rows in the cache."""
        return max(0, min(_PAST, self.point.cache - self.written))

    @property
    def written(self) -> int:
        """Rows that the run writes."""
        return self.point.tokens if isinstance(self.of, Commit) else self.point.fed

    def feed(self) -> Feed:
        """An array for each of the graph's inputs, in float32 for caches; slots get different values."""
        slots = [self._slot() for _ in range(self.point.batch)]
        feed: Feed = {}
        for value in self.graph.input:
            names = [dim.dim_param for dim in value.type.tensor_type.shape.dim]
            parts = [slot[value.name] for slot in slots]
            feed[value.name] = np.concatenate(parts, names.index("B")) if "B" in names else parts[0]
        return feed

    def _slot(self) -> Feed:
        """The inputs of one slot."""
        values = _INPUTS[type(self.of)](self)
        sizes = CompileJob((self.point,), self.vocab).sizes[0] | {"B": 1}
        feed: Feed = {}
        for value in self.graph.input:
            kind = value.type.tensor_type
            shape = tuple(dim.dim_value or sizes.get(dim.dim_param, 0) for dim in kind.shape.dim)
            if value.name.startswith(tensors.CACHES):
                rows = self.random.standard_normal(shape, np.float32)
                feed[value.name] = rows.astype(CACHE_TYPES[self.compute]).astype(np.float32)
            elif value.name in values:
                dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
                feed[value.name] = np.broadcast_to(values[value.name], shape).astype(dtype)
            else:
                feed[value.name] = tensors.DECLARED[value.name].shaped(*shape).array(sizes)
        return feed


def _model(call: GraphRun) -> _Values:
    """Inputs of a step graph or a propose graph; drawing is greedy, reported probabilities are not."""
    assert isinstance(call.of, Model)
    tokens = call.point.tokens
    # The least noise, its initial value, draws the most probable token, whatever the rounding of the others.
    values: _Values = {**_SAMPLING}
    for value in call.graph.input:
        if value.name in (tensors.HIDDEN_STATE, tensors.LAYER_STATES, tensors.OWN_STATE):
            rows = (tokens,) if value.name == tensors.LAYER_STATES else ()
            width = value.type.tensor_type.shape.dim[-1].dim_value
            values[value.name] = call.random.standard_normal((*rows, width))
    if not call.of.cache:  # an MLP speculator continues from hidden states; the levels of its tree are full
        levels = (call.point.drafts, tokens)
        parents = call.random.integers(0, tokens, levels)
        parents[:2] = 0  # the root is alone
        return values | {
            tensors.INPUT_IDS: call.random.integers(0, call.of.vocab_size),
            tensors.LEVEL_PARENTS: parents,
            tensors.LEVEL_RANKS: call.random.integers(0, FIRST_CHOICES, levels),
        }
    (ids,) = (value for value in call.graph.input if value.name == tensors.INPUT_IDS)
    length = ids.type.tensor_type.shape.dim[1].dim_value or tokens  # a block begins with one token
    return values | {
        tensors.INPUT_IDS: call.random.integers(0, min(call.vocab, call.of.vocab_size), length),
        tensors.POSITION_IDS: call.past + call.tree.depths,
        tensors.TREE_MASK: call.tree.mask,
        tensors.PAST_LENGTH: call.past,
        tensors.LOGITS_ROWS: np.arange(tokens)[tokens - call.point.rows :],
        tensors.BLOCK_ROWS: call.point.drafts + 1,
    }


def _accept(call: GraphRun) -> _Values:
    assert isinstance(call.of, Accept)
    parents = np.array(call.tree.parents)
    logits = _SPREAD * call.random.standard_normal((len(parents), call.vocab)).astype(np.float32)
    # Probable tokens of the target, so that some are accepted; each node has its own rank among its siblings.
    likely = np.argsort(-logits[parents[1:]], axis=-1)
    ids = likely[:, : call.of.candidates]
    tokens = likely[np.arange(len(likely)), np.array(call.tree.ranks[1:], np.int64)]
    if call.of.candidates == 1:
        ids = tokens[:, None]
    probs = call.random.dirichlet(np.ones(ids.shape[1]), len(ids)) if len(ids) else np.zeros(ids.shape)
    return {
        tensors.LOGITS: logits,
        tensors.PARENTS: parents,
        tensors.TREE_MASK: call.tree.mask,
        tensors.DRAFT_TOKENS: tokens,
        tensors.DRAFT_IDS: ids,
        tensors.DRAFT_PROBS: probs,
        tensors.UNIFORM: call.random.random(1 if call.of.rule == "typical" else len(parents)),
        tensors.THRESHOLD: GenerationDefaults().posterior_threshold,
        tensors.ALPHA: GenerationDefaults().posterior_alpha,
        **_SAMPLING,
    }


def _fill(call: GraphRun) -> _Values:
    assert isinstance(call.of, Fill)
    stages, candidates = call.of.stages, call.of.candidates
    values: _Values = {
        tensors.TREE_ROWS: call.tree.depths[1:] - 1,  # the first row of each stage, if there are stages
        tensors.TREE_RANKS: np.array(call.tree.ranks[1:], np.int64),
    }
    for stage in range(max(1, stages)):
        rows = 1 if stages and not stage else call.point.rows if stages else call.point.drafts
        ids = np.stack([call.random.permutation(call.vocab)[:candidates] for _ in range(rows)])
        drawn, probs = ids[:, call.random.integers(candidates)], call.random.dirichlet(np.ones(candidates), rows)
        for kind, array in zip(tensors.DRAFTED, (drawn, ids, probs), strict=True):
            values |= {kind.of_stage(stage): array} if stages else {kind: array[:, None]}
    return values


def _commit(call: GraphRun) -> _Values:
    nodes = np.arange(len(call.tree))
    path = nodes[call.tree.mask[-1]]
    return {tensors.PAST_LENGTH: call.past, tensors.PATH: np.pad(path, (0, len(nodes) - len(path)))}


_SAMPLING: _Values = {tensors.TEMPERATURE: 0.8, tensors.TOP_K: 0, tensors.TOP_P: 0.95}
_INPUTS: dict[type, Callable[[GraphRun], _Values]] = {Model: _model, Accept: _accept, Fill: _fill, Commit: _commit}
