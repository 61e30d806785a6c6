"""What holds on every device backend."""

from __future__ import annotations

from collections.abc import Sequence

from specexport.runtime import Engine, SamplingParams
from specexport.runtime.speculative import PLAIN
from tests.cuda_stand_in import StandIn
from tests.streams import started, tokens_of

TAKING = {"cudaMalloc", "cudaHostAlloc", "cudaFree", "cudaFreeHost"}


def require_same_as_alone(on_gpu: Engine, alone: Engine, prompts: Sequence[list[int]], cuda: StandIn) -> None:
    """Requests that join and leave say what each says alone, plain ones among them, and take no memory."""
    greedy = SamplingParams(temperature=0.0, ignore_eos=True)
    assert on_gpu.slots == 4
    cuda.calls.clear()
    params = [greedy.replace(max_tokens=8 + 4 * at) for at in range(len(prompts))]
    ways = [PLAIN if at == 2 else None for at in range(len(prompts))]
    streams = started(map(on_gpu.stream, prompts, params, ways))
    for at, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
        assert tokens_of(stream) == alone.generate(prompt, params[at], PLAIN).token_ids, at
    assert not TAKING & set(cuda.calls)
