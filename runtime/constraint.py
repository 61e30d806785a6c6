"""Grammar-constrained outputs: which tokens may follow, at every node of a tree.

p is then the target's distribution over what the grammar allows; what is drafted against it has p = 0 and is rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from specexport.contract.errors import BackendError, RequestError
from specexport.contract.tree import TokenTree

if TYPE_CHECKING:
    import llguidance

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


MAX_SCHEMA = 1 << 16
"""Characters of a JSON schema."""


class Grammars:
    """Makes constraints for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)

    def json_schema(self, schema: str) -> Constraint:
        """A constraint to JSON that fits a schema, which is given as JSON.

        Raises:
            RequestError: the schema is not one, is very large, or holds what no output can be constrained to.
            BackendError: llguidance is not installed.
        """
        return self._constraint(schema, "grammar_from_json_schema", "JSON schema", "json_schema")

    def lark(self, grammar: str) -> Constraint:
        """A constraint to a grammar in llguidance's form of Lark; errors are those of :meth:`json_schema`."""
        return self._constraint(grammar, "grammar_from_lark", "grammar", "grammar")

    def _constraint(self, text: str, reader: str, what: str, param: str) -> Constraint:
        if len(text) > MAX_SCHEMA:  # all requests of a batch wait while its masks are made
            raise RequestError(f"the {what} has {len(text)} characters; expected at most {MAX_SCHEMA}", param=param)
        # Imported here: only grammar-constrained outputs need it.
        known = self._vocabulary
        import llguidance

        grammar = getattr(llguidance.LLMatcher, reader)(text)
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(known, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            why = matcher.get_error().splitlines()[0]
            raise RequestError(f"the {what} cannot be used: {why}", param=param)
        return Constraint(matcher, self._vocab_size, self._eos, what, param)

    @cached_property
    def _vocabulary(self) -> llguidance.LLTokenizer:
        try:
            import llguidance
        except ImportError as error:
            raise BackendError(
                f"JSON schemas and grammars need llguidance ({error}); install it with: pip install 'specexport[serve]'"
            ) from error
        if not self._eos:
            raise RequestError("the model names no end-of-text token, so a constrained output could never end")
        plain = Tokenizer.from_str(self._tokenizer.to_str())
        plain.no_padding()
        plain.no_truncation()
        # Logits may be wider than the tokenizer, never narrower.
        width = max(self._vocab_size, plain.get_vocab_size(with_added_tokens=True))
        return llguidance.LLTokenizer(plain.to_str(), n_vocab=width, eos_token=self._eos)


class Constraint:
    """One output's grammar, and how far the output has come in it."""

    def __init__(
        self, matcher: llguidance.LLMatcher, vocab_size: int, eos_token_ids: Sequence[int], what: str, param: str
    ) -> None:
        self._matcher = matcher
        self._what, self._param = what, param
        self._vocab_size = vocab_size
        self._eos = frozenset(eos_token_ids)

    def applied(self, logits: Floats, tree: TokenTree, draft_tokens: Ints) -> Floats:
        """Logits with minus infinity wherever the grammar does not let a token follow.

        Nodes that the grammar forbids to reach are left as they are, and so are all where it could not be followed:
        see :meth:`check`. Arguments are those of :class:`~specexport.runtime.logits.LogitsProcessor`.
        """
        made: Floats = logits.copy()
        tokens = draft_tokens.tolist()
        self._mask(made, tree, tokens, 0)
        return made

    def check(self) -> None:
        """Raises what a step could not, as other requests share it.

        Raises:
            RequestError: the grammar has become too complex to follow.
        """
        if self._matcher.is_error():
            why = self._matcher.get_error().splitlines()[0]
            raise RequestError(f"the {self._what} cannot be followed: {why}", param=self._param)

    def advance(self, tokens: Sequence[int]) -> None:
        if not self._matcher.is_stopped():
            self._matcher.consume_tokens(list(tokens))

    def _mask(self, logits: Floats, tree: TokenTree, tokens: list[int], node: int) -> None:
        """Masks a node and the nodes below it; the matcher ends where it began."""
        allowed = self._allowed()
        if self._matcher.is_error():
            return
        logits[node, ~allowed] = -np.inf
        for child in tree.children[node]:
            token = tokens[child - 1]
            # Nothing follows the end of a text. Consuming takes a token or leaves the matcher as it was.
            if allowed[token] and token not in self._eos and self._matcher.try_consume_tokens([token]) == 1:
                self._mask(logits, tree, tokens, child)
                self._matcher.rollback(1)

    def _allowed(self) -> Bools:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self._vocab_size].view(np.bool_)
