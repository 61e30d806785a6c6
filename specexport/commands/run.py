"""Generate text from a bundle.

Examples:
    specexport run qwen3/ --prompt "def fibonacci(n):" --temperature 0 --stats
    specexport run qwen3/ --method ngram --max-tokens 512 < module.py
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from specexport.commands import add_calibrate, add_machine
from specexport.contract.errors import RequestError
from specexport.runtime import EmbedsPrompt, Engine, Stats, Stream
from specexport.runtime.costs import Costs
from specexport.runtime.speculative import PLAIN, Speculative
from specexport.runtime.values import require_text

_SAMPLING = ("max_tokens", "stop", "temperature", "top_p", "top_k", "min_p", "seed", "acceptance")
_OF_ACCEPTANCE = {
    "posterior_threshold": "typical",
    "posterior_alpha": "typical",
    "likelihood_threshold": "relaxed",
    "entropy_threshold": "relaxed",
}
"""Parameters that belong to one rule of acceptance."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``specexport run``."""
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="a folder made by specexport build")
    text = parser.add_argument_group("text")
    text.add_argument("-p", "--prompt", metavar="TEXT", help="text to continue (default: -, standard input)")
    text.add_argument(
        "--prompt-embeds",
        type=Path,
        metavar="FILE",
        help="embeddings to read before the prompt, a .npy file of [N,H], for bundles built with --inputs-embeds "
        "(default: none)",
    )
    unset = argparse.SUPPRESS
    text.add_argument(
        "-n",
        "--max-tokens",
        type=int,
        default=unset,
        metavar="N",
        help="most tokens to generate (default: the model's own, else 128)",
    )
    text.add_argument(
        "--stop",
        action="append",
        default=unset,
        metavar="TEXT",
        help="end the output before this text; repeatable (default: the model's own, if any)",
    )
    text.add_argument("--ignore-eos", action="store_true", help="continue past the end-of-text token, to --max-tokens")
    text.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    text.add_argument("--stats", action="store_true", help="print counters and times to standard error")
    sampling = parser.add_argument_group("sampling")
    add: Callable[..., Any] = partial(sampling.add_argument, default=unset)
    add("--temperature", type=float, metavar="T", help="divide logits by this; 0 is greedy (default: the model's own)")
    add(
        "--top-p",
        type=float,
        metavar="P",
        help="keep the most probable tokens with this total probability (default: the model's own)",
    )
    add(
        "--top-k", type=int, metavar="N", help="keep the N most probable tokens; 0 keeps all (default: the model's own)"
    )
    add(
        "--min-p",
        type=float,
        metavar="P",
        help="keep tokens with this share of the highest probability (default: the model's own)",
    )
    add(
        "--seed",
        type=int,
        metavar="N",
        help="gives the same sampled text again with --num-speculative-tokens, --no-calibrate or --no-speculation; "
        "otherwise measured costs choose what steps verify, and it is another draw (default: a new seed each time)",
    )
    speculation = parser.add_argument_group("speculation")
    speculation.add_argument("--no-speculation", action="store_true", help="decode plainly, for comparison")
    speculation.add_argument(
        "--method",
        metavar="NAME",
        help="how to speculate: one the bundle was built for, or one that needs no graph, such as ngram or suffix "
        "(default: the bundle's first)",
    )
    speculation.add_argument(
        "--num-speculative-tokens",
        type=int,
        metavar="K",
        help="draft tokens a step, one of the numbers it was built for (default: as many as pay on this machine)",
    )
    add_calibrate(speculation)
    speculation.add_argument(
        "--hypothesis",
        type=Path,
        metavar="FILE",
        help="the expected output, verified instead of a draft (default: none)",
    )
    speculation.add_argument(
        "--hypothesis-entropy",
        type=float,
        metavar="H",
        help="the greatest entropy with which the hypothesis was made, in nats (default: unknown)",
    )
    add = partial(speculation.add_argument, default=unset)
    add(
        "--acceptance",
        choices=("lossless", "typical", "relaxed"),
        help="acceptance rule; typical and relaxed (for --hypothesis) accept more and are not lossless "
        "(default: lossless)",
    )
    own = "(default: the bundle's)"
    add("--posterior-threshold", type=float, metavar="E", help=f"epsilon of typical acceptance {own}")
    add("--posterior-alpha", type=float, metavar="A", help=f"alpha of typical acceptance {own}")
    add(
        "--likelihood-threshold",
        type=float,
        metavar="P",
        help="relaxed acceptance accepts tokens of at least this probability (default: 0.2)",
    )
    add(
        "--entropy-threshold",
        type=float,
        metavar="H",
        help="relaxed acceptance takes a whole hypothesis of less entropy than this, in nats (default: never)",
    )
    add_machine(parser)


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
        backend=arguments.backend,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
    ) as engine:
        given = {name: getattr(arguments, name) for name in (*_SAMPLING, *_OF_ACCEPTANCE) if hasattr(arguments, name)}
        params = engine.params(ignore_eos=arguments.ignore_eos, **given)
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
                print(json.dumps(_result(prompt, stream) | {"params": msgspec.to_builtins(params)}))
            else:
                for chunk in stream:
                    print(chunk.text, end="", flush=True)
                print()
            if arguments.stats:
                print(
                    describe(stream.stats, engine.backend.fallback, engine.costs, engine.backend.kernels),
                    file=sys.stderr,
                )
    return 0


def _prompt(given: str | None) -> str:
    if given is not None and given != "-":
        return given
    if given is None and sys.stdin.isatty():
        print("reading the prompt from standard input; end it with Ctrl-D", file=sys.stderr)
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        byte, encoding = error.object[error.start], error.encoding.upper()
        raise RequestError(
            f"standard input: the byte 0x{byte:02x} is not {encoding}; send text in {encoding}"
        ) from error
    require_text(text, "standard input")
    return text


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


def describe(stats: Stats, fallback: str = "", costs: Costs | None = None, kernels: str = "") -> str:
    """Counters and times of a request in a few lines, why its work did not reach the device in a better way, how many
    draft tokens its steps were given by what they cost, and which kernels computed.
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
    if kernels:
        lines.append(f"kernels     {kernels}")
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
