"""A model for Triton's Python backend that serves a bundle, with the tensor names of Triton's vLLM backend.

Triton imports it through the ``model.py`` that ``specexport export triton`` writes. Our scheduler batches requests, so
Triton passes on each request as it arrives (decoupled, ``max_batch_size`` 0). Needs the ``[serve]`` extra.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]  # part of Triton
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from specexport.async_engine import AsyncEngine
from specexport.contract.errors import BundleError, RequestError
from specexport.server.errors import api_error
from specexport.server.requests import SAMPLING, CompletionRequest
from specexport.server.service import Service, merge

SETTINGS = "model.json"
"""File beside ``model.py`` with the bundle's path, ``timeout`` in seconds, and options of ``AsyncEngine.open``."""
_PARAMETERS = {
    *SAMPLING,
    *("max_tokens", "n", "seed", "stop", "stop_token_ids", "logit_bias", "structured_outputs", "speculative"),
    *("timeout", "add_special_tokens"),
}
_DRAIN_TIMEOUT = 30.0
"""Seconds that requests may take to finish when the model is unloaded."""
_CODES = {400: "INVALID_ARG", 404: "NOT_FOUND", 429: "UNAVAILABLE", 503: "UNAVAILABLE", 504: "CANCELLED"}


class TritonPythonModel:
    """Answers inference requests; Triton creates it and calls its methods.

    Tensors are one-dimensional. Inputs have one element: ``text_input`` BYTES, ``stream`` BOOL,
    ``sampling_parameters`` BYTES (a JSON object; without it the request's own parameters), ``exclude_input_in_output``,
    ``return_finish_reason``, ``return_num_input_tokens`` and ``return_num_output_tokens`` BOOL. Outputs have an element
    for each of the ``n`` texts: ``text_output`` and ``finish_reason`` BYTES (empty while a text goes on),
    ``num_output_tokens`` UINT32 (of this response); ``num_input_tokens`` UINT32 has one element.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        """Opens the bundle."""
        folder = Path(args["model_repository"]) / args["model_version"]
        try:
            settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
            bundle, timeout = folder / settings.pop("bundle"), settings.pop("timeout", None)
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise BundleError(
                f"{folder / SETTINGS}: {error}; expected a JSON object with the bundle's folder"
            ) from error
        self._engine = AsyncEngine.open(bundle=bundle, **settings)
        self._service = Service(self._engine, (args["model_name"],), timeout)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="specexport-triton")
        self._thread.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Starts requests; each sends its own responses."""
        for request in requests:
            asyncio.run_coroutine_threadsafe(self._answer(request, request.get_response_sender()), self._loop)

    def finalize(self) -> None:
        """Lets requests finish and frees the engine."""

        async def end() -> None:
            await self._engine.drain(_DRAIN_TIMEOUT)
            await self._engine.aclose()
            while len(asyncio.all_tasks()) > 1:  # answers in progress
                await asyncio.sleep(0.01)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _answer(self, request: Any, sender: Any) -> None:
        try:
            await self._generate(request, sender)
        except Exception as error:
            if isinstance(error, ValidationError):  # in FastAPI's form, whose locations begin with the body
                error = RequestValidationError([{**e, "loc": ("body", *e["loc"])} for e in error.errors()])
            answer = api_error(error)
            code = getattr(pb_utils.TritonError, _CODES.get(answer.status_code, "INTERNAL"))
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(answer.body.error.message, code)))
        finally:
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    async def _generate(self, request: Any, sender: Any) -> None:
        try:
            prompt = _input(request, "text_input").decode()
        except UnicodeDecodeError as error:
            raise RequestError(f"text_input is not UTF-8: {error}", param="text_input") from error
        streamed = bool(_input(request, "stream", False))
        echoed = not _input(request, "exclude_input_in_output", streamed)
        if echoed and streamed:
            raise RequestError(
                "exclude_input_in_output is false; parts of a stream are the output's alone",
                param="exclude_input_in_output",
            )
        body = CompletionRequest(prompt=prompt, stream=streamed, **_parameters(request))
        encode = self._service.frontend.tokens
        tokens = await asyncio.to_thread(encode, prompt, add_special_tokens=body.add_special_tokens)
        streams = await self._service.start([tokens], self._service.params(body, body.max_tokens, None), body)
        optional = [name for name in _OPTIONAL if _input(request, f"return_{name}", False)]
        parts = _Parts(body.n, len(tokens), prompt if echoed else "")
        async with contextlib.aclosing(merge(self._service, streams)) as chunks:
            async for index, chunk in chunks:
                if sender.is_cancelled():
                    return
                parts.texts[index] += chunk.text
                parts.reasons[index] = chunk.finish_reason or ""
                parts.counts[index] += len(chunk.token_ids)
                if streamed and (chunk.text or chunk.finish_reason):
                    sender.send(parts.response(optional))
                    parts = _Parts(body.n, len(tokens))
        if not streamed:
            sender.send(parts.response(optional))


_OPTIONAL = ("finish_reason", "num_input_tokens", "num_output_tokens")
"""Outputs that a request asks for by ``return_NAME``."""


class _Parts:
    """The content of a response."""

    def __init__(self, n: int, prompt_tokens: int, begin: str = "") -> None:
        self.texts, self.reasons, self.counts = [begin] * n, [""] * n, [0] * n
        self._prompt_tokens = prompt_tokens

    def response(self, optional: Sequence[str]) -> Any:
        values = {
            "text_output": np.array([text.encode() for text in self.texts], object),
            "finish_reason": np.array([reason.encode() for reason in self.reasons], object),
            "num_input_tokens": np.array([self._prompt_tokens], np.uint32),
            "num_output_tokens": np.array(self.counts, np.uint32),
        }
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, values[name]) for name in ("text_output", *optional)])


def _input(request: Any, name: str, default: Any = None) -> Any:
    """The only element of an input."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return default
    values = tensor.as_numpy().reshape(-1)
    if len(values) != 1:
        raise RequestError(f"{name} has {len(values)} elements; expected 1", param=name)
    return values[0]


def _parameters(request: Any) -> dict[str, Any]:
    """The sampling parameters of a request. Numbers may be texts, as in the vLLM backend."""
    raw = _input(request, "sampling_parameters", None)
    try:
        parameters = json.loads(request.parameters() if raw is None else raw) or {}
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"sampling_parameters: {error}; expected a JSON object", param="sampling_parameters"
        ) from error
    if not isinstance(parameters, dict):
        raise RequestError("sampling_parameters is not a JSON object", param="sampling_parameters")
    unknown = next((name for name in parameters if name not in _PARAMETERS), None)
    if unknown is not None:
        names = ", ".join(sorted(_PARAMETERS))
        raise RequestError(f"sampling_parameters: {unknown} is not known; there are {names}", param=unknown)
    return {name: value if name == "stop" else _plain(value) for name, value in parameters.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value
