"""``specexport run``: generates text."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from specexport.commands import add_engine, add_sampling, add_speculation, engine_flags, read_text, speculation
from specexport.commands.flags import UsageError, add_flags, flag_values, from_flags
from specexport.commands.terminal import from_standard_input
from specexport.contract.errors import RequestError
from specexport.contract.options import Options, dashed, option
from specexport.contract.values import counted
from specexport.runtime import EmbedsPrompt, Engine, SamplingParams, Stats, Stream
from specexport.runtime.params import DEFAULT_MAX_TOKENS
from specexport.runtime.prompt import Prompt
from specexport.runtime.request import complete
from specexport.runtime.speculative import Speculative

_OF_ACCEPTANCE = {
    "posterior_threshold": "typical",
    "posterior_alpha": "typical",
    "likelihood_threshold": "relaxed",
    "entropy_threshold": "relaxed",
}
"""The rule of acceptance to which each parameter belongs."""
_ACCEPTANCE = ("acceptance", *_OF_ACCEPTANCE)


class _RunOptions(Options, frozen=True, kw_only=True):
    """Options of ``specexport run``.

    Attributes:
        prompt: text to continue (default: -, standard input).
        chat: the prompt is a message to answer, formatted by the chat template.
        prompt_embeds: .npy file with embeddings [N,H] to read before the prompt, for bundles built with
            --inputs-embeds (default: none).
        json: print a JSON object instead of text.
        stats: print counters and times to standard error.
        hypothesis: file with the expected output, which is verified instead of a draft (default: none).
    """

    prompt: Annotated[str | None, option("TEXT", short="-p", group="the prompt", once=True)] = None
    chat: Annotated[bool, option(group="the prompt")] = False
    prompt_embeds: Annotated[Path | None, option("FILE", group="the prompt")] = None
    json: Annotated[bool, option(group="output")] = False
    stats: Annotated[bool, option(group="output")] = False
    hypothesis: Annotated[Path | None, option("FILE", group="speculation")] = None


def run_flags(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``specexport run``."""
    add_flags(parser, _RunOptions, ("prompt", "chat", "prompt_embeds"))
    add_sampling(
        parser,
        length=f"{DEFAULT_MAX_TOKENS}, or the rest of the context with --chat",
        seed="random seed; samples the same text again only with --num-speculative-tokens, --no-calibrate or "
        "--no-speculation, as steps otherwise follow measured costs (default: a new seed each time)",
    )
    add_flags(parser, SamplingParams, ("ignore_eos",), group="text")
    add_flags(parser, _RunOptions, ("json", "stats"))
    add_speculation(parser)
    add_flags(parser, _RunOptions, ("hypothesis",))
    add_flags(parser, Speculative, ("hypothesis_entropy",))
    add_flags(parser, SamplingParams, _ACCEPTANCE)
    add_engine(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Generate text from a bundle or a model.

    Examples:
        specexport run qwen3/ --prompt "def fibonacci(n):" --temperature 0 --stats
        specexport run qwen3/ --method ngram --max-tokens 512 < module.py
        specexport run Qwen/Qwen3-0.6B --chat --prompt "What is a token?"
    """
    command, engine_options = from_flags(_RunOptions, arguments), engine_flags(arguments)
    overrides = flag_values(SamplingParams, arguments)
    for name, acceptance in _OF_ACCEPTANCE.items():
        if name in overrides and overrides.get("acceptance", "lossless") != acceptance:
            raise UsageError(f"{dashed(name)} was given without --acceptance {acceptance}, which it needs")
    if command.chat and command.prompt_embeds is not None:
        raise UsageError("--prompt-embeds was given with --chat, which takes only text; give one of them")
    hypothesis = None if command.hypothesis is None else read_text(command.hypothesis, "the likely output")
    keys = speculation(arguments, hypothesis=hypothesis)
    embeds = _embeds(command.prompt_embeds) if command.prompt_embeds is not None else None
    text = _prompt(command.prompt, command.chat) if embeds is None or command.prompt is not None else ""
    from specexport.frontend import Frontend

    opened = Frontend.open_for_chat if command.chat else Frontend.open
    with closing(opened(**engine_options)) as frontend:
        prompt: Prompt = text if embeds is None else EmbedsPrompt([embeds, text])
        if command.chat:
            prompt = frontend.chat_tokens([{"role": "user", "content": text}])
        params = frontend.engine.params(None if command.chat else DEFAULT_MAX_TOKENS, **overrides)
        (stream,) = frontend.streams(prompt, params, frontend.speculation(keys))
        with stream:
            if command.json:
                print(json.dumps(_result(text, stream)))
            else:
                for chunk in stream:
                    print(chunk.text, end="", flush=True)
                print(flush=True)
                by_default = not command.chat and "max_tokens" not in overrides
                if by_default and stream.stats.output_tokens == params.max_tokens and sys.stderr.isatty():
                    length = counted(stream.stats.output_tokens, "token")
                    print(f"(ended after {length}, set by --max-tokens)", file=sys.stderr)
            if command.stats:
                print(describe(stream.stats, frontend.engine), file=sys.stderr)
    return 0


def _prompt(text: str | None, message: bool) -> str:
    """The prompt, perhaps from standard input; a message loses the line break at its end, as in ``chat``."""
    if text is not None and text != "-":
        return text
    if text is None and sys.stdin.isatty():
        print("reading the prompt from standard input; end it with Ctrl-D", file=sys.stderr)
    text = from_standard_input(sys.stdin.read)
    return text.removesuffix("\n") if message else text


def _embeds(path: Path) -> npt.NDArray[Any]:
    """The array of a file, memory-mapped so that its shape is checked before it is read."""
    try:
        embeds: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"{path}: cannot be read as an array: {reason}; expected a .npy file") from error
    return embeds


def _result(prompt: str, stream: Stream) -> dict[str, Any]:
    output = complete(stream)
    named = {name: getattr(output, name) for name in ("text", "token_ids", "finish_reason")}
    return {"prompt": prompt, **named, "stats": output.stats.as_dict(), "params": msgspec.to_builtins(stream.params)}


def describe(stats: Stats, engine: Engine) -> str:
    """The counters and times of a request in a few lines.

    They include the chosen numbers of draft tokens with their costs, the kernels, and the reason of a slower execution.
    """
    backend, costs = engine.backend, engine.costs
    positions = " ".join(f"{rate:.2f}" for rate in stats.acceptance_by_position)
    per_step = 1e3 / max(1, stats.steps)
    lines = [
        f"tokens      {stats.prompt_tokens} in, {stats.cached_tokens} of them from the prefix cache, "
        f"{stats.output_tokens} out in {counted(stats.steps, 'step')}: "
        f"acceptance length {stats.acceptance_length:.2f}",
        f"speed       {stats.tokens_per_second:.1f} tokens/s decoding; prefill {stats.prefill * 1e3:.1f} ms, "
        f"first token after {stats.first_token * 1e3:.1f} ms, total {stats.total * 1e3:.1f} ms",
        f"a step      propose {stats.propose * per_step:.2f} ms, verify {stats.verify * per_step:.2f} ms, "
        f"accept {stats.accept * per_step:.3f} ms, host {stats.host * per_step:.3f} ms",
    ]
    if backend.kernels:
        lines.append(f"kernels     {backend.kernels}")
    if stats.execution != "host":
        lines.append(f"device      {stats.execution}" + (f" ({backend.fallback})" if backend.fallback else ""))
    if stats.drafted:
        lines.insert(1, f"draft       {stats.accepted} of {stats.drafted} accepted; by position {positions}")
    if costs is not None and stats.steps_by_draft:
        chosen = "; ".join(
            f"{method} " + ", ".join(_steps(count, size, costs.step(1, 1 + size, 1)) for size, count in by.items())
            for method, by in sorted(stats.steps_by_draft.items())
        )
        lines.insert(1, f"chosen      {chosen}; in brackets the cost of verifying a step here")
    return "\n".join(lines)


def _steps(count: int, drafted: int, seconds: float) -> str:
    tokens = f" of {counted(drafted, 'draft token')}" if drafted else ""
    return f"{counted(count, 'step')}{tokens} ({seconds * 1e3:.2f} ms)"
