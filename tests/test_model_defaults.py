"""What a model says of its texts, over HTTP and on the command line: a request's own values come before it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from specexport.llm import LLM
from specexport.runtime import SamplingParams
from tests.fixtures import Bundles
from tests.manifests import rewritten
from tests.serving import NAME, Served, served, with_chat_template

PROMPT = "one two three"
CHAT: Any = [{"role": "user", "content": "one two"}]
PAD, PAD_TEXT = 2, "<pad>"
DEFAULTS = {"repetition_penalty": 1.3, "max_tokens": 9, "min_tokens": 3, "stop": ["nowhere"]}
RULES = {"no_repeat_ngram_size": 3}


@pytest.fixture(scope="module")
def folder(bundle: Bundles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = with_chat_template(bundle("llama-near"), tmp_path_factory.mktemp("defaults") / "bundle")
    rewritten(result, lambda document: document["generation"].update(DEFAULTS, rules=RULES))
    return result


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Iterator[Served]:
    with served(folder) as running:
        yield running


@pytest.fixture(scope="module")
def client(tiny: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="EMPTY", max_retries=0)


@pytest.fixture(scope="module")
def says(tiny: Served) -> Callable[..., str]:
    """Gives what the engine says with parameters of its own."""
    engine = tiny.service.engine.frontend.engine
    rules = engine.params().rules
    return lambda **params: engine.generate(PROMPT, SamplingParams(temperature=0.0, rules=rules, **params)).text


def test_requests_take_the_models_values_unless_they_have_their_own(client, says):
    def said(**arguments: Any) -> str:
        return client.completions.create(model=NAME, prompt=PROMPT, **arguments).choices[0].text

    undone = said(extra_body={"repetition_penalty": 1.0}, max_tokens=30)
    assert said() == says(repetition_penalty=1.3, max_tokens=9, min_tokens=3)
    assert said(max_tokens=30) == says(repetition_penalty=1.3, max_tokens=30, min_tokens=3)
    assert undone == says(max_tokens=30, min_tokens=3)
    assert undone != said(max_tokens=30)
    stop = undone[6:9]
    stopped = said(extra_body={"repetition_penalty": 1.0, "min_tokens": 0}, max_tokens=30, stop=stop)
    assert stopped == undone[: undone.index(stop)]
    # The model's least length does not make a shorter request an error.
    assert said(max_tokens=1) == says(repetition_penalty=1.3, max_tokens=1)


def test_lengths_over_http(tiny, client):
    ignore: Any = {"ignore_eos": True}
    chat = client.chat.completions.create
    assert chat(model=NAME, messages=CHAT, extra_body=ignore).usage.completion_tokens == 9
    for name in ("max_tokens", "max_completion_tokens"):
        response = chat(model=NAME, messages=CHAT, extra_body=ignore, **{name: 12})
        assert response.usage.completion_tokens == 12
    body = {"prompt": PROMPT, "max_tokens": None, "ignore_eos": True, "add_special_tokens": False}
    whole = httpx.post(f"{tiny.url}/v1/completions", json=body, timeout=120).json()["usage"]
    assert whole["total_tokens"] == tiny.service.engine.frontend.engine.max_model_len
    answer = httpx.post(f"{tiny.url}/v1/responses", json={"input": "one", **ignore}, timeout=120).json()
    assert answer["usage"]["output_tokens"] == 9


def test_the_command_line_and_llm_take_the_models_values(folder, says, cli):
    model = ["run", str(folder), "--prompt", PROMPT, "--no-calibrate", "--json"]
    output = cli(*model).json
    assert output["text"] == says(repetition_penalty=1.3, max_tokens=9, min_tokens=3)
    assert output["params"]["rules"]["no_repeat_ngram_size"] == 3
    assert len(cli(*model, "-n", "1").json["token_ids"]) == 1
    with LLM(bundle=folder, threads=1, calibrate=False) as llm:
        assert llm.get_default_sampling_params().repetition_penalty == 1.3
        assert llm.generate(PROMPT, use_tqdm=False)[0].outputs[0].text == output["text"]
    shown = cli("inspect", folder).out
    assert "repetition_penalty 1.3" in shown and "no_repeat_ngram_size 3" in shown


# --- stop texts that hold special tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("skip", [True, False])
def test_a_special_token_stops_over_http(client, stream, skip):
    more = {"skip_special_tokens": skip, "repetition_penalty": 1.0, "min_tokens": 0}
    arguments: Any = {"model": NAME, "max_tokens": 8, "temperature": 0.0, "stream": stream, "extra_body": more}
    for stop, bias in ((PAD_TEXT, PAD), ("</s>", 1)):
        fields = arguments | {"stop": [stop], "logit_bias": {str(bias): 100}}
        response = client.completions.create(prompt=PROMPT, **fields)
        choices = [choice for part in (response if stream else [response]) for choice in part.choices]
        assert ("".join(choice.text for choice in choices), choices[-1].finish_reason) == ("", "stop")
        if not stream:
            assert response.usage.completion_tokens == 1
        output = client.chat.completions.create(messages=CHAT, **fields)
        if stream:
            pieces = [choice for part in output for choice in part.choices]
            text, reason = "".join(choice.delta.content or "" for choice in pieces), pieces[-1].finish_reason
        else:
            text, reason = output.choices[0].message.content or "", output.choices[0].finish_reason
        assert (text, reason) == ("", "stop")


def test_a_special_token_stops_a_run(bundle, tmp_path, cli):
    folder = with_chat_template(bundle("llama-near"), tmp_path / "bundle")
    biased = {"sequence_bias": [[[PAD], 100.0]]}
    rewritten(folder, lambda document: document["generation"].update(rules=biased))
    for stop in (PAD_TEXT, "x"):
        output = cli("run", folder, "-p", PROMPT, "-n", "8", "--no-calibrate", "--json", "--stop", stop).json
        assert (output["text"], output["token_ids"]) == ("", [PAD] * (1 if stop == PAD_TEXT else 8))


# --- log-probabilities ------------------------------------------------------------------------------------------------


def test_offsets_over_http(client):
    prompt = "one 🙂 two"
    response = client.completions.create(
        model=NAME, prompt=prompt, max_tokens=24, temperature=1.0, seed=1, logprobs=1, echo=True
    ).choices[0]
    assert response.text.startswith(prompt)
    pairs = list(zip(response.logprobs.tokens or [], response.logprobs.text_offset or [], strict=True))
    assert all(response.text[at:].startswith(token) for token, at in pairs if not token.startswith("</s>"))
    assert len([token for token, _ in pairs if "🙂" in token]) == 1
