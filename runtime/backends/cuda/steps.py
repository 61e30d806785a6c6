"""Steps on the device: propose, fill, verify, accept and commit in fixed memory, captured if possible."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from specexport.contract import tensors
from specexport.contract.engines import Commit, ProgramGraph
from specexport.contract.shapes import ShapePoint
from specexport.runtime.backend import Array
from specexport.runtime.backends.cuda.api import Launch
from specexport.runtime.backends.cuda.graph import DeviceGraph, RunBuffers
from specexport.runtime.backends.cuda.library import Enqueue, Execution
from specexport.runtime.backends.cuda.memory import Device, MemoryPlan, StagingBuffers, Tensor, block_size, tensors_at
from specexport.runtime.backends.cuda.step_variants import Drafting, ProgramGraphs, StepVariant, graphs_of, read_back

_ID = np.dtype(np.int64).itemsize


class Steps:
    """The steps that a bundle can take on the device, each of all slots.

    A step is enqueued as a whole: the host waits only for its results. Steps are captured when a bundle is loaded, as
    one CUDA graph for each step, or else for each engine. All addresses stay valid until the steps are closed: caches,
    inputs and outputs are allocated once and never move.

    Attributes:
        execution: how steps reach the device.
        fallback: why there is no faster way; empty if steps are captured as a whole.
    """

    def __init__(
        self, device: Device, target: DeviceGraph, graphs: ProgramGraphs, variants: Sequence[StepVariant]
    ) -> None:
        self._device = device
        self._target = target
        self._slots = target.sizes[-1]
        self._graphs = graphs
        self._variants = variants
        arrays_of = [
            [
                {name: np.repeat(array, self._slots, 0) for name, array in arrays.items()}
                for arrays in (variant.input_arrays(), variant.output_arrays(), variant.draft_arrays())
            ]
            for variant in variants
        ]
        plan = MemoryPlan()
        plan.add("workspace", max((executor.workspace for executor in graphs.values()), default=0))
        for inputs, outputs, drafted in arrays_of:  # one step runs at a time
            plan.add("inputs", block_size(inputs))
            plan.add("outputs", block_size(outputs))
            plan.add("drafted", block_size(drafted))
        self._memory = plan.allocate(device, "the step program's buffers")
        for variant, arrays in zip(variants, arrays_of, strict=True):
            self._prepare_step(variant, *arrays)
        self.execution: Execution = "plain"
        self.fallback = ""
        if not self._capture("graph per step") and not self._capture("graph per engine"):
            self.watch(device.thread.run)

    def watch(self, around: Callable[[Enqueue], None]) -> None:
        for launch in self._launches():
            launch.watch(around)

    def _launches(self) -> list[Launch]:
        parts = (launches for variant in self._variants for launches in variant.launches.values())
        return [launch for launches in parts for launch in launches]

    def close(self) -> None:
        """Frees everything; first the library's part, which may still use the stream and our memory."""
        self._device.stream.synchronize()
        for launch in self._launches():
            launch.close()
        for variant in self._variants:
            variant.launches.clear()
        for executor in self._graphs.values():
            executor.close()
        for variant in self._variants:
            variant.inputs.close()
            variant.outputs.close()
        self._memory.close()

    def _prepare_step(
        self, variant: StepVariant, inputs: dict[str, Array], outputs: dict[str, Array], of_draft: dict[str, Array]
    ) -> None:
        """Prepares a step's graphs and warms them up, before they are captured."""
        variant.inputs = StagingBuffers(self._device, inputs, self._memory["inputs"])
        variant.outputs = StagingBuffers(self._device, outputs, self._memory["outputs"])
        verify = self._target.buffers(variant.shape)
        drafted = {str(name): variant.inputs.device[name] for name in tensors.DRAFTED if name in inputs}
        propose: list[list[Enqueue]] = []
        uploads = [verify.inputs, variant.inputs]
        if variant.drafting is not None:
            proposed = tensors_at(self._memory["drafted"].address, of_draft)
            drafted, propose = self._propose(variant, variant.drafting, verify, proposed)
            uploads.append(variant.drafting.buffers.inputs)
        accept = self._accept(variant, verify, drafted)
        for cache in self._target.cache_sizes:
            commit = self._commit(variant, verify, cache)
            groups = [*propose, [verify.enqueues[cache, 0]], [accept], *commit]
            groups[0] = [*(staged.upload for staged in uploads), *groups[0]]
            groups[-1] = [*groups[-1], functools.partial(self._read_back, variant, verify)]
            variant.commits = bool(commit)
            variant.launches[cache] = [Launch(_together(group)) for group in groups]
            self._device.warm_up(functools.partial(variant.launch, cache))

    def _propose(
        self, variant: StepVariant, drafting: Drafting, verify: RunBuffers, drafted: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], list[list[Enqueue]]]:
        """The accept graph's inputs from the draft, and the work of drafting and of passing tokens to the target."""
        results = drafting.buffers.outputs.device
        work = [[drafting.buffers.enqueues[drafting.graph.cache.rows, 0]]]
        if drafting.fill is not None:
            shape = {str(name): variant.inputs.device[name] for name in (tensors.TREE_ROWS, tensors.TREE_RANKS)}
            names = (tensors.TREE_TOKENS, tensors.TREE_IDS, tensors.TREE_PROBS)
            filled = {str(name): drafted[as_drafted] for name, as_drafted in zip(names, tensors.DRAFTED, strict=True)}
            work.append([self._prepare(drafting.fill, drafting.at, {**results, **shape, **filled})])
        elif self._slots == 1:  # the nodes of a chain are the draft's tokens; [K,1,...] and [1,K,...] are equal
            drafted = {name: Tensor(results[name].address, to.dtype, to.shape) for name, to in drafted.items()}
        else:
            work[0] += [functools.partial(self._by_slot, results[name], to) for name, to in drafted.items()]
        work[-1].append(functools.partial(self._pass_on, verify, drafted[tensors.DRAFT_TOKENS]))
        return drafted, work

    def _by_slot(self, source: Tensor, to: Tensor) -> None:
        """Transposes a draft's output: ``[K,B,...]`` becomes ``[B,K,...]``."""
        drafts, slots = source.shape[:2]
        nbytes = source.nbytes // (drafts * slots)
        for index in range(drafts):
            at, first = to.address + index * nbytes, source.address + index * slots * nbytes
            self._device.stream.copy_rows(at, drafts * nbytes, first, nbytes, nbytes, slots)

    def _pass_on(self, verify: RunBuffers, drafted: Tensor) -> None:
        """Copies each slot's draft tokens into the target's input, after the root."""
        ids, nbytes = verify.inputs.device[tensors.INPUT_IDS], drafted.shape[1] * _ID
        to, pitch = ids.address + _ID, ids.shape[1] * _ID
        self._device.stream.copy_rows(to, pitch, drafted.address, nbytes, nbytes, self._slots)

    def _accept(self, variant: StepVariant, verify: RunBuffers, drafted: Mapping[str, Tensor]) -> Enqueue:
        logits = verify.outputs.device[tensors.LOGITS]
        # The first N rows of one slot; rows that the target does not compute belong to nodes that are never accepted.
        rows = Tensor(logits.address, logits.dtype, (self._slots, variant.nodes, logits.shape[-1]))
        arrays = {**variant.inputs.device, **drafted, **variant.outputs.device, tensors.LOGITS: rows}
        return self._prepare(variant.accept, ShapePoint(self._slots, variant.nodes, 0, variant.nodes), arrays)

    def _commit(self, variant: StepVariant, verify: RunBuffers, cache: int) -> list[list[Enqueue]]:
        """The work that makes accepted rows contiguous; none for chains, or if the host copies them."""
        if variant.shape.tokens == 1 or (variant.drafting is not None and variant.drafting.tree.is_chain):
            return []
        point = ShapePoint(self._slots, variant.nodes, cache)
        commits = graphs_of(self._graphs, Commit)
        commit = next((graph for graph, executor in commits if point in executor.points), None)
        if commit is None:
            return []
        caches = self._target.cache.tensors(cache, range(self._slots))
        returned = {name.replace("past_", "present_", 1): tensor for name, tensor in caches.items()}
        past, path = verify.inputs.device[tensors.PAST_LENGTH], variant.outputs.device[tensors.PATH]
        return [[self._prepare(commit, point, {tensors.PAST_LENGTH: past, tensors.PATH: path, **caches, **returned})]]

    def _prepare(self, graph: ProgramGraph, point: ShapePoint, arrays: Mapping[str, Tensor]) -> Enqueue:
        return self._graphs[graph].prepare(point, arrays, self._memory["workspace"])

    def _read_back(self, variant: StepVariant, verify: RunBuffers) -> None:
        variant.outputs.download()
        for name in read_back(verify.outputs.device):
            verify.outputs.download(name)

    def _capture(self, execution: Execution) -> bool:
        """Captures every step, as one graph or a graph per engine; returns False if one cannot be captured."""
        work = [(variant, cache, parts) for variant in self._variants for cache, parts in variant.launches.items()]
        if execution == "graph per step":
            work = [(variant, at, [Launch(_together([part.enqueue for part in parts]))]) for variant, at, parts in work]
        error = self._device.stream.capture_all([launch for _, _, launches in work for launch in launches])
        if error is not None:
            self.fallback = self.fallback or str(error)
            return False
        for variant, cache, launches in work:
            variant.launches[cache] = launches
        self.execution = execution
        return True


def _together(work: Sequence[Enqueue]) -> Enqueue:
    def enqueue() -> None:
        for part in work:
            part()

    return enqueue
