"""Lookahead decoding in a build: W, N and G, which say the widths of its steps."""

from __future__ import annotations

from specexport.contract.errors import BuildError
from specexport.contract.methods.lookahead import PRESETS, Lookahead, gpu_preset, sized
from specexport.contract.tree import MAX_NODES
from specexport.exporter.methods import MethodExporter, TargetOutline


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


def _sizes(method: Lookahead, parameters: int) -> tuple[int, int, int]:
    if method.window is not None:
        return method.shape
    preset = method.preset or "cpu"
    if preset == "gpu":
        preset = gpu_preset(parameters)
    if preset in PRESETS:
        return PRESETS[preset]
    try:
        W, N, G = map(int, preset.split(","))
    except ValueError as error:
        raise BuildError(f"lookahead is {preset!r}; expected W,N,G or one of gpu, {', '.join(PRESETS)}") from error
    return W, N, G


EXPORTER = LookaheadExporter()
