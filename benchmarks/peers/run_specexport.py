"""Run a job with specexport: plain decoding, or its speculative decoding with a draft model."""

from __future__ import annotations

import onnxruntime

from benchmarks.peers.job import Deliveries, Job, measure
from specexport import __version__
from specexport.runtime import Engine, SamplingParams


def main() -> None:
    """Answer the job on standard input; the target and the draft are in one bundle."""
    job = Job.read()
    params = SamplingParams(max_tokens=job.new_tokens, temperature=0.0, ignore_eos=True)
    with Engine.load(job.target, threads=job.threads, check_hashes=False, calibrate=False) as engine:

        def generate(prompt: list[int], k: int, deliveries: Deliveries) -> None:
            for chunk in engine.stream(prompt, params, {"num_speculative_tokens": k}):
                deliveries.add(list(chunk.token_ids))

        measure(job, generate, __version__, {"onnxruntime": onnxruntime.__version__})


if __name__ == "__main__":
    main()
