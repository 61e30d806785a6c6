"""Steps on the device: propose, fill, verify, accept and commit over fixed memory, captured where that can be."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from specexport.contract import tensors
from specexport.contract.engines import Commit, ProgramGraph
from specexport.contract.errors import BackendError
from specexport.contract.shapes import ShapePoint
from specexport.runtime.cuda.executor import Enqueue, Execution
from specexport.runtime.cuda.graph import DeviceGraph, Width
from specexport.runtime.cuda.memory import BufferLayout, Device, MemoryPlan, Staged, Tensor
from specexport.runtime.cuda.step_variants import Drafting, ProgramGraphs, StepVariant, graphs_of, read_back
from specexport.runtime.cuda.stream import Captured

_ID = np.dtype(np.int64).itemsize


@dataclass
class DeviceStep:
    """A step that is ready to run.

    Attributes:
        inputs: what the host says beside the target's and the draft's inputs.
        outputs: what it reads back.
        commits: whether the rows of the accepted path are put together on the device.
        parts: what is given to the stream, a part a graph, by cache size.
        launches: the same in as few calls as there can be, by cache size.
    """

    inputs: Staged
    outputs: Staged
    commits: bool = False
    parts: dict[int, list[Enqueue]] = field(default_factory=dict)
    launches: dict[int, list[Enqueue]] = field(default_factory=dict)

    def launch(self, cache: int) -> None:
        """Gives it to the stream, at a cache size."""
        for launch in self.launches[cache]:
            launch()


class Steps:
    """The steps that a bundle can take on the device, each of all slots.

    Each is given to the stream as a whole: nothing is waited for until what was accepted is read back. They are
    captured when a bundle is loaded, one CUDA graph a step, else one an engine. Every address in them stays valid until
    they are closed: caches, inputs and outputs are taken once and never move.

    Attributes:
        execution: how they reach the device.
        fallback: why not better, where they do not; empty otherwise.

    Raises:
        BackendError: a graph is refused, or the buffers do not fit.
    """

    def __init__(
        self,
        device: Device,
        target: DeviceGraph,
        graphs: ProgramGraphs,
        variants: Sequence[StepVariant],
    ) -> None:
        self._device = device
        self._target = target
        self._slots = target.sizes[-1]
        self._graphs = graphs
        self._captured: list[Captured] = []
        layouts = {
            variant: [
                BufferLayout({name: np.repeat(array, self._slots, 0) for name, array in of_one.items()})
                for of_one in (variant.inputs(), variant.outputs(), variant.between())
            ]
            for variant in variants
        }
        executors = [executor for _, executor in graphs]
        plan = MemoryPlan()
        plan.add("workspace", max((executor.workspace for executor in executors), default=0))
        for inputs, outputs, filled in layouts.values():  # one step runs at a time
            plan.add("inputs", inputs.nbytes)
            plan.add("outputs", outputs.nbytes)
            plan.add("filled", filled.nbytes)
        self._memory = plan.allocate(device, "the step program's buffers")
        self._steps = {variant: self._bound(variant, *layout) for variant, layout in layouts.items()}
        self.execution: Execution = "plain"
        self.fallback = ""
        whole = self._capture("graph per step", lambda parts: [_together(parts)])
        if not whole and not self._capture("graph per engine", lambda parts: parts):
            self.watch(device.thread.run)

    def __getitem__(self, variant: StepVariant) -> DeviceStep:
        return self._steps[variant]

    def watch(self, around: Callable[[Enqueue], None]) -> None:
        """Gives every step to the stream through a function that is called with it, for measurements."""
        for step in self._steps.values():
            for cache, launches in step.launches.items():
                step.launches[cache] = [functools.partial(around, launch) for launch in launches]

    def close(self) -> None:
        """Gives everything back; what the library holds first, as it may still use the stream and our memory."""
        self._device.stream.synchronize()
        for captured in self._captured:
            captured.close()
        for step in self._steps.values():
            step.launches.clear()
            step.parts.clear()
        for _, executor in self._graphs:
            executor.close()
        for step in self._steps.values():
            step.inputs.close()
            step.outputs.close()
        self._memory.close()

    def _bound(
        self, variant: StepVariant, inputs: BufferLayout, outputs: BufferLayout, filled: BufferLayout
    ) -> DeviceStep:
        """A step with its graphs prepared and warmed up, as it is captured next."""
        kept = ((inputs, "inputs"), (outputs, "outputs"))
        given, made = (Staged(self._device, layout, self._memory[name]) for layout, name in kept)
        step = DeviceStep(given, made)
        verify = self._target.width(variant.tokens, variant.tokens, batch=self._slots)
        drafted = {name: step.inputs.device[name] for name in tensors.DRAFTED if name in step.inputs.device}
        propose: list[list[Enqueue]] = []
        uploads = [verify.inputs, step.inputs]
        if variant.drafting is not None:
            proposed = filled.tensors(self._memory["filled"].address)
            drafted, propose = self._propose(variant.drafting, verify, step, proposed)
            uploads.append(variant.drafting.width.inputs)
        accept = self._accept(variant, verify, step, drafted)
        for cache in self._target.cache_sizes:
            commit = self._commit(variant, verify, step, cache)
            groups = [*propose, [verify.enqueues[cache, 0]], [accept], *commit]
            groups[0] = [*(staged.upload for staged in uploads), *groups[0]]
            groups[-1] = [*groups[-1], functools.partial(self._read_back, step, verify)]
            step.commits = bool(commit)
            step.parts[cache] = step.launches[cache] = [_together(group) for group in groups]
            self._device.warm_up(functools.partial(step.launch, cache))
        return step

    def _propose(
        self, drafting: Drafting, verify: Width, step: DeviceStep, filled: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], list[list[Enqueue]]]:
        """What the accept graph is given of the draft, and what proposes it and tells the target."""
        made = drafting.width.outputs.device
        run = drafting.width.enqueues[drafting.graph.cache.rows, 0]
        if drafting.fill is None:  # a chain's nodes are the draft's tokens
            sort: list[Enqueue] = []
            if self._slots == 1:  # [K,1,...] lies as [1,K,...] does
                filled = {name: Tensor(made[name].address, to.dtype, to.shape) for name, to in filled.items()}
            else:
                sort = [functools.partial(self._by_slot, made[name], to) for name, to in filled.items()]
            return dict(filled), [[run, *sort, functools.partial(self._tell, verify, filled[tensors.DRAFT_TOKENS])]]
        given = {name: step.inputs.device[name] for name in (tensors.TREE_ROWS, tensors.TREE_RANKS)}
        fill = self._prepare(drafting.fill, drafting.at, {**made, **given, **filled})
        tell = functools.partial(self._tell, verify, filled[tensors.TREE_TOKENS])
        names = (tensors.TREE_TOKENS, tensors.TREE_IDS, tensors.TREE_PROBS)
        drafted = {as_drafted: filled[name] for as_drafted, name in zip(tensors.DRAFTED, names, strict=True)}
        return drafted, [[run], [fill, tell]]

    def _by_slot(self, made: Tensor, to: Tensor) -> None:
        """Sorts what a draft made by slots: ``[K,B,...]`` becomes ``[B,K,...]``."""
        drafts, slots = made.shape[:2]
        nbytes = made.nbytes // (drafts * slots)
        for index in range(drafts):
            at, source = to.address + index * nbytes, made.address + index * slots * nbytes
            self._device.copy_rows(at, drafts * nbytes, source, nbytes, nbytes, slots)

    def _tell(self, verify: Width, drafted: Tensor) -> None:
        """Puts the draft tokens of each slot behind its root."""
        ids, behind = verify.inputs.device[tensors.INPUT_IDS], drafted.shape[1] * _ID
        to, pitch = ids.address + _ID, ids.shape[1] * _ID
        self._device.copy_rows(to, pitch, drafted.address, behind, behind, self._slots)

    def _accept(self, variant: StepVariant, verify: Width, step: DeviceStep, drafted: Mapping[str, Tensor]) -> Enqueue:
        logits = verify.outputs.device[tensors.LOGITS]
        # One slot's first N rows; where the target computes fewer, the rest belongs to nodes that never stay.
        seen = Tensor(logits.address, logits.dtype, (self._slots, variant.nodes, logits.shape[-1]))
        arrays = {**step.inputs.device, **drafted, **step.outputs.device, tensors.LOGITS: seen}
        return self._prepare(variant.accept, ShapePoint(self._slots, variant.nodes, 0, variant.nodes), arrays)

    def _commit(self, variant: StepVariant, verify: Width, step: DeviceStep, cache: int) -> list[list[Enqueue]]:
        """What puts the accepted rows together: nothing for chains, nor where they are copied from the host."""
        if variant.tokens == 1 or (variant.drafting is not None and variant.drafting.tree.is_chain):
            return []
        point = ShapePoint(self._slots, variant.nodes, cache)
        known = graphs_of(self._graphs, Commit)
        found = next((graph for graph, executor in known if point in executor.points), None)
        if found is None:
            return []
        caches = self._target.cache.tensors(cache, range(self._slots))
        returned = {name.replace("past_", "present_", 1): tensor for name, tensor in caches.items()}
        past, path = verify.inputs.device[tensors.PAST_LENGTH], step.outputs.device[tensors.PATH]
        given = {tensors.PAST_LENGTH: past, tensors.PATH: path}
        return [[self._prepare(found, point, {**given, **caches, **returned})]]

    def _prepare(self, graph: ProgramGraph, point: ShapePoint, arrays: Mapping[str, Tensor]) -> Enqueue:
        executor = next(executor for known, executor in self._graphs if known is graph)
        return executor.prepare(point, arrays, self._memory["workspace"])

    def _read_back(self, step: DeviceStep, verify: Width) -> None:
        step.outputs.download()
        for name in read_back(verify.outputs.device):
            verify.outputs.download(name)

    def _capture(self, execution: Execution, divided: Callable[[list[Enqueue]], list[Enqueue]]) -> bool:
        """Captures every step, or none where one cannot be; whether it did."""
        work = [(step, cache, divided(parts)) for step in self._steps.values() for cache, parts in step.parts.items()]
        captured = self._device.stream.capture_all([part for _, _, parts in work for part in parts])
        if isinstance(captured, BackendError):
            self.fallback = self.fallback or str(captured)
            return False
        self._captured, rest = captured, iter(captured)
        for step, cache, parts in work:
            step.launches[cache] = [next(rest).launch for _ in parts]
        self.execution = execution
        return True


def _together(work: Sequence[Enqueue]) -> Enqueue:
    def enqueue() -> None:
        for part in work:
            part()

    return enqueue
