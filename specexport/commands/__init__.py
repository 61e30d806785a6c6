"""The commands, one module each: the docstring is its help, ``add_arguments`` declares flags, ``main`` runs it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from specexport.contract.engines import BACKENDS
from specexport.contract.errors import RequestError
from specexport.runtime.backends.opening import DEFAULT_UTILIZATION

SOURCE = "BUNDLE_OR_MODEL"
SOURCE_HELP = "a bundle, or a model (folder, hub id or .gguf file) that is built on first use"
_SAMPLING = ("max_tokens", "stop", "temperature", "top_p", "top_k", "min_p")


def add_report(parser: argparse._ActionsContainer, flag: str) -> None:
    """Declares ``--plot`` or ``--report``."""
    parser.add_argument(
        flag,
        type=Path,
        metavar="FILE.html",
        help="also write a page with these tables and charts, which opens offline (default: none)",
    )


def add_threads(parser: argparse._ActionsContainer) -> None:
    """Declares ``--threads``."""
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: one per core)")


def add_machine(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Declares the flags of the machine in a group, and returns it."""
    group = parser.add_argument_group("the machine")
    add_threads(group)
    group.add_argument(
        "--backend",
        choices=BACKENDS,
        metavar="NAME",
        help=f"what runs the bundle: {', '.join(BACKENDS)} (default: what it was built for)",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=DEFAULT_UTILIZATION,
        metavar="SHARE",
        help="share of a GPU's memory that may be in use, including other programs'; has no effect on a CPU",
    )
    return group


def add_calibrate(parser: argparse._ActionsContainer) -> None:
    """Declares ``--no-calibrate``."""
    parser.add_argument(
        "--no-calibrate",
        action="store_false",
        dest="calibrate",
        help="draft the bundle's default number of tokens; otherwise the cost of steps is measured once on this "
        "machine, in a few seconds, and each step drafts as many tokens as pay",
    )


def add_model(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Declares the flags of building and opening a model in a group, and returns it."""
    group = parser.add_argument_group("the model")
    group.add_argument(
        "--speculative-config",
        metavar="JSON",
        help="how to speculate, a mapping with method, model and the method's keys (default: a bundle's first method)",
    )
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="S",
        help="most tokens of a prompt and its output (default: the bundle's; to build, the model's, at most 2048)",
    )
    group.add_argument(
        "--precision",
        choices=("fp32", "fp16", "int8", "int4"),
        help="of the weights, if a model is built (default: fp32, or as its checkpoint is quantized)",
    )
    return group


def opening(arguments: argparse.Namespace) -> dict[str, Any]:
    """Arguments of ``Frontend.open`` from the flags of :func:`add_model`, :func:`add_machine` and
    :func:`add_calibrate`.

    Raises:
        RequestError: a number is out of range.
    """
    if arguments.threads is not None and arguments.threads < 1:
        raise RequestError(f"--threads is {arguments.threads}; expected at least 1")
    names = ("speculative_config", "max_model_len", "backend", "threads", "calibrate", "gpu_memory_utilization")
    options = {name: getattr(arguments, name) for name in names}
    return options | ({"precision": arguments.precision} if arguments.precision else {})


def add_sampling(parser: argparse.ArgumentParser, *, length: str, seed: str) -> None:
    """Declares the flags of sampling and of the length of outputs.

    Args:
        parser: the command's.
        length: the most tokens if neither the command line nor the model sets them.
        seed: the help of ``--seed``.
    """
    unset = argparse.SUPPRESS
    output = parser.add_argument_group("text")
    output.add_argument(
        "-n",
        "--max-tokens",
        type=int,
        default=unset,
        metavar="N",
        help=f"most tokens to generate (default: the model's own, else {length})",
    )
    output.add_argument(
        "--stop",
        action="append",
        default=unset,
        metavar="TEXT",
        help="end the output before this text; repeatable (default: the model's own, if any)",
    )
    group = parser.add_argument_group("sampling")
    for flag, kind, metavar, summary in (
        ("--temperature", float, "T", "divide logits by this; 0 is greedy"),
        ("--top-p", float, "P", "keep the most probable tokens with this total probability"),
        ("--top-k", int, "N", "keep the N most probable tokens; 0 keeps all"),
        ("--min-p", float, "P", "keep tokens with this share of the highest probability"),
    ):
        text = f"{summary} (default: the model's own)"
        group.add_argument(flag, type=kind, default=unset, metavar=metavar, help=text)
    group.add_argument("--seed", type=int, metavar="N", help=seed)


def sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """The flags of :func:`add_sampling` that were set, without the seed."""
    return {name: getattr(arguments, name) for name in _SAMPLING if hasattr(arguments, name)}


def add_speculation(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Declares the flags of speculation in a group, and returns it."""
    group = parser.add_argument_group("speculation")
    group.add_argument("--no-speculation", action="store_true", help="decode plainly, for comparison")
    group.add_argument(
        "--method",
        metavar="NAME",
        help="how to speculate: one the bundle was built for, or one that needs no graph, such as ngram or suffix "
        "(default: the bundle's first)",
    )
    group.add_argument(
        "--num-speculative-tokens",
        type=int,
        metavar="K",
        help="draft tokens a step, one of the numbers it was built for (default: as many as pay on this machine)",
    )
    add_calibrate(group)
    return group


def speculation(arguments: argparse.Namespace, **extra: Any) -> dict[str, Any]:
    """Keys of :class:`~specexport.runtime.speculative.Speculative` from :func:`add_speculation`'s flags, and ``extra``.

    Raises:
        RequestError: flags contradict each other.
    """
    keys = {name: getattr(arguments, name) for name in ("num_speculative_tokens", "method")} | extra
    keys = {name: value for name, value in keys.items() if value is not None}
    if arguments.no_speculation and keys:
        flag = next(iter(keys)).replace("_", "-")
        raise RequestError(f"--{flag} was given with --no-speculation; give one of them")
    return {"num_speculative_tokens": 0} if arguments.no_speculation else keys
