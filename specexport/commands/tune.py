"""``specexport tune``: chooses trees and measures the costs of steps on this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from specexport.building import exporter, progress_bars
from specexport.commands import Command, MeasuringOptions, read_text, report
from specexport.commands.bench import read_lines
from specexport.commands.draw import svg, terminal_tree
from specexport.commands.inspect import about
from specexport.contract.errors import RequestError
from specexport.contract.manifest import Manifest
from specexport.contract.methods import Method
from specexport.contract.options import option
from specexport.contract.reading import changing
from specexport.contract.values import counted
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.bundle import Bundle
from specexport.runtime.machine import cache_folder
from specexport.runtime.speculation.costs import Cost, CostCurve
from specexport.runtime.speculation.timing import MOST_NOISE, stored_costs
from specexport.tables import Styled, Table
from specexport.tree_search import (
    TreeCandidate,
    candidates,
    observe,
    require_replaceable_trees,
    set_default_tree,
    step_costs,
)


class _TreeOptions(MeasuringOptions, frozen=True, kw_only=True):
    """Options of ``specexport tune tree``.

    Attributes:
        data: text like future requests, not the training data: text files, or .jsonl with a text per line.
        method: method whose tree to choose (default: the bundle's first).
        max_nodes: maximum number of tokens that a step verifies.
        prompts: number of prompts.
        prompt_tokens: maximum number of tokens of a prompt.
        max_tokens: tokens to generate for each prompt.
        temperature: divide logits by this; 0 decodes greedily.
        dry_run: print the result, but leave the bundle unchanged.
    """

    data: Annotated[tuple[Path, ...], option("FILE")]
    method: Annotated[str | None, option("NAME")] = None
    max_nodes: Annotated[int, option("N", ge=2)] = 32
    prompts: Annotated[int, option("N", ge=1)] = 32
    prompt_tokens: Annotated[int, option("N", ge=2)] = 128
    max_tokens: Annotated[int, option("N", short="-n", ge=2)] = 96
    temperature: Annotated[float, option("T", ge=0)] = 0.0
    dry_run: bool = False


class _BatchOptions(MeasuringOptions, frozen=True, kw_only=True):
    """Options of ``specexport tune batch``.

    Attributes:
        seconds: approximate duration; at least two rounds are measured.
        backend: backend that runs the bundle: onnxruntime, onnxruntime-cuda, tensorrt, tensorrt-rtx or an installed
            package's (default: the one it was built for).
    """

    seconds: Annotated[float, option("S", gt=0)] = 60.0
    backend: Annotated[str | None, option("NAME", group="the engine")] = None


def _tree_command(command: _TreeOptions) -> int:
    """Choose a method's token tree, and make it the default.

    Decodes text, counts which candidates are right, and times steps of every width; the best tree commits the most
    tokens a second.

    Example:
        specexport tune tree qwen3/ --data held-out.jsonl --dry-run --plot tree.html
    """
    if not command.dry_run:
        exporter("changing a bundle's tree")
    bundle = Bundle.open(command.bundle)
    manifest = bundle.manifest
    method = _method_to_tune(command.bundle, manifest, command.method)
    name = method.name
    if not command.dry_run:
        with changing(command.bundle):  # refuses to measure a bundle that cannot be changed
            pass
    with progress_bars() as bars:
        with Engine.load(
            command.bundle,
            check_hashes=False,
            calibrate=False,
            backend="onnxruntime",
            threads=command.threads,
        ) as engine:
            prompts = _read_prompts(engine, command.data, command.prompts, command.prompt_tokens)
            params = SamplingParams(
                temperature=command.temperature, max_tokens=command.max_tokens, seed=0, ignore_eos=True
            )
            observed = observe(engine, name, prompts, params, bars)
            device = engine.backend.device
        # The widest step that fits after the longest context, and the rows halfway through the decoded text.
        widest = max(point.cache for point in manifest.target.graph.points) - manifest.max_seq_len + 1
        rows = min(command.prompt_tokens + command.max_tokens // 2, manifest.max_seq_len - 1)
        costs = step_costs(bundle, rows, min(command.max_nodes, widest), command.threads, bars)
    ranked = candidates(method, observed, costs)
    if not ranked:
        raise RequestError("no candidate was right on this text, so no tree helps; the bundle is unchanged")
    best, table = ranked[0], _table(name, ranked, costs)
    command.show(_as_dict(name, ranked, costs), table, terminal_tree(best.tree))
    if command.plot is not None:
        parts = (device, table, *_figures(name, ranked, costs), *about(command.bundle, manifest))
        report.write(command.plot, f"tune tree: {command.bundle}", parts)
    done = f"{name}'s best tree here has {len(best.tree)} nodes; nothing was changed"
    if not command.dry_run:
        set_default_tree(command.bundle, name, best.tree)
        done = f"{command.bundle}: {name} now verifies {len(best.tree)} nodes a step by default"
    if not command.json:
        print(done + ("" if best.speed_up > 1 else "; plain decoding is faster on this device"))
    return 0


def _method_to_tune(bundle: Path, manifest: Manifest, name: str | None) -> Method:
    """The method of this name, or the bundle's first if it is None."""
    if not manifest.methods:
        raise RequestError(f"{bundle}: built without a method; there is no tree to tune")
    method = manifest.methods[0] if name is None else manifest.method(name)
    if method is None:
        names = ", ".join(method.name for method in manifest.methods)
        raise RequestError(f"method is {name!r}; the bundle has {names}", param="method")
    if not method.branching:
        raise RequestError(
            f"method is {method.name!r}, whose steps follow from its options, not from a tree; build it with other "
            "options instead",
            param="method",
        )
    require_replaceable_trees(bundle, manifest)
    return method


def _read_prompts(engine: Engine, files: Sequence[Path], count: int, tokens: int) -> list[list[int]]:
    """Prompts of at most ``tokens`` tokens: lines of ``.jsonl`` files, and windows of the text of other files."""
    limit = min(tokens, engine.manifest.max_seq_len // 2)
    prompts: list[list[int]] = []
    for path in files:
        if path.suffix == ".jsonl":
            prompts += [engine.encode(line.text)[:limit] for line in read_lines(path)]
            continue
        text = read_text(path, "a text file or .jsonl")
        ids = engine.encode(text) if text else []
        prompts += [ids[start : start + limit] for start in range(0, max(1, len(ids) - limit), 2 * limit)]
    prompts = [prompt for prompt in prompts if len(prompt) > 1]
    if not prompts:
        raise RequestError(f"{', '.join(map(str, files))}: no text of two tokens or more")
    # Spread over all files.
    step = max(1, len(prompts) // count)
    return prompts[::step][:count]


def _as_dict(name: str, ranked: list[TreeCandidate], costs: Sequence[float]) -> dict[str, object]:
    return {
        "method": name,
        "step_ms": [round(cost * 1e3, 4) for cost in costs],
        "trees": [
            {
                "choices": candidate.tree.choices,
                "tokens_per_step": candidate.tokens,
                "step_ms": candidate.seconds * 1e3,
                "tokens_per_second": candidate.tokens_per_second,
                "speed_up": candidate.speed_up,
            }
            for candidate in ranked
        ],
    }


def _table(name: str, ranked: list[TreeCandidate], costs: Sequence[float]) -> Table:
    table = Table(
        f"{name}: the best tree of each size",
        ("nodes", "depth", "tokens a step", "c(T) ms", "step ms", "tokens/s", "against plain"),
        "r",
    )
    for candidate in sorted(ranked, key=lambda candidate: len(candidate.tree)):
        cells = (
            str(len(candidate.tree)),
            str(candidate.tree.depth),
            f"{candidate.tokens:.2f}",
            f"{costs[len(candidate.tree) - 1] * 1e3:.2f}",
            f"{candidate.seconds * 1e3:.2f}",
            f"{candidate.tokens_per_second:.1f}",
            f"{candidate.speed_up:.2f}x",
        )
        table.add_row(*(Styled(cell, "bold" if candidate is ranked[0] else "") for cell in cells))
    return table


def _figures(name: str, ranked: list[TreeCandidate], costs: Sequence[float]) -> list[report.Figure]:
    best, by_size = ranked[0], sorted(ranked, key=lambda candidate: len(candidate.tree))
    rates = [(len(candidate.tree), candidate.tokens_per_second) for candidate in by_size]
    tokens = [(len(candidate.tree), candidate.tokens) for candidate in by_size]
    steps = [(width, cost * 1e3) for width, cost in enumerate(costs, start=1)]
    whole = [(len(candidate.tree), candidate.seconds * 1e3) for candidate in by_size]
    plain = ("plain", best.tokens_per_second / best.speed_up)
    charts = {
        "Speed, by size of the tree": report.lines("nodes", "tokens/s", {name: rates}, plain),
        "Expected tokens of a step": report.lines("nodes", "tokens a step", {name: tokens}),
        "Cost of a step": report.lines("nodes", "ms", {"c(T), the target": steps, "whole step": whole}),
        f"The best tree: {len(best.tree)} nodes": svg(best.tree),
    }
    return [report.Figure(*chart) for chart in charts.items()]


def _batch_command(command: _BatchOptions) -> int:
    """Measure and keep the costs of steps, by which each step chooses how much to speculate.

    Times steps of every width and proposals at every batch size, for longer than when a bundle is first opened on this
    machine. Engines with as many threads speculate as much as pays by these figures: less as the batch fills.

    Example:
        specexport tune batch qwen3/ --seconds 120 --plot costs.html
    """
    with (
        progress_bars() as progress,
        Engine.load(
            command.bundle, check_hashes=False, calibrate=False, threads=command.threads, backend=command.backend
        ) as engine,
    ):
        curve, device = engine.calibrate(command.seconds, progress), engine.backend.device
        manifest = engine.manifest
        kept = stored_costs(manifest, engine.backend, engine.slots).load() == curve
    command.show(curve, device, *tables(curve))
    if command.plot is not None:
        steps = report.lines("T, tokens a slot", "ms", _by_slots(curve.steps))
        charts = [report.Figure("A step of the target", steps)]
        for costs in curve.methods:
            chart = report.lines("nodes of a tree", "ms", _by_slots(costs.propose))
            charts.append(report.Figure(f"Proposing with {costs.method}", chart))
        parts = (device, *tables(curve), *charts, *about(command.bundle, manifest))
        report.write(command.plot, f"tune batch: {command.bundle}", parts)
    if not kept:
        why = "the machine was too busy" if curve.noise > MOST_NOISE else f"{cache_folder()} cannot be written"
        print(f"warning: these figures are not kept, as {why}", file=sys.stderr)
    return 0


def tables(curve: CostCurve) -> list[Table]:
    """The tables of a curve at its smallest cache size: steps, then each measured method."""
    steps = _costs_table(f"ms a step of T tokens a slot, after {curve.text} tokens", "T", curve.steps)
    title = "ms to propose a tree, by its nodes"
    return [steps, *(_costs_table(f"{costs.method}: {title}", "nodes", costs.propose) for costs in curve.methods)]


def _by_slots(costs: Sequence[Cost]) -> dict[str, list[tuple[float, float]]]:
    """Milliseconds by tokens, for each number of slots."""
    series: dict[str, list[tuple[float, float]]] = {}
    for cost in sorted(costs, key=lambda cost: (cost.batch, cost.tokens)):
        series.setdefault(counted(cost.batch, "slot"), []).append((cost.tokens, cost.seconds * 1e3))
    return series


def _costs_table(title: str, axis: str, costs: Sequence[Cost]) -> Table:
    at = {(cost.batch, cost.tokens): cost.seconds for cost in costs}
    batches, tokens = (sorted({key[place] for key in at}) for place in (0, 1))
    table = Table(title, ("slots", *(f"{axis} = {count}" for count in tokens)), "r")
    for batch in batches:
        row = [at.get((batch, count)) for count in tokens]
        table.add_row(str(batch), *("-" if seconds is None else f"{seconds * 1e3:.2f}" for seconds in row))
    return table


def tune_flags(parser: argparse.ArgumentParser) -> None:
    """Measure a bundle on this machine: 'tune tree' chooses the token tree, 'tune batch' measures the costs of steps.

    Examples:
        specexport tune tree qwen3/ --data held-out.jsonl
        specexport tune batch qwen3/
    """
    kinds = parser.add_subparsers(required=True, metavar="WHAT")
    Command("tree", _TreeOptions, _tree_command).add_to(kinds)
    Command("batch", _BatchOptions, _batch_command).add_to(kinds)
