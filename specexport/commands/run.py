"""Generate text from a bundle.

Examples:
    specexport run qwen3/ --prompt "def fibonacci(n):" --temperature 0 --stats
    specexport run qwen3/ --method ngram --max-tokens 512 < module.py
    specexport run Qwen/Qwen3-0.6B --chat --prompt "What is a token?"
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from specexport.commands import (
    SOURCE,
    SOURCE_HELP,
    add_machine,
    add_model,
    add_sampling,
    add_speculation,
    opening,
    sampling,
    speculation,
)
from specexport.contract.errors import RequestError
from specexport.runtime import EmbedsPrompt, SamplingParams, Stats, Stream
from specexport.runtime.costs import Costs
from specexport.runtime.engine import Prompt
from specexport.terminal import from_standard_input

_OF_ACCEPTANCE = {
    "posterior_threshold": "typical",
    "posterior_alpha": "typical",
    "likelihood_threshold": "relaxed",
    "entropy_threshold": "relaxed",
}
"""The rule of acceptance that each parameter belongs to."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``specexport run``."""
    parser.add_argument("source", metavar=SOURCE, help=SOURCE_HELP)
    prompt = parser.add_argument_group("the prompt")
    prompt.add_argument("-p", "--prompt", metavar="TEXT", help="text to continue (default: -, standard input)")
    prompt.add_argument(
        "--chat", action="store_true", help="the prompt is a message to answer, formatted by the chat template"
    )
    prompt.add_argument(
        "--prompt-embeds",
        type=Path,
        metavar="FILE",
        help="embeddings to read before the prompt, a .npy file of [N,H], for bundles built with --inputs-embeds "
        "(default: none)",
    )
    add_sampling(
        parser,
        length=f"{SamplingParams.max_tokens}; with --chat, what the context holds",
        seed="gives the same sampled text again with --num-speculative-tokens, --no-calibrate or --no-speculation; "
        "otherwise measured costs choose what steps verify, and it is another draw (default: a new seed each time)",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--ignore-eos", action="store_true", help="continue past the end-of-text token, to --max-tokens"
    )
    output.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    output.add_argument("--stats", action="store_true", help="print counters and times to standard error")
    group = add_speculation(parser)
    group.add_argument(
        "--hypothesis",
        type=Path,
        metavar="FILE",
        help="the expected output, verified instead of a draft (default: none)",
    )
    group.add_argument(
        "--hypothesis-entropy",
        type=float,
        metavar="H",
        help="the greatest entropy with which the hypothesis was made, in nats (default: unknown)",
    )
    add: Callable[..., Any] = partial(group.add_argument, default=argparse.SUPPRESS)
    add(
        "--acceptance",
        choices=("lossless", "typical", "relaxed"),
        help="acceptance rule; typical and relaxed (for --hypothesis) accept more and are not lossless "
        "(default: lossless)",
    )
    default = "(default: the bundle's)"
    add("--posterior-threshold", type=float, metavar="E", help=f"epsilon of typical acceptance {default}")
    add("--posterior-alpha", type=float, metavar="A", help=f"alpha of typical acceptance {default}")
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
    add_model(parser)
    add_machine(parser)


def main(arguments: argparse.Namespace) -> int:
    """Runs ``specexport run``."""
    options = opening(arguments)
    for name, acceptance in _OF_ACCEPTANCE.items():
        if hasattr(arguments, name) and getattr(arguments, "acceptance", "lossless") != acceptance:
            raise RequestError(
                f"--{name.replace('_', '-')} was given without --acceptance {acceptance}, which it needs"
            )
    if arguments.chat and arguments.prompt_embeds is not None:
        raise RequestError("--prompt-embeds was given with --chat, whose messages are text; give one of them")
    hypothesis = _hypothesis(arguments.hypothesis) if arguments.hypothesis is not None else None
    keys = speculation(arguments, hypothesis=hypothesis, hypothesis_entropy=arguments.hypothesis_entropy)
    embeds = _embeds(arguments.prompt_embeds) if arguments.prompt_embeds is not None else None
    text = _prompt(arguments.prompt) if embeds is None or arguments.prompt is not None else ""
    overrides = {name: getattr(arguments, name) for name in ("acceptance", *_OF_ACCEPTANCE) if hasattr(arguments, name)}
    overrides |= sampling(arguments) | {"seed": arguments.seed, "ignore_eos": arguments.ignore_eos}
    from specexport.frontend import Frontend

    with closing(Frontend.open(arguments.source, **options)) as frontend:
        prompt: Prompt = text if embeds is None else EmbedsPrompt([embeds, text])
        if arguments.chat:
            prompt = frontend.chat_tokens([{"role": "user", "content": text}])
        params = frontend.params(None if arguments.chat else SamplingParams.max_tokens, **overrides)
        (stream,) = frontend.streams(prompt, params, frontend.speculation(keys))
        engine = frontend.engine
        with stream:
            if arguments.json:
                print(json.dumps(_result(text, stream) | {"params": msgspec.to_builtins(stream.params)}))
            else:
                for chunk in stream:
                    print(chunk.text, end="", flush=True)
                print(flush=True)
            if arguments.stats:
                print(
                    describe(stream.stats, engine.backend.fallback, engine.costs, engine.backend.kernels),
                    file=sys.stderr,
                )
    return 0


def _prompt(text: str | None) -> str:
    if text is not None and text != "-":
        return text
    if text is None and sys.stdin.isatty():
        print("reading the prompt from standard input; end it with Ctrl-D", file=sys.stderr)
    return from_standard_input(sys.stdin.read)


def _embeds(path: Path) -> npt.NDArray[Any]:
    """The array of a file, mapped, so that its shape is checked before it is read."""
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
    """Counters and times of a request in a few lines, with the reason of a slower way of execution, the numbers of
    draft tokens that steps chose with their costs, and the kernels.
    """
    positions = " ".join(f"{rate:.2f}" for rate in stats.acceptance_by_position)
    per_step = 1e3 / max(1, stats.steps)
    lines = [
        f"tokens      {stats.prompt_tokens} in, {stats.cached_tokens} of them from the prefix cache, "
        f"{stats.output_tokens} out in {stats.steps} steps: "
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
