"""Runs OpenAI's current clients against a server over a bundle, for the table in docs/serving.md.

The clients are installed into an environment of their own (``build/clients``), as their dependencies conflict. The
results go to benchmarks/results/clients.json; ``--record FILE`` stores the request bodies, which tests/test_clients.py
replays.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_name("results") / "clients.json"
PACKAGES = {
    "openai": "openai",
    "litellm": "litellm",
    "langchain": "langchain-openai",
    "instructor": "instructor",
    "lm_eval": "lm-eval[api]",
    "guidellm": "guidellm",
}
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
"""Keeps a small model with random weights from writing spaces forever."""
PET = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "old": {"type": "boolean"}},
    "required": ["kind", "old"],
    "additionalProperties": False,
    **COMPACT,
}
TOOL: Any = {"type": "function", "function": {"name": "keep", "description": "Keeps a pet.", "parameters": PET}}
CHOICE: Any = {"type": "function", "function": {"name": "keep"}}
CHAT: Any = [{"role": "user", "content": "one two"}]
Check = Callable[[str, str, str], None]


def check_pet(text: str) -> None:
    """Checks that a text is a pet in JSON."""
    assert set(json.loads(text)) == {"kind", "old"}, text


# --- the clients' checks: functions of the URL, the model and the folder of a tokenizer -------------------------------


def _client(url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=url, api_key="x")


def _openai_completions(url: str, model: str, _: str) -> None:
    client = _client(url)
    completion = client.completions.create(model=model, prompt="one two", n=2, logprobs=2, logit_bias={"5": 3}, seed=1)
    assert len(completion.choices) == 2
    parts = client.completions.create(model=model, prompt="one", stream=True, stream_options={"include_usage": True})
    assert list(parts)[-1].usage is not None


def _openai_chat(url: str, model: str, _: str) -> None:
    client = _client(url)
    completion = client.chat.completions.create(
        model=model,
        messages=CHAT,
        max_completion_tokens=8,
        logprobs=True,
        top_logprobs=2,
        frequency_penalty=0.5,
        presence_penalty=0.5,
        metadata={"who": "me"},
        service_tier="auto",
        modalities=["text"],
        reasoning_effort="low",
        prediction={"type": "content", "content": "three"},
    )
    assert completion.choices[0].logprobs is not None
    assert completion._request_id
    parts = list(client.chat.completions.create(model=model, messages=CHAT, max_tokens=8, stream=True))
    assert parts[-1].choices[0].finish_reason


def _openai_schema(url: str, model: str, _: str) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "pet", "schema": PET, "strict": True}}
    completion = _client(url).chat.completions.create(model=model, messages=CHAT, response_format=form)
    check_pet(completion.choices[0].message.content or "")


def _openai_tools(url: str, model: str, _: str) -> None:
    client = _client(url)
    completion = client.chat.completions.create(
        model=model, messages=CHAT, tools=[TOOL], tool_choice="required"
    ).choices[0]
    assert completion.finish_reason == "tool_calls"
    assert completion.message.tool_calls
    call: Any = completion.message.tool_calls[0]
    check_pet(call.function.arguments)
    answer: Any = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    again: Any = [*CHAT, completion.message, answer]
    client.chat.completions.create(model=model, messages=again, tools=[TOOL], max_tokens=4)
    with client.chat.completions.stream(model=model, messages=CHAT, tools=[TOOL], tool_choice=CHOICE) as stream:
        final: Any = stream.get_final_completion()
    check_pet(final.choices[0].message.tool_calls[0].function.arguments)


def _openai_responses(url: str, model: str, _: str) -> None:
    client = _client(url)
    response = client.responses.create(model=model, input="one two", instructions="be brief", max_output_tokens=8)
    assert response.output_text
    assert response.usage is not None
    form: Any = {"format": {"type": "json_schema", "name": "pet", "schema": PET}}
    with client.responses.stream(model=model, input=CHAT, extra_body={"text": form}) as stream:
        check_pet(stream.get_final_response().output_text)
    check_pet(client.responses.create(model=model, input="one", text=form).output_text)
    tools: Any = [{"type": "function", "strict": True, **TOOL["function"]}]
    called: Any = client.responses.create(model=model, input=CHAT, tools=tools, tool_choice="required")
    check_pet(called.output[0].arguments)
    answer = {"type": "function_call_output", "call_id": called.output[0].call_id, "output": "done"}
    client.responses.create(model=model, input=[*CHAT, *called.output, answer], tools=tools, max_output_tokens=4)


def _litellm_chat(url: str, model: str, _: str) -> None:
    import litellm

    arguments: Any = {"model": f"openai/{model}", "api_base": url, "api_key": "x", "messages": CHAT}
    assert litellm.completion(**arguments, max_tokens=8).choices[0].message.content
    parts = list(litellm.completion(**arguments, max_tokens=8, stream=True, stream_options={"include_usage": True}))
    assert parts
    called: Any = litellm.completion(**arguments, tools=[TOOL], tool_choice="required")
    check_pet(called.choices[0].message.tool_calls[0].function.arguments)


def _litellm_history(url: str, model: str, _: str) -> None:
    """Sends LiteLLM's messages back through itself, and as dictionaries, with their nulls, through OpenAI's client."""
    import litellm

    arguments: Any = {"model": f"openai/{model}", "api_base": url, "api_key": "x", "max_tokens": 60}
    tools: Any = {"tools": [TOOL]}
    said: Any = litellm.completion(**arguments, messages=CHAT).choices[0].message
    called: Any = litellm.completion(**arguments, **tools, tool_choice="required", messages=CHAT).choices[0].message
    done: Any = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "done"}
    assert litellm.completion(**arguments, **tools, messages=[*CHAT, said, *CHAT, called, done]).choices
    absent: Any = {"annotations": [], "audio": None, "refusal": None}
    history = [*CHAT, absent | said.model_dump(), *CHAT, absent | called.model_dump(), done]
    assert _client(url).chat.completions.create(model=model, messages=history, max_tokens=60, **tools).choices


def _litellm_text(url: str, model: str, _: str) -> None:
    import litellm

    arguments: Any = {"model": f"text-completion-openai/{model}", "api_base": url, "api_key": "x", "prompt": "one two"}
    assert litellm.text_completion(**arguments, max_tokens=8).choices[0].text


def _langchain_chat(url: str, model: str, _: str) -> None:
    from langchain_openai import ChatOpenAI

    chat: Any = ChatOpenAI(model=model, base_url=url, api_key="x", max_tokens=60)  # type: ignore[call-arg,arg-type]
    assert chat.invoke("one two").content
    assert list(chat.stream("one two"))
    called = chat.bind_tools([TOOL], tool_choice="required").invoke("one two")
    assert called.tool_calls[0]["name"] == "keep"
    schema = {"title": "pet", "description": "A pet.", **PET}
    for method in ("function_calling", "json_schema"):
        pet = chat.with_structured_output(schema, method=method).invoke("one")
        assert set(pet) == {"kind", "old"}, pet


def _langchain_text(url: str, model: str, _: str) -> None:
    from langchain_openai import OpenAI

    text: Any = OpenAI(model=model, base_url=url, api_key="x", max_tokens=8)  # type: ignore[call-arg,arg-type]
    assert text.invoke("one two")


def _instructor_models(url: str, model: str, _: str) -> None:
    import instructor
    from pydantic import BaseModel, ConfigDict

    class Pet(BaseModel):
        model_config = ConfigDict(json_schema_extra=COMPACT)
        kind: Literal["cat", "dog"]
        old: bool

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(_client(url), mode=mode)
        # Also against endless spaces, as some modes ignore the model's configuration.
        arguments: Any = {"model": model, "messages": CHAT, "max_retries": 0, "frequency_penalty": 2.0}
        pet: Any = client.chat.completions.create(response_model=Pet, **arguments)
        assert pet.kind in ("cat", "dog")


def _lm_eval_completions(url: str, model: str, tokenizer: str) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    lm: Any = LocalCompletionsAPI(
        base_url=f"{url}/completions", model=model, tokenizer=tokenizer, tokenizer_backend="huggingface", max_length=512
    )

    def instance(kind: Any, *arguments: Any) -> Any:
        return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)

    ((logprob, greedy),) = lm.loglikelihood([instance("loglikelihood", "one two", " three")], disable_tqdm=True)
    assert logprob < 0
    assert greedy in (True, False)
    until = {"until": ["four"], "max_gen_toks": 8}
    assert isinstance(lm.generate_until([instance("generate_until", "one two", until)], disable_tqdm=True)[0], str)


def _guidellm_benchmark(url: str, model: str, tokenizer: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        program = str(Path(sys.executable).with_name("guidellm"))
        options = {
            "backend": f"kind=openai_http,target={url.removesuffix('/v1')},model={model}",
            "tokenizer": f"kind=hf_auto,model={tokenizer}",
            "profile": "kind=synchronous",
            "constraint": "kind=max_requests,count=3",
            "data": "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
            "output": f"kind=json,path={place}/report.json",
        }
        command = [program, "run", *(word for name, value in options.items() for word in (f"--{name}", value))]
        process = subprocess.run(command, capture_output=True, text=True)
        assert process.returncode == 0, (process.stdout + process.stderr)[-3000:]
        report = json.loads(Path(place, "report.json").read_text())
        counted = report["benchmarks"][0]["metrics"]["request_totals"]
        assert (counted["successful"], counted["errored"]) == (3, 0), counted


CHECKS: dict[str, dict[str, Check]] = {
    "openai": {
        "completions, streamed, log-probabilities, bias": _openai_completions,
        "chats, streamed, log-probabilities, penalties, predictions": _openai_chat,
        "JSON schema": _openai_schema,
        "tools, streamed": _openai_tools,
        "responses, streamed, JSON schema, tools": _openai_responses,
    },
    "litellm": {
        "chats, streamed, tools": _litellm_chat,
        "its own messages sent back": _litellm_history,
        "completions": _litellm_text,
    },
    "langchain": {"chats, streamed, tools, structured output": _langchain_chat, "completions": _langchain_text},
    "instructor": {"tools, JSON schema": _instructor_models},
    "lm_eval": {"local-completions: loglikelihood, generate_until": _lm_eval_completions},
    "guidellm": {"run: a benchmark of three requests": _guidellm_benchmark},
}


# --- the server and the results --------------------------------------------------------------------------------------


class Recorder:
    """A wrapper around the server's application that records the bodies of requests."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.bodies: list[tuple[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        parts: list[bytes] = []

        async def kept() -> Any:
            message = await receive()
            if message["type"] == "http.request":
                parts.append(message.get("body", b""))
                if not message.get("more_body") and scope["method"] == "POST":
                    self.bodies.append((scope["path"], json.loads(b"".join(parts))))
            return message

        await self._app(scope, kept, send)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``python -m benchmarks clients``."""
    parser.add_argument("bundle", type=Path, nargs="?", help="bundle to serve")
    parser.add_argument("--record", type=Path, metavar="FILE", help="file for the bodies of requests")
    parser.add_argument("--only", nargs="+", default=[], choices=PACKAGES, help="clients to check (default: all)")
    parser.add_argument("--check", nargs=5, help=argparse.SUPPRESS)  # run in the clients' environment


def main(arguments: argparse.Namespace) -> int:
    """Runs all checks, or a single one in the clients' environment; returns the exit status."""
    if arguments.check:
        client, check, *location = arguments.check
        CHECKS[client][check](*location)
        print(version(_distribution(client)))
        return 0
    from tests.serving import HERMES, NAME, served, with_chat_template

    python = _install()
    recorders: list[Recorder] = []

    def around(app: Any) -> Recorder:
        recorders.append(Recorder(app))
        return recorders[0]

    sent: list[dict[str, Any]] = []
    results: dict[str, dict[str, Any]] = {}
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = with_chat_template(arguments.bundle, Path(folder, "bundle"), HERMES)
        (copy / "tokenizer" / "tokenizer_config.json").write_text(
            '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}'
        )
        with served(copy, around=around) as server:
            for client in arguments.only or PACKAGES:
                result = results[_distribution(client)] = {"version": "?", "checks": {}}
                for check in CHECKS[client]:
                    location = (f"{server.url}/v1", NAME, str(copy / "tokenizer"))
                    command = [python, "-m", "benchmarks", "clients", "--check", client, check, *location]
                    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
                    failed += process.returncode != 0
                    result["checks"][check] = "fails" if process.returncode else "works"
                    print(client, check, result["checks"][check], sep=", ", flush=True)
                    if process.returncode:
                        print(process.stderr[-3000:], file=sys.stderr)
                    else:
                        result["version"] = process.stdout.splitlines()[-1]
                    bodies, recorders[0].bodies = recorders[0].bodies, []
                    sent += [{"client": f"{client}: {check}", "path": path, "body": body} for path, body in bodies]
    if arguments.record is not None:
        arguments.record.write_text("\n".join(["[", ",\n".join(map(json.dumps, sent)), "]", ""]))
    if not arguments.only:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return failed


def _install() -> Path:
    """Installs the clients unless they are there; returns their environment's Python."""
    place = ROOT / "build" / "clients"
    python = place / "bin" / "python"
    if not python.exists():
        venv.create(place, with_pip=True)
        # litellm needs mcp for tools, but does not install it.
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES.values(), "mcp"], check=True)
    return python


def _distribution(client: str) -> str:
    return PACKAGES[client].partition("[")[0]
