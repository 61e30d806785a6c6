"""The bundles that the checks need: built and packed where torch is, unpacked where the GPU is."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

PART_BYTES = 60_000_000
INDEX, WEIGHTS = "index.json", "weights.json"
K = 4
_VERBATIM = 1 << 16
"""Tensors of fewer bytes are kept as they are: norms, and what shapes are made of."""
_BLOCK = 1 << 22
_RANDOM = 1 << 23
"""Parts of a random pair whose weights take less are packed."""

KINDS: dict[str, dict[str, Any]] = {
    "draft-fp32": {"proposes": "draft", "precision": "fp32"},
    "draft-fp16": {"proposes": "draft", "precision": "fp16"},
    "draft-int8": {"proposes": "draft", "precision": "int8"},
    "draft-int4": {"proposes": "draft", "precision": "int4"},
    "portable-fp16": {"proposes": "draft", "precision": "fp16", "lowering": "portable"},
    "medusa-fp16": {"proposes": "medusa", "precision": "fp16"},
    "self-fp16": {"proposes": "self", "precision": "fp16"},
    "batch-fp32": {"proposes": "draft", "precision": "fp32", "max_batch_size": 4},
}
"""Bundles of the demo models, with the options of their builds."""
PAIRS: dict[str, dict[str, Any]] = {
    "v150k-fp16": {"precision": "fp16", "vocab": 150_000, "sizes": ((256, 4), (256, 1))},
    "1b-fp16": {"precision": "fp16", "vocab": 32_000, "sizes": ((2048, 18), (512, 4))},
    "1b-int4": {"precision": "int4", "vocab": 32_000, "sizes": ((2048, 18), (512, 4))},
}
"""Pairs of random weights, which are made anew where they run: vocabulary, and width and layers of both models."""


def prepare(out: Path, models: Path, names: list[str]) -> None:
    """Builds bundles and packs them: ``part-00`` and so on, and what is in them. What was built already is kept.

    Args:
        out: folder to write to; ``out/built`` keeps the bundles.
        models: holds the demo models.
        names: of :data:`KINDS` and :data:`PAIRS`.
    """
    built = out / "built"
    built.mkdir(parents=True, exist_ok=True)
    for name in names:
        if not (built / name).exists():
            print(f"building {name}", flush=True)
            _build(name, built, models)
    _pack(built, names, out)


def unpacked(folder: Path) -> Path:
    """The folder of the prepared bundles, joined from the parts the first time.

    Raises:
        ValueError: a part is missing or not what was written; names it.
    """
    there, index = folder / "bundles", json.loads((folder / INDEX).read_text())
    if (there / "done").exists():
        return there
    for part in index["parts"]:
        path = folder / part["name"]
        if not path.exists() or _sha256(path) != part["sha256"]:
            found = "another content" if path.exists() else "no such file"
            raise ValueError(f"{path}: {found}; expected SHA-256 {part['sha256']}; copy it here again")
    shutil.rmtree(there, ignore_errors=True)
    there.mkdir()
    with tarfile.open(fileobj=_Joined([folder / part["name"] for part in index["parts"]]), mode="r|gz") as archive:  # type: ignore[arg-type]
        archive.extractall(there, filter="data")
    (there / "done").touch()
    return there


def filled(bundle: Path, seed: int = 0) -> int:
    """Writes the weights of a random pair that were left out, if there are some and they are not there yet.

    They are random numbers of the means and deviations of those they stand for, quantized ones uniform. Returns the
    bytes written.
    """
    written, path = 0, bundle / WEIGHTS
    for name, described in json.loads(path.read_text()).items() if path.exists() else ():
        file = bundle / name
        if file.exists() and file.stat().st_size == described["nbytes"]:
            continue
        part = file.with_name(file.name + ".part")
        with part.open("wb") as to:
            to.truncate(described["nbytes"])
            for tensor in described["tensors"]:
                to.seek(tensor["offset"])
                _fill(to, tensor, np.random.default_rng([seed, tensor["offset"]]))
        part.rename(file)
        written += described["nbytes"]
    return written


def _fill(to: IO[bytes], tensor: dict[str, Any], random: np.random.Generator) -> None:
    if "values" in tensor:
        to.write(base64.b64decode(tensor["values"]))
        return
    left = tensor["nbytes"]
    while left:
        now = min(left, _BLOCK)
        if "std" in tensor:
            kind = np.dtype(tensor["dtype"])
            numbers = random.standard_normal(now // kind.itemsize, np.float32) * tensor["std"] + tensor["mean"]
            to.write(numbers.astype(kind).tobytes())
        else:
            to.write(random.bytes(now))
        left -= now


# --- where torch is ---------------------------------------------------------------------------------------------------


def _build(name: str, built: Path, models: Path) -> None:
    from specexport.building import progress_bars
    from specexport.exporter.build import build
    from specexport.exporter.engines.options import EngineOptions
    from specexport.exporter.options import BuildOptions

    options = dict((KINDS | PAIRS)[name])
    if name in PAIRS:
        vocab, sizes = options.pop("vocab"), options.pop("sizes")
        random = [
            _random_model(built.parent / "models" / f"{vocab}-{width}-{layers}", models, vocab, width, layers)
            for width, layers in sizes
        ]
        target, methods = random[0], ({"method": "draft_model", "model": str(random[1]), "num_speculative_tokens": K},)
    else:
        target, proposes = models / "demo-target", options.pop("proposes")
        methods = (
            {
                "draft": {"method": "draft_model", "model": str(models / "demo-draft"), "num_speculative_tokens": K},
                "medusa": {"method": "medusa", "model": str(models / "demo-medusa")},
                "self": {"method": "self_draft", "layers": 2, "num_speculative_tokens": K},
            }[proposes],
        )
    options.setdefault("max_batch_size", 1)
    with progress_bars() as progress:
        build(
            BuildOptions(
                str(target),
                built / name,
                methods=methods,  # type: ignore[arg-type]
                draft_precision=options["precision"],
                max_seq_len=512,
                backend="onnxruntime-cuda",
                engines=EngineOptions("onnxruntime-cuda"),
                **options,
            ),
            progress,
        )
    if name in PAIRS:
        _leave_weights_out(built / name)


def _random_model(folder: Path, models: Path, vocab: int, width: int, layers: int) -> Path:
    """A Llama checkpoint of random weights in fp16, with the demo models' tokenizer."""
    if (folder / "config.json").exists():
        return folder
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float16)
    try:
        config = LlamaConfig(
            vocab_size=vocab,
            hidden_size=width,
            intermediate_size=11 * width // 4,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            num_key_value_heads=max(1, width // 256),
            head_dim=64,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
    finally:
        torch.set_default_dtype(torch.float32)
    for file in (models / "demo-target").glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def _leave_weights_out(bundle: Path) -> None:
    """Describes the files of weights that are large, in place of packing them."""
    import onnx
    from onnx.external_data_helper import ExternalDataInfo, uses_external_data
    from onnx.helper import tensor_dtype_to_np_dtype

    found: dict[str, dict[int, dict[str, Any]]] = {}
    for graph in bundle.rglob("*.onnx"):
        for tensor in onnx.load(graph, load_external_data=False).graph.initializer:
            if not uses_external_data(tensor):
                continue
            info = ExternalDataInfo(tensor)
            file = (graph.parent / info.location).relative_to(bundle).as_posix()
            if (bundle / file).stat().st_size < _RANDOM:
                continue
            described: dict[str, Any] = {"offset": info.offset or 0, "nbytes": info.length}
            with (bundle / file).open("rb") as weights:
                weights.seek(described["offset"])
                content = weights.read(info.length)
            kind = tensor_dtype_to_np_dtype(tensor.data_type)
            if len(content) < _VERBATIM:
                described["values"] = base64.b64encode(content).decode()
            elif kind in (np.float32, np.float16):
                sample = np.frombuffer(content, kind)[: 1 << 20].astype(np.float32)
                described |= {"dtype": str(kind), "mean": float(sample.mean()), "std": float(sample.std())}
            described["shape"] = list(tensor.dims)
            found.setdefault(file, {})[described["offset"]] = described
    written = {
        file: {"nbytes": (bundle / file).stat().st_size, "tensors": list(tensors.values())}
        for file, tensors in found.items()
    }
    (bundle / WEIGHTS).write_text(json.dumps(written))
    for file in found:
        (bundle / file).unlink()


def _pack(built: Path, names: list[str], out: Path) -> None:
    """One compressed archive, in parts; files of the same content are in it once."""
    for part in out.glob("part-*"):
        part.unlink()
    first: dict[str, Path] = {}
    for name in names:
        for file in sorted(path for path in (built / name).rglob("*") if path.is_file()):
            same = first.setdefault(_sha256(file), file)
            if not file.samefile(same):  # the archive knows hard links
                file.unlink()
                os.link(same, file)
    parts = _Parts(out)
    with tarfile.open(fileobj=parts, mode="w|gz") as archive:  # type: ignore[call-overload]
        for name in names:
            archive.add(built / name, name)
    parts.close()
    index = {
        "bundles": {
            name: sum(file.stat().st_size for file in (built / name).rglob("*") if file.is_file()) for name in names
        },
        "parts": [
            {"name": part.name, "nbytes": part.stat().st_size, "sha256": _sha256(part)}
            for part in sorted(out.glob("part-*"))
        ],
    }
    (out / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    print(json.dumps(index, indent=2))


class _Parts:
    """Writes a stream as files of at most :data:`PART_BYTES`."""

    def __init__(self, folder: Path) -> None:
        self._names: Iterator[Path] = (folder / f"part-{number:02}" for number in itertools.count())
        self._file, self._left = next(self._names).open("wb"), PART_BYTES

    def write(self, content: bytes) -> int:
        view = memoryview(content)
        while view:
            if not self._left:
                self._file.close()
                self._file, self._left = next(self._names).open("wb"), PART_BYTES
            now = view[: self._left]
            self._file.write(now)
            self._left -= len(now)
            view = view[len(now) :]
        return len(content)

    def close(self) -> None:
        self._file.close()


class _Joined:
    """Reads parts as one stream."""

    def __init__(self, parts: list[Path]) -> None:
        self._rest = [part.open("rb") for part in parts]

    def read(self, nbytes: int) -> bytes:
        while self._rest:
            if content := self._rest[0].read(nbytes):
                return content
            self._rest.pop(0).close()
        return b""


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
