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
from specexport.commands import SOURCE, SOURCE_HELP, add_calibrate, add_machine, add_model, opening
from specexport.contract.errors import BuildError
from specexport.runtime.values import require_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``specexport serve``."""
    parser.add_argument("source", nargs="?", metavar=SOURCE, help=SOURCE_HELP)
    parser.add_argument("--model", metavar="DIR_OR_ID", help="the same, as a flag (default: BUNDLE_OR_MODEL)")
    model = add_model(parser)
    model.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="the model's names in the API (default: as given)"
    )
    model.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="gives requests without a seed of their own one each, by their order; a seed gives the same sampled text "
        "again to a request alone, with num_speculative_tokens or --no-calibrate (default: a new one each)",
    )
    add_calibrate(model)
    api = parser.add_argument_group("the API")
    api.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all")
    api.add_argument("--port", type=int, default=8000, help="port to listen on; 0 for any free one")
    api.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="key that clients must send; repeatable (default: $SPECEXPORT_API_KEY, else none)",
    )
    api.add_argument(
        "--cors",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="origin of web pages that may call the server, * for any; repeatable (default: none)",
    )
    api.add_argument("--no-page", action="store_false", dest="page", help="do not serve the page at /")
    api.add_argument(
        "--log-level", default="info", choices=("debug", "info", "warning", "error"), help="lowest level that is logged"
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-queue", type=int, default=128, metavar="N", help="most waiting requests; more are refused with 429"
    )
    limits.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds a request may take; 0 for no limit"
    )
    limits.add_argument(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that streams get to finish when the server stops",
    )
    limits.add_argument(
        "--max-body-bytes", type=int, default=8 << 20, metavar="N", help="largest request body in bytes"
    )
    machine = add_machine(parser)
    machine.add_argument(
        "-tp",
        "--tensor-parallel-size",
        type=int,
        metavar="N",
        help="processes that share the target (default: 1, or what the bundle was built for)",
    )
    ray = parser.add_argument_group("on Ray")
    ray.add_argument("--ray", action="store_true", help="serve on Ray: $RAY_ADDRESS, 'ray start', or one of its own")
    ray.add_argument(
        "--replicas", type=int, metavar="N", help="with --ray: engines, each with a copy of the model (default: 1)"
    )
    ray.add_argument(
        "--max-replicas",
        type=int,
        metavar="N",
        help="with --ray: most replicas while requests wait (default: --replicas)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Runs ``specexport serve``."""
    if (arguments.source is None) == (arguments.model is None):
        raise BuildError("give a bundle or a model, either by itself or with --model")
    for name, least in (("timeout", 0), ("shutdown_timeout", 0), ("max_queue", 0), ("max_body_bytes", 1)):
        if getattr(arguments, name) < least:
            raise BuildError(f"--{name.replace('_', '-')} is {getattr(arguments, name)}; expected at least {least}")
    if not 0 <= arguments.port < 2**16:  # uvloop would use the last 16 bits of others
        raise BuildError(f"--port is {arguments.port}; expected 0 to 65535")
    if arguments.ray:
        return _on_ray(arguments)
    for name in ("replicas", "max_replicas"):
        if getattr(arguments, name) is not None:
            raise BuildError(f"--{name.replace('_', '-')} was given without --ray; a server by itself is one engine")
    with needs_extra("serving", "serve"):
        from specexport.server.app import create_app
        from specexport.server.run import Server
        from specexport.server.service import Service
    from specexport.async_engine import AsyncEngine

    source = arguments.source or arguments.model
    engine = AsyncEngine.open(
        source,
        max_queue=arguments.max_queue,
        seed=arguments.seed,
        tensor_parallel_size=arguments.tensor_parallel_size,
        **opening(arguments),
    )
    service = Service(engine, tuple(arguments.served_model_name or [source]), arguments.timeout or None)
    keys, most = _keys(arguments.api_key), arguments.max_body_bytes
    app = create_app(service, api_keys=keys, max_body_bytes=most, origins=arguments.cors, page=arguments.page)
    settings = {"host": arguments.host, "port": arguments.port, "log_level": arguments.log_level}
    server = Server(app, engine, drain_timeout=arguments.shutdown_timeout, **settings)
    server.run()
    return 0 if server.started else 1


def _on_ray(arguments: argparse.Namespace) -> int:
    if arguments.precision or arguments.tensor_parallel_size is not None:
        raise BuildError("--ray serves a bundle as it is; leave out --precision and --tensor-parallel-size")
    replicas = 1 if arguments.replicas is None else arguments.replicas
    most = arguments.max_replicas or replicas
    with needs_extra("serving on Ray", "ray"):
        from pydantic import ValidationError

        from specexport.server.ray import Settings, run
    values = {name: value for name, value in vars(arguments).items() if name in Settings.model_fields}
    values |= {
        "bundle": str(Path(arguments.source or arguments.model).absolute()),
        "replicas": replicas,
        "threads": arguments.threads or max(1, (os.cpu_count() or 1) // max(1, most)),
        "served_model_name": arguments.served_model_name or [arguments.source or arguments.model],
        "timeout": arguments.timeout or None,
        "api_keys": _keys(arguments.api_key),
    }
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise BuildError(f"--{str(first['loc'][0]).replace('_', '-')} is {first['input']!r}: {first['msg']}") from error
    run(settings, arguments.host, arguments.port, arguments.log_level)
    return 0


def _keys(flags: Sequence[str]) -> list[str]:
    keys = list(flags) or [key for key in (os.environ.get("SPECEXPORT_API_KEY"),) if key]
    for key in keys:
        require_text(key, "SPECEXPORT_API_KEY")
    if any(not key for key in keys):
        raise BuildError("--api-key is empty; leave it out to let anyone in")
    return keys
