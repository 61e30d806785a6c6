"""The metrics of ``/metrics``, for Prometheus, with vLLM's names after our prefix."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from specexport.async_engine import AsyncEngine, AsyncStream
from specexport.runtime import Chunk

_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
)
_OF_STATS = {
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts."),
    "cached_tokens": ("prefix_cache_hits", "Tokens of prompts that were in the prefix cache."),
    "steps_with_draft": ("spec_decode_num_drafts", "Steps that verified draft tokens."),
    "drafted": ("spec_decode_num_draft_tokens", "Draft tokens verified."),
    "accepted": ("spec_decode_num_accepted_tokens", "Draft tokens accepted."),
}
"""The counter of each field of a request's statistics."""
_Kind = TypeVar("_Kind", Counter, Gauge, Histogram)


class Metrics:
    """The metrics of a server, labelled with the model's name."""

    def __init__(self, engine: AsyncEngine, model: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

        def metric(kind: type[_Kind], name: str, text: str, *labels: str, **options: Any) -> Callable[..., _Kind]:
            created = kind(f"specexport:{name}", text, ("model_name", *labels), registry=self.registry, **options)
            return partial(created.labels, model)

        def histogram(name: str, text: str) -> Histogram:
            return metric(Histogram, name, text, buckets=_SECONDS)()

        self._first_token = histogram("time_to_first_token_seconds", "From a request's arrival to its first token.")
        self._between = histogram(
            "inter_token_latency_seconds", "Between tokens; those of one step share the time since the step before."
        )
        self._whole = histogram("e2e_request_latency_seconds", "From a request's arrival to its end.")
        self._queued = histogram("request_queue_time_seconds", "From a request's arrival to its slot.")
        metric(Gauge, "num_requests_running", "Requests that hold a slot.")().set_function(lambda: engine.running)
        metric(Gauge, "num_requests_waiting", "Requests that wait for one.")().set_function(lambda: engine.waiting)
        metric(Gauge, "num_slots", "Requests that can run at once.")().set(engine.slots)
        self._output = metric(Counter, "generation_tokens", "Tokens generated.")()
        self._of_stats = {field: metric(Counter, *spec)() for field, spec in _OF_STATS.items()}
        self._accepted_at = metric(
            Counter,
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted at each position.",
            "position",
        )
        self._ended = metric(Counter, "request_success", "Requests by how they ended.", "finished_reason")
        self._refused = metric(Counter, "requests_refused", "Requests refused, by status.", "status")
        for reason in ("stop", "length", "abort"):
            self._ended(reason)
        self._refused("429")

    def count_refusal(self, status: int) -> None:
        """Counts a request that was answered with an error."""
        self._refused(str(status)).inc()

    async def watch(self, stream: AsyncStream) -> AsyncGenerator[Chunk, None]:
        """Yields the chunks of a stream and counts them."""
        last, reason = 0.0, "abort"
        try:
            async for chunk in stream:
                now, count = time.monotonic(), len(chunk.token_ids)
                if count and not last:
                    self._first_token.observe(now - stream.arrived)
                elif count:
                    for _ in range(count):
                        self._between.observe((now - last) / count)
                last = now if count else last
                self._output.inc(count)
                if chunk.finish_reason in ("stop", "length"):
                    reason = chunk.finish_reason
                yield chunk
        finally:
            stream.cancel()
            now = time.monotonic()
            self._ended(reason).inc()
            self._whole.observe(now - stream.arrived)
            self._queued.observe((stream.started or now) - stream.arrived)
            for field, counter in self._of_stats.items():
                counter.inc(getattr(stream.stats, field))
            for position, accepted in enumerate(stream.stats.accepted_at):
                self._accepted_at(str(position)).inc(accepted)
