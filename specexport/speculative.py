"""``speculative_config``: how vLLM's users say in which way to speculate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from specexport.contract.errors import BuildError

_Count = Annotated[int, Meta(ge=1)]


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """vLLM's keys and meanings; those of methods that vLLM does not have are named as the build's options.

    Attributes:
        method: how to propose; None for ``draft_model`` where a model is named.
        model: the draft model, the Medusa heads or the MLP speculator: a folder, or but for heads a hub id. The draft
            of ``universal_draft`` may have another tokenizer.
        num_speculative_tokens: draft tokens a step; None for the method's default.
        prompt_lookup_max: most tokens ``ngram`` matches; None for 4.
        prompt_lookup_min: fewest; None for 2, or ``prompt_lookup_max`` where that is less.
        lookahead: W, N and G of ``lookahead``, or the name of a preset; None for ``cpu``.
        lookahead_seeding: start its pool with the prompt's n-grams; None for that.
        self_draft_layers: how many of the target's layers are the draft of ``self_draft``.
        draft_tensor_parallel_size: 1; a draft is not split over devices.
    """

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: _Count | None = None
    prompt_lookup_max: _Count | None = None
    prompt_lookup_min: _Count | None = None
    lookahead: str | tuple[_Count, _Count, _Count] | None = None
    lookahead_seeding: bool | None = None
    self_draft_layers: _Count | None = None
    draft_tensor_parallel_size: Literal[1] = 1


_OPTIONS = {
    "draft_model": "draft",
    "medusa": "medusa",
    "mlp_speculator": "mlp_speculator",
    "ngram": "ngram",
    "suffix": "suffix",
    "hypothesis": "hypothesis",
    "lookahead": "lookahead",
    "self_draft": "self_draft_layers",
    "universal_draft": "universal_draft",
}
"""By method: the build option that asks for it."""
_VALUES = {
    "draft_model": "model",
    "universal_draft": "model",
    "medusa": "model",
    "mlp_speculator": "model",
    "self_draft": "self_draft_layers",
    "lookahead": "lookahead",
}
"""By method: the key whose value the option has; those of the other methods are flags."""
_DEFAULTS = {"lookahead": "cpu"}
"""By method: that value where the key is left out."""
_OF_METHODS = {
    "prompt_lookup_max": "ngram",
    "prompt_lookup_min": "ngram",
    "lookahead": "lookahead",
    "lookahead_seeding": "lookahead",
    "self_draft_layers": "self_draft",
}
"""Keys that one method knows."""


def read_config(given: Mapping[str, Any] | str) -> SpeculativeConfig:
    """Validates a mapping, or its JSON.

    Raises:
        BuildError: it names a key or a method that is not known, or a value of the wrong kind.
    """
    try:
        if isinstance(given, str):
            config = msgspec.json.decode(given.encode(), type=SpeculativeConfig)
        else:
            config = msgspec.convert(dict(given), SpeculativeConfig)
    except msgspec.MsgspecError as error:
        keys = ", ".join(SpeculativeConfig.__struct_fields__)
        raise BuildError(f"speculative_config: {error}; expected an object with some of the keys {keys}") from error
    if config.method is None and config.model in ("ngram", "[ngram]"):
        config = msgspec.structs.replace(config, method="ngram", model=None)
    if config.method is None and config.model is not None:
        config = msgspec.structs.replace(config, method="draft_model")
    if config.method is None:
        raise BuildError(f"speculative_config: method is missing; expected one of {', '.join(_OPTIONS)}")
    if config.method not in _OPTIONS:
        raise BuildError(f"speculative_config: method is {config.method!r}; expected one of {', '.join(_OPTIONS)}")
    for key, method in _OF_METHODS.items():
        if getattr(config, key) is not None and config.method != method:
            raise BuildError(f"speculative_config: {key} was given with method {config.method!r}; it is for {method}")
    return config


def build_options(config: SpeculativeConfig) -> dict[str, Any]:
    """What to build for it: fields of ``BuildOptions``.

    Raises:
        BuildError: the method needs a model or a number and has none, or has what it does not need.
    """
    assert config.method is not None
    key = _VALUES.get(config.method)
    value = True if key is None else getattr(config, key) or _DEFAULTS.get(config.method)
    if value is None:
        raise BuildError(f"speculative_config: {key} is missing; method {config.method!r} needs one")
    if key != "model" and config.model is not None:
        raise BuildError(
            f"speculative_config: model is {config.model!r}, but method {config.method!r} proposes without a model"
        )
    options: dict[str, Any] = {_OPTIONS[config.method]: value}
    if config.num_speculative_tokens is not None:
        if config.method == "lookahead":
            raise BuildError(
                "speculative_config: num_speculative_tokens was given with method 'lookahead', whose steps follow from "
                "W, N and G; give them as lookahead"
            )
        options["num_speculative_tokens"] = config.num_speculative_tokens
    if config.lookahead_seeding is not None:
        options["lookahead_seeding"] = config.lookahead_seeding
    if config.method == "ngram":
        most = config.prompt_lookup_max or 4
        options |= {"prompt_lookup_max": most, "prompt_lookup_min": config.prompt_lookup_min or min(2, most)}
    return options


def choice(config: SpeculativeConfig) -> dict[str, Any]:
    """What to choose of a bundle that is built already: arguments of ``Engine.stream``.

    Raises:
        BuildError: it says how to build, which is done.
    """
    for name in ("model", *_OF_METHODS):
        if getattr(config, name) is not None:
            raise BuildError(
                f"speculative_config: {name} was given with a bundle, which is built already; name method and "
                "num_speculative_tokens alone, or build another bundle"
            )
    return {"method": config.method, "num_speculative_tokens": config.num_speculative_tokens}
