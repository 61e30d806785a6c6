"""All methods on the benchmark-size pair, by tree size.

All take turns on each prompt, so that drift of the machine's speed affects all equally. Trees of heads are chosen by
the accuracy that training measured; one is tuned on this machine, for greedy decoding, with other prompts. Speeds are
tokens over seconds, both summed over prompts, against plain decoding of the bundle without heads.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import common
from benchmarks.inflate import inflate_speculator, inflate_states_draft
from benchmarks.pair import built, inflated_draft, inflated_heads, inflated_pair
from specexport.contract.reading import read_manifest
from specexport.contract.tree import TokenTree
from specexport.runtime import Completion, Engine, SamplingParams
from specexport.runtime.bundle import Bundle
from specexport.runtime.speculative import PLAIN
from specexport.tables import Table, show
from specexport.tree_search import candidates, observe, set_default_tree, step_costs

SIZES = (2, 3, 4, 5, 6, 8, 12, 16)
CHAINS = (1, 2, 3, 4, 6, 8)
SPINES = tuple(
    TokenTree.from_choices([*([0] * n for n in range(1, depth + 1)), *([0] * n + [1] for n in range(beside))])
    for depth, beside in ((4, 1), (4, 3), (6, 3))
)
"""Trees of a draft model: its chain and the second best token beside the first ones; of other sizes than chains."""
WARM_UP = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``python -m benchmarks methods``."""
    common.add_common_arguments(parser, num_prompts=8, prompt_tokens=128, new_tokens=96)
    parser.add_argument("--draft-heads", default="demo-draft-medusa", help="heads of demo-draft; left out if not there")
    parser.add_argument("--speculator", type=Path, help="an MLP speculator of demo-target, to be compared too")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--nodes", type=int, nargs="+", default=(), help="only trees of these sizes")
    parser.add_argument("--tuning-prompts", type=int, default=24, help="others, from the end of the file")
    parser.add_argument("--temperature", type=float, default=0.7, help="of the sampled rows")


@dataclass(frozen=True)
class Way:
    """One row: a bundle, a method of it, and the sampling."""

    bundle: str
    method: str | None
    tree: TokenTree
    params: SamplingParams
    tuned: bool = False

    @property
    def sampling(self) -> str:
        """Its description."""
        return "greedy" if self.params.greedy else f"T = {self.params.temperature:g}, {self.params.acceptance}"


@dataclass
class Row:
    """The result of one way.

    Attributes:
        method: of the bundle; ``plain`` for none.
        sampling: greedy, or the temperature and the rule of acceptance.
        nodes: T, tokens a step verifies.
        depth: of the tree.
        tuned: whether ``tune tree`` chose it.
        tokens_per_step: acceptance length.
        step_ms: c(T), the target's bare graph.
        tokens_per_second: decoding only.
        speed_up: over plain decoding with the same sampling.
        same_text: prompts whose greedy text equals plain decoding's.
    """

    method: str
    sampling: str
    nodes: int
    depth: int
    tuned: bool
    tokens_per_step: float
    step_ms: float
    tokens_per_second: float
    speed_up: float
    same_text: int


def main(args: argparse.Namespace) -> int:
    """Runs the benchmark and prints its table."""
    texts = common.read_texts(args.prompts)
    if args.num_prompts + args.tuning_prompts > len(texts):
        raise SystemExit(f"{args.prompts} has {len(texts)} prompts, fewer than are to be decoded and tuned with")
    folders = _bundles(args)
    greedy = SamplingParams(max_tokens=args.new_tokens, temperature=0.0, seed=0, ignore_eos=True)
    sampled = greedy.replace(temperature=args.temperature)
    costs = {
        name: step_costs(Bundle.open(folder, check_hashes=False), 176, 64, args.threads, lambda *_: None)
        for name, folder in folders.items()
    }
    tuned = {
        name: _tune(folder, costs[name], greedy, texts[-args.tuning_prompts :], args)
        for name, folder in folders.items()
    }
    ways = [
        way
        for way in _ways(folders, tuned, greedy, sampled)
        if way.method is None or not args.nodes or len(way.tree) in args.nodes
    ]
    runs: list[list[Completion]] = [[] for _ in ways]
    engines = {
        name: Engine.load(folder, threads=args.threads, check_hashes=False, calibrate=False)
        for name, folder in folders.items()
    }
    prompts = [engines["draft"].encode(text)[: args.prompt_tokens] for text in texts[: args.num_prompts]]
    for warm in (True, False):
        for prompt in tqdm(prompts[:1] if warm else prompts, "warming up" if warm else "decoding", disable=None):
            for way, done in zip(ways, runs, strict=True):
                completion = _decode(engines[way.bundle], way, prompt, WARM_UP if warm else args.new_tokens)
                if not warm:
                    done.append(completion)
    rows = [_row(way, done, ways, runs, costs[way.bundle]) for way, done in zip(ways, runs, strict=True)]
    show(_table(args, rows))
    names = ("precision", "num_prompts", "tuning_prompts", "prompt_tokens", "new_tokens", "temperature")
    common.write_report(
        args.json,
        {
            "machine": common.machine(args.threads),
            "options": {name: getattr(args, name) for name in names},
            "step_ms": {name: [cost * 1e3 for cost in curve] for name, curve in costs.items()},
            "rows": [asdict(row) for row in rows],
        },
    )
    return 0


def _bundles(args: argparse.Namespace) -> dict[str, Path]:
    """The bundles: with a draft, heads on the target, heads on the draft, a speculator, EAGLE-3 and DFlash."""
    target, draft = inflated_pair(args.models, args.work)
    heads = inflated_heads(args.models, "demo-medusa", target, args.work)
    common: dict[str, Any] = {"precision": args.precision, "max_seq_len": 512}
    chains = tuple(TokenTree.chain(k + 1) for k in CHAINS)
    stem = args.work / f"methods.{target.name}.{args.precision}"

    def bundle(name: str, **method: Any) -> Path:
        return built(Path(f"{stem}.{name}"), target, methods=(method,), **common)

    bundles = {
        "draft": bundle("draft", method="draft_model", model=str(draft), trees=(*chains, *SPINES)),
        "medusa": bundle(heads.name, method="medusa", model=str(heads), num_speculative_tokens=SIZES),
    }
    if (args.models / args.draft_heads).is_dir():
        on_draft = inflated_heads(args.models, args.draft_heads, draft, args.work)
        bundles["medusa_draft"] = bundle(
            on_draft.name,
            method="medusa_draft",
            model=str(draft),
            medusa=str(on_draft),
            num_speculative_tokens=SIZES,
        )
    if args.speculator is not None:
        stages = inflated_draft(args.speculator, args.models, target, args.work, inflate_speculator)
        bundles["mlp_speculator"] = bundle(
            stages.name, method="mlp_speculator", model=str(stages), num_speculative_tokens=SIZES
        )
    for method, trees in (("eagle3", (*chains, *SPINES)), ("dflash", tuple(tree for tree in chains if tree.depth < 8))):
        if (args.models / f"demo-{method}").is_dir():
            inflated = inflated_draft(
                args.models / f"demo-{method}", args.models, target, args.work, inflate_states_draft
            )
            bundles[method] = bundle(inflated.name, method=method, model=str(inflated), trees=trees)
    return bundles


def _tune(folder: Path, costs: list[float], params: SamplingParams, texts: list[str], args: Any) -> TokenTree:
    """Tunes a tree for this machine and adds it to the bundle."""
    (method,) = read_manifest(folder).methods
    with Engine.load(folder, threads=args.threads, check_hashes=False, calibrate=False) as engine:
        prompts = [engine.encode(text)[: args.prompt_tokens] for text in texts]
        observed = observe(engine, method.name, prompts, params, lambda *_: None)
    best = candidates(method, observed, costs)[0].tree
    set_default_tree(folder, method.name, best)
    return best


def _ways(
    folders: dict[str, Path],
    tuned: dict[str, TokenTree],
    greedy: SamplingParams,
    sampled: SamplingParams,
) -> Iterator[Way]:
    typical = sampled.replace(acceptance="typical")
    for params in (greedy, sampled):
        yield Way("draft", None, TokenTree.chain(1), params)
    for name, folder in folders.items():
        (method,) = read_manifest(folder).methods
        for params in (greedy, sampled, typical) if name == "medusa" else (greedy,):
            for tree in sorted(method.token_trees(), key=len):
                yield Way(name, method.name, tree, params, tree == tuned[name])


def _decode(engine: Engine, way: Way, prompt: list[int], tokens: int) -> Completion:
    params = way.params.replace(max_tokens=tokens)
    if way.method is None:
        return engine.generate(prompt, params, PLAIN)
    return engine.generate(prompt, params, {"method": way.method, "num_speculative_tokens": len(way.tree) - 1})


def _row(way: Way, done: list[Completion], ways: list[Way], runs: list[list[Completion]], costs: list[float]) -> Row:
    (plain,) = (
        others
        for other, others in zip(ways, runs, strict=True)
        if other.method is None and other.params.greedy == way.params.greedy
    )
    kind = "plain" if way.method is None else way.method
    if way.method in ("draft_model", "eagle3"):
        kind += ", chain" if way.tree.is_chain else ", tree"
    return Row(
        kind,
        way.sampling,
        len(way.tree),
        way.tree.depth,
        way.tuned,
        common.acceptance_length(done),
        costs[len(way.tree) - 1] * 1e3,
        common.speed(done),
        common.speed(done) / common.speed(plain),
        common.same_texts(done, plain),
    )


def _table(args: argparse.Namespace, rows: list[Row]) -> Table:
    title = f"{args.precision}, {args.num_prompts} prompts of {args.prompt_tokens} tokens, {args.new_tokens} generated"
    numbers = ("nodes", "depth", "tokens a step", "c(T) ms", "tokens/s", "against plain", "same text")
    table = common.new_table(title, ("method", "sampling"), numbers)
    for row in rows:
        table.add_row(
            row.method,
            row.sampling,
            f"{row.nodes}{' (tuned)' if row.tuned else ''}",
            str(row.depth),
            f"{row.tokens_per_step:.2f}",
            f"{row.step_ms:.2f}",
            f"{row.tokens_per_second:.1f}",
            f"{row.speed_up:.2f}x",
            f"{row.same_text}/{args.num_prompts}" if row.sampling == "greedy" else "",
        )
    return table
