"""Steps on the device: propose, fill, verify, accept and commit over fixed memory, captured as one CUDA graph each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from specexport.contract import tensors
from specexport.contract.engines import Accept, Commit, Fill, ProgramGraph
from specexport.contract.errors import BackendError
from specexport.contract.shapes import CATCH_UP_TOKENS, ShapePoint
from specexport.contract.tree import TokenTree
from specexport.runtime.backend import FIRST, Array
from specexport.runtime.cuda.api import Cuda
from specexport.runtime.cuda.executor import Enqueue, Execution, Executor
from specexport.runtime.cuda.graph import DeviceGraph, Width
from specexport.runtime.cuda.memory import Budget, Layout, Plan, Staged, Tensor
from specexport.runtime.cuda.stream import Captured, Stream

G = TypeVar("G", Accept, Fill, Commit)
_ID = np.dtype(np.int64).itemsize


class ProgramGraphs:
    """The step program's own graphs, with what runs them.

    Args:
        executors: those that were compiled for this device.
    """

    def __init__(self, executors: Sequence[tuple[ProgramGraph, Executor]]) -> None:
        self._executors = tuple(executors)

    def of(self, kind: type[G]) -> list[tuple[G, Executor]]:
        """Those of one kind."""
        return [(graph, executor) for graph, executor in self._executors if isinstance(graph, kind)]

    def executor(self, graph: ProgramGraph) -> Executor:
        """What runs one of them."""
        return next(executor for known, executor in self._executors if known is graph)

    @property
    def workspace(self) -> int:
        """Scratch memory that does for each."""
        return max((executor.workspace for _, executor in self._executors), default=0)

    def close(self) -> None:
        """Frees what the library holds."""
        for _, executor in self._executors:
            executor.close()


@dataclass(frozen=True, eq=False)
class Drafting:
    """How a draft proposes on the device.

    Attributes:
        graph: the draft's.
        tree: what it fills.
        fill: the graph that does; None for chains, which need none.
    """

    graph: DeviceGraph
    tree: TokenTree
    fill: Fill | None

    @property
    def width(self) -> Width:
        """What runs the draft."""
        return self.graph.width(CATCH_UP_TOKENS, drafts=self.tree.depth)


@dataclass(frozen=True, eq=False)
class Kind:
    """What steps have in common that one CUDA graph runs, but for the size of the cache.

    Attributes:
        accept: the accept graph.
        tokens: T, what the target sees.
        nodes: N, of the tree; of a smaller one the rest never stays.
        drafting: how a draft proposes on the device; None where the host writes the draft tokens and q.
    """

    accept: Accept
    tokens: int
    nodes: int
    drafting: Drafting | None = None


@dataclass
class DeviceStep:
    """A step that is ready to run.

    Attributes:
        inputs: what the host says beside the target's and the draft's inputs.
        outputs: what it reads back.
        commits: whether the rows of the accepted path are put together on the device.
        parts: what is given to the stream, a part an engine, by cache size.
        launches: the same as few calls as there can be, by cache size.
    """

    inputs: Staged
    outputs: Staged
    commits: bool = False
    parts: dict[int, list[Enqueue]] = field(default_factory=dict)
    launches: dict[int, Enqueue] = field(default_factory=dict)


class Steps:
    """The steps of one slot that a bundle can take on the device.

    Each is given to the stream as a whole: nothing is waited for until what was accepted is read back. They are
    captured when a bundle is loaded, one CUDA graph a step, else one an engine. Every address in them stays valid until
    they are closed: caches, inputs and outputs are taken once and never move.

    Attributes:
        execution: how they reach the device.
        fallback: why not better, where they do not; empty otherwise.

    Args:
        cuda: the device.
        stream: does the work.
        budget: what may be used of the device.
        target: the target's graph.
        graphs: the step program's.
        kinds: the steps wanted.

    Raises:
        BackendError: a graph is refused, or the buffers do not fit.
    """

    def __init__(
        self,
        cuda: Cuda,
        stream: Stream,
        budget: Budget,
        target: DeviceGraph,
        graphs: ProgramGraphs,
        kinds: Sequence[Kind],
    ) -> None:
        self._cuda = cuda
        self._stream = stream
        self._target = target
        self._graphs = graphs
        self._captured: list[Captured] = []
        layouts = {kind: (Layout(_inputs(kind)), Layout(_outputs(kind)), Layout(_filled(kind))) for kind in kinds}
        plan = Plan()
        plan.add("workspace", graphs.workspace)
        for inputs, outputs, filled in layouts.values():  # one step runs at a time
            plan.add("inputs", inputs.nbytes)
            plan.add("outputs", outputs.nbytes)
            plan.add("filled", filled.nbytes)
        self._memory = plan.allocate(cuda, budget, "the step program's buffers")
        self._steps = {kind: self._bound(kind, *layout) for kind, layout in layouts.items()}
        self.execution: Execution = "plain"
        self.fallback = ""
        self._capture("graph per step", lambda parts: [_together(parts)])
        if not self._captured:
            self._capture("graph per engine", lambda parts: parts)

    def __getitem__(self, kind: Kind) -> DeviceStep:
        return self._steps[kind]

    def watch(self, around: Callable[[Enqueue], None]) -> None:
        """Gives every step to the stream through a function that is called with it, for measurements."""
        for step in self._steps.values():
            for cache, launch in step.launches.items():
                step.launches[cache] = functools.partial(around, launch)

    def close(self) -> None:
        """Gives everything back; what the library holds first, as it may still use the stream and our memory."""
        self._stream.synchronize()
        for captured in self._captured:
            captured.close()
        for step in self._steps.values():
            step.launches.clear()
            step.parts.clear()
        self._graphs.close()
        for step in self._steps.values():
            step.inputs.close()
            step.outputs.close()
        self._memory.close()

    # --- binding ------------------------------------------------------------------------------------------------------

    def _bound(self, kind: Kind, inputs: Layout, outputs: Layout, filled: Layout) -> DeviceStep:
        """A step with its graphs prepared, run once, so that libraries have set themselves up before it is captured."""
        step = DeviceStep(
            Staged(self._cuda, inputs, self._memory["inputs"]), Staged(self._cuda, outputs, self._memory["outputs"])
        )
        verify = self._target.width(kind.tokens, kind.tokens)
        drafted = {name: step.inputs.device[name] for name in tensors.DRAFTED if name in step.inputs.device}
        propose: list[list[Enqueue]] = []
        uploads = [verify.inputs, step.inputs]
        if kind.drafting is not None:
            proposed = filled.tensors(self._memory["filled"].address)
            drafted, propose = self._propose(kind.drafting, verify, step, proposed)
            uploads.append(kind.drafting.width.inputs)
        accept = self._accept(kind, verify, step, drafted)
        for cache in self._target.cache_sizes:
            commit = self._commit(kind, verify, step, cache)
            groups = [*propose, [verify.enqueues[cache, 0]], [accept], *commit]
            groups[0] = [*(functools.partial(staged.upload, self._stream.handle) for staged in uploads), *groups[0]]
            groups[-1] = [*groups[-1], functools.partial(self._read_back, step, verify)]
            step.commits = bool(commit)
            step.parts[cache] = [_together(group) for group in groups]
            step.launches[cache] = _together(step.parts[cache])
            step.launches[cache]()
            self._stream.synchronize()
        return step

    def _propose(
        self, drafting: Drafting, verify: Width, step: DeviceStep, filled: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], list[list[Enqueue]]]:
        """What the accept graph is given of the draft, and what proposes it and tells the target."""
        made, nodes = drafting.width.outputs.device, len(drafting.tree) - 1
        run = drafting.width.enqueues[drafting.graph.cache.rows, 0]
        if drafting.fill is None:  # one slot's K tokens lie as those of a chain's nodes do
            shaped = {name: Tensor(t.address, t.dtype, (1, nodes, *t.shape[2:])) for name, t in made.items()}
            return shaped, [[run, functools.partial(self._tell, verify, shaped[tensors.DRAFT_TOKENS])]]
        point = ShapePoint(1, nodes + 1, 0, 0, drafting.tree.depth)
        given = {name: step.inputs.device[name] for name in (tensors.TREE_DEPTHS, tensors.TREE_RANKS)}
        fill = self._prepare(drafting.fill, point, {**made, **given, **filled})
        tell = functools.partial(self._tell, verify, filled[tensors.TREE_TOKENS])
        names = (tensors.TREE_TOKENS, tensors.TREE_IDS, tensors.TREE_PROBS)
        drafted = {as_drafted: filled[name] for as_drafted, name in zip(tensors.DRAFTED, names, strict=True)}
        return drafted, [[run], [fill, tell]]

    def _tell(self, verify: Width, drafted: Tensor) -> None:
        """Puts the draft tokens behind the root."""
        to = verify.inputs.device[tensors.INPUT_IDS].address + _ID
        self._cuda.copy(to, drafted.address, drafted.nbytes, self._stream.handle)

    def _accept(self, kind: Kind, verify: Width, step: DeviceStep, drafted: Mapping[str, Tensor]) -> Enqueue:
        logits = verify.outputs.device[tensors.LOGITS]
        # The first N rows; where the target computes fewer, the rest belongs to nodes that never stay.
        seen = Tensor(logits.address, logits.dtype, (1, kind.nodes, logits.shape[-1]))
        arrays = {**step.inputs.device, **drafted, **step.outputs.device, tensors.LOGITS: seen}
        return self._prepare(kind.accept, ShapePoint(1, kind.nodes, 0, kind.nodes), arrays)

    def _commit(self, kind: Kind, verify: Width, step: DeviceStep, cache: int) -> list[list[Enqueue]]:
        """What puts the accepted rows together: nothing for chains, nor where they are copied from the host."""
        if kind.drafting is not None and kind.drafting.tree.is_chain:
            return []
        point = ShapePoint(1, kind.nodes, cache)
        found = next((graph for graph, executor in self._graphs.of(Commit) if point in executor.points), None)
        if found is None:
            return []
        caches = self._target.cache.tensors(cache, FIRST)
        returned = {name.replace("past_", "present_", 1): tensor for name, tensor in caches.items()}
        past, path = verify.inputs.device[tensors.PAST_LENGTH], step.outputs.device[tensors.PATH]
        given = {tensors.PAST_LENGTH: past, tensors.PATH: path}
        return [[self._prepare(found, point, {**given, **caches, **returned})]]

    def _prepare(self, graph: ProgramGraph, point: ShapePoint, arrays: Mapping[str, Tensor]) -> Enqueue:
        return self._graphs.executor(graph).prepare(point, arrays, self._memory["workspace"])

    def _read_back(self, step: DeviceStep, verify: Width) -> None:
        step.outputs.download(self._stream.handle)
        if tensors.CANDIDATES in verify.outputs.device:
            verify.outputs.download(self._stream.handle, tensors.CANDIDATES)

    # --- capture ------------------------------------------------------------------------------------------------------

    def _capture(self, execution: Execution, divided: Callable[[list[Enqueue]], list[Enqueue]]) -> None:
        """Captures every step, or none where one cannot be."""
        captured: dict[tuple[Kind, int], list[Captured]] = {}
        try:
            for kind, step in self._steps.items():
                for cache, parts in step.parts.items():
                    graphs = captured.setdefault((kind, cache), [])
                    for work in divided(parts):
                        graphs.append(self._stream.capture(work))
        except BackendError as error:
            self.fallback = self.fallback or str(error)
            for graphs in captured.values():
                for graph in graphs:
                    graph.close()
            return
        for (kind, cache), graphs in captured.items():
            self._captured += graphs
            self._steps[kind].launches[cache] = _together([graph.launch for graph in graphs])
        self.execution = execution


def _together(work: Sequence[Enqueue]) -> Enqueue:
    def enqueue() -> None:
        for one in work:
            one()

    return enqueue if len(work) != 1 else work[0]


def _inputs(kind: Kind) -> dict[str, Array]:
    """What the accept and fill graphs take from the host; at first a chain of tokens chosen without drawing."""
    nodes, drafts, lossless = kind.nodes, kind.nodes - 1, kind.accept.rule == "lossless"
    arrays: dict[str, Array] = {
        tensors.PARENTS: np.arange(-1, drafts)[None],
        tensors.TREE_MASK: np.tri(nodes, dtype=np.bool_)[None],
        tensors.UNIFORM: np.zeros((1, nodes if lossless else 1), np.float32),
        tensors.TEMPERATURE: np.ones(1, np.float32),
        tensors.TOP_K: np.ones(1, np.int64),
        tensors.TOP_P: np.ones(1, np.float32),
        tensors.MIN_P: np.zeros(1, np.float32),
    }
    if not lossless:
        arrays |= {name: np.zeros(1, np.float32) for name in (tensors.THRESHOLD, tensors.ALPHA)}
    if kind.drafting is None:
        arrays[tensors.DRAFT_TOKENS] = np.zeros((1, drafts), np.int64)
        if lossless:
            support = (1, drafts, kind.accept.candidates)
            arrays[tensors.DRAFT_IDS] = np.broadcast_to(np.arange(support[-1]), support).copy()
            arrays[tensors.DRAFT_PROBS] = np.broadcast_to(np.eye(1, support[-1], dtype=np.float32), support).copy()
    elif kind.drafting.fill is not None:
        arrays[tensors.TREE_DEPTHS] = kind.drafting.tree.depths[None, 1:]
        arrays[tensors.TREE_RANKS] = np.array([kind.drafting.tree.ranks[1:]], np.int64)
    return arrays


def _outputs(kind: Kind) -> dict[str, Array]:
    return {
        tensors.NUM_ACCEPTED: np.zeros(1, np.int64),
        tensors.TOKENS: np.zeros((1, kind.nodes), np.int64),
        tensors.PATH: np.zeros((1, kind.nodes), np.int64),
    }


def _filled(kind: Kind) -> dict[str, Array]:
    """What the fill graph makes, which stays on the device."""
    if kind.drafting is None or kind.drafting.fill is None:
        return {}
    drafts, support = kind.nodes - 1, kind.drafting.fill.candidates
    return {
        tensors.TREE_TOKENS: np.zeros((1, drafts), np.int64),
        tensors.TREE_IDS: np.zeros((1, drafts, support), np.int64),
        tensors.TREE_PROBS: np.zeros((1, drafts, support), np.float32),
    }
