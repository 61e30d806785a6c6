"""A model's rules of generation besides sampling, from ``generation_config.json``."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from specexport.contract.model import Probability, Strict

_MOST = 2**31 - 1
Whole = Annotated[int, Meta(ge=0, le=_MOST)]
Length = Annotated[int, Meta(ge=1, le=_MOST)]
Sequence = Annotated[tuple[Whole, ...], Meta(min_length=1)]
_Suppressed = tuple[Annotated[int, Meta(ge=-_MOST, le=_MOST)], ...]


class GenerationRules(Strict, frozen=True):
    """Rules that change logits or bound lengths; names and meanings are transformers', the defaults change nothing.

    "Text" is the prompt and the output so far.

    Attributes:
        max_length: most tokens of a prompt and its output; None for no limit.
        min_length: fewest, before a token that ends the output.
        sequence_bias: added to the logit of a sequence's last token where the text ends with the tokens before it.
        encoder_repetition_penalty: multiplies the positive logits of the prompt's tokens, and divides the negative
            ones.
        no_repeat_ngram_size: n-grams of this many tokens do not occur twice in the text; 0 for no such rule.
        encoder_no_repeat_ngram_size: no n-gram of this many tokens of the prompt occurs in the output.
        bad_words_ids: sequences that do not occur in the output; a single token that ends the output is exempt.
        forced_bos_token_id: the token after a text of one token.
        forced_eos_token_id: the output's last token, where it is as long as it may be; several for any of them.
        exponential_decay_length_penalty: after this many tokens, the logits of tokens that end the output rise, by
            the factor to the power of the number of tokens since.
        suppress_tokens: tokens that do not occur in the output.
        begin_suppress_tokens: tokens that the output does not begin with.
        top_h: keeps the most probable tokens within this share of the distribution's entropy; None keeps all. This
            filter comes before top-k, and those below after min-p.
        typical_p: keeps the tokens whose information is closest to the entropy and that hold this much probability.
        epsilon_cutoff: drops tokens less probable than this.
        eta_cutoff: drops tokens less probable than this, or than its square root times exp(-entropy) if that is less.
    """

    max_length: Length | None = None
    min_length: Whole = 0
    sequence_bias: tuple[tuple[Sequence, float], ...] = ()
    encoder_repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] = 1.0
    no_repeat_ngram_size: Whole = 0
    encoder_no_repeat_ngram_size: Whole = 0
    bad_words_ids: tuple[Sequence, ...] = ()
    forced_bos_token_id: Whole | None = None
    forced_eos_token_id: Whole | Sequence | None = None
    exponential_decay_length_penalty: tuple[Whole, Annotated[float, Meta(gt=0.0, le=100.0)]] | None = None
    suppress_tokens: _Suppressed = ()
    begin_suppress_tokens: _Suppressed = ()
    top_h: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    typical_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    epsilon_cutoff: Probability = 0.0
    eta_cutoff: Probability = 0.0

    @property
    def change_logits(self) -> bool:
        """Whether logits change before anything is sampled."""
        forced = self.forced_bos_token_id is not None or self.forced_eos_token_id is not None
        sizes = self.no_repeat_ngram_size or self.encoder_no_repeat_ngram_size or self.min_length
        listed = self.sequence_bias or self.bad_words_ids or self.suppress_tokens or self.begin_suppress_tokens
        penalties = self.encoder_repetition_penalty != 1.0 or self.exponential_decay_length_penalty is not None
        return bool(forced or sizes or listed or penalties)

    @property
    def tokens(self) -> dict[str, tuple[int, ...]]:
        """Tokens that the model must have, by the rule that names them."""
        last = self.forced_eos_token_id
        return {
            "sequence_bias": tuple(token for sequence, _ in self.sequence_bias for token in sequence),
            "bad_words_ids": tuple(token for sequence in self.bad_words_ids for token in sequence),
            "forced_bos_token_id": () if self.forced_bos_token_id is None else (self.forced_bos_token_id,),
            "forced_eos_token_id": () if last is None else (last,) if isinstance(last, int) else last,
        }

    @property
    def filter_tokens(self) -> bool:
        """Whether they drop tokens by their probabilities."""
        return self.top_h is not None or self.typical_p < 1.0 or self.epsilon_cutoff > 0.0 or self.eta_cutoff > 0.0


NO_RULES = GenerationRules()
