"""The bundles for the checks: built and packed on a machine with torch, unpacked on the one with the GPU."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
import shutil
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from specexport.contract.manifest import MANIFEST_NAME

PART_BYTES = 40_000_000
"""Fits into transfers of 64 MiB together with the working tree."""
INDEX, WEIGHTS, PLAN = "index.json", "weights.json", "plan.json"
K, CONTEXT = 4, 512
_VERBATIM = 1 << 16
"""Smaller tensors are packed: norms, and constants of shapes."""
_BLOCK = 1 << 22
_PRIME = 2_097_169
_RANDOM = 1 << 23
"""Weights of a random pair below this size are packed."""

KINDS: dict[str, dict[str, Any]] = {
    "draft-fp32": {"proposes": "draft", "precision": "fp32"},
    "draft-fp16": {"proposes": "draft", "precision": "fp16"},
    "draft-int8": {"proposes": "draft", "precision": "int8"},
    "draft-int4": {"proposes": "draft", "precision": "int4"},
    "draft-bf16": {"proposes": "draft", "precision": "bf16"},
    "draft-fp8": {"proposes": "draft", "precision": "fp8"},
    "portable-fp16": {"proposes": "draft", "precision": "fp16", "lowering": "portable"},
    "eagle3-fp16": {"proposes": "eagle3", "precision": "fp16"},
    "dflash-fp16": {"proposes": "dflash", "precision": "fp16"},
    "medusa-fp16": {"proposes": "medusa", "precision": "fp16"},
    "self-fp16": {"proposes": "self", "precision": "fp16"},
    "batch-fp32": {"proposes": "draft", "precision": "fp32", "max_batch_size": 4},
}
"""Bundles of the demo models, with the options of their builds."""
TINY = (
    "hybrid-fp32-native",
    "hybrid-fp32-portable",
    "medusa_draft-fp16-native",
    "universal_draft-int8-portable",
    "draft_model-int8-native",
    "eagle3-int8-native",
    "dflash-int8-native",
    "medusa-fp16-portable",
    "mlp_speculator-int4-native",
    "mtp-fp32-native",
    "mtp-int8-native",
    "self_draft-int8-portable",
    "plain-fp16-native",
)
"""One of each kind of the GPU dry run's bundles (``tests.null_cuda.bundles``); the mixture of experts in fp32 too, in
which no token may choose other experts than on the CPU."""
_Sizes = dict[str, int]


def _llama(width: int, layers: int, feed_forward: int, heads: int, kv_heads: int) -> _Sizes:
    return {
        "hidden_size": width,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


_150K = {"vocab_size": 150_000, "sizes": (_llama(256, 4, 704, 4, 1), _llama(256, 1, 704, 4, 1))}
_290M = {"vocab_size": 4096, "sizes": (_llama(1152, 20, 3072, 18, 6), _llama(512, 7, 1280, 8, 4))}
_1B = {"vocab_size": 32_000, "sizes": (_llama(2048, 18, 5632, 32, 8), _llama(512, 4, 1408, 8, 2))}
PAIRS: dict[str, dict[str, Any]] = {
    "v150k-fp16": {**_150K, "precision": "fp16"},
    "290m-fp16": {**_290M, "precision": "fp16"},
    "290m-int8": {**_290M, "precision": "int8"},
    "1b-fp16": {**_1B, "precision": "fp16"},
    "1b-int4": {**_1B, "precision": "int4"},
}
"""Pairs with random weights, generated on the machine that runs them: vocabulary, and sizes of both models."""


def prepare(out: Path, models: Path, names: Sequence[str] = ()) -> None:
    """Builds bundles and packs them into ``part-00`` and so on, with an index. Existing bundles are kept.

    Args:
        out: folder to write to; ``out/built`` keeps the bundles.
        models: holds the demo models.
        names: of :data:`TINY`, :data:`KINDS` and :data:`PAIRS`; all of them unless given.
    """
    from tests.null_cuda import bundles

    built = out / "built"
    names = names or (*TINY, *KINDS, *PAIRS)
    built.mkdir(parents=True, exist_ok=True)
    for name in names:
        if (built / name / (PLAN if name in PAIRS else MANIFEST_NAME)).exists():
            continue
        start = time.monotonic()
        if name in TINY:
            bundles.make(name, built)
        else:
            _build(name, built, models)
        print(f"built {name} in {time.monotonic() - start:.0f} s", flush=True)
    _pack(built, names, out)


def unpacked(folder: Path) -> Path:
    """The folder of the prepared bundles, joined from the parts the first time.

    Raises:
        ValueError: the index is missing, or a part is missing or damaged; names it.
    """
    target = folder / "bundles"
    if not (folder / INDEX).is_file():
        raise ValueError(f"{folder / INDEX}: no such file; expected in a folder that --prepare has written")
    index = json.loads((folder / INDEX).read_text())
    if (target / "done").exists():
        return target
    for part in index["parts"]:
        path = folder / part["name"]
        if not path.exists() or _sha256(path) != part["sha256"]:
            state = "another content" if path.exists() else "no such file"
            raise ValueError(f"{path}: {state}; expected SHA-256 {part['sha256']}; copy it here again")
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    with tarfile.open(fileobj=_Joined([folder / part["name"] for part in index["parts"]]), mode="r|gz") as archive:  # type: ignore[arg-type]
        archive.extractall(target, filter="data")
    for file in (path for path in target.rglob("*") if path.stat().st_nlink > 1 and path.is_file()):
        copy = shutil.copy(file, file.with_name(file.name + ".part"))  # onnxruntime refuses weights that have two names
        Path(copy).replace(file)
    (target / "done").touch()
    return target


def filled(bundle: Path, seed: int = 0) -> int:
    """Writes the omitted weights of a random pair, unless there are none or they exist; returns the bytes written.

    They are random numbers with the means and deviations of the omitted ones; quantized weights are uniform. Numbers
    repeat within a matrix: drawing each takes longer than everything else.
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
    if "std" in tensor:
        numbers = random.standard_normal(_PRIME, np.float32) * tensor["std"] + tensor["mean"]
        content = numbers.astype(tensor["dtype"]).tobytes()
    else:
        content = random.bytes(_BLOCK)
    for at in range(0, tensor["nbytes"], len(content)):
        to.write(content[: tensor["nbytes"] - at])


# --- on the machine with torch ----------------------------------------------------------------------------------------


def _build(name: str, built: Path, models: Path) -> None:
    from specexport.building import progress_bars
    from specexport.exporter.build import build
    from specexport.exporter.options import BuildOptions, CompileOptions

    options = dict((KINDS | PAIRS)[name])
    if name in PAIRS:
        vocab, sizes = options.pop("vocab_size"), options.pop("sizes")
        target, draft = (
            _random_model(built.parent / "models", models, {"vocab_size": vocab, **size}) for size in sizes
        )
        methods = ({"method": "draft_model", "model": str(draft), "num_speculative_tokens": K},)
    else:
        target, proposes = models / "demo-target", options.pop("proposes")
        methods = (
            {
                "draft": {"method": "draft_model", "model": str(models / "demo-draft"), "num_speculative_tokens": K},
                "eagle3": {
                    "method": "eagle3",
                    "model": str(models / "demo-eagle3"),
                    "num_speculative_tokens": K,
                },
                "dflash": {"method": "dflash", "model": str(models / "demo-dflash")},
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
                max_seq_len=CONTEXT,
                backend="onnxruntime-cuda",
                engines=CompileOptions("onnxruntime-cuda"),
                overwrite=True,  # a build that was killed before its weights were omitted
                **options,
            ),
            progress,
        )
    if name in PAIRS:
        _leave_weights_out(built / name)
        _write_plan(built / name, target, draft)


def _random_model(folder: Path, models: Path, sizes: _Sizes) -> Path:
    """A Llama checkpoint of random weights in fp16, with the demo models' tokenizer."""
    from transformers import LlamaConfig

    from specexport.exporter.checkpoints.config import meta_model

    folder = folder / "-".join(map(str, sizes.values()))
    if (folder / "model.safetensors").exists():
        return folder
    LlamaConfig(
        **sizes,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        dtype="float16",
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    for file in (models / "demo-target").glob("tokenizer*"):
        shutil.copy(file, folder)
    shapes = {name: tuple(parameter.shape) for name, parameter in meta_model(folder).named_parameters()}
    _write_safetensors(folder / "model.safetensors", shapes)
    return folder


def _write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Matrices of fp16 numbers with a deviation of 0.02, and norms of ones.

    All come from one sequence that repeats after a prime number of elements, so that no two are equal: drawing each
    separately would take longer than everything else.
    """
    numbers = (np.random.default_rng(0).standard_normal(_PRIME, np.float32) * 0.02).astype(np.float16)
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    part, at = path.with_name(path.name + ".part"), 0
    with part.open("wb") as to:
        to.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            if len(shape) == 1:
                to.write(np.ones(shape, np.float16).tobytes())
                continue
            left = math.prod(shape)
            while left:
                now = numbers[at : at + left]
                to.write(now.tobytes())
                at, left = (at + len(now)) % _PRIME, left - len(now)
    part.rename(path)


def _write_plan(bundle: Path, *models: Path) -> None:
    """Stores the estimate of ``specexport plan`` for a bundle's models, for the check of their memory."""
    from specexport.contract.methods import read_method
    from specexport.contract.reading import read_manifest
    from specexport.exporter.plan import DEVICES, plan

    manifest = read_manifest(bundle)
    target, draft = map(str, models)
    estimate = plan(
        target,
        read_method({"method": "draft_model", "model": draft}),
        next(iter(DEVICES.values())),
        precision=manifest.target.precision.weights,
        context=manifest.max_seq_len,
        acceptance=0.7,
        backend="onnxruntime-cuda",
    )
    totals = {part: sum(getattr(model, part) for model in estimate.models) for part in ("weights", "cache", "scratch")}
    (bundle / PLAN).write_text(json.dumps(totals))


def _leave_weights_out(bundle: Path) -> None:
    """Describes large files of weights instead of packing them."""
    import onnx
    from onnx.external_data_helper import ExternalDataInfo, uses_external_data
    from onnx.helper import tensor_dtype_to_np_dtype

    statistics: dict[str, dict[int, dict[str, Any]]] = {}
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
                content = weights.read(min(info.length, _BLOCK))
            kind = tensor_dtype_to_np_dtype(tensor.data_type)
            if info.length < _VERBATIM:
                described["values"] = base64.b64encode(content).decode()
            elif kind in (np.float32, np.float16):
                sample = np.frombuffer(content, kind).astype(np.float32)
                described |= {"dtype": str(kind), "mean": float(sample.mean()), "std": float(sample.std())}
            described["shape"] = list(tensor.dims)
            statistics.setdefault(file, {})[described["offset"]] = described
    written = {
        file: {"nbytes": (bundle / file).stat().st_size, "tensors": list(tensors.values())}
        for file, tensors in statistics.items()
    }
    (bundle / WEIGHTS).write_text(json.dumps(written))
    for file in statistics:
        (bundle / file).unlink()


def _pack(built: Path, names: Sequence[str], out: Path) -> None:
    """Writes a compressed archive in parts; files with the same content are stored once."""
    for part in out.glob("part-*"):
        part.unlink()
    first: dict[str, str] = {}
    parts = _Parts(out)
    with tarfile.open(fileobj=parts, mode="w|gz") as archive:  # type: ignore[call-overload]
        for file in (path for name in names for path in sorted((built / name).rglob("*")) if path.is_file()):
            entry = archive.gettarinfo(file, file.relative_to(built).as_posix())
            same = first.setdefault(_sha256(file), entry.name)
            if same == entry.name:
                with file.open("rb") as content:
                    archive.addfile(entry, content)
            else:
                entry.type, entry.linkname, entry.size = tarfile.LNKTYPE, same, 0
                archive.addfile(entry)
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
    """A stream that writes files of at most :data:`PART_BYTES`."""

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
    """A stream that reads the parts in order."""

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
