"""Serve a bundle or a model over OpenAI's API."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from specexport.building import needs_extra
from specexport.commands import add_calibrate, add_exactness
from specexport.contract.engines import BACKENDS
from specexport.contract.errors import BuildError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``specexport serve``."""
    parser.add_argument(
        "source", nargs="?", metavar="BUNDLE_OR_MODEL", help="a bundle, or a model that is built on first use"
    )
    parser.add_argument("--model", metavar="DIR_OR_ID", help="the same, as a flag")
    parser.add_argument("--speculative-config", metavar="JSON", help="how to speculate: method, model, ...")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for every one")
    parser.add_argument("--port", type=int, default=8000, help="0 for any that is free")
    parser.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="one that clients have to send; repeatable (default: $SPECEXPORT_API_KEY, else none)",
    )
    parser.add_argument(
        "--cors",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="pages that may call it; repeatable; * for any",
    )
    parser.add_argument("--no-page", action="store_false", dest="page", help="have no page at / to try it with")
    parser.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="the model's names in the API (default: as given)"
    )
    parser.add_argument("--max-model-len", type=int, metavar="S", help="most tokens of prompt and output")
    parser.add_argument("--max-queue", type=int, default=128, metavar="N", help="most requests that wait")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="most a request may take; 0 for no limit"
    )
    parser.add_argument(
        "--shutdown-timeout", type=float, default=30.0, metavar="SECONDS", help="that requests may take to finish"
    )
    parser.add_argument("--max-body-bytes", type=int, default=8 << 20, metavar="N", help="of a request")
    parser.add_argument("--seed", type=int, help="of requests without one of their own")
    parser.add_argument("--precision", choices=("fp32", "fp16", "int8", "int4"), help="of a model that is built")
    add_exactness(parser)
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all cores)")
    parser.add_argument(
        "--backend", choices=BACKENDS, metavar="NAME", help=f"{', '.join(BACKENDS)} (default: what it was built for)"
    )
    add_calibrate(parser)
    parser.add_argument("-tp", "--tensor-parallel-size", type=int, default=1, metavar="1", help="1: nothing is split")
    parser.add_argument(
        "--gpu-memory-utilization", type=float, metavar="SHARE", help="of a GPU's memory; on a CPU none is taken"
    )
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))


def main(arguments: argparse.Namespace) -> int:
    """Runs ``specexport serve``."""
    if (arguments.source is None) == (arguments.model is None):
        raise BuildError("give a bundle or a model, either by itself or with --model")
    for name, least in (("timeout", 0), ("shutdown_timeout", 0), ("max_queue", 0), ("max_body_bytes", 1)):
        if getattr(arguments, name) < least:
            raise BuildError(f"--{name.replace('_', '-')} is {getattr(arguments, name)}; expected at least {least}")
    with needs_extra("serving", "serve"):
        from specexport.server.app import create_app
        from specexport.server.run import Server
        from specexport.server.service import Service
    from specexport.async_engine import AsyncEngine

    source = arguments.source or arguments.model
    build: dict[str, Any] = {"precision": arguments.precision} if arguments.precision else {}
    engine = AsyncEngine.open(
        source,
        max_queue=arguments.max_queue,
        speculative_config=arguments.speculative_config,
        max_model_len=arguments.max_model_len,
        seed=arguments.seed,
        tensor_parallel_size=arguments.tensor_parallel_size,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        backend=arguments.backend,
        threads=arguments.threads,
        calibrate=arguments.calibrate,
        exactness=arguments.exactness,
        **build,
    )
    service = Service(engine, tuple(arguments.served_model_name or [source]), arguments.timeout or None)
    keys, most = _keys(arguments.api_key), arguments.max_body_bytes
    app = create_app(service, api_keys=keys, max_body_bytes=most, origins=arguments.cors, page=arguments.page)
    settings = {"host": arguments.host, "port": arguments.port, "log_level": arguments.log_level}
    server = Server(app, engine, patience=arguments.shutdown_timeout, **settings)
    server.run()
    return 0 if server.started else 1


def _keys(given: Sequence[str]) -> list[str]:
    keys = list(given) or [key for key in (os.environ.get("SPECEXPORT_API_KEY"),) if key]
    if any(not key for key in keys):
        raise BuildError("--api-key is empty; leave it out to let anyone in")
    return keys
