"""How long things take on a GPU: copies, steps, the gaps between launches, and what transformers takes."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specexport.contract import tensors
from specexport.contract.engines import ComputedIn
from specexport.runtime import Engine
from specexport.runtime.cuda.api import Cuda
from specexport.runtime.cuda.backend import CudaBackend
from specexport.runtime.cuda.executor import Enqueue
from specexport.runtime.cuda.memory import Device, MemoryBudget, MemoryPlan
from specexport.runtime.graph import Graph

COPIED = 1 << 30


def on_device(engine: Engine) -> CudaBackend:
    """The backend of an engine that runs on a GPU."""
    assert isinstance(engine.backend, CudaBackend)
    return engine.backend


def create_event(cuda: Cuda) -> int:
    """An event that can be timed."""
    return int(cuda.call("cudaEventCreateWithFlags", 0))


def copy_bandwidth(cuda: Cuda, rounds: int = 10) -> float:
    """Bytes a second that a copy within the device's memory reads and writes."""
    device, needs = Device.share(cuda, 1.0), MemoryPlan()
    nbytes = min(COPIED, MemoryBudget(cuda, 0.5).left // 4)
    needs.add("from", nbytes)
    needs.add("to", nbytes)
    memory, stream = needs.allocate(device, "the bandwidth test"), device.stream
    start, end = create_event(cuda), create_event(cuda)
    times = []
    for _ in range(rounds):
        cuda.call("cudaEventRecord", start, stream.handle)
        device.copy(memory["to"].address, memory["from"].address, nbytes)
        cuda.call("cudaEventRecord", end, stream.handle)
        cuda.call("cudaEventSynchronize", end)
        times.append(float(cuda.call("cudaEventElapsedTime", start, end)))
    for event in (start, end):
        cuda.call("cudaEventDestroy", event)
    memory.close()
    stream.close()
    return 2e3 * nbytes / min(times)


@dataclass(frozen=True)
class Gaps:
    """Microseconds from the end of each launch's work to the beginning of the next.

    Attributes:
        after_wait: where the host waited in between, read results and gave the next work.
        queued: where it gave both without waiting, as the graphs of one step that is no single CUDA graph.
    """

    after_wait: list[float]
    queued: list[float]

    def per_step(self, steps: int) -> float:
        """How long the GPU stood still a step: the median of each kind, as often as there are such in a step."""
        return sum(statistics.median(kind) * len(kind) for kind in (self.after_wait, self.queued) if kind) / steps


class Watch:
    """Events around everything that is launched; for measuring what lies between.

    Args:
        backend: an open one.
        most: launches that can be watched.
    """

    def __init__(self, backend: CudaBackend, most: int = 4096) -> None:
        self._cuda, self._stream = backend.cuda, backend.stream
        self._events = [(create_event(self._cuda), create_event(self._cuda)) for _ in range(most)]
        self._waits: list[int] = []
        backend.watch(self._around)

    def _around(self, launch: Enqueue) -> None:
        start, end = self._events[len(self._waits) % len(self._events)]
        self._waits.append(self._stream.waits)
        self._cuda.call("cudaEventRecord", start, self._stream.handle)
        launch()
        self._cuda.call("cudaEventRecord", end, self._stream.handle)

    def gaps(self) -> Gaps:
        """The gaps between the launches so far; then forgets them."""
        self._stream.synchronize()
        gaps = Gaps([], [])
        for ((_, end), (start, _)), (before, after) in zip(
            itertools.pairwise(self._events), itertools.pairwise(self._waits), strict=False
        ):
            kind = gaps.queued if before == after else gaps.after_wait
            kind.append(1e3 * float(self._cuda.call("cudaEventElapsedTime", end, start)))
        for pair in self._events:
            for event in pair:
                self._cuda.call("cudaEventDestroy", event)
        return gaps


def step_milliseconds(graph: Graph, past: int, rounds: int = 50) -> float:
    """The median time of a plain step, padded where there is no narrower one, its inputs' and results' way included."""
    width = graph.widths(1)[0]
    graph.reserve(past + width)
    given = graph.inputs(width, width)
    given[tensors.TREE_MASK][0] = np.tri(width, dtype=np.bool_)
    given[tensors.INPUT_IDS][:] = 50
    given[tensors.POSITION_IDS][:] = past
    given[tensors.PAST_LENGTH][:] = past
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        graph.run(width, width)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def transformers_speed(
    target: Path, draft: Path, prompts: list[list[int]], compute: ComputedIn, drafts: int
) -> float | None:
    """Tokens a second of ``generate(assistant_model=...)`` on the same GPU after a first text; None if torch sees none.

    Args:
        target: the checkpoint.
        draft: the assistant's.
        prompts: to go on with, 96 tokens each.
        compute: what both compute in.
        drafts: K.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    from transformers import AutoModelForCausalLM, GenerationConfig

    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[compute]
    models: list[Any] = []
    for folder in (target, draft):
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).cuda().eval()
        model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
        models.append(model)
    models[1].generation_config.num_assistant_tokens = drafts
    models[1].generation_config.num_assistant_tokens_schedule = "constant"
    models[1].generation_config.assistant_confidence_threshold = 0.0
    tokens, seconds = 0, 0.0
    with torch.inference_mode():
        for index, prompt in enumerate([prompts[0], *prompts]):
            ids = torch.tensor([prompt], device="cuda")
            torch.cuda.synchronize()
            start = time.perf_counter()
            made = models[0].generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=96, assistant_model=models[1]
            )
            torch.cuda.synchronize()
            if index:
                seconds += time.perf_counter() - start
                tokens += made.shape[1] - len(prompt)
    return tokens / seconds
