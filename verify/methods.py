"""What ``verify`` lends a method to compare its graph with what it was built from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specexport.checkpoints.locate import locate
from specexport.contract.errors import BuildError, SpecExportError
from specexport.contract.folders import expanded
from specexport.contract.methods import Method
from specexport.contract.tree import TokenTree
from specexport.runtime.bundle import Bundle
from specexport.runtime.engine import Engine
from specexport.runtime.opening import open_backend
from specexport.runtime.params import SamplingParams
from specexport.runtime.proposal import SlotView
from specexport.runtime.proposers import Opening, open_proposer
from specexport.tuning.record import recorded
from specexport.verify.logits import LIMITS, Agreement, paired

_RECORDED_STEPS = 6
"""Tokens decoded after each prompt to see what is proposed; the model reads the text anew for each."""


class NotRunError(SpecExportError):
    """A check cannot be run; says why."""


class MethodRun:
    """See :class:`specexport.exporter.method.Verification`.

    ``sources`` says where checkpoints are now, by ``target`` and ``METHOD.key``; of others the manifest does.
    """

    def __init__(self, bundle: Bundle, texts: list[list[int]], sources: Mapping[str, str]) -> None:
        self.bundle = bundle
        self.texts = texts
        self._sources = sources

    def source(self, method: Method | None, key: str = "model") -> Path:
        """The folder of a checkpoint a method names, or of the target.

        Raises:
            NotRunError: it is not there.
        """
        name = f"{method.name}.{key}" if method is not None else "target"
        known = self.bundle.manifest.target.source if method is None else str(getattr(method, key))
        flag = "--target DIR" if method is None else f"--source {name}=DIR"
        given = self._sources.get(name)
        if method is not None and method.sources[key] == "folder":
            folder = expanded(given or known)
            if not folder.is_dir():
                raise NotRunError(f"{name}: what it was built from is not there ({folder}); pass {flag}")
            return folder
        if given is not None:
            return locate(given)
        try:
            return locate(known)
        except BuildError as error:
            raise NotRunError(f"the {name} it was built from is not there ({error}); pass {flag}") from error

    def drafted(self, method: Method, texts: list[list[int]]) -> list[tuple[list[int], list[int]]]:
        """Texts and the greedy chain proposed after each, through the runtime's own proposer.

        Each text is continued three times, as if all, one and none of its draft tokens had been accepted: a draft's
        cache then lacks a row, holds stale ones, or both.
        """
        manifest = self.bundle.manifest
        backend = open_backend(self.bundle, "onnxruntime", None, 1.0)
        proposer = open_proposer(method, Opening(self.bundle, backend, 1))
        params, random = SamplingParams(temperature=0.0), np.random.default_rng(0)
        made = []
        for start, tree in paired(texts, [TokenTree.chain(tree.depth + 1) for tree in method.token_trees()]):
            text, K = list(start), tree.depth
            for kept in (K, 1, 0):
                if len(text) + K > manifest.max_seq_len:
                    break
                view = SlotView(0, text, params, random, tree)
                while proposer.prefill(view):
                    pass
                proposal = proposer.propose([view]).get(0)
                drafted = proposal.tokens.tolist() if proposal is not None else []
                if drafted:
                    made.append((text, drafted))
                text = [*text, *drafted[:kept], start[0]]
            proposer.release(0)
        backend.close()
        if not made:
            raise NotRunError("no prompt is long enough to draft from; pass prompts of two tokens or more")
        return made

    def recorded(self, method: Method) -> list[tuple[list[int], npt.NDArray[Any]]]:
        """Texts while they are decoded, each with the best candidate at every depth, int64 ``[depths]``."""
        params = SamplingParams(temperature=0.0, max_tokens=_RECORDED_STEPS, ignore_eos=True)
        made = []
        with (
            Engine.load(self.bundle.folder, check_hashes=False, backend="onnxruntime", calibrate=False) as engine,
            recorded(engine, method.name) as recorder,
        ):
            for text in self.texts:
                recorder.clear()
                whole = [*text, *engine.generate(text, params, method.name).token_ids]
                made += [(whole[:length], proposal.candidates[:, 0]) for length, proposal in recorder]
        return made

    def agreement(self, *stored: str) -> Agreement:
        """What counts: how far tokens may be off says what rounds most of several."""
        return Agreement(max((LIMITS[kind] for kind in stored), key=lambda limits: limits.rms))
