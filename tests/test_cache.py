"""Bundles built on first use: once, whole, for what was asked of what checkpoints, by the same exporter."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from specexport import LLM, SamplingParams
from specexport.building import cache_folder, cached_bundle
from specexport.contract.errors import BuildError
from specexport.contract.folders import written_beside
from specexport.contract.manifest import MANIFEST_NAME
from specexport.contract.methods import read_methods
from specexport.contract.reading import check_files, read_manifest
from specexport.exporter import records as module
from specexport.exporter.records import PACKAGES, RECORDS, Records, fingerprint
from tests.checkpoints import VOCAB, make_checkpoint
from tests.fixtures import Bundles
from tests.make_bundles import DICE
from tests.test_folders import file_sizes_at_most
from tests.threads import python

pytestmark = pytest.mark.exporter

SMALL = {**DICE, "vocab_size": VOCAB}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bundle: Bundles) -> Path:
    monkeypatch.setattr(Builds, "made", bundle("dice-ngram"), raising=False)
    monkeypatch.setenv("SPECEXPORT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """What counts of a checkpoint: its files."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "README.md").write_text("not read by a build")
    return folder


class Builds:
    """Stands in for the exporter: writes the same bundle again and again; counts."""

    result: Path

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []

    def __call__(self, options: dict[str, Any], output: Path, **_: Any) -> None:
        self.options.append(options)
        shutil.copytree(self.made, output)


def test_the_same_is_built_once_and_a_moved_checkpoint_is_the_same(model):
    builds = Builds()
    methods = read_methods("ngram")
    first = cached_bundle({"target": str(model), "methods": methods}, builds)
    assert cached_bundle({"methods": methods, "target": str(model)}, builds) == first
    moved = shutil.copytree(model, model.parent / "other" / "model")
    (moved / "README.md").write_text("another")
    assert cached_bundle({"target": str(moved), "methods": methods}, builds) == first
    assert builds.options == [{"target": str(model), "methods": methods}]


def test_changed_content_or_options_are_rebuilt(model):
    builds = Builds()
    bundles = {
        cached_bundle({"target": str(model)}, builds),
        cached_bundle({"target": str(model), "methods": read_methods("ngram")}, builds),
        cached_bundle({"target": str(model), "methods": read_methods("ngram:prompt_lookup_max=3")}, builds),
    }
    (model / "model.safetensors").write_bytes(b"WEIGHTS")
    bundles.add(cached_bundle({"target": str(model)}, builds))
    (model / "config.json").write_text('{"changed": true}')
    bundles.add(cached_bundle({"target": str(model)}, builds))
    for method, key in (
        ("draft_model", "model"),
        ("universal_draft", "model"),
        ("medusa", "model"),
        ("medusa_draft", "model"),
        ("medusa_draft", "medusa"),
        ("mlp_speculator", "model"),
        ("eagle3", "model"),
        ("dflash", "model"),
    ):
        other = shutil.copytree(model, model.parent / f"{method}-{key}")
        mapping = {"method": method, key: str(other)}
        if method == "medusa_draft":
            mapping = {"method": method, "model": str(model), "medusa": str(model), key: str(other)}
        options = {"target": str(model), "methods": read_methods(mapping)}
        before = cached_bundle(options, builds)
        (other / "model.safetensors").write_bytes(b"other weights of " + mapping["method"].encode() + key.encode())
        bundles |= {before, cached_bundle(options, builds)}
    assert len(bundles) == len(builds.options)
    # Heads that are the same as those before are the same: where a checkpoint lies does not count.
    assert len(bundles) == 5 + 2 * 8 - 1


def test_calibration_data_count_by_their_content(model):
    builds = Builds()
    text, moved = model.parent / "text.txt", model.parent / "moved.txt"
    options = {"target": str(model), "precision": "int4"}
    text.write_text("one text")
    first = cached_bundle({**options, "calibration_data": str(text)}, builds)
    text.rename(moved)
    assert cached_bundle({**options, "calibration_data": str(moved)}, builds) == first != cached_bundle(options, builds)
    moved.write_text("another")
    assert cached_bundle({**options, "calibration_data": str(moved)}, builds) != first
    with pytest.raises(BuildError, match=r"text\.txt: No such file or directory; check the path"):
        cached_bundle({**options, "calibration_data": str(text)}, builds)


def test_a_tree_counts_by_what_its_file_holds_not_by_its_name(model, monkeypatch):
    opened: list[Path] = []

    def engine(folder: Path, **_: Any) -> None:
        opened.append(folder)
        raise InterruptedError  # which bundle would be loaded is what counts

    builds = Builds()
    monkeypatch.setattr("specexport.building._build", builds)
    monkeypatch.setattr("specexport.frontend.Engine.load", engine)
    first, other = model.parent / "t.json", model.parent / "other.json"

    def bundle(tree: object) -> Path:
        config = {"method": "medusa", "model": str(model), "trees": tree}
        with pytest.raises(InterruptedError):
            LLM(str(model), speculative_config=config, calibrate=False)
        return opened[-1]

    first.write_text("[[0], [1]]")
    result = bundle([str(first)])
    assert bundle(first) == bundle([first]) == result  # a Path as well
    shutil.copy(first, other)
    assert bundle([str(other)]) == result
    first.write_text("[[0], [0, 0]]")
    assert bundle([str(first)]) != result
    assert [len(options["methods"][0].trees) for options in builds.options] == [1, 1]


def test_a_build_that_fails_leaves_nothing_and_may_be_tried_again(model):
    def fail(*_: Any) -> None:
        raise BuildError("out of disk")

    with pytest.raises(BuildError, match="out of disk"):
        cached_bundle({"target": str(model)}, fail)
    assert (cached_bundle({"target": str(model)}, Builds()) / MANIFEST_NAME).is_file()


def test_of_several_at_once_one_builds(model):
    begun, go, builds = threading.Event(), threading.Event(), Builds()

    def slow(options: dict[str, Any], output: Path) -> None:
        begun.set()
        assert go.wait(60)
        builds(options, output)

    threads = [threading.Thread(target=cached_bundle, args=({"target": str(model)}, slow)) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    go.set()
    for thread in threads:
        thread.join(60)
    assert len(builds.options) == 1


def test_a_killed_build_frees_its_lock(model):
    program = f"""
import os, signal
from specexport.building import cached_bundle
cached_bundle({{"target": {str(model)!r}}}, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    builds = Builds()
    cached_bundle({"target": str(model)}, builds)
    assert len(builds.options) == 1


def _first_byte(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(bytes([raw[0] ^ 1]) + raw[1:])


def _half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


HARMS: dict[str, Callable[[Path], object]] = {
    "an altered byte": lambda folder: _first_byte(folder / "target.bin"),
    "a file cut short": lambda folder: _half(folder / "target.bin"),
    "a missing file": lambda folder: (folder / "tokenizer" / "tokenizer.json").unlink(),
    "a torn manifest": lambda folder: _half(folder / MANIFEST_NAME),
    "no manifest": lambda folder: (folder / MANIFEST_NAME).unlink(),
    "a file in its place": lambda folder: (shutil.rmtree(folder), folder.write_text("no folder")),
}


@pytest.mark.parametrize("harm", HARMS)
def test_damaged_bundles_are_named_and_rebuilt(model, harm):
    builds = Builds()
    folder = cached_bundle({"target": str(model)}, builds)
    HARMS[harm](folder)
    with pytest.warns(UserWarning, match=f"{folder.name}.*it is removed and built again"):
        assert cached_bundle({"target": str(model)}, builds) == folder
    assert cached_bundle({"target": str(model)}, builds) == folder
    assert len(builds.options) == 2
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    check_files(folder, read_manifest(folder), hashes=True)


def test_a_cache_that_cannot_be_written_is_named(model, cache):
    cache.write_text("no folder")
    with pytest.raises(BuildError, match=f"{cache}.*; SPECEXPORT_CACHE names the cache folder: set it to"):
        cached_bundle({"target": str(model)}, Builds())
    cache.unlink()
    refused = pytest.raises(BuildError, match=f"{cache}.*too large; raise the limit.*; SPECEXPORT_CACHE names")
    with file_sizes_at_most(1000), refused:
        cached_bundle({"target": str(model)}, whole)
    assert list((cache / "bundles").iterdir()) == []


def whole(_: dict[str, Any], output: Path) -> None:
    with written_beside(output, resume=True) as folder:
        (folder / "weights.bin").write_bytes(b"0" * 2000)


def test_leftovers_of_killed_processes_are_removed_after_a_week(model, cache):
    cached_bundle({"target": str(model)}, Builds())
    old, new = cache / "bundles" / ".old-1.unfinished", cache / "bundles" / ".new-1.unfinished"
    for folder in (old, new):
        (folder / "target").mkdir(parents=True)
    part = cache / "hashes" / ".abc.1-1.part"
    part.touch()
    for path in (old, part):
        os.utime(path, (0, 0))
    cached_bundle({"target": str(model), "methods": read_methods("ngram")}, Builds())
    assert not old.exists() and new.exists() and not part.exists()


def test_a_torn_record_of_a_hash_is_not_believed(model, cache):
    folder = cached_bundle({"target": str(model)}, Builds())
    for memo in (cache / "hashes").iterdir():
        _half(memo)
    assert cached_bundle({"target": str(model)}, Builds()) == folder


def test_the_cache_is_where_the_user_wants_it(monkeypatch, tmp_path):
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("SPECEXPORT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "specexport"


def test_llm_builds_speculates_and_finds_it_again(tmp_path, cache, capsys):
    target = make_checkpoint(tmp_path / "target", "llama", **SMALL)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    texts = []
    for _ in range(2):
        with LLM(str(target), speculative_config=config, max_model_len=48, threads=1, calibrate=False) as llm:
            (output,) = llm.generate([5, 6, 5, 6, 5], params, use_tqdm=False)
            assert output.outputs[0].metrics.drafted > 0
            texts.append(output.outputs[0].token_ids)
    with LLM(str(target), speculative_config=config, max_model_len=48, threads=1) as measured:
        assert measured._frontend.engine.costs is not None
        texts.append(measured.generate([5, 6, 5, 6, 5], params, use_tqdm=False)[0].outputs[0].token_ids)
    with LLM(str(target), max_model_len=48, threads=1, calibrate=False) as plain:
        texts.append(plain.generate([5, 6, 5, 6, 5], params, use_tqdm=False)[0].outputs[0].token_ids)
    assert texts[0] == texts[1] == texts[2] == texts[3]
    assert len([folder for folder in (cache / "bundles").iterdir() if folder.is_dir()]) == 2
    assert capsys.readouterr().err.count("building ") == 2


# --- going on ---------------------------------------------------------------------------------------------------------


class Facts(msgspec.Struct):
    """What a stage found out."""

    number: int


def test_stages_that_are_whole_are_not_run_again(tmp_path):
    runs: list[str] = []

    def build(folder: Path, name: str = "target") -> Facts:
        records = Records(folder)

        def make() -> Facts:
            runs.append(name)
            (folder / f"{name}.bin").write_bytes(b"weights")
            return Facts(7)

        outputs = records.run(name, Facts, make)
        assert [entry.path for entry in records.files] == [f"{name}.bin"]
        return outputs

    assert build(tmp_path) == build(tmp_path) == Facts(7)
    assert runs == ["target"]
    harms: list[Callable[[Path], object]] = [
        lambda folder: (folder / "target.bin").write_bytes(b"weight"),
        lambda folder: (folder / "target.bin").write_bytes(b"WEIGHTS"),
        lambda folder: (folder / "target.bin").unlink(),
        lambda folder: (folder / "target.more").touch(),
        lambda folder: (folder / RECORDS / "target.json").write_bytes(b'{"files": [{"path"'),
        lambda folder: (folder / RECORDS / "target.json").unlink(),
    ]
    for count, harm in enumerate(harms, start=2):
        harm(tmp_path)
        assert build(tmp_path) == Facts(7)
        assert len(runs) == count
        assert (tmp_path / "target.bin").read_bytes() == b"weights"
    (tmp_path / "draft.half").touch()
    records = Records(tmp_path)
    records.close()
    assert [path.name for path in tmp_path.iterdir()] == ["target.bin"]


@pytest.mark.parametrize("signalled", [KeyboardInterrupt, SystemExit])
def test_interrupted_builds_resume_after_finished_stages(tmp_path, cache, monkeypatch, signalled):
    from specexport.exporter import target as exporter_target
    from specexport.methods.draft_model import export as draft_export

    target = str(make_checkpoint(tmp_path / "target", "llama", **SMALL))
    draft = str(make_checkpoint(tmp_path / "draft", "llama", **SMALL, seed=1))
    options: dict[str, Any] = {"max_model_len": 48, "threads": 1, "max_batch_size": 1, "calibrate": False}
    loaded: list[str] = []
    real = exporter_target.load_checkpoint

    def load(source: str) -> Any:
        loaded.append(source)
        if source == draft and loaded.count(draft) == 1:
            raise signalled
        return real(source)

    for loader in (exporter_target, draft_export):
        monkeypatch.setattr(loader, "load_checkpoint", load)
    with pytest.raises(signalled):
        LLM(target, speculative_config={"model": draft}, **options)
    (left,) = (cache / "bundles").glob(".*.unfinished")
    assert (left / "target.bin").is_file()
    with LLM(target, speculative_config={"model": draft}, **options) as llm:
        files = [file.path for file in llm._frontend.engine.manifest.files]
        (output,) = llm.generate([5, 6, 5], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
        assert output.outputs[0].metrics.drafted > 0
    assert loaded == [target, draft, draft]
    assert not left.exists()
    (built,) = (folder for folder in (cache / "bundles").iterdir() if folder.is_dir())
    present = sorted(path.relative_to(built).as_posix() for path in built.rglob("*") if path.is_file())
    assert present == sorted([*files, MANIFEST_NAME])


# --- the fingerprint of the exporter ----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    fingerprint.cache_clear()
    yield
    fingerprint.cache_clear()


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The exporter's packages in a folder of their own."""
    for package in PACKAGES:
        (folder,) = module._folders(package)
        shutil.copytree(folder, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(module, "_folders", lambda package: [tmp_path / package])
    return tmp_path


def test_the_same_code_has_the_same_fingerprint_wherever_it_lies(copied, monkeypatch):
    first = fingerprint()
    fingerprint.cache_clear()
    monkeypatch.undo()
    assert fingerprint() == first and len(first) == 64


@pytest.mark.parametrize(
    "file", ["contract/tensors.py", "graphs/step.py", "methods/medusa/export.py", "exporter/texts/calibration.txt"]
)
def test_a_changed_file_changes_it(copied, file):
    before = fingerprint()
    (copied / file).write_text((copied / file).read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert fingerprint() == before  # it is asked for once a process
    fingerprint.cache_clear()
    assert fingerprint() != before


def test_a_renamed_file_changes_it(copied):
    before = fingerprint()
    (copied / "graphs/step.py").rename(copied / "graphs/steps.py")
    fingerprint.cache_clear()
    assert fingerprint() != before


def test_another_version_of_a_library_changes_it(monkeypatch):
    before = fingerprint()
    installed = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0" if name == "torch" else installed(name))
    fingerprint.cache_clear()
    assert fingerprint() != before


def test_it_imports_no_heavy_packages():
    code = (
        "import sys; from specexport.exporter.records import fingerprint; fingerprint(); "
        "print([name for name in ('torch', 'transformers', 'onnx') if name in sys.modules])"
    )
    assert python(code) == "[]\n"
