"""A bundle's records of compiled engines, and of the graphs of the step program."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from msgspec import Meta

from specexport.contract.shapes import ShapePoint, Size, Strict

BackendName = Literal["onnxruntime", "onnxruntime-cuda", "tensorrt", "tensorrt-rtx"]
"""Backends that a bundle may be built for."""
EngineRuntime = Literal["onnxruntime-cuda", "tensorrt", "tensorrt-rtx"]
"""Libraries that run a bundle's engines on a GPU; none runs another's."""
ENGINE_RUNTIMES: tuple[EngineRuntime, ...] = get_args(EngineRuntime)
ComputedIn = Literal["fp32", "fp16", "bf16"]
COMPILERS: tuple[EngineRuntime, ...] = ("tensorrt", "tensorrt-rtx")
"""Libraries that compile engines: these are not ONNX, and read no embeddings."""
_Capability = Annotated[str, Meta(pattern="^[1-9][0-9]?[.][0-9]$")]
"""A CUDA compute capability, such as ``8.9``."""
_FUSED = ("GroupQueryAttention", "QuickGelu", "SkipSimplifiedLayerNormalization")
FUSED_OPERATORS = frozenset(("com.microsoft", name) for name in _FUSED)
"""ONNX Runtime's own operators in graphs for onnxruntime-cuda, by domain and type; masters have only ONNX's."""
LARGEST_TOP_K = 256
"""Largest top-k for which a device decides acceptance; for larger ones the host decides."""
AcceptRule = Literal["greedy", "lossless", "typical"]


class CompiledEngine(Strict, frozen=True, kw_only=True):
    """A graph compiled for a library and some devices; for onnxruntime-cuda an ONNX graph, for any device.

    It has the inputs and outputs of the ONNX graph, with the same names and types, except that the KV cache is of type
    ``compute``. If it is lowered natively, ``present_*`` must be bound to the memory of ``past_*``.

    Attributes:
        file: the serialized engine; for onnxruntime-cuda the source itself.
        segments: for onnxruntime-cuda, the segments that a rank runs instead, see ``contract.model.RankFiles``; but
            ``join.N`` has the ranks' parts one after the other, along an additional first axis.
        source: the ONNX file it was compiled from, derived from the master: with fixed dimensions, one pass of a
            draft's loop, and activations of type ``compute``.
        runtime: the library that runs it.
        version: the library's own version string; empty if any runs it.
        compute_capabilities: the devices it was compiled for; empty if any runs it.
        compute: type of activations and the KV cache.
        rank: the rank whose part it is, if the model is split among processes; else 0.
        profiles: the shapes it runs at, in the order of its optimization profiles, each with min = opt = max. A propose
            graph is compiled for K = 1: to draft K tokens it is called K times, each time with the last two tokens of
            the text and the draft so far, so that the weights are stored once for any K. An MLP speculator's is
            compiled for all stages. A step graph may lack the profile of one token; plain decoding is then padded to
            the narrowest tree.
    """

    file: str
    segments: tuple[str, ...] = ()
    source: str
    runtime: EngineRuntime
    version: str
    compute_capabilities: Annotated[tuple[_Capability, ...], Meta(max_length=32)]
    compute: ComputedIn
    rank: Annotated[int, Meta(ge=0, le=2**10)] = 0
    profiles: Annotated[tuple[ShapePoint, ...], Meta(min_length=1, max_length=4096)]

    def __post_init__(self) -> None:
        if self.runtime in COMPILERS and not self.compute_capabilities:
            raise ValueError(f"compute_capabilities are empty; expected those that {self.runtime} compiled for")

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether it was compiled for a device of this compute capability."""
        return not self.compute_capabilities or "{}.{}".format(*capability) in self.compute_capabilities


class _ProgramGraph(Strict, frozen=True, kw_only=True):
    """A graph without weights that runs between the models' graphs and so keeps a step on the device.

    Attributes:
        file: its ONNX graph, with symbolic dimensions.
    """

    file: str
    engines: tuple[CompiledEngine, ...] = ()


class Accept(_ProgramGraph, frozen=True, kw_only=True, tag_field="name", tag="accept"):
    """Decides which draft tokens are accepted, and draws the bonus token. In a profile, ``tokens`` is N.

    Attributes:
        rule: the acceptance rule. ``greedy`` reads no q, noise or sampling parameters; ``lossless`` also decides for
            greedy requests in a step with others.
        candidates: M, the support of q; 1 if tokens are chosen without drawing, and for rules that read no q.
        max_children: the most children that a node of a tree may have.
    """

    rule: AcceptRule
    candidates: Size
    max_children: Size


class Fill(_ProgramGraph, frozen=True, kw_only=True, tag_field="name", tag="fill"):
    """Fills a tree with drafted tokens, and returns q of each node.

    In a profile, ``tokens`` is N, ``drafts`` is K, and ``rows`` is the number of rows of every stage but the first, if
    there are stages. A chain from a draft without stages needs no such graph, as its nodes are the draft's tokens.

    Attributes:
        candidates: M.
        stages: number of outputs with drafted tokens; 0 for a single output of K rows.
    """

    candidates: Size
    stages: Annotated[int, Meta(ge=0, le=16)] = 0


class Commit(_ProgramGraph, frozen=True, kw_only=True, tag_field="name", tag="commit"):
    """Makes the target's cache rows of an accepted path through a branching tree contiguous.

    In a profile, ``tokens`` is N and ``cache`` is S. Only targets lowered natively have one; chains need none.
    """


ProgramGraph = Accept | Fill | Commit
