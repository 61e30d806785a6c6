"""Exports lookahead decoding: its options determine the widths of its steps."""

from __future__ import annotations

from specexport.contract.tree import TokenTree
from specexport.exporter.method import MethodExporter, TargetInfo
from specexport.methods.lookahead import Lookahead, LookaheadOptions, guess_tree


class LookaheadExporter(MethodExporter[LookaheadOptions, Lookahead]):
    """Exports only settings, as the window runs within the target's steps."""

    def resolve(self, options: LookaheadOptions, target: TargetInfo) -> Lookahead:
        W, N, G = options.window_sizes(target.parameters)
        counts = [G]  # a step may also verify G/2, G/4, ... guesses
        while counts[-1] > 1:
            counts.append(counts[-1] // 2)
        trees = tuple(guess_tree(count, N).choices for count in counts)
        return Lookahead(trees=trees, window=W, ngram=N, guesses=G, prompt_seeding=options.prompt_seeding)

    def default_trees(self, method: Lookahead) -> tuple[TokenTree, ...]:
        return method.token_trees()


EXPORTER = LookaheadExporter()
