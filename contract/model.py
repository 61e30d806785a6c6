"""A bundle's record of each of its models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from specexport.contract.engines import CompiledEngine
from specexport.contract.shapes import ShapePoint, Size, Strict

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1, le=2**40)]
StoredAs = Literal["fp32", "fp16", "bf16", "int8", "int4", "fp8", "stored"]
BYTES_PER_WEIGHT: dict[StoredAs, float] = {
    "fp32": 4.0,
    "fp16": 2.0,
    "bf16": 2.0,
    "fp8": 1.0,
    "int8": 1.125,
    "int4": 0.625,
    "stored": 1.125,
}
"""Bytes of a stored weight, including a quantized one's share of a scale."""
LoweredAs = Literal["native", "portable"]
"""Operators of the graphs: the newest, which write the cache in place, or those of opset 20, which return new rows for
the runtime to copy."""
OPSETS: dict[LoweredAs, int] = {"native": 24, "portable": 20}
"""The portable one is for TensorRT 10.3, which JetPack 6 ships, and ONNX Runtime for Python 3.10: both know operators
up to opset 20."""
Probability = Annotated[float, Meta(ge=0.0, le=1.0)]
CELL = 8
"""G, tokens of a cell of a recurrent layer (``runtime/states.py``): few, so that a step of one token wastes little, but
enough that a state is seldom written."""


class GraphFiles(Strict, frozen=True):
    """A model's graph and its static shapes.

    Attributes:
        master: ONNX file with the symbolic dimensions of ``ShapePoint.sizes``.
    """

    master: str
    points: tuple[ShapePoint, ...]


class RankFiles(Strict, frozen=True):
    """One rank's part of a model that is split among processes (tensor parallelism).

    Attributes:
        master: its graph before it was cut, from which engines are compiled.
        segments: ONNX files, run one after the other. Between two of them the ranks combine their outputs whose names
            begin with one of :data:`~specexport.contract.tensors.COLLECTIVES`; later segments read the results.
    """

    weights: str
    master: str
    segments: tuple[str, ...]


class CacheLayer(Strict, frozen=True):
    """The cache of one layer: key/value heads, and their sizes."""

    heads: Size
    key_size: Size
    value_size: Size


class Recurrence(Strict, frozen=True):
    """A layer's recurrent state ``[H,Dk,Dv]``, and the updates of tokens that it has not seen.

    Attributes:
        heads: H of the state.
        key_heads: Hk; each serves ``heads / key_heads`` neighbouring heads.
        key_size: Dk.
        value_size: Dv.
        decays: number of decays of a head: 1, or Dk if each number of a key has its own.
        rows: R, number of last tokens whose updates are kept.
    """

    heads: Size
    key_heads: Size
    key_size: Size
    value_size: Size
    rows: Size
    decays: Size = 1

    @property
    def update_size(self) -> int:
        """U, the size of a token's update: its keys, its values, and the decays and strength of each head."""
        return self.key_heads * self.key_size + self.heads * (self.value_size + self.decays + 1)


class StateLayer(Strict, frozen=True):
    """The state of a layer without attention, whose size does not depend on the text (``runtime/states.py``).

    Attributes:
        conv_size: C, the number of channels of its convolution.
        conv_rows: number of earlier tokens that the convolution reads: one less than its width.
        recurrence: None for a convolution alone.
        back: number of last tokens that may be taken back: those that a draft has read and that were not accepted.
    """

    conv_size: Size
    conv_rows: Size
    recurrence: Recurrence | None = None
    back: Count = 0

    @property
    def kept_rows(self) -> int:
        """Number of last tokens whose inputs to the convolution are kept."""
        return self.conv_rows + self.back

    @property
    def nbytes(self) -> int:
        """Bytes for a slot."""
        recurrent = 0
        if (state := self.recurrence) is not None:
            recurrent = state.heads * state.key_size * state.value_size + state.rows * state.update_size
        return 4 * (self.kept_rows * self.conv_size + recurrent)


def with_rows(layers: Sequence[StateLayer], widest: int, back: int = 0) -> tuple[StateLayer, ...]:
    """The layers, keeping all updates of any step of at most ``widest`` tokens; ``back`` tokens may be taken back."""

    def kept(layer: StateLayer) -> StateLayer:
        state = layer.recurrence
        recurrence = None if state is None else msgspec.structs.replace(state, rows=CELL + widest)
        return msgspec.structs.replace(layer, recurrence=recurrence, back=back)

    return tuple(map(kept, layers))


class QuantizedBefore(Strict, frozen=True):
    """The matrices that were quantized in the checkpoint already.

    Attributes:
        format: such as ``AWQ``.
        kept: number stored with the checkpoint's integers and scales.
        converted: number rounded again; any others are stored in floating point.
        converted_rms_error: relative root-mean-square error of that rounding.
        rest: precision of the other matrices; None if it is that of ``PrecisionInfo.weights``.
    """

    format: str
    kept: Count
    converted: Count
    converted_rms_error: float | None = None
    rest: StoredAs | None = None


class Quality(Strict, frozen=True):
    """The effect of rounding on a model: its graph compared with the fp32 model over a text.

    Attributes:
        kl: mean KL divergence from the fp32 model's distributions, in nats a token.
        perplexity: the graph's.
        reference_perplexity: the fp32 model's.
        same_choice: share of the positions at which both models prefer the same next token.
        logits_rms_error: root-mean-square difference of the logits, relative to their spread.
    """

    tokens: Positive
    kl: float
    perplexity: float
    reference_perplexity: float
    same_choice: float
    logits_rms_error: float

    def __str__(self) -> str:
        kl = f"{self.kl:.4f}" if self.kl < 1 else f"{self.kl:.3g}"
        return (
            f"KL {kl} from fp32, perplexity {self.perplexity:.4g} (fp32: {self.reference_perplexity:.4g}), same first "
            f"choice {self.same_choice:.1%}, over {self.tokens} tokens"
        )


class PrecisionInfo(Strict, frozen=True):
    """The type of a model's weights; its ONNX graphs compute in fp32.

    Attributes:
        weights: type of stored matrices.
        block_size: number of weights that share a scale, for int8 and int4; None for one scale a column.
        weight_rms_error: relative root-mean-square error of the quantized weights.
        quality: a target's quality over the shipped text; None if onnxruntime was missing, which measures it.
        not_quantized: the matrices left in fp32, with the reason of each.
        quantized_before: set if the checkpoint was quantized.
        only_cpu: whether it runs on CPUs only, as matrices have zero points, or scales that no engine for GPUs reads.
    """

    weights: StoredAs
    block_size: Positive | None = None
    weight_rms_error: float | None = None
    quality: Quality | None = None
    not_quantized: dict[str, str] = msgspec.field(default_factory=dict)
    quantized_before: QuantizedBefore | None = None
    only_cpu: bool = False


class Model(Strict, frozen=True):
    """A target or a draft.

    Attributes:
        family: transformers' ``model_type``.
        source: location of its checkpoint, for ``verify``; not used at run time.
        vocab_size: width of the logits.
        max_positions: longest sequence that the model supports.
        cache: one entry for each layer with attention.
        weights: the weights file, shared by all its graphs.
        shared_bytes: bytes of a draft's weights that lie in the target's file, as the target has the same.
        graph: a step graph for a target, a propose graph for a draft.
        engines: that graph, compiled for devices.
        embedding_size: H of the embeddings that its step graph can read instead of tokens; None if it reads none.
        states: one entry for each layer without attention.
        ranks: each rank's part, if the model is split; ``weights`` and ``graph`` are then the first rank's, before its
            graph was cut.
    """

    family: str
    source: str
    parameters: Positive
    vocab_size: Size
    max_positions: Size
    precision: PrecisionInfo
    cache: tuple[CacheLayer, ...]
    weights: str
    graph: GraphFiles
    shared_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 0
    engines: tuple[CompiledEngine, ...] = ()
    embedding_size: Size | None = None
    states: tuple[StateLayer, ...] = ()
    ranks: tuple[RankFiles, ...] = ()

    def of_rank(self, rank: int) -> Model:
        """A rank's part, with its share of the heads and its files; the model itself if it is not split."""
        if not self.ranks:
            return self
        files, replace = self.ranks[rank], msgspec.structs.replace
        return replace(
            self,
            cache=tuple(replace(layer, heads=layer.heads // len(self.ranks)) for layer in self.cache),
            weights=files.weights,
            graph=replace(self.graph, master=files.master),
            engines=tuple(engine for engine in self.engines if engine.rank == rank),
            ranks=(),
        )

    @property
    def cache_row_bytes(self) -> int:
        """Bytes that the cache of all layers takes for a token."""
        return sum(4 * layer.heads * (layer.key_size + layer.value_size) for layer in self.cache)
