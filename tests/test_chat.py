"""Chat templates: what transformers makes of a conversation, in a sandbox."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

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
def test_templates_read_as_transformers_renders_them(name: str, prompted: bool) -> None:
    from tests.checkpoints import tokenizer

    expected = tokenizer().apply_chat_template(
        CHAT, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=prompted, enable_thinking=True
    )
    template = ChatTemplate(TEMPLATES[name], TOKENS)
    assert template.render(CHAT, {"enable_thinking": True}, add_generation_prompt=prompted) == expected


def test_a_template_refuses_in_its_own_words() -> None:
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
def test_a_template_stays_in_its_sandbox(source: str) -> None:
    with pytest.raises(RequestError, match="chat template"):
        ChatTemplate(source, {}).render(CHAT)


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "bos_token", "raise_exception", "range"])
def test_a_variable_does_not_take_a_name_that_is_taken(name: str) -> None:
    with pytest.raises(RequestError, match=f"chat_template_kwargs: {name} is set already"):
        ChatTemplate("{{ messages }}", TOKENS).render(CHAT, {name: 1})


def test_a_variable_may_have_any_other_name() -> None:
    names = ("self", "source", "variables", "args", "kwargs", "cls", "class", "__init__", "context", "environment")
    assert ChatTemplate("{{ args }}{{ self is none }}", TOKENS).render(CHAT, dict.fromkeys(names, 1)) == "1False"


def test_messages_a_template_fails_on_are_an_error_of_the_request() -> None:
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
def test_a_template_is_bounded_in_time_and_memory(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what comes after it is answered: by the same process, or by a new one."""
    monkeypatch.setattr("specexport.runtime.chat.SECONDS", 1.0)
    template = ChatTemplate("{% if messages[0].content == 'go' %}" + source + "{% endif %}fine", {})
    with pytest.raises((RequestError, BundleError), match="chat template"):
        template.render([{"role": "user", "content": "go"}])
    if "(((" not in source:
        monkeypatch.setattr("specexport.runtime.chat.SECONDS", 30.0)
        assert template.render([{"role": "user", "content": "stay"}]) == "fine"


def test_its_process_ends_with_the_template() -> None:
    template = ChatTemplate("fine", {})
    template.render(CHAT)
    process = template._process
    assert process is not None
    assert process.poll() is None
    del template
    gc.collect()
    assert process.wait(30) is not None


def test_conversations_from_several_threads_each_get_their_own() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    with ThreadPoolExecutor(8) as threads:
        said = list(threads.map(lambda index: template.render([{"content": str(index)}]), range(100)))
    assert said == list(map(str, range(100)))


def test_what_json_cannot_say_is_named() -> None:
    with pytest.raises(RequestError, match=r"messages: not what JSON can say: .*set"):
        ChatTemplate("fine", {}).render([{"content": {1}}])


def test_a_broken_template_names_its_line() -> None:
    with pytest.raises(BundleError, match="line 2"):
        ChatTemplate("fine\n{% if %}", {}).render(CHAT)


def test_half_a_character_is_no_text() -> None:
    with pytest.raises(RequestError, match="fails on them: UnicodeEncodeError"):
        ChatTemplate("{{ messages[0].content }}", {}).render([{"content": "\ud800"}])


def test_what_a_template_says_is_one_short_line() -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate("{{ raise_exception('a\\nb' * 9999) }}", {}).render(CHAT)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
