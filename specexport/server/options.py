"""Options of the server, by itself and on Ray. Imports no web framework, so that ``--help`` needs none."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from specexport.contract.options import option
from specexport.options import ServiceOptions

_api, _limit, _ray = (partial(option, group=group) for group in ("the API", "limits", "on Ray"))


class ServerOptions(ServiceOptions, frozen=True, kw_only=True):
    """What is served, to whom, and within which limits.

    Attributes:
        served_model_name: the model's names in the API (default: as given).
        api_key: key that clients must send (default: $SPECEXPORT_API_KEY, else none).
        cors: origin of web pages that may call the server, * for any (default: none).
        page: serve the page at /.
        timeout: seconds a request may take; 0 for no limit.
        shutdown_timeout: seconds that streams get to finish when the server stops.
        max_body_bytes: largest request body in bytes.
        replicas: with --ray: engines, each with a copy of the model.
        max_replicas: with --ray: most replicas while requests wait; idle ones are removed again (default: --replicas).
    """

    served_model_name: Annotated[tuple[str, ...], option("NAME", group="the model")] = ()
    api_key: Annotated[tuple[str, ...], _api("KEY", repeat=True)] = ()
    cors: Annotated[tuple[str, ...], _api("ORIGIN", repeat=True)] = ()
    page: Annotated[bool, _api(off="do not serve the page at /")] = True
    timeout: Annotated[float, _limit("S", ge=0)] = 600.0
    shutdown_timeout: Annotated[float, _limit("S", ge=0)] = 30.0
    max_body_bytes: Annotated[int, _limit("N", ge=1)] = 8 << 20
    replicas: Annotated[int, _ray("N", ge=1)] = 1
    max_replicas: Annotated[int | None, _ray("N", ge=1)] = None


class ListenOptions(ServerOptions, frozen=True, kw_only=True):
    """The same with where ``specexport serve`` listens.

    Attributes:
        host: address to listen on; 0.0.0.0 for all.
        port: port to listen on; 0 for any free one.
        log_level: lowest level that is logged.
        ray: serve on Ray: $RAY_ADDRESS, 'ray start', or one of its own.
    """

    host: Annotated[str, _api()] = "127.0.0.1"
    port: Annotated[int, _api(ge=0, le=65535)] = 8000
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _api()] = "info"
    ray: Annotated[bool, _ray()] = False
