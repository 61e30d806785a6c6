"""``specexport verify`` on decoding: with speculation and without it greedy texts are the same, and a seed repeats."""

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
"""A prompt whose texts differ this often is broken; more would only cost time."""
_SLIP = 9
"""One token in so many of the hypotheses that are tried is wrong."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Difference:
    """Where plain and speculative decoding part: the text so far and what each goes on with, None for an end."""

    text: list[int]
    plain: int | None
    speculative: int | None


@dataclass(frozen=True)
class SpeculationResult:
    """What :func:`compare_decoding` found.

    Attributes:
        tokens: how many were compared.
        differences: places where greedy texts part.
        acceptance_length: mean over the decodings; None if the bundle has no method.
        repeated: whether a seed gave the same text twice.
        inexact: why texts may part on this machine; empty where steps are exact bit for bit.
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
            compared, found, length = _compare_text(engine, text, method, size, max_tokens)
            tokens += compared
            differences += found
            lengths.append(length)
            progress(index, len(work) + 1)
        repeated = all(_repeats(engine, text, max_tokens) for text in texts[:_SEEDED_PROMPTS])
        inexact = engine.inexact
    acceptance = sum(lengths) / len(lengths) if lengths else None
    return SpeculationResult(tokens, differences, acceptance, repeated, inexact)


def _decodings(manifest: Manifest, texts: Sequence[list[int]]) -> list[tuple[list[int], tuple[str, int]]]:
    """Texts, each with a method and a number of draft tokens: every method's every tree at least once."""
    ways = [(m.name, len(tree) - 1) for m in manifest.methods for tree in m.token_trees()]
    return paired(texts, ways) if ways else []


def _compare_text(
    engine: Engine, prompt: list[int], method: str, size: int, max_tokens: int
) -> tuple[int, list[Difference], float]:
    """Decodes a prompt greedily both ways; where they part, goes on from the plain text to see the rest of it too.

    Returns tokens compared, where they differed, and the acceptance length of the first run.
    """
    text, room, length = list(prompt), max_tokens, 0.0
    found: list[Difference] = []
    while room > 0 and len(text) < engine.manifest.max_seq_len and len(found) < _MAX_DIFFERENCES:
        params = SamplingParams(temperature=0.0, max_tokens=room, ignore_eos=True)
        plain = engine.generate(text, params, PLAIN).token_ids
        # A hypothesis that is right but for some of its tokens; other methods need none.
        takes = engine.methods[method].takes_hypothesis
        expected = tuple(token if at % _SLIP else 0 for at, token in enumerate(plain, 1)) if takes else None
        asked = Speculative(method=method, num_speculative_tokens=size, hypothesis=expected)
        completion = engine.generate(text, params, asked)
        fast, length = completion.token_ids, length or completion.stats.acceptance_length
        same = common_prefix(plain, fast)
        text, room = [*text, *plain[:same]], room - same
        if same == len(plain) == len(fast):
            break
        a, b = (tokens[same] if same < len(tokens) else None for tokens in (plain, fast))
        found.append(Difference(text, a, b))
        if a is None:
            break
        text, room = [*text, a], room - 1
    return len(text) - len(prompt), found, length


def _repeats(engine: Engine, text: list[int], max_tokens: int) -> bool:
    params = _SAMPLED.replace(max_tokens=max_tokens)
    # The first one reads the prompt. With one that is read already, heads and speculators have a plain step first.
    _, first, second = (engine.generate(text, params).token_ids for _ in range(3))
    return first == second
