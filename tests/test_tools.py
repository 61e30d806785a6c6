"""Tools by family, over HTTP with the official client; and added tokens in every kind of grammar."""

import json
import re
from collections.abc import Iterator
from typing import Any

import hypothesis
import openai
import pytest
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from specexport.contract.errors import RequestError
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.chat import ChatTemplate
from specexport.runtime.constraint import Grammars
from specexport.runtime.speculative import PLAIN
from specexport.server.answers import AssistantCall
from specexport.server.chat import with_calls
from specexport.server.request_parts import Function
from specexport.server.tool_arguments import Marks
from specexport.server.tool_notation import Notation
from specexport.server.tools import GEMMA as GEMMA_FORM
from specexport.server.tools import GLM as GLM_FORM
from specexport.server.tools import GLM_COMPACT as GLM_COMPACT_FORM
from specexport.server.tools import LFM2 as LFM2_FORM
from specexport.server.tools import LLAMA as LLAMA_FORM
from specexport.server.tools import QWEN_CODER as QWEN_CODER_FORM
from specexport.server.tools import Calling, CallReader, call_format, template_tools, whole_calls
from tests.fixtures import Bundles
from tests.serving import NAME, Served, served
from tests.test_constraint import accepts
from tests.threads import wait_until
from tests.tool_families import FAMILIES, GPT_OSS, HERMES, LFM2_EARLIER, QWEN3, Family, family_bundle

CHAT: Any = [{"role": "user", "content": "one two"}]
PET = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", 'a "b" }]']}, "words": {"enum": ["</tool_call>[ARGS]", "<|end|>é"]}},
    "required": ["kind", "words"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": PET, "strict": True}} for name in ("keep", "lo.s-e_2")
]


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture(scope="module")
def running(family: Family, bundle: Bundles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = family_bundle(family, bundle("llama-near"), tmp_path_factory.mktemp("family") / "bundle")
    with served(folder) as server:
        yield server


@pytest.fixture(scope="module")
def client(running: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="EMPTY", max_retries=0)


def streamed(client: openai.OpenAI, **request: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    """Text, thoughts, calls and the finish of a streamed answer."""
    text, thoughts, calls, finish = "", "", dict[int, list[str]](), ""
    for number, part in enumerate(client.chat.completions.create(**request, stream=True)):
        delta = part.choices[0].delta
        assert (delta.role == "assistant") == (number == 0)
        text += delta.content or ""
        thoughts += getattr(delta, "reasoning_content", None) or ""
        for piece in delta.tool_calls or []:
            name = piece.function.name or "" if piece.function else ""
            call = calls.setdefault(piece.index, [name, ""])
            call[1] += piece.function.arguments or "" if piece.function else ""
        finish = part.choices[0].finish_reason or finish
    return text, thoughts, [(name, arguments) for name, arguments in calls.values()], finish


def answered(client: openai.OpenAI, **arguments: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    """The same of a whole answer, which says the same as the streamed one."""
    (choice,) = client.chat.completions.create(**arguments).choices
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    thoughts = getattr(choice.message, "reasoning_content", None) or ""
    whole = (choice.message.content or "", thoughts, calls, choice.finish_reason)
    assert streamed(client, **arguments) == whole
    return whole


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "lo.s-e_2"}}])
def test_required_tool_calls_are_made(client, choice):
    for more in ({"temperature": 0}, {"temperature": 1, "seed": 5}):
        asked = {"model": NAME, "messages": CHAT, "tools": TOOLS, "tool_choice": choice, "max_tokens": 250, **more}
        text, thoughts, calls, finish = answered(client, **asked, parallel_tool_calls=False)
        assert (text, thoughts, finish) == ("", "", "tool_calls")
        ((name, arguments),) = calls
        assert name in (("keep", "lo.s-e_2") if choice == "required" else ("lo.s-e_2",))
        document = json.loads(arguments)
        assert document["kind"] in PET["properties"]["kind"]["enum"]
        assert document["words"] in PET["properties"]["words"]["enum"]


def test_a_model_calls_by_itself(family, running, client):
    arguments: dict[str, Any] = {"model": NAME, "messages": CHAT, "tools": TOOLS, "temperature": 0, "max_tokens": 250}
    if call_format(family.template) is None:
        with pytest.raises(openai.BadRequestError, match="names no way of calling tools"):
            client.chat.completions.create(**arguments)
        return
    vocabulary = running.service.engine.frontend.engine.tokenizer
    begins = "<|channel|>commentary to" if family is GPT_OSS else family.mark
    bias = {str(token): 60.0 for token in vocabulary.encode(begins, add_special_tokens=False).ids}
    text, _, calls, finish = answered(client, **arguments, logit_bias=bias, parallel_tool_calls=False)
    assert calls, text
    assert (text, finish) == ("", "tool_calls")
    assert calls[0][0] in ("keep", "lo.s-e_2")
    assert set(json.loads(calls[0][1])) == {"kind", "words"}
    # It need not, and its text leaves special tokens out.
    free = client.chat.completions.create(**arguments | {"max_tokens": 8})
    assert free.choices[0].message.tool_calls is None
    assert family.mark not in (free.choices[0].message.content or "")


def test_beside_calls_an_answer_may_be_json(family, running, client):
    document = {"a": f"{family.mark}é"}
    schema = {"type": "object", "properties": {"a": {"const": document["a"]}}, "required": ["a"]}
    schema |= {"additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
    shape: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body: Any = {"model": NAME, "messages": CHAT, "tools": TOOLS, "response_format": shape, "temperature": 0}
    client.chat.completions.create(**body, tool_choice="required", max_tokens=1)
    form = call_format(family.template)
    if form in (None, LLAMA_FORM):
        with pytest.raises(openai.BadRequestError, match=r"no way of calling tools|whose calls are JSON too"):
            client.chat.completions.create(**body)
        return
    assert form is not None
    engine, begin = running.service.engine.frontend.engine, ""
    if family is GPT_OSS:
        begin = "<|channel|>final<|message|>"
    else:
        bias = {engine.tokenizer.token_to_id("{"): 100.0}
        text, *_, calls, finish = answered(client, **body, logit_bias=bias, max_tokens=100)
        assert (json.loads(text), calls, finish) == (document, [], "stop")
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    tools = [Function.model_validate(tool["function"]) for tool in TOOLS]
    calling = Calling(form, tools, forced=False, parallel=True, schema=json.dumps(schema))
    for said, fits in ((begin + text, True), (f"{begin}well {text}", False)):
        assert accepts(engine, "grammar", calling.grammar(), said, skip_special_tokens=False) == fits
    for size in (1, 5):
        assert read_in_parts(calling, begin + text, size) == (text, [])


def test_a_call_goes_back_into_the_prompt(family, client):
    """With the id that we gave it, which Mistral's templates check."""
    arguments: dict[str, Any] = {"model": NAME, "tools": TOOLS, "tool_choice": "required", "temperature": 0}
    first = client.chat.completions.create(**arguments, messages=CHAT, max_tokens=250, parallel_tool_calls=False)
    message = first.choices[0].message
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "done"}
    chat = [*CHAT, message.model_dump(exclude_none=True), result]
    client.chat.completions.create(**arguments | {"tool_choice": "none"}, messages=chat, max_tokens=1)
    call = message.tool_calls[0].model_dump()
    counts = set()
    for empty in ({"arguments": "{}"}, {"arguments": ""}, {"arguments": "null"}, {}):
        call["function"] = {"name": "keep", **empty}
        chat[-2] = {"role": "assistant", "content": None, "tool_calls": [call]}
        answer = client.chat.completions.create(**arguments | {"tool_choice": "none"}, messages=chat, max_tokens=1)
        counts.add(answer.usage.prompt_tokens)
    assert len(counts) == 1
    chat[-2] = {"role": "assistant", "content": "keep"}
    without = client.chat.completions.create(**arguments | {"tool_choice": "none"}, messages=chat, max_tokens=1)
    assert family.mark is None or without.usage.prompt_tokens < min(counts)


def test_calls_that_a_template_leaves_out_are_part_of_the_text():
    """As LFM2's own template, of which tests.tool_families has the parts that matter, does before 2.5."""
    call = {"function": {"name": "keep", "arguments": {"kind": 'a "b"', "all": True, "list": [1, None]}}}
    for content, before in (("yes", "yes"), (None, ""), ([{"type": "text", "text": "yes"}], "yes\n")):
        message = {"role": "assistant", "content": content, "tool_calls": [call, {"function": {"name": "end"}}]}
        text = ChatTemplate(LFM2_EARLIER.template, {}).render(
            [with_calls(message, LFM2_EARLIER.template)], {"tools": TOOLS}, add_generation_prompt=False
        )
        calls = '[keep(kind="a \\"b\\"", all=True, list=[1, None]), end()]'
        assert text.endswith(f"assistant\n{before}<|tool_call_start|>{calls}<|tool_call_end|><|im_end|>\n")
        assert with_calls(message, QWEN3.template) is message


def read_in_parts(calling: Calling, text: str, size: int) -> tuple[str, list[AssistantCall]]:
    """What is read of an answer that comes in parts of a size: its text, and its calls."""
    reader, said, pieces = CallReader(calling), "", []
    for at in range(0, len(text), size):
        output, more = reader.push(text[at : at + size], at + size >= len(text))
        said += output
        pieces += more
    return said, whole_calls(pieces)


def one_by_one(values: dict[str, str], marks: Marks | Notation) -> str:
    if isinstance(marks, Notation):
        return marks.arguments(values)
    return "".join(f"{marks.begin.replace('KEY', key)}{value}{marks.after}" for key, value in values.items())


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("forced", [True, False])
def test_a_familys_calls_are_taken_and_read(family, running, special, forced):
    """As its models write them, with marks as tokens or spelled out, and however the text is cut."""
    engine = running.service.engine.frontend.engine
    form = call_format(family.template)
    if form is None:
        return
    tools = [Function.model_validate(tool["function"]) for tool in TOOLS]
    calling = Calling(form, tools, forced, parallel=True)
    arguments = '{"kind": "a \\"b\\" }]", "words": "</tool_call>[ARGS]"}'
    text = (
        family.call.replace("NAME", "lo.s-e_2")
        .replace("ARGS]ARGS", f"ARGS]{arguments}")
        .replace(": ARGS", f": {arguments}")
        .replace(">ARGS", f">{arguments}")
        .replace("PARAMETERS", one_by_one(json.loads(arguments), form.marks) if form.marks else "")
    )
    plain = Tokenizer.from_str(engine.tokenizer.to_str())
    plain.encode_special_tokens = not special
    tokens = plain.encode(text, add_special_tokens=False).ids
    assert accepts(engine, "grammar", calling.grammar(), tokens, skip_special_tokens=False)
    for size in (1, 5, len(text)):
        _, (call,) = read_in_parts(calling, text, size)
        assert (call.function.name, call.function.arguments) == ("lo.s-e_2", arguments)


WORDS = st.text('ab <>/\n"\\é🙂', max_size=12).filter(lambda text: "\n</parameter>\n" not in f"{text}\n</parameter>")
VALUES: dict[str, tuple[dict[str, Any], Any]] = {
    "text": ({"type": "string", "description": "any"}, WORDS),
    "kind": ({"enum": ["cat", "a\nb</parameter>"]}, st.sampled_from(["cat", "a\nb</parameter>"])),
    "fixed": ({"const": "x"}, st.just("x")),
    "perhaps": ({"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}, st.none() | WORDS),
    "either": ({"type": ["string", "null"], "enum": ["nul", None]}, st.sampled_from(["nul", None])),
    "short": ({"type": "string", "maxLength": 3}, st.text("ab\n", max_size=3)),
    "count": ({"type": "integer"}, st.integers(-99, 99)),
    "mixed": ({"enum": ["one", 1, None]}, st.sampled_from(["one", 1, None])),
    "list": ({"type": "array", "items": {"$ref": "#/$defs/item"}}, st.lists(WORDS, max_size=2)),
    "é <key": ({"type": ["boolean", "null"]}, st.sampled_from([True, False, None])),
}


@pytest.mark.parametrize("form", [QWEN_CODER_FORM, GLM_FORM, GLM_COMPACT_FORM], ids=["Qwen", "GLM", "GLM compact"])
@hypothesis.given(st.sets(st.sampled_from(sorted(VALUES))), st.sets(st.sampled_from(sorted(VALUES))), st.data())
@hypothesis.settings(max_examples=60, database=None)
def test_parameters_that_are_written_one_by_one_are_read(engine, form, used, optional, data):
    """Texts as they are and everything else as JSON, wherever the text is cut."""
    near = engine("llama-near")
    known = [key for key in VALUES if key in used | optional]
    schema = {
        "type": "object",
        "properties": {key: VALUES[key][0] for key in known},
        "required": [key for key in known if key in used and key not in optional],
        "$defs": {"item": {"type": "string"}},
    }
    calling = Calling(form, [Function(name="f", parameters=schema)], forced=True, parallel=False)
    values = {key: data.draw(VALUES[key][1]) for key in known if key in used}
    written = {
        key: value
        if key in ("text", "kind", "fixed", "perhaps", "either") and value is not None
        else json.dumps(value, ensure_ascii=False)
        for key, value in values.items()
    }
    head, marks = form.head_of("f").replace(r"\n", "\n"), form.marks
    assert marks is not None
    text = f"{form.begin}{head}{one_by_one(written, marks)}{form.tail}{form.end}"
    assert accepts(near, "grammar", calling.grammar(), text, skip_special_tokens=False)
    said, (call,) = read_in_parts(calling, text, data.draw(st.integers(1, len(text))))
    assert (said, call.function.name) == ("", "f")
    assert json.loads(call.function.arguments) == values


NESTED: dict[str, tuple[dict[str, Any], Any]] = {
    key: value for key, value in VALUES.items() if key != "é <key"
} | {
    "sure": ({"type": "boolean"}, st.booleans()),
    "items": ({"type": "array", "items": {"$ref": "#/$defs/thing"}}, st.lists(st.fixed_dictionaries({
        "name": WORDS, "ok": st.none() | st.booleans()}).map(lambda thing: dict(sorted(thing.items()))), max_size=2)),
    "any": ({}, st.sampled_from([None, True, "a", [1, "b"], {"a b": {"c": False}}])),
}  # fmt: skip
DEFINED = {
    "item": {"type": "string"},
    "thing": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "ok": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}},
        "required": ["name", "ok"],
    },
}


@pytest.mark.parametrize("form", [GEMMA_FORM, LFM2_FORM], ids=["Gemma", "LFM2"])
@hypothesis.given(st.sets(st.sampled_from(sorted(NESTED))), st.sets(st.sampled_from(sorted(NESTED))), st.data())
@hypothesis.settings(max_examples=60, database=None)
def test_arguments_in_other_notations_are_read(engine, form, used, optional, data):
    near, notation = engine("llama-near"), form.marks
    assert isinstance(notation, Notation)
    known = sorted(used | optional)
    schema = {
        "type": "object",
        "properties": {key: NESTED[key][0] for key in known},
        "required": [key for key in known if key in used and key not in optional],
        "$defs": DEFINED,
    }
    values = {key: data.draw(NESTED[key][1]) for key in known if key in used}
    members = []
    for key, value in values.items():
        as_json = key in ("short", "any")
        written = json.dumps(value, ensure_ascii=False) if as_json else notation.literal(value)
        if not notation.mark and key == "text" and data.draw(st.booleans()):
            written = "'" + repr('"' + value)[2:]  # Python prefers single quotes around double ones
        members.append(f"{key}{notation.pairs[0]}{written}")
    arguments = notation.brackets[0] + notation.separator.join(members) + notation.brackets[1]
    text = f"{form.begin}{form.opening[1:]}{form.head_of('f')}{arguments}{form.end}"
    calling = Calling(form, [Function(name="f", parameters=schema)], forced=True, parallel=False)
    assert accepts(near, "grammar", calling.grammar(), text, skip_special_tokens=False), text
    said, (call,) = read_in_parts(calling, text, data.draw(st.integers(1, len(text))))
    assert (said, call.function.name) == ("", "f")
    assert json.loads(call.function.arguments) == values


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"anyOf": [{"properties": {}}]}, "'anyOf'"),
        ({"properties": {"a>b": {}}}, "'a>b'"),
        ({"properties": {"a\nb": {}}}, r"'a\\nb'"),
        ({"properties": {"a": {}}, "required": ["b"]}, "'b'"),
    ],
)
def test_parameters_that_cannot_be_written_one_by_one_are_named(parameters, message):
    calling = Calling(QWEN_CODER_FORM, [Function(name="f", parameters=parameters)], forced=True, parallel=False)
    with pytest.raises(RequestError, match=rf"the parameters of f have {message}") as caught:
        calling.grammar()
    assert caught.value.param == "tools"


def test_a_server_reads_its_tokenizer_as_it_starts(running):
    """Before the first request that needs it: of many tokens it takes seconds."""
    known = running.service.engine.frontend.engine._grammars._vocabularies
    wait_until(lambda: known.keys() == {True, False}, "it is not read")


def test_strict_changes_no_prompt():
    fields = {"name": "f", "parameters": {}}
    with_it, without = (template_tools([Function.model_validate(fields | more)]) for more in ({"strict": True}, {}))
    assert with_it == without


def test_channels_of_gpt_oss_are_distinguished():
    form = call_format(GPT_OSS.template)
    assert form is not None
    calling = Calling(form, [Function(name="f")], forced=False, parallel=True, hidden=re.compile(r"<\|start\|>"))
    text = (
        "<|channel|>analysis<|message|>so to=functions.f?<|end|><|start|>assistant<|channel|>commentary<|message|>wait"
        "<|end|><|start|>assistant<|channel|>final<|message|>well<|start|>!"
    )
    assert text.partition(calling.bound()["stop_after"])[2] == "well<|start|>!"  # where stop texts count
    for size in (1, 7, len(text)):
        reader, output, thoughts = CallReader(calling), "", ""
        for at in range(0, len(text), size):
            output += reader.push(text[at : at + size], at + size >= len(text))[0]
            thoughts += reader.thoughts()
        assert thoughts == "so to=functions.f?"
        assert output.replace("<|start|>", "") == "waitwell!"
        assert not reader.calls


# --- added tokens in grammars ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[QWEN3, HERMES], ids=lambda family: family.name)
def marked(
    request: pytest.FixtureRequest, bundle: Bundles, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """An engine whose ``<tool_call>`` is an added token, special or not."""
    folder = family_bundle(request.param, bundle("llama-near"), tmp_path_factory.mktemp("marked") / "bundle")
    with Engine.load(folder, threads=1) as engine:
        yield engine


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    ("bound", "pattern"),
    [
        ({"grammar": 'start: "<tool_call>" | "a<tool_call>b<|im_start|>"'}, r"<tool_call>|a<tool_call>b<\|im_start\|>"),
        ({"grammar": "start: /x?<tool_call>[ab]<\\/tool_call>/"}, "x?<tool_call>[ab]</tool_call>"),
        ({"json_schema": '{"const": "<tool_call>"}'}, '"<tool_call>"'),
        ({"json_schema": '{"type": "string", "pattern": "^a?</tool_call>$"}'}, '"a?</tool_call>"'),
        ({"json_schema": '{"enum": ["<|im_end|>", "</s><|im_start|>"]}'}, r'"(<\|im_end\|>|</s><\|im_start\|>)"'),
    ],
)
def test_a_grammar_may_hold_added_tokens(marked, skip, bound, pattern):
    prompt = marked.encode("one <tool_call>a</tool_call><|im_end|>")
    for temperature in (0.0, 1.0):
        params = SamplingParams(
            temperature=temperature, max_tokens=60, seed=2, skip_special_tokens=skip, logprobs=0, **bound
        )
        plain = marked.generate(prompt, params, PLAIN)
        assert re.fullmatch(pattern, plain.text), plain.text
        assert plain.finish_reason == "stop"
        for method in ("draft_model", "ngram"):
            completion = marked.generate(prompt, params, method)
            assert re.fullmatch(pattern, completion.text)
            if not temperature:
                assert (completion.token_ids, completion.logprobs) == (plain.token_ids, plain.logprobs)


def test_constrained_texts_may_contain_special_tokens(marked):
    """Where text is free, added tokens that show are free; where a grammar names tokens, those are taken."""
    added = marked.tokenizer.token_to_id("<tool_call>")
    special = marked.tokenizer.get_added_tokens_decoder()[added].special
    params = SamplingParams(temperature=0.0, max_tokens=3, logit_bias={added: 100.0}, skip_special_tokens=False)
    free = marked.generate([5, 6, 7], params.replace(grammar="start: /(.|\\n)*/"))
    assert free.token_ids == (added,) * 3
    hidden = marked.generate([5, 6, 7], params.replace(grammar="start: /(.|\\n)*/", skip_special_tokens=True))
    assert (added in hidden.token_ids) == (not special)
    for name in (f"<[{added}]>", "<tool_call>"):
        named = marked.generate([5, 6, 7], params.replace(grammar=f'start: {name} "<tool_call>"', max_tokens=20))
        assert named.token_ids[0] == added
        assert named.finish_reason == "stop"


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Metaspace()])
def test_a_tokenizer_that_cannot_be_read_is_named(engine, decoder):
    tokenizer = Tokenizer.from_str(engine("llama-near").tokenizer.to_str())
    tokenizer.decoder = decoder
    with pytest.raises(RequestError, match=r"tokenizer has (no decoder|the decoder \w+), which llguidance") as caught:
        Grammars(tokenizer, 320, [1]).constraint("json_schema", "{}")
    assert caught.value.param == "json_schema"
