"""Every file from outside, harmed: it is loaded or refused in one line; nothing crashes, hangs or takes all memory."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import strategies as st

from specexport.contract.errors import BuildError
from specexport.contract.manifest import MANIFEST_NAME
from specexport.runtime import Engine
from specexport.runtime.backends.onnxruntime.kernels import kernels
from tests.fuzz.conftest import Fuzz
from tests.fuzz.mutations import Edit, edits, harmed_bytes, harmed_json
from tests.fuzz.sandbox import Sandbox
from tests.fuzz.targets import put

Bundles = Callable[[str], Path]


def _try(
    fuzz: Fuzz, box: Sandbox, target: str, seeds: dict[str, Path], harm: Callable[[Path, list[Edit]], bytes], count: int
) -> None:
    """Harms files, each named by its seed, and calls the target in the sandbox."""

    def check(arguments: tuple[str, list[Edit]]) -> str:
        seed, done = arguments
        return box.call(f"tests.fuzz.targets:{target}", seed, harm(seeds[seed], done))

    fuzz(target, st.tuples(st.sampled_from(sorted(seeds)), edits), check, count)


def as_bytes(path: Path, done: list[Edit]) -> bytes:
    return harmed_bytes(path.read_bytes(), done)


def as_json(path: Path, done: list[Edit]) -> bytes:
    return harmed_json(json.loads(path.read_bytes()), done)


def as_safetensors(path: Path, done: list[Edit]) -> bytes:
    """Its header as JSON, or all of it as bytes."""
    raw = path.read_bytes()
    if done[0][0] % 2:
        return harmed_bytes(raw, done[1:] or done)
    size = int.from_bytes(raw[:8], "little")
    header = harmed_json(json.loads(raw[8 : 8 + size]), done[1:] or done)
    return len(header).to_bytes(8, "little") + header + raw[8 + size :]


def either(path: Path, done: list[Edit]) -> bytes:
    if path.suffix == ".json":
        return as_json(path, done)
    return as_safetensors(path, done) if path.suffix == ".safetensors" else as_bytes(path, done)


# --- bundles ----------------------------------------------------------------------------------------------------------


def test_manifests(fuzz, box, bundle):
    names = ("dice-near", "dice-mlp", "dice-medusa-draft", "dice-lookahead")
    seeds = {str(bundle(name)): bundle(name) / MANIFEST_NAME for name in names}
    _try(fuzz, box, "manifest", seeds, as_json, 400)


@pytest.mark.parametrize(
    ("target", "file", "count"),
    [("graph", "target.onnx", 150), ("weights", "target.bin", 60), ("tokenizer", "tokenizer.json", 300)],
)
def test_files_of_bundles(fuzz, box, bundle, target, file, count):
    (path,) = bundle("dice-near").glob(f"**/{file}")
    _try(fuzz, box, target, {str(bundle("dice-near")): path}, either, count)


def as_packed(path: Path, done: list[Edit]) -> bytes:
    """Its header, or all of it."""
    raw = path.read_bytes()
    size = len(raw) if done[0][0] % 2 else 64
    return harmed_bytes(raw[:size], done[1:] or done) + raw[size:]


@pytest.mark.exporter
@pytest.mark.skipif(not kernels().devices, reason="the kernels are not compiled: nothing is packed")
def test_packed_weights(fuzz, box, tmp_path, monkeypatch):
    from specexport.exporter.build import build
    from specexport.exporter.options import BuildOptions
    from tests.checkpoints import make_checkpoint

    monkeypatch.setenv("SPECEXPORT_CACHE", str(tmp_path / "cache"))
    target = make_checkpoint(tmp_path / "model", "llama", hidden_size=256, intermediate_size=1024)  # more than 1 MB
    folder = build(BuildOptions(str(target), tmp_path / "bundle", precision="int8", max_seq_len=64))
    Engine.load(folder, threads=1, cache_graphs=True).close()
    (path,) = (tmp_path / "cache" / "packed").iterdir()
    _try(fuzz, box, "packed", {f"{folder}|{path.name}": path}, as_packed, 60)


def test_trees(fuzz, box, tmp_path):
    seeds = {"choices": [[0], [1], [0, 0], [0, 1], [0, 0, 0]], "parents": {"parents": [-1, 0, 0, 1, 2]}}
    files = {name: tmp_path / name for name in seeds}
    for name, content in seeds.items():
        files[name].write_text(json.dumps(content), encoding="utf-8")
    _try(fuzz, box, "tree", files, as_json, 1000)


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in one file and in two, with Medusa heads and a speculator."""
    import torch
    from safetensors.torch import load_file, save_file

    from tests.checkpoints import make_checkpoint, make_heads, make_speculator
    from tests.make_bundles import DICE

    root = tmp_path_factory.mktemp("checkpoints")
    make_checkpoint(root / "model", "llama", **DICE)
    shutil.copytree(root / "model", root / "parts")
    weights = load_file(root / "model" / "model.safetensors")
    (root / "parts" / "model.safetensors").unlink()
    placed = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(sorted(weights))}
    for file in set(placed.values()):
        held = {name: weights[name] for name in placed if placed[name] == file}
        save_file(held, root / "parts" / file, {"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": placed}
    (root / "parts" / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    make_heads(root / "heads", root / "model", 2, tied=False)
    make_speculator(root / "speculator", root / "model", 2, inner=8)
    # Heads of the other kind of file.
    shutil.copytree(root / "heads", root / "pickled")
    (root / "pickled" / "medusa_lm_head.safetensors").unlink()
    torch.save(load_file(root / "heads" / "medusa_lm_head.safetensors"), root / "pickled" / "medusa_lm_head.pt")
    return root


@pytest.mark.exporter
@pytest.mark.parametrize(
    ("target", "count", "files"),
    [
        ("checkpoint", 40, ["model/config.json"]),
        ("checkpoint", 60, ["model/generation_config.json"]),
        ("checkpoint", 60, ["model/model.safetensors"]),
        ("checkpoint", 60, ["parts/model.safetensors.index.json"]),
        ("medusa", 200, ["heads/config.json", "heads/medusa_lm_head.safetensors", "pickled/medusa_lm_head.pt"]),
        ("speculator", 200, ["speculator/config.json", "speculator/model.safetensors"]),
    ],
)
def test_checkpoints(fuzz, box, checkpoints, target, count, files):
    paths = [checkpoints / file for file in files]
    _try(fuzz, box, target, {f"{path.parent}|{path.name}": path for path in paths}, either, count)


def as_gguf(path: Path, done: list[Edit]) -> bytes:
    """Its metadata and the table of its tensors, which are its beginning, or all of it."""
    from specexport.exporter.checkpoints.gguf.header import read_header

    raw = path.read_bytes()
    if done[0][0] % 4 == 0:
        return harmed_bytes(raw, done[1:] or done)
    header = len(raw) - sum(place.data.nbytes for place in read_header([path]).tensors.values())
    return harmed_bytes(raw[:header], done[1:] or done) + raw[header:]


@pytest.mark.exporter
def test_gguf_headers(fuzz, checkpoints):
    """The header alone, in this process: it allocates nothing that the file does not have."""
    from specexport.exporter.checkpoints.gguf.header import read_header
    from tests.gguf_files import make_gguf

    path = make_gguf(checkpoints / "header.gguf", checkpoints / "model")
    harmed = checkpoints / "harmed.gguf"

    def check(done: list[Edit]) -> str:
        put(harmed, as_gguf(path, done))
        try:
            read_header([harmed])
        except BuildError as error:
            assert str(error).startswith(str(harmed)) and "\n" not in str(error)
            return "refused"
        return "loaded"

    fuzz("gguf header", edits, check, 1000)


@pytest.mark.exporter
def test_gguf(fuzz, box, checkpoints):
    from tests.gguf_files import make_gguf

    path = make_gguf(checkpoints / "tiny.gguf", checkpoints / "model")
    _try(fuzz, box, "gguf", {str(path): path}, as_gguf, 60)
