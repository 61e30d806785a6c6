"""``specexport chat``: at a real pseudo-terminal, from a pipe, and what it says equals ``LLM.chat``'s answers."""

import io
import json
import os
import re
import sys
from pathlib import Path

import pytest

from specexport import LLM, SamplingParams
from specexport.cli import main
from specexport.commands.chat import Conversation
from specexport.commands.terminal import _History, read_message
from specexport.contract.errors import RequestError
from specexport.frontend import Frontend
from tests.fixtures import Bundles
from tests.serving import with_chat_template
from tests.typed import ALT_ENTER, CTRL_C, CTRL_D, ENTER, UP, Typed, typed

GREEDY = ["--temperature", "0", "--threads", "1", "--no-calibrate"]
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{% endfor %}"
)
QUESTIONS = ["one two three", "four", "five six"]


@pytest.fixture(scope="module")
def folder(bundle: Bundles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_chat_template(bundle("llama-near"), tmp_path_factory.mktemp("chat") / "tiny")


def answers(folder: Path, questions: list[str], most: int, system: str = "") -> list[str]:
    """What ``LLM.chat`` answers, turn by turn."""
    messages = [{"role": "system", "content": system}] if system else []
    with LLM(bundle=folder, threads=1, calibrate=False) as llm:
        for question in questions:
            messages.append({"role": "user", "content": question})
            (output,) = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=most), use_tqdm=False)
            messages.append({"role": "assistant", "content": output.outputs[0].text})
    return [message["content"] for message in messages if message["role"] == "assistant"]


def piped(
    text: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a chat whose messages come from a pipe."""
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    code = main(["chat", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# --- at a terminal ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("editor", [True, False])
def test_terminal_turns_equal_llm_chat(folder, tmp_path, editor):
    """With prompt_toolkit, and in a dumb terminal of 40 columns without colours."""
    plain = {} if editor else {"TERM": "dumb", "NO_COLOR": "1"}
    cache = {"SPECEXPORT_CACHE": str(tmp_path / "cache")}
    words = ["chat", str(folder), *GREEDY, "-n", "24", "--system", "Be brief."]
    expected = answers(folder, QUESTIONS, 24, "Be brief.")
    with typed(words, columns=80 if editor else 40, cwd=tmp_path, **cache, **plain) as chat:
        chat.expect("lists")  # a word, as a long path may break the line anywhere
        for question in QUESTIONS:
            ask(chat, question)
        chat.expect(">")
        enter(chat, "/save chat.json")
        chat.expect("Saved 3 turns")
        chat.expect(">")
        enter(chat, "/quit")
        assert chat.ended() == 0
    saved = json.loads((tmp_path / "chat.json").read_text(encoding="utf-8"))["messages"]
    assert [message["content"] for message in saved if message["role"] == "assistant"] == expected
    assert saved[0] == {"role": "system", "content": "Be brief."}
    for answer in expected:
        assert printable(answer) in re.sub(r"[^ -~]", "", chat.text)
    if not editor:
        assert "\x1b" not in chat.raw
        notices = [line for line in chat.text.splitlines() if not any(letter in line for letter in ">�")]
        assert max(map(len, notices)) <= 40
    # What was typed is there in the next session, for its user alone.
    history = tmp_path / "cache" / "chat-history.jsonl"
    assert [json.loads(line) for line in history.read_text().splitlines()] == [*QUESTIONS, "/save chat.json", "/quit"]
    assert history.stat().st_mode & 0o777 == 0o600


def test_a_torn_line_of_the_history_is_left_out(tmp_path):
    file = tmp_path / "chat-history.jsonl"
    file.write_text('"one"\n"tw\n"three"\n')
    assert _History(file).messages == ["one", "three"]
    file.write_text('"one"\n' * 3000)
    file.chmod(0o600)
    assert len(_History(file).messages) == len(file.read_text().splitlines()) == 1000
    assert file.stat().st_mode & 0o777 == 0o600


def test_the_editor_has_history_and_several_lines(folder, tmp_path):
    words = ["chat", str(folder), *GREEDY, "-n", "4"]
    for session in range(2):
        with typed(words, cwd=tmp_path, SPECEXPORT_CACHE=str(tmp_path)) as chat:
            chat.expect(">")
            if session:
                chat.type(UP + UP)  # past the command
                chat.expect("two")
                enter(chat, "")
            else:
                enter(chat, f"one{ALT_ENTER}two")
            chat.expect("a second")
            chat.expect(">")
            enter(chat, f"/save {session}.json")
            chat.expect("Saved 1 turn")
            leave(chat)
    document = [json.loads((tmp_path / f"{session}.json").read_text())["messages"] for session in range(2)]
    assert document[0] == document[1]
    assert document[0][0]["content"] == "one\ntwo"


@pytest.mark.parametrize("terminal", ["xterm-256color", "dumb"])
def test_a_message_of_several_lines_is_one_in_the_history(folder, tmp_path, terminal):
    """With prompt_toolkit and with readline."""
    words = ["chat", str(folder), *GREEDY, "-n", "4"]
    with typed(words, cwd=tmp_path, SPECEXPORT_CACHE=str(tmp_path), TERM=terminal) as chat:
        chat.expect(">")
        enter(chat, '"""one')
        chat.expect("\n.")
        enter(chat, 'two"""')
        chat.expect("a second")
        chat.expect(">")
        enter(chat, "\x10")  # Ctrl-P, the message before
        chat.expect("a second")
        leave(chat)
    history = (tmp_path / "chat-history.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in history] == ["one\ntwo", "one\ntwo"]


SLOW = """
import time
from specexport.runtime.scheduler import Scheduler
next_chunk = Scheduler.next_chunk
Scheduler.next_chunk = lambda *arguments: time.sleep(0.02) or next_chunk(*arguments)
"""


def starting_with(program: str, folder: Path) -> dict[str, str]:
    """The variables of a Python that runs a program first."""
    (folder / "sitecustomize.py").write_text(program, encoding="utf-8")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), *sys.path])), "SPECEXPORT_CACHE": str(folder)}


def test_ctrl_c_stops_the_answer_and_then_leaves(folder, tmp_path):
    words = ["chat", str(folder), *GREEDY, "--no-speculation", "--min-tokens", "2000"]  # as many as the context holds
    with typed(words, cwd=tmp_path, **starting_with(SLOW, tmp_path)) as chat:
        chat.expect(">")
        chat.type("half a message")
        chat.expect("half a message")
        chat.type(CTRL_C)  # clears it
        enter(chat, "one")
        chat.expect("one")
        chat.expect("\n")
        assert len(chat.expect("e")) < 400  # an answer of hundreds of tokens has begun
        chat.type(CTRL_C)
        chat.expect("Stopped. ")
        chat.expect(">")
        enter(chat, "/stats")  # still there, and the part of the answer is a turn
        chat.expect("1 turn, 0 no longer read")
        chat.expect(">")
        chat.type(CTRL_C)
        chat.expect("Ctrl-C again leaves")
        chat.expect(">")
        chat.type(CTRL_C)
        assert chat.ended() == 130


def test_sigterm_restores_the_terminal(folder, tmp_path):
    with typed(["chat", str(folder), *GREEDY], SPECEXPORT_CACHE=str(tmp_path)) as chat:
        chat.expect(">")
        chat.type("half a message")
        chat.expect("half a message")
        chat.process.terminate()
        assert chat.ended() == 143
    assert chat.raw.rindex("\x1b[?2004l") > chat.raw.rindex("\x1b[?2004h")  # pastes in brackets are off again


def test_without_the_extra_a_line_says_how_to_install_it(folder, tmp_path):
    missing = starting_with("import sys; sys.modules['prompt_toolkit'] = None", tmp_path)
    with typed(["chat", str(folder), *GREEDY, "-n", "4"], **missing) as chat:
        chat.expect("pip install 'specexport[chat]'")
        ask(chat, "one")
        ask(chat, '"""one' + ENTER + 'two"""')
        leave(chat)
    assert chat.text.count("pip install") == 1


def test_a_plain_terminal_without_unicode(folder, tmp_path):
    (tmp_path / "chat-history.jsonl").write_text(f"{json.dumps('世界')}\n")
    environment = {"TERM": "dumb", "LC_ALL": "C", "SPECEXPORT_CACHE": str(tmp_path)}
    with typed(["chat", str(folder), *GREEDY, "-n", "4"], **environment) as chat:
        chat.expect("> ")
        chat.type("half a message")
        chat.expect("half a message")
        chat.interrupt("\nCtrl-C again leaves")
        ask(chat, "one")
        leave(chat)


def test_accepted_drafts_are_underlined(folder, tmp_path):
    words = ["chat", str(folder), *GREEDY, "-n", "24", "--show-drafts"]
    with typed(words, NO_COLOR="1", SPECEXPORT_CACHE=str(tmp_path)) as chat:
        text = ask(chat, "one two three")
        drafted = int(re.search(r"(\d+) of \d+ draft tokens", text)[1])
        leave(chat)
    underlined = re.findall(r"\x1b\[4m(.*?)\x1b\[24m", chat.raw, re.DOTALL)
    assert 0 < len(underlined) <= drafted  # a token may hold no whole character
    (answer,) = answers(folder, ["one two three"], 24)
    assert printable("".join(underlined)) != printable(answer)
    assert printable(answer) in re.sub(r"[^ -~]", "", chat.text)


# --- from a pipe ------------------------------------------------------------------------------------------------------


def test_each_line_of_a_pipe_is_a_message(folder, monkeypatch, capsys):
    text = 'one two three\r\n\nfour\n"""\nfive\nsix\n"""\nseven \\\neight'
    code, out, err = piped(text, [str(folder), *GREEDY, "-n", "16"], monkeypatch, capsys)
    expected = answers(folder, ["one two three", "four", "five\nsix", "seven \neight"], 16)
    assert (code, out) == (0, "".join(f"{answer}\n" for answer in expected))
    assert err.count(" a second, ") == 4
    assert "\x1b" not in out + err


def test_commands_affect_later_turns(folder, tmp_path, monkeypatch, capsys):
    file = tmp_path / "chat.json"
    text = (
        '/stats\n/system "Be brief."\none two three\n/reset\n/method plain\none two three\n/method\n/stats\n/system\n'
        f'/save {file}\n/save {file}\n/system ""\n/help\n /reset\n/etc/passwd\n/bye\nnever\n'
    )
    code, out, err = piped(text, [str(folder), *GREEDY, "-n", "8"], monkeypatch, capsys)
    (expected,) = answers(folder, ["one two three"], 8, "Be brief.")
    assert code == 0
    assert out.startswith(f"{expected}\n{expected}\n")  # plainly, too
    assert out.count("\n") - out.count(expected) * expected.count("\n") >= 4  # " /reset" and a path are messages
    assert "There is no answer yet." in err
    assert re.search(r"^\* +plain +[\d.]+ +1\.00$", err, re.MULTILINE)
    assert re.search(r"^ +auto +[\d.]+ +[\d.]+$", err, re.MULTILINE)
    assert re.search(r"^ +ngram +– +–$", err, re.MULTILINE)
    assert "hypothesis" not in err
    assert "from the prefix cache" in err
    assert "System prompt: Be brief." in err and "System prompt: none" in err
    assert "/system [TEXT]" in err
    turns = json.loads(file.read_text(encoding="utf-8"))["messages"]
    assert [message["role"] for message in turns] == ["system", "user", "assistant"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("/fly\n", "/fly: no such command; /help lists them"),
        *((f"/{name} x\n", f"/{name} x: expected /{name} alone") for name in ("reset", "stats", "help", "quit", "bye")),
        ("/method magic\n", "/method magic: expected one of auto, plain, draft_model"),
        ("/save\n", "expected /save FILE"),
        ("/save {exists}\n", "it exists already; name another file"),
        ("/save {exists}/inside\n", "name another file"),
        ('/save "{exists}"\n', "specexport.json: it exists already; name another file"),
        (f"/save {'n' * 300}\n", "File name too long; name another file"),
        ("/save a\0b\n", "name another file"),
        ("word " * 3000 + "\n", "the context holds 512 tokens"),
    ],
)
def test_errors_are_one_line(folder, text, message, monkeypatch, capsys):
    text = text.format(exists=folder / "specexport.json")
    code, out, err = piped(text, [str(folder), *GREEDY], monkeypatch, capsys)
    assert (code, out) == (1, "")
    assert message in err
    assert err.startswith("specexport: error: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--method", "magic"], "method is 'magic'"),
        (["--method", "ngram", "--no-speculation"], "--method was given with --no-speculation"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--threads", "0"], "--threads is 0"),
        (["--max-model-len", "4096"], "--max-model-len is 4096"),
    ],
)
def test_wrong_flags_are_named(folder, words, message, monkeypatch, capsys):
    code, out, err = piped("", [str(folder), *words], monkeypatch, capsys)
    assert (code, out) == (2, "")
    assert message in err


def test_a_model_that_knows_no_messages_is_named(bundle, monkeypatch, capsys):
    code, _, err = piped("one\n", [str(bundle("llama-near")), *GREEDY], monkeypatch, capsys)
    assert code == 1
    assert "the model has no chat template" in err
    assert "specexport run" in err


@pytest.mark.exporter
@pytest.mark.parametrize("command", [["chat"], ["run", "--chat", "--prompt", "one"]])
def test_a_model_that_knows_no_messages_is_not_built(tmp_path, command, monkeypatch, cli):
    from tests.checkpoints import make_checkpoint

    monkeypatch.setenv("SPECEXPORT_CACHE", str(tmp_path / "cache"))
    model = str(make_checkpoint(tmp_path / "model", "llama"))
    printed = cli(*command, model, status=1)
    assert printed.err.endswith(
        f"specexport: error: {model}: the model has no chat template, so it cannot read messages; continue texts with: "
        f"specexport run {model}\n"
    )
    assert not any((tmp_path / "cache" / "bundles").iterdir())


def test_run_answers_a_message(folder, monkeypatch, cli):
    expected = answers(folder, ["one two three"], 16)[0]
    monkeypatch.setattr("sys.stdin", io.StringIO("one two three\n"))
    for words in (["--prompt", "one two three"], []):
        assert cli("run", folder, "--chat", *words, "-n", "16", *GREEDY).out == f"{expected}\n"
    result = cli("run", folder, "--chat", "--prompt", "one", "--json", "--ignore-eos", *GREEDY).json
    assert result["stats"]["prompt_tokens"] + len(result["token_ids"]) == 512  # to the end of the context
    printed = cli("run", folder, "--chat", "--prompt", "one", "--prompt-embeds", "x.npy", status=2)
    assert "--prompt-embeds was given with --chat" in printed.err


# --- what outgrows the context ----------------------------------------------------------------------------------------


def test_a_conversation_outgrows_its_context(folder, monkeypatch, capsys):
    text = "".join(f"message number {number}\n" for number in range(24)) + "/stats\n"
    words = [str(folder), *GREEDY, "-n", "8", "--system", "Be brief."]
    code, _, err = piped(text, words, monkeypatch, capsys)
    assert code == 0
    assert "has outgrown the context of 512 tokens: the model no longer reads its first " in err
    assert 1 <= err.count("outgrown") < 6  # turns are left out several at once, so that the prefix cache serves
    assert re.search(r"24 turns, [1-9]\d* no longer read", err)


def test_the_last_turns_and_the_system_prompt_stay(folder):
    frontend = Frontend.open(bundle=folder, threads=1, max_model_len=256, calibrate=False)
    try:
        conversation = Conversation(frontend, frontend.engine.params(None, temperature=0.0), system="Be brief.")
        for number in range(20):
            conversation.add(f"question {number}", f"answer {number}")
        with conversation.stream("the last") as stream:
            read = frontend.engine.tokenizer.decode(stream.tokens)
            assert "system: Be brief." in read and "answer 19" in read and "the last" in read
            assert "question 0" not in read
            assert len(stream.tokens) <= 128
        assert 0 < conversation.unread < 20
        unread = conversation.unread
        with pytest.raises(RequestError, match="the context holds 256"):
            conversation.stream("much " * 200)
        assert conversation.unread == unread  # that question is not part of it
        conversation.reset()
        with conversation.stream("anew") as stream:
            assert "answer" not in frontend.engine.tokenizer.decode(stream.tokens)
    finally:
        frontend.close()


def test_a_template_without_system_prompts_refuses_one_at_once(bundle, tmp_path, monkeypatch, capsys):
    strict = with_chat_template(bundle("llama-near"), tmp_path / "strict", NO_SYSTEM + "{{ messages[-1].content }}")
    for text, words in (("one\n/system Be brief.\n", []), ("one\n", ["--system", "Be brief."])):
        code, out, err = piped(text, [str(strict), *GREEDY, "-n", "4", *words], monkeypatch, capsys)
        assert code == 1
        assert "refuses them: no system role" in err
        assert bool(out) is not bool(words)


def test_messages_of_several_lines():
    def read(*lines: str) -> str:
        inputs = iter(lines)

        def one(_: str) -> str:
            try:
                return next(inputs)
            except StopIteration:
                raise EOFError from None

        return read_message(one)

    assert read("a") == "a"
    assert read("a\\", "b\\", "c") == "a\nb\nc"
    assert read('"""a', "", "b", '"""') == "a\n\nb"
    assert read('"""a"""') == "a"
    assert read('"""a', "b") == "a\nb"  # the end is an end
    with pytest.raises(EOFError):
        read()


def enter(chat: Typed, message: str) -> None:
    chat.type(message + ENTER)


def ask(chat: Typed, question: str) -> str:
    """Asks, and waits for the answer's end: all that was written meanwhile."""
    chat.expect(">")
    enter(chat, question)
    return chat.expect("a second") + chat.expect("\n")


def leave(chat: Typed) -> None:
    chat.expect(">")
    chat.type(CTRL_D)
    assert chat.ended() == 0


def printable(text: str) -> str:
    return re.sub(r"[^ -~]", "", text)
