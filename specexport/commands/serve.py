"""Commands that serve: ``serve``, and ``export`` for other servers."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from specexport.building import needs_extra
from specexport.commands import BUILD, BUILD_GROUP
from specexport.commands.flags import UsageError, add_flags, flag_values, from_flags
from specexport.contract.errors import BuildError
from specexport.contract.folders import written_beside
from specexport.contract.options import Options, dashed, option, options
from specexport.contract.reading import read_manifest
from specexport.contract.values import counted, require_text
from specexport.exporter.options import BuildSettings
from specexport.options import ServerOptions, ServiceOptions
from specexport.runtime.machine import available_cores

_SOURCE = "--model"
_MODEL = '''"""Triton's Python backend imports the model from here; specexport must be installed in its Python."""

from specexport.server.triton import TritonPythonModel as TritonPythonModel
'''
_ASSETS = Path(__file__).parents[1] / "server" / "assets"


def serve_flags(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``specexport serve``."""
    add_flags(parser, ServerOptions, ("model",), unset={"model": ""})
    parser.add_argument(
        _SOURCE, dest="named_model", metavar="BUNDLE_OR_MODEL", help="the same, as a flag (default: BUNDLE_OR_MODEL)"
    )
    declared = options(ServerOptions)
    add_flags(parser, ServerOptions, declared.keys() - options(BuildSettings).keys() - {"model"})
    add_flags(parser, ServerOptions, BUILD, group=BUILD_GROUP)


def serve_command(arguments: argparse.Namespace) -> int:
    """Serve a bundle or a model over OpenAI's API.

    Examples:
        specexport serve qwen3/ --port 8000 --api-key secret
        specexport serve Qwen/Qwen3-4B --speculative-config '{"model": "Qwen/Qwen3-0.6B"}' --max-model-len 2048
    """
    if hasattr(arguments, "model") == (arguments.named_model is not None):
        names = "; --served-model-name takes all words up to the next flag"
        several = names if hasattr(arguments, "served_model_name") else ""
        raise UsageError(f"give a bundle or a model, either by itself or with {_SOURCE}{several}")
    arguments.model = getattr(arguments, "model", arguments.named_model)
    settings, of_engine = from_flags(ServerOptions, arguments), flag_values(ServiceOptions, arguments)
    keys = _keys(settings.api_key)
    if settings.ray:
        return _on_ray(arguments, settings, keys)
    for name in ("replicas", "max_replicas"):
        if hasattr(arguments, name):
            raise UsageError(f"{dashed(name)} was given without --ray, which it needs")
    with needs_extra("serving", "serve"):
        from specexport.server.app import Server, create_app
        from specexport.server.service import Service
    from specexport.async_engine import AsyncEngine

    _require_free(settings.host, settings.port)
    engine = AsyncEngine.open(**of_engine)
    service = Service(engine, settings.served_model_name or (arguments.model,), settings.timeout or None)
    app = create_app(
        service, api_keys=keys, max_body_bytes=settings.max_body_bytes, cors=settings.cors, page=settings.page
    )
    server = Server(
        app,
        engine,
        shutdown_timeout=settings.shutdown_timeout,
        host=settings.host,
        port=settings.port,
        log_level=settings.log_level,
    )
    with contextlib.suppress(SystemExit):  # uvicorn has printed the reason
        server.run()
    return 0 if server.started else 1


def _require_free(host: str, port: int) -> None:
    """Refuses an address that is not free, before a model is loaded."""

    async def listen() -> None:
        loop = asyncio.get_running_loop()
        (await loop.create_server(asyncio.Protocol, host, port, start_serving=False)).close()

    try:
        asyncio.run(listen())
    except OSError as error:
        raise BuildError(
            f"--host is {host} and --port {port}: {error.strerror or error}; choose an address that is free here"
        ) from error


def _on_ray(arguments: argparse.Namespace, settings: ServerOptions, keys: Sequence[str]) -> int:
    fixed = next((name for name in (*BUILD, "tensor_parallel_size") if hasattr(arguments, name)), None)
    if fixed is not None:
        raise UsageError(f"--ray serves a bundle as it is; leave out {dashed(fixed)}")
    replicas = settings.max_replicas or settings.replicas
    with needs_extra("serving on Ray", "ray"):
        from specexport.server.ray import Settings, run
    values = {name: value for name, value in vars(arguments).items() if name in Settings.model_fields}
    values |= {
        "bundle": str(Path(arguments.model).absolute()),
        "threads": settings.threads or max(1, available_cores() // replicas),
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
        raise BuildError("api_key is empty; leave it out to need no key", param="api_key")
    return keys


class ExportOptions(Options, frozen=True, kw_only=True):
    """Options of ``specexport export``.

    Attributes:
        form: triton, for a model repository with its Python backend.
        bundle: bundle to copy.
        output: folder to write.
        name: name of the model in Triton (default: the name of BUNDLE).
        overwrite: replace an existing repository.
    """

    form: Annotated[Literal["triton"], option(positional=True)]
    bundle: Annotated[Path, option("BUNDLE", positional=True)]
    output: Annotated[Path, option("REPOSITORY", short="-o")]
    name: Annotated[str | None, option("NAME")] = None
    overwrite: bool = False


def export_command(command: ExportOptions) -> int:
    """Export a bundle for another server, as a model repository of Triton.

    Example:
        specexport export triton qwen3/ -o models/
    """
    manifest = read_manifest(command.bundle)
    name = command.name or command.bundle.resolve().name
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", name):
        raise BuildError(f"the model's name is {name!r}; expected letters, digits, '_', '.' and '-': give it as --name")
    if command.output.exists() and not command.overwrite:
        raise BuildError(f"{command.output}: exists already; choose another folder or pass --overwrite to replace it")
    if command.output.exists():
        others = {path.name for path in command.output.iterdir()} - {name, "README.md"}
        if others or not (command.output / name / "1" / "model.json").is_file():
            found = f"{min(others)!r}" if others else f"no model {name!r}"
            raise BuildError(
                f"{command.output}: exists and has {found}; --overwrite replaces a repository of this model alone. "
                f"Export to a new folder, and move {name} into the repository"
            )
    with written_beside(command.output, overwrite=command.overwrite) as folder:
        version = folder / name / "1"
        shutil.copytree(command.bundle, version / "bundle", ignore=shutil.ignore_patterns(".*"))
        for path, text in (
            (version / "model.py", _MODEL),
            (version / "model.json", json.dumps({"bundle": "bundle"}, indent=2) + "\n"),
            (folder / name / "config.pbtxt", (_ASSETS / "triton.pbtxt").read_text(encoding="utf-8").format(name=name)),
            (folder / "README.md", (_ASSETS / "triton.md").read_text(encoding="utf-8").format(name=name)),
        ):
            path.write_text(text, encoding="utf-8")
    print(f"{command.output}: {name}, a model of {counted(max(manifest.batch_sizes), 'slot')}")
    return 0
