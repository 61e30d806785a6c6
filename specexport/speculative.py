"""``speculative_config``: how vLLM's users say in which way to speculate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from specexport.contract.errors import BuildError

_Count = Annotated[int, Meta(ge=1)]


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """vLLM's keys and meanings.

    Attributes:
        method: how to propose; None for ``draft_model`` where a model is named.
        model: the draft model, the Medusa heads or the MLP speculator: a folder, or but for heads a hub id.
        num_speculative_tokens: draft tokens a step; None for the method's default.
        prompt_lookup_max: most tokens ``ngram`` matches; None for 4.
        prompt_lookup_min: fewest; None for 2, or ``prompt_lookup_max`` where that is less.
        draft_tensor_parallel_size: 1; a draft is not split over devices.
    """

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: _Count | None = None
    prompt_lookup_max: _Count | None = None
    prompt_lookup_min: _Count | None = None
    draft_tensor_parallel_size: Literal[1] = 1


_OPTIONS = {
    "draft_model": "draft",
    "medusa": "medusa",
    "mlp_speculator": "mlp_speculator",
    "ngram": "ngram",
    "suffix": "suffix",
    "hypothesis": "hypothesis",
}
"""By method: the build option that asks for it."""
_OF_MODELS = ("draft_model", "medusa", "mlp_speculator")
"""Methods that a model, heads or a speculator propose for."""
_LOOKUP_SIZES = ("prompt_lookup_max", "prompt_lookup_min")


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
    for name in _LOOKUP_SIZES:
        if getattr(config, name) is not None and config.method != "ngram":
            raise BuildError(f"speculative_config: {name} was given with method {config.method!r}; it is for ngram")
    return config


def build_options(config: SpeculativeConfig) -> dict[str, Any]:
    """What to build for it: fields of ``BuildOptions``.

    Raises:
        BuildError: the method needs a model and has none, or has one and needs none.
    """
    assert config.method is not None
    needed = config.method in _OF_MODELS
    if needed and config.model is None:
        raise BuildError(f"speculative_config: model is missing; method {config.method!r} needs one")
    if not needed and config.model is not None:
        raise BuildError(
            f"speculative_config: model is {config.model!r}, but method {config.method!r} proposes without a model"
        )
    options: dict[str, Any] = {_OPTIONS[config.method]: config.model if needed else True}
    if config.num_speculative_tokens is not None:
        options["num_speculative_tokens"] = config.num_speculative_tokens
    if config.method == "ngram":
        most = config.prompt_lookup_max or 4
        options |= {"prompt_lookup_max": most, "prompt_lookup_min": config.prompt_lookup_min or min(2, most)}
    return options


def choice(config: SpeculativeConfig) -> dict[str, Any]:
    """What to choose of a bundle that is built already: arguments of ``Engine.stream``.

    Raises:
        BuildError: it says how to build, which is done.
    """
    for name in ("model", *_LOOKUP_SIZES):
        if getattr(config, name) is not None:
            raise BuildError(
                f"speculative_config: {name} was given with a bundle, which is built already; name method and "
                "num_speculative_tokens alone, or build another bundle"
            )
    return {"method": config.method, "num_speculative_tokens": config.num_speculative_tokens}
