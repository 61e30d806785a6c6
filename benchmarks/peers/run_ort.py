"""Run a job with ONNX Runtime GenAI: greedy search, or its speculative decoding with a draft model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime
import onnxruntime_genai as og

from benchmarks.peers.job import Deliveries, Job, measure


def load(job: Job) -> og.Model:
    """Load the target alone, or the pair, which the configuration in the folder above the two describes."""
    config = og.Config(str(Path(job.target).parent if job.ks else job.target))
    threads = {"session_options": {"intra_op_num_threads": job.threads}}
    config.overlay(json.dumps({"model": {"decoder": threads, **({"draft": threads} if job.ks else {})}}))
    return og.Model(config)


def main() -> None:
    """Answer the job on standard input."""
    job = Job.read()
    model = load(job)

    def generate(prompt: list[int], k: int, deliveries: Deliveries) -> None:
        params = og.GeneratorParams(model)
        params.set_search_options(do_sample=False, max_length=len(prompt) + job.new_tokens)
        if k:
            params.set_speculative_options(max_draft_tokens=k)
        generator = og.Generator(model, params)
        generator.append_tokens(np.array(prompt, dtype=np.int32))
        while len(deliveries.tokens) < job.new_tokens and not generator.is_done():
            generator.generate_next_token()
            tokens = [int(generator.get_next_tokens()[0])]
            # A whole round is computed at once and then handed out one token at a time.
            for _ in range(generator.get_speculative_stats()["tokens_buffered"] if k else 0):
                if len(deliveries.tokens) + len(tokens) < job.new_tokens:
                    generator.generate_next_token()
                    tokens.append(int(generator.get_next_tokens()[0]))
            deliveries.add(tokens)

    measure(job, generate, og.__version__, {"onnxruntime": onnxruntime.__version__})


if __name__ == "__main__":
    main()
