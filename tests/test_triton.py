"""``specexport export triton``: its configuration by Triton's own schema, the model in a stand-in for Triton's process,
and, where ``SPECEXPORT_TRITON`` names a folder with Triton's server (``make triton``), that server.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import pytest

from specexport.cli import main
from specexport.runtime import Engine, SamplingParams
from tests.fixtures import Bundles
from tests.serving import free_port, wait_for_server
from tests.threads import JOIN, wait_until

PROMPT = "one two three"
TRITON = os.environ.get("SPECEXPORT_TRITON")


@pytest.fixture(scope="module")
def repository(bundle: Bundles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("triton") / "repository"
    assert main(["export", "triton", str(bundle("llama-near-batch")), "-o", str(folder), "--name", "tiny"]) == 0
    settings = folder / "tiny" / "1" / "model.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "threads": 1, "calibrate": False}))
    return folder


@pytest.fixture(scope="module")
def expected_answers(bundle: Bundles) -> dict[str, Any]:
    with Engine.load(bundle("llama-near-batch"), threads=1) as engine:
        completion = engine.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
        return {"text": completion.text, "prompt_tokens": completion.stats.prompt_tokens}


def test_repositories_are_written_atomically(bundle, repository, tmp_path, cli):
    export = ["export", "triton", str(bundle("llama-near-batch")), "-o"]
    before = sorted(path.relative_to(repository) for path in repository.rglob("*"))
    printed = cli(*export, repository, "--name", "tiny", status=1)
    assert "exists already; choose another folder or pass --overwrite" in printed.err
    assert "the model's name is 'a b'" in cli(*export, tmp_path / "new", "--name", "a b", status=1).err
    assert "no such folder" in cli("export", "triton", tmp_path / "none", "-o", tmp_path / "new", status=1).err
    assert list(tmp_path.iterdir()) == []
    copy = shutil.copytree(repository, tmp_path / "copy")
    (copy / "tiny" / "old").touch()
    (copy / "another").mkdir()
    for wrong, name, reason in ((copy, "tiny", "has 'another'"), (tmp_path, "copy", "has no model 'copy'")):
        printed = cli(*export, wrong, "--name", name, "--overwrite", status=1)
        assert f"{reason}; --overwrite replaces a repository of this model alone" in printed.err
    (copy / "another").rmdir()
    cli(*export, copy, "--name", "tiny", "--overwrite")
    assert sorted(path.relative_to(copy) for path in copy.rglob("*")) == before


def test_the_configuration_is_one_by_tritons_schema(repository):
    pytest.importorskip("tritonclient", reason="its protobuf is not [dev]'s: make triton")
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2 as schema

    text = (repository / "tiny" / "config.pbtxt").read_text(encoding="utf-8")
    config = text_format.Parse(text, schema.ModelConfig())
    assert (config.name, config.backend, config.max_batch_size) == ("tiny", "python", 0)
    assert config.model_transaction_policy.decoupled
    inputs = {tensor.name: (tensor.data_type, list(tensor.dims), tensor.optional) for tensor in config.input}
    assert inputs["text_input"] == (schema.TYPE_STRING, [1], False)
    assert inputs["stream"] == (schema.TYPE_BOOL, [1], True)
    assert inputs["sampling_parameters"] == (schema.TYPE_STRING, [1], True)
    assert inputs["exclude_input_in_output"] == (schema.TYPE_BOOL, [1], True)
    assert {tensor.name: (tensor.data_type, list(tensor.dims)) for tensor in config.output} == {
        "text_output": (schema.TYPE_STRING, [-1]),
        "finish_reason": (schema.TYPE_STRING, [-1]),
        "num_input_tokens": (schema.TYPE_UINT32, [-1]),
        "num_output_tokens": (schema.TYPE_UINT32, [-1]),
    }


# --- in a stand-in for Triton's process -------------------------------------------------------------------------------


class Tensor:
    def __init__(self, name: str, values: Any) -> None:
        self._name, self._values = name, values

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._values


class TritonError(Exception):
    INTERNAL, INVALID_ARG, NOT_FOUND, UNAVAILABLE, CANCELLED = range(5)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self.message, self.code = message, code


class Response:
    def __init__(self, output_tensors: Any = (), error: TritonError | None = None) -> None:
        self.outputs = {tensor.name(): tensor.as_numpy().tolist() for tensor in output_tensors}
        self.error = error


class Request:
    """An inference request, and the sender of its responses."""

    def __init__(self, text: str = PROMPT, parameters: Any = None, **inputs: Any) -> None:
        self.inputs = {"text_input": np.array([text.encode()], object)}
        for name, value in inputs.items():
            self.inputs[name] = np.array([value], object if isinstance(value, bytes) else bool)
        self._parameters = json.dumps(parameters or {})
        self.sent: queue.Queue[Response | None] = queue.Queue()
        self.cancelled = False

    def parameters(self) -> str:
        return self._parameters

    def get_response_sender(self) -> Request:
        return self

    def is_cancelled(self) -> bool:
        return self.cancelled

    def send(self, response: Response | None = None, flags: int = 0) -> None:
        if response is not None:
            self.sent.put(response)
        if flags:
            self.sent.put(None)

    def responses(self) -> list[Response]:
        return list(iter(lambda: self.sent.get(timeout=JOIN), None))

    def texts(self) -> list[str]:
        responses = self.responses()
        assert all(response.error is None for response in responses), responses[-1].error
        return [response.outputs["text_output"][0].decode() for response in responses]


def loaded(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model, initialized as Triton does it."""
    module = ModuleType("triton_python_backend_utils")
    vars(module).update(
        Tensor=Tensor,
        TritonError=TritonError,
        InferenceResponse=Response,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
        get_input_tensor_by_name=lambda request, name: (
            Tensor(name, request.inputs[name]) if name in request.inputs else None
        ),
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "specexport.server.triton", raising=False)
    spec = importlib.util.spec_from_file_location("model", repository / "tiny" / "1" / "model.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    model = script.TritonPythonModel()
    model.initialize({"model_repository": str(repository / "tiny"), "model_version": "1", "model_name": "tiny"})
    return model


@pytest.fixture(scope="module")
def model(repository: Path) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        result = loaded(repository, patch)
        yield result
        result.finalize()


PARAMETERS = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
SAMPLING = json.dumps(PARAMETERS).encode()


def test_a_request_is_answered_whole_or_in_parts(model, expected_answers):
    wanted = dict.fromkeys(["return_finish_reason", "return_num_input_tokens", "return_num_output_tokens"], True)
    whole = Request(sampling_parameters=SAMPLING, **wanted)
    alone = Request(parameters={name: str(value).lower() for name, value in PARAMETERS.items()})
    alone.inputs["exclude_input_in_output"] = np.array([True])
    parts = [Request(sampling_parameters=SAMPLING, stream=True, **wanted) for _ in range(12)]
    model.execute([whole, alone, *parts[:6]])
    model.execute(parts[6:])
    (answer,) = whole.responses()
    assert answer.outputs == {
        "text_output": [(PROMPT + expected_answers["text"]).encode()],
        "finish_reason": [b"length"],
        "num_input_tokens": [expected_answers["prompt_tokens"]],
        "num_output_tokens": [24],
    }
    assert alone.texts() == [expected_answers["text"]]
    for request in parts:
        responses = [response.outputs for response in request.responses()]
        assert len(responses) > 2
        assert b"".join(outputs["text_output"][0] for outputs in responses).decode() == expected_answers["text"]
        assert sum(outputs["num_output_tokens"][0] for outputs in responses) == 24
        assert [outputs["finish_reason"][0] for outputs in responses[-2:]] == [b"", b"length"]


def test_special_tokens_of_the_prompt_can_be_left_out(model, spy):
    added = spy(model._engine.frontend, "encode", lambda text, add_special_tokens: add_special_tokens)
    for parameters in ({}, {"add_special_tokens": False}):
        request = Request(parameters={**PARAMETERS, **parameters})
        model.execute([request])
        request.texts()
    assert added == [True, False]


def test_several_outputs_are_elements_of_a_tensor(model):
    request = json.dumps(
        {"n": 3, "seed": 1, "temperature": 1, "max_tokens": 8, "speculative": {"num_speculative_tokens": 0}}
    ).encode()
    whole = Request(sampling_parameters=request, exclude_input_in_output=True)
    parts = Request(sampling_parameters=request, stream=True)
    model.execute([whole, parts])
    (answer,) = whole.responses()
    assert len(set(answer.outputs["text_output"])) == 3
    texts = (response.outputs["text_output"] for response in parts.responses())
    joined = [b"".join(of_one) for of_one in zip(*texts, strict=True)]
    assert joined == answer.outputs["text_output"]


@pytest.mark.parametrize(
    ("request_", "code", "message"),
    [
        (Request(parameters={"nothing": 1}), "INVALID_ARG", "sampling_parameters: nothing is not known; there are"),
        (Request(parameters={"temperature": -1}), "INVALID_ARG", "temperature is -1; expected at least 0"),
        (Request(text_input=b"\xff"), "INVALID_ARG", "text_input is not UTF-8"),
        (Request(parameters={"echo": True}), "INVALID_ARG", "echo is not known"),
        (Request(sampling_parameters=b"{"), "INVALID_ARG", "expected a JSON object"),
        (Request(sampling_parameters=b"[1]"), "INVALID_ARG", "is not a JSON object"),
        (Request(stream=True, exclude_input_in_output=False), "INVALID_ARG", "exclude_input_in_output is false"),
        (Request("a " * 5000), "INVALID_ARG", "tokens"),
        (Request(parameters={"timeout": 1e-4, "max_tokens": 400}), "CANCELLED", "did not finish within"),
    ],
)
def test_errors_say_what_is_wrong(model, request_, code, message):
    model.execute([request_])
    (answer,) = request_.responses()
    assert answer.error.code == getattr(TritonError, code)
    assert message in answer.error.message


def test_disconnected_clients_requests_end(model):
    request = Request(parameters={**PARAMETERS, "max_tokens": 400}, stream=True)
    model.execute([request])
    request.sent.get(timeout=JOIN)
    request.cancelled = True
    assert len(request.responses()) < 60
    wait_until(lambda: not model._engine.running, "the slot is not freed")


def test_unloading_lets_requests_finish(repository, expected_answers, monkeypatch):
    model = loaded(repository, monkeypatch)
    requests = [Request(sampling_parameters=SAMPLING, stream=True) for _ in range(4)]
    model.execute(requests)
    first = [request.sent.get(timeout=JOIN) for request in requests]
    model.finalize()
    for response, request in zip(first, requests, strict=True):
        assert response.outputs["text_output"][0].decode() + "".join(request.texts()) == expected_answers["text"]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"bundle": 1}'])
def test_settings_that_cannot_be_read_are_named(repository, tmp_path, text):
    with pytest.MonkeyPatch.context() as patch:
        copy = shutil.copytree(repository, tmp_path / "copy")
        (copy / "tiny" / "1" / "model.json").write_text(text)
        with pytest.raises(Exception, match=r"model\.json: .*; expected a JSON object"):
            loaded(copy, patch)


# --- in Triton --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def triton(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """Triton's server, as nvidia-pytriton's wheel has it: its ports for HTTP and gRPC."""
    assert TRITON is not None
    root = Path(TRITON).absolute()
    server = root / "pytriton" / "tritonserver"
    backends = shutil.copytree(server / "backends", tmp_path_factory.mktemp("triton") / "backends")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copy2(server / "python_backend_stubs" / version / "triton_python_backend_stub", backends / "python")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": f"{sysconfig.get_config_var('LIBDIR')}:{root / 'nvidia_pytriton.libs'}",
    }
    binary = server / "bin" / "tritonserver"
    binary.chmod(0o755)
    for stub in backends.rglob("*stub"):
        stub.chmod(0o755)
    http, grpc = free_port(), free_port()
    words = [str(binary), "--model-repository", str(repository), "--backend-directory", str(backends)]
    words += ["--http-port", str(http), "--grpc-port", str(grpc), "--allow-metrics", "false"]
    # Its Python is isolated, but for the working folder, where NumPy 1 lies.
    with subprocess.Popen(words, env=environment, cwd=root) as process:
        try:
            wait_for_server(process, f"http://localhost:{http}/v2/models/tiny/ready")
            yield http, grpc
            process.terminate()
            assert process.wait(JOIN) == 0
        finally:
            process.kill()


@pytest.mark.skipif(TRITON is None, reason="SPECEXPORT_TRITON names no folder with Triton's server")
def test_tritons_server_answers(triton, repository, expected_answers):
    url = f"http://localhost:{triton[0]}/v2/models/tiny"
    whole = httpx.post(f"{url}/generate", json={"text_input": PROMPT, "parameters": PARAMETERS}, timeout=JOIN)
    assert whole.json()["text_output"] == PROMPT + expected_answers["text"]
    body = {"text_input": PROMPT, "stream": True, "return_finish_reason": True, **PARAMETERS}
    events = httpx.post(f"{url}/generate_stream", json=body, timeout=JOIN).text
    parts = [json.loads(line.removeprefix("data: ")) for line in events.splitlines() if line]
    assert "".join(part["text_output"] for part in parts) == expected_answers["text"]
    assert (len(parts) > 2, parts[-1]["finish_reason"]) == (True, "length")
    wrong = httpx.post(f"{url}/generate", json={"text_input": PROMPT, "top_p": 2}, timeout=JOIN)
    assert "expected at most 1" in wrong.json()["error"]

    code = re.findall(r"```python\n(.*?)```", (repository / "README.md").read_text(encoding="utf-8"), re.DOTALL)[0]
    code = code.replace("localhost:8001", f"localhost:{triton[1]}").replace('"one two"', repr(PROMPT))
    code = code.replace('"max_tokens": 20', '"max_tokens": 24, "ignore_eos": True')
    client = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=JOIN)
    assert client.stdout.decode() == expected_answers["text"]
