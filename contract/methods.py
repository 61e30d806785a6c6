"""What a bundle says of each way to propose, and which trees one can fill."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from specexport.contract.model import Model, Positive, Probability, Size, StoredAs, Strict
from specexport.contract.tree import MAX_NODES, TokenTree

MAX_LOOKUP = 32
MAX_STAGES = 16
LookupSize = Annotated[int, Meta(ge=1, le=MAX_LOOKUP)]
"""Tokens of an n-gram; bounded, as every token of a text is entered once for each size."""
Choices = Annotated[tuple[tuple[Annotated[int, Meta(ge=0, lt=MAX_NODES)], ...], ...], Meta(max_length=MAX_NODES)]
"""A token tree as Medusa choices: the ranks on the path from the root, for each node but the root."""


class _Method(Strict, frozen=True):
    """A way to propose.

    Attributes:
        trees: the trees a step may verify, the default first; no two have as many nodes, so that a request can choose
            one by its number of draft tokens. A chain of K draft tokens is the tree ``[[0], [0, 0], ...]``.
    """

    trees: Annotated[tuple[Choices, ...], Meta(min_length=1)]

    def token_trees(self) -> tuple[TokenTree, ...]:
        """The trees, the default first."""
        return tuple(TokenTree.from_choices(choices) for choices in self.trees)

    def validate_tree(self, tree: TokenTree) -> str | None:
        """Why a tree is none that this method can fill; None for one that it can, as any is unless a method says so."""
        return None

    def width(self, tree: TokenTree) -> int:
        """T of a step that verifies a tree of this method's."""
        return len(tree)

    def widths(self) -> tuple[int, ...]:
        """T of every step it may ask for, that of the default tree first."""
        return tuple(self.width(tree) for tree in self.token_trees())


class _Ranked(_Method, frozen=True):
    """A way to propose by a model that knows several tokens at each depth.

    Attributes:
        candidates: M, the tokens known at each depth, which ranks count; for a draft model also the support of q.
    """

    candidates: Size

    def validate_tree(self, tree: TokenTree) -> str | None:
        """See :class:`_Method`."""
        return (
            f"rank {max(tree.ranks)}, with {self.candidates} candidates" if max(tree.ranks) >= self.candidates else None
        )


def _not_a_chain(tree: TokenTree) -> str | None:
    # Of most probable tokens: a single path of other ranks is none.
    chain = TokenTree.chain(len(tree))
    return f"the one of {len(tree) - 1} draft tokens is not a chain" if tree.choices != chain.choices else None


class _Chained(_Method, frozen=True):
    """A way to propose by looking in text: chains, of which steps verify shorter ones where less is found."""

    def validate_tree(self, tree: TokenTree) -> str | None:
        """See :class:`_Method`."""
        return _not_a_chain(tree)


class DraftModel(_Ranked, frozen=True, tag_field="name", tag="draft_model"):
    """Speculation by a smaller model (Leviathan 2023, Chen 2023).

    It drafts a chain; a tree may add less probable tokens beside each token of that chain.

    Attributes:
        draft: the model, as a propose graph.
    """

    draft: Model

    def validate_tree(self, tree: TokenTree) -> str | None:
        """See :class:`_Method`."""
        spine = "only the most probable token of each depth can have children"
        return super().validate_tree(tree) or (None if tree.has_spine else spine)


class SelfDraft(DraftModel, frozen=True, tag_field="name", tag="self_draft"):
    """Speculation by the target's own first layers, whose output its final norm and head read too early.

    The draft's graph lies beside the target's and reads the same weights file.

    Attributes:
        layers: how many.
    """

    layers: Size


class UniversalDraft(DraftModel, frozen=True, tag_field="name", tag="universal_draft"):
    """Speculation by a smaller model with a tokenizer of its own: text is translated both ways. Chains only.

    What is proposed follows from the text alone, without drawing. A step verifies a shorter chain where the draft's
    tokens make fewer of the target's.

    Attributes:
        tokenizer: the draft's ``tokenizer.json``.
    """

    tokenizer: str

    def validate_tree(self, tree: TokenTree) -> str | None:
        """See :class:`_Method`."""
        return _not_a_chain(tree)


class Medusa(_Ranked, frozen=True, tag_field="name", tag="medusa"):
    """Speculation by heads on the target's last hidden state (Medusa, arXiv 2401.10774), in the target's step graph.

    Attributes:
        heads: how many; a tree is at most as deep.
        source: where they were loaded from, for ``verify``.
        parameters: theirs alone.
        weights: how their matrices are stored.
    """

    heads: Size
    source: str
    parameters: Positive
    weights: StoredAs

    def validate_tree(self, tree: TokenTree) -> str | None:
        """See :class:`_Method`."""
        deep = f"depth {tree.depth}, with {self.heads} heads" if tree.depth > self.heads else None
        return super().validate_tree(tree) or deep


class MedusaDraft(_Ranked, frozen=True, tag_field="name", tag="medusa_draft"):
    """Speculation by a smaller model with Medusa heads, which proposes a whole tree in one pass.

    Attributes:
        heads: how many; a tree is at most one deeper, as the draft's own head comes first.
        source: where the heads were loaded from, for ``verify``.
        draft: the model, as a step graph that makes candidates instead of logits.
    """

    heads: Size
    source: str
    draft: Model

    def validate_tree(self, tree: TokenTree) -> str | None:
        """See :class:`_Method`."""
        deep = f"depth {tree.depth}, with {self.heads} heads" if tree.depth > self.heads + 1 else None
        return super().validate_tree(tree) or deep


class MlpSpeculator(_Ranked, frozen=True, tag_field="name", tag="mlp_speculator"):
    """Speculation by an MLP speculator (arXiv 2404.19124): stages over the target's hidden state and the last token.

    Each stage sees the token before its own, so that a tree's branches differ below their first tokens too.

    Attributes:
        stages: how many; a tree is at most as deep.
        hidden: H, the target's hidden size.
        draft: the stages, as a propose graph without a cache.
    """

    stages: Annotated[int, Meta(ge=1, le=MAX_STAGES)]
    hidden: Size
    draft: Model

    def validate_tree(self, tree: TokenTree) -> str | None:
        """See :class:`_Method`."""
        deep = f"depth {tree.depth}, with {self.stages} stages" if tree.depth > self.stages else None
        return super().validate_tree(tree) or deep


class Ngram(_Chained, frozen=True, tag_field="name", tag="ngram"):
    """Speculation by n-gram prompt lookup: what followed the text's last tokens when they came before. Chains only.

    A request's tree is the longest chain; steps verify shorter ones of the trees where less is found.

    Attributes:
        prompt_lookup_max: most tokens that are matched; tried first.
        prompt_lookup_min: fewest.
    """

    prompt_lookup_max: LookupSize
    prompt_lookup_min: LookupSize


class Suffix(_Chained, frozen=True, tag_field="name", tag="suffix"):
    """Speculation by a suffix automaton (SuffixDecoding, arXiv 2411.04975). Chains only, as for :class:`Ngram`.

    Attributes:
        max_spec_factor: most draft tokens for a matched token.
        min_token_prob: a chain ends before its estimated probability falls below this.
    """

    max_spec_factor: Annotated[float, Meta(gt=0.0, le=128.0)]
    min_token_prob: Probability


class Hypothesis(_Chained, frozen=True, tag_field="name", tag="hypothesis"):
    """Speculation by a text given with the request, the output as somebody expects it. Chains only, as for Ngram."""


class Lookahead(_Method, frozen=True, tag_field="name", tag="lookahead"):
    """Speculation by Jacobi iteration in the target's own steps (lookahead decoding, arXiv 2402.02057).

    A step runs the window, W columns by N - 1 levels of which the root is the first, beside the guesses. A request's
    tree is its most guesses, chains of N - 1 tokens; where guesses are fewer or share their beginnings, steps take the
    smallest width that holds them.

    Attributes:
        window: W, columns.
        ngram: N, tokens of an n-gram; a guess is one without its first.
        prompt_seeding: whether the pool starts with the prompt's n-grams.
    """

    window: Annotated[int, Meta(ge=1, le=MAX_NODES)]
    ngram: Annotated[int, Meta(ge=2, le=32)]
    prompt_seeding: bool

    @classmethod
    def of(cls, window: int, ngram: int, guesses: int, prompt_seeding: bool) -> Lookahead:
        """The method of W, N and G; a step may also verify G/2, G/4, ... guesses."""
        counts = [guesses]
        while counts[-1] > 1:
            counts.append(counts[-1] // 2)
        trees = tuple(guess_tree(count, ngram).choices for count in counts)
        return cls(trees=trees, window=window, ngram=ngram, prompt_seeding=prompt_seeding)

    @property
    def guesses(self) -> int:
        """G, most guesses a step."""
        return (max(map(len, self.token_trees())) - 1) // (self.ngram - 1)

    @property
    def window_nodes(self) -> int:
        """Nodes of the window, the root included."""
        return self.window * (self.ngram - 1)

    def validate_tree(self, tree: TokenTree) -> str | None:
        """See :class:`_Method`."""
        guesses = (len(tree) - 1) // (self.ngram - 1)
        if tree.choices != guess_tree(guesses, self.ngram).choices:
            return f"the one of {len(tree) - 1} draft tokens is not made of chains of {self.ngram - 1} off the root"
        if self.window < self.ngram - 2:
            return f"window {self.window}, with n-grams of {self.ngram}; the window fills only with {self.ngram - 2}"
        if self.window_nodes + len(tree) - 1 > MAX_NODES:
            return f"{self.window_nodes + len(tree) - 1} nodes a step, at most {MAX_NODES} are verified"
        return None

    def width(self, tree: TokenTree) -> int:
        """See :class:`_Method`."""
        return self.window_nodes + len(tree) - 1

    def widths(self) -> tuple[int, ...]:
        """See :class:`_Method`."""
        return (*super().widths(), self.window_nodes)


def guess_tree(guesses: int, ngram: int) -> TokenTree:
    """G guesses of lookahead decoding: chains of N - 1 tokens off the root."""
    return TokenTree.from_choices([(guess, *[0] * at) for guess in range(guesses) for at in range(ngram - 1)])


Drafted = DraftModel | MedusaDraft
"""Methods that have a model of their own, which reads a text's tokens and knows no embeddings."""
Ranked = DraftModel | Medusa | MedusaDraft | MlpSpeculator
"""Methods in which a model proposes; their trees may branch."""
Drawn = DraftModel | MlpSpeculator
"""Those of them that know q of each draft token, and draw it; each follows from the ones before it."""
Continuing = Medusa | MlpSpeculator
"""Those of them that go on from what the target's own graph makes at the last token it has seen."""
Beside = DraftModel | MedusaDraft | MlpSpeculator
"""Those of them that have a model beside the target."""
Lookup = Ngram | Suffix | Hypothesis
"""Methods that look in text, and need neither a model nor files."""
Method = (
    DraftModel
    | SelfDraft
    | UniversalDraft
    | Medusa
    | MedusaDraft
    | MlpSpeculator
    | Ngram
    | Suffix
    | Hypothesis
    | Lookahead
)
HYPOTHESIS = "hypothesis"
"""The one method that proposes nothing unless a request brings something."""
_ROLES: dict[type[Method], str] = {SelfDraft: "self_draft", MlpSpeculator: "speculator"}


def method_name(method: Method) -> str:
    """The name a request chooses a method by."""
    return str(type(method).__struct_config__.tag)


def draft_role(method: Beside) -> str:
    """What the model beside the target is called among a bundle's models, and its folder."""
    return _ROLES.get(type(method), "draft")
