"""A checkpoint's ``generation_config.json``: defaults for requests, and end tokens."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from specexport.contract.errors import BuildError, explained
from specexport.contract.manifest import FILTERS, NO_RULES, GenerationDefaults, GenerationRules, Length, Penalty, Whole
from specexport.contract.model import Count, Probability
from specexport.exporter.checkpoints.documents import CONFIG, GENERATION, read_object

Tokens = Count | list[Count] | None
_Text = Annotated[str, Meta(min_length=1, max_length=4096)]
_MAX_VOCABULARY = 1 << 24
_MAX_BIAS = 1e30
"""Represents infinity, which a manifest cannot store."""
_RULES = {field.name for field in msgspec.structs.fields(GenerationRules)}


class _GenerationConfig(msgspec.Struct):
    """Keys of ``generation_config.json`` other than :class:`GenerationRules`."""

    do_sample: bool | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=1e6)] | None = None
    top_p: Probability | None = None
    top_k: Whole | None = None
    min_p: Probability | None = None
    repetition_penalty: Penalty | None = None
    max_new_tokens: Length | None = None
    min_new_tokens: Whole | None = None
    stop_strings: _Text | tuple[_Text, ...] | None = None
    eos_token_id: Tokens = None


def read_generation(folder: Path, config: Any) -> tuple[GenerationDefaults, tuple[int, ...]]:
    """Reads the defaults for requests, and the tokens that end a text.

    ``config`` provides end tokens if ``generation_config.json`` has none.
    """
    path = folder / GENERATION
    fields = _without_nulls(read_object(path)) if path.is_file() else None
    if fields is None:  # transformers converts the settings of older configurations
        path = folder / CONFIG
        document = read_object(path)
        text_part = document.get("text_config")
        fields = (_without_nulls(text_part) if isinstance(text_part, dict) else {}) | _without_nulls(document)
        fields.pop("eos_token_id", None)
    vocab_size = getattr(config, "vocab_size", None) or _MAX_VOCABULARY
    defaults, ends = _defaults(path, fields, vocab_size)
    if not ends and ends != 0:
        path, tokens = folder / CONFIG, getattr(config, "eos_token_id", None)
        try:
            ends = msgspec.convert(tokens, Tokens)
        except msgspec.ValidationError as error:
            raise BuildError(f"{path}: eos_token_id is {tokens!r}; expected a token id or a list of them") from error
    listed = [] if ends is None else [ends] if isinstance(ends, int) else ends
    _require_known(path, "eos_token_id", listed, vocab_size)
    return defaults, tuple(listed)


def _without_nulls(document: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if value is not None}


def _defaults(path: Path, document: dict[str, Any], vocab_size: int) -> tuple[GenerationDefaults, Tokens]:
    try:
        read = msgspec.convert(document, _GenerationConfig)
        rules = msgspec.convert({key: value for key, value in document.items() if key in _RULES}, GenerationRules)
    except msgspec.ValidationError as error:
        raise BuildError(f"{path}: not a configuration of generation: {explained(error)}") from error
    for key, tokens in rules.tokens.items():
        _require_known(path, key, tokens, vocab_size)
    values: dict[str, Any] = {"temperature": 0.0}
    if read.do_sample:
        drawn = {name: getattr(read, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        values = {"temperature": 1.0} | {name: value for name, value in drawn.items() if value is not None}
    else:
        rules = msgspec.structs.replace(rules, **{name: getattr(NO_RULES, name) for name in FILTERS})
    if read.repetition_penalty is not None:
        values["repetition_penalty"] = read.repetition_penalty
    if read.max_new_tokens is not None:
        values["max_tokens"] = read.max_new_tokens
        rules = msgspec.structs.replace(rules, max_length=None)
    if read.min_new_tokens is not None:
        values["min_tokens"] = read.min_new_tokens
        rules = msgspec.structs.replace(rules, min_length=0)
    if read.stop_strings is not None:
        stop = (read.stop_strings,) if isinstance(read.stop_strings, str) else read.stop_strings
        try:
            "".join(stop).encode()
        except UnicodeEncodeError as error:
            raise BuildError(f"{path}: stop_strings: half a character: {error}; expected text") from error
        values["stop"] = stop
    biases = tuple((sequence, _bounded(bias)) for sequence, bias in rules.sequence_bias)
    return GenerationDefaults(**values, rules=msgspec.structs.replace(rules, sequence_bias=biases)), read.eos_token_id


def _bounded(bias: float) -> float:
    return float(np.nan_to_num(bias, nan=0.0).clip(-_MAX_BIAS, _MAX_BIAS))


def _require_known(path: Path, key: str, tokens: Collection[int], vocab_size: int) -> None:
    beyond = next((token for token in tokens if token >= vocab_size), None)
    if beyond is not None:
        raise BuildError(f"{path}: {key} is {beyond}; expected a token of the model, which has {vocab_size}")
