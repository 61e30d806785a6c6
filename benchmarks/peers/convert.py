"""Turn a pair of checkpoints into what an engine reads, and keep it: each engine has its own converter and defaults."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

from benchmarks.peers.job import thread_environment
from benchmarks.peers.setup import python_of

ROLES = ("target", "draft")


def convert(engine: str, precision: str, pair: dict[str, Path], cache: Path, threads: int) -> dict[str, Path]:
    """The converted folders of a pair, {"target": ..., "draft": ...}; made if the cache does not have them yet."""
    if engine == "transformers":
        return pair
    done = cache / f"{engine}-{precision}-{_digest(engine, pair)}"
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


def _command(engine: str, precision: str, source: Path, out: Path) -> list[str]:
    python = python_of(engine)
    if engine == "ort":
        builder = [str(python), "-m", "onnxruntime_genai.models.builder"]
        return [*builder, "-i", str(source), "-o", str(out), "-p", precision, "-e", "cpu", "-c", str(out / "cache")]
    exporter = [str(python.with_name("optimum-cli")), "export", "openvino", "--task", "text-generation-with-past"]
    return [*exporter, "-m", str(source), "--weight-format", precision, str(out)]


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


def _digest(engine: str, pair: dict[str, Path]) -> str:
    """A name for what the conversion depends on: the converter's version and the two checkpoints."""
    digest = hashlib.sha256(Path(__file__).with_name(f"requirements-{engine}.txt").read_bytes())
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
