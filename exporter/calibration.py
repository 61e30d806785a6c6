"""GPTQ: rounds a model's matrices to four bits such that their products over a calibration text change least."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from specexport.contract.errors import UNREADABLE, BuildError, explained
from specexport.contract.values import Progress
from specexport.exporter.checkpoints.checkpoint import Checkpoint, plain_transformers
from specexport.exporter.checkpoints.quiet import quiet
from specexport.exporter.checkpoints.stored import (
    Blocks,
    Factors,
    Kind,
    QuantizedTensor,
    Scales,
    attach_stored,
    read_parameter,
    read_weights,
)
from specexport.exporter.external_data import pack_int4, unpack_int4
from specexport.exporter.quantize import (
    MAX_INT4,
    MIN_INT4,
    RoundedTensor,
    RoundingError,
    block_for,
    fit_scales,
    fits_half,
    quantize_blocks,
    to_integers,
)

_WINDOW = 256
MIN_TOKENS = _WINDOW
"""Minimum number of tokens of calibration data; with fewer, matrices are rounded worse than without data."""
_TOKENS = 4096
_MAX_PRODUCTS = 1 << 44
"""Maximum number of multiplications of the pass over the text, a few minutes on two cores; large models read less."""
_INPUTS = 1 << 24
"""Number of inputs of the widest matrix, of all tokens; models with narrow layers read more than ``_TOKENS``."""
_DAMPING = 0.003
"""Share of the mean diagonal that is added to the diagonal of ``x.T @ x``, which is mostly near zero for few tokens."""
_COLUMNS = 128
"""Number of inputs that compensate for each other's errors one by one, before one product corrects all later inputs."""
_MIN_SIZE = 1 << 13
"""Matrices of at most this many numbers are rounded without a text, as cached traces may contain them
(:mod:`specexport.exporter.trace_cache`)."""
_MAX_FILE = 1 << 26


def calibration_text(path: Path | None) -> str:
    """The text to calibrate with: a file of text, or JSON lines with ``text`` or ``messages``; None for the default."""
    if path is None:
        return resources.files("specexport.exporter").joinpath("texts/calibration.txt").read_text(encoding="utf-8")
    try:
        if path.stat().st_size > _MAX_FILE:
            raise BuildError(f"{path}: {path.stat().st_size} bytes of calibration data; expected at most {_MAX_FILE}")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BuildError(f"{path}: {reason}; expected text or JSON lines (calibration_data)") from error
    if path.suffix == ".jsonl":  # not splitlines(), as JSON strings may hold other line ends
        lines = [(at, line) for at, line in enumerate(text.split("\n"), 1) if line.strip()]
        text = "\n\n".join(_text_of(path, at, line) for at, line in lines)
    if not text.strip():
        raise BuildError(f"{path}: the calibration data holds no text; expected a few thousand tokens")
    return text


class _Message(msgspec.Struct):
    content: str


class _Line(msgspec.Struct):
    text: str | None = None
    messages: list[_Message] = []


def _text_of(path: Path, at: int, line: str) -> str:
    try:
        read = msgspec.json.decode(line, type=_Line)
    except UNREADABLE as error:
        raise BuildError(f"{path}: line {at}: {explained(error)}; a line is an object with text or messages") from error
    if read.text is None and not read.messages:
        raise BuildError(f"{path}: line {at} has neither text nor messages; expected one of them")
    return read.text if read.text is not None else "\n".join(message.content for message in read.messages)


def calibrate(checkpoint: Checkpoint, tokens: Sequence[int], block_size: int, progress: Progress) -> Checkpoint:
    """Rounds a checkpoint's matrices, each for the inputs that it gets from the matrices rounded before it.

    Large matrices are read one at a time, and kept as integers. Embeddings, the head and the matrices chosen by
    :func:`_int8_matrices` get int8, all others int4.

    Returns:
        The checkpoint with the rounded matrices among its tensors. The old one is unchanged, except that its parameters
        become stand-ins for them.
    """
    length = min(_WINDOW, checkpoint.max_positions, len(tokens))
    model = checkpoint.model
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tables = {id(table.weight) for table in (model.get_input_embeddings(), model.get_output_embeddings())}
    matrices = {
        names[id(module.weight)]: module
        for module in model.modules()
        if isinstance(module, nn.Linear)
        and id(module.weight) in names
        and id(module.weight) not in tables
        and module.weight.numel() > _MIN_SIZE
        and not isinstance(checkpoint.tensors.get(names[id(module.weight)]), QuantizedTensor)
        and block_for(module.in_features, block_size) is not None
    }
    widest = max((matrix.in_features for matrix in matrices.values()), default=1)
    most = min(max(_TOKENS, _INPUTS // widest), _MAX_PRODUCTS // checkpoint.parameters, len(tokens))
    count = most // max(1, length)
    head = model.get_output_embeddings()
    rounded: dict[str, RoundedTensor] = {}
    if head.weight is not model.get_input_embeddings().weight and id(head.weight) in names:
        name = names[id(head.weight)]
        block = block_for(head.weight.shape[1], block_size)
        if block is not None and not isinstance(checkpoint.tensors.get(name), QuantizedTensor):
            rounded[name] = _int8(name, head.weight, read_parameter(head.weight).float(), block)
    if count and matrices:
        rows = np.array(tokens[: count * length], np.int64).clip(max=checkpoint.input_vocab - 1)
        int8 = _int8_matrices(checkpoint, matrices, block_size)
        calibration = _Calibration(matrices, int8, block_size, rounded, progress)
        with torch.no_grad(), quiet(), plain_transformers(model), read_weights(model), calibration.rounding():
            model.base_model(torch.from_numpy(rows.reshape(count, length)), use_cache=False)
    parameters = dict(model.named_parameters())
    for name, tensor in rounded.items():
        attach_stored(parameters[name], tensor)
    return replace(checkpoint, tensors={**checkpoint.tensors, **rounded})


def _int8_matrices(checkpoint: Checkpoint, matrices: dict[str, nn.Linear], block_size: int) -> set[str]:
    """The names of the matrices to store in int8: projections of values, and down projections.

    Values are few, and attention averages over them, but does not forget their errors; the inputs of down projections
    vary most between tokens. The model must not become larger than llama.cpp's Q4_K_M, which also gives both more bits.
    Values come first, then down projections of the first and last layers, then every third, then the others.
    """
    model = checkpoint.model
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    width, widest = table.shape[1], max(matrix.in_features for matrix in matrices.values())
    down = [name for name, matrix in matrices.items() if (matrix.out_features, matrix.in_features) == (width, widest)]
    down = down if widest > width else []
    values = [name for name in matrices if name.endswith(".v_proj.weight")]
    first, third, others = _in_thirds(down)
    six_bit = {*first, *third, *(name for part in _in_thirds(values)[:2] for name in part)}
    sizes = {name: matrix.weight.numel() for name, matrix in matrices.items()}
    spare = head.numel() * (_q4_k_m(head.shape[1], six_bit=True) - 8 - 16 / block_size)
    if table is not head:  # llama.cpp then treats the embedding like any other matrix
        spare += table.numel() * (_q4_k_m(table.shape[1], six_bit=False) - 8 - 16 / block_size)
    for name, matrix in matrices.items():
        spare += sizes[name] * (_q4_k_m(matrix.in_features, six_bit=name in six_bit) - 4 - 20 / block_size)
    int8 = set[str]()
    for name in (*values, *first, *third, *others):
        if (spare := spare - sizes[name] * (4 - 4 / block_size)) < 0:
            break
        int8.add(name)
    return int8


def _in_thirds(names: list[str]) -> tuple[list[str], list[str], list[str]]:
    """A matrix of each layer: those of the first and last eighth of the layers, every third between, and the others."""
    eighth = len(names) // 8
    outer = [*names[:eighth], *names[len(names) - eighth :]]
    inner = names[eighth : len(names) - eighth]
    return outer, inner[2::3], [name for at, name in enumerate(inner) if at % 3 != 2]


def _q4_k_m(depth: int, *, six_bit: bool) -> float:
    """Bits per weight in llama.cpp's Q4_K_M: Q6_K or Q4_K, or Q8_0 or Q5_0 if blocks of 256 do not fit a row."""
    if depth % 256:
        return 8.5 if six_bit else 5.5
    return 6.5625 if six_bit else 4.5


@dataclass
class _Calibration:
    """The state of a pass over the text."""

    matrices: dict[str, nn.Linear]
    int8: set[str]
    block_size: int
    rounded: dict[str, RoundedTensor]
    progress: Progress
    _read: tuple[torch.Tensor | None, InputFactor | None] = (None, None)
    """The last input and its factor: the projections of queries, keys and values read the same input."""

    @contextlib.contextmanager
    def rounding(self) -> Iterator[None]:
        """Context in which each matrix is rounded before its first product."""

        def round_and_load(name: str, module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            if name not in self.rounded:
                self._round(name, module, inputs[0])
            module._parameters["weight"] = nn.Parameter(self.rounded[name].read(), requires_grad=False)

        def unload(weight: Any, module: Any, *_: Any) -> None:
            module._parameters["weight"] = weight

        with contextlib.ExitStack() as hooks:
            for name, module in self.matrices.items():
                unload_weight = functools.partial(unload, module._parameters["weight"])
                hooks.enter_context(module.register_forward_pre_hook(functools.partial(round_and_load, name)))
                hooks.enter_context(module.register_forward_hook(unload_weight, always_call=True))
            yield
        self._read = None, None

    def _round(self, name: str, module: nn.Linear, x: torch.Tensor) -> None:
        weight, block = module.weight.detach().float(), block_for(module.in_features, self.block_size)
        assert block is not None
        if name in self.int8:
            self.rounded[name] = _int8(name, module.weight, weight, block)
        else:
            seen, factor = self._read
            if seen is not x or factor is None:
                del factor
                self._read = None, None  # frees the last factor before the next is computed
                factor = InputFactor.of(x.reshape(-1, x.shape[-1]).float())
                self._read = x, factor
            self.rounded[name] = gptq(name, weight, factor, block)
        self.progress("calibrating the target", len(self.rounded), len(self.matrices))


@dataclass(frozen=True)
class InputFactor:
    """Statistics of inputs ``x[T,K]``, from the damped products ``x.T @ x``.

    Attributes:
        energy: the diagonal of the products, ``[K]``.
        order: the indices of the inputs by descending energy, int64 ``[K]``.
        factor: the upper Cholesky factor of the inverse, ``[K,K]``, with rows and columns in that order.
    """

    energy: torch.Tensor
    order: torch.Tensor
    factor: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor) -> InputFactor:
        """The statistics of inputs in fp32.

        With rows and columns reversed, the products are ``L @ L.T``, so their inverse is ``U.T @ U`` where ``U`` is the
        inverse of the reversed ``L``. No further ``[K,K]`` matrix is in memory.
        """
        products = x.T @ x
        diagonal = products.diagonal()
        diagonal[diagonal == 0] = 1.0  # these inputs are always 0, so their weights have no effect
        diagonal += _DAMPING * diagonal.mean()
        energy = diagonal.clone()
        order = torch.argsort(energy, descending=True)
        del diagonal  # a view, which would keep the products
        backwards = order.flip(0)
        products = products[backwards[:, None], backwards]
        factor = torch.linalg.cholesky(products, out=products).flip(0, 1)
        del products
        identity = torch.eye(len(factor))
        return cls(energy, order, torch.linalg.solve_triangular(factor, identity, upper=True, out=identity))


def gptq(name: str, weight: torch.Tensor, inputs: InputFactor, block: int) -> RoundedTensor:
    """Rounds the weights ``[N,K]`` input by input, the largest first; those of later inputs compensate for the errors.

    Frantar et al., "GPTQ: Accurate post-training quantization for generative pre-trained transformers" (2023). Scales
    and zero points are fitted beforehand, with errors weighted by the inputs' energy.
    """
    energy, order, factor = inputs.energy, inputs.order, inputs.factor
    outputs, depth = weight.shape
    blocks = weight.reshape(outputs, depth // block, block)
    scale, zero = fit_scales(blocks, 2, zero_points=True, weight=energy.reshape(1, depth // block, block))
    scale, zero = scale[:, :, 0].T.contiguous(), zero[:, :, 0].T.contiguous()  # [K/block,N]
    scale[scale == 0] = 1.0  # compensation may change a block of zeros
    remaining = weight.T[order].contiguous()  # [K,N]
    integers = torch.empty(depth, outputs, dtype=torch.int8)
    for start in range(0, depth, _COLUMNS):
        end = min(depth, start + _COLUMNS)
        errors = torch.empty(end - start, outputs)
        for at in range(start, end):
            group = int(order[at]) // block
            number = to_integers(remaining[at], scale[group], zero[group], MIN_INT4, MAX_INT4)
            integers[order[at]] = number.to(torch.int8)
            error = (remaining[at] - (number - zero[group]) * scale[group]) / factor[at, at]
            errors[at - start] = error
            remaining[at + 1 : end].addcmul_(factor[at, at + 1 : end, None], error, value=-1)
        remaining[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    return _rounded_tensor(name, weight, "int4", block, integers.numpy(), scale.numpy(), zero.to(torch.int8).numpy())


def _int8(name: str, parameter: torch.Tensor, weight: torch.Tensor, block: int) -> RoundedTensor:
    blocks = quantize_blocks(weight.T.numpy(), 0, block, 127)
    return _rounded_tensor(name, weight, "int8", block, blocks.integers, blocks.scale, None)


def _rounded_tensor(
    name: str,
    weight: torch.Tensor,
    kind: Kind,
    block: int,
    integers: npt.NDArray[np.int8],
    scale: npt.NDArray[np.float32],
    zero: npt.NDArray[np.int8] | None,
) -> RoundedTensor:
    """A rounded matrix ``[N,K]``, from integers ``[K,N]``, which are packed as in a file."""
    shape = integers.shape
    stored: npt.NDArray[Any] = pack_int4(integers) if kind == "int4" else integers
    scale = np.where(scale == 0, np.float32(1), scale)  # the block's integers are 0, so any scale will do

    def read() -> torch.Tensor:
        numbers = unpack_int4(stored, shape) if kind == "int4" else stored
        return torch.from_numpy(Blocks(numbers, scale, zero).restored(0)).T

    factors = Factors(scale.astype(np.float16) if fits_half(scale) else scale)
    return RoundedTensor(
        name=name,
        shape=tuple(weight.shape),
        dtype="F32",
        read=read,
        scales=lambda: Scales(kind, block, factors, zero),
        kind=kind,
        form="int8" if kind == "int8" else "",  # joined with int4, that would be stored in int8, too
        rounding=RoundingError.of(weight.numpy(), read().numpy()),
    )
