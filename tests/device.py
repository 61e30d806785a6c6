"""What holds on every device backend."""

from __future__ import annotations

from collections.abc import Sequence

from specexport.runtime import Engine, SamplingParams
from specexport.runtime.speculative import PLAIN
from tests.cuda_stand_in import StandIn

TAKING = {"cudaMalloc", "cudaHostAlloc", "cudaFree", "cudaFreeHost"}


def require_same_as_alone(on_gpu: Engine, alone: Engine, prompts: Sequence[list[int]], cuda: StandIn) -> None:
    """Requests that join and leave say what each says alone, plain ones among them, and take no memory."""
    greedy = SamplingParams(temperature=0.0, ignore_eos=True)
    assert on_gpu.slots == 4
    cuda.calls.clear()
    params = [greedy.replace(max_tokens=8 + 4 * at) for at in range(len(prompts))]
    streams = [on_gpu.stream(prompt, params[at], PLAIN if at == 2 else None) for at, prompt in enumerate(prompts)]
    for stream in streams:
        stream.start()
    for at, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
        tokens = [token for chunk in stream for token in chunk.token_ids]
        assert tokens == list(alone.generate(prompt, params[at], PLAIN).token_ids), at
    assert not TAKING & set(cuda.calls)
