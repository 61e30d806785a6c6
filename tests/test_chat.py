"""Chat templates: what transformers makes of a conversation, in a sandbox."""

import gc
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from specexport.contract.errors import BundleError, RequestError
from specexport.runtime.chat import ChatTemplate

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "Hello, ünïcode"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Bye"},
]
TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}\n{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "llama": "{{ bos_token }}\n  {%- for message in messages %}\n    {{- message.role | trim }}: "
    "{{ message['content'] | tojson }}\n  {%- if loop.last %}{% break %}{% endif %}\n{%- endfor %}",
    "namespace": "{% set ns = namespace(found=false, n=0) %}{% for m in messages if m.role != 'system' %}"
    "{% set ns.n = ns.n + 1 %}{% generation %}{{ ns.n }}{{ m.content }}{% endgeneration %}{% endfor %}{{ eos_token }}",
    "variables": "{% if enable_thinking is defined and enable_thinking %}think {% endif %}{{ messages | length }}"
    "{{ messages | tojson(indent=2) }}",
}


@pytest.mark.exporter
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompted", [True, False])
def test_templates_read_as_transformers_renders_them(name, prompted):
    from tests.checkpoints import tokenizer

    expected = tokenizer().apply_chat_template(
        CHAT, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=prompted, enable_thinking=True
    )
    template = ChatTemplate(TEMPLATES[name], TOKENS)
    assert template.render(CHAT, {"enable_thinking": True}, add_generation_prompt=prompted) == expected


@pytest.mark.exporter
@pytest.mark.parametrize("name", ["chatml", "llama", "namespace", "trimmed"])
@pytest.mark.parametrize("content", ["Good", " Good ", "Hello, ünïcode", [{"type": "text", "text": "Good "}]])
def test_the_last_message_is_continued_as_by_transformers(name, content):
    from tests.checkpoints import tokenizer

    source = TEMPLATES.get(name, TEMPLATES["chatml"].replace("m['content']", "m['content'] | trim"))
    source = source if isinstance(content, str) else EITHER.replace(" | trim", "")
    chat = [*CHAT, {"role": "assistant", "content": content}]
    expected = tokenizer().apply_chat_template(
        chat, chat_template=source, tokenize=False, continue_final_message=True, add_generation_prompt=False
    )
    rendered = ChatTemplate(source, TOKENS).render(chat, continue_final_message=True)
    assert rendered == expected


@pytest.mark.parametrize(
    ("chat", "words"),
    [
        ([*CHAT, {"role": "assistant", "content": None}], "no content to continue"),
        ([*CHAT, {"role": "assistant", "content": []}], "no content to continue"),
        ([*CHAT, {"role": "note", "content": "x"}], "leaves the last message out"),
    ],
)
def test_a_message_that_cannot_be_continued_is_refused(chat, words):
    template = "{% for m in messages if m.role != 'note' %}{{ m.role }}: {{ m.content }}{% endfor %}"
    with pytest.raises(RequestError, match=words) as raised:
        ChatTemplate(template, TOKENS).render(chat, continue_final_message=True)
    assert raised.value.param == "continue_final_message"


def test_later_system_messages_that_a_template_drops_join_the_first():
    """As gpt-oss' and SmolLM3's drop them."""
    first_only = (
        "{% if messages[0].role == 'system' %}[{{ messages[0].content }}]{% endif %}"
        "{% for m in messages if m.role != 'system' %}<{{ m.content }}>{% endfor %}"
    )
    every = "{% for m in messages %}{{ m.role }}: {{ m.content | upper }};{% endfor %}"
    late = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}, {"role": "user", "content": "c"}]
    for chat, expected in (
        (late, "[b]<a><c>"),
        ([{"role": "system", "content": "x"}, *late, {"role": "system", "content": [PARTS[0]]}],
         "[x\n\nb\n\nsee the file]<a><c>"),
        ([*late[:1], {"role": "developer", "content": "d"}], "<a><d>"),
        ([*late[:1], {"role": "system", "content": ""}], "<a>"),
    ):  # fmt: skip
        assert ChatTemplate(first_only, {}).render(chat) == expected
    assert ChatTemplate(every, {}).render(late) == "user: A;system: B;user: C;"


PARTS = [{"type": "text", "text": "see the file"}, {"type": "text", "text": "import os"}]
ONLY_PARTS = (
    "{% for m in messages %}{{ m['role'].upper() }}:{% for c in m['content'] if c['type'] == 'text' %} {{ c['text'] }}"
    "{% endfor %} {% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
EITHER = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'text' %}[{{ c.text | trim }}]{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate, and begin with the user') }}{% endif %}{% endfor %}"
)
MACRO = (
    "{% macro said(content) %}{% if content is not string %}{% for c in content %}{{ c.text }}|{% endfor %}"
    "{% else %}{{ content }}{% endif %}{% endmacro %}{% for m in messages %}{{ m.role }} {{ said(m.content) }}"
    "{% endfor %}"
)
FIRST_OF_SYSTEM = (
    "{% if messages[0].role == 'system' %}<{{ messages[0].content[0].text }}>{% set messages = messages[1:] %}"
    "{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
)


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.exporter
@pytest.mark.parametrize(
    ("template", "content", "read"),
    [
        (ONLY_PARTS, "see the file", _parts("see the file")),
        (ONLY_PARTS, PARTS, PARTS),
        (ALTERNATING + ONLY_PARTS, "see the file", _parts("see the file")),
        (EITHER, "see the file", "see the file"),
        (EITHER, PARTS, PARTS),
        (MACRO, "see the file", "see the file"),
        (MACRO, PARTS, PARTS),
        (TEMPLATES["chatml"], PARTS, "see the file\nimport os"),
        (TEMPLATES["llama"], PARTS, "see the file\nimport os"),
        ("{{ messages | tojson }}", PARTS, "see the file\nimport os"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", PARTS, "see the file\nimport os"),
        ("{% for m in messages %}{{ m.content | trim }}{% endfor %}", _parts("one"), "one"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", [], ""),
        ("{% for m in messages %}{{ m.content[0].text }}{% endfor %}", PARTS, _parts("see the file\nimport os")),
        ("{% for m in messages %}{{ m.content[0]['text'] }}{% endfor %}", "one", _parts("one")),
    ],
)
def test_content_reaches_a_template_in_the_form_that_it_reads(template, content, read):
    """The prompt is the one that transformers makes of the form that is expected here."""
    from tests.checkpoints import tokenizer

    def chat(content: Any) -> list[dict[str, Any]]:
        return [{"role": "user", "content": content}]

    expected = tokenizer().apply_chat_template(
        chat(read), chat_template=template, tokenize=False, add_generation_prompt=True
    )
    chat_template = ChatTemplate(template, TOKENS)
    for _ in range(2):  # what it reads is known the second time
        assert chat_template.render(chat(content)) == expected
    assert not content or "see the file" in expected or "one" in expected


def test_roles_may_be_read_in_different_forms():
    chat_template = ChatTemplate(FIRST_OF_SYSTEM, {})
    user, system = {"role": "user", "content": PARTS}, {"role": "system", "content": "Be brief."}
    assert chat_template.render([system, user]) == "<Be brief.>see the file\nimport os"
    text = chat_template.render([{**system, "content": _parts("Be", "brief.")}, user])
    assert text == "<Be\nbrief.>see the file\nimport os"


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "ipython"])
@pytest.mark.parametrize("template", [ONLY_PARTS, EITHER, MACRO])
def test_no_roles_words_are_lost(role, template):
    for content in ("words", _parts("words")):
        assert "words" in ChatTemplate(template, {}).render(
            [{"role": "user", "content": "a"}, {"role": role, "content": content}]
        )


def test_parts_may_be_named_as_responses_name_them():
    content = [{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}, {"text": "c"}, "d"]
    assert ChatTemplate(ONLY_PARTS, {}).render([{"role": "user", "content": content}]) == "USER: a b c d ASSISTANT:"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "messages.0.content.0: a part of the type 'image_url'"),
        ([{"type": "text", "text": "a"}, {"type": "image"}], "messages.0.content.1: a part of the type 'image'"),
        ([{"type": "text"}], "messages.0.content.0: a part of the type 'text'; expected {'type': 'text', 'text'"),
        ([5], "messages.0.content.0: a part of the type 'int'"),
        (5, "messages.0.content is 5; expected a text, or a list of parts"),
    ],
)
def test_values_that_are_not_text_are_refused(content, message):
    with pytest.raises(RequestError, match=re.escape(message)):
        ChatTemplate(ONLY_PARTS, {}).render([{"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("messages", "message"), [([], "there are none"), (["a"], r"messages\.0 is str; expected a mapping")]
)
def test_invalid_conversations_are_refused(messages, message):
    with pytest.raises(RequestError, match=message):
        ChatTemplate(EITHER, {}).render(messages)


CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


@pytest.mark.exporter
@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.role }} {{ m.content is defined }} {{ m.tool_calls is defined }};{% endfor %}",
        "{% if tools is not none %}{{ tools | tojson }}{% endif %}{% if documents is none %}no documents{% endif %}",
        "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }};{% endfor %}",
    ],
)
def test_missing_message_fields_equal_transformers(template):
    from tests.checkpoints import tokenizer

    chat = [
        {"role": "user", "content": "a", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "because"},
        {"role": "tool", "content": "b", "tool_calls": None},
    ]
    expected = tokenizer().apply_chat_template(chat, chat_template=template, tokenize=False)
    assert ChatTemplate(template, {}).render(chat, add_generation_prompt=False) == expected


def test_a_call_without_content_suits_templates_that_want_some():
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"
    assert ChatTemplate(template, {}).render(chat) == "user: aassistant: "


@pytest.mark.parametrize(
    "form", ["+ c.function.arguments", "~ c.function.arguments", "+ c.function.arguments | tojson"]
)
def test_arguments_of_calls_are_json_in_templates_of_either_form(form):
    """DeepSeek's templates take texts; others would write an object as Python does."""
    calls = "{% for c in m.tool_calls %}{{ c.function.name " + form + " }}{% endfor %}"
    template = "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}" + calls + "{% endif %}{% endfor %}"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    assert ChatTemplate(template, {}).render(chat) == 'af{"a": 1}'


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ("", "[be brief]a"),
        ("{% else %}{{ raise_exception('unknown') }}", "[be brief]a"),
        ("{% elif m.role == 'developer' %}developer:{{ m.content }}", "developer:be briefa"),
    ],
)
def test_a_developers_message_is_the_systems_where_a_template_does_not_know_it(other, text):
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}[{{ m.content }}]{% elif m.role == 'user' %}{{ m.content }}"
        + other
        + "{% endif %}{% endfor %}"
    )
    chat = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "a"}]
    assert ChatTemplate(template, {}).render(chat) == text


def test_templates_may_write_the_arguments_of_calls_in_a_form_of_their_own():
    """As Gemma 4's and Kimi K3's do, which write JSON texts whole."""
    call = "{% for k, v in c.function.arguments | items %}{{ k }}:<{{ v }}>{% endfor %}"
    call = "{% if c.function.arguments is mapping %}" + call + "{% else %}{{ c.function.arguments }}{% endif %}"
    template = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}" + call + "{% endfor %}{% endfor %}"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    assert ChatTemplate(template, {}).render(chat) == "aa:<1>"


NAMED = {
    "default": "plain {{ messages[0].content }}",
    "tool_use": "tools {{ tools | tojson }}",
    "rag": "{{ documents }}",
}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def test_missing_templates_are_named():
    with pytest.raises(
        RequestError, match="chat_template is 'sql'; expected one of the model's: default, rag, tool_use"
    ):
        ChatTemplate(NAMED, {}).render(CHAT, name="sql")
    with pytest.raises(RequestError, match="several and none is the default; name one of rag, sql"):
        ChatTemplate({"rag": "", "sql": ""}, {}).render(CHAT)


def test_a_template_refuses_in_its_own_words():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(RequestError, match="messages: the model's chat template refuses them: roles must alternate"):
        template.render(CHAT)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ messages.append({}) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
    ],
)
def test_a_template_stays_in_its_sandbox(source):
    with pytest.raises(RequestError, match="chat template"):
        ChatTemplate(source, {}).render(CHAT)


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "bos_token", "raise_exception", "range"])
def test_new_values_get_unused_names(name):
    with pytest.raises(RequestError, match=f"chat_template_kwargs: {name} is set already"):
        ChatTemplate("{{ messages }}", TOKENS).render(CHAT, {name: 1})


def test_a_variable_may_have_any_other_name():
    names = ("self", "source", "variables", "args", "kwargs", "cls", "class", "__init__", "context", "environment")
    assert ChatTemplate("{{ args }}{{ self is none }}", TOKENS).render(CHAT, dict.fromkeys(names, 1)) == "1False"


def test_messages_a_template_fails_on_are_an_error_of_the_request():
    with pytest.raises(RequestError, match="fails on them"):
        ChatTemplate("{{ messages[0].content + 1 }}", {}).render(CHAT)


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        ENDLESS,
        "{{ (messages | length + 8) ** 9999999999 }}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ '%999999999999d' % 1 }}",
        "{{ 'a'.ljust(10 ** 10) }}",
        "{{ messages | tojson(indent=10 ** 9) }}",
        "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
        "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    ],
)
def test_a_template_is_bounded_in_time_and_memory(source, monkeypatch):
    """And what comes after it is answered: by the same process, or by a new one."""
    monkeypatch.setattr("specexport.runtime.chat.SECONDS", 1.0)
    template = ChatTemplate("{% if messages[0].content == 'go' %}" + source + "{% endif %}fine", {})
    with pytest.raises((RequestError, BundleError), match="chat template"):
        template.render([{"role": "user", "content": "go"}])
    if "(((" not in source:
        monkeypatch.setattr("specexport.runtime.chat.SECONDS", 30.0)
        assert template.render([{"role": "user", "content": "stay"}]) == "fine"


def test_its_process_is_started_again_if_the_system_ends_it():
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert template.render([{"role": "user", "content": "one"}]) == "one"
    template._process.kill()  # as the system does where memory is short
    template._process.wait()
    assert template.render([{"role": "user", "content": "two"}]) == "two"


def test_its_process_ends_with_the_template():
    template = ChatTemplate("fine", {})
    template.render(CHAT)
    process = template._process
    assert process.poll() is None
    del template
    gc.collect()
    assert process.wait(30) is not None


def test_conversations_from_several_threads_each_get_their_own():
    template = ChatTemplate("{{ messages[0].content }}", {})
    with ThreadPoolExecutor(8) as threads:
        text = list(threads.map(lambda index: template.render([{"content": str(index)}]), range(100)))
    assert text == list(map(str, range(100)))


def test_values_beyond_json_are_named():
    with pytest.raises(RequestError, match=r"messages: cannot be written as JSON: .*set"):
        ChatTemplate("fine", {}).render([{"role": {1}}])


def test_a_broken_template_names_its_line():
    with pytest.raises(BundleError, match="line 2"):
        ChatTemplate("fine\n{% if %}", {}).render(CHAT)


def test_half_a_character_is_no_text():
    half, chat_template = "a\ud800", ChatTemplate("{{ messages[0].content }}{{ tools }}", {})
    for messages, variables, place in (
        ([{"content": half}], {}, "messages.0.content"),
        ([{"content": [{"type": "text", "text": text} for text in ("b", half)]}], {}, "messages.0.content.1.text"),
        ([{"content": "", half: 1}], {}, "a key of messages.0"),
        ([{"content": ""}], {"tools": [{"function": {"description": half}}]}, "tools.0.function.description"),
    ):
        with pytest.raises(RequestError, match=rf"{place}: U\+D800, half of a character, at position 1"):
            chat_template.render(messages, variables)


def test_template_errors_are_one_short_line():
    with pytest.raises(RequestError) as caught:
        ChatTemplate("{{ raise_exception('a\\nb' * 9999) }}", {}).render(CHAT)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
