"""A bundle that is not whole, not itself or not honest is refused by name; a build leaves a whole one or nothing."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from specexport.contract import reading
from specexport.contract.errors import BuildError
from specexport.contract.manifest import FORMAT_VERSION, MANIFEST_NAME
from specexport.contract.reading import changing, check_files, read_manifest, write_manifest
from specexport.runtime import BundleError, Engine, SamplingParams
from specexport.runtime.bundle import Bundle
from tests.fixtures import Bundles
from tests.manifests import Document, at, cached_as_the_hub_does, put, relist, rewritten

CURRENT = b'{"format_version": %d' % FORMAT_VERSION


@pytest.fixture
def copy(bundle: Bundles, tmp_path: Path) -> Path:
    """A bundle to do harm to."""
    return shutil.copytree(bundle("dice-near"), tmp_path / "bundle")


def refused(folder: Path, *words: str, check_hashes: bool = True) -> None:
    """Checks that the bundle is refused, by its loader and by the engine, with a message that holds these words."""
    for opening in (Bundle.open, Engine.load):
        with pytest.raises(BundleError) as caught:
            opening(folder, check_hashes=check_hashes)
        for word in words:
            assert word in str(caught.value)


def files_of(folder: Path) -> list[str]:
    """The files of an intact bundle, by name."""
    return [file.path for file in read_manifest(folder).files]


# --- whole ------------------------------------------------------------------------------------------------------------


def test_a_bundle_lists_every_file_it_has(bundle):
    folder = bundle("dice-near")
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {*files_of(folder), MANIFEST_NAME}
    seen: list[int] = []
    check_files(folder, read_manifest(folder), hashes=True, progress=seen.append)
    assert sum(seen) == sum((folder / name).stat().st_size for name in files_of(folder))


def test_a_bundle_may_be_moved(copy, bundle):
    params = SamplingParams(seed=1, max_tokens=20, ignore_eos=True)
    moved = copy.rename(copy.parent / "elsewhere")
    with Engine.load(moved, threads=1) as loaded, Engine.load(bundle("dice-near"), threads=1) as other:
        assert loaded.generate([5, 8], params).token_ids == other.generate([5, 8], params).token_ids


def test_a_manifest_survives_being_written_again(copy):
    manifest = read_manifest(copy)
    write_manifest(copy, manifest)
    assert read_manifest(copy) == manifest


def test_no_folder_no_bundle(tmp_path):
    refused(tmp_path / "nowhere", "nowhere: no such folder")
    refused(tmp_path, f"no {MANIFEST_NAME}")
    (tmp_path / MANIFEST_NAME).mkdir()
    refused(tmp_path, f"no {MANIFEST_NAME}")


# --- files ------------------------------------------------------------------------------------------------------------


def test_every_missing_file_is_named(copy):
    for name in files_of(copy):
        away = (copy / name).rename(copy.parent / "away")
        refused(copy, name, "missing")
        away.rename(copy / name)
    Bundle.open(copy)


def test_a_file_cut_short_is_named_with_its_sizes(bundle, tmp_path):
    copy = shutil.copytree(bundle("llama-near"), tmp_path / "bundle")
    for name in ("target.bin", "draft.onnx", "tokenizer/tokenizer.json"):
        whole = (copy / name).read_bytes()
        (copy / name).write_bytes(whole[:-1])
        refused(copy, name, f"{len(whole) - 1} bytes, expected {len(whole)}", check_hashes=False)
        (copy / name).write_bytes(whole + b"\0")
        refused(copy, name, f"{len(whole) + 1} bytes, expected {len(whole)}", check_hashes=False)
        (copy / name).write_bytes(whole)
    Bundle.open(copy)


def test_one_altered_byte_is_found_in_any_file(bundle, tmp_path):
    copy = shutil.copytree(bundle("llama-near"), tmp_path / "bundle")
    for name in files_of(copy):
        path = copy / name
        whole = path.read_bytes()
        middle = len(whole) // 2
        path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
        refused(copy, name, "sha256", hashlib.sha256(whole).hexdigest())
        path.write_bytes(whole)
    Bundle.open(copy)


def test_files_that_were_right_are_hashed_again_only_if_they_were_touched(copy, tmp_path, monkeypatch, spy):
    monkeypatch.setenv("SPECEXPORT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("specexport.runtime.bundle._TIMESTAMP_RESOLUTION", 0.0)
    hashed = spy(reading, "sha256", lambda path: path)
    Bundle.open(copy)
    assert len(hashed) == len(files_of(copy))
    Bundle.open(copy)
    assert len(hashed) == len(files_of(copy))
    weights = copy / "target.bin"
    before, whole = weights.stat(), bytearray(weights.read_bytes())
    whole[len(whole) // 2] ^= 1
    weights.write_bytes(whole)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))  # of the same size, and as old as before
    refused(copy, "target.bin", "sha256")


def test_checking_hashes_can_be_left_out(copy):
    master = copy / "target.onnx"
    master.write_bytes(master.read_bytes()[::-1])
    Bundle.open(copy, check_hashes=False)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_link_out_of_the_bundle_is_refused(copy, tmp_path, kind):
    outside = tmp_path / "outside"
    inside = copy / ("tokenizer" if kind == "folder" else "target.bin")
    inside.rename(outside)
    inside.symlink_to(outside)
    refused(copy, inside.name, "outside the bundle", str(outside))


@pytest.fixture
def snapshot(copy: Path) -> Path:
    """A bundle as the hub's client caches it: a snapshot of links into the repository's blobs."""
    return cached_as_the_hub_does(copy, copy.parent / "models--owner--name")


@pytest.mark.parametrize("kernels", ["1", "0"])
def test_a_bundle_of_links_drafts_the_same(copy, snapshot, tmp_path, monkeypatch, kernels):
    """Links into the hub's cache and hard links, of a draft whose weights are within a loop."""
    monkeypatch.setenv("SPECEXPORT_KERNELS", kernels)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    deeper = cached_as_the_hub_does(copy, tmp_path / "models--owner--several", "int8")
    (tmp_path / "link").symlink_to(snapshot)
    linked = shutil.copytree(copy, tmp_path / "linked", copy_function=os.link)
    texts = []
    for folder in (linked, snapshot, deeper, tmp_path / "link", shutil.copytree(linked, tmp_path / "again")):
        with Engine.load(folder, threads=1) as engine:
            text = engine.generate([5, 8, 5], params)
            texts.append((text.token_ids, text.stats.drafted, text.stats.accepted))
    assert texts == [texts[-1]] * 5
    assert texts[-1][-1] > 0


def test_targets_of_hub_links_are_hashed(snapshot):
    blob = (snapshot / "target.onnx").resolve()
    blob.write_bytes(blob.read_bytes()[::-1])
    refused(snapshot, "target.onnx", "sha256")


@pytest.mark.parametrize("place", ["../../../elsewhere", "../../refs/elsewhere", "../../blobs/../elsewhere"])
def test_a_link_in_the_hubs_cache_leads_into_its_blobs(snapshot, place):
    path = snapshot / "target.onnx"
    outside = Path(os.path.normpath(snapshot / place))
    outside.parent.mkdir(exist_ok=True)
    shutil.copy(path, outside)
    path.unlink()
    path.symlink_to(outside)
    refused(snapshot, "target.onnx", "outside the bundle", str(outside))


def test_a_bundle_in_the_hubs_cache_is_not_changed(snapshot):
    before = sorted(snapshot.parent.parent.rglob("*"))
    with pytest.raises(BuildError, match=r"a snapshot in the hub's cache.*copy it"), changing(snapshot):
        pass
    assert sorted(snapshot.parent.parent.rglob("*")) == before


def test_links_to_and_within_a_bundle_are_fine(copy, tmp_path):
    weights = copy / "target.bin"
    weights.rename(copy / "shared.bin")
    weights.symlink_to("shared.bin")
    (tmp_path / "link").symlink_to(copy)
    Bundle.open(tmp_path / "link")


def test_invalid_tokenizers_are_named(copy):
    (copy / "tokenizer" / "tokenizer.json").write_text("{}", encoding="utf-8")
    relist(copy)
    with pytest.raises(BundleError, match=r"tokenizer\.json: not a tokenizer"):
        Engine.load(copy)


# --- the manifest -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, 99, 10**30])
def test_a_newer_format_is_refused_whatever_else_it_says(copy, version):
    (copy / MANIFEST_NAME).write_text(json.dumps({"format_version": version, "new": {}}), encoding="utf-8")
    refused(copy, f"format version {version} is newer than {FORMAT_VERSION}", "upgrade")


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b"not json", "malformed"),
        (b"[]", "it is a list; expected an object"),
        (b"{}", "format_version"),
        (b'{"format_version": 1}', f"format version 1 is older than {FORMAT_VERSION}"),
        (CURRENT + b"}", "is missing"),
        (b'{"format_version": 0}', "format_version"),
        (b'{"format_version": "1"}', "format_version"),
        (b'{"format_version": true}', "format_version"),
        (CURRENT + b', "x": "\xff"}', "x"),
        (CURRENT + b', "\xff": 1}', "utf-8"),
        (CURRENT + b', "x": ' + b"[" * 100_000, "recursion"),
        (b" " * (17 << 20), "bytes; a manifest has at most"),
    ],
    ids=lambda value: str(value[:24]) if isinstance(value, bytes) else None,
)
def test_invalid_manifests_are_refused(copy, raw, reason):
    (copy / MANIFEST_NAME).write_bytes(raw)
    refused(copy, MANIFEST_NAME, reason)


EVERY_OBJECT = (
    " target. target.precision. target.cache.0. target.graph. target.graph.points.0. methods.0. methods.0.draft. "
    "methods.0.draft.cache.0. tokenizer. generation. files.0."
)


@pytest.mark.parametrize("place", EVERY_OBJECT.split(" "))
def test_unknown_fields_are_refused(copy, place):
    put(copy, f"{place}surprise", 1)
    refused(copy, "surprise is unknown", *json_places(place.rstrip(".")))


WRONG_KINDS: dict[str, tuple[Any, ...]] = {
    "backend": ("tensorflow", None),
    "max_seq_len": ("512", 512.5, 0),
    "prefill_chunk": (-64,),
    "batch_sizes": (1,),
    "target.vocab_size": (True,),
    "target.precision.weights": ("fp4",),
    "target.graph.points.0.tokens": (0,),
    "target.graph.points.0.cache": (-1,),
    "methods.0.method": (3,),
    "methods.0.trees": (None,),
    "methods.0.trees.0.0.0": (-1, 256, "0"),
    "methods.0.candidates": (0,),
    "tokenizer.eos_token_ids": ([-1],),
    "tokenizer.special_tokens": ({"bos_token": 3},),
    "generation.top_p": (-0.1,),
    "generation.temperature": (-1,),
    "files.0.size": (-1,),
    "files.0.sha256": ("0" * 63, "G" * 64),
    "files.0.path": (3,),
}


@pytest.mark.parametrize(("place", "value"), [(place, value) for place in WRONG_KINDS for value in WRONG_KINDS[place]])
def test_values_of_the_wrong_kind_are_refused_by_place(copy, place, value):
    put(copy, place, value)
    refused(copy, MANIFEST_NAME, "not a valid manifest", *json_places(place.removesuffix(".method")))


def json_places(place: str) -> list[str]:
    """A place as errors name it: in a method's entry, that and what of it."""
    written = "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in place.split("."))[1:]
    return written.removesuffix(".").replace("methods[0].", "methods[0]` `").split("` `")


HUGE = (
    "max_seq_len prefill_chunk target.vocab_size target.max_positions target.cache.0.heads methods.0.candidates "
    "methods.0.draft.cache.0.key_size methods.0.draft.graph.points.0.cache target.graph.points.0.batch "
    "target.graph.points.0.tokens"
)


@pytest.mark.parametrize("place", HUGE.split())
@pytest.mark.parametrize("size", [2**25, 10**30])
def test_huge_dimensions_are_refused_before_memory_is_taken(copy, place, size):
    put(copy, place, size)
    refused(copy, MANIFEST_NAME, place.rpartition(".")[2])


def compiled(document: Document, **changes: Any) -> Document:
    """Lists an engine of the target, compiled for its first shape point; the files are others of the bundle."""
    target = document["target"]
    engine: Document = {
        "file": target["weights"],
        "source": target["graph"]["master"],
        "runtime": "tensorrt-rtx",
        "version": "1.7.1.116",
        "compute_capabilities": ["8.6", "8.9"],
        "compute": "fp16",
        "profiles": [target["graph"]["points"][0]],
    }
    target["engines"] = [engine | changes]
    return engine


def test_engines_report_their_backend(copy):
    rewritten(copy, compiled)
    (engine,) = read_manifest(copy).engines
    assert engine.runs_on((8, 6)) and engine.runs_on((8, 9))
    assert not engine.runs_on((8, 0)) and not engine.runs_on((12, 0))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"runtime": "onnxruntime"}, "runtime"),
        ({"compute": "int8"}, "compute"),
        ({"compute_capabilities": []}, "compute_capabilities"),
        ({"compute_capabilities": ["sm_89"]}, "compute_capabilities"),
        ({"profiles": []}, "profiles"),
        ({"file": "target.elsewhere.engine"}, "'target.elsewhere.engine' is used but not listed"),
        ({"source": "target.elsewhere.onnx"}, "'target.elsewhere.onnx' is used but not listed"),
        ({"surprise": 1}, "surprise is unknown"),
        ({"profiles": [{"batch": 1, "tokens": 4, "cache": 0, "rows": 4}]}, "no shape point of the target is like"),
        ({"profiles": [{"batch": 1, "tokens": 4, "cache": 2**24, "rows": 4}]}, "no shape point of the target is like"),
        ({"profiles": [{"batch": 1, "tokens": 2, "cache": 256, "drafts": 4}]}, "no shape point of the target is like"),
    ],
)
def test_engines_that_cannot_be_right_are_refused(copy, changes, reason):
    rewritten(copy, lambda document: compiled(document, **changes))
    refused(copy, MANIFEST_NAME, reason)


@pytest.mark.parametrize(("role", "place"), [("target", "target"), ("draft", "methods.0.draft")])
def test_dimensions_that_are_huge_together_are_refused(copy, role, place):
    for size in ("heads", "key_size"):
        put(copy, f"{place}.cache.0.{size}", 2**20)
    refused(copy, f"the {role}'s cache would take")


def test_a_huge_file_is_refused_before_it_is_read(copy):
    put(copy, "files.0.size", 2**60)
    refused(copy, f"expected {2**60}")


@pytest.mark.parametrize(
    "path", ["../x", "a/../../x", "/etc/hostname", "a\\b", "..\\x", "C:/x", "./x", "a//b", "a/./b", "a/", "", ".."]
)
@pytest.mark.parametrize("used", [True, False])
def test_paths_out_of_the_bundle_are_refused(copy, path, used):
    entry = {"path": path, "size": 0, "sha256": hashlib.sha256(b"").hexdigest()}
    rewritten(copy, lambda document: document["files"].append(entry))
    if used:
        put(copy, "target.weights", path)
    refused(copy, repr(path), "not a plain path")


USED = (
    "target.weights target.graph.master methods.0.draft.weights methods.0.draft.graph.master tokenizer.file "
    "tokenizer.templates.default"
)


@pytest.mark.parametrize("place", USED.split())
def test_files_that_are_used_must_be_listed(copy, place):
    (copy / "extra").write_bytes(b"")
    put(copy, place, "extra")
    refused(copy, "'extra' is used but not listed")


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("files", "listed twice"),
        ("methods", "methods: draft_model, draft_model"),
        ("target.graph.points", "graph.points of the target: b1.t1"),
    ],
)
def test_what_is_listed_twice_is_refused(copy, place, reason):
    def doubled(document: Document) -> None:
        holder, key = at(document, place)
        holder[key].append(holder[key][0])

    rewritten(copy, doubled)
    refused(copy, reason)


def test_missing_shape_points_are_refused(copy):
    whole = (copy / MANIFEST_NAME).read_bytes()
    for tokens in (1, 2, 6, 64):

        def remove(document: Document, tokens: int = tokens) -> None:
            graph = document["target"]["graph"]
            graph["points"] = [point for point in graph["points"] if point["tokens"] != tokens]

        rewritten(copy, remove)
        refused(copy, f"no shape point of the target has {tokens} token{'s' * (tokens > 1)};")
        (copy / MANIFEST_NAME).write_bytes(whole)
    put(copy, "methods.0.draft.graph.points", [])
    refused(copy, "no shape point of the draft")
    (copy / MANIFEST_NAME).write_bytes(whole)
    put(copy, "methods.0.trees", [[[0] * n for n in range(1, 7)]])
    refused(copy, "no shape point of the target has 7 tokens")


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        ("target.cache.0.heads", 2, "input 'past_key.0' is float32[B, 1, S, 8], but float32[B, 2, S, 8] by cache[0]"),
        ("target.cache.0.value_size", 9, "input 'past_value.0'"),
        ("target.cache", [{"heads": 1, "key_size": 8, "value_size": 8}] * 2, "input 'past_key.1' is absent"),
        ("target.vocab_size", 13, "output 'logits' is float32[B, R, 12], but float32[1, 1, 13] by vocab_size"),
        ("target.embedding_size", 16, "input 'inputs_embeds' is absent"),
        ("methods.0.candidates", 11, "'draft_ids' is int64[K, B, 12], but int64[5, 1, 11] by candidates"),
        ("methods.0.draft.cache.0.key_size", 7, "input 'past_key.0'"),
    ],
)
def test_a_graph_that_is_not_what_the_manifest_says_is_named_with_the_field(copy, place, value, reason):
    put(copy, place, value)
    with pytest.raises(BundleError) as caught:
        Engine.load(copy, threads=1).close()
    assert reason in str(caught.value)


def test_an_input_that_only_the_graph_has_is_named(copy, bundle):
    """Graph and weights of another bundle, whose target takes embeddings too."""
    put(copy, "methods", [])
    other = bundle("gemma2-embeds")
    for name in ("target.onnx", "target.bin"):
        shutil.copy(other / name, copy)
    relist(copy)
    with pytest.raises(BundleError, match=r"target\.onnx: input .* by .* of the manifest"):
        Engine.load(copy, threads=1).close()


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        ("methods.0.method", "magic", "methods[0]: method is 'magic'; expected one of dflash, draft_model"),
        ("methods.0.trees", [[[0, 0]]], "draft_model: trees ... the choice [0, 0] is listed without [0]"),
        ("methods.0.trees", [[[0], [0]]], "draft_model: trees ... the choice [0] is given twice"),
        ("methods.0.trees", [[[0]], [[1]]], "draft_model: trees ... two have 1 draft token"),
        ("methods.0.trees", [[]], "or one has none"),
        ("methods.0.trees", [], "there are none"),
        ("methods.0.trees", [[[0], [64]]], "rank 64, with 12 candidates"),
        ("methods.0.trees", [[[0], [1], [1, 0]]], "only the most probable token of each depth can have children"),
        ("tokenizer.templates", {"default": ""}, "'' is used but not listed"),
        ("tokenizer.eos_token_ids", [1, 12], "tokenizer.eos_token_ids: 12 is not a token; the target has 12"),
        ("generation.rules", {"bad_words_ids": [[3, 99]]}, "generation.rules.bad_words_ids: 99 is not a token"),
        ("target.max_positions", 63, "max_seq_len is 64, but target.max_positions is 63"),
        ("methods.0.num_speculative_tokens", 4, "methods[0]: num_speculative_tokens is unknown"),
        ("methods.0.draft.embedding_size", 16, "embedding_size of the draft: expected null"),
        ("target.graph.points.0.drafts", 1, "graph.points of the target: b1"),
        ("target.graph.points.0.rows", 0, "graph.points of the target: b1"),
        ("methods.0.draft.graph.points.0.rows", 1, "graph.points of the draft: b1"),
        ("methods.0.draft.graph.points.0.tokens", 3, "graph.points of the draft: b1"),
        ("methods.0.draft.graph.points.0.drafts", 0, "graph.points of the draft: b1"),
    ],
)
def test_fields_that_contradict_others_are_named(copy, place, value, reason):
    put(copy, place, value)
    refused(copy, MANIFEST_NAME, *reason.split(" ... "))


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("dice-ngram", {"num_speculative_tokens": 4}, "num_speculative_tokens is given beside trees"),
        ("dice-ngram", {"prompt_lookup_min": 5}, "prompt_lookup_min is 5; expected 1 to prompt_lookup_max, which is 4"),
        ("dice-ngram", {"prompt_lookup_max": 33}, "not a valid manifest"),
        ("dice-ngram", {"prompt_lookup_min": 0}, "not a valid manifest"),
        ("dice-ngram", {"candidates": 1}, "candidates is unknown"),
        ("dice-suffix", {"max_spec_factor": 0}, "not a valid manifest"),
        ("dice-suffix", {"min_token_prob": 1.5}, "not a valid manifest"),
        ("dice-ngram", {"trees": [[[0], [1]]]}, "ngram: trees: the one of 2 draft tokens is not a chain"),
        ("dice-suffix", {"trees": [[[1]]]}, "suffix: trees: the one of 1 draft tokens is not a chain"),
        ("dice-suffix", {"trees": [[[0]], [[0]]]}, "suffix: trees: two have 1 draft token"),
        ("dice-ngram", {"trees": [[]]}, "or one has none"),
        ("dice-ngram", {"trees": [[[0] * n for n in range(1, 7)]]}, "no shape point of the target has 7 tokens"),
        ("qwen3-lookahead", {"trees": [[[0], [0, 0]]]}, "does not consist of chains of 3 below the root"),
        ("qwen3-lookahead", {"ngram": 5}, "does not consist of chains of 4 below the root"),
        ("qwen3-lookahead", {"window": 1}, "window 1, with n-grams of 4; the window fills only with 2"),
        ("qwen3-lookahead", {"window": 100}, "312 nodes a step, at most 256 are verified"),
        ("qwen3-lookahead", {"window": 6}, "no shape point of the target has"),
        ("qwen3-lookahead", {"ngram": 1}, "not a valid manifest"),
    ],
)
def test_options_that_cannot_be_right_are_refused(bundle, tmp_path, name, change, reason):
    folder = shutil.copytree(bundle(name), tmp_path / "bundle")
    rewritten(folder, lambda document: document["methods"][0].update(change))
    refused(folder, reason)


def test_a_cache_too_small_is_refused(copy):
    put(copy, "target.max_positions", 100)
    put(copy, "max_seq_len", 100)
    refused(copy, "max_seq_len is 100, and the largest cache of 128 rows has no room for a step of 64 tokens")


# --- building ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.checkpoints import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama", num_hidden_layers=1)


class Interrupted(BaseException):
    """Like KeyboardInterrupt: nothing that catches errors catches it."""


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def build(checkpoint: Path, output: Path, stop_at: str | None = None, **options: Any) -> None:
    """Builds a bundle, or stops in the middle of it."""
    from specexport.exporter.build import build as build_bundle
    from specexport.exporter.options import BuildOptions

    def progress(step: str, done: int, total: int) -> None:
        if stop_at is not None and stop_at in step and done == total:
            raise Interrupted

    build_bundle(BuildOptions(target=str(checkpoint), output=output, **options), progress)


@pytest.mark.exporter
def test_a_build_that_fails_leaves_nothing(checkpoint, tmp_path):
    with pytest.raises(Interrupted):
        build(checkpoint, tmp_path / "bundle", stop_at="hashing")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(BuildError):
        build(checkpoint, tmp_path / "bundle", methods=[{"model": str(tmp_path / "nowhere")}])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exporter
def test_a_bundle_is_replaced_only_on_request_and_only_by_a_whole_one(checkpoint, copy):
    before = contents(copy)
    with pytest.raises(BuildError, match=r"exists already.*--overwrite"):
        build(Path("nowhere"), copy)  # before the target is looked for, and perhaps downloaded
    with pytest.raises(Interrupted):
        build(checkpoint, copy, stop_at="loading the target", overwrite=True)
    assert contents(copy) == before
    assert list(copy.parent.iterdir()) == [copy]
    build(checkpoint, copy, overwrite=True)
    assert list(copy.parent.iterdir()) == [copy]
    Bundle.open(copy)
    assert read_manifest(copy).target.vocab_size == 320
    assert not (copy / "draft").exists()


@pytest.mark.exporter
@pytest.mark.parametrize("overwrite", [True, False])
def test_other_folders_are_not_replaced(checkpoint, tmp_path, overwrite):
    (tmp_path / "precious").write_text("data", encoding="utf-8")
    for output in (tmp_path, tmp_path / "precious"):
        with pytest.raises(BuildError, match="exists"):
            build(checkpoint, output, overwrite=overwrite)
    assert contents(tmp_path) == {"precious": b"data"}
