"""The manifest's part on compiled engines: what was built, for which devices, and the step program's own graphs."""

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
"""Libraries whose engines are compiled: they are not ONNX, and read no embeddings."""
_Capability = Annotated[str, Meta(pattern="^[1-9][0-9]?[.][0-9]$")]
"""A CUDA compute capability, such as ``8.9``."""
_FUSED = ("GroupQueryAttention", "QuickGelu", "SkipSimplifiedLayerNormalization")
FUSED_OPERATORS = frozenset(("com.microsoft", name) for name in _FUSED)
"""Domain and type of ONNX Runtime's own operators in graphs for onnxruntime-cuda; the masters have only ONNX's."""
LARGEST_TOP_K = 256
"""Largest top-k with which a device decides acceptance; with larger ones the host does."""
AcceptRule = Literal["greedy", "lossless", "typical"]


class CompiledEngine(Strict, frozen=True, kw_only=True):
    """A graph compiled for a library and some devices; for onnxruntime-cuda an ONNX graph, for any device.

    Inputs and outputs are those of the ONNX graph by the same names, of the same types but for the KV cache, which is
    of type ``compute``. Lowered natively, ``present_*`` must be bound to the memory of ``past_*``.

    Attributes:
        file: the serialized engine; for onnxruntime-cuda the source itself.
        segments: for onnxruntime-cuda, the segments that a rank runs instead: see ``contract.model.RankFiles``. But
            ``join.N`` has the ranks' parts one after the other, along an additional first axis.
        source: the ONNX file it was compiled from. It is derived from the master: fixed dimensions, one pass of
            a draft's loop, and activations of type ``compute``.
        runtime: the library that runs it.
        version: the library's own version string; empty if any runs it.
        compute_capabilities: the devices it was compiled for; empty if any runs it.
        compute: type of activations and the KV cache.
        rank: of a model that is split among processes, the rank whose part it is; 0 if it is not split.
        profiles: the shapes it runs at, in the order of its optimization profiles, each with min = opt = max. A propose
            graph is compiled for K = 1: to draft K tokens it is called K times, each time with the last two tokens of
            the text and the draft so far, so that the weights are stored once for any K. That of an MLP speculator is
            compiled for all its stages. A step graph may lack the profile of one token; plain decoding is then padded
            to the narrowest tree.
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
    """A graph without weights between those of the models, which keeps a step on the device.

    Attributes:
        file: its ONNX graph, with symbolic dimensions.
        engines: that graph, compiled.
    """

    file: str
    engines: tuple[CompiledEngine, ...] = ()


class Accept(_ProgramGraph, frozen=True, kw_only=True, tag_field="name", tag="accept"):
    """Decides which draft tokens are accepted, and draws the bonus token. In a profile, ``tokens`` is N.

    Attributes:
        rule: ``greedy`` reads no q, noise or sampling parameters; ``lossless`` also decides greedy requests in a
            step with others; ``typical``.
        candidates: M, the support of q; 1 if tokens are chosen without drawing, and for rules that read no q.
        max_children: most children a node of a tree may have.
    """

    rule: AcceptRule
    candidates: Size
    max_children: Size


class Fill(_ProgramGraph, frozen=True, kw_only=True, tag_field="name", tag="fill"):
    """Fills a tree with drafted tokens, and returns q of each node.

    In a profile, ``tokens`` is N, ``drafts`` is K, and ``rows`` are those of a stage after the first, if there are
    stages. The chains of a draft without stages need no such graph: their tokens are the draft's.

    Attributes:
        candidates: M.
        stages: number of outputs with drafted tokens; 0 for a single output of K rows.
    """

    candidates: Size
    stages: Annotated[int, Meta(ge=0, le=16)] = 0


class Commit(_ProgramGraph, frozen=True, kw_only=True, tag_field="name", tag="commit"):
    """Makes the cache rows of an accepted path through a branching tree contiguous.

    In a profile, ``tokens`` is N and ``cache`` is S. For models lowered natively; chains need none.

    Attributes:
        model: whose cache: ``target``.
    """

    model: Literal["target"]


ProgramGraph = Accept | Fill | Commit
