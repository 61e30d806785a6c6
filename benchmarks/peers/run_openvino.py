"""Answer jobs with OpenVINO GenAI: greedy search with either attention, speculation with the draft model or n-grams."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.job import LOOKUP, Decoder, Deliveries, Job, Settings, answer, timed

KV_CACHE_GIB = 1


class Streamer(openvino_genai.StreamerBase):
    """Records the tokens of `generate`."""

    def __init__(self, deliveries: Deliveries) -> None:
        super().__init__()
        self.deliveries = deliveries

    def write(self, token: int | list[int]) -> openvino_genai.StreamingStatus:
        """Take a token, or the tokens of one round."""
        self.deliveries.add(list(token) if isinstance(token, list) else [token])
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """Nothing is buffered."""


def properties(settings: Settings) -> dict[str, Any]:
    """Device settings; without the hints, float32 models are computed in lower precision."""
    chosen: dict[str, Any] = {"INFERENCE_NUM_THREADS": settings.threads, "PERFORMANCE_HINT": "LATENCY"}
    if settings.precision == "fp32":
        chosen.update({"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"})
    return chosen


def load(settings: Settings) -> tuple[Decoder, str]:
    """Load a pipeline for each method, as its speculation is fixed at creation.

    The prefix cache between generations is off.
    """
    device = properties(settings)

    def pipeline(method: str) -> openvino_genai.LLMPipeline:
        options: dict[str, Any] = dict(device)
        if method == "sdpa":
            options["ATTENTION_BACKEND"] = "SDPA"
        else:
            options["scheduler_config"] = openvino_genai.SchedulerConfig()
            options["scheduler_config"].enable_prefix_caching = False
            options["scheduler_config"].cache_size = KV_CACHE_GIB
        if method == "draft":
            options["draft_model"] = openvino_genai.draft_model(settings.draft, "CPU", **device)
        elif method == "ngram":
            options["prompt_lookup"] = True
        return openvino_genai.LLMPipeline(settings.target, "CPU", **options)

    pipelines = {method: pipeline(method) for method in {way.method for way in settings.ways}}

    def generate(job: Job, deliveries: Deliveries) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = job.new_tokens
        config.ignore_eos = True
        config.do_sample = False
        if job.way.k:
            config.num_assistant_tokens = job.way.k
        if job.way.method == "ngram":
            config.max_ngram_size = LOOKUP
        ids = np.array([job.prompt], dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        pipelines[job.way.method].generate(inputs, config, Streamer(deliveries))

    return timed(generate), f"openvino-genai {openvino_genai.__version__}"


if __name__ == "__main__":
    answer(load)
