"""The manifest's part on compiled engines: what was built, for which devices, and the step program's own graphs."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from specexport.contract.shapes import ShapePoint

BackendName = Literal["onnxruntime", "onnxruntime-cuda", "tensorrt", "tensorrt-rtx"]
"""What a bundle is meant to run on, and what runs one."""
BACKENDS: tuple[BackendName, ...] = get_args(BackendName)
EngineRuntime = Literal["onnxruntime-cuda", "tensorrt", "tensorrt-rtx"]
"""What runs a bundle's engines on a GPU; none runs another's."""
ENGINE_RUNTIMES: tuple[EngineRuntime, ...] = get_args(EngineRuntime)
ComputedIn = Literal["fp32", "fp16", "bf16"]
COMPILERS: tuple[EngineRuntime, ...] = ("tensorrt", "tensorrt-rtx")
"""Those of them that compile: their engines are not ONNX, and read no embeddings."""
Capability = Annotated[str, Meta(pattern="^[1-9][0-9]?[.][0-9]$")]
"""A CUDA compute capability, such as ``8.9``."""
LARGEST_TOP_K = 256
"""Most tokens that top-k may leave where a device decides; the host does where a request asks for more."""
AcceptRule = Literal["greedy", "lossless", "typical"]
_Width = Annotated[int, Meta(ge=1, le=2**24)]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class CompiledEngine(_Strict, frozen=True, kw_only=True):
    """One graph, made for a library and some devices. For onnxruntime-cuda it is an ONNX graph, for any device.

    Inputs and outputs are those of the ONNX graph by the same names, of the same types but for the KV cache, which is
    of type ``compute``. Lowered natively, ``present_*`` must be bound to the memory of ``past_*``.

    Attributes:
        file: the serialized engine; for onnxruntime-cuda the source itself.
        segments: of a rank's part for onnxruntime-cuda, what runs in its place: see ``contract.model.RankFiles``. But
            ``join.N`` has the ranks' parts one after the other, along a first axis of its own.
        source: the ONNX file it was compiled from. It is derived from the master: fixed dimensions, one pass of
            a draft's loop, and activations of type ``compute``.
        runtime: the library that runs it.
        version: of that library, as it calls itself; empty where any will do.
        compute_capabilities: the devices it was compiled for; none where any will do.
        compute: what activations and the KV cache are.
        rank: of a model that is split among processes, whose part it is; what is not split is that of the first.
        profiles: the shapes it runs at, in the order of its optimization profiles, each with min = opt = max. A propose
            graph is compiled for K = 1: to draft K tokens it is called K times, each time with the last two tokens of
            the text and what was drafted so far, so that the weights are stored once and any K will do. That of an MLP
            speculator is compiled for all its stages. A step graph may lack the profile of one token; plain decoding
            then runs padded to the narrowest tree.
    """

    file: str
    segments: tuple[str, ...] = ()
    source: str
    runtime: EngineRuntime
    version: str
    compute_capabilities: Annotated[tuple[Capability, ...], Meta(max_length=32)]
    compute: ComputedIn
    rank: Annotated[int, Meta(ge=0, le=2**10)] = 0
    profiles: Annotated[tuple[ShapePoint, ...], Meta(min_length=1, max_length=4096)]

    def __post_init__(self) -> None:
        if self.runtime in COMPILERS and not self.compute_capabilities:
            raise ValueError(f"compute_capabilities are empty; expected those that {self.runtime} compiled for")

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether it was compiled for a device of this compute capability."""
        return not self.compute_capabilities or "{}.{}".format(*capability) in self.compute_capabilities


class _ProgramGraph(_Strict, frozen=True, kw_only=True):
    """A graph without weights that keeps a step on the device between those of the models.

    Attributes:
        file: its ONNX graph, with symbolic dimensions.
        engines: that graph, compiled.
    """

    file: str
    engines: tuple[CompiledEngine, ...] = ()


class Accept(_ProgramGraph, frozen=True, kw_only=True, tag_field="name", tag="accept"):
    """Which draft tokens stay, and the bonus token (``graphs/accept.py``). In a profile, ``tokens`` is N.

    Attributes:
        rule: ``greedy`` takes no q, noise or sampling parameters; ``lossless`` decides on greedy requests too, in a
            step with others; ``typical``.
        candidates: M, tokens that q gives probability to; 1 where tokens are chosen without drawing, and for rules
            that take no q.
        max_children: most children a node of a tree may have.
    """

    rule: AcceptRule
    candidates: _Width
    max_children: _Width


class Fill(_ProgramGraph, frozen=True, kw_only=True, tag_field="name", tag="fill"):
    """The tokens of a tree and q of each, from what was drafted.

    In a profile, ``tokens`` is N, ``drafts`` is K, and ``rows`` are those of a stage after the first, if there are
    stages. The chains of a draft without stages need none: their tokens are the draft's.

    Attributes:
        candidates: M.
        stages: outputs that say what was drafted; 0 for one of K rows.
    """

    candidates: _Width
    stages: Annotated[int, Meta(ge=0, le=16)] = 0


class Commit(_ProgramGraph, frozen=True, kw_only=True, tag_field="name", tag="commit"):
    """Moves the cache rows of an accepted path of a branching tree together.

    In a profile, ``tokens`` is N and ``cache`` is S. For models lowered natively; chains need none.

    Attributes:
        model: whose cache: ``target``.
    """

    model: Literal["target"]


ProgramGraph = Accept | Fill | Commit
