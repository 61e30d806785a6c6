"""The server against its own OpenAPI document: schemathesis makes requests that fit it, and requests that do not."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS

from tests.fixtures import Bundles
from tests.serving import Served, served, with_chat_template

EXCLUDED = ("positive_data_acceptance",)
"""What fits the document may still name another model, exceed the context or hold tokens that are not there."""


@pytest.fixture(scope="module")
def running(bundle: Bundles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = with_chat_template(bundle("llama-near"), tmp_path_factory.mktemp("fuzzed") / "bundle")
    # Requests for many tokens are cut short, as otherwise they were all that is tried.
    with served(folder, timeout=0.1) as server:
        yield server


@pytest.fixture(scope="module")
def document(running: Served) -> Any:
    return schemathesis.openapi.from_url(f"{running.url}/openapi.json")


# By hand instead of with schemathesis' own pytest plugin, which does not know pytest 9.
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("place", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_every_answer_is_one_the_document_knows(document, place, mode):
    check(document[place]["POST"], mode, 40)


@pytest.mark.parametrize("place", ["/v1/models", "/v1/models/{model}", "/health", "/ready", "/metrics"])
def test_read_only_objects_match_the_documentation(document, place):
    check(document[place]["GET"], GenerationMode.POSITIVE, 5)


def check(operation: Any, mode: GenerationMode, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        answer = case.call(timeout=60)
        # A deadline is the only way for the server to fail that the document allows here. A body of more than 8 MiB is
        # refused unread, which does not count as a rejection there.
        unlike = {504: ("not_a_server_error",), 413: ("negative_data_rejection",)}.get(answer.status_code, ())
        case.validate_response(answer, excluded_checks=CHECKS.get_by_names((*EXCLUDED, *unlike)))

    run()


def test_nothing_is_left_of_it(running):
    running.idle()
    answer = httpx.post(f"{running.url}/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=60)
    assert answer.status_code == 200
    assert "500" not in {
        sample.labels["status"]
        for metric in running.service.metrics.registry.collect()
        for sample in metric.samples
        if "status" in sample.labels
    }
