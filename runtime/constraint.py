"""Constrains outputs to a JSON schema or a grammar, at every node of a tree.

p is then the target's distribution over the tokens that the grammar allows; other draft tokens have p = 0 and are
rejected.

A grammar describes the text that the caller receives. A token that appears in this text stands for its content, so a
marker such as ``<think>`` may come as one token or spelled out. A special token that is left out of the text matches
no text, and is allowed only where a grammar names it: ``<[id]>``, or ``<name>``.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from copy import copy
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from specexport.contract.errors import BackendError, RequestError
from specexport.contract.tree import TokenTree
from specexport.runtime import json_schema
from specexport.runtime.sampling import Floats, Ints

if TYPE_CHECKING:
    import llguidance

Bools = npt.NDArray[np.bool_]
Kind = Literal["json_schema", "grammar"]
"""The sampling parameters that constrain an output."""
_NAMES: dict[Kind, str] = {"json_schema": "JSON schema", "grammar": "grammar"}
MAX_SCHEMA = 1 << 16
"""Most characters of a JSON schema or a grammar."""
_STACK = 64 << 20
"""Bytes of stack to compile a grammar with. llguidance follows rules that use each other by recursion: as many as fit
into ``MAX_SCHEMA`` take 30 MB, and the 8 MB of most threads would overflow, which ends the process."""
_STACK_SIZE = threading.Lock()
"""Held while the stack size of new threads is changed."""
_CACHED = 8
"""Number of compiled grammars to keep."""
_MAX_REASON = 300
"""Most characters of llguidance's message in an error."""
_LARK = re.compile(
    r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|(?P<json>%json\s*)|(?P<name><[^<>\[\]\s][^<>\s]*>)'
)
"""Lark's strings, regular expressions and comments, which are skipped; JSON schemas and names of special tokens."""

Result = TypeVar("Result")


def _with_large_stack(run: Callable[[], Result]) -> Result:
    """Runs a function in a thread that has ``_STACK`` bytes of stack."""
    future: Future[Result] = Future()

    def work() -> None:
        try:
            future.set_result(run())
        except BaseException as error:
            future.set_exception(error)

    with _STACK_SIZE:
        before = threading.stack_size(_STACK)
        try:
            threading.Thread(target=work, daemon=True).start()
        except RuntimeError:  # from 3.12 on none starts once the main thread has ended
            return run()
        finally:
            threading.stack_size(before)
    return future.result()


class Grammars:
    """Creates constraints for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._vocabularies: dict[bool, llguidance.LLTokenizer] = {}
        self._lock = threading.Lock()
        self._compiled = lru_cache(maxsize=_CACHED)(self._compile)

    def prepare(self) -> None:
        """Reads the tokenizer ahead of the first constrained output: with a large vocabulary that takes seconds."""
        with contextlib.suppress(RequestError, BackendError):  # outputs that need it raise this error
            for skip_special_tokens in (True, False):
                self._vocabulary(skip_special_tokens, "")

    def constraint(
        self, param: Kind, text: str, *, stop_token_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> Constraint:
        """Constrains an output to JSON that matches a schema, or to a grammar in llguidance's dialect of Lark.

        Args:
            param: the sampling parameter that holds the text.
            text: the schema or the grammar.
            stop_token_ids: tokens that may end the output wherever the grammar allows an end.
            skip_special_tokens: whether the output's text leaves these tokens out.

        Raises:
            RequestError: the text is invalid, too large or unsupported, or llguidance cannot read the tokenizer.
            BackendError: llguidance is not installed.
        """
        matcher = self._compiled(param, text, skip_special_tokens).deep_copy()
        return Constraint(matcher, self._vocab_size, frozenset([*self._eos, *stop_token_ids]), param)

    def _compile(self, param: Kind, text: str, skip_special_tokens: bool) -> llguidance.LLMatcher:
        """Compiles a grammar; the latest ones are cached, as a request may have many outputs."""
        name = _NAMES[param]
        if len(text) > MAX_SCHEMA:  # all requests of a batch wait while its masks are computed
            raise RequestError(f"the {name} has {len(text)} characters; expected at most {MAX_SCHEMA}", param=param)
        vocabulary = self._vocabulary(skip_special_tokens, param)
        # Imported here: only grammar-constrained outputs need it.
        import llguidance

        def compiled() -> llguidance.LLMatcher:
            compile_lark = llguidance.LLMatcher.grammar_from_lark
            grammar = _json_grammar(text) if param == "json_schema" else compile_lark(self._lark(text))
            limits = llguidance.LLParserLimits(verbose_errors=False)
            return llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)

        try:
            matcher = _with_large_stack(compiled)
            if matcher.is_error():
                raise ValueError(matcher.get_error())
        except ValueError as error:  # such as an escape that is half a character
            raise RequestError(f"the {name} cannot be used: {_reason(str(error))}", param=param) from error
        return matcher

    def _lark(self, grammar: str) -> str:
        """Replaces tokens' names in a grammar by ids, as llguidance knows only some, and bounds its white space."""
        parts, at = list[str](), 0
        while match := _LARK.search(grammar, at):
            part, end = match[0], match.end()
            if match["name"] is not None and part in self._added_tokens:
                part = f"<[{self._added_tokens[part]}]>"
            elif match["json"] is not None:
                schema: Any = None
                with contextlib.suppress(ValueError, RecursionError):  # llguidance reports what is wrong
                    schema, end = json.JSONDecoder().raw_decode(grammar, end)
                if schema is not None:
                    part += json.dumps(json_schema.bound_whitespace(json_schema.prepared(schema)))
            parts += grammar[at : match.start()], part
            at = end
        return "".join([*parts, grammar[at:]])

    @cached_property
    def _added_tokens(self) -> dict[str, int]:
        return {token.content: id for id, token in self._tokenizer.get_added_tokens_decoder().items()}

    def _vocabulary(self, skip_special_tokens: bool, param: str) -> llguidance.LLTokenizer:
        """The tokenizer in llguidance's form, cached; reading it takes seconds."""
        try:
            import llguidance
        except ImportError as error:
            raise BackendError(
                f"JSON schemas and grammars need llguidance ({error}); install it with: pip install 'specexport[serve]'"
            ) from error
        if not self._eos:
            raise RequestError(
                "the model names no end-of-text token, so a constrained output could never end", param=param
            )
        with self._lock:
            if skip_special_tokens not in self._vocabularies:
                try:
                    tokens = self._tokens.of_text(skip_special_tokens)
                except ValueError as error:
                    decoder = self._tokenizer.decoder
                    kind = "no decoder" if decoder is None else f"the decoder {type(decoder).__name__}"
                    raise RequestError(
                        f"the model's tokenizer has {kind}, which llguidance cannot read, so its outputs cannot be "
                        "bound to a JSON schema, a grammar or calls of tools; leave these out",
                        param=param,
                    ) from error
                self._vocabularies[skip_special_tokens] = llguidance.LLTokenizer(
                    llguidance.TokenizerWrapper(tokens), n_vocab=len(tokens.tokens), eos_token=self._eos
                )
            return self._vocabularies[skip_special_tokens]

    @cached_property
    def _tokens(self) -> _Tokens:
        return _Tokens(self._tokenizer, self._vocab_size, self._eos)


class _Tokens:
    """A tokenizer in the form that llguidance reads, in which a token stands for what it adds to the visible text.

    From a tokenizer's file, llguidance would treat every added token that looks like ``<name>`` as special, and still
    expect it wherever a grammar's text holds its content.

    Attributes:
        tokens: the bytes of each token id below the width of the logits, which may exceed the tokenizer's vocabulary.
        eos_token_id: a token that ends a text.
        special_token_ids: tokens that add nothing to the text, or end it.

    Raises:
        ValueError: llguidance cannot read how the tokenizer decodes.
    """

    bos_token_id = None
    special_token_ids: list[int]
    _skips: bool

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: Sequence[int]) -> None:
        import llguidance

        self._eos = frozenset(eos)
        self.eos_token_id = min(eos)
        width = max(vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
        stated = json.loads(tokenizer.to_str(), object_hook=_without_prefix) | {"truncation": None, "padding": None}
        self._special = {token["id"] for token in stated["added_tokens"] if token["special"]}
        for token in stated["added_tokens"]:
            token["special"] = token["special"] or token["id"] in self._eos
        file, model = json.dumps(stated), stated["model"]
        if "merges" in model:  # as slow to read as the tokens, and needed for encoding alone
            model["merges"] = []
        reader = llguidance.LLTokenizer(json.dumps(stated), n_vocab=width, eos_token=list(eos), slices=[])
        self.tokens = [reader.decode_bytes([id]) for id in range(width)]
        unknown = set(range(width)).difference(tokenizer.get_vocab(with_added_tokens=True).values())
        self._never_text = unknown | self._eos
        self._tokenizer, self._lock = Tokenizer.from_str(file), threading.Lock()

    def of_text(self, skip_special_tokens: bool) -> _Tokens:
        """The tokenizer of texts that leave special tokens out, or of texts that do not."""
        tokens = copy(self)
        tokens._skips = skip_special_tokens
        tokens.special_token_ids = sorted(self._never_text | (self._special if skip_special_tokens else set()))
        return tokens

    def __call__(self, text: bytes) -> list[int]:
        """Encodes a text that continues another; special tokens are spelled out if left out, or if one would end it."""
        shown = text.decode(errors="replace")
        with self._lock:
            for plainly in (self._skips, True):
                self._tokenizer.encode_special_tokens = plainly
                ids = list(self._tokenizer.encode(shown, add_special_tokens=False).ids)
                if self._eos.isdisjoint(ids):
                    break
        return ids


def _without_prefix(part: dict[str, Any]) -> dict[str, Any]:
    """Changes a component of a tokenizer's file so that it puts no space before a text."""
    kind, never = part.get("type"), {"prepend_scheme": "never", "add_prefix_space": False}
    if kind == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    return part | {name: never[name] for name in never if name in part} if kind in ("Metaspace", "ByteLevel") else part


class Constraint:
    """One output's grammar, and its state after the output so far.

    ``ends`` are the tokens that end the output; ``param`` names the grammar in errors.
    """

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, ends: frozenset[int], param: Kind) -> None:
        self._matcher = matcher
        self._param = param
        self._vocab_size = vocab_size
        self._ends = ends
        self._end_ids = np.array(sorted(token for token in ends if token < vocab_size), np.int64)
        self._ended = False

    def apply(self, logits: Floats, tree: TokenTree, draft_tokens: Ints) -> Floats:
        """Sets the logits of tokens that the grammar does not allow to minus infinity.

        See :meth:`~specexport.runtime.logits.LogitsProcessor.apply`. Nodes that the grammar does not allow are
        unchanged, as are all nodes if it failed: see :meth:`check`.
        """
        masked: Floats = logits.copy()
        if not self._ended:
            self._mask(masked, tree, draft_tokens.tolist(), 0, self._matcher)
        return masked

    def check(self) -> None:
        """Raises an error of :meth:`apply`, which must not raise, as other requests share the step.

        Raises:
            RequestError: the grammar has become too complex to follow.
        """
        if self._matcher.is_error():
            reason = _reason(self._matcher.get_error())
            raise RequestError(f"the {_NAMES[self._param]} cannot be followed: {reason}", param=self._param)

    def advance(self, tokens: Sequence[int]) -> None:
        """Advances by the tokens of a step, up to the output's end, which a draft may exceed."""
        for token in tokens:
            self._ended = self._ended or token in self._ends
            if self._ended:
                return
            self._matcher.consume_token(token)

    def _mask(
        self, logits: Floats, tree: TokenTree, tokens: list[int], node: int, matcher: llguidance.LLMatcher
    ) -> None:
        """Masks the logits of the node that a matcher has reached, and of the nodes below it."""
        allowed = self._allowed(matcher)
        if matcher.is_error():
            return
        logits[node, ~allowed] = -np.inf
        for child in tree.children[node]:
            token = tokens[child - 1]
            if allowed[token] and token not in self._ends:  # nothing follows the end of a text
                # A copy costs a few microseconds, and a grammar that is too complex in a draft fails there alone.
                branch = matcher.deep_copy()
                if branch.consume_token(token):
                    self._mask(logits, tree, tokens, child, branch)

    def _allowed(self, matcher: llguidance.LLMatcher) -> Bools:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed: Bools = np.unpackbits(bits, bitorder="little")[: self._vocab_size].view(np.bool_)
        if matcher.is_accepting():
            allowed[self._end_ids] = True
        return allowed


def _reason(reason: str) -> str:
    """The beginning of a message from llguidance, on one line, and what to do about it."""
    return " ".join(reason.split())[:_MAX_REASON] + json_schema.advice(reason)


def _json_grammar(schema: str) -> str:
    """The grammar of JSON that matches a schema, in llguidance's form."""
    import llguidance

    compile_schema = llguidance.LLMatcher.grammar_from_json_schema
    try:
        stated = json.loads(schema)
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    except RecursionError:
        return compile_schema(schema)  # llguidance reports what is wrong with it
    simpler = json_schema.prepared(stated)
    if simpler != stated:
        stated, schema = simpler, json.dumps(simpler)
    if stated is True:
        stated, schema = {}, "{}"
    # The original text, as parsing may have rounded numbers.
    return (
        compile_schema(schema)
        if json_schema.bound_whitespace(stated) is stated
        else compile_schema(schema, defaults={"whitespace_pattern": json_schema.WHITESPACE})
    )
