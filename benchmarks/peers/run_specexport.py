"""Answer jobs with specexport: plain decoding, or speculation with the draft model or n-grams."""

from __future__ import annotations

import onnxruntime

from benchmarks.peers.job import Decoder, Deliveries, Job, Settings, answer, timed
from specexport import __version__
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.speculative import PLAIN

METHODS = {"draft": "draft_model", "ngram": "ngram"}


def load(settings: Settings) -> tuple[Decoder, str]:
    """Open the bundle, which holds both models."""
    # Every prompt is read each time: what a prefix cache saves is not what is compared.
    engine = Engine.load(
        settings.target, threads=settings.threads, check_hashes=False, calibrate=False, prefix_cache=False
    )

    def generate(job: Job, deliveries: Deliveries) -> None:
        params = SamplingParams(max_tokens=job.new_tokens, temperature=0.0, ignore_eos=True)
        chosen = {"method": METHODS[job.way.method], "num_speculative_tokens": job.way.k} if job.way.k else PLAIN
        for chunk in engine.stream(job.prompt, params, chosen):
            deliveries.add(list(chunk.token_ids))

    return timed(generate), f"specexport {__version__}, onnxruntime {onnxruntime.__version__}"


if __name__ == "__main__":
    answer(load)
