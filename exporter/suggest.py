"""Which ways to speculate suit a target: rules of the field, before anything is built."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError, safe_open

from specexport.checkpoints.checkpoint import load_tokenizer, require_same_tokenizer
from specexport.checkpoints.locate import locate
from specexport.contract.errors import BuildError
from specexport.exporter import methods

Device = Literal["cpu", "gpu"]
SMALLER = (5.0, 10.0)
"""How many times smaller a draft should be: a larger one costs what it gains, a smaller one guesses badly."""
_USABLE = (3.0, 50.0)
"""Beyond these a draft is not proposed at all."""
_DRAFT_TOKENS: dict[Device, int] = {"cpu": methods.DEFAULT_DRAFT_TOKENS, "gpu": 5}
_MEDUSA_TREES = ((10e9, "mc_sim_7b_63"), (20e9, "vicuna_13b_stage1"), (math.inf, "vicuna_33b_stage1"))
"""Published trees by the size of the model they were searched for (FasterDecoding/Medusa)."""


@dataclass(frozen=True)
class Suggestion:
    """A way to speculate, the better ones first.

    Attributes:
        method: its name in a bundle.
        settings: what to build it with, in words of the field.
        why: a sentence.
        flags: of ``specexport build``; empty where something has to be found or trained first.
    """

    method: str
    settings: str
    why: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Advice:
    """What suits a target.

    Attributes:
        parameters: of the target.
        suggestions: the better ones first.
        refused: drafts that were offered and why each does not do, by name.
    """

    parameters: int
    suggestions: tuple[Suggestion, ...]
    refused: dict[str, str]


def suggest(target: str, drafts: Sequence[str], device: Device) -> Advice:
    """Looks at checkpoints, not at their weights, and says what suits the target.

    Args:
        target: folder or hub id.
        drafts: smaller models to choose from.
        device: where the bundle is to run: on a GPU the nodes of a step are nearly free, on a CPU every one costs.

    Raises:
        BuildError: the target, or a draft, is no checkpoint.
    """
    path = locate(target)
    size = parameters(path)
    found, refused = _drafts(path, size, drafts)
    made = [_draft_model(size, found, device)]
    if device == "gpu":
        tree = next(tree for limit, tree in _MEDUSA_TREES if size < limit)
        heads = Suggestion("medusa", f"tree {tree}", "four heads and a wide tree, where nodes are nearly free")
    else:
        heads = Suggestion(
            "medusa",
            "the tree that 'specexport tune tree' finds, 4 to 8 nodes",
            "no second model; heads have to be trained, and a CPU pays for every node",
        )
    # Heads come second where a draft is at hand: they must be trained for this very target.
    made.append(heads)
    made.append(
        Suggestion(
            "mlp_speculator",
            "the tree that 'specexport tune tree' finds",
            "stages that see each other's tokens, where heads guess apart; published for some targets (ibm-fms, "
            "ibm-granite), and trained like heads",
        )
    )
    sizes = ",".join(map(str, methods.LOOKUP_DRAFT_TOKENS["ngram"]))
    made.append(
        Suggestion(
            "suffix, ngram",
            f"chains of {sizes}",
            "free; gains where answers repeat their prompt or themselves (edits, summaries, code)",
            ("--suffix", "--ngram"),
        )
    )
    made.append(
        Suggestion(
            "hypothesis",
            "chains of " + ",".join(map(str, methods.LOOKUP_DRAFT_TOKENS["hypothesis"])),
            "free; for requests whose answer is mostly known up front",
            ("--hypothesis",),
        )
    )
    method = methods.lookahead("gpu" if device == "gpu" else "cpu", True, size)
    window, ngram, guesses = method.window, method.ngram, method.guesses
    made.append(
        Suggestion(
            "lookahead",
            f"W,N,G = {window},{ngram},{guesses}: {method.widths()[0]} nodes a step",
            "needs nothing but arithmetic to spare"
            + (", which a GPU has at batch 1" if device == "gpu" else "; a CPU has little, so run tune lookahead"),
            ("--lookahead", f"{window},{ngram},{guesses}") if device == "gpu" else (),
        )
    )
    return Advice(size, tuple(made), refused)


def _drafts(target: Path, size: int, names: Sequence[str]) -> tuple[list[tuple[str, float]], dict[str, str]]:
    """Drafts that do, with how many times smaller they are, the best first; and why the others do not."""
    tokenizer = load_tokenizer(target).tokenizer
    found: list[tuple[str, float]] = []
    refused: dict[str, str] = {}
    for name in names:
        path = locate(name)
        ratio = size / parameters(path)
        try:
            require_same_tokenizer(tokenizer, load_tokenizer(path).tokenizer, target, path)
        except BuildError as error:
            refused[name] = str(error)
            continue
        if not _USABLE[0] <= ratio <= _USABLE[1]:
            refused[name] = f"{ratio:.1f} times smaller than the target; expected {SMALLER[0]:g} to {SMALLER[1]:g}"
            continue
        found.append((name, ratio))
    middle = math.log(math.sqrt(SMALLER[0] * SMALLER[1]))
    return sorted(found, key=lambda one: abs(math.log(one[1]) - middle)), refused


def _draft_model(size: int, found: list[tuple[str, float]], device: Device) -> Suggestion:
    k = _DRAFT_TOKENS[device]
    if not found:
        low, high = size / SMALLER[1] / 1e6, size / SMALLER[0] / 1e6
        return Suggestion(
            "draft_model",
            f"K = {k}",
            f"look for a model of the same family and tokenizer with {low:,.4g} to {high:,.4g} million parameters, and "
            "pass it with --draft; 'specexport train draft' makes it agree with this target more often",
        )
    name, ratio = found[0]
    fits = SMALLER[0] <= ratio <= SMALLER[1]
    return Suggestion(
        "draft_model",
        f"{name}, K = {k}",
        f"{ratio:.1f} times smaller, the same tokenizer"
        + ("" if fits else f"; {SMALLER[0]:g} to {SMALLER[1]:g} times would be better"),
        ("--draft", name, "--num-speculative-tokens", str(k)),
    )


def parameters(folder: Path) -> int:
    """Parameters of a checkpoint, from the headers of its safetensors.

    Raises:
        BuildError: a file is no safetensors file.
    """
    count = sum(_stored(path) for path in folder.glob("*.safetensors"))
    if not count:
        raise BuildError(f"{folder}: its safetensors hold no parameters; expected a model")
    return count


def _stored(path: Path) -> int:
    try:
        with safe_open(path, framework="numpy") as file:
            return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise BuildError(f"{path}: not a safetensors file: {error}") from error
