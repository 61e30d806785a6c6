"""``specexport verify`` of decoding: greedy texts are equal with and without speculation, and seeds repeat texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specexport.contract.manifest import Manifest
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.bundle import Bundle
from specexport.runtime.reader import common_prefix
from specexport.runtime.speculative import PLAIN, Speculative
from specexport.verify.logits import paired

_SEEDED_PROMPTS = 2
_SAMPLED = SamplingParams(temperature=0.8, seed=20240229, ignore_eos=True)

_MAX_DIFFERENCES = 3
"""Differences of a prompt after which its comparison ends."""
_ERROR_PERIOD = 9
"""Every such token of the tested hypotheses is wrong."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Difference:
    """Where plain and speculative decoding differ: the text so far and the next token of each, None for an end."""

    text: list[int]
    plain: int | None
    speculative: int | None


@dataclass(frozen=True)
class SpeculationResult:
    """The result of :func:`compare_decoding`.

    Attributes:
        tokens: number of compared tokens.
        differences: where greedy texts differ.
        acceptance_length: mean over the decodings; None if the bundle has no method.
        repeated: whether a seed gave the same text twice.
        inexact: why texts may differ on this machine; empty if steps are exact bit for bit.
    """

    tokens: int
    differences: list[Difference]
    acceptance_length: float | None
    repeated: bool
    inexact: str


def compare_decoding(
    bundle: Bundle, texts: Sequence[list[int]], max_tokens: int, progress: Progress
) -> SpeculationResult:
    """Decodes texts both ways, with every tree of every method, and samples some with a seed."""
    work = _decodings(bundle.manifest, texts)
    tokens = 0
    differences: list[Difference] = []
    lengths: list[float] = []
    with Engine.load(bundle.folder, check_hashes=False, backend="onnxruntime", calibrate=False) as engine:
        for index, (text, (method, size)) in enumerate(work):
            compared, differing, length = _compare_text(engine, text, method, size, max_tokens)
            tokens += compared
            differences += differing
            lengths.append(length)
            progress(index, len(work) + 1)
        repeated = all(_repeats(engine, text, max_tokens) for text in texts[:_SEEDED_PROMPTS])
        inexact = engine.inexact
    acceptance = sum(lengths) / len(lengths) if lengths else None
    return SpeculationResult(tokens, differences, acceptance, repeated, inexact)


def _decodings(manifest: Manifest, texts: Sequence[list[int]]) -> list[tuple[list[int], tuple[str, int]]]:
    """Texts, each with a method and a number of draft tokens: every tree of every method at least once."""
    sizes = [(m.name, len(tree) - 1) for m in manifest.methods for tree in m.token_trees()]
    return paired(texts, sizes) if sizes else []


def _compare_text(
    engine: Engine, prompt: list[int], method: str, size: int, max_tokens: int
) -> tuple[int, list[Difference], float]:
    """Decodes a prompt greedily both ways; after a difference, continues from the plain text to compare the rest.

    Returns the number of compared tokens, the differences, and the acceptance length of the first run.
    """
    text, remaining, length = list(prompt), max_tokens, 0.0
    differences: list[Difference] = []
    while remaining > 0 and len(text) < engine.manifest.max_seq_len and len(differences) < _MAX_DIFFERENCES:
        params = SamplingParams(temperature=0.0, max_tokens=remaining, ignore_eos=True)
        plain = engine.generate(text, params, PLAIN).token_ids
        # A hypothesis with some wrong tokens; other methods need none.
        takes = engine.methods[method].takes_hypothesis
        expected = tuple(token if at % _ERROR_PERIOD else 0 for at, token in enumerate(plain, 1)) if takes else None
        speculative = Speculative(method=method, num_speculative_tokens=size, hypothesis=expected)
        completion = engine.generate(text, params, speculative)
        fast, length = completion.token_ids, length or completion.stats.acceptance_length
        equal = common_prefix(plain, fast)
        text, remaining = [*text, *plain[:equal]], remaining - equal
        if equal == len(plain) == len(fast):
            break
        a, b = (tokens[equal] if equal < len(tokens) else None for tokens in (plain, fast))
        differences.append(Difference(text, a, b))
        if a is None:
            break
        text, remaining = [*text, a], remaining - 1
    return len(text) - len(prompt), differences, length


def _repeats(engine: Engine, text: list[int], max_tokens: int) -> bool:
    params = _SAMPLED.replace(max_tokens=max_tokens)
    # The first run reads the prompt. With a cached prompt, heads and speculators begin with a plain step.
    _, first, second = (engine.generate(text, params).token_ids for _ in range(3))
    return first == second
