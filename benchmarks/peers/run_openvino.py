"""Run a job with OpenVINO GenAI: greedy search, or its speculative decoding with a draft model."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.job import Deliveries, Job, measure

KV_CACHE_GIB = 1


class Streamer(openvino_genai.StreamerBase):
    """Passes on what `generate` hands over."""

    def __init__(self, deliveries: Deliveries) -> None:
        super().__init__()
        self.deliveries = deliveries

    def write(self, token: int | list[int]) -> openvino_genai.StreamingStatus:
        """Take a token, or the tokens of one round."""
        self.deliveries.add(list(token) if isinstance(token, list) else [token])
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """Nothing is held back."""


def properties(job: Job) -> dict[str, Any]:
    """Say how the device is to be used; without the hints, models saved as float32 are computed in less."""
    chosen: dict[str, Any] = {"INFERENCE_NUM_THREADS": job.threads, "PERFORMANCE_HINT": "LATENCY"}
    if job.precision == "fp32":
        chosen.update({"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"})
    return chosen


def load(job: Job, device: dict[str, Any]) -> openvino_genai.LLMPipeline:
    """Load the target, with the draft where the job has draft lengths.

    Prompts are not to be remembered from one generation to the next, as they otherwise would be.
    """
    options: dict[str, Any] = dict(device)
    if job.options.get("attention") == "SDPA":
        options["ATTENTION_BACKEND"] = "SDPA"
    else:
        options["scheduler_config"] = openvino_genai.SchedulerConfig()
        options["scheduler_config"].enable_prefix_caching = False
        options["scheduler_config"].cache_size = KV_CACHE_GIB
    if job.ks:
        options["draft_model"] = openvino_genai.draft_model(job.draft, "CPU", **device)
    return openvino_genai.LLMPipeline(job.target, "CPU", **options)


def main() -> None:
    """Answer the job on standard input."""
    job = Job.read()
    device = properties(job)
    pipeline = load(job, device)

    def generate(prompt: list[int], k: int, deliveries: Deliveries) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = job.new_tokens
        config.ignore_eos = True
        config.do_sample = False
        if k:
            config.num_assistant_tokens = k
        ids = np.array([prompt], dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        pipeline.generate(inputs, config, Streamer(deliveries))

    measure(job, generate, openvino_genai.__version__, {**device, **job.options})


if __name__ == "__main__":
    main()
