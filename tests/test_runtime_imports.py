"""The runtime is lean: it runs where none of what exports models is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

FORBIDDEN = ("torch", "transformers", "onnx", "onnxscript", "onnx_ir", "scipy", "safetensors", "huggingface_hub")

PROGRAM = """
import json, sys
FORBIDDEN = set(sys.argv[2:])
def found():
    return sorted(FORBIDDEN & {name.partition(".")[0] for name in sys.modules})

before = found()
import specexport
import specexport.runtime
imported = found()
engine = specexport.runtime.Engine.load(sys.argv[1], threads=1)
params = specexport.runtime.SamplingParams(max_tokens=9, seed=1, ignore_eos=True)
tokens = len(engine.generate([3, 4], params).token_ids)
exported = sorted(name for name in sys.modules if name.startswith(("specexport.exporter", "specexport.graphs")))
print(json.dumps([before, imported, found(), exported, tokens]))
"""


def run(program: str, *arguments: str) -> str:
    """What a program prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_generating_loads_nothing_the_exporter_needs(bundle: Callable[[str], Path]) -> None:
    out = run(PROGRAM, str(bundle("dice-near")), *FORBIDDEN)
    assert json.loads(out.splitlines()[-1]) == [[], [], [], [], 9]


def test_the_backend_is_loaded_with_the_first_bundle() -> None:
    """Importing is quick, and a missing backend is reported by ``load``, not by the import."""
    assert run("import sys, specexport.runtime; print('onnxruntime' in sys.modules)").strip() == "False"


BLOCKED = """
import sys
from importlib.abc import MetaPathFinder

class Blocked(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "onnxscript", "safetensors"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
from pathlib import Path

import pytest
from specexport.exporter.engines.bundle import compile_bundle
from specexport.exporter.engines.options import CompileOptions
report = compile_bundle(Path(sys.argv[1]), CompileOptions("onnxruntime-cuda", compute="fp16"))
print(len(report.engines))
"""


@pytest.mark.exporter
def test_devices_compile_engines_without_torch(bundle: Callable[[str], Path], tmp_path: Path) -> None:
    """With the [compile] extra alone; the step program's graphs are in the bundle."""
    from tests.step_program import for_onnxruntime

    folder = for_onnxruntime(shutil.copytree(bundle("dice-near"), tmp_path / "bundle"))
    assert int(run(BLOCKED, str(folder))) >= 2
