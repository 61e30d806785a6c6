"""Answer jobs with ONNX Runtime GenAI: greedy search, or speculation with the draft model or n-grams."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime
import onnxruntime_genai as og

from benchmarks.peers.job import LOOKUP, Decoder, Deliveries, Job, Settings, answer, timed


def load(settings: Settings) -> tuple[Decoder, str]:
    """Load the target alone, and the pair, which the configuration in the folder above the two describes."""
    threads = {"session_options": {"intra_op_num_threads": settings.threads}}

    def load_model(folder: Path, *roles: str) -> og.Model:
        config = og.Config(str(folder))
        config.overlay(json.dumps({"model": dict.fromkeys(roles, threads)}))
        return og.Model(config)

    target = load_model(Path(settings.target), "decoder")
    pair = load_model(Path(settings.target).parent, "decoder", "draft")

    def generate(job: Job, deliveries: Deliveries) -> None:
        model = pair if job.way.method == "draft" else target
        params = og.GeneratorParams(model)
        params.set_search_options(do_sample=False, max_length=len(job.prompt) + job.new_tokens)
        if job.way.k:
            lookup = {"ngram_size": LOOKUP} if job.way.method == "ngram" else {}
            params.set_speculative_options(max_draft_tokens=job.way.k, **lookup)
        generator = og.Generator(model, params)
        generator.append_tokens(np.array(job.prompt, dtype=np.int32))
        while len(deliveries.tokens) < job.new_tokens and not generator.is_done():
            generator.generate_next_token()
            tokens = [int(generator.get_next_tokens()[0])]
            # A whole step is computed at once and then returned token by token.
            for _ in range(generator.get_speculative_stats()["tokens_buffered"] if job.way.k else 0):
                if len(deliveries.tokens) + len(tokens) < job.new_tokens:
                    generator.generate_next_token()
                    tokens.append(int(generator.get_next_tokens()[0]))
            deliveries.add(tokens)

    return timed(generate), f"onnxruntime-genai {og.__version__}, onnxruntime {onnxruntime.__version__}"


if __name__ == "__main__":
    answer(load)
