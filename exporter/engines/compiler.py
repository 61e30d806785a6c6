"""Compiles an ONNX graph into an engine with TensorRT or TensorRT-RTX, both driven through polygraphy."""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import onnx
import onnx_ir as ir

from specexport.contract import tensors
from specexport.contract.engines import EngineRuntime
from specexport.contract.errors import BuildError
from specexport.exporter.options import Capability, dotted

_MODULES: dict[EngineRuntime, str] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
_COLLECTIVES: dict[EngineRuntime, str] = {"tensorrt": "TensorRT 11", "tensorrt-rtx": "TensorRT-RTX 1.7"}
"""The first releases known to have collective layers."""
_COLLECTIVES_FROM: Capability = (8, 0)


class CompilerLibrary(NamedTuple):
    """An imported library."""

    runtime: EngineRuntime
    trt: Any
    polygraphy: Any

    @property
    def version(self) -> str:
        return str(self.trt.__version__)


def load_library(runtime: EngineRuntime) -> CompilerLibrary:
    """Imports a library, and polygraphy for it."""
    name = _MODULES[runtime]
    try:
        trt = importlib.import_module(name)
        config: Any = importlib.import_module("polygraphy.config")
    except ImportError as error:
        raise BuildError(
            f"compiling for {runtime} needs the [{runtime}] and [compile] extras ({error}); install them with: "
            f"pip install 'specexport[{runtime},compile]'"
        ) from error
    if "polygraphy.backend.trt" not in sys.modules:
        # polygraphy reads this once, when its loaders are imported.
        config.USE_TENSORRT_RTX = runtime == "tensorrt-rtx"
    elif (runtime == "tensorrt-rtx") != config.USE_TENSORRT_RTX:
        raise BuildError(
            f"this process already compiles for {next(other for other in _MODULES if other != runtime)}, and cannot "
            f"also compile for {runtime}; use another process"
        )
    with messages():
        polygraphy = importlib.import_module("polygraphy.backend.trt")
    return CompilerLibrary(runtime, trt, polygraphy)


def require_collectives(library: CompilerLibrary, capabilities: Collection[Capability]) -> None:
    """Checks that a library and devices support the collective layers of a split target."""
    if older := sorted(device for device in capabilities if device < _COLLECTIVES_FROM):
        raise BuildError(
            f"compute_capability is {dotted(older[0])}, and the collective layers of a split target need "
            f"{dotted(_COLLECTIVES_FROM)} (Ampere) or higher; compile for other devices, or build without "
            "--tensor-parallel",
            param="compute_capability",
        )
    if not hasattr(library.trt, "IDistCollectiveLayer"):
        raise BuildError(
            f"{library.runtime} {library.version} has no collective layers (IDistCollectiveLayer), which split targets "
            f"need; install {_COLLECTIVES[library.runtime]} or newer, or build without --tensor-parallel"
        )


@contextlib.contextmanager
def messages() -> Iterator[list[str]]:
    """Collects the errors of the library and of polygraphy, and silences both."""
    from polygraphy.logger import G_LOGGER

    errors: list[str] = []

    def collect(message: Any, severity: int, *_: Any, **__: Any) -> None:
        if severity >= G_LOGGER.ERROR:
            errors.append(str(message() if callable(message) else message))

    with mock.patch.object(G_LOGGER, "log", collect):
        yield errors


def reason(errors: list[str]) -> str:
    """The first error among a library's messages, in one line."""
    # cudaError 35 means that there is no driver, which compiling does not need.
    reasons = [message for message in errors if "cudaError 35" not in message]
    return " ".join(reasons[0].split()) if reasons else "it gave no reason"


@dataclass(frozen=True)
class EngineReport:
    """The result of compiling a graph.

    Attributes:
        layers: number of the network's layers before the compiler fuses them.
        attentions: number of Attention operators; 0 if the graph spells attention out.
        decomposed: the reason why attention has no fused kernel; None if it has one.
    """

    file: str
    profiles: int
    layers: int
    attentions: int
    decomposed: str | None
    size: int
    seconds: float


def compile_graph(
    source: Path,
    output: Path,
    profiles: Sequence[dict[str, int]],
    library: CompilerLibrary,
    capabilities: tuple[Capability, ...],
) -> EngineReport:
    """Compiles an ONNX graph for the shapes of its profiles, which give the sizes of all symbolic dimensions."""
    start = time.monotonic()
    graph = onnx.load(source, load_external_data=False).graph
    decomposed = "fp32 has no fused kernel" if _attention_in_fp32(graph) else None
    while True:
        try:
            config = _config(library, capabilities, _profiles(graph, profiles, library))
            serialized, layers, attentions = _attempt(source, graph, library, config, decompose=decomposed is not None)
            break
        except _RefusedError as error:
            if decomposed is not None or "decomposable" not in str(error):
                errors = f"{source}: {library.runtime} {library.version} does not compile it: {error}"
                raise BuildError(errors) from error
            # Which shapes have a fused kernel depends on the version and the device, and shows only in compiling.
            decomposed = "no fused kernel for its shapes"
    return EngineReport(
        file=output.name,
        profiles=len(profiles),
        layers=layers,
        attentions=attentions,
        decomposed=decomposed if attentions else None,
        size=output.write_bytes(memoryview(serialized)),
        seconds=time.monotonic() - start,
    )


class _RefusedError(Exception):
    """The library refuses a graph; the message has the reason."""


def _attempt(
    source: Path, graph: onnx.GraphProto, library: CompilerLibrary, config: Any, *, decompose: bool
) -> tuple[Any, int, int]:
    """Compiles once; returns the engine, and the numbers of its network's layers and Attention operators."""
    from polygraphy.exception import PolygraphyException

    with messages() as errors:
        try:
            builder, network, parser = library.polygraphy.network_from_onnx_path(str(source), strongly_typed=True)
            _require_same(source, graph, network, library)
            attentions = _allow_decomposition(network, library.trt, decompose)
            serialized = library.polygraphy.engine_bytes_from_network((builder, network, parser), config)
        except PolygraphyException as error:
            raise _RefusedError(reason(errors)) from error
    return serialized, int(network.num_layers), attentions


def _config(library: CompilerLibrary, capabilities: tuple[Capability, ...], profiles: list[Any]) -> Any:
    # Auxiliary streams would fork every captured graph, and such a narrow model leaves little to overlap.
    settings: dict[str, Any] = {"profiles": profiles, "max_aux_streams": 0}
    if library.runtime == "tensorrt":
        return library.polygraphy.CreateConfig(**settings)
    from polygraphy.backend.tensorrt_rtx import CreateConfigRTX

    def without_tf32(builder: Any, network: Any, config: Any) -> None:
        # TensorRT-RTX uses TF32 by default; for TensorRT polygraphy turns it off.
        config.clear_flag(library.trt.BuilderFlag.TF32)

    config = CreateConfigRTX(compute_capabilities=list(capabilities), **settings)
    return library.polygraphy.PostprocessConfig(config, without_tf32)


def _profiles(graph: onnx.GraphProto, profiles: Sequence[dict[str, int]], library: CompilerLibrary) -> list[Any]:
    fixed = []
    for sizes in profiles:
        profile = library.polygraphy.Profile()
        for value in graph.input:
            dims = value.type.tensor_type.shape.dim
            shape = [sizes[dim.dim_param] if dim.dim_param else dim.dim_value for dim in dims]
            profile.add(value.name, min=shape, opt=shape, max=shape)
        fixed.append(profile)
    return fixed


def _layers(network: Any, kind: str) -> list[Any]:
    layers = (network.get_layer(index) for index in range(network.num_layers))
    return [layer for layer in layers if str(layer.type).endswith(kind)]


def _allow_decomposition(network: Any, trt: Any, decompose: bool) -> int:
    """Counts the Attention operators, and allows the compiler to decompose them if asked to."""
    layers = _layers(network, "ATTENTION_INPUT")
    for layer in layers:
        layer.__class__ = trt.IAttentionInputLayer  # the bindings return every layer as the base class
        layer.attention.decomposable = decompose
    return len(layers)


def _attention_in_fp32(graph: onnx.GraphProto) -> bool:
    caches = [value for value in graph.input if value.name.startswith(tensors.CACHES)]
    return any(value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT for value in caches)


def _require_same(source: Path, graph: onnx.GraphProto, network: Any, library: CompilerLibrary) -> None:
    """Checks that the network has the ONNX graph's inputs and outputs, and writes caches in place."""
    sides = (
        ("input", graph.input, [network.get_input(index) for index in range(network.num_inputs)]),
        ("output", graph.output, [network.get_output(index) for index in range(network.num_outputs)]),
    )
    for side, expected, network_tensors in sides:
        types = {tensor.name: str(tensor.dtype).rpartition(".")[2] for tensor in network_tensors}
        onnx_types = {value.name: ir.DataType(value.type.tensor_type.elem_type).name for value in expected}
        expected_types = {name: _TYPES.get(kind, kind) for name, kind in onnx_types.items()}
        for name in sorted(types.keys() | expected_types.keys()):
            if types.get(name) != expected_types.get(name):
                raise BuildError(
                    f"{source}: {side} {name} is {types.get(name, 'absent')} in the {library.runtime} network, "
                    f"expected {expected_types.get(name, 'absent')}; this is a defect of specexport, please report it"
                )
    updates = _layers(network, "KV_CACHE_UPDATE")
    written = {layer.get_output(0).name: layer.get_input(0).name for layer in updates}
    for node in graph.node:
        if node.op_type == "TensorScatter" and written.get(node.output[0]) != node.input[0]:
            raise BuildError(
                f"{source}: {library.runtime} {library.version} does not write {node.input[0]} in place; lower the "
                "bundle portably for it (--lowering portable)"
            )


_TYPES = {"FLOAT16": "HALF", "BFLOAT16": "BF16"}
"""Types that TensorRT names differently from ONNX."""
