"""``specexport verify``: is a bundle whole, and does it compute what the models it was built from compute?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from specexport.contract.errors import BuildError, RequestError, SpecExportError
from specexport.contract.methods import (
    HYPOTHESIS,
    DraftModel,
    Medusa,
    MedusaDraft,
    MlpSpeculator,
    SelfDraft,
    UniversalDraft,
    method_name,
)
from specexport.contract.model import Model
from specexport.contract.reading import check_files, read_manifest
from specexport.exporter import verify_engines as engines
from specexport.exporter import verify_logits as logits
from specexport.exporter.locate import locate
from specexport.exporter.verify_graphs import check_graphs
from specexport.exporter.verify_speculator import compare_speculator, speculator_limits
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.bundle import Bundle

DEFAULT_PROMPTS = (
    "The old man looked out of the window and thought about the long way home.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    # Long: several prefill chunks, and in a context of some size, a cache that has to grow.
    "\n".join(f"{n} squared is {n * n}." for n in range(1, 64)),
    "Ærøskøbing, Łódź, Αθήνα, Москва, 東京, naïve café, 🙂",
    '{"name": "Ada Lovelace", "born": 1815, "fields": ["mathematics",',
)

_LONGEST_PROMPT = 224
"""Tokens of a prompt that are used. The original model reads each text anew for every step, so length costs time."""

_SEEDED_PROMPTS = 2
_SAMPLED = SamplingParams(temperature=0.8, seed=20240229, ignore_eos=True)

_HEAD_STEPS = 6
"""Tokens decoded after each prompt to see what heads propose; the model reads the text anew for each."""

_MAX_DIFFERENCES = 3
"""A prompt whose texts differ this often is broken; more would only cost time."""
_SLIP = 9
"""One token in so many of the hypotheses that are tried is wrong."""

Progress = Callable[[str, int, int], None]
"""Called with a check's name, how much of it is done, and how much there is in all."""

Numbers = dict[str, float]
Outcome = tuple[bool, str, Numbers]
"""Whether a check passed, one sentence, and what was measured."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: ``files``, ``graphs``, ``engines``, ``logits``, ``embeds``, ``draft``, ``medusa``, ``speculator`` or
            ``speculation``.
        passed: None if it could not be run.
        sentence: what was found, or why it was not run.
        numbers: what was measured.
    """

    name: str
    passed: bool | None
    sentence: str
    numbers: Numbers = field(default_factory=dict)

    @property
    def result(self) -> str:
        """In words."""
        return "not run" if self.passed is None else "passed" if self.passed else "failed"


@dataclass(frozen=True)
class VerifyReport:
    """Every check of a bundle, in order."""

    bundle: Path
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(check.passed is not False for check in self.checks)

    @property
    def verdict(self) -> str:
        """In words."""
        if not self.passed:
            return "failed"
        return "passed" if all(check.passed for check in self.checks) else "passed what could be checked"

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON; numbers that are not finite, which JSON has no words for, are null."""
        checks = [
            {
                "name": check.name,
                "result": check.result,
                "sentence": check.sentence,
                "numbers": {name: x if math.isfinite(x) else None for name, x in check.numbers.items()},
            }
            for check in self.checks
        ]
        return {"bundle": str(self.bundle), "verdict": self.verdict, "passed": self.passed, "checks": checks}


class _NotRunError(Exception):
    """A check cannot be run; says why."""


def verify(
    bundle: Path,
    *,
    target: str | None = None,
    draft: str | None = None,
    medusa: Path | None = None,
    mlp_speculator: str | None = None,
    prompts: Sequence[str] | None = None,
    max_tokens: int = 64,
    progress: Progress | None = None,
) -> VerifyReport:
    """Checks a bundle.

    Args:
        bundle: its folder.
        target: folder or hub id of the model it was built from; None for what the manifest names.
        draft: the same of the draft.
        medusa: folder of the Medusa heads it was built from; None for what the manifest names.
        mlp_speculator: folder or hub id of the MLP speculator it was built from; None for what the manifest names.
        prompts: texts to compare on; None for :data:`DEFAULT_PROMPTS`.
        max_tokens: tokens to generate for each prompt.
        progress: see :data:`Progress`.

    Raises:
        SpecExportError: an argument is wrong. What is wrong with the bundle is in the report.
    """
    report = progress or (lambda *_: None)
    if max_tokens < 1:
        raise RequestError(f"max_tokens is {max_tokens}; expected at least 1")
    sources = {"target": target, "draft": draft, "speculator": mlp_speculator}
    given = {role: locate(source) for role, source in sources.items() if source is not None}
    files = _attempt("files", lambda: _files(bundle, report))
    if not files.passed:
        reason = "the bundle's files are not what they should be"
        rest = (Check(name, None, reason) for name in ("graphs", "logits", "draft", "speculation"))
        return VerifyReport(bundle, (files, *rest))
    opened = Bundle.open(bundle, check_hashes=False)
    for role in given.keys() - opened.manifest.models.keys():
        raise RequestError(f"a {role} was given, but {bundle} was built without one")
    if medusa is not None and not any(isinstance(m, Medusa | MedusaDraft) for m in opened.manifest.methods):
        raise RequestError(f"Medusa heads were given, but {bundle} was built without some")
    texts = _texts(opened, prompts or DEFAULT_PROMPTS, max_tokens)
    steps: dict[str, Callable[[], Outcome]] = {"graphs": lambda: _graphs(opened, report)}
    if opened.manifest.engines:
        steps["engines"] = lambda: _engines(opened, report)
    steps["logits"] = lambda: _logits(opened, given.get("target"), texts)
    if opened.manifest.target.embedding_size is not None:
        steps["embeds"] = lambda: _embeds(opened, given.get("target"), texts)
    for method in opened.manifest.methods:
        if isinstance(method, SelfDraft):
            steps["self_draft"] = partial(_draft, opened, method, given.get("target"), texts)
        elif isinstance(method, DraftModel):
            steps["draft"] = partial(_draft, opened, method, given.get("draft"), texts)
        elif isinstance(method, Medusa | MedusaDraft):
            role = "target" if isinstance(method, Medusa) else "draft"
            steps["medusa"] = partial(_heads, opened, method, role, given.get(role), medusa, texts)
        elif isinstance(method, MlpSpeculator):
            steps["speculator"] = partial(_stages, opened, method, given, texts)
    steps["speculation"] = lambda: _speculation(opened, texts, max_tokens, report)
    checks = [files]
    for name, step in steps.items():
        report(name, 0, 1)
        checks.append(_attempt(name, step))
        report(name, 1, 1)
    return VerifyReport(bundle, tuple(checks))


def _attempt(name: str, step: Callable[[], Outcome]) -> Check:
    """Runs one check; whatever goes wrong in it is its result."""
    try:
        passed, sentence, numbers = step()
    except _NotRunError as reason:
        return Check(name, None, str(reason))
    except SpecExportError as error:
        return Check(name, False, str(error))
    except Exception as error:  # a broken graph or model makes onnx, onnxruntime and torch raise anything
        return Check(name, False, f"{type(error).__name__}: {error}")
    return Check(name, passed, sentence, numbers)


def _texts(bundle: Bundle, prompts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """The prompts' tokens, cut so that at least half the context is left for output if that is wanted."""
    limit = bundle.manifest.max_seq_len
    longest = max(1, min(_LONGEST_PROMPT, limit - min(max_tokens, limit // 2)))
    tokenizer = bundle.tokenizer()
    texts = [tokenizer.encode(prompt).ids[:longest] for prompt in prompts]
    if not all(texts):
        raise RequestError(f"prompt {texts.index([]) + 1} has no tokens; expected a text")
    return texts


# --- the bundle alone -------------------------------------------------------------------------------------------------


def _files(folder: Path, progress: Progress) -> Outcome:
    manifest = read_manifest(folder)
    total, done = sum(entry.size for entry in manifest.files), 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        progress("files", done, total)

    check_files(folder, manifest, hashes=True, progress=advance)
    count = len(manifest.files)
    return True, f"{count} files have the sizes and hashes the manifest says", {"files": count, "bytes": total}


def _graphs(bundle: Bundle, progress: Progress) -> Outcome:
    count = check_graphs(bundle, lambda done, total: progress("graphs", done, total))
    sentence = (
        f"{count} graphs are valid ONNX, of standard operators only, with the inputs, outputs and shapes declared"
    )
    return True, sentence, {"graphs": count}


def _engines(bundle: Bundle, progress: Progress) -> Outcome:
    try:
        library, subjects = engines.runnable(bundle.manifest)
    except SpecExportError as error:
        raise _NotRunError(f"the engines were not compared with their ONNX graphs: {error}") from error
    found = engines.compare_engines(
        bundle,
        subjects,
        engines.tensorrt_runner(library, bundle.folder),
        lambda done, total: progress("engines", done, total),
    )
    numbers: Numbers = {"engines": found.engines, "shapes": found.shapes, "largest_difference_allowed": found.worst}
    compared = f"{found.engines} engines of {library.runtime} {library.version} at {found.shapes} shapes"
    if found.wrong:
        return False, f"{compared}: {len(found.wrong)} differ from their ONNX graphs; {found.wrong[0]}", numbers
    others = len(bundle.manifest.engines) - found.engines
    sentence = f"{compared} compute what their ONNX graphs do, with at most {found.worst:.0%} of the allowed difference"
    return True, sentence + (f"; {others} are for other devices and were not run" if others else ""), numbers


# --- against the original models --------------------------------------------------------------------------------------


def _reference(role: str, model: Model, given: Path | None) -> Path:
    """The folder of the checkpoint a model was built from."""
    if given is not None:
        return given
    try:
        return locate(model.source)
    except BuildError as error:
        raise _NotRunError(f"the {role} it was built from is not there ({error}); pass --{role} DIR") from error


def _logits(bundle: Bundle, given: Path | None, texts: list[list[int]]) -> Outcome:
    model = bundle.manifest.target
    limits = logits.LIMITS[model.precision.weights]
    found = logits.compare_logits(bundle, _reference("target", model, given), texts, limits)
    numbers = {
        "largest_difference": found.largest,
        "largest_difference_relative": found.largest / found.scale,
        "rms_difference_relative": found.rms,
        **_counted(found.agreement),
    }
    passed = found.finite and found.within and found.rms <= limits.rms and found.agreement.share >= limits.agreement
    largest = f"at most {found.largest / found.scale:.2g} of the largest" + (
        f" (limit {limits.largest:g})" if math.isfinite(limits.largest) else ""
    )
    sentence = (
        f"the graph's logits differ from the model's by {largest}, root mean square {found.rms:.2g} of their spread "
        f"(limit {limits.rms:g}); it prefers the same token at {_agreement(found.agreement, limits)}"
    )
    return passed, sentence if found.finite else "the graph makes logits that are not finite numbers", numbers


def _embeds(bundle: Bundle, given: Path | None, texts: list[list[int]]) -> Outcome:
    model = bundle.manifest.target
    limits = logits.LIMITS[model.precision.weights]
    found = logits.compare_embeds(bundle, _reference("target", model, given), texts, limits)
    sentence = (
        "given the model's own embeddings in the place of every other token, the graph prefers the model's token at "
        f"{_agreement(found, limits)}"
    )
    return found.share >= limits.agreement, sentence, _counted(found)


def _draft(bundle: Bundle, method: DraftModel, given: Path | None, texts: list[list[int]]) -> Outcome:
    checkpoint = _reference("target" if isinstance(method, SelfDraft) else "draft", method.draft, given)
    if isinstance(method, UniversalDraft):
        target, own = bundle.tokenizer(), bundle.tokenizer(method.tokenizer)
        texts = [own.encode(target.decode(text)).ids for text in texts]
    limits = logits.LIMITS[method.draft.precision.weights]
    made = logits.propose(bundle, method, texts)
    if not made:
        raise _NotRunError("no prompt is long enough to draft from; pass prompts of two tokens or more")
    found = logits.compare_draft(checkpoint, bundle.manifest, method, made, limits)
    sentence = f"the draft graph proposes the draft model's own token at {_agreement(found, limits)}"
    return found.share >= limits.agreement, sentence, _counted(found)


def _heads(
    bundle: Bundle,
    method: Medusa | MedusaDraft,
    role: str,
    given: Path | None,
    medusa: Path | None,
    texts: list[list[int]],
) -> Outcome:
    described = bundle.manifest.models[role]
    checkpoint = _reference(role, described, given)
    heads = medusa or Path(method.source)
    if not heads.is_dir():
        raise _NotRunError(f"the Medusa heads it was built from are not there ({heads}); pass --medusa DIR")
    with Engine.load(bundle.folder, check_hashes=False, backend="onnxruntime", cost_curve=False) as engine:
        made = logits.head_proposals(engine, method_name(method), texts, _HEAD_STEPS)
    found = logits.compare_heads(checkpoint, heads, bundle.manifest, method, made)
    limits = logits.head_limits(bundle.manifest, method)
    sentence = f"the heads in the {role}'s graph propose the original heads' own token at {_agreement(found, limits)}"
    return found.share >= limits.agreement, sentence, _counted(found)


def _stages(bundle: Bundle, method: MlpSpeculator, given: dict[str, Path], texts: list[list[int]]) -> Outcome:
    manifest = bundle.manifest
    target = _reference("target", manifest.target, given.get("target"))
    speculator = _reference("mlp-speculator", method.draft, given.get("speculator"))
    with Engine.load(bundle.folder, check_hashes=False) as engine:
        made = logits.head_proposals(engine, method_name(method), texts, _HEAD_STEPS)
    found = compare_speculator(target, speculator, manifest, method, made)
    limits = speculator_limits(manifest, method)
    sentence = f"the speculator's graph proposes the original stages' own token at {_agreement(found, limits)}"
    return found.share >= limits.agreement, sentence, _counted(found)


def _counted(found: logits.Agreement) -> Numbers:
    return {"positions": found.positions, "same": found.same, "ties": found.ties, "agreement": found.share}


def _agreement(found: logits.Agreement, limits: logits.Limits) -> str:
    ties = f" and one as good at {found.ties}" if found.ties else ""
    return f"{found.same} of {found.positions} positions{ties} (limit {limits.agreement:.0%})"


# --- speculation ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Difference:
    """Where plain and speculative decoding part: the text so far and what each goes on with, None for an end."""

    text: list[int]
    plain: int | None
    speculative: int | None


def _speculation(bundle: Bundle, texts: list[list[int]], max_tokens: int, progress: Progress) -> Outcome:
    work = logits.decodings(bundle.manifest, texts)
    tokens = 0
    differences: list[_Difference] = []
    lengths: list[float] = []
    with Engine.load(bundle.folder, check_hashes=False, backend="onnxruntime", cost_curve=False) as engine:
        for index, (text, (method, size)) in enumerate(work):
            compared, found, length = _compare_decoding(engine, text, method, size, max_tokens)
            tokens += compared
            differences += found
            lengths.append(length)
            progress("speculation", index, len(work) + 1)
        repeated = all(_repeats(engine, text, max_tokens) for text in texts[:_SEEDED_PROMPTS])
    limits = logits.LIMITS[bundle.manifest.target.precision.weights]
    real = [difference for difference in differences if not _tied(bundle, difference, limits)]
    numbers: Numbers = {"tokens": tokens, "ties": len(differences) - len(real), "differences": len(real)}
    if lengths:
        numbers["acceptance_length"] = sum(lengths) / len(lengths)
    if real:
        first = real[0]
        sentence = (
            f"speculation changes greedy output: after {len(first.text)} tokens it goes on with token "
            f"{first.speculative} where plain decoding has {first.plain} ({len(real)} such places)"
        )
    elif work:
        ties = len(differences)
        sentence = f"greedy output is the same with speculation and without, {tokens} tokens" + (
            f" ({ties} numerical tie{'s' if ties > 1 else ''} aside)" if ties else ""
        )
    else:
        sentence = "the bundle has no way to speculate, so there is nothing to compare"
    seeded = "the same text twice" if repeated else "different texts"
    return not real and repeated, f"{sentence}; a seed gives {seeded}", numbers


def _compare_decoding(
    engine: Engine, prompt: list[int], method: str, size: int, max_tokens: int
) -> tuple[int, list[_Difference], float]:
    """Decodes a prompt greedily both ways; where they part, goes on from the plain text to see the rest of it too.

    Returns:
        Tokens compared, where they differed, and the acceptance length of the first run.
    """
    text, room, length = list(prompt), max_tokens, 0.0
    found: list[_Difference] = []
    while room > 0 and len(text) < engine.manifest.max_seq_len and len(found) < _MAX_DIFFERENCES:
        params = SamplingParams(temperature=0.0, max_tokens=room, ignore_eos=True)
        plain = engine.generate(text, params, speculation=False).token_ids
        # A hypothesis that is right but for some of its tokens; other methods need none.
        expected = [token if at % _SLIP else 0 for at, token in enumerate(plain, 1)] if method == HYPOTHESIS else None
        completion = engine.generate(text, params, method=method, num_speculative_tokens=size, hypothesis=expected)
        fast, length = completion.token_ids, length or completion.stats.acceptance_length
        same = _common(plain, fast)
        text, room = [*text, *plain[:same]], room - same
        if same == len(plain) == len(fast):
            break
        a, b = (tokens[same] if same < len(tokens) else None for tokens in (plain, fast))
        found.append(_Difference(text, a, b))
        if a is None:
            break
        text, room = [*text, a], room - 1
    return len(text) - len(prompt), found, length


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens two texts share."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def _tied(bundle: Bundle, difference: _Difference, limits: logits.Limits) -> bool:
    """Whether two tokens' logits are so close that the verify step and the plain step may round them differently."""
    if difference.plain is None or difference.speculative is None:
        return False
    gap = logits.logit_gap(bundle, difference.text, difference.plain, difference.speculative)
    return gap <= limits.rounding


def _repeats(engine: Engine, text: list[int], max_tokens: int) -> bool:
    params = _SAMPLED.replace(max_tokens=max_tokens)
    # The first one reads the prompt. With one that is read already, heads and speculators have a plain step first.
    _, first, second = (engine.generate(text, params).token_ids for _ in range(3))
    return first == second


# --- report -----------------------------------------------------------------------------------------------------------

_STYLES = {"passed": "green", "failed": "bold red", "not run": "yellow"}


def render(report: VerifyReport) -> RenderableType:
    """The report as a table with a verdict below it."""
    table = Table(title=str(report.bundle), title_justify="left", show_edge=False)
    table.add_column("check")
    table.add_column("result", no_wrap=True)
    table.add_column("what was found")
    for check in report.checks:
        # As Text: a path may hold what rich would take for markup.
        table.add_row(check.name, Text(check.result, _STYLES[check.result]), Text(check.sentence))
    style = _STYLES["failed" if not report.passed else "passed" if report.verdict == "passed" else "not run"]
    return Group(table, "", Text(f"verdict: {report.verdict}", style))
