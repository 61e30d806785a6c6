"""``specexport verify`` against the original models: logits of the step graph, tokens of drafts.

The graph reads a text like the engine, in chunks with a cache. The model reads each text from the start without a
cache, so that mistakes in positions, masks or cache rows cannot hide in both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from specexport.contract import tensors
from specexport.contract.errors import SpecExportError
from specexport.contract.manifest import Manifest
from specexport.contract.tensors import Array
from specexport.contract.tree import TokenTree
from specexport.exporter.checkpoints.checkpoint import load_reference, reference_embeds, reference_logits
from specexport.exporter.graph_checks import (
    Reference,
    StepCall,
    StepSession,
    default_text,
    energy,
    measure,
    relative_rms,
    windows,
)
from specexport.runtime.bundle import Bundle

Feed = dict[str, Array]
Numbers = dict[str, float]
Outcome = tuple[bool, str, Numbers]
"""Whether a check passed, a sentence, and the measurements."""

_COMPARED_ROWS = 16
"""Number of rows of a prefill chunk that are compared; all of them would be megabytes of logits."""
_Setting = TypeVar("_Setting")


class NotRunError(SpecExportError):
    """A check cannot be run, for the reason in the message."""


def prefill_calls(manifest: Manifest, text: Sequence[int]) -> Iterator[StepCall]:
    """The calls that read a text in chunks, like the engine."""
    chunk = manifest.prefill_chunk
    for start in range(0, len(text), chunk):
        part = list(text[start : start + chunk])
        rows = range(max(0, len(part) - _COMPARED_ROWS), len(part))
        yield StepCall(list(text[:start]), part + [0] * (chunk - len(part)), TokenTree.chain(chunk), rows, len(part))


def step_calls(manifest: Manifest, text: Sequence[int], K: int) -> Iterator[StepCall]:
    """A prefill, then a chain as wide as a verify step, a tree over the rows that it left, and a plain token.

    The tree starts after the second token of the chain, as if the rest had been rejected, so that the cache holds rows
    that must not be visible.
    """
    yield from prefill_calls(manifest, text)
    width = K + 1
    # Tokens of the text itself, which models predict well.
    following = [text[i % len(text)] for i in range(2 * width + 1)]
    committed = list(text)
    tree = TokenTree(tuple((node - 1) // 2 if node else -1 for node in range(width)))
    if manifest.target.states:
        tree = TokenTree.chain(width)
    for tokens, shape, accepted in (
        (following[:width], TokenTree.chain(width), 2),
        (following[width : 2 * width], tree, 1),
        (following[2 * width :], TokenTree.chain(1), 1),
    ):
        if len(committed) + len(shape) > manifest.target.max_positions:
            return
        yield StepCall(list(committed), tokens, shape, range(len(shape)))
        committed += tokens[:accepted]


def open_step(bundle: Bundle, calls: Sequence[StepCall]) -> StepSession:
    """Opens the step graph with a cache for these calls."""
    model = bundle.manifest.target
    needed = max(len(call.committed) + len(call.tokens) for call in calls)
    rows = min(point.cache for point in model.graph.points if point.cache >= needed)
    # Rows that were never written hold 1e6, so that reading them is noticed.
    return StepSession(bundle.file, bundle.manifest.lowering, model, rows, 1e6)


def embed_half(feed: Feed, embeds: Array) -> Feed:
    """The feed of a prefill, with the text's embeddings ``[P,H]`` in place of every other token."""
    past, tokens = int(feed[tensors.PAST_LENGTH][0]), feed[tensors.INPUT_IDS].copy()
    rows, mask = np.zeros((*tokens.shape, embeds.shape[1]), np.float32), np.zeros(tokens.shape, np.bool_)
    at = np.arange(0, min(tokens.shape[1], len(embeds) - past), 2)
    rows[0, at], mask[0, at], tokens[0, at] = embeds[past + at], True, 0
    return feed | {tensors.INPUT_IDS: tokens, tensors.INPUTS_EMBEDS: rows, tensors.EMBEDS_MASK: mask}


@dataclass(frozen=True)
class Limits:
    """The maximum differences of a graph from its model, which depend on the precision of the weights.

    Attributes:
        largest: largest difference of a logit, relative to the largest logit; infinite if not checked.
        rms: root-mean-square difference of logits, relative to their spread. It also defines ties: an allowed error may
            reverse preferences smaller than this.
        agreement: minimum share of positions where graph and model prefer the same token; ties count as the same.
        kl: mean KL divergence from the model over the built-in text, in nats per token.
    """

    largest: float
    rms: float
    agreement: float
    kl: float


# Measured on a trained model of seven layers and on random models of two, whose errors grow fastest. The rms of two
# unrelated models is 1.0 to 1.4.
# fp32: rms 1e-6. fp16: rms 2e-3, largest 4e-3, both for a checkpoint in fp32.
# bf16: rms 4e-3, largest 3e-3, for the same checkpoint. fp8: rms 0.07 trained, 0.08 random.
# int8: rms 0.008 trained, 0.02 to 0.07 random, with single logits off by up to 0.17.
# int4: rms 0.09 trained, 0.2 to 0.6 random; the trained model's token at 86 % of positions.
# KL: 0.01 to 0.32 random; docs/precision.md has figures of trained models, and the reason why 0.4 is too much.
LIMITS: dict[str, Limits] = {
    "fp32": Limits(largest=1e-3, rms=1e-3, agreement=1.0, kl=1e-4),
    "fp16": Limits(largest=2e-2, rms=2e-2, agreement=1.0, kl=1e-3),
    "bf16": Limits(largest=0.1, rms=5e-2, agreement=0.95, kl=1e-2),
    "fp8": Limits(largest=np.inf, rms=0.3, agreement=0.8, kl=0.1),
    "int8": Limits(largest=np.inf, rms=0.15, agreement=0.9, kl=0.05),
    "int4": Limits(largest=np.inf, rms=0.7, agreement=0.5, kl=0.4),
    "stored": Limits(largest=np.inf, rms=0.15, agreement=0.9, kl=0.05),  # like int8, as matrices may be rounded again
}


@dataclass
class TokenAgreement:
    """Counts of positions at which the preferred tokens of a graph and of its model were compared.

    Attributes:
        same: number of positions with the same preferred token.
        ties: number of positions with different preferred tokens that nearly tie for the model.
    """

    limits: Limits
    positions: int = 0
    same: int = 0
    ties: int = 0

    @property
    def share(self) -> float:
        """The share of positions with the same token or a tie."""
        return (self.same + self.ties) / self.positions if self.positions else 0.0

    @property
    def passed(self) -> bool:
        return self.share >= self.limits.agreement

    @property
    def numbers(self) -> Numbers:
        return {"positions": self.positions, "same": self.same, "ties": self.ties, "agreement": self.share}

    def __str__(self) -> str:
        ties = f" and one as good at {self.ties}" if self.ties else ""
        return f"{self.same} of {self.positions} positions{ties} (limit {self.limits.agreement:.0%})"

    def count(self, reference: Array, chosen: Array) -> None:
        """Counts N positions, given the model's logits ``[N,V]`` and the graph's tokens ``[N]``."""
        gap = reference.max(axis=-1) - np.take_along_axis(reference, chosen[:, None], axis=-1)[:, 0]
        self.positions += len(gap)
        self.same += int((gap == 0).sum())
        spread = np.sqrt(energy(reference) / reference.size)
        self.ties += int(((gap > 0) & (gap <= self.limits.rms * spread)).sum())


def rounds(manifest: Manifest, texts: Sequence[list[int]]) -> list[tuple[list[int], int]]:
    """Pairs of texts and numbers of draft tokens, with each text and each width of a step at least once."""
    sizes = sorted({width - 1 for method in manifest.methods for width in method.widths()}) or [0]
    return pair(texts, sizes)


def pair(texts: Sequence[list[int]], settings: Sequence[_Setting]) -> list[tuple[list[int], _Setting]]:
    """Pairs of texts and settings, with each text and each setting at least once."""
    return [(texts[i % len(texts)], settings[i % len(settings)]) for i in range(max(len(texts), len(settings)))]


def limits_of(bundle: Bundle) -> Limits:
    """The limits of a bundle's target."""
    return LIMITS[bundle.manifest.target.precision.weights]


def compare_logits(bundle: Bundle, checkpoint: Path, texts: Sequence[list[int]]) -> Outcome:
    """Compares the step graph with the original target, with only one of them in memory at a time.

    Raises:
        BundleError: the checkpoint is another model.
    """
    manifest, limits = bundle.manifest, limits_of(bundle)
    calls = [call for text, K in rounds(manifest, texts) for call in step_calls(manifest, text, K)]
    model = load_reference(checkpoint, manifest.target)
    expected = [call.expected(model) for call in calls]
    del model
    graph = open_step(bundle, calls)
    agreement, finite, largest, error, total = TokenAgreement(limits), True, 0.0, 0.0, 0.0
    for call, reference in zip(calls, expected, strict=True):
        logits = graph.logits(call.feed(manifest.target))
        agreement.count(reference, logits.argmax(axis=-1))
        finite &= bool(np.isfinite(logits).all())
        largest = max(largest, float(np.abs(logits - reference).max()))
        error += energy(logits - reference)
        total += energy(reference)
    relative = largest / max(1.0, *(float(np.abs(logits).max()) for logits in expected))
    rms = relative_rms(error, total)
    numbers = {
        "largest_difference": largest,
        "largest_difference_relative": relative,
        "rms_difference_relative": rms,
        **agreement.numbers,
    }
    if not finite:
        return False, "the graph makes logits that are not finite numbers", numbers
    limit = f" (limit {limits.largest:g})" if math.isfinite(limits.largest) else ""
    sentence = (
        f"the graph's logits differ from the model's by at most {relative:.2g} of the largest{limit}, root mean square "
        f"{rms:.2g} of their spread (limit {limits.rms:g}); it prefers the same token at {agreement}"
    )
    return relative <= limits.largest and rms <= limits.rms and agreement.passed, sentence, numbers


def compare_quality(bundle: Bundle, checkpoint: Path) -> Outcome:
    """Compares the step graph with the original target over the built-in text, like the build.

    Raises:
        BundleError: the checkpoint is another model.
        NotRunError: the text has fewer than two tokens.
    """
    described = bundle.manifest.target
    model = load_reference(checkpoint, described)
    rows = windows(
        bundle.tokenizer().encode(default_text()).ids, described, int(model.get_input_embeddings().weight.shape[0])
    )
    if rows.shape[1] < 2:
        raise NotRunError("the tokenizer makes fewer than two tokens of the text that is measured over")
    expected = Reference(rows, np.stack([reference_logits(model, row) for row in rows]))
    del model
    quality = measure(bundle.file, bundle.manifest.lowering, described, expected)
    limit = limits_of(bundle).kl
    passed = quality.kl <= limit  # also false for NaN
    sentence = f"{quality} (limit: KL {limit:g})"
    if not passed:
        weights = described.precision.weights
        sentence += f": {weights} broke the model; build it again in more bits (docs/precision.md)"
    return passed, sentence, {name: float(value) for name, value in msgspec.structs.asdict(quality).items()}


def compare_embeds(bundle: Bundle, checkpoint: Path, texts: Sequence[list[int]]) -> Outcome:
    """Compares the step graph with the model, given the model's embeddings in place of every other token.

    Raises:
        BundleError: the checkpoint is another model.
    """
    model = load_reference(checkpoint, bundle.manifest.target)
    references = [(reference_embeds(model, np.array(text)), reference_logits(model, np.array(text))) for text in texts]
    del model
    prefills = [list(prefill_calls(bundle.manifest, text)) for text in texts]
    agreement = TokenAgreement(limits_of(bundle))
    graph = open_step(bundle, [call for calls in prefills for call in calls])
    for (embeds, expected), calls in zip(references, prefills, strict=True):
        for call in calls:
            logits = graph.logits(embed_half(call.feed(bundle.manifest.target), embeds))
        agreement.count(expected[-len(logits) :], logits.argmax(axis=-1))
    sentence = (
        "given the model's own embeddings instead of every other token, the graph prefers the model's token at "
        f"{agreement}"
    )
    return agreement.passed, sentence, agreement.numbers
