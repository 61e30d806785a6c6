"""Exports lookahead decoding: checks W, N and G, from which the widths of its steps follow."""

from __future__ import annotations

from specexport.contract.errors import BuildError
from specexport.contract.tree import MAX_NODES, TokenTree
from specexport.exporter.method import MethodExporter, TargetInfo
from specexport.methods.lookahead.spec import PRESETS, Lookahead, LookaheadOptions, gpu_preset, guess_tree


class LookaheadExporter(MethodExporter[LookaheadOptions, Lookahead]):
    """Exports only settings, as the window runs within the target's steps."""

    def resolve(self, options: LookaheadOptions, target: TargetInfo) -> Lookahead:
        W, N, G = _sizes(options, target.parameters)
        named = f"lookahead is {W},{N},{G}"
        if W < 1 or G < 1 or not 2 <= N <= 32:
            raise BuildError(f"{named}; expected W and G of at least 1 and N of 2 to 32")
        nodes = (N - 1) * (W + G)
        if nodes > MAX_NODES:
            raise BuildError(f"{named}, (N - 1)(W + G) = {nodes} tokens a step; at most {MAX_NODES} are verified")
        if W < N - 2:
            raise BuildError(f"{named}; the window fills only if W is at least N - 2 = {N - 2}")
        counts = [G]  # a step may also verify G/2, G/4, ... guesses
        while counts[-1] > 1:
            counts.append(counts[-1] // 2)
        trees = tuple(guess_tree(count, N).choices for count in counts)
        return Lookahead(trees=trees, window=W, ngram=N, guesses=G, prompt_seeding=options.prompt_seeding)

    def default_trees(self, method: Lookahead) -> tuple[TokenTree, ...]:
        return method.token_trees()


def _sizes(options: LookaheadOptions, parameters: int) -> tuple[int, int, int]:
    if options.window is not None and options.ngram is not None and options.guesses is not None:
        return options.window, options.ngram, options.guesses
    preset = options.preset or "cpu"
    if preset == "gpu":
        preset = gpu_preset(parameters)
    if preset in PRESETS:
        return PRESETS[preset]
    try:
        W, N, G = map(int, preset.split(","))
    except ValueError as error:
        raise BuildError(
            f"lookahead is {preset!r}; expected W,N,G or one of gpu, {', '.join(PRESETS)}", param="lookahead"
        ) from error
    return W, N, G


EXPORTER = LookaheadExporter()
