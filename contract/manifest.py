"""The bundle manifest, ``specexport.json``: its schema.

It is documented for readers in ``docs/bundle-format.md``; :mod:`specexport.contract.reading` reads and checks one.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from specexport.contract.engines import BackendName, CompiledEngine, ProgramGraph
from specexport.contract.generation import NO_RULES, GenerationRules, Length
from specexport.contract.methods.base import Method
from specexport.contract.model import Count, LoweredAs, Model, Probability, Size, Strict
from specexport.contract.signature import GraphSignature, target_signature

FORMAT_VERSION = 7
MANIFEST_NAME = "specexport.json"
_LONGEST = 80
DEFAULT_TEMPLATE = "default"
"""Name of the chat template that is used where none is named."""
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


__all__ = [
    "DEFAULT_TEMPLATE",
    "FORMAT_VERSION",
    "MANIFEST_NAME",
    "FileEntry",
    "GenerationDefaults",
    "Manifest",
    "SettingNote",
    "TokenizerInfo",
    "short",
]


class FileEntry(Strict, frozen=True):
    """One file of the bundle; every file but the manifest has an entry.

    Attributes:
        path: relative to the bundle, with forward slashes.
        size: bytes.
        sha256: of the content, in hexadecimal.
    """

    path: str
    size: Count
    sha256: Sha256


class TokenizerInfo(Strict, frozen=True):
    """The tokenizer's files and special tokens.

    Attributes:
        file: ``tokenizer.json`` as the tokenizers library reads it.
        eos_token_ids: tokens that end a text.
        special_tokens: ``bos_token`` and the like, for chat templates.
        chat_template: Jinja template file, if the model has one: its only one, or its default.
        named_templates: files of its other templates by name, such as ``tool_use`` and ``rag``.
        split_special_tokens: whether special tokens in a text are read as text.
    """

    file: str
    eos_token_ids: tuple[Count, ...]
    special_tokens: dict[str, str] = msgspec.field(default_factory=dict)
    chat_template: str | None = None
    named_templates: dict[str, str] = msgspec.field(default_factory=dict)
    split_special_tokens: bool = False

    @property
    def templates(self) -> dict[str, str]:
        """Files of all chat templates by name."""
        return self.named_templates | ({} if self.chat_template is None else {DEFAULT_TEMPLATE: self.chat_template})


class GenerationDefaults(Strict, frozen=True):
    """What a parameter is that is not given: the model's own defaults, and those of typical acceptance.

    Attributes:
        max_tokens: most tokens of an output; None where the model does not say.
        min_tokens: tokens before one that ends the output.
        stop: texts that end the output.
        rules: see :class:`GenerationRules`.
    """

    temperature: Annotated[float, Meta(ge=0.0)] = 0.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Count = 0
    min_p: Probability = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] = 1.0
    max_tokens: Length | None = None
    min_tokens: Count = 0
    stop: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    rules: GenerationRules = NO_RULES
    posterior_threshold: Probability = 0.09
    posterior_alpha: Probability = 0.3


class SettingNote(Strict, frozen=True):
    """A setting of the checkpoint with which transformers' texts and the bundle's differ.

    Attributes:
        file: the file that has it.
        key: its name there.
        value: as JSON, shortened.
        note: how they differ.
    """

    file: str
    key: str
    value: str
    note: str

    def __str__(self) -> str:
        return f"{self.file}: {self.key} is {self.value}: {self.note}"


def short(value: Any) -> str:
    """A setting's value as a line shows it."""
    text = f"{value:g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
    text = text.encode("utf-8", "replace").decode()  # half a character, which JSON can say, is no text
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


class Manifest(Strict, frozen=True):
    """The whole of ``specexport.json``.

    Attributes:
        format_version: of this schema; a reader refuses any other.
        specexport_version: that wrote the bundle.
        created: ISO 8601, UTC.
        built_with: versions of the libraries that matter.
        backend: what the bundle is meant to run on. Whatever that is, its ONNX graphs are there too.
        lowering: which operators they are made of.
        max_seq_len: longest sequence (prompt and output), in tokens.
        prefill_chunk: tokens a prefill step takes.
        batch_sizes: slots the graphs were made for.
        target: the model whose distribution is sampled.
        methods: the ways to propose, one of a kind, the default first; none for plain decoding.
        tokenizer: shared by target and draft.
        generation: sampling defaults.
        files: every file but this one.
        program: the step program's own graphs, for backends that keep a step on the device.
        notes: where its texts are not those of transformers; purely informative.
    """

    format_version: int
    specexport_version: str
    created: str
    built_with: dict[str, str]
    backend: BackendName
    lowering: LoweredAs
    max_seq_len: Size
    prefill_chunk: Size
    batch_sizes: Annotated[tuple[Size, ...], Meta(min_length=1)]
    target: Model
    methods: tuple[Method, ...]  # read by contract.methods.decode_hook
    tokenizer: TokenizerInfo
    generation: GenerationDefaults
    files: tuple[FileEntry, ...]
    program: tuple[ProgramGraph, ...] = ()
    notes: tuple[SettingNote, ...] = ()

    @property
    def models(self) -> dict[str, Model]:
        """Every model by its role: ``target``, and those of the methods."""
        return {"target": self.target} | {
            role: model for method in self.methods for role, model in method.models.items()
        }

    @property
    def has_states(self) -> bool:
        """Whether a model has layers without attention."""
        return any(model.states for model in self.models.values())

    @property
    def engines(self) -> tuple[CompiledEngine, ...]:
        """Every engine: the models', then the step program's."""
        holders = (*self.models.values(), *self.program)
        return tuple(engine for holder in holders for engine in holder.engines)

    @property
    def target_signature(self) -> GraphSignature:
        """Of the target's step graph, with what the methods observe of it."""
        return target_signature(self.target, [tensor for method in self.methods for tensor in method.target_outputs])

    def method(self, name: str) -> Method | None:
        """The method of a name, if the bundle has it."""
        return next((method for method in self.methods if method.name == name), None)
