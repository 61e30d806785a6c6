"""Answer jobs with specexport: plain decoding, speculation with the draft model or n-grams, or what it chooses."""

from __future__ import annotations

import onnxruntime

from benchmarks.peers.job import Decoder, Deliveries, Job, Settings, Way, answer, timed
from specexport import __version__
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.speculative import PLAIN, Speculative

METHODS = {"draft": "draft_model", "ngram": "ngram"}


def how(way: Way) -> dict[str, str | int] | Speculative | None:
    """The request's options for each way."""
    if way.method == "default":
        return None
    return {"method": METHODS[way.method], "num_speculative_tokens": way.k} if way.k else PLAIN


def load(settings: Settings) -> tuple[Decoder, str]:
    """Open the bundle, which holds both models."""
    # Every prompt is read each time, as the prefix cache's savings are not compared.
    chooses = any(way.method == "default" for way in settings.ways)
    engine = Engine.load(
        settings.target, threads=settings.threads, check_hashes=False, calibrate=chooses, prefix_cache=False
    )

    def generate(job: Job, deliveries: Deliveries) -> None:
        params = SamplingParams(max_tokens=job.new_tokens, temperature=0.0, ignore_eos=True)
        for chunk in engine.stream(job.prompt, params, how(job.way)):
            deliveries.add(list(chunk.token_ids))

    return timed(generate), f"specexport {__version__}, onnxruntime {onnxruntime.__version__}"


if __name__ == "__main__":
    answer(load)
