"""Generate text from a bundle."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specexport.commands import add_calibrate, add_exactness
from specexport.contract.engines import BACKENDS
from specexport.contract.errors import RequestError
from specexport.runtime import EmbedsPrompt, Engine, Stats, Stream
from specexport.runtime.costs import Costs
from specexport.runtime.opening import DEFAULT_UTILIZATION
from specexport.runtime.speculative import PLAIN, Speculative

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "acceptance")
_OF_ACCEPTANCE = {
    "posterior_threshold": "typical",
    "posterior_alpha": "typical",
    "likelihood_threshold": "relaxed",
    "entropy_threshold": "relaxed",
}
"""Parameters that belong to one rule of acceptance."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``specexport run``."""
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("-p", "--prompt", help="text to continue; '-' or none reads standard input")
    parser.add_argument(
        "--prompt-embeds",
        type=Path,
        metavar="FILE",
        help="embeddings to read before the prompt, [N,H] numbers in a .npy file; for bundles with --inputs-embeds",
    )
    parser.add_argument("-n", "--max-tokens", type=int, default=128, help="most tokens to generate")
    unset = argparse.SUPPRESS
    parser.add_argument("--temperature", type=float, default=unset, help="0 is greedy (default: the model's own)")
    parser.add_argument("--top-p", type=float, default=unset, help="nucleus sampling (default: the model's own)")
    parser.add_argument("--top-k", type=int, default=unset, help="0 keeps all tokens (default: the model's own)")
    parser.add_argument("--min-p", type=float, default=unset, help="0 keeps all tokens (default: the model's own)")
    parser.add_argument("--seed", type=int, default=unset, help="makes the text reproducible")
    parser.add_argument(
        "--acceptance",
        choices=("lossless", "typical", "relaxed"),
        default=unset,
        help="typical accepts more and is not lossless; nor is relaxed, which is for --hypothesis",
    )
    parser.add_argument("--posterior-threshold", type=float, default=unset, help="epsilon of typical acceptance")
    parser.add_argument("--posterior-alpha", type=float, default=unset, help="alpha of typical acceptance")
    parser.add_argument(
        "--likelihood-threshold", type=float, default=unset, help="of relaxed acceptance (default: 0.2)"
    )
    parser.add_argument("--entropy-threshold", type=float, default=unset, help="of relaxed acceptance (default: none)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the output; repeatable")
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end of text")
    parser.add_argument("--stats", action="store_true", help="print counters and times to standard error")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--no-speculation", action="store_true", help="decode plainly, for comparison")
    parser.add_argument(
        "--method",
        metavar="NAME",
        help="how to speculate: one the bundle was built for (default: the first), or one that needs no graph, such as "
        "ngram or suffix",
    )
    parser.add_argument(
        "--num-speculative-tokens", type=int, metavar="K", help="one the bundle was built for (default: its own)"
    )
    parser.add_argument(
        "--backend", choices=BACKENDS, metavar="NAME", help=f"{', '.join(BACKENDS)} (default: what it was built for)"
    )
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=DEFAULT_UTILIZATION,
        metavar="PART",
        help="of the GPU's memory that may be in use (default: %(default)s)",
    )
    add_exactness(parser)
    add_calibrate(parser)
    parser.add_argument("--hypothesis", type=Path, metavar="FILE", help="a text the output is expected to be")
    parser.add_argument(
        "--hypothesis-entropy", type=float, metavar="H", help="how unsure its maker was at worst, in nats"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all cores)")


def main(arguments: argparse.Namespace) -> int:
    """Runs ``specexport run``."""
    if arguments.threads is not None and arguments.threads < 1:
        raise RequestError(f"--threads is {arguments.threads}; expected at least 1")
    for name in ("num_speculative_tokens", "method", "hypothesis"):
        if arguments.no_speculation and getattr(arguments, name) is not None:
            raise RequestError(f"--{name.replace('_', '-')} was given with --no-speculation; give one of them")
    for name, acceptance in _OF_ACCEPTANCE.items():
        if hasattr(arguments, name) and getattr(arguments, "acceptance", "lossless") != acceptance:
            raise RequestError(
                f"--{name.replace('_', '-')} was given without --acceptance {acceptance}, which it is for"
            )
    hypothesis = _hypothesis(arguments.hypothesis) if arguments.hypothesis is not None else None
    embeds = _embeds(arguments.prompt_embeds) if arguments.prompt_embeds is not None else None
    prompt = _prompt(arguments.prompt) if embeds is None or arguments.prompt is not None else ""
    with Engine.load(
        arguments.bundle,
        threads=arguments.threads,
        calibrate=arguments.calibrate,
        exactness=arguments.exactness,
        backend=arguments.backend,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
    ) as engine:
        given = {name: getattr(arguments, name) for name in (*_SAMPLING, *_OF_ACCEPTANCE) if hasattr(arguments, name)}
        params = engine.defaults().replace(
            max_tokens=arguments.max_tokens, stop=tuple(arguments.stop), ignore_eos=arguments.ignore_eos, **given
        )
        with engine.stream(
            prompt if embeds is None else EmbedsPrompt([embeds, prompt]),
            params,
            PLAIN
            if arguments.no_speculation
            else Speculative(
                method=arguments.method,
                num_speculative_tokens=arguments.num_speculative_tokens,
                hypothesis=hypothesis,
                hypothesis_entropy=arguments.hypothesis_entropy,
            ),
        ) as stream:
            if arguments.json:
                print(json.dumps(_result(prompt, stream) | {"params": dataclasses.asdict(params)}))
            else:
                for chunk in stream:
                    print(chunk.text, end="", flush=True)
                print()
            if arguments.stats:
                print(describe(stream.stats, engine.backend.fallback, engine.costs), file=sys.stderr)
    return 0


def _prompt(given: str | None) -> str:
    if given is not None and given != "-":
        return given
    if given is None and sys.stdin.isatty():
        print("reading the prompt from standard input; end it with Ctrl-D", file=sys.stderr)
    return sys.stdin.read()


def _embeds(path: Path) -> npt.NDArray[Any]:
    """The array of a file, which is not read before it is known to fit."""
    try:
        embeds: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise RequestError(f"{path}: cannot be read as an array: {error}; expected a .npy file") from error
    return embeds


def _hypothesis(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: cannot be read as text: {error}; expected what the output may be") from error


def _result(prompt: str, stream: Stream) -> dict[str, Any]:
    chunks = list(stream)
    return {
        "prompt": prompt,
        "text": "".join(chunk.text for chunk in chunks),
        "token_ids": [token for chunk in chunks for token in chunk.token_ids],
        "finish_reason": chunks[-1].finish_reason,
        "stats": stream.stats.as_dict(),
    }


def describe(stats: Stats, fallback: str = "", costs: Costs | None = None) -> str:
    """Counters and times of a request in a few lines, why its work did not reach the device in a better way, and how
    many draft tokens its steps were given by what they cost.
    """
    positions = " ".join(f"{rate:.2f}" for rate in stats.acceptance_by_position)
    per_step = 1e3 / max(1, stats.steps)
    lines = [
        f"tokens      {stats.prompt_tokens} in, {stats.output_tokens} out in {stats.steps} steps: "
        f"acceptance length {stats.acceptance_length:.2f}",
        f"speed       {stats.tokens_per_second:.1f} tokens/s decoding; prefill {stats.prefill * 1e3:.1f} ms, "
        f"first token after {stats.first_token * 1e3:.1f} ms, total {stats.total * 1e3:.1f} ms",
        f"a step      propose {stats.propose * per_step:.2f} ms, verify {stats.verify * per_step:.2f} ms, "
        f"accept {stats.accept * per_step:.3f} ms, host {stats.host * per_step:.3f} ms",
    ]
    if stats.execution != "host":
        lines.append(f"device      {stats.execution}" + (f" ({fallback})" if fallback else ""))
    if stats.drafted:
        lines.insert(1, f"draft       {stats.accepted} of {stats.drafted} accepted; by position {positions}")
    if costs is not None and stats.steps_by_draft:
        chosen = "; ".join(
            f"{method} "
            + ", ".join(f"{count} of {size} ({costs.step(1, 1 + size, 1) * 1e3:.2f} ms)" for size, count in by.items())
            for method, by in stats.steps_by_draft.items()
        )
        lines.insert(1, f"chosen      steps of so many draft tokens, and what they take here: {chosen}")
    return "\n".join(lines)
