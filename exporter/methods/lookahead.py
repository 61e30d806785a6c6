"""Lookahead decoding in a build: W, N and G, which say the widths of its steps."""

from __future__ import annotations

from specexport.contract.errors import BuildError
from specexport.contract.methods.lookahead import PRESETS, Lookahead, sized
from specexport.contract.tree import MAX_NODES
from specexport.exporter.methods import MethodExporter, Suggestion, TargetOutline, Wanted


class LookaheadExporter(MethodExporter[Lookahead]):
    """Nothing is exported: the target's own steps carry the window along."""

    def outline(self, method: Lookahead, target: TargetOutline) -> Lookahead:
        """See :class:`MethodExporter`.

        Raises:
            BuildError: a step of these sizes cannot be.
        """
        if method.trees and method.window is not None:
            return method
        W, N, G = _sizes(method, target.parameters)
        named = f"lookahead is {W},{N},{G}"
        if W < 1 or G < 1 or not 2 <= N <= 32:
            raise BuildError(f"{named}; expected W and G of at least 1 and N of 2 to 32")
        nodes = (N - 1) * (W + G)
        if nodes > MAX_NODES:
            raise BuildError(f"{named}, (N - 1)(W + G) = {nodes} tokens a step; at most {MAX_NODES} are verified")
        if W < N - 2:
            raise BuildError(f"{named}; the window fills only if W is at least N - 2 = {N - 2}")
        return sized(method, W, N, G)

    def suggest(self, kind: type[Lookahead], wanted: Wanted) -> Suggestion | None:
        gpu = wanted.device == "gpu"
        method = self.outline(kind(preset="gpu" if gpu else "cpu"), TargetOutline(0, wanted.parameters, 0))
        W, N, G = method.shape
        return Suggestion(
            "lookahead",
            f"W,N,G = {W},{N},{G}: {method.widths()[0]} nodes a step",
            "needs nothing but arithmetic to spare" + (", which a GPU has at batch 1" if gpu else "; a CPU has little"),
            5,
            ("--lookahead", f"{W},{N},{G}") if gpu else (),
        )


def _sizes(method: Lookahead, parameters: int) -> tuple[int, int, int]:
    if method.window is not None:
        return method.shape
    preset = method.preset or "cpu"
    if preset == "gpu":
        preset = "large" if parameters < 10e9 else "medium" if parameters < 20e9 else "small"
    if preset in PRESETS:
        return PRESETS[preset]
    try:
        W, N, G = map(int, preset.split(","))
    except ValueError as error:
        raise BuildError(f"lookahead is {preset!r}; expected W,N,G or one of gpu, {', '.join(PRESETS)}") from error
    return W, N, G


EXPORTER = LookaheadExporter()
