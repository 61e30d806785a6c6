"""``specexport verify``: the checks of a bundle and their report."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto

from specexport.contract.engines import FUSED_OPERATORS
from specexport.contract.errors import BundleError, RequestError, SpecExportError
from specexport.contract.methods import Method
from specexport.contract.model import OPSETS, Model, RankFiles
from specexport.contract.reading import check_files, read_manifest
from specexport.contract.signature import Interface, cache_inputs, cache_outputs, describe, interfaces
from specexport.contract.tensors import CARRIED, COLLECTIVES, Tensor
from specexport.contract.values import Progress, counted
from specexport.exporter.checkpoints.locate import locate
from specexport.exporter.method import exporter_of
from specexport.runtime.backends.links import without_links
from specexport.runtime.bundle import Bundle
from specexport.tables import Styled, Table
from specexport.verify import engines, logits
from specexport.verify.logits import NotRunError, Numbers, Outcome
from specexport.verify.methods import MethodRun, compare_decoding

_TYPES: dict[int, str] = {TensorProto.INT64: "int64", TensorProto.FLOAT: "float32", TensorProto.BOOL: "bool"}
_STYLES = {"passed": "green", "failed": "bold red", "not run": "yellow"}
DEFAULT_PROMPTS = (
    "The old man looked out of the window and thought about the long way home.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    # Long: several prefill chunks, and a cache that must grow if the context is not tiny.
    "\n".join(f"{n} squared is {n * n}." for n in range(1, 64)),
    "Ærøskøbing, Łódź, Αθήνα, Москва, 東京, naïve café, 🙂",
    '{"name": "Ada Lovelace", "born": 1815, "fields": ["mathematics",',
)

_LONGEST_PROMPT = 224
"""Maximum number of tokens of a prompt, as the original model reads the text again for every step."""


@dataclass(frozen=True)
class Check:
    """A check and its result.

    Attributes:
        name: ``files``, ``graphs``, ``engines``, ``logits``, ``quality``, ``embeds``, the name of a method, or
            ``speculation``.
        passed: whether it passed; None if it could not be run.
        sentence: the finding, or the reason why it was not run.
    """

    name: str
    passed: bool | None
    sentence: str
    numbers: Numbers = field(default_factory=dict)

    @property
    def result(self) -> str:
        return "not run" if self.passed is None else "passed" if self.passed else "failed"


@dataclass(frozen=True)
class VerifyReport:
    """The checks of a bundle, in order."""

    bundle: Path
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed is not False for check in self.checks)

    @property
    def verdict(self) -> str:
        if not self.passed:
            return "failed"
        return "passed" if all(check.passed for check in self.checks) else "passed what could be checked"

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON, with null for numbers that are not finite."""
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


def numbers(report: VerifyReport) -> Table:
    """A table of the measurements of all checks."""
    table = Table("measurements", ("check", "figure", "value"), "llr")
    for check in report.checks:
        for name, value in check.numbers.items():
            table.add_row(check.name, name.replace("_", " "), f"{value:.6g}" if value % 1 else f"{value:.0f}")
    return table


def render(report: VerifyReport) -> list[Table | Styled | str]:
    """The report as a table and a verdict."""
    table = Table(str(report.bundle), ("check", "result", "finding"))
    for check in report.checks:
        table.add_row(check.name, Styled(check.result, _STYLES[check.result]), check.sentence)
    style = _STYLES["failed" if not report.passed else "passed" if report.verdict == "passed" else "not run"]
    return [table, "", Styled(f"verdict: {report.verdict}", style)]


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
        target: folder or hub id of the original model; None for the manifest's.
        sources: the methods' checkpoints by ``METHOD.key``, such as ``medusa.model``; None for the manifest's.
        prompts: texts to compare on; None for :data:`DEFAULT_PROMPTS`.
        max_tokens: tokens to generate for each prompt.

    Raises:
        SpecExportError: an argument is wrong. Faults of the bundle are part of the report.
    """
    report = progress or (lambda *_: None)
    files = _attempt("files", lambda: _files(bundle, report))
    if not files.passed:
        reason = "the bundle's files are not what they should be"
        not_run = (Check(name, None, reason) for name in ("graphs", "logits", "quality", "speculation"))
        return VerifyReport(bundle, (files, *not_run))
    opened = Bundle.open(bundle, check_hashes=False)
    locations = _locations(opened, target, sources or {})
    texts = _texts(opened, prompts or DEFAULT_PROMPTS, max_tokens)
    run = MethodRun(opened, texts, locations)
    steps: dict[str, Callable[[], Outcome]] = {"graphs": lambda: _graphs(opened, report)}
    if opened.manifest.engines:
        steps["engines"] = lambda: _engines(opened, report)
    steps["logits"] = lambda: logits.compare_logits(opened, run.source(None), texts)
    steps["quality"] = lambda: logits.compare_quality(opened, run.source(None))
    if opened.manifest.target.embedding_size is not None:
        steps["embeds"] = lambda: logits.compare_embeds(opened, run.source(None), texts)
    for method in opened.manifest.methods:
        if method.needs_graph:
            steps[method.name] = partial(_method, method, run)
    steps["speculation"] = lambda: compare_decoding(opened, texts, max_tokens, report)
    checks = [files]
    for name, step in steps.items():
        report(name, 0, 1)
        checks.append(_attempt(name, step))
        report(name, 1, 1)
    return VerifyReport(bundle, tuple(checks))


def _attempt(name: str, step: Callable[[], Outcome]) -> Check:
    """Runs a check; turns errors into results."""
    try:
        passed, sentence, numbers = step()
    except NotRunError as reason:
        return Check(name, None, str(reason))
    except SpecExportError as error:
        return Check(name, False, str(error))
    except Exception as error:  # onnx, onnxruntime and torch raise anything for broken graphs and models
        return Check(name, False, f"{type(error).__name__}: {error}")
    return Check(name, passed, sentence, numbers)


def _texts(bundle: Bundle, prompts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """The tokens of the prompts, cut to leave room for the output, at most half of the context."""
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
    sentence = f"{counted(count, 'file')} with the sizes and hashes of the manifest"
    return True, sentence, {"files": count, "bytes": total}


def _graphs(bundle: Bundle, progress: Progress) -> Outcome:
    count = check_graphs(bundle, progress)
    finding = "valid ONNX of standard operators, with the declared inputs, outputs and shapes"
    return True, f"{counted(count, 'graph')}: {finding}", {"graphs": count}


def _engines(bundle: Bundle, progress: Progress) -> Outcome:
    try:
        library, subjects = engines.runnable(bundle.manifest)
    except SpecExportError as error:
        raise NotRunError(f"the engines were not compared with their ONNX graphs: {error}") from error
    runner = partial(engines.tensorrt_runner, library, bundle.folder)
    differences = engines.compare_engines(bundle, subjects, runner, progress)
    worst = max(size for size, _ in differences)
    wrong = [where for size, where in differences if size > 1]
    numbers: Numbers = {"engines": len(subjects), "shapes": len(differences), "largest_difference_allowed": worst}
    compared = (
        f"{counted(len(subjects), 'engine')} of {library.runtime} {library.version} at "
        f"{counted(len(differences), 'shape')}, compared with their ONNX graphs"
    )
    if wrong:
        return False, f"{compared}: {counted(len(wrong), 'difference')}; {wrong[0]}", numbers
    skipped = len(bundle.manifest.engines) - len(subjects)
    sentence = f"{compared}: at most {worst:.0%} of the allowed difference"
    return True, sentence + (f"; not run, for other devices: {skipped}" if skipped else ""), numbers


# --- against the original models --------------------------------------------------------------------------------------


def _method(method: Method, run: MethodRun) -> Outcome:
    if not method.stored:
        raise NotRunError(f"{method.name} has no graph of its own to compare")
    stored = {*method.stored, *([run.bundle.manifest.target.precision.weights] if method.target_outputs else [])}
    agreement = logits.TokenAgreement(max((logits.LIMITS[kind] for kind in stored), key=lambda limits: limits.rms))
    for expected, chosen in exporter_of(method).compare(method, run):
        agreement.count(expected, chosen)
    return agreement.passed, f"its graph proposes the original's own token at {agreement}", agreement.numbers


def _locations(bundle: Bundle, target: str | None, sources: Mapping[str, str]) -> dict[str, str]:
    """The checkpoints that the caller names.

    Raises:
        RequestError: the bundle was built without such a checkpoint.
        BuildError: a checkpoint does not exist.
    """
    kinds = {f"{method.name}.{key}": kind for method in bundle.manifest.methods for key, kind in method.sources.items()}
    for key in sources:
        if key not in kinds:
            raise RequestError(
                f"{key} was given, but {bundle.folder} was built without it; expected one of "
                f"{', '.join(kinds) or 'none'}",
                param=key,
            )
    locations = dict(sources) | ({} if target is None else {"target": target})
    for key, value in locations.items():
        if kinds.get(key) != "folder":
            locate(value)  # wrong arguments are errors, not results of checks
    return locations


def check_graphs(bundle: Bundle, progress: Progress) -> int:
    """Checks all graphs of a bundle, the masters and those that GPUs or ranks open instead; returns their number.

    Raises:
        BundleError: a graph is not valid ONNX or not of its lowering's opset, uses operators outside the standard, has
            other inputs, outputs or shapes than declared, or weights in other files; names the first such graph.
    """
    manifest = bundle.manifest
    lowering = manifest.lowering
    described = [(manifest.target, manifest.target_signature)]
    described += [(m.written_draft, m.signature) for m in manifest.methods if m.signature is not None]
    sources = [(engine, m) for m, _ in described for engine in m.engines if engine.file == engine.source]
    count = len(described) + len(sources)
    for done, (model, signature) in enumerate(described, start=1):
        for files in model.ranks or (
            RankFiles(weights=model.weights, master=model.graph.master, segments=(model.graph.master,)),
        ):
            weights = _weights(bundle, files.weights, model)
            graphs = [_check_graph(bundle.file(name), OPSETS[lowering], weights) for name in files.segments]
            inner = {value.name for graph in graphs for value in graph.output}
            inputs = {value.name: value for graph in graphs for value in graph.input if value.name not in inner}
            produced = (value for graph in graphs for value in graph.output)
            final = [value for value in produced if not value.name.startswith((CARRIED, *COLLECTIVES))]
            path = bundle.file(files.segments[0])
            part = model.of_rank(0)
            _check_interface(path, (*signature.inputs, *cache_inputs(part)), "input", inputs.values())
            returned = cache_outputs(part.cache, part.states, lowering, signature.fed)
            _check_interface(path, (*signature.outputs, *returned), "output", final)
        progress("graphs", done, count)
    for done, (engine, model) in enumerate(sources, start=len(described) + 1):
        weights = _weights(bundle, model.of_rank(engine.rank).weights, model)
        if (converted := bundle.file(engine.source).with_suffix(".bin")).is_file():
            weights.append(converted)
        for name in engine.segments or (engine.file,):
            _check_graph(bundle.file(name), OPSETS[lowering], weights, FUSED_OPERATORS)
        progress("graphs", done, count)
    return count


def _weights(bundle: Bundle, file: str, model: Model) -> list[Path]:
    """The files of a model's weights: ``file``, and the target's if it shares some of those."""
    target = bundle.manifest.target.weights
    return [bundle.file(name) for name in (file, *([target] if model.shared_bytes else []))]


def _check_graph(
    path: Path, opset: int, weights: Sequence[Path], additional: Collection[tuple[str, str]] = ()
) -> onnx.GraphProto:
    """Reads and checks a graph of standard and ``additional`` operators, given by domain and type."""
    try:
        # By path, so that weights are found relative to the graph.
        with without_links(path, weights) as plain:
            onnx.checker.check_model(str(plain), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise BundleError(f"{path}: not a valid ONNX graph: {error}; build the bundle again") from error
    model = onnx.load(path, load_external_data=False)
    version = {entry.domain: entry.version for entry in model.opset_import}.get("")
    if version != opset:
        raise BundleError(f"{path}: opset {version}, expected {opset}; build the bundle again")
    graphs = _subgraphs(model.graph)
    nodes = [node for graph in graphs for node in graph.node]
    others = {(node.domain, node.op_type) for node in nodes if node.domain not in ("", "ai.onnx")}
    foreign = sorted(map(".".join, others.difference(additional)))
    if foreign or model.functions:
        raise BundleError(f"{path}: operators outside the ONNX standard: {', '.join(foreign) or 'local functions'}")
    sizes = {file.name: file.stat().st_size for file in weights}
    for tensor in (tensor for graph in graphs for tensor in graph.initializer):
        if tensor.data_location == TensorProto.EXTERNAL:
            entry = {item.key: item.value for item in tensor.external_data}
            end = int(entry.get("offset", 0)) + int(entry.get("length", 0))
            if end > sizes.get(entry["location"], -1):
                inside = " or ".join(sizes)
                raise BundleError(f"{path}: weight {tensor.name} is not inside {inside}; build the bundle again")
    return model.graph


def _check_interface(path: Path, signature: Iterable[Tensor], kind: str, values: Iterable[onnx.ValueInfoProto]) -> None:
    expected = interfaces(signature)
    actual = {value.name: _interface(value) for value in values}
    for name in sorted(actual.keys() | expected.keys()):
        if actual.get(name) != expected.get(name):
            raise BundleError(
                f"{path}: {kind} {name} is {describe(actual.get(name))}, expected {describe(expected.get(name))}"
            )


def _subgraphs(graph: onnx.GraphProto) -> list[onnx.GraphProto]:
    """The graph and all graphs in the attributes of its nodes."""
    inner = [a.g for node in graph.node for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
    return [graph, *(deeper for nested in inner for deeper in _subgraphs(nested))]


def _interface(value: onnx.ValueInfoProto) -> Interface:
    kind = value.type.tensor_type
    name = _TYPES.get(kind.elem_type) or TensorProto.DataType.Name(kind.elem_type).lower()
    return name, tuple(dim.dim_param or dim.dim_value for dim in kind.shape.dim)
