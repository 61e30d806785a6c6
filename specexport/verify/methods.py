"""``specexport verify`` of methods: graphs against checkpoints, and speculative against plain decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from specexport.contract.errors import BuildError
from specexport.contract.folders import expanded
from specexport.contract.methods import Method
from specexport.contract.tree import TokenTree
from specexport.contract.values import Progress, counted
from specexport.exporter.checkpoints.locate import locate
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.backend import BackendOptions, open_backend
from specexport.runtime.bundle import Bundle
from specexport.runtime.proposal import Opening, SlotView, open_proposer
from specexport.runtime.speculative import PLAIN, Speculative
from specexport.runtime.text import common_prefix
from specexport.tree_search import record_proposals
from specexport.verify.logits import NotRunError, Numbers, Outcome, pair

Drafts = TypeVar("Drafts")
_RECORDED_STEPS = 6
"""Number of tokens decoded after each prompt to record proposals; the model reads the text again for each."""
_SEEDED_PROMPTS = 2
_SAMPLED = SamplingParams(temperature=0.8, seed=20240229, ignore_eos=True)

_MAX_DIFFERENCES = 3
"""Number of differences after which the comparison of a prompt ends."""
_ERROR_PERIOD = 9
"""Distance between the wrong tokens of tested hypotheses."""


class MethodRun:
    """Implements :class:`specexport.exporter.method.Verification`.

    ``sources`` are the locations of checkpoints, by ``target`` or ``METHOD.key``; the manifest has the others.
    """

    def __init__(self, bundle: Bundle, texts: list[list[int]], sources: Mapping[str, str]) -> None:
        self.bundle = bundle
        self.texts = texts
        self._sources = sources

    def source(self, method: Method | None, key: str = "model") -> Path:
        """The folder of the target, or of a checkpoint that a method names.

        Raises:
            NotRunError: the checkpoint does not exist.
        """
        name = f"{method.name}.{key}" if method is not None else "target"
        original = self.bundle.manifest.target.source if method is None else str(getattr(method, key))
        flag = "--target DIR" if method is None else f"--source {name}=DIR"
        moved = self._sources.get(name)
        if method is not None and method.sources[key] == "folder":
            folder = expanded(moved or original)
            if not folder.is_dir():
                raise NotRunError(f"{name}: its checkpoint was not found ({folder}); pass {flag}")
            return folder
        if moved is not None:
            return locate(moved)
        try:
            return locate(original)
        except BuildError as error:
            raise NotRunError(f"the {name} it was built from was not found ({error}); pass {flag}") from error

    def drafted(self, method: Method, texts: list[list[int]]) -> list[tuple[list[int], list[int]]]:
        """Texts with the greedy chains that the runtime proposes after them.

        Each text is continued three times, as if all, one or none of the draft tokens had been accepted, so that the
        draft's cache lacks rows, has stale rows, or both.
        """
        manifest = self.bundle.manifest
        backend = open_backend(self.bundle, BackendOptions("onnxruntime"))
        proposer = open_proposer(method, Opening(self.bundle, backend, 1))
        params, random = SamplingParams(temperature=0.0), np.random.default_rng(0)
        results = []
        for start, tree in pair(texts, [TokenTree.chain(tree.depth + 1) for tree in method.token_trees()]):
            text, K = list(start), tree.depth
            for accepted in (K, 1, 0):
                if len(text) + K > manifest.max_seq_len:
                    break
                view = SlotView(0, text, params, random, tree)
                while proposer.prefill(view):
                    pass
                proposal = proposer.propose([view]).get(0)
                drafted = proposal.tokens.tolist() if proposal is not None else []
                if drafted:
                    results.append((text, drafted))
                text = [*text, *drafted[:accepted], start[0]]
            proposer.release(0)
        backend.close()
        return _require_drafts(results)

    def recorded(self, method: Method) -> list[tuple[list[int], npt.NDArray[Any]]]:
        """Texts during decoding, each with the best candidate at every depth, int64 ``[depths]``."""
        params = SamplingParams(temperature=0.0, max_tokens=_RECORDED_STEPS, ignore_eos=True)
        results = []
        with (
            Engine.load(self.bundle.folder, check_hashes=False, backend="onnxruntime", calibrate=False) as engine,
            record_proposals(engine, method.name) as recorder,
        ):
            for text in self.texts:
                recorder.clear()
                whole = [*text, *engine.generate(text, params, method.name).token_ids]
                results += [(whole[:length], proposal.candidates[:, 0]) for length, proposal in recorder]
        return _require_drafts(results)


def _require_drafts(results: list[Drafts]) -> list[Drafts]:
    """Returns texts with their drafts, if there are any."""
    if not results:
        raise NotRunError("no prompt and context are long enough to draft in; pass prompts of two tokens or more")
    return results


def compare_decoding(bundle: Bundle, texts: Sequence[list[int]], max_tokens: int, progress: Progress) -> Outcome:
    """Decodes texts both ways, with every tree of every method, and samples some with a seed.

    A bundle that was built without a method is compared with the methods that every bundle has.
    """
    tokens = 0
    differences: list[str] = []
    lengths: list[float] = []
    with Engine.load(bundle.folder, check_hashes=False, backend="onnxruntime", calibrate=False) as engine:
        methods = bundle.manifest.methods or engine.methods.values()
        work = pair(texts, [(method.name, len(tree) - 1) for method in methods for tree in method.token_trees()])
        for index, (text, (method, size)) in enumerate(work):
            compared, differing, length = _compare_text(engine, text, method, size, max_tokens)
            tokens += compared
            differences += differing
            lengths.append(length)
            progress("speculation", index, len(work) + 1)
        repeated = all(_repeats(engine, text, max_tokens) for text in texts[:_SEEDED_PROMPTS])
        inexact = engine.inexact
    numbers: Numbers = {
        "tokens": tokens,
        "differences": len(differences),
        "acceptance_length": sum(lengths) / len(lengths),
    }
    sentence = f"greedy output is the same with speculation and without, {counted(tokens, 'token')}"
    if differences:
        sentence = f"speculation changes greedy output: {differences[0]} ({len(differences)} such places)"
    sentence += f"; not promised bit for bit: {inexact}" if inexact else "; rows exact"
    seeded = "the same text twice" if repeated else "different texts"
    return not differences and repeated, f"{sentence}; a seed gives {seeded}", numbers


def _compare_text(
    engine: Engine, prompt: list[int], method: str, size: int, max_tokens: int
) -> tuple[int, list[str], float]:
    """Decodes a prompt greedily both ways; after a difference, continues from the plain text.

    Returns:
        The number of compared tokens, the differences, and the acceptance length of the first run.
    """
    text, remaining, length = list(prompt), max_tokens, 0.0
    differences: list[str] = []
    while remaining > 0 and len(text) < engine.manifest.max_seq_len and len(differences) < _MAX_DIFFERENCES:
        params = SamplingParams(temperature=0.0, max_tokens=remaining, ignore_eos=True)
        plain = engine.generate(text, params, PLAIN).token_ids
        # A hypothesis with some wrong tokens, for methods that take it.
        takes = engine.methods[method].takes_hypothesis
        expected = tuple(token if at % _ERROR_PERIOD else 0 for at, token in enumerate(plain, 1)) if takes else None
        speculative = Speculative(method=method, num_speculative_tokens=size, hypothesis=expected)
        completion = engine.generate(text, params, speculative)
        fast, length = completion.token_ids, length or completion.stats.acceptance_length
        equal = common_prefix(plain, fast)
        text, remaining = [*text, *plain[:equal]], remaining - equal
        if equal == len(plain) == len(fast):
            break
        a, b = (tokens[equal] if equal < len(tokens) else None for tokens in (plain, fast))
        after = counted(len(text), "token")
        differences.append(f"after {after} it goes on with token {b} where plain decoding has {a}")
        if a is None:
            break
        text, remaining = [*text, a], remaining - 1
    return len(text) - len(prompt), differences, length


def _repeats(engine: Engine, text: list[int], max_tokens: int) -> bool:
    params = _SAMPLED.replace(max_tokens=max_tokens)
    # The first run reads the prompt. With a cached prompt, heads and speculators begin with a plain step.
    _, first, second = (engine.generate(text, params).token_ids for _ in range(3))
    return first == second
