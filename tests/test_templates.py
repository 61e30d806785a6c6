"""Chat templates of checkpoints: found wherever transformers finds some, and used by name as it does."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, ProcessorMixin

from specexport import LLM, SamplingParams
from specexport.contract.errors import BuildError
from specexport.contract.manifest import MANIFEST_NAME
from specexport.contract.reading import check_files, read_manifest
from specexport.exporter.build import build
from specexport.exporter.checkpoints.tokenizer import load_tokenizer, other_template
from specexport.exporter.options import BuildOptions
from specexport.runtime.chat import ChatTemplate
from tests.checkpoints import make_checkpoint, tokenizer

pytestmark = pytest.mark.exporter

CHAT = [{"role": "user", "content": "one"}]
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]
PLAIN = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
WITH_TOOLS = "{% for t in tools %}{{ t | tojson }}{% endfor %}" + PLAIN
RAG = "{% for d in documents %}{{ d.text }} {% endfor %}" + PLAIN
NAMED = {"default": PLAIN, "tool_use": WITH_TOOLS, "rag": RAG}
LISTED = [{"name": name, "template": template} for name, template in NAMED.items()]
ADDITIONAL = {f"additional_chat_templates/{name}.jinja": NAMED[name] for name in ("tool_use", "rag")}
JINJA = "chat_template.jinja"


def written(folder: Path, files: dict[str, Any]) -> Path:
    """A tokenizer with these files; those of JSON are added to."""
    tokenizer().save_pretrained(folder)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if not isinstance(content, str):
            known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            content = json.dumps(known | content)
        path.write_text(content, encoding="utf-8")
    if not (folder / "config.json").is_file():
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    return folder


def rendered(folder: Path, name: str | None, variables: dict[str, Any]) -> str:
    loaded = load_tokenizer(folder)
    chat_template = ChatTemplate(loaded.chat_templates, loaded.special_tokens)
    return chat_template.render(CHAT, variables, add_generation_prompt=False, name=name)


WAYS: dict[str, dict[str, Any]] = {
    "a text": {"tokenizer_config.json": {"chat_template": PLAIN}},
    "a list": {"tokenizer_config.json": {"chat_template": LISTED}},
    "an object": {"tokenizer_config.json": {"chat_template": NAMED}},
    "a file": {JINJA: PLAIN},
    "files": {JINJA: PLAIN, **ADDITIONAL},
    "files before fields": {"tokenizer_config.json": {"chat_template": "no"}, JINJA: PLAIN, **ADDITIONAL},
    "no default": ADDITIONAL,
}


@pytest.mark.parametrize("way", WAYS)
def test_templates_are_found_and_chosen_as_transformers_does(tmp_path, way):
    folder = written(tmp_path, WAYS[way])
    theirs = AutoTokenizer.from_pretrained(folder)
    several = isinstance(theirs.chat_template, dict)
    for name, variables in (
        (None, {}),
        (None, {"tools": TOOLS}),
        *([("rag", {"documents": [{"text": "a"}]}), ("tool_use", {"tools": TOOLS})] if several else []),
    ):
        if way == "no default" and name is None and not variables:
            continue  # both refuse it
        expected = theirs.apply_chat_template(CHAT, chat_template=name, tokenize=False, **variables)
        assert rendered(folder, name, variables) == expected
        assert ("look_up" in expected) == (several and "tools" in variables)


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.json": {"chat_template": PLAIN}},
        {"processor_config.json": {"chat_template": PLAIN, "processor_class": "A"}},
        {"processor_config.json": {"chat_template": PLAIN}, "chat_template.json": {"chat_template": "no"}},
        {"processor_config.json": {"processor_class": "A"}, "chat_template.json": {"chat_template": LISTED}},
        {"chat_template.json": {"chat_template": "no"}, JINJA: PLAIN},
        {"chat_template.json": {"chat_template": "no"}, "tokenizer_config.json": {"chat_template": PLAIN}},
    ],
)
def test_a_processors_template_is_used_where_the_tokenizer_has_none(tmp_path, files):
    assert rendered(written(tmp_path, files), None, {}) == "<s>user: one "


DIFFER: list[tuple[dict[str, Any], str | None]] = [
    ({JINJA: PLAIN}, None),
    ({"tokenizer_config.json": {"chat_template": PLAIN}}, None),
    ({"tokenizer_config.json": {"chat_template": "other"}, JINJA: PLAIN}, None),
    ({"chat_template.json": {"chat_template": PLAIN}, JINJA: PLAIN}, None),
    ({"chat_template.json": {"chat_template": "other"}}, None),
    ({"chat_template.json": {"chat_template": "other"}, JINJA: PLAIN}, "chat_template.json"),
    (
        {"chat_template.json": {"chat_template": "other"}, "tokenizer_config.json": {"chat_template": LISTED}},
        "chat_template.json",
    ),
    ({"processor_config.json": {"chat_template": "other"}, JINJA: PLAIN}, "processor_config.json"),
    (
        {"processor_config.json": {"chat_template": "a"}, "chat_template.json": {"chat_template": PLAIN}, JINJA: PLAIN},
        "processor_config.json",
    ),
    ({"processor_config.json": {"chat_template": {"default": "a", "b": PLAIN}}, JINJA: "b"}, "processor_config.json"),
]


@pytest.mark.parametrize(("files", "named"), DIFFER)
def test_a_processors_template_is_named_where_it_differs(tmp_path, files, named):
    folder = written(tmp_path, files)
    used = load_tokenizer(folder).chat_templates
    theirs = ProcessorMixin.get_processor_dict(folder)[0].get("chat_template")
    theirs = theirs.get("default") if isinstance(theirs, dict) else theirs
    note = other_template(folder, used)
    assert (note is not None) == (theirs is not None and theirs != used["default"])
    assert (None if note is None else note.file) == named
    assert note is None or "specexport takes the tokenizer's" in str(note)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"chat_template.json": {"chat_template": 5}}, r"chat_template\.json: not a configuration of a processor"),
        ({"processor_config.json": "{"}, r"processor_config\.json: not a configuration of a processor"),
        ({"tokenizer_config.json": {"chat_template": {"a/b": ""}}}, "chat_template 'a/b' is str; expected"),
        ({"tokenizer_config.json": {"chat_template": {"a": 5}}}, r"tokenizer_config\.json: chat_template 'a' is int"),
        ({"tokenizer_config.json": {"chat_template": 5}}, r"tokenizer_config\.json: chat_template 'default' is int"),
    ],
)
def test_invalid_templates_are_named(tmp_path, files, message):
    with pytest.raises(BuildError, match=message):
        load_tokenizer(written(tmp_path, files))


def test_a_bundle_holds_all_templates(tmp_path):
    source = written(make_checkpoint(tmp_path / "model", "llama"), {JINJA: PLAIN, **ADDITIONAL})
    written(source, {"processor_config.json": {"chat_template": "another"}})
    folder = build(BuildOptions(target=str(source), output=tmp_path / "bundle", max_seq_len=256))
    manifest = read_manifest(folder)
    check_files(folder, manifest, hashes=True)
    assert [str(note).partition(":")[0] for note in manifest.notes] == ["processor_config.json"]
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {MANIFEST_NAME, *(file.path for file in manifest.files)}
    theirs = AutoTokenizer.from_pretrained(source)
    params = SamplingParams(temperature=0.0, max_tokens=2)
    with LLM(bundle=folder, threads=1, calibrate=False) as llm:
        for options, variables in (
            ({}, {}),
            ({"tools": TOOLS}, {"tools": TOOLS}),
            ({"chat_template": "rag", "chat_template_kwargs": {"documents": [{"text": "a"}]}}, None),
        ):
            (completion,) = llm.chat(CHAT, params, use_tqdm=False, **options)
            fields = {"chat_template": "rag", "documents": [{"text": "a"}]} if variables is None else variables
            assert list(completion.prompt_token_ids) == theirs.apply_chat_template(CHAT, return_dict=False, **fields)
        guess = list(completion.outputs[0].token_ids)
        (guessed,) = llm.chat(CHAT, params, use_tqdm=False, speculative={"hypothesis": guess}, **options)
        assert guessed.outputs[0].metrics.accepted > 0
