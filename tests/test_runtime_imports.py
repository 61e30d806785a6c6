"""The runtime is lean: it runs where none of what exports models is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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
