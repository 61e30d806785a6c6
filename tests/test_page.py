"""The page at ``/``, in a real browser: conversations, texts, and what streams tell it of their steps."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from specexport.cli import parser
from specexport.commands.flags import from_flags
from specexport.contract.tree import TokenTree
from specexport.options import ServerOptions
from specexport.runtime import Chunk, Engine, SamplingParams
from tests.browser import CHROMIUM, Browser, browser
from tests.fixtures import Bundles
from tests.serving import HERMES, Served, served, with_chat_template

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
PROMPT = "one two three"
GREEDY = {"temperature": 0, "max_tokens": 64, "ignore_eos": True, "include_speculation": True}
STEPS = {"stream": True, "include_steps": True, "stream_options": {"include_usage": True}}
TAB, ENTER, ESCAPE, END, LEFT = 9, 13, 27, 35, 37
FILES = {"/", "/page.css", "/markdown.js", "/tree.js", "/pane.js", "/page.js"}


@pytest.fixture(scope="module")
def tiny(bundle: Bundles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server over a bundle that verifies trees."""
    with served(with_chat_template(bundle("qwen3-medusa"), tmp_path_factory.mktemp("page") / "bundle")) as running:
        yield running


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as window:
        yield window


@pytest.fixture
def talk(tiny: Served, window: Browser) -> Browser:
    """The page, loaded anew, in a window of a desk's size: for a conversation, as there is a chat template."""
    window.shape(1100, 900)
    window.asked.clear()
    window.complaints.clear()
    window.open(f"{tiny.url}/")
    window.until("find('model').textContent.includes('context of 512')")
    window.run("find('temperature').value = 0; find('max-tokens').value = 24")
    return window


@pytest.fixture
def page(talk: Browser) -> Browser:
    """The page for a text to continue."""
    talk.run("find('mode').value = 'text'; find('mode').dispatchEvent(new Event('change'))")
    return talk


# --- what a stream says of its steps ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-near", "qwen3-medusa", "qwen3-lookup", "dice-tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_chunk_says_where_its_tokens_come_from(bundle, name, temperature):
    params = SamplingParams(temperature=temperature, max_tokens=120, ignore_eos=True, seed=5)
    with Engine.load(bundle(name), threads=1) as engine, engine.stream([5, 6, 7, 5, 6, 7, 5, 6], params) as stream:
        chunks: list[Chunk] = []
        details = 0
        for chunk in stream:
            chunks.append(chunk)
            assert "".join(chunk.pieces) == chunk.text
            assert len(chunk.pieces) == len(chunk.token_ids)
            step = chunk.verified
            if step is None:
                assert len(chunk.token_ids) == 1
                continue
            nodes = dict(enumerate(step.drafted, start=1))
            assert [step.tree.parents[node] for node in step.path] == [0, *step.path][: len(step.path)]
            whole = [nodes[node] for node in step.path]
            assert list(chunk.token_ids[: len(whole)]) == whole[: len(chunk.token_ids)]
            details += len(step.path)
        assert any(chunk.verified for chunk in chunks)
        assert details == stream.stats.accepted > 0


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_says_where_its_tokens_come_from(tiny, chat):
    arguments: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": PROMPT}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    events = tiny.events(path, arguments | GREEDY | STEPS)
    choices = [choice for event in events for choice in event["choices"]]
    steps = [choice["step"] for choice in choices]
    assert all(len(step["tokens"]) >= 1 for step in steps)
    ended = [step["seconds"] for step in steps]
    assert 0 < ended[0] < ended[-1] and ended == sorted(ended)
    for choice in choices:
        output = choice["delta"].get("content", "") if chat else choice["text"]
        assert "".join(text for text, _ in choice["step"]["tokens"]) == output
    for step in steps:
        tree = TokenTree(tuple(step["parents"]))
        assert len(step["drafted"]) == len(tree) - 1
        assert all(0 < node < len(tree) for node in step["path"])
        positions = [position for _, position in step["tokens"]]
        assert positions == [*range(1, len(step["path"]) + 1), 0][: len(positions)]
    usage = events[-1]["usage"]
    assert sum(len(step["tokens"]) for step in steps) == usage["completion_tokens"] == 64
    assert sum(len(step["drafted"]) for step in steps) == usage["speculation"]["num_draft_tokens"]
    assert sum(len(step["path"]) for step in steps) == usage["speculation"]["num_accepted_tokens"] > 0


def test_a_plain_stream_has_the_targets_own_tokens(tiny):
    arguments = {"prompt": PROMPT, "speculative": {"num_speculative_tokens": 0}}
    choices = [
        choice for event in tiny.events("/v1/completions", arguments | GREEDY | STEPS) for choice in event["choices"]
    ]
    assert len(choices) == 64
    for choice in choices:
        (token,) = choice["step"]["tokens"]
        assert token[1] == 0
        assert choice["step"].pop("seconds") > 0
        assert choice["step"] == {"tokens": [token], "parents": [-1], "drafted": [], "path": []}


def test_steps_of_tool_calls_are_reported(bundle, tmp_path):
    """A call's deltas wait until they are clear; the steps do not."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    arguments = {"messages": [{"role": "user", "content": "a"}], "tools": [tool], "tool_choice": "required"}
    with served(with_chat_template(bundle("llama-near"), tmp_path / "bundle", HERMES)) as running:
        events = running.events("/v1/chat/completions", arguments | STEPS | {"max_tokens": 40, "temperature": 0})
    steps = [choice["step"] for event in events for choice in event["choices"]]
    assert sum(len(step["tokens"]) for step in steps) == events[-1]["usage"]["completion_tokens"]


def test_steps_are_reported_only_on_request(tiny):
    assert "step" not in tiny.events("/v1/completions", {"prompt": "a", "stream": True})[0]["choices"][0]


# --- how the page is served -------------------------------------------------------------------------------------------


def test_the_page_may_load_nothing_from_elsewhere(tiny):
    kinds = {"/": "text/html", "css": "text/css", "js": "text/javascript"}
    for path in FILES:
        answer, kind = httpx.get(tiny.url + path), kinds[path.rpartition(".")[2]]
        assert answer.status_code == 200
        assert answer.headers["content-type"] == f"{kind}; charset=utf-8"
        assert answer.headers["x-content-type-options"] == "nosniff"
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert policy == {
            "default-src": "'none'",
            "script-src": "'self'",
            "style-src": "'self'",
            "connect-src": "'self'",
            "img-src": "'self' data:",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
        }
        assert "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in answer.text
    assert not set(httpx.get(f"{tiny.url}/openapi.json").json()["paths"]) & FILES


def test_a_key_is_needed_for_all_but_the_page_and_it_can_be_left_out(bundle):
    with served(bundle("llama-near"), api_keys=["secret"]) as running:
        paths = ("/", "/page.js", "/v1/models")
        assert [httpx.get(running.url + path).status_code for path in paths] == [200, 200, 401]
    with served(bundle("llama-near"), page=False) as running:
        assert [httpx.get(running.url + path).status_code for path in ("/", "/page.js", "/page.css")] == [404] * 3
    for flags, shown in ([], True), (["--no-page"], False):
        assert from_flags(ServerOptions, parser().parse_args(["serve", "a", *flags])).page is shown


# --- in a browser -----------------------------------------------------------------------------------------------------


@needs_browser
def test_the_page_shows_each_tokens_method(tiny, page):
    page.run("find('max-tokens').value = 64; find('beside').click()")
    run(page, PROMPT)
    page.until("find('status').textContent.startsWith('Done')")
    expected = tiny.events("/v1/completions", {"prompt": PROMPT, "max_tokens": 64, "temperature": 0} | STEPS)
    tokens = [token for event in expected for choice in event["choices"] for token in choice["step"]["tokens"]]
    texts = page.run("[...document.querySelectorAll('.output')].map((one) => one.textContent)")
    assert texts == ["".join(text for text, _ in tokens)] * 2
    shown = page.run(
        "[...document.querySelectorAll('.output')[0].querySelectorAll('.step > span')]"
        ".map((one) => [one.textContent, Number(one.dataset.position ?? 0), one.className])"
    )
    assert shown == [[text, at, f"p{min(at, 6)}" if at else ""] for text, at in tokens if text]
    assert {at for _, at, _ in shown} >= {0, 1, 2}
    # Four figures each; the plain one has a token a step.
    fast, plain = page.run(
        "[...document.querySelectorAll('section')].map((one) => "
        "[...one.querySelectorAll('dd')].map((dd) => dd.textContent))"
    )
    assert [float(fast[0]) > 0, float(fast[1]) > 1, fast[2].endswith("%"), fast[3]] == [True, True, True, "64"]
    assert plain[1:] == ["1.00", "none", "64"]
    assert page.run("find('status').textContent").endswith("The texts are the same.")
    # Colours tell positions apart, and so do underlines and numbers.
    looks = page.run(
        "['p1', 'p2', 'p3'].map((name) => { const look = getComputedStyle(document.querySelector(`.step > .${name}`));"
        "return [look.color, look.textDecorationLine] })"
    )
    assert len({colour for colour, _ in looks}) == 3
    assert {line for _, line in looks} == {"underline"}
    assert page.run("getComputedStyle(document.querySelector('.step > .p2'), '::after').content") == '"2"'
    page.run("find('positions').click()")
    assert page.run("getComputedStyle(document.querySelector('.step > .p2'), '::after').content") == "none"
    assert page.complaints == []
    assert {url.removeprefix(tiny.url) for url in page.asked} == {*FILES, "/v1/models", "/v1/completions"}


@needs_browser
def test_a_steps_tree_is_shown_to_mouse_and_keyboard(tiny, page):
    run(page, PROMPT)
    page.until("find('status').textContent.startsWith('Done')")
    arguments = {"prompt": PROMPT, "max_tokens": 128, "temperature": 0} | STEPS
    steps = [choice["step"] for event in tiny.events("/v1/completions", arguments) for choice in event["choices"]]
    at = next(at for at, step in enumerate(steps) if len(step["path"]) > 1)

    def shows(number: int) -> None:
        step = steps[number]
        assert f"step {number + 1}: " in page.run("find('caption').textContent")
        nodes, kept = page.run("['', '.kept'].map((mark) => document.querySelectorAll(`#tree g${mark}`).length)")
        bonus = len(step["tokens"]) > len(step["path"])
        assert (nodes, kept) == (len(step["parents"]) + bonus, 1 + len(step["path"]) + bonus)

    page.hover(f".step:nth-child({at + 1}) > span")
    page.until(f"find('caption').textContent.includes('step {at + 1}:')")
    shows(at)
    # By keyboard: Tab from the form to the text, End, an arrow.
    page.run("find('run').focus()")
    for _ in range(4):
        if not page.run("document.activeElement.matches('.step')"):
            page.press("Tab", TAB)
    assert page.run("document.activeElement.matches('.step')")
    assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.press("End", END)
    shows(len(steps) - 1)
    page.press("ArrowLeft", LEFT)
    shows(len(steps) - 2)
    assert f"step {len(steps) - 1}:" in page.run("find('status').textContent")
    # In the tree: from the text to its first accepted child and back, to siblings, to the end; and to the next step.
    page.run(f"document.querySelector('.step:nth-child({at + 1})').click(); find('tree').focus()")
    step, first = steps[at], steps[at]["path"][0]
    visited = []
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowLeft", "End", "Home", "ArrowRight", "ArrowDown"):
        page.press(key, 0)
        visited.append(page.run("trees.node"))
        assert page.run("document.querySelectorAll('#tree g.current').length") == 1
    reference = len(step["parents"])
    assert visited[:6] == [first, step["path"][1], first, 0, reference, 0]
    assert visited[6] == first and step["parents"][visited[7]] in (0, *step["parents"])
    page.press("Home", 0)
    page.press("ArrowRight", 0)
    assert page.run("find('node').textContent").endswith("draft token at position 1, accepted.")
    rejected = next(node for node in range(1, len(step["parents"])) if node not in step["path"])
    page.run(f"trees.move({rejected})")
    assert page.run("find('node').textContent").endswith("rejected.")
    page.press("PageDown", 0)
    shows(at + 1)
    assert page.run("document.activeElement.id") == "tree"
    assert page.complaints == []


@needs_browser
def test_keys_run_and_stop(tiny, page):
    page.run("find('prompt').focus(); find('max-tokens').value = 480; find('drafts').value = 0")
    page.call("Input.insertText", text=PROMPT)
    page.press("Enter", ENTER, "\r")  # a line's end
    page.press("Enter", ENTER, "\r", modifiers=2)
    page.until("document.querySelectorAll('.step').length > 0 || find('status').textContent.startsWith('Done')")
    page.press("Escape", ESCAPE)
    page.until("find('stop').disabled")
    tiny.idle()
    assert page.run("find('status').textContent").startswith(("Stopped", "Done"))
    # What the server refuses is said.
    page.run("find('max-tokens').value = 8; find('temperature').value = 0; find('drafts').value = 99")
    page.run("find('run').click()")
    page.until("!find('error').hidden")
    assert "num_speculative_tokens" in page.run("find('error').textContent")


@needs_browser
def test_every_control_has_a_name_and_a_phone_shows_all(page):
    names = page.run("[...document.querySelectorAll('input, select, textarea')].map((one) => one.labels.length)")
    assert names and all(names)
    assert page.run("[find('status').getAttribute('role'), find('error').getAttribute('role')]") == ["status", "alert"]
    backs = set()
    for dark in (False, True):
        page.shape(320, 700, mobile=True, dark=dark)
        run(page, PROMPT)
        page.until("find('status').textContent.startsWith('Done')")
        page.run("document.querySelector('.step:last-child').focus()")
        assert page.run("document.documentElement.scrollWidth") == 320
        heights = "[...document.querySelectorAll('#form button')].map((one) => one.offsetHeight).filter(Boolean)"
        assert min(page.run(heights)) >= 40
        for mark in (".p1", ".p2", ".p3", "#status", ".legend", ".hint"):
            colours = page.run(
                f"[getComputedStyle(document.querySelector('{mark}')).color, "
                "getComputedStyle(document.querySelector('section')).backgroundColor]"
            )
            assert contrast(*colours) >= 4.5, (mark, dark, colours)
        backs.add(page.run("getComputedStyle(document.body).backgroundColor"))
    assert len(backs) == 2


@needs_browser
def test_the_page_asks_for_a_key_and_keeps_it_to_itself(bundle, window):
    window.shape(1100, 900)
    with served(bundle("llama-near"), api_keys=["secret"]) as running:
        window.open(f"{running.url}/")
        window.until("!find('key-form').hidden")
        assert window.run("find('key-note').textContent") == "The server asks for an API key."
        assert window.run("find('error').hidden && document.activeElement.id === 'key'")
        for inputs, hidden in (("wrong", False), ("secret", True)):
            window.run(f"find('key-note').textContent = ''; find('key').value = '{inputs}'")
            window.run("find('key-form').querySelector('button').click()")
            window.until("find('key-note').textContent || find('model').textContent !== '…'")
            assert window.run("find('key-form').hidden") is hidden
            assert hidden or window.run("find('key-note').textContent") == "The server does not accept this key."
        # Without a chat template it is a text that is continued.
        shown = window.run("[find('mode').value, find('modes').hidden, find('run').textContent]")
        assert shown == ["text", True, "Run"]
        assert window.run("getComputedStyle(find('system')).display") == "none"
        run(window, PROMPT)
        window.until("find('status').textContent.startsWith('Done')")
        window.run("key = 'old'")  # another key is asked for, not an error shown
        run(window, PROMPT)
        window.until("!find('key-form').hidden")
        assert window.run("find('error').hidden")
        kept = window.run(
            "[localStorage.length, sessionStorage.length, document.cookie, find('key').value, location.search]"
        )
        assert kept == [0, 0, "", "", ""]


@needs_browser
def test_panes_are_aligned_on_a_phone_and_on_a_desk(page):
    page.run("find('max-tokens').value = 32; find('beside').click()")
    run(page, PROMPT)
    page.until("find('status').textContent.startsWith('Done')")
    edges = (
        "[...document.querySelectorAll('section')].map((one) => [one, ...one.querySelectorAll('h2, dd, .output')]"
        ".map((part) => { const box = part.getBoundingClientRect(); return [box.left, box.width, box.top] }))"
    )
    for width, side in ((390, False), (1100, True)):
        page.shape(width, 900, mobile=not side)
        fast, plain = page.run(edges)
        assert page.run("document.documentElement.scrollWidth") == width
        if side:
            assert [top for *_, top in fast] == [top for *_, top in plain]
            assert fast[0][0] < plain[0][0]
        else:
            assert [part[:2] for part in fast] == [part[:2] for part in plain]
            assert fast[0][2] < plain[0][2]


@needs_browser
def test_a_conversation(tiny, talk):
    talk.run("find('system').value = 'Be brief.'")
    messages: list[dict[str, str]] = [{"role": "system", "content": "Be brief."}]
    for question in (PROMPT, "four"):
        messages.append({"role": "user", "content": question})
        talk.run("find('prompt').focus()")
        talk.call("Input.insertText", text=question)
        talk.press("Enter", ENTER, "\r")
        done(talk)
        messages.append({"role": "assistant", "content": answer(tiny, messages)})
    shown = "turns.flatMap((turn) => [turn.question, turn.answer])"
    assert talk.run(shown) == [message["content"] for message in messages[1:]]
    assert talk.run("find('prompt').value") == ""
    assert talk.run("[...document.querySelectorAll('.said')].map((one) => one.textContent)") == [PROMPT, "four"]
    # What streams is Markdown; the switch shows tokens and trees instead.
    displayed = "['markdown', 'output'].map((name) => getComputedStyle(document.querySelector(`.${name}`)).display)"
    assert talk.run(displayed) == ["block", "none"]
    talk.run("find('tokens').click()")
    assert talk.run(displayed) == ["none", "block"]
    assert talk.run("document.querySelector('.output').textContent") == messages[2]["content"]
    # Copy, edit, try again, and plain decoding beside it.
    talk.run("navigator.clipboard.writeText = async (text) => { window.copied = text }")
    talk.run("document.querySelector('section .copy').click()")
    talk.until("window.copied !== undefined")
    assert talk.run("window.copied") == messages[2]["content"]
    talk.run("document.querySelector('.edit').click()")
    assert talk.run("[find('prompt').value, turns.length]") == [PROMPT, 2]
    talk.press("Escape", ESCAPE)
    assert talk.run("[find('prompt').value, turns.length, find('asking').textContent]") == ["", 2, "Message"]
    talk.run("document.querySelector('.edit').click(); find('prompt').value = 'five'; find('run').click()")
    done(talk)
    edited = [messages[0], {"role": "user", "content": "five"}]
    assert talk.run(shown) == ["five", answer(tiny, edited)]
    talk.run("find('beside').click(); document.querySelector('.retry').click()")
    done(talk)
    assert talk.run(shown) == ["five", answer(tiny, edited)]
    assert talk.run("find('status').textContent").endswith("The texts are the same.")
    assert talk.run("document.querySelectorAll('section').length") == 2
    talk.run("find('reset').click()")
    assert talk.run("[turns.length, find('turns').children.length]") == [0, 0]
    assert talk.complaints == []


@needs_browser
def test_settings_reach_the_server(tiny, talk):
    talk.run(
        "find('temperature').value = 0.9; find('top-p').value = 0.8; find('seed').value = 7; find('drafts').value = 0"
    )
    run(talk, PROMPT)
    done(talk)
    sampled = {"temperature": 0.9, "top_p": 0.8, "seed": 7, "speculative": {"num_speculative_tokens": 0}}
    messages = [{"role": "user", "content": PROMPT}]
    assert talk.run("turns[0].answer") == answer(tiny, messages, **sampled)
    assert talk.run("turns[0].answer") != answer(tiny, messages, **sampled | {"seed": 8})


@needs_browser
def test_every_method_is_compared(tiny, talk):
    card = httpx.get(f"{tiny.url}/v1/models").json()["data"][0]
    assert (card["chat"], card["predictions"]) == (True, True)
    offered = ["", "plain", *(method["name"] for method in card["methods"]), "expected"]
    assert talk.run("[...find('method').options].map((one) => one.value)") == offered
    texts = set()
    for method in ("plain", *offered):
        choose = f"find('method').value = '{method}'; find('method').dispatchEvent(new Event('change'))"
        talk.run(f"find('reset').click(); {choose}")
        run(talk, PROMPT)
        done(talk)
        texts.add(talk.run("turns[0].answer"))
        talk.run("find('expected').value = turns[0].answer")
    assert len(texts) == 1
    for label in talk.run("[...find('method').options].map((one) => one.textContent)"):
        assert re.search(r": [\d.]+ tokens/s, [\d.]+ a step", label), label
        assert label.endswith("x plain") is not label.startswith("plain decoding")
    taken = talk.run("[gains.plain, gains.expected].map((gain) => gain.tokens / gain.steps)")
    assert taken[0] == 1 < taken[1]
    # An expected answer is a chat's alone.
    talk.run("find('mode').value = 'text'; find('mode').dispatchEvent(new Event('change'))")
    assert talk.run("[find('method').value, find('expecting').hidden]") == ["", True]


@needs_browser
def test_a_stopped_answer_is_kept_and_a_refused_question_returned(tiny, talk):
    talk.run("find('max-tokens').value = ''; find('drafts').value = 0")
    run(talk, PROMPT)
    talk.until("document.querySelectorAll('.step').length > 2 || find('status').textContent.startsWith('Done')")
    talk.run("find('stop').click()")
    done(talk)
    tiny.idle()
    assert talk.run("turns.length === 1 && turns[0].answer.length > 0")
    talk.run("find('drafts').value = 99")
    run(talk, "four")
    talk.until("!find('error').hidden")
    assert talk.run("[turns.length, find('prompt').value]") == [1, "four"]
    talk.run("find('error').hidden = true; document.querySelector('.edit').click(); find('prompt').value = 'five'")
    talk.run("find('run').click()")
    talk.until("!find('error').hidden")
    assert talk.run("[turns.length, turns[0].question, find('prompt').value, editing]") == [1, PROMPT, "five", 0]


@needs_browser
def test_what_goes_wrong_is_seen(tiny, talk):
    talk.shape(320, 400, mobile=True)
    box = "find('error').getBoundingClientRect()"
    for question in (PROMPT, "four"):
        talk.run("scrollTo(0, 0)")
        run(talk, question)
        done(talk)
        assert talk.run("scrollY > 0")  # down to the new turn
    talk.run(
        "window.fetched = fetch; window.fetch = async () => { throw new TypeError('Failed to fetch') }; scrollTo(0, 0)"
    )
    run(talk, "five")
    talk.until("!find('error').hidden")
    assert talk.run("find('error').textContent").startswith("the server cannot be reached")
    assert talk.run(f"[{box}.top >= 0, {box}.bottom <= innerHeight, find('prompt').value]") == [True, True, "five"]
    talk.run("fetch = fetched; find('settings').open = false; find('temperature').value = 9; find('run').click()")
    assert talk.run("[find('settings').open, find('prompt').value]") == [True, "five"]


@needs_browser
def test_long_conversations_drop_old_turns(talk):
    for number in range(8):
        run(talk, f"{number} " + "word " * 30)
        done(talk)
    assert talk.run("[turns.length, find('error').hidden]") == [8, True]
    assert 0 < talk.run("unread") < 8
    assert "no longer reads what is above" in talk.run("find('outgrown').textContent")
    assert talk.run("[...find('turns').children].indexOf(find('outgrown')) > 0")
    assert talk.run("messages('x').length") < 16


COPY = '<button type="button" class="copy">Copy</button>'
MARKDOWN = {
    "# One\n## Two #": "<h3>One</h3><h4>Two</h4>",
    "a **b** *c* __d__ _e_ ~~f~~": "<p>a <strong>b</strong> <em>c</em> <strong>d</strong> <em>e</em> <del>f</del></p>",
    "`g <h>` 2*3*4 snake_case_name": "<p><code>g &lt;h&gt;</code> 2*3*4 snake_case_name</p>",
    "one\ntwo\n\nthree \\*four\\*": "<p>one\ntwo</p><p>three *four*</p>",
    "- a\n- b\n  - c\n\n  d\n- e": "<ul><li>a</li><li>b<ul><li>c</li></ul><p>d</p></li><li>e</li></ul>",
    "3. a\n4. b": '<ol start="3"><li>a</li><li>b</li></ol>',
    "> a\n> > b": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>",
    "```py\nif a:\n    <b>\n```\nc": '<div class="code"><pre><code data-language="py">if a:\n    &lt;b&gt;</code></pre>'
    f"{COPY}</div><p>c</p>",
    "```\nunfinished": f'<div class="code"><pre><code>unfinished</code></pre>{COPY}</div>',
    "---": "<hr>",
    "a | b\n--|:-:\n1 | 2 \\| 3": '<div class="table"><table><thead><tr><th class="left">a</th>'
    '<th class="center">b</th></tr></thead><tbody><tr><td class="left">1</td><td class="center">2 | 3</td></tr></tbody>'
    "</table></div>",
    "<b onclick=x>y</b> <script>z()</script>": "<p>&lt;b onclick=x&gt;y&lt;/b&gt; &lt;script&gt;z()&lt;/script&gt;</p>",
    "[a](javascript:b) ![c](data:x) [d](JavaScript:x)": "<p>[a](javascript:b) ![c](data:x) [d](JavaScript:x)</p>",
    "[**a**](https://b.c/d_(e))": '<p><a href="https://b.c/d_(e)" target="_blank" rel="noopener noreferrer nofollow" '
    'title="https://b.c/d_(e)"><strong>a</strong></a></p>',
}


@needs_browser
def test_markdown_is_read_and_nothing_in_it_runs(talk):
    def read(text: str) -> str:
        result = f"const box = document.createElement('div'); box.append(markdown({json.dumps(text)}))"
        html: str = talk.run(f"(() => {{ {result}; return box.innerHTML }})()")
        return html

    assert {text: read(text) for text in MARKDOWN} == MARKDOWN
    assert '<a href="http://a.b/c"' in read("see http://a.b/c.") and read("see http://a.b/c.").endswith("</a>.</p>")
    # However odd a text is, it is there, and soon.
    for odd in (">", "- a ", "*", "`", "[", "|-", "**a ", "\n- a", "[a](", "\n> ", "  "):
        assert read(odd * 3000 + "end").count("end") == 1


def done(page: Browser) -> None:
    """Waits until an answer ends."""
    page.until("!aborter && find('status').textContent !== 'Running.'")


def answer(server: Served, messages: list[dict[str, str]], **local: Any) -> str:
    """What the API answers, of at most 24 tokens."""
    body = {"messages": messages, "max_tokens": 24, "temperature": 0} | local
    text = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    content: str = text["choices"][0]["message"]["content"]
    return content


def run(page: Browser, prompt: str) -> None:
    """Types a prompt and presses the button."""
    page.run(f"find('status').textContent = ''; find('prompt').value = {json.dumps(prompt)}; find('run').click()")


def contrast(first: str, other: str) -> float:
    """WCAG 2's contrast of two colours such as ``rgb(1, 2, 3)``."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted(map(luminance, (first, other)))
    return (high + 0.05) / (low + 0.05)
