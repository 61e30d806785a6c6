"""The GPU backends: a device, its stream and its memory budget, which all graphs of a bundle share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import cast, get_args

from specexport.contract.engines import EngineRuntime
from specexport.contract.errors import BackendError
from specexport.contract.model import Model
from specexport.runtime.backend import BackendOptions, Buffers, Graph
from specexport.runtime.backends.cuda.api import Cuda
from specexport.runtime.backends.cuda.device_program import DeviceProgram
from specexport.runtime.backends.cuda.graph import DeviceGraph
from specexport.runtime.backends.cuda.library import Enqueue, Execution, Library
from specexport.runtime.backends.cuda.memory import Device
from specexport.runtime.backends.cuda.nccl import Communicator, Nccl
from specexport.runtime.backends.cuda.ort import OnnxRuntimeLibrary
from specexport.runtime.backends.cuda.step_variants import StepVariants
from specexport.runtime.backends.cuda.steps import Steps
from specexport.runtime.backends.cuda.trt import EngineLibrary
from specexport.runtime.backends.ranks import ORPHANED, Followers, Job, ProcessGroup, RankLostError
from specexport.runtime.bundle import Bundle
from specexport.runtime.proposal import Proposer
from specexport.runtime.step import StepProgram


class CudaBackend:
    """Runs a bundle on the first GPU that CUDA shows; see :class:`~specexport.runtime.backend.Backend`.

    Attributes:
        graphs: the opened graphs, the target's first.
    """

    kernels = kernels_build = ""

    def __init__(self, bundle: Bundle, options: BackendOptions) -> None:
        if bundle.manifest.has_states:
            raise BackendError(
                f"{options.name} does not run layers without attention yet, which a model of this bundle has"
            )
        runtime = cast(EngineRuntime, options.name)  # the entry points of this class have these names
        self._bundle = bundle
        self._options = options
        self._shared = Device.share(Cuda.load(), options.gpu_memory_utilization)
        self.cuda, self.stream = self._shared.cuda, self._shared.stream
        self._run = self._shared.thread.run
        self._library: Library = (
            OnnxRuntimeLibrary(bundle, self._shared)
            if runtime == "onnxruntime-cuda"
            else EngineLibrary(bundle, self._shared, runtime)
        )
        self.graphs: list[DeviceGraph] = []
        self._steps: Steps | None = None
        self._ranks = contextlib.ExitStack()  # ends the other ranks of a split target

    @property
    def default_slots(self) -> int:
        """The fewest slots, as caches take their full size at once."""
        return self._library.batch_sizes[0]

    @property
    def execution(self) -> Execution:
        """The way in which steps reach the device; if the host drives them, the slowest way of any graph."""
        if self._steps is not None:
            return self._steps.execution
        return min((graph.execution for graph in self.graphs), key=get_args(Execution).index, default="plain")

    @property
    def device(self) -> str:
        ranks = len(self._bundle.manifest.target.ranks)
        return f"{self._library.name}, {self.cuda.device}" + (f", {ranks} ranks" if ranks else "")

    @property
    def fallback(self) -> str:
        reasons = [graph.fallback for graph in self.graphs]
        reasons.append(self._library.without_program if self._steps is None else self._steps.fallback)
        return next((reason for reason in reasons if reason), "")

    def open(self, model: Model, slots: int, buffers: Buffers) -> DeviceGraph:
        """Loads a model's graph; see :class:`~specexport.runtime.backend.Backend`."""
        sizes = self._library.batch_sizes
        if slots not in sizes:
            raise BackendError(
                f"{slots} requests at once were asked for, and the engines run {', '.join(map(str, sizes))}; compile "
                f"them with: specexport compile BUNDLE --engine-batch-sizes {slots}"
            )
        if model.ranks:
            return self._lead(model, slots, buffers)
        return self._open(model, slots, buffers)

    def _open(
        self, model: Model, slots: int, buffers: Buffers, communicator: Communicator | None = None
    ) -> DeviceGraph:
        manifest = self._bundle.manifest
        role = next((role for role, entry in manifest.models.items() if entry is model), "target")

        def open_graph() -> DeviceGraph:
            executor = self._library.open(model, communicator)
            try:
                return DeviceGraph(self._shared, model, manifest.lowering, buffers, executor, slots, role)
            except BaseException:
                executor.close()
                raise

        graph = self._run(open_graph)
        self.graphs.append(graph)
        return graph

    def _lead(self, model: Model, slots: int, buffers: Buffers) -> DeviceGraph:
        """Opens the first rank's part of a split target, and starts a process for each other rank."""
        gpus, ranks = int(self.cuda.call("cudaGetDeviceCount")), len(model.ranks)
        if gpus < ranks:
            raise BackendError(
                f"the target is split among {ranks} ranks, each with a GPU of its own, and CUDA shows {gpus}; see "
                "CUDA_VISIBLE_DEVICES, run it with --backend onnxruntime, or build it with --tensor-parallel "
                f"{gpus}"
            )
        nccl = Nccl()
        job = Job(str(self._bundle.folder.absolute()), slots, self._options, unique_id=nccl.unique_id())
        followers = Followers(self._bundle, job)
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(followers.close)
            try:
                followers.group.barrier()  # joining waits for ever if a rank has no GPU or NCCL
                communicator = nccl.join(job.unique_id, 0, ranks)
                cleanup.callback(communicator.close)

                def lost(rank: int) -> None:
                    followers.lost = RankLostError(rank)
                    communicator.close()  # aborts what the device waits for

                followers.group.watch(lost)
                graph = self._open(model.of_rank(0), slots, buffers, communicator)
                graph.followers = followers
                followers.group.barrier()
            except BackendError as error:
                lost_rank = error if isinstance(error, RankLostError) else followers.lost
                if lost_rank is None:
                    raise
                followers.give_up(lost_rank)
            self._ranks = cleanup.pop_all()
        return graph

    def follow(self, job: Job, group: ProcessGroup) -> DeviceGraph:
        """Opens a rank's part of the target; the process exits when another rank ends, even while the device waits."""
        model, nccl, buffers = self._bundle.manifest.target, Nccl(), self._bundle.manifest.target_signature.buffers
        group.barrier()
        communicator = nccl.join(job.unique_id, job.rank, len(model.ranks))
        group.watch(lambda rank: os._exit(ORPHANED))
        return self._open(model.of_rank(job.rank), job.slots, buffers, communicator)

    def inexact(self, target: Graph) -> str:
        return "on a device a row's rounding depends on the number of rows"

    def program(self, target: Graph, proposers: Mapping[str, Proposer]) -> StepProgram:
        """Steps on the device if the library runs the step program's graphs; otherwise the host drives them."""
        return self._run(lambda: self._program(target, proposers))

    def _program(self, target: Graph, proposers: Mapping[str, Proposer]) -> StepProgram:
        manifest = self._bundle.manifest
        graphs = self._library.program()
        execution = self.execution
        if not graphs or not isinstance(target, DeviceGraph):
            return StepProgram(manifest, target, proposers, execution)
        try:
            variants = StepVariants(manifest, target, proposers, graphs)
            self._steps = Steps(self._shared, target, graphs, variants.all)
        except BaseException:
            for executor in graphs.values():
                executor.close()
            raise
        return DeviceProgram(manifest, target, proposers, execution, self.stream, variants, self._steps)

    def watch(self, around: Callable[[Enqueue], None]) -> None:
        """Calls ``around`` with every launch instead, for measurements."""
        for graph in self.graphs:
            graph.watch(around)
        if self._steps is not None:
            self._steps.watch(around)

    def close(self) -> None:
        self._run(self._close)
        self._shared.thread.close()

    def _close(self) -> None:
        if self._steps is not None:
            self._steps.close()
            self._steps = None
        for graph in self.graphs:
            graph.close()
        self.graphs.clear()
        self._ranks.close()
        self.stream.close()
