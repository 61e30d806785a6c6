"""A bundle's record of each of its models."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from specexport.contract.engines import CompiledEngine
from specexport.contract.shapes import ShapePoint

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1, le=2**40)]
Size = Annotated[int, Meta(ge=1, le=2**24)]
"""A dimension of a tensor; bounded, so that a forged manifest cannot ask for absurd allocations unnoticed."""
StoredAs = Literal["fp32", "fp16", "bf16", "int8", "int4", "fp8", "stored"]
LoweredAs = Literal["native", "portable"]
"""Which operators the graphs are made of: the newest, which write the cache in place, or those of opset 20, which
return new rows for the runtime to copy."""
OPSETS: dict[LoweredAs, int] = {"native": 24, "portable": 20}
"""TensorRT 10.3, which JetPack 6 ships, and ONNX Runtimes for Python 3.10 know operators up to opset 20."""
Probability = Annotated[float, Meta(ge=0.0, le=1.0)]


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What every record of the manifest is: its fields by name, and no others."""


class GraphFiles(Strict, frozen=True):
    """A model's graph and its static shapes.

    Attributes:
        master: ONNX file whose dimensions are symbolic: those of ``ShapePoint.sizes``.
        points: the shapes it runs at.
    """

    master: str
    points: tuple[ShapePoint, ...]


class RankFiles(Strict, frozen=True):
    """What one process runs of a model that is split among several: tensor parallelism.

    Attributes:
        weights: its weights file.
        master: its graph before it was cut: what engines are compiled from.
        segments: ONNX files, run one after the other. Between two of them the ranks meet: every output of one whose
            name is in :data:`~specexport.contract.tensors.MEETINGS`, a number behind it, is put together with those of
            the other ranks and is then the input of that name of those after it.
    """

    weights: str
    master: str
    segments: tuple[str, ...]


class CacheLayer(Strict, frozen=True):
    """Key/value heads and head sizes of one layer."""

    heads: Size
    key_size: Size
    value_size: Size


class Recurrence(Strict, frozen=True):
    """A layer's recurrent state, and what it still needs of tokens that the state has not seen.

    Attributes:
        heads: H of the state.
        key_heads: Hk, of which each serves ``heads / key_heads`` neighbouring heads.
        key_size: Dk.
        value_size: Dv.
        decays: of each head: one, or one for each of the Dk numbers of a key.
        rows: R, of how many of the last tokens the updates are kept.
    """

    heads: Size
    key_heads: Size
    key_size: Size
    value_size: Size
    rows: Size
    decays: Size = 1

    @property
    def update_size(self) -> int:
        """U, the numbers of a token's update: its keys, its values, and of each head the decays and a strength."""
        return self.key_heads * self.key_size + self.heads * (self.value_size + self.decays + 1)


class StateLayer(Strict, frozen=True):
    """What a layer without attention keeps of a text, whatever its length (``specexport.contract.states``).

    Attributes:
        conv_size: C, the width of its convolution's inputs.
        conv_rows: of how many tokens before its own it reads those inputs: one less than the convolution's width.
        recurrence: None for a convolution alone.
        back: how many of the last tokens may be taken back: those that a draft has read and were not accepted.
    """

    conv_size: Size
    conv_rows: Size
    recurrence: Recurrence | None = None
    back: Count = 0

    @property
    def kept_rows(self) -> int:
        """Of how many of the last tokens the convolution's inputs are kept."""
        return self.conv_rows + self.back

    @property
    def nbytes(self) -> int:
        """Bytes of a slot."""
        recurrent = 0
        if (state := self.recurrence) is not None:
            recurrent = state.heads * state.key_size * state.value_size + state.rows * state.update_size
        return 4 * (self.kept_rows * self.conv_size + recurrent)


class QuantizedBefore(Strict, frozen=True):
    """What became of matrices that the checkpoint holds quantized.

    Attributes:
        format: such as ``AWQ``.
        kept: how many are stored as its own integers and scales.
        converted: how many were rounded again; any others are stored in floating point.
        converted_rms_error: relative root-mean-square error that this made of those.
        rest: how matrices are stored that it has not quantized; None where that is ``weights`` too.
    """

    format: str
    kept: Count
    converted: Count
    converted_rms_error: float | None = None
    rest: StoredAs | None = None


class Quality(Strict, frozen=True):
    """What rounding did to a model: its graph against itself in fp32, over a text.

    Attributes:
        tokens: of the text.
        kl: mean KL divergence from the fp32 model's distributions, in nats a token.
        perplexity: of the text, by the graph.
        reference_perplexity: by the model in fp32.
        same_choice: share of the tokens after which both prefer the same next one.
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
    """What a model stores and what it computes in.

    Attributes:
        weights: how matrices are stored.
        compute: what activations and sums are, on the bundle's backend.
        cache: what the KV cache holds.
        block_size: weights that share a scale, for int8 and int4; None where each column of a matrix has one.
        weight_rms_error: relative root-mean-square error of the quantized weights.
        quality: what that did to a target, over the text that ships; None where onnxruntime was not there to run it.
        not_quantized: matrices left in fp32, and why.
        quantized_before: of a checkpoint that was quantized already.
        only_cpu: whether some matrices have zero points, or other scales that no engine for GPUs reads.
    """

    weights: StoredAs
    compute: Literal["fp32"]
    cache: Literal["fp32"]
    block_size: Positive | None = None
    weight_rms_error: float | None = None
    quality: Quality | None = None
    not_quantized: dict[str, str] = {}
    quantized_before: QuantizedBefore | None = None
    only_cpu: bool = False


class Model(Strict, frozen=True):
    """A target or a draft.

    Attributes:
        family: transformers' ``model_type``.
        source: where it was loaded from, for ``verify``; nothing at run time depends on it.
        parameters: number of parameters.
        vocab_size: width of the logits.
        max_positions: longest sequence the model was made for.
        precision: see :class:`PrecisionInfo`.
        cache: one entry a layer with attention.
        weights: the weights file, shared by all its graphs.
        graph: a step graph for a target, a propose graph for a draft.
        engines: that graph, compiled for devices.
        embedding_size: H of the embeddings that its step graph reads instead of tokens; None where it reads none.
        states: one entry a layer without attention; those have none in ``cache``.
        ranks: of a model that is split among processes, what each runs; ``weights`` and ``graph`` are then those of the
            first, before it was cut where they meet.
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
    engines: tuple[CompiledEngine, ...] = ()
    embedding_size: Size | None = None
    states: tuple[StateLayer, ...] = ()
    ranks: tuple[RankFiles, ...] = ()

    def of_rank(self, rank: int) -> Model:
        """What a rank has of it: a share of the heads, and its own files. Of what is not split, all of it."""
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
        """Bytes of a token's row in its cache, over all layers."""
        return sum(4 * layer.heads * (layer.key_size + layer.value_size) for layer in self.cache)
