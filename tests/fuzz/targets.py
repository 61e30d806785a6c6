"""What reads files from outside. A target takes a seed's name, the harmed bytes (None for the seed as it is), and a
folder of its own that stays from call to call; it returns, or raises one of our errors.
"""

import hashlib
import json
import os
import shutil
from functools import lru_cache
from pathlib import Path

from specexport.contract.manifest import MANIFEST_NAME
from specexport.contract.tree import TokenTree
from specexport.runtime import Engine, SamplingParams
from specexport.runtime.bundle import Bundle

PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=1.0, max_tokens=6, seed=1),
)


def put(path: Path, data: bytes | None) -> None:
    """Writes a file anew: libraries may still have the old one mapped."""
    if data is not None:
        neighbour = path.with_name(path.name + ".new")
        neighbour.write_bytes(data)
        os.replace(neighbour, path)  # noqa: PTH105


@lru_cache(maxsize=16)
def _copy(source: str, folder: Path) -> Path:
    name = folder / Path(source).name
    return shutil.copytree(source, name, dirs_exist_ok=True)


def _generate(bundle: Path, check_hashes: bool) -> None:
    with Engine.load(bundle, threads=1, check_hashes=check_hashes) as engine:
        for params in PARAMS:
            engine.generate([5, 8, 5, 8], params)


def manifest(seed: str, data: bytes | None, folder: Path) -> None:
    """``specexport.json`` of a bundle, which is then run."""
    bundle = _copy(seed, folder)
    put(bundle / MANIFEST_NAME, data)
    _generate(bundle, check_hashes=True)


def _file(seed: str, data: bytes | None, folder: Path, name: str) -> Path:
    """A bundle with one file harmed, and listed as it is: whoever forges a file forges its hash too."""
    bundle = _copy(seed, folder)
    put(bundle / name, data)
    raw = (bundle / name).read_bytes()
    document = json.loads((bundle / MANIFEST_NAME).read_text(encoding="utf-8"))
    for file in document["files"]:
        if file["path"] == name:
            file.update(size=len(raw), sha256=hashlib.sha256(raw).hexdigest())
    (bundle / MANIFEST_NAME).write_text(json.dumps(document), encoding="utf-8")
    return bundle


def graph(seed: str, data: bytes | None, folder: Path) -> None:
    """The target's ONNX graph, loaded."""
    Engine.load(_file(seed, data, folder, "target.onnx"), threads=1).close()


def weights(seed: str, data: bytes | None, folder: Path) -> None:
    """The target's weights, run."""
    _generate(_file(seed, data, folder, "target.bin"), check_hashes=True)


def packed(seed: str, data: bytes | None, folder: Path) -> None:
    """A file of packed weights in the cache folder of a bundle, which is run."""
    bundle, _, name = seed.rpartition("|")
    os.environ["SPECEXPORT_CACHE"] = str(folder)
    (folder / "packed").mkdir(exist_ok=True)
    put(folder / "packed" / name, data)
    _generate(Path(bundle), check_hashes=False)


def tokenizer(seed: str, data: bytes | None, folder: Path) -> None:
    """``tokenizer.json``."""
    Bundle.open(_file(seed, data, folder, "tokenizer/tokenizer.json")).tokenizer()


def tree(seed: str, data: bytes | None, folder: Path) -> None:
    """A tree file."""
    del seed
    path = folder / "tree.json"
    put(path, b"[[0]]" if data is None else data)
    result = TokenTree.load(path)
    assert TokenTree.from_choices(result.choices).parents == result.parents or result.mask.any()


# --- what the exporter reads ------------------------------------------------------------------------------------------


def gguf(seed: str, data: bytes | None, folder: Path) -> None:
    """A GGUF file: header, configuration, tokenizer and weights."""
    from specexport.exporter.checkpoints.checkpoint import load_checkpoint
    from specexport.exporter.checkpoints.locate import find, locate
    from specexport.exporter.checkpoints.tokenizer import load_tokenizer

    file = folder / Path(seed).name
    put(file, Path(seed).read_bytes() if data is None else data)
    model = find(str(file))
    try:
        load_tokenizer(locate(str(file)))
        load_checkpoint(str(file))
    finally:
        shutil.rmtree(model)  # there are thousands


def _harmed(seed: str, data: bytes | None, folder: Path) -> Path:
    """A copy of ``FOLDER|FILE``'s folder, with that file harmed."""
    source, _, name = seed.rpartition("|")
    copy = _copy(source, folder / name)
    put(copy / name, data)
    return copy


def checkpoint(seed: str, data: bytes | None, folder: Path) -> None:
    """A configuration of a checkpoint, its weights, or the index of weights in several files."""
    from specexport.exporter.checkpoints.checkpoint import load_checkpoint
    from specexport.exporter.checkpoints.tokenizer import load_tokenizer

    model = _harmed(seed, data, folder)
    load_tokenizer(model)
    load_checkpoint(str(model))


def medusa(seed: str, data: bytes | None, folder: Path) -> None:
    """The configuration of Medusa heads, their safetensors or their ``.pt``."""
    from specexport.methods.medusa.export import read_medusa

    read_medusa(_harmed(seed, data, folder)).load(hidden=16, vocab=12)


def speculator(seed: str, data: bytes | None, folder: Path) -> None:
    """The configuration of an MLP speculator, or its safetensors."""
    from specexport.methods.mlp_speculator.export import read_speculator

    outline = read_speculator(str(_harmed(seed, data, folder)))
    outline.require_fit(hidden=16, vocab=12)
    outline.load()
