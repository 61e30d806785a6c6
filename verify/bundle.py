"""``specexport verify``: is a bundle whole, and does it compute what the models it was built from compute?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from specexport.checkpoints.locate import locate
from specexport.contract.errors import RequestError, SpecExportError
from specexport.contract.methods import Method
from specexport.contract.reading import check_files, read_manifest
from specexport.exporter.method import exporter_of
from specexport.runtime.bundle import Bundle
from specexport.verify import engines, logits
from specexport.verify.decoding import compare_decoding
from specexport.verify.graphs import check_graphs
from specexport.verify.methods import MethodRun, NotRunError
from specexport.verify.report import Check, Numbers, VerifyReport

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

Progress = Callable[[str, int, int], None]
"""Called with a check's name, how much of it is done, and how much there is in all."""

Outcome = tuple[bool, str, Numbers]
"""Whether a check passed, one sentence, and what was measured."""


def verify(
    bundle: Path,
    *,
    target: str | None = None,
    sources: Mapping[str, str] | None = None,
    prompts: Sequence[str] | None = None,
    max_tokens: int = 64,
    progress: Progress | None = None,
) -> VerifyReport:
    """Checks a bundle.

    Args:
        bundle: its folder.
        target: folder or hub id of the model it was built from; None for what the manifest names.
        sources: where the checkpoints of methods are now, by ``METHOD.key``, such as ``medusa.model``; None for what
            the manifest names.
        prompts: texts to compare on; None for :data:`DEFAULT_PROMPTS`.
        max_tokens: tokens to generate for each prompt.
        progress: see :data:`Progress`.

    Raises:
        SpecExportError: an argument is wrong. What is wrong with the bundle is in the report.
    """
    report = progress or (lambda *_: None)
    if max_tokens < 1:
        raise RequestError(f"max_tokens is {max_tokens}; expected at least 1")
    files = _attempt("files", lambda: _files(bundle, report))
    if not files.passed:
        reason = "the bundle's files are not what they should be"
        rest = (Check(name, None, reason) for name in ("graphs", "logits", "quality", "speculation"))
        return VerifyReport(bundle, (files, *rest))
    opened = Bundle.open(bundle, check_hashes=False)
    given = _moved(opened, target, sources or {})
    texts = _texts(opened, prompts or DEFAULT_PROMPTS, max_tokens)
    run = MethodRun(opened, texts, given)
    steps: dict[str, Callable[[], Outcome]] = {"graphs": lambda: _graphs(opened, report)}
    if opened.manifest.engines:
        steps["engines"] = lambda: _engines(opened, report)
    steps["logits"] = lambda: _logits(run)
    steps["quality"] = lambda: _quality(run)
    if opened.manifest.target.embedding_size is not None:
        steps["embeds"] = lambda: _embeds(run)
    for method in opened.manifest.methods:
        if method.needs_graph:
            steps[method.name] = partial(_method, method, run)
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
    except NotRunError as reason:
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
        raise NotRunError(f"the engines were not compared with their ONNX graphs: {error}") from error
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


def _logits(run: MethodRun) -> Outcome:
    model = run.bundle.manifest.target
    limits = logits.LIMITS[model.precision.weights]
    found = logits.compare_logits(run.bundle, run.source(None), run.texts, limits)
    numbers = {
        "largest_difference": found.largest,
        "largest_difference_relative": found.largest / found.scale,
        "rms_difference_relative": found.rms,
        **_counted(found.agreement),
    }
    within = found.largest <= limits.largest * found.scale and found.rms <= limits.rms
    passed = found.finite and within and found.agreement.share >= limits.agreement
    largest = f"at most {found.largest / found.scale:.2g} of the largest" + (
        f" (limit {limits.largest:g})" if math.isfinite(limits.largest) else ""
    )
    sentence = (
        f"the graph's logits differ from the model's by {largest}, root mean square {found.rms:.2g} of their spread "
        f"(limit {limits.rms:g}); it prefers the same token at {_agreement(found.agreement)}"
    )
    return passed, sentence if found.finite else "the graph makes logits that are not finite numbers", numbers


def _quality(run: MethodRun) -> Outcome:
    precision = run.bundle.manifest.target.precision.weights
    limit = logits.LIMITS[precision].kl
    found = logits.measure_quality(run.bundle, run.source(None))
    if found is None:
        raise NotRunError("the tokenizer makes fewer than two tokens of the text that is measured over")
    passed = found.kl <= limit  # false for what is no number, too
    sentence = f"{found} (limit: KL {limit:g})"
    if not passed:
        sentence += f": {precision} broke the model; build it again in more bits (docs/precision.md)"
    return passed, sentence, {name: float(value) for name, value in msgspec.structs.asdict(found).items()}


def _embeds(run: MethodRun) -> Outcome:
    model = run.bundle.manifest.target
    limits = logits.LIMITS[model.precision.weights]
    found = logits.compare_embeds(run.bundle, run.source(None), run.texts, limits)
    sentence = (
        "given the model's own embeddings instead of every other token, the graph prefers the model's token at "
        f"{_agreement(found)}"
    )
    return found.share >= limits.agreement, sentence, _counted(found)


def _method(method: Method, run: MethodRun) -> Outcome:
    compared = exporter_of(method).compare(method, run)
    if compared is None:
        raise NotRunError(f"{method.name} has no graph of its own to compare")
    sentence, found = compared
    assert isinstance(found, logits.Agreement)
    return found.share >= found.limits.agreement, f"{sentence} at {_agreement(found)}", _counted(found)


def _moved(bundle: Bundle, target: str | None, sources: Mapping[str, str]) -> dict[str, str]:
    """Where checkpoints are now, as far as given.

    Raises:
        RequestError: something was given for what the bundle was built without.
        BuildError: a checkpoint that was given is not there.
    """
    known = {f"{method.name}.{key}": kind for method in bundle.manifest.methods for key, kind in method.sources.items()}
    for key in sources:
        if key not in known:
            raise RequestError(
                f"{key} was given, but {bundle.folder} was built without it; expected one of "
                f"{', '.join(known) or 'none'}",
                param=key,
            )
    found = dict(sources) | ({} if target is None else {"target": target})
    for key, value in found.items():
        if known.get(key) != "folder":
            locate(value)  # an argument that is wrong is no result of a check
    return found


def _counted(found: logits.Agreement) -> Numbers:
    return {"positions": found.positions, "same": found.same, "ties": found.ties, "agreement": found.share}


def _agreement(found: logits.Agreement) -> str:
    ties = f" and one as good at {found.ties}" if found.ties else ""
    return f"{found.same} of {found.positions} positions{ties} (limit {found.limits.agreement:.0%})"


# --- speculation ------------------------------------------------------------------------------------------------------


def _speculation(bundle: Bundle, texts: list[list[int]], max_tokens: int, progress: Progress) -> Outcome:
    found = compare_decoding(bundle, texts, max_tokens, lambda done, total: progress("speculation", done, total))
    numbers: Numbers = {"tokens": found.tokens, "differences": len(found.differences)}
    if found.acceptance_length is not None:
        numbers["acceptance_length"] = found.acceptance_length
    if found.differences:
        first = found.differences[0]
        sentence = (
            f"speculation changes greedy output: after {len(first.text)} tokens it goes on with token "
            f"{first.speculative} where plain decoding has {first.plain} ({len(found.differences)} such places)"
        )
    elif found.acceptance_length is not None:
        sentence = f"greedy output is the same with speculation and without, {found.tokens} tokens"
    else:
        sentence = "the bundle has no method, so there is nothing to compare"
    sentence += f"; not promised bit for bit: {found.inexact}" if found.inexact else "; rows exact"
    seeded = "the same text twice" if found.repeated else "different texts"
    return not found.differences and found.repeated, f"{sentence}; a seed gives {seeded}", numbers
