"""Answer jobs with transformers: greedy search, assisted generation with drafts of constant length, prompt lookup."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from benchmarks.peers.job import LOOKUP, Decoder, Deliveries, Job, Settings, answer, timed


class Streamer(BaseStreamer):
    """Records the tokens of `generate`, except the prompt."""

    def __init__(self, deliveries: Deliveries) -> None:
        self.deliveries = deliveries
        self.prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self.prompt_seen:
            self.deliveries.add(value.flatten().tolist())
        self.prompt_seen = True

    def end(self) -> None:
        """Nothing is buffered."""


def load_model(folder: str) -> Any:
    """Load a checkpoint with a generation config that never stops early."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    return model


def load(settings: Settings) -> tuple[Decoder, str]:
    """Load both models."""
    torch.set_num_threads(settings.threads)
    target, draft = load_model(settings.target), load_model(settings.draft)

    @torch.inference_mode()
    def generate(job: Job, deliveries: Deliveries) -> None:
        ids = torch.tensor([job.prompt])
        options: dict[str, Any] = {}
        if job.way.method == "draft":
            draft.generation_config.num_assistant_tokens = job.way.k
            draft.generation_config.num_assistant_tokens_schedule = "constant"
            draft.generation_config.assistant_confidence_threshold = 0.0
            options["assistant_model"] = draft
        elif job.way.method == "ngram":
            options.update(prompt_lookup_num_tokens=job.way.k, max_matching_ngram_size=LOOKUP)
        target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=job.new_tokens,
            streamer=Streamer(deliveries),
            **options,
        )

    return timed(generate), f"transformers {transformers.__version__}, torch {torch.__version__}"


if __name__ == "__main__":
    answer(load)
