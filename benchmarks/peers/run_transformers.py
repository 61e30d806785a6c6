"""Run a job with transformers: greedy search, or assisted generation with drafts of constant length."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from benchmarks.peers.job import Deliveries, Job, measure


class Streamer(BaseStreamer):
    """Passes on what `generate` hands over, except for the prompt that it begins with."""

    def __init__(self, deliveries: Deliveries) -> None:
        self.deliveries = deliveries
        self.prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self.prompt_seen:
            self.deliveries.add(value.flatten().tolist())
        self.prompt_seen = True

    def end(self) -> None:
        """Nothing is held back."""


def load(folder: str) -> Any:
    """Load a checkpoint with a generation config that never stops early."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    return model


def main() -> None:
    """Answer the job on standard input."""
    job = Job.read()
    torch.set_num_threads(job.threads)
    target = load(job.target)
    draft = load(job.draft) if job.ks else None

    def generate(prompt: list[int], k: int, deliveries: Deliveries) -> None:
        ids = torch.tensor([prompt])
        if draft is not None:
            draft.generation_config.num_assistant_tokens = k
            draft.generation_config.num_assistant_tokens_schedule = "constant"
            draft.generation_config.assistant_confidence_threshold = 0.0
        target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=job.new_tokens,
            assistant_model=draft,
            streamer=Streamer(deliveries),
        )

    with torch.inference_mode():
        measure(job, generate, transformers.__version__, {"torch": torch.__version__})


if __name__ == "__main__":
    main()
