"""Ways to speculate for builds in tests, in the order of a bundle's defaults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specexport.contract.methods import MethodOptions, read_methods
from specexport.contract.tree import TokenTree


def ways(
    *,
    draft: object = None,
    universal_draft: object = None,
    self_draft: int | None = None,
    medusa: object = None,
    draft_medusa: object = None,
    mlp_speculator: object = None,
    eagle3: object = None,
    dflash: object = None,
    mtp: bool = False,
    lookups: Sequence[str] = (),
    prompt_lookup_min: int | None = None,
    lookahead: tuple[int, int, int] | str | None = None,
    sizes: Sequence[int] = (),
    trees: Sequence[TokenTree | str] = (),
) -> tuple[MethodOptions, ...]:
    """Methods by their checkpoints.

    Args:
        draft: of ``draft_model``, or of ``medusa_draft`` beside ``draft_medusa``.
        universal_draft: with another tokenizer.
        self_draft: layers.
        medusa: heads of the target.
        draft_medusa: heads of the draft.
        mlp_speculator: of the target.
        eagle3: draft of the target.
        dflash: likewise.
        mtp: whether the target's own layer drafts.
        lookups: names of methods that look in text.
        prompt_lookup_min: of ``ngram``.
        lookahead: W, N and G, or a preset.
        sizes: draft tokens of every method, the default first.
        trees: of the heads and the speculator where there are some, else of the draft.
    """
    actual: list[dict[str, Any]] = []
    if draft_medusa is not None:
        actual.append({"method": "medusa_draft", "model": str(draft), "medusa": str(draft_medusa)})
    elif draft is not None:
        actual.append({"method": "draft_model", "model": str(draft)})
    if universal_draft is not None:
        actual.append({"method": "universal_draft", "model": str(universal_draft)})
    if self_draft is not None:
        actual.append({"method": "self_draft", "layers": self_draft})
    if medusa is not None:
        actual.append({"method": "medusa", "model": str(medusa)})
    if mlp_speculator is not None:
        actual.append({"method": "mlp_speculator", "model": str(mlp_speculator)})
    if eagle3 is not None:
        actual.append({"method": "eagle3", "model": str(eagle3)})
    if dflash is not None:
        actual.append({"method": "dflash", "model": str(dflash)})
    if mtp:
        actual.append({"method": "mtp"})
    actual += [{"method": name} for name in lookups]
    for item in actual:
        if sizes:
            item["num_speculative_tokens"] = list(sizes)
        if item["method"] == "ngram" and prompt_lookup_min is not None:
            item["prompt_lookup_min"] = prompt_lookup_min
    wide = [item for item in actual if item["method"] in ("medusa", "mlp_speculator")]
    for item in wide or actual[:1]:
        if trees:
            item["trees"] = list(trees)
    if lookahead is not None:
        preset = lookahead if isinstance(lookahead, str) else ",".join(map(str, lookahead))
        actual.append({"method": "lookahead", "preset": preset})
    return read_methods(actual)
