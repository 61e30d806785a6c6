"""Turn a pair of checkpoints into what an engine reads, by the engine's own converter, and keep it.

Quantized weights are symmetric in both engines and, except for OpenVINO's int8, in groups of 128: a little faster than
the converters' defaults. How activations are handled is left to the engine.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

from benchmarks.peers.job import thread_environment
from benchmarks.peers.setup import python_of

ROLES = ("target", "draft")
GROUP = "128"
OPTIONS: dict[tuple[str, str], list[str]] = {
    ("ort", "int8"): ["--extra_options", f"block_size={GROUP}", "is_symmetric=true"],
    ("ort", "int4"): ["--extra_options", f"block_size={GROUP}", "is_symmetric=true"],
    ("openvino", "int8"): ["--sym"],
    ("openvino", "int4"): ["--sym", "--group-size", GROUP, "--group-size-fallback", "adjust"],
}


def convert(engine: str, precision: str, pair: dict[str, Path], cache: Path, threads: int) -> dict[str, Path]:
    """The converted folders of a pair, {"target": ..., "draft": ...}; made if the cache does not have them yet."""
    if engine == "transformers":
        return pair
    if engine == "specexport":
        return dict.fromkeys(ROLES, _bundle(precision, pair, cache))
    done = cache / f"{engine}-{precision}-{_digest(engine, precision, pair)}"
    if not done.is_dir():
        partial = done.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for role in ROLES:
            _run(_command(engine, precision, pair[role].resolve(), partial.resolve() / role), threads)
        if engine == "ort":
            _finish_ort(partial)
        partial.rename(done)
    return {role: done.resolve() / role for role in ROLES}


def _bundle(precision: str, pair: dict[str, Path], cache: Path) -> Path:
    """Our own form of the pair, in groups of the same size; it runs at every draft length measured here."""
    from benchmarks.pair import bundle

    return bundle(pair["target"], pair["draft"], cache.parent / "bench", precision, tuple(range(1, 9)), 512, int(GROUP))


def _command(engine: str, precision: str, source: Path, out: Path) -> list[str]:
    python = python_of(engine)
    options = OPTIONS.get((engine, precision), [])
    if engine == "ort":
        builder = [str(python), "-m", "onnxruntime_genai.models.builder", "-e", "cpu", "-c", str(out / "cache")]
        return [*builder, "-i", str(source), "-o", str(out), "-p", precision, *options]
    exporter = [str(python.with_name("optimum-cli")), "export", "openvino", "--task", "text-generation-with-past"]
    return [*exporter, "-m", str(source), "--weight-format", precision, *options, str(out)]


def _finish_ort(folder: Path) -> None:
    """Take the end-of-text tokens away and describe the pair for speculation, in the folder above the two models."""
    configs = {}
    for role in ROLES:
        file = folder / role / "genai_config.json"
        configs[role] = json.loads(file.read_text(encoding="utf-8"))
        configs[role]["model"]["eos_token_id"] = []
        file.write_text(json.dumps(configs[role], indent=2), encoding="utf-8")
    for role in ROLES:
        decoder = configs[role]["model"]["decoder"]
        decoder["filename"] = f"{role}/{decoder['filename']}"
    pair = configs["target"]
    pair["model"]["draft"] = configs["draft"]["model"]["decoder"]
    (folder / "genai_config.json").write_text(json.dumps(pair, indent=2), encoding="utf-8")


def _digest(engine: str, precision: str, pair: dict[str, Path]) -> str:
    """A name for what the conversion depends on: the converter, its options and the two checkpoints."""
    requirements = Path(__file__).with_name(f"requirements-{engine}.txt")
    digest = hashlib.sha256(requirements.read_bytes() if requirements.is_file() else b"")
    digest.update(json.dumps(OPTIONS.get((engine, precision))).encode())
    for role in ROLES:
        for name in ("config.json", "model.safetensors"):
            with (pair[role] / name).open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
    return digest.hexdigest()[:12]


def _run(command: list[str], threads: int) -> None:
    result = subprocess.run(command, env=thread_environment(threads), capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed: {last_lines(result.stderr or result.stdout)}")


def last_lines(text: str, number: int = 3) -> str:
    """The end of a process's output, where it says what went wrong."""
    return " | ".join(line.strip() for line in text.strip().splitlines()[-number:])
