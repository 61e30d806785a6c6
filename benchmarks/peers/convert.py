"""Convert a pair of checkpoints with an engine's own converter, and cache the result.

Quantized weights are symmetric everywhere. Groups have 128 weights, a little faster than the converters' defaults,
except OpenVINO's int8, which is by channel, and blocks of 32 for llama.cpp (Q8_0 and, the head too, Q4_0) and
specexport, their default. Each engine decides on the precision of activations.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

from benchmarks.peers.job import thread_environment
from benchmarks.peers.setup import LLAMA_SOURCE, llama_tool, python_of

ROLES = ("target", "draft")
GROUP, OUR_GROUP = "128", 32
OPTIONS: dict[tuple[str, str], list[str]] = {
    ("ort", "int8"): ["--extra_options", f"block_size={GROUP}", "is_symmetric=true"],
    ("ort", "int4"): ["--extra_options", f"block_size={GROUP}", "is_symmetric=true"],
    ("openvino", "int8"): ["--sym"],
    ("openvino", "int4"): ["--sym", "--group-size", GROUP, "--group-size-fallback", "adjust"],
    ("llamacpp", "fp32"): ["F32"],
    ("llamacpp", "int8"): ["Q8_0"],
    ("llamacpp", "int4"): ["Q4_0"],
}
# llama.cpp's converter refuses tokenizers with an unknown hash. Prompts are ids, so the tokenizer does not matter.
ANY_TOKENIZER = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda *_: "gpt-2"
sys.argv = [sys.argv[1] + "/convert_hf_to_gguf.py", *sys.argv[2:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def convert(
    engine: str, precision: str, pair: dict[str, Path], cache: Path, threads: int, context: int = 512
) -> dict[str, Path]:
    """The converted folders of a pair, {"target": ..., "draft": ...}, converted if not cached.

    Our bundle is for ``context`` tokens; the others' conversions have no such limit.
    """
    if engine == "transformers":
        return pair
    if engine == "specexport":
        return dict.fromkeys(ROLES, _bundle(precision, pair, cache, context))
    done = cache / f"{engine}-{precision}-{_digest(engine, precision, pair)}"
    if not done.is_dir():
        partial = done.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        for role in ROLES:
            out = partial.resolve() / role
            out.mkdir(parents=True)
            for command in _commands(engine, precision, pair[role].resolve(), out):
                _run(command, threads)
        if engine == "ort":
            _finish_ort(partial)
        partial.rename(done)
    return {role: done.resolve() / role for role in ROLES}


def _bundle(precision: str, pair: dict[str, Path], cache: Path, context: int) -> Path:
    """Our own form of the pair, the draft in the target's precision as the others' are."""
    from benchmarks.pair import bundle

    sizes = tuple(range(1, 9))
    work = cache.parent / "bench"
    return bundle(pair["target"], pair["draft"], work, precision, sizes, context, OUR_GROUP, precision)


def _commands(engine: str, precision: str, source: Path, out: Path) -> list[list[str]]:
    python = python_of(engine)
    options = OPTIONS.get((engine, precision), [])
    if engine == "ort":
        builder = [str(python), "-m", "onnxruntime_genai.models.builder", "-e", "cpu", "-c", str(out / "cache")]
        return [[*builder, "-i", str(source), "-o", str(out), "-p", precision, *options]]
    if engine == "llamacpp":
        full, model = str(out / "full.gguf"), str(out / "model.gguf")
        converter = [str(python), "-c", ANY_TOKENIZER, str(LLAMA_SOURCE), "--outtype", "f32"]
        return [
            [*converter, "--outfile", full, str(source)],
            [llama_tool("llama-quantize"), "--pure", full, model, *options],
            ["rm", full],
        ]
    exporter = [str(python.with_name("optimum-cli")), "export", "openvino", "--task", "text-generation-with-past"]
    return [[*exporter, "-m", str(source), "--weight-format", precision, *options, str(out)]]


def _finish_ort(folder: Path) -> None:
    """Remove the end-of-text tokens, and describe the pair for speculation in the folder above the two models."""
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
    """A hash of the converter, its options and the two checkpoints."""
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
    """The end of a process's output, with its error."""
    return " | ".join(line.strip() for line in text.strip().splitlines()[-number:])
