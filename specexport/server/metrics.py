"""What ``/metrics`` tells Prometheus. Names are vLLM's, with our prefix."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from specexport.async_engine import AsyncEngine, AsyncStream
from specexport.runtime import Chunk

_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
)


class Metrics:
    """Counters of a server.

    Args:
        engine: what is served.
        model: its name, a label of everything.

    Attributes:
        registry: holds them, for this server alone.
    """

    def __init__(self, engine: AsyncEngine, model: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        label, registry = ("model_name",), self.registry

        def histogram(name: str, what: str) -> Histogram:
            made = Histogram(f"specexport:{name}", what, label, buckets=_SECONDS, registry=registry)
            return made.labels(model)

        def counter(name: str, what: str) -> Counter:
            return Counter(f"specexport:{name}", what, label, registry=registry).labels(model)

        def gauge(name: str, what: str) -> Gauge:
            return Gauge(f"specexport:{name}", what, label, registry=registry).labels(model)

        self._first_token = histogram("time_to_first_token_seconds", "From a request's arrival to its first token.")
        self._between = histogram(
            "inter_token_latency_seconds", "Between tokens; those of one step share the time since the step before."
        )
        self._whole = histogram("e2e_request_latency_seconds", "From a request's arrival to its end.")
        self._queued = histogram("request_queue_time_seconds", "From a request's arrival to its slot.")
        gauge("num_requests_running", "Requests that hold a slot.").set_function(lambda: engine.running)
        gauge("num_requests_waiting", "Requests that wait for one.").set_function(lambda: engine.waiting)
        gauge("num_slots", "Requests that can run at once.").set(engine.slots)
        self._prompt = counter("prompt_tokens", "Tokens of prompts.")
        self._output = counter("generation_tokens", "Tokens generated.")
        self._drafts = counter("spec_decode_num_drafts", "Steps that verified draft tokens.")
        self._drafted = counter("spec_decode_num_draft_tokens", "Draft tokens verified.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self._accepted_at = Counter(
            "specexport:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted at each position.",
            (*label, "position"),
            registry=registry,
        )
        self._ended = Counter(
            "specexport:request_success", "Requests by how they ended.", (*label, "finished_reason"), registry=registry
        )
        self._refused = Counter(
            "specexport:requests_refused", "Requests refused, by status.", (*label, "status"), registry=registry
        )
        self._model = model
        for reason in ("stop", "length", "abort"):
            self._ended.labels(model, reason)
        self._refused.labels(model, "429")

    def refused(self, status: int) -> None:
        """Counts a request that was answered with an error."""
        self._refused.labels(self._model, str(status)).inc()

    async def watched(self, stream: AsyncStream) -> AsyncGenerator[Chunk, None]:
        """Passes a stream's chunks on, and counts them."""
        last, reason = 0.0, "abort"
        try:
            async for chunk in stream:
                now = time.monotonic()
                if chunk.token_ids and not last:
                    self._first_token.observe(now - stream.arrived)
                elif chunk.token_ids:
                    for _ in chunk.token_ids:
                        self._between.observe((now - last) / len(chunk.token_ids))
                last = now if chunk.token_ids else last
                self._output.inc(len(chunk.token_ids))
                if chunk.finish_reason in ("stop", "length"):
                    reason = chunk.finish_reason
                yield chunk
        finally:
            stream.cancel()
            self._count(stream, reason)

    def _count(self, stream: AsyncStream, reason: str) -> None:
        stats, now = stream.stats, time.monotonic()
        self._ended.labels(self._model, reason).inc()
        self._whole.observe(now - stream.arrived)
        self._queued.observe((stream.started or now) - stream.arrived)
        self._prompt.inc(stats.prompt_tokens)
        self._drafts.inc(stats.steps_with_draft)
        self._drafted.inc(stats.drafted)
        self._accepted.inc(stats.accepted)
        for position, count in enumerate(stats.accepted_at):
            self._accepted_at.labels(self._model, str(position)).inc(count)
