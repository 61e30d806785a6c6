"""The onnxruntime backend: runs models on the CPU, in this process or split among several."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace

from specexport.contract.model import Model
from specexport.contract.values import counted
from specexport.runtime.backend import BackendOptions, Buffers, Graph
from specexport.runtime.backends.onnxruntime.graph import OnnxRuntimeGraph
from specexport.runtime.backends.onnxruntime.kernels import kernels
from specexport.runtime.backends.onnxruntime.segments import open_rank
from specexport.runtime.backends.onnxruntime.session import open_cached
from specexport.runtime.backends.ranks import Followers, Job, ProcessGroup, RankLostError
from specexport.runtime.bundle import Bundle
from specexport.runtime.machine import available_cores, cpu_name
from specexport.runtime.proposal import Proposer
from specexport.runtime.step import StepProgram


class OnnxRuntimeBackend:
    """onnxruntime on the CPU; see :class:`~specexport.runtime.backend.Backend`."""

    execution = "host"
    fallback = ""

    def __init__(self, bundle: Bundle, options: BackendOptions) -> None:
        self._bundle = bundle
        cores = available_cores()
        self._threads = min(options.threads or cores, cores)
        if options.threads is not None and options.threads > cores:
            warnings.warn(
                f"threads is {options.threads}, and this process may use {counted(cores, 'core')}: it takes "
                f"{counted(cores, 'thread')}, as more would wait for each other",
                stacklevel=2,
            )
        self._options = replace(options, threads=self._threads)
        self._followers: list[Followers] = []
        self.default_slots = bundle.manifest.batch_sizes[-1]  # all, as unused slots take no memory

    @property
    def device(self) -> str:
        ranks = len(self._bundle.manifest.target.ranks)
        used = kernels().instruction_set
        parts = ("onnxruntime", cpu_name(), counted(self._threads, "thread"))
        return ", ".join([*parts, *[f"{ranks} ranks"] * bool(ranks), *[f"{used} kernels"] * bool(used)])

    @property
    def kernels(self) -> str:
        return kernels().described

    @property
    def kernels_build(self) -> str:
        return kernels().build

    def inexact(self, target: Graph) -> str:
        assert isinstance(target, OnnxRuntimeGraph)
        if not kernels().devices:
            return self.kernels
        if self._bundle.manifest.lowering == "portable":
            return "lowered portably: attention sums a step's rows in another order than cached ones"
        counts = target.not_claimed
        return "not claimed: " + ", ".join(f"{kind} x {n}" for kind, n in counts.most_common()) if counts else ""

    def open(self, model: Model, slots: int, buffers: Buffers) -> OnnxRuntimeGraph:
        if model.ranks:
            return self._lead(slots)
        session = open_cached(self._bundle, model, model.graph.master, self._options)
        master = self._bundle.file(model.graph.master)
        return OnnxRuntimeGraph(master, session, model, self._bundle.manifest.lowering, slots, buffers)

    def _lead(self, slots: int) -> OnnxRuntimeGraph:
        """Starts the target's other ranks, each with a share of the threads, and opens the first rank's part."""
        share = max(1, self._threads // len(self._bundle.manifest.target.ranks))
        job = Job(str(self._bundle.folder.absolute()), slots, replace(self._options, threads=share))
        followers = Followers(self._bundle, job)
        try:
            graph = open_rank(self._bundle, job, followers.group)
            graph.followers = followers
            followers.wait_until_open()
        except RankLostError as lost:
            followers.give_up(lost)
        except BaseException:
            followers.close()
            raise
        self._followers.append(followers)
        return graph

    def follow(self, job: Job, group: ProcessGroup) -> OnnxRuntimeGraph:
        """Opens a rank's part of the target."""
        return open_rank(self._bundle, job, group)

    def program(self, target: Graph, proposers: Mapping[str, Proposer]) -> StepProgram:
        return StepProgram(self._bundle.manifest, target, proposers)

    def close(self) -> None:
        """Ends the other ranks; graphs are freed with their last reference."""
        for followers in self._followers:
            followers.close()
