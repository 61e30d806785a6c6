"""Options for opening and serving models, of ``LLM``, ``AsyncEngine``, the commands, the server, Ray and Triton.

Imports no web framework, so that ``--help`` needs none.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from specexport.contract.methods import SpeculativeConfig
from specexport.contract.options import option
from specexport.exporter.options import BuildSettings
from specexport.runtime.backend import DEFAULT_UTILIZATION

_model, _speculation, _machine = (partial(option, group=group) for group in ("the model", "speculation", "the machine"))
_Origin = Annotated[str, Meta(pattern=r"^(\*|null|[a-z][a-z0-9+.-]*://[^/\sA-Z]+)$")]
"""As browsers send it: without a path, in small letters."""
_api, _limit, _ray = (partial(option, group=group) for group in ("the API", "limits", "on Ray"))


class _ModelOptions(BuildSettings, frozen=True):
    """The model to open.

    Attributes:
        model: a bundle, or a model (folder, hub id or .gguf file) that is built on first use (default: none).
    """

    model: Annotated[str | Path | None, option("BUNDLE_OR_MODEL", positional=True, unchecked=True)] = None


class EngineOptions(_ModelOptions, frozen=True, kw_only=True):
    """Options for opening a bundle or a model, which is built on first use; inherits the options of the build.

    Attributes:
        bundle: a folder written by specexport build, instead of a model (default: none).
        speculative_config: how to speculate: a mapping with method, model and the method's keys, or several of them,
            the default first. For a bundle, it chooses one of the bundle's methods and sets options of methods without
            a graph (default: the bundle's first method; models are built without a method, and text is looked up where
            that pays).
        calibrate: choose how much each step speculates by the costs of steps, which are measured in a few seconds when
            a bundle is first opened on a machine.
        max_model_len: maximum number of tokens of a prompt and its output (default: the bundle's; to build, the
            model's, at most 2048).
        seed: determines the seeds of requests without one, by their order; with num_speculative_tokens or without
            calibration, a request that runs alone then samples the same text again (default: new seeds).
        check_hashes: compare a bundle's files with its manifest.
        cache_graphs: keep packed int8 and int4 matrices in the cache folder, so that a bundle opens faster next time.
        tensor_parallel_size: number of processes that share the target (default: 1, or the bundle's).
        threads: CPU threads, at most one per core (default: one per core).
        backend: backend that runs the bundle: onnxruntime, onnxruntime-cuda, tensorrt, tensorrt-rtx or an installed
            package's (default: the one it was built for).
        gpu_memory_utilization: share of a GPU's memory that may be used, other programs included; has no effect on a
            CPU.
    """

    bundle: Annotated[str | Path | None, option(hidden=True, unchecked=True)] = None
    speculative_config: Annotated[
        SpeculativeConfig | None,
        _speculation("JSON", unchecked=True, expected="a mapping, its JSON, or a list of such"),
    ] = None
    calibrate: Annotated[
        bool,
        _speculation(
            off="always draft the bundle's default number of tokens; otherwise the costs of steps are measured once "
            "per machine, in a few seconds, and each step drafts as many tokens as pay"
        ),
    ] = True
    max_model_len: Annotated[int | None, _model("S", ge=2)] = None
    seed: Annotated[int | None, _model("N", ge=0)] = None
    check_hashes: Annotated[bool, _model(off="compare only the sizes of a bundle's files")] = True
    cache_graphs: Annotated[bool, _machine(off="do not keep packed int8 and int4 matrices in the cache folder")] = True
    tensor_parallel_size: Annotated[int | None, _machine("N", short="-tp", ge=1)] = None
    threads: Annotated[int | None, _machine("N", ge=1)] = None
    backend: Annotated[str | None, _machine("NAME")] = None
    gpu_memory_utilization: Annotated[float, _machine("SHARE", gt=0, le=1)] = DEFAULT_UTILIZATION


class ServiceOptions(EngineOptions, frozen=True, kw_only=True):
    """Options of an engine that serves requests as they arrive.

    Attributes:
        max_queue: maximum number of waiting requests; the server refuses more with 429.
    """

    max_queue: Annotated[int, option("N", group="limits", ge=0)] = 128


class ServerOptions(ServiceOptions, frozen=True, kw_only=True):
    """Options of ``specexport serve``.

    Attributes:
        served_model_name: the model's names in the API (default: as given).
        api_key: key that clients must send (default: $SPECEXPORT_API_KEY, else none).
        cors: origin of web pages that may call the server, * for any (default: none).
        page: serve the page at /.
        timeout: maximum number of seconds per request; 0 for no limit.
        shutdown_timeout: seconds that streams get to finish when the server stops.
        max_body_bytes: maximum size of a request body in bytes.
        replicas: with --ray, number of engines, each with a copy of the model.
        max_replicas: with --ray, maximum number of engines while requests wait; idle ones are removed again (default:
            --replicas).
        host: address to listen on; 0.0.0.0 for all.
        port: port to listen on; 0 for any free port.
        log_level: lowest level that is logged.
        ray: serve on a Ray cluster: $RAY_ADDRESS, 'ray start', or a new one.
    """

    served_model_name: Annotated[tuple[str, ...], option("NAME", group="the model", min_length=1)] = ()
    api_key: Annotated[tuple[str, ...], _api("KEY", repeat=True)] = ()
    cors: Annotated[
        tuple[_Origin, ...], _api("ORIGIN", repeat=True, expected="a list of origins such as https://example.com:8080")
    ] = ()
    page: Annotated[bool, _api(off="do not serve the page at /")] = True
    timeout: Annotated[float, _limit("S", ge=0)] = 600.0
    shutdown_timeout: Annotated[float, _limit("S", ge=0)] = 30.0
    max_body_bytes: Annotated[int, _limit("N", ge=1)] = 8 << 20
    replicas: Annotated[int, _ray("N", ge=1)] = 1
    max_replicas: Annotated[int | None, _ray("N", ge=1)] = None
    host: Annotated[str, _api()] = "127.0.0.1"
    port: Annotated[int, _api(ge=0, le=65535)] = 8000
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _api()] = "info"
    ray: Annotated[bool, _ray()] = False
