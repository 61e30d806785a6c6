"""Serve a bundle or a model over OpenAI's API.

Examples:
    specexport serve qwen3/ --port 8000 --api-key secret
    specexport serve Qwen/Qwen3-4B --speculative-config '{"model": "Qwen/Qwen3-0.6B"}' --max-model-len 2048
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from specexport.building import needs_extra
from specexport.commands import BUILD, BUILD_GROUP
from specexport.contract.errors import BuildError
from specexport.contract.options import options
from specexport.contract.values import require_text
from specexport.exporter.options import BuildSettings
from specexport.flags import add_flags, flag_values, from_flags
from specexport.options import ListenOptions, ServiceOptions

_SOURCE = "--model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``specexport serve``."""
    add_flags(parser, ListenOptions, ("model",))
    parser.add_argument(
        _SOURCE, dest="named_model", metavar="DIR_OR_ID", help="the same, as a flag (default: BUNDLE_OR_MODEL)"
    )
    declared = options(ListenOptions)
    add_flags(parser, ListenOptions, declared.keys() - options(BuildSettings).keys() - {"model"})
    add_flags(parser, ListenOptions, BUILD, group=BUILD_GROUP)


def main(arguments: argparse.Namespace) -> int:
    """Runs ``specexport serve``."""
    if hasattr(arguments, "model") == (arguments.named_model is not None):
        raise BuildError(f"give a bundle or a model, either by itself or with {_SOURCE}")
    arguments.model = getattr(arguments, "model", arguments.named_model)
    settings, of_engine = from_flags(ListenOptions, arguments), flag_values(ServiceOptions, arguments)
    keys = _keys(settings.api_key)
    if settings.ray:
        return _on_ray(arguments, settings, keys)
    for name in ("replicas", "max_replicas"):
        if hasattr(arguments, name):
            raise BuildError(f"--{name.replace('_', '-')} was given without --ray; a server by itself is one engine")
    with needs_extra("serving", "serve"):
        from specexport.server.app import Server, create_app
        from specexport.server.service import Service
    from specexport.async_engine import AsyncEngine

    engine = AsyncEngine.open(**of_engine)
    service = Service(engine, settings.served_model_name or (arguments.model,), settings.timeout or None)
    app = create_app(
        service, api_keys=keys, max_body_bytes=settings.max_body_bytes, origins=settings.cors, page=settings.page
    )
    server = Server(
        app,
        engine,
        drain_timeout=settings.shutdown_timeout,
        host=settings.host,
        port=settings.port,
        log_level=settings.log_level,
    )
    server.run()
    return 0 if server.started else 1


def _on_ray(arguments: argparse.Namespace, settings: ListenOptions, keys: Sequence[str]) -> int:
    fixed = next((name for name in (*BUILD, "tensor_parallel_size") if hasattr(arguments, name)), None)
    if fixed is not None:
        raise BuildError(f"--ray serves a bundle as it is; leave out --{fixed.replace('_', '-')}")
    most = settings.max_replicas or settings.replicas
    with needs_extra("serving on Ray", "ray"):
        from specexport.server.ray import Settings, run
    values = {name: value for name, value in vars(arguments).items() if name in Settings.model_fields}
    values |= {
        "bundle": str(Path(arguments.model).absolute()),
        "threads": settings.threads or max(1, (os.cpu_count() or 1) // most),
        "served_model_name": settings.served_model_name or (arguments.model,),
        "api_keys": tuple(keys),
    }
    run(Settings.model_validate(values), settings.host, settings.port, settings.log_level)
    return 0


def _keys(flags: Sequence[str]) -> list[str]:
    keys = list(flags) or [key for key in (os.environ.get("SPECEXPORT_API_KEY"),) if key]
    for key in keys:
        require_text(key, "SPECEXPORT_API_KEY")
    if any(not key for key in keys):
        raise BuildError("--api-key is empty; leave it out to let anyone in")
    return keys
