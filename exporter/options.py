"""What ``specexport build`` can be asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specexport.contract.engines import BACKENDS, ENGINE_RUNTIMES, BackendName
from specexport.contract.errors import BuildError
from specexport.contract.methods import MAX_LOOKUP
from specexport.contract.model import LoweredAs
from specexport.contract.shapes import batch_points
from specexport.contract.tree import TokenTree
from specexport.exporter.engines.options import EngineOptions, check_batches, check_stored
from specexport.exporter.weights import PRECISIONS, Precision, Storage

LOWERINGS: tuple[LoweredAs, ...] = ("native", "portable")
DEFAULT_BLOCK_SIZE = 32
DEFAULT_MAX_BATCH_SIZE = 8
MAX_BATCH_SIZE = 64


@dataclass(frozen=True)
class BuildOptions:
    """What to build.

    Attributes:
        target: folder or hub id of the model whose distribution is sampled.
        output: the bundle's folder; replaced only with ``overwrite``.
        draft: folder or hub id of a smaller model with the same tokenizer, or None for plain decoding.
        universal_draft: folder or hub id of a smaller model with another tokenizer, in the place of ``draft``.
        self_draft_layers: also propose with this many of the target's own first layers.
        medusa: folder of Medusa heads for the target.
        draft_medusa: folder of Medusa heads for the draft, which then proposes a tree in one pass.
        mlp_speculator: folder or hub id of an MLP speculator for the target (``ibm-fms`` accelerators).
        ngram: also propose by n-gram prompt lookup.
        prompt_lookup_max: most tokens it matches.
        prompt_lookup_min: fewest.
        suffix: also propose by a suffix automaton.
        hypothesis: also verify texts that requests bring.
        lookahead: also propose by lookahead decoding with these W, N and G: columns of the window, tokens of an n-gram,
            and most guesses a step; or the name of a preset.
        lookahead_seeding: start its pool with the prompt's n-grams.
        num_speculative_tokens: draft tokens a step of every method: of a chain, or of the tree of that size that suits
            the heads; None for 4, for none at all where trees are given, and for 8, 4 and 2 where text is looked up,
            after 16 for a hypothesis.
        speculative_choices: further sizes that requests may choose.
        trees: what to verify, the default first: presets, JSON files or trees. They are the heads' and the speculator's
            where there are some, else the draft's; text that is looked up is proposed in chains.
        inputs_embeds: let prompts hold embeddings in the place of tokens.
        max_seq_len: longest sequence in tokens; None for the models' limit, at most 2048.
        max_batch_size: most requests that run at once; graphs are pinned for the powers of two up to it.
        precision: how the target's matrices are stored.
        draft_precision: how those of what proposes are: a draft, heads, a speculator; None for int4 where ``precision``
            is, else int8. What they round off costs acceptance and never changes what the target says.
        block_size: quantized weights that share a scale: 16, 32, 64, 128 or 256; None for 32. At most 32 do in what
            proposes in int4: more cost more acceptance than they save. Lowered portably every column of a matrix has
            one scale, as opset 20 knows no blocks.
        lowering: ``native`` for ONNX Runtime 1.28 or newer; ``portable`` for TensorRT 10.3 and older ONNX Runtimes.
        posterior_threshold: epsilon of typical acceptance, where a request asks for that and does not say.
        posterior_alpha: its alpha.
        backend: what the bundle is meant to run on. For others than ``onnxruntime`` it also has the step program's
            graphs, which decide on the device what is accepted.
        engines: how to compile them; None to leave that to ``specexport compile`` on the device.
        overwrite: replace an existing bundle.
        resume: go on from the stages that an earlier build finished before it was killed; for outputs whose name stands
            for all that goes into them, and one process at a time.
    """

    target: str
    output: Path
    draft: str | None = None
    universal_draft: str | None = None
    self_draft_layers: int | None = None
    medusa: str | None = None
    draft_medusa: str | None = None
    mlp_speculator: str | None = None
    ngram: bool = False
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    suffix: bool = False
    hypothesis: bool = False
    lookahead: str | tuple[int, int, int] | None = None
    lookahead_seeding: bool = True
    num_speculative_tokens: int | None = None
    speculative_choices: tuple[int, ...] = ()
    trees: tuple[str | Path | TokenTree, ...] = ()
    inputs_embeds: bool = False
    max_seq_len: int | None = None
    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE
    precision: Precision = "fp32"
    draft_precision: Precision | None = None
    block_size: int | None = None
    lowering: LoweredAs = "native"
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3
    backend: BackendName = "onnxruntime"
    engines: EngineOptions | None = None
    overwrite: bool = False
    resume: bool = False

    def __post_init__(self) -> None:
        for name in ("precision", "draft_precision"):
            value = getattr(self, name)
            if value is not None and value not in PRECISIONS:
                raise BuildError(f"{name} is {value!r}; expected one of {', '.join(PRECISIONS)}")
        if self.backend not in BACKENDS:
            raise BuildError(f"backend is {self.backend!r}; expected one of {', '.join(BACKENDS)}")
        if self.engines is not None and self.engines.runtime != self.backend:
            raise BuildError(f"backend is {self.backend}, and engines for {self.engines.runtime} were asked for")
        if self.engines is not None:
            check_stored((self.precision, self.proposing.kind), self.engines.capabilities)
            check_batches(self.engines.batch_sizes, batch_points(self.max_batch_size))
        if self.inputs_embeds and self.backend in ENGINE_RUNTIMES:
            raise BuildError(
                f"inputs_embeds was given with backend {self.backend}, whose engines read tokens alone; leave one out"
            )
        for k in self.sizes:
            if not 1 <= k <= 32:
                raise BuildError(f"num_speculative_tokens is {k}; expected 1 to 32")
        if self.universal_draft is not None and self.draft is not None:
            raise BuildError("draft and universal_draft were both given; a bundle has one draft, so give one of them")
        if self.draft_medusa is not None and self.draft is None:
            raise BuildError("draft_medusa was given without draft; they are heads of a draft model")
        proposing = (self.draft, self.universal_draft, self.self_draft_layers, self.medusa, self.mlp_speculator)
        if all(source is None for source in proposing):
            if self.trees:
                raise BuildError("trees was given without a draft or Medusa heads; nothing would fill them")
            if self.sizes and not self.lookups:
                raise BuildError(
                    "num_speculative_tokens was given without a draft or Medusa heads, ngram or suffix or hypothesis; "
                    "nothing would propose those tokens"
                )
        if not 1 <= self.max_batch_size <= MAX_BATCH_SIZE:
            raise BuildError(f"max_batch_size is {self.max_batch_size}; expected 1 to {MAX_BATCH_SIZE}")
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        if not 1 <= most <= MAX_LOOKUP:
            raise BuildError(f"prompt_lookup_max is {most}; expected 1 to {MAX_LOOKUP}")
        if not 1 <= least <= most:
            raise BuildError(f"prompt_lookup_min is {least}; expected 1 to prompt_lookup_max, which is {most}")
        for name in ("posterior_threshold", "posterior_alpha"):
            if not 0 <= getattr(self, name) <= 1:
                raise BuildError(f"{name} is {getattr(self, name)}; expected 0 to 1")
        if self.lowering not in LOWERINGS:
            raise BuildError(f"lowering is {self.lowering!r}; expected one of {', '.join(LOWERINGS)}")
        if self.block_size not in (None, 16, 32, 64, 128, 256):
            raise BuildError(f"block_size is {self.block_size}; expected 16, 32, 64, 128 or 256")
        if self.lowering == "portable":
            for name in ("precision", "draft_precision"):
                if getattr(self, name) == "int4":
                    raise BuildError(
                        f"{name} is 'int4', which the portable lowering cannot store: opset 20 has no four-bit "
                        "integers; choose int8, fp16 or fp32, or the native lowering"
                    )
            if self.block_size is not None:
                raise BuildError(
                    f"block_size is {self.block_size}, but opset 20 knows no blocks: lowered portably each column of a "
                    "matrix has one scale; leave block_size out, or choose the native lowering"
                )
        if self.max_seq_len is not None and self.max_seq_len < 2:
            raise BuildError(f"max_seq_len is {self.max_seq_len}; expected at least 2")

    @property
    def stored(self) -> Storage:
        """How the target's matrices are stored; lowered portably each column has one scale."""
        return Storage(self.precision, None if self.lowering == "portable" else self.block_size or DEFAULT_BLOCK_SIZE)

    @property
    def proposing(self) -> Storage:
        """How what only proposes is stored: a draft, Medusa heads, an MLP speculator."""
        kind = self.draft_precision or ("int4" if self.precision == "int4" else "int8")
        block_size = self.stored.block_size
        if kind == "int4" and block_size is not None:
            block_size = min(block_size, DEFAULT_BLOCK_SIZE)
        return Storage(kind, block_size)

    @property
    def lookups(self) -> tuple[str, ...]:
        """The methods that need neither a model nor heads."""
        return tuple(name for name in ("ngram", "suffix", "hypothesis") if getattr(self, name))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of draft tokens to build for, the default first; none where the user named none."""
        first = () if self.num_speculative_tokens is None else (self.num_speculative_tokens,)
        return tuple(dict.fromkeys((*first, *self.speculative_choices)))
