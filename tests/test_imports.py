"""Imports: the runtime needs nothing of the exporter, and modules that tests never load name what exists."""

import ast
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import specexport
from tests.threads import python

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
specexport.LLM
print(json.dumps([before, imported, found(), exported, tokens]))
"""


def test_generating_loads_nothing_the_exporter_needs(bundle):
    out = python(PROGRAM, str(bundle("dice-near")), *FORBIDDEN)
    assert json.loads(out.splitlines()[-1]) == [[], [], [], [], 9]


def test_the_backend_is_loaded_with_the_first_bundle():
    """Importing is quick, and a missing backend is reported by ``load``, not by the import."""
    program = "import sys, specexport.runtime; specexport.LLM; print('onnxruntime' in sys.modules)"
    assert python(program).strip() == "False"
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = specexport.Nothing


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
from specexport.exporter.options import CompileOptions
report = compile_bundle(Path(sys.argv[1]), CompileOptions("onnxruntime-cuda", compute="fp16"))
print(len(report.engines))
"""


@pytest.mark.exporter
def test_devices_compile_engines_without_torch(bundle, tmp_path):
    """With the [compile] extra alone; the step program's graphs are in the bundle."""
    from tests.step_program import for_onnxruntime

    folder = for_onnxruntime(shutil.copytree(bundle("dice-near"), tmp_path / "bundle"))
    assert int(python(BLOCKED, str(folder))) >= 2


# --- modules that tests never load, as those for GPU hosts ------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[1]
OURS = ("specexport", "benchmarks", "scripts", "tests")
FOLDERS = (*OURS, *(path.name for path in (ROOT / "specexport").iterdir() if path.is_symlink()))


def _file(module: str) -> Path | None:
    path = ROOT / module.replace(".", "/")
    candidates = (path.with_suffix(".py"), path / "__init__.py", path)
    return next((candidate for candidate in candidates if candidate.exists()), None)


def _unresolved(source: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] not in OURS:
            continue
        module = str(node.module)
        file = _file(module)
        text = file.read_text(encoding="utf-8") if file is not None and file.is_file() else ""
        for alias in node.names:
            if not re.search(rf"\b{alias.name}\b", text) and _file(f"{module}.{alias.name}") is None:
                yield f"{source.relative_to(ROOT)}:{node.lineno}: {module} has no {alias.name}"


def test_imports_resolve():
    sources = [sorted((ROOT / folder).rglob("*.py")) for folder in FOLDERS]
    assert all(sources), "a folder without sources"
    assert [line for folder in sources for source in folder for line in _unresolved(source)] == []
