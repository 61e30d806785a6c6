"""Families whose models call tools, rebuilt small: the template's call format and the tokenizer's added tokens."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specexport.contract.reading import read_manifest
from tests.manifests import put, relist

_TURNS = (
    "{% for m in messages %}{{ BEGIN + m.role + BEHIND + (m.content or '') + '' }}{% for c in m.tool_calls or [] %}CALL"
    "{% endfor %}{{ END }}{% endfor %}{% if add_generation_prompt %}{{ BEGIN + 'assistant' + BEHIND }}{% endif %}"
)
_NAMES = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
_JSON = "{{ {'name': c.function.name, 'ARGUMENTS': c.function.arguments} | tojson }}"


def _turns(begin: str, behind: str, end: str, call: str) -> str:
    words = {"BEGIN": f"'{begin}'", "BEHIND": f"'{behind}'", "END": f"'{end}'", "CALL": call}
    text = _TURNS
    for word, value in words.items():
        text = text.replace(word, value)
    return text


@dataclass(frozen=True)
class Family:
    """A family.

    Attributes:
        name: of its models.
        template: of its chats.
        special: its special tokens; the last of them ends a text.
        plain: other added tokens.
        mark: the token that begins calls; None where a call is the whole answer.
        call: a whole call, as its models write it: the name is NAME, and the arguments are ARGS; or
            PARAMETERS, which are written one by one.
        form: the same in words, for the table.
    """

    name: str
    template: str
    special: Sequence[str]
    plain: Sequence[str] = ()
    mark: str | None = None
    call: str = ""
    form: str = ""

    @property
    def tokens(self) -> tuple[str, ...]:
        """Its added tokens, which are the last of the vocabulary."""
        return (*self.plain, *self.special)


_HERMES_CALL = '<tool_call>\n{"name": "NAME", "arguments": ARGS}\n</tool_call>'
_HERMES = "<tool_call>\n" + _JSON.replace("ARGUMENTS", "arguments") + "\n</tool_call>"
_QWEN = _NAMES + _turns("<|im_start|>", "\n", "<|im_end|>\n", _HERMES)
_CODER = _NAMES + _turns(
    "<|im_start|>",
    "\n",
    "<|im_end|>\n",
    "<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n"
    "{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
)
_GLM = (
    _NAMES
    + "{# <tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value> #}"
    + _turns(
        "<|im_start|>",
        "\n",
        "<|im_end|>\n",
        "<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments | items %}<arg_key>{{ k }}</arg_key>\n"
        "<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>",
    )
)
_LLAMA = (
    '{# {"name": function name, "parameters": dictionary of argument name and its value} #}'
    + _NAMES
    + _turns("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", _JSON.replace("ARGUMENTS", "parameters"))
)
_IDS = "{% if c.id | length != 9 %}{{ raise_exception('ids have nine letters and digits') }}{% endif %}"
_MISTRAL = _NAMES + _turns(
    "[INST]", " ", "[/INST]", _IDS + "[TOOL_CALLS][" + _JSON.replace("ARGUMENTS", "arguments") + "]"
)
_MISTRAL_ARGS = _NAMES + _turns(
    "[INST]", " ", "[/INST]", _IDS + "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"
)
_GEMMA = _turns("<start_of_turn>", "\n", "<end_of_turn>\n", "")
_GPT_OSS = _NAMES + _turns(
    "<|start|>",
    "",
    "<|end|>",
    " to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>"
    "{{ c.function.arguments | tojson }}<|call|>",
)
QWEN2 = Family(
    "Qwen 2.5",
    _QWEN,
    ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    ("<tool_call>", "</tool_call>"),
    "<tool_call>",
    _HERMES_CALL,
    "`<tool_call>{json}</tool_call>`",
)
QWEN3 = Family(
    "Qwen 3",
    _QWEN,
    QWEN2.special,
    ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    "<tool_call>",
    _HERMES_CALL,
    QWEN2.form,
)
QWEN_CODER = Family(
    "Qwen3-Coder, Qwen 3.5",
    _CODER,
    QWEN2.special,
    QWEN3.plain,
    "<tool_call>",
    "<tool_call>\n<function=NAME>\nPARAMETERS</function>\n</tool_call>",
    "`<tool_call><function=name><parameter=key>value…`; texts as they are, other values JSON",
)
GLM = Family(
    "GLM-4.5, 4.6",
    _GLM,
    QWEN2.special,
    QWEN2.plain,
    "<tool_call>",
    "<tool_call>NAME\nPARAMETERS</tool_call>",
    "`<tool_call>name<arg_key>key</arg_key><arg_value>value…`; values likewise",
)
GLM_COMPACT = Family(
    "GLM-4.7, GLM-5",
    _GLM.replace("\n<arg_", "<arg_").replace("name }}\n", "name }}").replace("</arg_value>\n", "</arg_value>"),
    QWEN2.special,
    QWEN2.plain,
    "<tool_call>",
    "<tool_call>NAMEPARAMETERS</tool_call>",
    "the same, without line breaks",
)
_CALLS = ("<tool_call>", "</tool_call>", *QWEN2.special)
HERMES = Family("Hermes, marks special", _QWEN, _CALLS, (), "<tool_call>", _HERMES_CALL, QWEN2.form)
LLAMA3 = Family(
    "Llama 3.x",
    _LLAMA,
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>", "<|eom_id|>", "<|eot_id|>"),
    (),
    "<|python_tag|>",
    '{"name": "NAME", "parameters": ARGS}',
    '`{"name": …, "parameters": …}`, perhaps behind `<|python_tag|>`',
)
MISTRAL = Family(
    "Mistral, to v7",
    _MISTRAL,
    ("[INST]", "[/INST]", "[TOOL_RESULTS]", "[TOOL_CALLS]", "[END]"),
    (),
    "[TOOL_CALLS]",
    '[TOOL_CALLS][{"name": "NAME", "arguments": ARGS}]',
    "`[TOOL_CALLS][{json}, …]`",
)
MISTRAL_ARGS = Family(
    "Mistral, from v11",
    _MISTRAL_ARGS,
    ("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[END]"),
    (),
    "[TOOL_CALLS]",
    "[TOOL_CALLS]NAME[ARGS]ARGS",
    "`[TOOL_CALLS]name[ARGS]{json}`, with or without `[CALL_ID]`",
)
_GEMMA_TURNS = ("<start_of_turn>", "<end_of_turn>")
GEMMA3 = Family("Gemma 3", _GEMMA, _GEMMA_TURNS, ("\n\n", "\n\n\n"), None, '{"name": "NAME", "arguments": ARGS}')
GPT_OSS = Family(
    "gpt-oss",
    _GPT_OSS,
    ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
    (),
    "<|channel|>",
    "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGS",
    "harmony: `commentary to=functions.name`; analysis is `reasoning_content`",
)
_VALUE = (
    "{% macro value(v) %}{% if v is string %}QUOTE{{ v }}QUOTE{% elif v is mapping %}{% for k in v %}{{ k }}PAIR"
    "{{ value(v[k]) }}{% if not loop.last %}, {% endif %}{% endfor %}{% else %}{{ v }}{% endif %}{% endmacro %}"
)
GEMMA4 = Family(
    "Gemma 4",
    _VALUE.replace("QUOTE", '<|"|>').replace("PAIR", ":").replace(", ", ",")
    + _NAMES
    + _turns(
        "<|turn>",
        "\n",
        "<turn|>\n",
        "{{ '<|tool_call>call:' + c.function.name + '{' }}{{ value(c.function.arguments) }}}<tool_call|>",
    ),
    ("<|turn>", "<|tool_call>", "<tool_call|>", '<|"|>', "<turn|>"),
    (),
    "<|tool_call>",
    "<|tool_call>call:NAMEPARAMETERS<tool_call|>",
    '`<|tool_call>call:name{key:<|"|>text<|"|>,…}`, keys in alphabetical order',
)
LFM2 = Family(
    "LFM2.5",
    _VALUE.replace("QUOTE", "'").replace("PAIR", "=")
    + _NAMES
    + _turns(
        "<|im_start|>",
        "\n",
        "<|im_end|>\n",
        "{{ '<|tool_call_start|>[' + c.function.name + '(' }}{{ value(c.function.arguments) }}"
        "{{ ')]<|tool_call_end|>' }}",
    ),
    ("<|im_start|>", "<|tool_call_start|>", "<|tool_call_end|>", "<|im_end|>"),
    (),
    "<|tool_call_start|>",
    "<|tool_call_start|>[NAMEPARAMETERS]<|tool_call_end|>",
    "`<|tool_call_start|>[name(key=value, …), …]`, values as in Python",
)
LFM2_EARLIER = replace(
    LFM2,
    name="LFM2, before 2.5",
    template="{{ '<|tool_list_start|>' if tools }}" + _NAMES + _turns("<|im_start|>", "\n", "<|im_end|>\n", ""),
    form="the same; its template leaves earlier calls out, and the server writes them into their message's text",
)
FAMILIES = (
    QWEN2, QWEN3, QWEN_CODER, GLM, GLM_COMPACT, HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, GEMMA3, GEMMA4, LFM2,
    LFM2_EARLIER, GPT_OSS
)  # fmt: skip


def family_bundle(family: Family, bundle: Path, folder: Path) -> Path:
    """A copy of a bundle whose last tokens are a family's, with its template."""
    shutil.copytree(bundle, folder)
    manifest = read_manifest(folder)
    path = folder / manifest.tokenizer.file
    stated = json.loads(path.read_text(encoding="utf-8"))
    model, first = stated["model"], manifest.target.vocab_size - len(family.tokens)
    # Later merges take none of the tokens that go.
    gone = [name for name, id in model["vocab"].items() if id >= first]
    model["vocab"] = {name: id for name, id in model["vocab"].items() if id < first}
    model["merges"] = model["merges"][: len(model["merges"]) - len(gone)]
    for id, token in enumerate(family.tokens, start=first):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        stated["added_tokens"].append({"id": id, "content": token, **flags, "special": token in family.special})
    path.write_text(json.dumps(stated, ensure_ascii=False), encoding="utf-8")
    name = "tokenizer/chat_template.jinja"
    (folder / name).write_text(family.template, encoding="utf-8")
    last = manifest.target.vocab_size - 1
    put(folder, "tokenizer.templates", {"default": name})
    put(folder, "tokenizer.eos_token_ids", [last - 1, last] if family is GPT_OSS else [last])
    relist(folder, name)
    return folder
