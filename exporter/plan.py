"""``specexport plan``: estimates of a model's memory and speed on a device, with and without speculation.

Nothing is loaded or built.

Decoding one text is bound by reading weights, so a step takes the bytes that it reads divided by the memory's
bandwidth. If each draft token is accepted with probability a, a step with K draft tokens yields
(1 - a^(K+1)) / (1 - a) tokens (Leviathan et al. 2023).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specexport.contract.engines import EngineRuntime
from specexport.contract.errors import BuildError
from specexport.contract.manifest import Manifest
from specexport.contract.methods import MethodOptions, method_type
from specexport.contract.model import Model
from specexport.contract.shapes import cache_buckets
from specexport.exporter.checkpoints.locate import locate
from specexport.exporter.checkpoints.sizes import (
    ModelSizes,
    Parameter,
    model_sizes,
    require_positions,
    require_whole_model,
)
from specexport.exporter.method import MetaDraft, exporter_of
from specexport.exporter.options import DEFAULT_BLOCK_SIZE, PREFILL_CHUNK, capability, check_stored

EFFICIENCY = 0.7
"""Assumed share of the bandwidth that a step reaches: a goal for GPUs, not a measurement."""
MAX_DRAFTS = 8
DEFAULT_CONTEXT = 4096
_DEFAULT_TREES = (5, 7, 9)
"""Number of nodes of each of a draft's default chains."""
_ACCEPT_ARRAYS = 18
"""Number of arrays ``[nodes,V]`` that onnxruntime allocates for all acceptance rules, as counted over null CUDA."""
_SCALE_BYTES = 2
_DEQUANTIZED_ABOVE = {"int8": 5, "int4": 16}
"""Maximum number of rows for which onnxruntime multiplies integers directly (``docs/gpu.md``). For more rows it
dequantizes matrices (gate and up together) to 16 bits in every run; over null CUDA it allocated memory for two."""
_BITS = {"fp16": 16, "bf16": 16, "fp8": 8, "int8": 8, "int4": 4}


@dataclass(frozen=True)
class DeviceLimits:
    """The memory of a device.

    Attributes:
        memory: bytes that the GPU can use, shared with the CPU on Jetson.
        reserved: bytes that the system and CUDA itself use.
    """

    memory: int
    bandwidth: float
    capability: str
    reserved: int


_GB = 10**9
_GIB = 2**30
_BOARD = 2 * _GIB
"""A Jetson without a desktop uses about 1.2 GB after booting; a CUDA context and the libraries use the rest."""
_CARD = _GIB


DEVICES: dict[str, DeviceLimits] = {
    "orin-nano-4gb": DeviceLimits(4 * _GIB, 51 * _GB, "8.7", _BOARD),
    "orin-nano-8gb": DeviceLimits(8 * _GIB, 102 * _GB, "8.7", _BOARD),
    "orin-nx-8gb": DeviceLimits(8 * _GIB, 102 * _GB, "8.7", _BOARD),
    "orin-nx-16gb": DeviceLimits(16 * _GIB, 102 * _GB, "8.7", _BOARD),
    "agx-orin-32gb": DeviceLimits(32 * _GIB, 204 * _GB, "8.7", _BOARD),
    "agx-orin-64gb": DeviceLimits(64 * _GIB, 204 * _GB, "8.7", _BOARD),
    "thor-64gb": DeviceLimits(64 * _GIB, 273 * _GB, "11.0", _BOARD),
    "thor-128gb": DeviceLimits(128 * _GIB, 273 * _GB, "11.0", _BOARD),
    "rtx-3060-12gb": DeviceLimits(12 * _GIB, 360 * _GB, "8.6", _CARD),
    "rtx-3090": DeviceLimits(24 * _GIB, 936 * _GB, "8.6", _CARD),
    "rtx-4060-8gb": DeviceLimits(8 * _GIB, 272 * _GB, "8.9", _CARD),
    "rtx-4090": DeviceLimits(24 * _GIB, 1008 * _GB, "8.9", _CARD),
    "rtx-5090": DeviceLimits(32 * _GIB, 1792 * _GB, "12.0", _CARD),
}
"""Orin Nano is listed in its ``MAXN SUPER`` mode; in others it has two thirds of that bandwidth."""


@dataclass(frozen=True)
class ModelPlan:
    """The memory of a model, and the memory traffic of its steps, in bytes.

    Attributes:
        parameters: number of parameters, tied ones counted once.
        active: number of parameters that one token uses, without the experts of a mixture that it does not choose.
        weights: size of the weights as an engine stores them.
        read: weights that a step of one token reads, without embedding tables.
        read_per_token: additional weights that it reads for each further token, up to ``read_limit`` in all.
        scratch: size of the activations of a prefill chunk, and of logits.
    """

    source: str
    parameters: int
    active: int
    weights: int
    read: int
    read_per_token: int
    read_limit: int
    cache: int
    cache_row: int
    scratch: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.scratch

    def step(self, tokens: int, past: float) -> float:
        """Bytes that a step over ``tokens`` tokens reads, with ``past`` rows in the cache."""
        return min(self.read + (tokens - 1) * self.read_per_token, self.read_limit) + self.cache_row * past


@dataclass(frozen=True)
class DevicePlan:
    """The memory and the speed of models on a device.

    Attributes:
        speeds: expected tokens per second of plain decoding, then with the draft at K = 1, 2, ...
    """

    models: tuple[ModelPlan, ...]
    context: int
    needed: int
    available: int
    speeds: tuple[float, ...]

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    @property
    def best_k(self) -> int:
        """The fastest K; 0 is plain decoding."""
        return self.speeds.index(max(self.speeds))


def plan(
    target: str,
    method: MethodOptions | None,
    device: DeviceLimits,
    *,
    precision: str,
    context: int | None,
    acceptance: float,
    backend: EngineRuntime = "tensorrt",
) -> DevicePlan:
    """Plans for one text at a time.

    Args:
        method: a method with a draft that is a separate model; None for plain decoding.
        precision: precision of all matrices: fp16, bf16, fp8, int8 or int4; activations and caches take 16 bits.
        context: maximum number of tokens of a prompt and its output; None for the target's, at most
            :data:`DEFAULT_CONTEXT`.

    Raises:
        BuildError: a configuration cannot be read, the draft is another target's, or the device lacks the precision.
    """
    check_stored((precision,), (capability(device.capability),))
    nodes = MAX_DRAFTS + 1 if method is None else sum(_DEFAULT_TREES)
    target_sizes = model_sizes(target)
    positions = target_sizes.positions
    if context is None:
        context = min(DEFAULT_CONTEXT, positions or DEFAULT_CONTEXT)
    if positions is not None:
        require_positions(context, positions, target)
    models = [_model_plan(target, target_sizes, precision, context, backend, nodes)]
    most, block = 0, None
    if method is not None:
        draft = _draft(method, target, target_sizes)
        block = draft.block
        most = MAX_DRAFTS if block is None else min(MAX_DRAFTS, block)
        models.append(_model_plan(draft.source, draft.sizes, precision, context, backend))
    return _device_plan(models, device, context, acceptance, most, one_pass=block is not None)


def _draft(method: MethodOptions, target: str, target_sizes: ModelSizes) -> MetaDraft:
    if method_type(method.name).whole_model:
        source: str = method.model  # type: ignore[attr-defined]
        require_whole_model(locate(source, weights=False))
        return MetaDraft(source, model_sizes(source))
    draft = exporter_of(method).meta_draft(method, target, target_sizes)
    if draft is None:
        raise BuildError(
            f"method is {method.name!r}, which has no model of its own to plan for; expected draft_model, "
            "universal_draft, eagle3, dflash or mtp. Leave it out; 'specexport bench' measures what a bundle gains",
            param="method",
        )
    return draft


def plan_bundle(manifest: Manifest, source: str, device: DeviceLimits, *, acceptance: float) -> DevicePlan:
    """Plans for a bundle as it is stored, with its first method that drafts with a separate model; see :func:`plan`."""
    sizes = {entry.path: entry.size for entry in manifest.files}
    models = [_bundle_model_plan(source, manifest.target, sizes)]
    method = next((candidate for candidate in manifest.methods if candidate.draft is not None), None)
    most = 0
    if method is not None and method.draft is not None:
        most = min(MAX_DRAFTS, max(len(tree) for tree in method.token_trees()) - 1)
        models.append(_bundle_model_plan(f"{source}: {method.name}", method.draft, sizes))
    one_pass = method is not None and not method.call_widths
    return _device_plan(models, device, manifest.max_seq_len, acceptance, most, one_pass)


def _bundle_model_plan(source: str, model: Model, sizes: Mapping[str, int]) -> ModelPlan:
    # A device has a copy of what a draft shares with the target.
    weights = sum(sizes.get(part.weights, 0) for part in model.ranks or (model,)) + model.shared_bytes
    row, points = model.cache_row_bytes, model.graph.points
    return ModelPlan(
        source=source,
        parameters=model.parameters,
        active=model.parameters,
        weights=weights,
        read=weights,
        read_per_token=0,
        read_limit=weights,
        cache=row * max(point.cache for point in points),
        cache_row=row,
        scratch=4 * max(point.tokens for point in points) * model.vocab_size,
    )


def _device_plan(
    models: Sequence[ModelPlan], device: DeviceLimits, context: int, acceptance: float, most: int, one_pass: bool
) -> DevicePlan:
    """The plan of a target and, if any, its draft, which drafts up to ``most`` tokens."""
    speeds = []
    for k in range(most + 1):
        passes = min(k, 1) if one_pass else k
        read = models[0].step(k + 1, context / 2) + (passes * models[1].step(1, context / 2) if passes else 0)
        tokens = (1 - acceptance ** (k + 1)) / (1 - acceptance)
        speeds.append(tokens * EFFICIENCY * device.bandwidth / read)
    available = device.memory - device.reserved
    return DevicePlan(tuple(models), context, sum(model.total for model in models), available, tuple(speeds))


def _model_plan(
    source: str, model: ModelSizes, precision: str, context: int, backend: EngineRuntime, nodes: int = 0
) -> ModelPlan:
    """The plan of a model; for a target, ``nodes`` is the total number of nodes of the trees that it verifies."""
    if without := sorted(model.layer_types & {"conv", "linear_attention", "mamba"}):
        raise BuildError(
            f"{source}: has {', '.join(without)} layers; layers without attention run only on CPUs so far, not on "
            "such devices"
        )
    by_onnxruntime = backend == "onnxruntime-cuda"
    weights = read = experts = 0
    read_per_token = 0.0
    for parameter in model.parameters:
        numel = parameter.numel
        if parameter.share is not None:  # experts are gathered, and stored in 16 bits as tables are
            weights += 2 * numel
            experts += 2 * numel
            read_per_token += parameter.share * 2 * numel
            continue
        if parameter.table:
            by_block = by_onnxruntime and precision in _DEQUANTIZED_ABOVE  # else looked up in 16 bits
            weights += _stored(parameter, "int8") if by_block else 2 * numel
        if parameter.head or not parameter.table:
            stored = _stored(parameter, precision)
            read += stored
            # A tied head in 16 bits is the embedding's matrix, of which onnxruntime keeps a transposed copy too.
            weights += 0 if parameter.table and _BITS[precision] == 16 and not by_onnxruntime else stored
    wide = max(model.intermediate, model.hidden)
    # Gate, up and their product; logits, p and the residual distribution at the nodes of a tree.
    scratch = 2 * PREFILL_CHUNK * (3 * wide + 4 * model.hidden) + 4 * (MAX_DRAFTS + 1) * model.vocab * 4
    if by_onnxruntime:
        scratch += _ACCEPT_ARRAYS * nodes * model.vocab * 4
    if by_onnxruntime and precision in _DEQUANTIZED_ABOVE:
        widest = max(2 * wide, model.vocab if _DEQUANTIZED_ABOVE[precision] <= MAX_DRAFTS else 0)
        scratch += 2 * 2 * widest * model.hidden
    return ModelPlan(
        source=source,
        parameters=model.total,
        active=model.active,
        weights=weights,
        read=read + round(read_per_token),
        read_per_token=round(read_per_token),
        read_limit=read + experts,
        cache=model.row * cache_buckets(context, PREFILL_CHUNK)[-1],
        cache_row=model.row,
        scratch=scratch,
    )


def _stored(parameter: Parameter, precision: str) -> int:
    """The size of a parameter in bytes: a matrix at ``precision`` with its scales, or a vector in 16 bits."""
    bits, numel = _BITS[precision], parameter.numel
    if len(parameter.shape) < 2 or bits == 16:
        return 2 * numel
    scales = parameter.shape[0] if precision == "fp8" else numel // DEFAULT_BLOCK_SIZE
    return numel * bits // 8 + scales * _SCALE_BYTES
