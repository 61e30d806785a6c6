"""Write a bundle for another server: a model repository of Triton.

Example:
    specexport export triton qwen3/ -o models/
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Annotated, Literal

from specexport.contract.errors import BuildError
from specexport.contract.folders import written_beside
from specexport.contract.options import Options, option
from specexport.contract.reading import read_manifest

_INPUTS = {
    "text_input": "STRING",
    "stream": "BOOL",
    "sampling_parameters": "STRING",
    "exclude_input_in_output": "BOOL",
    "return_finish_reason": "BOOL",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
}
_OUTPUTS = {
    "text_output": "STRING",
    "finish_reason": "STRING",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
}
_MODEL = '''"""Triton's Python backend looks for the model here; specexport has to be installed in its Python."""

from specexport.server.triton import TritonPythonModel as TritonPythonModel
'''
_README = """# {name}

A model repository of Triton Inference Server, written by `specexport export triton`. It runs in Triton's Python
backend, whose Python needs specexport: in a container, `pip install 'specexport[cpu,serve]'` (`gpu` on a GPU).

```
tritonserver --model-repository REPOSITORY
```

`{name}/1/model.json` holds the bundle's folder and options of `specexport.AsyncEngine.open`, such as `threads`,
`max_queue`, `max_model_len` and `speculative_config`, and `timeout`, the seconds a request may take. Requests are
batched by specexport, so `max_batch_size` stays 0 and one instance is enough.

Inputs, outputs and sampling parameters are named as those of Triton's vLLM backend:

```
curl localhost:8000/v2/models/{name}/generate -d '{{"text_input": "one two", "parameters": {{"max_tokens": 20}}}}'
curl localhost:8000/v2/models/{name}/generate_stream -d '{{"text_input": "one two", "stream": true}}'
```

```python
# pip install 'tritonclient[grpc]'
import json
import queue

import numpy as np
import tritonclient.grpc as grpc


def tensor(name, value, kind):
    tensor = grpc.InferInput(name, [1], kind)
    tensor.set_data_from_numpy(np.array([value], object if kind == "BYTES" else bool))
    return tensor


answers = queue.Queue()
with grpc.InferenceServerClient("localhost:8001") as client:
    client.start_stream(lambda result, error: answers.put((result, error)))
    inputs = [
        tensor("text_input", "one two", "BYTES"),
        tensor("stream", True, "BOOL"),
        tensor("sampling_parameters", json.dumps({{"max_tokens": 20, "temperature": 0}}), "BYTES"),
    ]
    client.async_stream_infer("{name}", inputs, enable_empty_final_response=True)
    while True:
        result, error = answers.get()
        if error is not None:
            raise error
        if result.get_response().parameters["triton_final_response"].bool_param:
            break
        print(result.as_numpy("text_output")[0].decode(), end="", flush=True)
```
"""


class Command(Options, frozen=True, kw_only=True):
    """Options of ``specexport export``.

    Attributes:
        form: triton: a model repository for its Python backend.
        bundle: a bundle of specexport build; it is copied.
        output: folder to write.
        name: the model's name in Triton (default: the name of BUNDLE).
        overwrite: replace an existing repository.
    """

    form: Annotated[Literal["triton"], option(positional=True)]
    bundle: Annotated[Path, option("BUNDLE", positional=True)]
    output: Annotated[Path, option("REPOSITORY", short="-o")]
    name: Annotated[str | None, option("NAME")] = None
    overwrite: bool = False


def main(command: Command) -> int:
    """Runs ``specexport export``."""
    manifest = read_manifest(command.bundle)
    name = command.name or command.bundle.resolve().name
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", name):
        raise BuildError(f"the model's name is {name!r}; expected letters, digits, '_', '.' and '-': give it as --name")
    if command.output.exists() and not command.overwrite:
        raise BuildError(f"{command.output}: exists already; choose another folder or pass --overwrite to replace it")
    with written_beside(command.output, overwrite=command.overwrite) as folder:
        version = folder / name / "1"
        shutil.copytree(command.bundle, version / "bundle", ignore=shutil.ignore_patterns(".*"))
        for path, text in (
            (version / "model.py", _MODEL),
            (version / "model.json", json.dumps({"bundle": "bundle"}, indent=2) + "\n"),
            (folder / name / "config.pbtxt", _config(name)),
            (folder / "README.md", _README.format(name=name)),
        ):
            path.write_text(text, encoding="utf-8")
    print(f"{command.output}: {name}, a model of {max(manifest.batch_sizes)} slots")
    return 0


def _config(name: str) -> str:
    """The model's configuration, a ``ModelConfig`` of Triton's ``model_config.proto`` as protobuf text."""
    inputs = [
        f'input {{ name: "{tensor}" data_type: TYPE_{kind} dims: 1 optional: {str(tensor != "text_input").lower()} }}'
        for tensor, kind in _INPUTS.items()
    ]
    outputs = [f'output {{ name: "{tensor}" data_type: TYPE_{kind} dims: -1 }}' for tensor, kind in _OUTPUTS.items()]
    lines = [
        f'name: "{name}"',
        'backend: "python"',
        "max_batch_size: 0",
        "model_transaction_policy { decoupled: true }",
        *inputs,
        *outputs,
        "instance_group { count: 1 kind: KIND_CPU }  # the bundle says what it runs on",
    ]
    return "\n".join([*lines, ""])
