"""Training data: what is read, what of it is learnt, and how it comes in batches."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specexport.contract.errors import TrainError
from specexport.training import data
from specexport.training.data import Windows, read_windows, sampled_windows, seeded
from tests.checkpoints import EOS, tokenizer

pytestmark = pytest.mark.exporter

_TURN = "<s>{{ m['role'] }}\n"
PLAIN = (
    "{% for m in messages %}" + _TURN + "{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}" + _TURN + "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}</s>"
    "{% endgeneration %}{% else %}{{ m['content'] }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
# As templates of models that think do: thoughts are kept in the last answer only.
FORGETFUL = PLAIN.replace(
    "{{ m['content'] }}", "{{ m['content'] if loop.last else m['content'].split('thought')[-1] }}"
)
UNSTABLE = PLAIN.replace("{% endif %}", "(think) {% endif %}")

CHAT = [
    ("user", "how many?"),
    ("assistant", "thought three"),
    ("user", "and now?"),
    ("assistant", "thought four"),
    ("user", "thanks"),
]


def with_template(template: str | None) -> Any:
    templated = copy.deepcopy(tokenizer())
    templated.chat_template = template
    return templated


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def learnt_texts(windows: Windows) -> list[str]:
    """What is learnt in each document, as text."""
    ids, learn, document = (tensor.flatten() for tensor in (windows.ids, windows.learn, windows.document))
    return sorted(tokenizer().decode(ids[learn & (document == n)]) for n in document[learn].unique())


SHAREGPT = {
    "conversations": [{"from": {"user": "human", "assistant": "gpt"}[role], "value": content} for role, content in CHAT]
}
OPENAI = {"messages": [{"role": role, "content": content} for role, content in CHAT]}


@pytest.mark.parametrize("row", [SHAREGPT, OPENAI], ids=["sharegpt", "openai"])
@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["prefixes", "marked"])
def test_only_the_assistants_turns_are_learnt(tmp_path, row, template):
    windows = read_windows([write(tmp_path / "chat.jsonl", row)], with_template(template), seq_len=32, seed=0)
    assert learnt_texts(windows) == ["thought three</s>thought four</s>"]


def test_a_template_that_forgets_gives_a_document_an_answer(tmp_path):
    file = write(tmp_path / "chat.jsonl", OPENAI)
    windows = read_windows([file], with_template(FORGETFUL), seq_len=32, seed=0)
    assert learnt_texts(windows) == ["thought four</s>", "thought three</s>"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json"])
def test_a_byte_order_mark_is_no_text(tmp_path, name):
    content = {"a.txt": "new", "a.jsonl": '{"text": "new"}', "a.json": '[{"text": "new"}]'}[name]
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert learnt_texts(read_windows([tmp_path / name], with_template(PLAIN), seq_len=8, seed=0)) == ["new</s>"]


def test_leading_answers_are_dropped_and_json_lists_are_read(tmp_path):
    file = tmp_path / "chats.json"
    begun = {"messages": [{"role": "assistant", "content": "first"}, *OPENAI["messages"][:2]]}
    file.write_text(json.dumps([begun, {"text": "the good new number"}]), encoding="utf-8")
    windows = read_windows([file], with_template(PLAIN), seq_len=32, seed=0)
    assert learnt_texts(windows) == ["the good new number</s>", "thought three</s>"]


@pytest.mark.parametrize(
    ("name", "content", "template", "expected"),
    [
        (
            "a.jsonl",
            '{"text": "x"}\n{"text": 3}\n',
            None,
            r"a\.jsonl:2: text is a whole number; expected a text or null",
        ),
        ("a.jsonl", '{"text": "x"\n', None, r"a\.jsonl:1: .*truncated"),
        (
            "a.jsonl",
            '{"txt": "x"}\n',
            None,
            r"a\.jsonl:1: has none of these; expected one of text, conversations and messages",
        ),
        ("a.jsonl", '{"messages": [{"role": "wizard", "content": "x"}]}', PLAIN, r"a\.jsonl:1: turn 0 is by 'wizard'"),
        ("a.jsonl", json.dumps(OPENAI), None, r"a\.jsonl:1: a chat, and the tokenizer has no chat template"),
        ("a.jsonl", json.dumps(OPENAI), "{{ raise_exception('no') }}", r"a\.jsonl:1: .*template refused this chat: no"),
        ("a.jsonl", json.dumps(OPENAI), UNSTABLE, r"a\.jsonl:1: turn 1: .*\(think\).*{% generation %}"),
        ("a.json", '{"text": "x"}', None, r"a\.json: it is an object; expected a list; its items are objects"),
        ("a.txt", b"\xff\xfe", None, r"a\.txt: not a text in UTF-8 .*byte 0"),
        ("a.txt", "", None, r"a\.txt: nothing to learn"),
        ("a.txt", None, None, r"a\.txt: no such file"),
    ],
)
def test_malformed_data_are_refused_by_name(tmp_path, name, content, template, expected):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TrainError, match=expected):
        read_windows([tmp_path / name], with_template(template), seq_len=16, seed=0)


def test_sizes_are_checked_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "MAX_WHOLE", 20)
    monkeypatch.setattr(data, "MAX_LINE", 20)
    words = "the cat sat on the mat"
    (tmp_path / "long.txt").write_text(words)
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": "a"}) + "\n" + json.dumps({"text": words}) + "\n")
    long_line = r"long\.jsonl:2: a line of more than 20 bytes"
    for name, message in (("long.txt", "22 bytes; expected at most 20"), ("long.jsonl", long_line)):
        with pytest.raises(TrainError, match=message):
            read_windows([tmp_path / name], with_template(None), seq_len=16, seed=0)


def test_windows_hold_every_token_once_and_targets_stay_within_a_document(tmp_path):
    files = [tmp_path / f"{n}.txt" for n in range(5)]
    for n, file in enumerate(files):
        file.write_text(f"number {n} is good " * (n + 1), encoding="utf-8")
    windows = read_windows(files, tokenizer(), seq_len=16, seed=1)
    assert learnt_texts(windows) == sorted(file.read_text() + "</s>" for file in files)
    for ahead in (1, 3):
        learnt = windows.learnt_from(ahead)
        for row, position in learnt.nonzero().tolist():
            assert windows.document[row, position] == windows.document[row, position + ahead]
        assert learnt.sum() > 0
    train, held_out = windows.hold_out(0.2)
    assert torch.equal(torch.cat([train.ids, held_out.ids]), windows.ids)


def test_batches_follow_from_seed_and_step_and_cover_each_epoch():
    windows = Windows(*(torch.ones(7, 4, dtype=kind) for kind in (torch.int32, torch.bool, torch.int32)))
    orders = [windows.order(step, 3, seed=5) for step in range(14)]
    for epoch in torch.cat(orders).split(7):
        assert sorted(epoch.tolist()) == list(range(7))
    assert torch.equal(windows.order(9, 3, seed=5), orders[9])
    assert not torch.equal(torch.cat(orders[:2]), torch.cat([windows.order(step, 3, seed=6) for step in range(2)]))


def test_prompts_end_before_a_token_to_learn():
    ids = torch.arange(40, dtype=torch.int32).view(2, 20)
    learn = torch.zeros(2, 20, dtype=torch.bool)
    learn[1, 12:14] = True
    prompts = Windows(ids, learn, torch.zeros_like(ids)).prompts(50, 5, seeded(0, 0))
    assert {tuple(row) for row in prompts.tolist()} == {tuple(range(27, 32)), tuple(range(28, 33))}


def test_sampled_texts_are_learnt_up_to_their_end():
    ids = torch.tensor([[5, EOS, 7, 8, EOS, 9], [5, 6, 7, 8, 9, 9]])
    learn = sampled_windows(ids, 2, [EOS]).learn
    assert learn.int().tolist() == [[0, 0, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1]]
