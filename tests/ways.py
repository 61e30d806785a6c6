"""Ways to speculate for builds in tests, in the order of a bundle's defaults."""

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
    models = {
        "medusa_draft" if draft_medusa is not None else "draft_model": draft,
        "universal_draft": universal_draft,
        "self_draft": self_draft,
        "medusa": medusa,
        "mlp_speculator": mlp_speculator,
        "eagle3": eagle3,
        "dflash": dflash,
    }
    chosen: list[dict[str, Any]] = [
        {"method": name, "layers": model} if name == "self_draft" else {"method": name, "model": str(model)}
        for name, model in models.items()
        if model is not None
    ]
    if draft_medusa is not None:
        chosen[0]["medusa"] = str(draft_medusa)
    chosen += [{"method": name} for name in ("mtp",) * mtp + tuple(lookups)]
    for method in chosen:
        if sizes:
            method["num_speculative_tokens"] = list(sizes)
        if method["method"] == "ngram" and prompt_lookup_min is not None:
            method["prompt_lookup_min"] = prompt_lookup_min
    wide = [method for method in chosen if method["method"] in ("medusa", "mlp_speculator")]
    for method in wide or chosen[:1]:
        if trees:
            method["trees"] = list(trees)
    if lookahead is not None:
        preset = lookahead if isinstance(lookahead, str) else ",".join(map(str, lookahead))
        chosen.append({"method": "lookahead", "preset": preset})
    return read_methods(chosen)
