"""Reads and compares tokenizers of checkpoints, and reads chat templates. Imports transformers only when needed."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from specexport.contract.errors import BuildError
from specexport.contract.manifest import DEFAULT_TEMPLATE, SettingNote, short
from specexport.exporter.checkpoints.documents import read_config, read_object
from specexport.runtime.text import decoder_fault

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model")
"""Names of sentencepiece files; tiktoken uses some of them too."""
_PROCESSOR = ("processor_config.json", "chat_template.json")
"""Files with the templates of processors, in order of precedence."""
_PROBES = ("in 12345 words: I'm a_b;<br>\tÉ 日本.", " two  spaces\n\n")
"""Texts that tokenizers of different kinds split differently."""
_PREFIXED = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ],
}
"""The normalizer of sentencepiece's tokenizers in a ``tokenizer.json``."""
_NAME = re.compile(r"\w[\w.+-]{0,63}")


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer in the form that the runtime needs.

    Attributes:
        special_tokens: ``bos_token`` and the like, for chat templates.
        eos_token_id: the tokenizer's own token that ends a text.
        split_special_tokens: whether special tokens in a text are read as text.
    """

    tokenizer: Tokenizer
    chat_templates: dict[str, str]
    special_tokens: dict[str, str]
    eos_token_id: int | None = None
    split_special_tokens: bool = False


def load_tokenizer(path: Path) -> TokenizerFiles:
    """Loads the tokenizer of a checkpoint folder as a ``tokenizers.Tokenizer`` without truncation and padding.

    Raises:
        BuildError: there is none, or it has no fast form.
        ImportError: transformers is not installed.
    """
    # Imported here: torch takes seconds.
    from transformers import AutoTokenizer

    from specexport.exporter.checkpoints.config import read_configs

    config, _ = read_configs(path)
    try:
        loaded = AutoTokenizer.from_pretrained(path, config=config, trust_remote_code=False)
    except Exception as error:  # from missing files to malformed JSON
        broken = next((why for name in _TOKENIZER_FILES if (why := _fault(path / name)) is not None), None)
        reason = f"no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise BuildError(
            _missing_reader(path) or broken or f"{path}: its tokenizer could not be loaded: {reason}"
        ) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise BuildError(
            f"{path}: its tokenizer ({type(loaded).__name__}) has no fast form; expected one that a tokenizer.json can "
            "hold"
        )
    if fault := decoder_fault(backend):
        raise BuildError(f"{path}: its tokenizer cannot be used: {fault} in tokenizer.json")
    special = {name: str(token) for name, token in loaded.special_tokens_map.items() if isinstance(token, str)}
    backend.no_truncation()
    backend.no_padding()
    end = loaded.eos_token_id
    splits = bool(loaded.split_special_tokens)
    templates = chat_templates(path, loaded)
    return TokenizerFiles(backend, templates, special, end if isinstance(end, int) else None, splits)


def _fault(path: Path) -> str | None:
    """The error of a malformed JSON file; None for a missing or valid file."""
    if path.is_file():
        try:
            read_object(path)
        except BuildError as error:
            return str(error)
    return None


def _missing_reader(folder: Path) -> str | None:
    """A request to install the package that a folder's tokenizer needs; transformers may name another package."""
    if (folder / "tokenizer.json").is_file():
        return None
    for file in map(folder.joinpath, _SENTENCEPIECE):
        if file.is_file():
            with file.open("rb") as stream:  # tiktoken's files are lines of text
                library = "sentencepiece" if stream.read(1) == b"\n" else "tiktoken"
            if find_spec(library) is None:
                return (
                    f"{file}: read by {library}, which is not installed; install it with: pip install {library}, or "
                    "choose a checkpoint that has a tokenizer.json"
                )
    return None


def require_same_tokenizer(target: Tokenizer, draft: Tokenizer, name: str) -> None:
    """Checks that a draft, called ``name``, gives every token the target's id, except padding of the vocabularies.

    Raises:
        BuildError: they differ; names the first differing token.
    """
    ours, theirs = target.get_vocab(with_added_tokens=True), draft.get_vocab(with_added_tokens=True)
    if ours == theirs and _comparable(target) == _comparable(draft):
        return
    differing = [(index, token) for token, index in ours.items() if theirs.get(token) != index]
    if differing:
        index, token = min(differing)
        detail = f"token {token!r} is {index} in the target and {theirs.get(token, 'absent')} in {name}"
    elif len(ours) != len(theirs):
        detail = f"{name} has {len(theirs)} tokens against {len(ours)} in the target"
    else:
        detail = f"{name} has the tokens of the target, split differently"
    raise BuildError(
        f"target and draft use different tokenizers: {detail}. A draft must use the target's tokenizer: choose one "
        f"from the same family, or draft through text with the method universal_draft:{name}"
    )


def _pipeline(tokenizer: Tokenizer) -> dict[str, Any]:
    """The parts of a tokenizer that determine how text is split, without those that add tokens around a sequence."""
    parts = json.loads(tokenizer.to_str())
    return {name: parts.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")} | {
        "merges": parts.get("model", {}).get("merges")
    }


def _comparable(tokenizer: Tokenizer) -> dict[str, Any]:
    """:func:`_pipeline` with one form of sentencepiece's space before texts; transformers and files differ in it."""
    parts = _pipeline(tokenizer)
    split = parts["pre_tokenizer"] or {}
    if parts["normalizer"] is None and split.get("type") == "Metaspace" and split.get("prepend_scheme") != "never":
        return parts | {"normalizer": _PREFIXED, "pre_tokenizer": None}
    return parts


class _Named(msgspec.Struct):
    name: str
    template: str


class _Processor(msgspec.Struct):
    """The fields read from a processor's files; other keys are ignored."""

    chat_template: str | dict[str, str] | list[_Named] | None = None


def chat_templates(folder: Path, tokenizer: Any) -> dict[str, str]:
    """A checkpoint's templates by name; ``default`` is used unless another is named.

    They are the tokenizer's (``chat_template.jinja`` and ``additional_chat_templates``, or ``tokenizer_config.json``),
    or, if it has none, the processor's.
    """
    place, templates = folder / "tokenizer_config.json", _by_name(tokenizer.chat_template)
    if not templates:
        place, templates = _of_processor(folder) or (place, templates)
    for name, template in templates.items():
        if not isinstance(template, str) or not _NAME.fullmatch(str(name)):
            raise BuildError(
                f"{place}: chat_template {str(name)[:80]!r} is {type(template).__name__}; expected Jinja by a name of "
                "letters and digits"
            )
    return dict(templates)


def other_template(folder: Path, used: Mapping[str, str]) -> SettingNote | None:
    """A warning if the processor's template differs from ``used``."""
    place, templates = _of_processor(folder) or (folder, {})
    if not templates or templates.get(DEFAULT_TEMPLATE) == used.get(DEFAULT_TEMPLATE):
        return None
    note = "transformers' processors take this template; specexport takes the tokenizer's, as its tokenizers do"
    return SettingNote(file=place.name, key="chat_template", value=short(templates.get(DEFAULT_TEMPLATE)), note=note)


def other_tokens(folder: Path, used: Tokenizer) -> SettingNote | None:
    """A warning if transformers reads texts otherwise than a checkpoint's ``tokenizer.json`` says.

    The classes of some families put parts of their own in the place of the file's.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    with contextlib.suppress(Exception):  # transformers may read other files, and a tokenizer may fail on any text
        stated = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        stated.no_truncation()
        stated.no_padding()
        if any(
            len({tuple(part.encode(text, add_special_tokens=False).ids) for part in (stated, used)}) > 1
            for text in _PROBES
        ):
            parts = {name: part for name, part in _pipeline(stated).items() if name in ("normalizer", "pre_tokenizer")}
            note = (
                f"transformers {version('transformers')} reads texts otherwise, and so does specexport; if the model "
                "was trained with this file, set tokenizer_class to PreTrainedTokenizerFast in tokenizer_config.json"
            )
            return SettingNote(file=path.name, key=", ".join(parts), value=short(parts), note=note)
    return None


def _of_processor(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The templates of the first of a processor's files that has any."""
    for path in map(folder.joinpath, _PROCESSOR):
        if path.is_file() and (template := read_config(path, _Processor, "a processor").chat_template):
            return path, _by_name(template)
    return None


def _by_name(templates: Any) -> dict[str, Any]:
    if isinstance(templates, list):
        return {entry.name: entry.template for entry in templates}
    return templates if isinstance(templates, dict) else {} if templates is None else {DEFAULT_TEMPLATE: templates}
