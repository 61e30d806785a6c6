"""Bundles that were built without a method look draft tokens up in the text where that pays."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from specexport.cli import main
from specexport.contract.errors import RequestError
from specexport.contract.reading import read_manifest, write_manifest
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.speculative import PLAIN
from tests.manifests import curve
from tests.serving import served

PROMPT = [5, 6, 7, 8, 9] * 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)


@pytest.fixture(scope="module", params=[(), ("hypothesis",)], ids=["none", "hypothesis"])
def folder(
    request: pytest.FixtureRequest, bundle: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A bundle that is built for nothing, or for hypotheses alone, which no request has by itself."""
    folder = shutil.copytree(bundle("qwen3-lookup"), tmp_path_factory.mktemp("default") / "bundle")
    manifest = read_manifest(folder)
    methods = tuple(method for method in manifest.methods if method.name in request.param)
    write_manifest(folder, msgspec.structs.replace(manifest, methods=methods))
    return folder


@pytest.fixture(scope="module")
def free(folder: Path) -> Iterator[Engine]:
    """Where a step of many tokens takes as long as one of few."""
    with Engine.load(folder, threads=1, costs=curve(read_manifest(folder), lambda *_: 1.0)) as engine:
        yield engine


def test_repeated_text_is_looked_up(free: Engine) -> None:
    plain = free.generate(PROMPT, GREEDY, PLAIN)
    assert plain.stats.drafted == 0
    for arguments in (None, "auto", {"method": "auto"}):
        done = free.generate(PROMPT, GREEDY, arguments)
        assert done.token_ids == plain.token_ids
        assert done.stats.accepted > 0
        assert done.stats.steps < plain.stats.steps
        assert set(done.stats.steps_by_draft) <= {"plain", "ngram"}
    few = free.generate(PROMPT, GREEDY, {"num_speculative_tokens": 2})
    assert few.token_ids == plain.token_ids
    assert few.stats.accepted > 0


def test_it_is_left_where_it_does_not_pay(folder: Path) -> None:
    dear = curve(read_manifest(folder), lambda _, tokens: float(tokens) ** 2)
    with Engine.load(folder, threads=1, costs=dear) as engine:
        done = engine.generate(PROMPT, GREEDY)
        assert done.token_ids == engine.generate(PROMPT, GREEDY, PLAIN).token_ids
        # What is tried now and then is little.
        assert done.stats.steps > 0.8 * len(done.token_ids)


def test_nothing_is_looked_up_where_nothing_was_measured(folder: Path) -> None:
    with Engine.load(folder, threads=1, calibrate=False) as engine:
        assert engine.costs is None
        assert engine.generate(PROMPT, GREEDY).stats.drafted == 0
        with pytest.raises(RequestError, match="num_speculative_tokens is 2, but the bundle was built without a way"):
            engine.stream(PROMPT, GREEDY, {"num_speculative_tokens": 2})


def test_it_is_measured_when_it_is_first_opened(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECEXPORT_CACHE", str(tmp_path))
    monkeypatch.setitem(Engine.load.__func__.__kwdefaults__, "calibrate", True)
    with Engine.load(folder, threads=1) as engine:
        assert engine.costs is not None
        assert engine.costs.curve.steps
        assert engine.costs.curve.methods == ()  # look-ups take next to nothing
    assert main(["bench", str(folder), "--prompts", "1", "--prompt-tokens", "32", "-n", "8", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["method"] for row in rows} == {"default", "hypothesis", "ngram", "suffix"}
    assert all(row["lossless"] for row in rows)


def test_inspect_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert ("looked up in the text, where that pays" in shown) == (not read_manifest(folder).methods)


def test_the_server_lists_every_method(folder: Path, bundle: Callable[[str], Path]) -> None:
    with served(folder) as server:
        model, *_ = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert {method["name"]: method["num_speculative_tokens"] for method in model["methods"]} == {
            name: sorted(len(tree) - 1 for tree in server.service.engine.frontend.engine.methods[name].token_trees())
            for name in ("ngram", "suffix")
        }
        for method in model["methods"]:
            body = {"prompt": PROMPT, "max_tokens": 4, "speculative": {"method": method["name"]}}
            assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
    with served(bundle("qwen3-lookup")) as server:
        model, *_ = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert [method["name"] for method in model["methods"]] == ["draft_model", "ngram", "suffix"]
