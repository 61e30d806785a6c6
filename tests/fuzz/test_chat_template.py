"""Chat templates of any kind: each renders, is refused or is stopped, in a line; none hangs or takes all memory."""

from typing import Any

import pytest
from hypothesis import strategies as st

from specexport.contract.errors import BundleError, RequestError
from specexport.runtime.chat import ChatTemplate
from specexport.runtime.chat_process import LONGEST
from tests.serving import TEMPLATE

CHAT: list[dict[str, Any]] = [{"role": "user", "content": "one"}, {"role": "assistant", "content": None}]
_NUMBERS = st.sampled_from(["0", "-1", "3", "9999", "10 ** 9", "10 ** 30"])
_ATOMS = (
    st.sampled_from(
        ["messages", "messages[0]", "m.content", "loop", "self", "nothing", "bos_token", "true", "none", "''"]
    )
    | st.sampled_from(["range", "namespace", "raise_exception", "strftime_now", "lipsum", "cycler", "dict"])
    | _NUMBERS
)
_FILTERS = (
    st.sampled_from(["tojson", "length", "list", "join", "upper", "center(N)", "indent(N)", "tojson(indent=N)"])
    | st.sampled_from(["batch(N)", "map('upper')", "sort", "reverse", "wordwrap(N)", "format(N)", "sum", "random"])
    | st.sampled_from(["attr('__class__')", "selectattr('role')", "string"])
)


def _larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    binary = st.sampled_from(["+", "*", "**", "~", "%", "//", "in", "==", "and"])
    return (
        st.tuples(inner, binary, inner).map(" ".join).map("({})".format)
        | st.tuples(inner, _FILTERS, _NUMBERS).map(lambda of: f"{of[0]} | {of[1].replace('N', of[2])}")
        | st.tuples(inner, inner).map(lambda of: f"{of[0]}({of[1]})")
        | st.tuples(inner, inner).map(lambda of: f"{of[0]}[{of[1]}]")
        | st.tuples(
            inner, st.sampled_from(["__class__", "append(1)", "items()", "replace('', 'ab')", "ljust(9999)"])
        ).map(".".join)
    )


EXPRESSIONS = st.recursive(_ATOMS, _larger, max_leaves=5)


def _nested(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return (
        st.lists(inner, min_size=2, max_size=3).map("".join)
        | st.tuples(EXPRESSIONS, inner).map(lambda of: f"{{% for m in {of[0]} %}}{of[1]}{{% endfor %}}")
        | st.tuples(_NUMBERS, inner).map(lambda of: f"{{% for i in range({of[0]}) %}}{of[1]}{{% endfor %}}")
        | st.tuples(EXPRESSIONS, inner).map(lambda of: f"{{% if {of[0]} %}}{of[1]}{{% endif %}}")
        | st.tuples(EXPRESSIONS, inner).map(lambda of: f"{{% set x = {of[0]} %}}{of[1]}{{{{ x }}}}")
        | inner.map(lambda of: f"{{% macro f() %}}{of}{{{{ f() }}}}{{% endmacro %}}{{{{ f() }}}}")
        | inner.map(lambda of: f"{{% generation %}}{of}{{% endgeneration %}}")
    )


_PIECES = st.text(max_size=10) | EXPRESSIONS.map("{{{{ {} }}}}".format) | st.sampled_from(["a", "{{ messages }}"])
TEMPLATES = st.recursive(_PIECES, _nested, max_leaves=6)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specexport.runtime.chat.SECONDS", 0.5)


def _check(source: str) -> str:
    try:
        text = ChatTemplate(source, {"bos_token": "<s>"}).render(CHAT)
    except (RequestError, BundleError) as error:
        errors = str(error)
        assert "chat template" in errors
        assert "\n" not in errors
        assert len(errors) < 600
        return "stopped" if "does not end" in errors else "refused"
    assert len(text) <= LONGEST
    return "rendered"


@pytest.mark.usefixtures("impatient")
def test_chat_templates(fuzz):
    fuzz("chat templates", TEMPLATES, _check, 60)


@pytest.mark.usefixtures("impatient")
def test_a_chat_template_with_something_in_it(fuzz):
    places = [at for at, letter in enumerate(TEMPLATE) if letter in "{}% "]
    harmed = st.tuples(st.sampled_from(places), TEMPLATES).map(lambda of: TEMPLATE[: of[0]] + of[1] + TEMPLATE[of[0] :])
    fuzz("chat templates", harmed, _check, 40)
