"""Commands that examine a bundle: ``inspect`` and ``verify``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import msgspec

from specexport.building import exporter, progress_bars
from specexport.commands import BundleOptions, report
from specexport.commands.draw import size_of, svg, terminal_tree, tree_of
from specexport.commands.flags import UsageError
from specexport.contract.errors import RequestError
from specexport.contract.manifest import GenerationDefaults, Manifest, short
from specexport.contract.methods import Method, method_name, text_methods
from specexport.contract.model import Model
from specexport.contract.options import option
from specexport.contract.reading import check_files, read_manifest
from specexport.contract.tree import PRESETS
from specexport.contract.values import counted
from specexport.runtime.backends.onnxruntime.kernels import kernels
from specexport.tables import Table, bytes_text, show

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "posterior_threshold", "posterior_alpha")


class InspectOptions(BundleOptions, frozen=True, kw_only=True):
    """Options of ``specexport inspect``.

    Attributes:
        bundle: a folder written by specexport build; with --tree also the JSON file of a tree or the name of a preset.
        tree: draw the token tree that a step verifies.
        method: with --tree, the method whose tree to draw (default: the bundle's first).
        hashes: also check the SHA-256 of every file.
    """

    bundle: Annotated[Path, option("BUNDLE", positional=True)]
    tree: bool = False
    method: Annotated[str | None, option("NAME")] = None
    hashes: bool = False


def inspect_command(command: InspectOptions) -> int:
    """Show the content of a bundle.

    Examples:
        specexport inspect qwen3/ --hashes
        specexport inspect mc_sim_7b_63 --tree
    """
    if command.method is not None and not command.tree:
        raise UsageError("--method was given without --tree; it chooses the tree that is drawn")
    if command.tree:
        for name in ("hashes", "json"):
            if getattr(command, name):
                raise UsageError(f"--{name} was given with --tree, which draws the tree alone; give one of them")
        tree = tree_of(command.bundle, command.method)
        show(terminal_tree(tree), f"{size_of(tree)}, {counted(len(tree.leaf_paths), 'path')}")
        return 0
    if str(command.bundle) in PRESETS or (command.bundle.is_file() and command.bundle.suffix == ".json"):
        raise RequestError(f"{command.bundle}: a token tree, which --tree draws; give --tree, or a bundle's folder")
    manifest = read_manifest(command.bundle)
    check_files(command.bundle, manifest, hashes=command.hashes)
    if command.json:
        print(json.dumps(msgspec.to_builtins(manifest), indent=2))
        return 0
    show(*summary(command.bundle, manifest), "", _files(manifest))
    return 0


def summary(folder: Path, manifest: Manifest) -> list[Table | str]:
    """The content of a bundle: a table with a column for each model, and a table of common properties."""
    models = manifest.models
    table = Table(str(folder), ("", *models))
    for label, cell in _ROWS:
        table.add_row(label, *(cell(model) for model in models.values()))
    size = sum(entry.size for entry in manifest.files)
    embeds, slots = manifest.target.embedding_size, manifest.batch_sizes[-1]
    lines = {
        "speculation": "\n".join(map(_speculation, manifest.methods))
        or "built without a method: text is looked up where that pays",
        "in every bundle": ", ".join(
            name for kind in text_methods() if manifest.method(name := method_name(kind)) is None
        ),
        "context": f"{manifest.max_seq_len} tokens, prefill in chunks of {manifest.prefill_chunk}",
        "prompts": "tokens" if embeds is None else f"tokens and embeddings of {embeds} numbers",
        "batch": f"up to {slots} requests at once" if slots > 1 else "one request at a time",
        "backend": f"{manifest.backend}, {manifest.lowering} lowering",
        **({"kernels here": kernels().described} if manifest.backend == "onnxruntime" else {}),
        "sampling": _sampling(manifest.generation),
        "chat template": ", ".join(manifest.tokenizer.templates) or "none",
        "end of text": ", ".join(map(str, manifest.tokenizer.eos_token_ids)) or "none",
        "size": f"{bytes_text(size)} in {len(manifest.files)} files",
        "built": f"{manifest.created} by specexport {manifest.specexport_version} (format {manifest.format_version}), "
        + ", ".join(f"{name} {version}" for name, version in manifest.built_with.items()),
    }
    if manifest.notes:
        lines["unlike transformers"] = "\n".join(map(str, manifest.notes))
    details = Table()
    for label, text in lines.items():
        details.add_row(label, text)
    return [table, "", details]


def _sampling(defaults: GenerationDefaults) -> str:
    """The default sampling parameters and the model's further rules."""
    values = msgspec.to_builtins(defaults)
    rules, neutral = values.pop("rules"), msgspec.to_builtins(GenerationDefaults())
    values = {name: value for name, value in values.items() if value != neutral[name] or name in _SAMPLING}
    values |= {name: value for name, value in rules.items() if value != neutral["rules"][name]}
    return ", ".join(f"{name} {short(value)}" for name, value in values.items())


def _speculation(method: Method) -> str:
    tree, *smaller = method.token_trees()
    shape = "in a chain" if tree.is_chain else f"in a tree of depth {tree.depth}"
    up_to = "up to " if method.own_widths or not method.needs_graph else ""
    width = method.widths()[0]
    drafted = counted(len(tree) - 1, "draft token")
    text = f"{method.describe()}: {up_to}{drafted} a step {shape}, verified {width} at a time; lossless"
    return text + (f"; requests may choose {_list(sorted(len(tree) - 1 for tree in smaller))}" if smaller else "")


def _cache(model: Model) -> str:
    row, layers = model.cache_row_bytes, counted(len(model.cache), "layer")
    return f"{layers}, {bytes_text(row)} a token (fp32)" if row else "none"


def _precision(model: Model) -> str:
    precision = model.precision
    text = f"{precision.weights}, computed in fp32"
    if model.ranks:
        text += f", split among {len(model.ranks)} processes"
    if precision.block_size:
        text += f", blocks of {precision.block_size}"
    elif precision.weights == "int8":
        text += ", one scale a column"
    if precision.weight_rms_error is not None:
        text += f", weight error {precision.weight_rms_error:.2%}"
    if precision.quality is not None:
        text += f"; {precision.quality}"
    before = precision.quantized_before
    if before is not None:
        text += f"; {before.kept} of its {before.format} matrices kept as they are"
        if before.converted and before.converted_rms_error is not None:
            text += f", {before.converted} rounded again (error {before.converted_rms_error:.2%})"
        text += f", the rest {before.rest}" if before.rest is not None else ""
    if precision.not_quantized:
        text += f"; left in fp32: {len(precision.not_quantized)}"
    return text


def _shapes(model: Model) -> str:
    points = model.graph.points
    tokens, caches, batches = (sorted({getattr(p, name) for p in points}) for name in ("tokens", "cache", "batch"))
    return f"batch {_list(batches)}; tokens {_list(tokens)}" + (f"; cache {_list(caches)}" if any(caches) else "")


def _engines(model: Model) -> str:
    lines = []
    for engine in model.engines:
        devices = ", ".join(engine.compute_capabilities) or "any GPU"
        rank = f", rank {engine.rank}" if model.ranks else ""
        lines.append(f"{' '.join((engine.runtime, engine.version)).strip()} for {devices}, in {engine.compute}{rank}")
    return "\n".join(lines) or "none"


def _list(values: list[int]) -> str:
    return ", ".join(map(str, values))


_ROWS = (
    ("family", lambda m: m.family),
    ("source", lambda m: m.source),
    ("parameters", lambda m: f"{m.parameters:,}"),
    ("vocabulary", lambda m: f"{m.vocab_size:,}"),
    ("made for", lambda m: f"{m.max_positions:,} positions"),
    ("weights", _precision),
    ("cache", _cache),
    ("shape points", _shapes),
    ("engines", _engines),
)


def _files(manifest: Manifest) -> Table:
    table = Table("files", ("path", "size", "sha256"), "lrl")
    for entry in manifest.files:
        table.add_row(entry.path, bytes_text(entry.size), entry.sha256[:16] + "…")
    return table


def about(folder: Path, manifest: Manifest) -> list[report.Part]:
    """A bundle's summary and the trees of its methods, for the end of a report."""
    trees = (report.Figure(f"Default tree of {m.name}", svg(m.token_trees()[0])) for m in manifest.methods)
    return [*summary(folder, manifest), *trees]


class VerifyOptions(BundleOptions, frozen=True, kw_only=True):
    """Options of ``specexport verify``.

    Attributes:
        target: folder or hub id of the original target (default: the one it was built from).
        source: folder of a method's checkpoint, if it has moved, such as medusa.model=heads/.
        prompt: prompt to compare on (default: five texts).
        max_tokens: tokens to generate for each prompt.
        report: also write a page with tables and charts that opens offline (default: none).
    """

    target: Annotated[str | None, option("DIR_OR_ID")] = None
    source: Annotated[tuple[str, ...], option("METHOD.KEY=DIR", repeat=True)] = ()
    prompt: Annotated[tuple[str, ...], option("TEXT", repeat=True)] = ()
    max_tokens: Annotated[int, option("N", short="-n", ge=1)] = 64
    report: Annotated[Path | None, option("FILE.html")] = None


def verify_command(command: VerifyOptions) -> int:
    """Check the files of a bundle, its graphs against the original model, and speculation against plain decoding.

    Example:
        specexport verify qwen3/ --prompt "Once upon a time" --report verify.html
    """
    sources = {}
    for source in command.source:
        key, equals, sources[key] = source.partition("=")
        if not equals:
            raise RequestError(
                f"source is {source!r}; expected METHOD.KEY=DIR, such as medusa.model=heads/", param="source"
            )
    report.check_path("--report", command.report)
    exporter("verifying")
    from specexport.verify.bundle import numbers, render, verify

    with progress_bars() as progress:
        result = verify(
            command.bundle,
            target=command.target,
            sources=sources,
            prompts=command.prompt or None,
            max_tokens=command.max_tokens,
            progress=progress,
        )
    command.show(result.as_dict(), *render(result))
    if command.report is not None:
        parts: list[report.Part] = [*render(result), numbers(result)]
        agreement = {c.name: c.numbers["agreement"] for c in result.checks if "agreement" in c.numbers}
        if agreement:
            label = "share of positions at which the same token is preferred"
            parts.append(report.Figure("Agreement with the models", report.bars(label, {"": agreement}, ("all", 1.0))))
        if result.checks[0].passed:  # the manifest can be read
            parts += about(command.bundle, read_manifest(command.bundle))
        report.write(command.report, f"verify: {command.bundle}", parts)
    return 0 if result.passed else 1
