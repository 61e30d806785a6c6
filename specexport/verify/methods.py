"""Services that ``verify`` passes to a method for comparing its graph with its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specexport.contract.errors import BuildError, SpecExportError
from specexport.contract.folders import expanded
from specexport.contract.methods import Method
from specexport.contract.tree import TokenTree
from specexport.exporter.checkpoints.locate import locate
from specexport.runtime.backend import open_backend
from specexport.runtime.bundle import Bundle
from specexport.runtime.engine import Engine
from specexport.runtime.params import SamplingParams
from specexport.runtime.proposal import Opening, SlotView, open_proposer
from specexport.tuning.record import recorded
from specexport.verify.logits import LIMITS, TokenAgreement, paired

_RECORDED_STEPS = 6
"""Tokens decoded after each prompt to record proposals; the model reads the text again for each."""


class NotRunError(SpecExportError):
    """A check cannot be run; says why."""


class MethodRun:
    """See :class:`specexport.exporter.method.Verification`.

    ``sources`` are locations of checkpoints by ``target`` and ``METHOD.key``; others are in the manifest.
    """

    def __init__(self, bundle: Bundle, texts: list[list[int]], sources: Mapping[str, str]) -> None:
        self.bundle = bundle
        self.texts = texts
        self._sources = sources

    def source(self, method: Method | None, key: str = "model") -> Path:
        """The folder of a checkpoint a method names, or of the target.

        Raises:
            NotRunError: it does not exist.
        """
        name = f"{method.name}.{key}" if method is not None else "target"
        original = self.bundle.manifest.target.source if method is None else str(getattr(method, key))
        flag = "--target DIR" if method is None else f"--source {name}=DIR"
        moved = self._sources.get(name)
        if method is not None and method.sources[key] == "folder":
            folder = expanded(moved or original)
            if not folder.is_dir():
                raise NotRunError(f"{name}: its checkpoint is not there ({folder}); pass {flag}")
            return folder
        if moved is not None:
            return locate(moved)
        try:
            return locate(original)
        except BuildError as error:
            raise NotRunError(f"the {name} it was built from is not there ({error}); pass {flag}") from error

    def drafted(self, method: Method, texts: list[list[int]]) -> list[tuple[list[int], list[int]]]:
        """Texts, each with the greedy chain that the runtime's proposer proposes after it.

        Each text is continued three times, as if all, one and none of its draft tokens had been accepted, so that a
        draft's cache lacks rows, has stale ones, or both.
        """
        manifest = self.bundle.manifest
        backend = open_backend(self.bundle, "onnxruntime", None, 1.0)
        proposer = open_proposer(method, Opening(self.bundle, backend, 1))
        params, random = SamplingParams(temperature=0.0), np.random.default_rng(0)
        results = []
        for start, tree in paired(texts, [TokenTree.chain(tree.depth + 1) for tree in method.token_trees()]):
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
        if not results:
            raise NotRunError("no prompt is long enough to draft from; pass prompts of two tokens or more")
        return results

    def recorded(self, method: Method) -> list[tuple[list[int], npt.NDArray[Any]]]:
        """Texts while they are decoded, each with the best candidate at every depth, int64 ``[depths]``."""
        params = SamplingParams(temperature=0.0, max_tokens=_RECORDED_STEPS, ignore_eos=True)
        results = []
        with (
            Engine.load(self.bundle.folder, check_hashes=False, backend="onnxruntime", calibrate=False) as engine,
            recorded(engine, method.name) as recorder,
        ):
            for text in self.texts:
                recorder.clear()
                whole = [*text, *engine.generate(text, params, method.name).token_ids]
                results += [(whole[:length], proposal.candidates[:, 0]) for length, proposal in recorder]
        return results

    def agreement(self, *stored: str) -> TokenAgreement:
        """An empty agreement with the limits of the coarsest of several precisions."""
        return TokenAgreement(max((LIMITS[kind] for kind in stored), key=lambda limits: limits.rms))
