"""The state of a build: what its stages know and what they have written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from specexport.contract.engines import ProgramGraph
from specexport.contract.manifest import GenerationDefaults, Manifest
from specexport.contract.methods import Method
from specexport.contract.model import Model, Strict
from specexport.exporter.build_plan import BuildPlan
from specexport.exporter.progress import Progress, during
from specexport.exporter.records import Records

if TYPE_CHECKING:
    from specexport.exporter.checkpoints.checkpoint import TokenizerFiles
    from specexport.exporter.engines.bundle import CompileReport
    from specexport.exporter.options import BuildOptions


class WrittenTarget(Strict, frozen=True):
    """The result of the stage that writes the target.

    Attributes:
        plan: of the whole build; its methods have the models that were written with the target.
    """

    model: Model
    plan: BuildPlan
    eos_token_ids: tuple[int, ...]
    generation: GenerationDefaults


@dataclass
class Build:
    """A build. Stages set the attributes after ``records``; see the list in ``exporter/build.py``.

    Attributes:
        folder: where the bundle is written.
        source: folder of the target's checkpoint.
        tokenizer: the target's.
        methods: with their own models.
        templates: files of chat templates by name.
        program: the step program's graphs.
        engines: the report of compiling some.
    """

    options: BuildOptions
    folder: Path
    progress: Progress
    records: Records
    source: Path = field(init=False)
    tokenizer: TokenizerFiles = field(init=False)
    target: WrittenTarget = field(init=False)
    methods: tuple[Method, ...] = field(init=False)
    templates: dict[str, str] = field(init=False)
    program: tuple[ProgramGraph, ...] = field(init=False)
    manifest: Manifest = field(init=False)
    engines: CompileReport | None = field(init=False)

    @property
    def plan(self) -> BuildPlan:
        """The trees and shapes of the bundle."""
        return self.target.plan

    @property
    def vocab_size(self) -> int:
        """V of the target."""
        return self.target.model.vocab_size

    @property
    def max_positions(self) -> int:
        """Longest text that the target was trained for, in tokens."""
        return self.target.model.max_positions

    @contextmanager
    def during(self, title: str) -> Iterator[None]:
        """Reports the begin and the end of a step."""
        with during(self.progress, title):
            yield
