"""A method of somebody else's: a package of one module, installed into a fresh environment, works everywhere."""

import json
import os
import re
import shutil
import site
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.checkpoints import make_checkpoint

pytestmark = [pytest.mark.exporter, pytest.mark.slow]
PACKAGE = Path(__file__).parent / "sample_method"
PROMPT = "the the the the the"

Command = Callable[..., str]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment with the sample package, which finds this one's libraries."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    result = folder / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    expected_own = Path(subprocess.run([result, "-c", ask], check=True, capture_output=True, text=True).stdout.strip())
    packages = [path for path in site.getsitepackages() if Path(path).is_dir()]
    (expected_own / "libraries.pth").write_text(
        "".join(f"import site; site.addsitedir({path!r})\n" for path in packages)
    )
    copy = shutil.copytree(PACKAGE, folder / "package")  # pip leaves its build beside the sources
    subprocess.run([result, "-m", "pip", "install", "--quiet", "--no-deps", str(copy)], check=True)
    return result


@pytest.fixture(scope="module")
def command(python: Path) -> Command:
    def run(*words: object) -> str:
        line = [python, "-m", "specexport", *map(str, words)]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "target", "llama", calm=True)


@pytest.fixture(scope="module")
def built(command: Command, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "repeat"
    command(
        "build", "--target", checkpoint, "--method", "repeat:at_least=3,num_speculative_tokens=4", "-o", folder,
        "--max-seq-len", 128, "--max-batch-size", 1,
    )  # fmt: skip
    return folder


def run(command: Command, bundle: Path, *words: object) -> dict[str, Any]:
    # Whatever a step costs on a busy machine, it is to draft.
    base = ("run", bundle, "-p", PROMPT, "-n", 40, "--temperature", 0, "--ignore-eos", "--json", "--no-calibrate")
    result: dict[str, Any] = json.loads(command(*base, *words))
    return result


def test_it_builds_and_runs(command, built):
    manifest = json.loads((built / "specexport.json").read_text())
    (entry,) = manifest["methods"]
    assert (entry["method"], entry["at_least"]) == ("repeat", 3)
    assert [len(tree) for tree in entry["trees"]] == [4]
    fast, plain = run(command, built), run(command, built, "--no-speculation")
    assert fast["token_ids"] == plain["token_ids"]
    assert fast["stats"]["drafted"] > 0 and plain["stats"]["drafted"] == 0
    assert "repeat" in command("inspect", built)


def test_its_flag_asks_for_it(command, checkpoint, tmp_path):
    folder = tmp_path / "bundle"
    command("build", "--target", checkpoint, "--repeat", "-o", folder, "--max-seq-len", 64, "--max-batch-size", 1)
    (entry,) = json.loads((folder / "specexport.json").read_text())["methods"]
    assert (entry["method"], entry["at_least"]) == ("repeat", 2)


def test_it_works_in_a_bundle_built_before_it_was_there(command, checkpoint, tmp_path):
    from specexport.exporter.build import build
    from specexport.exporter.options import BuildOptions

    folder = build(BuildOptions(target=str(checkpoint), output=tmp_path / "bundle", max_seq_len=128, max_batch_size=1))
    fast, plain = run(command, folder, "--method", "repeat"), run(command, folder, "--no-speculation")
    assert fast["token_ids"] == plain["token_ids"]
    assert fast["stats"]["drafted"] > 0


def test_it_is_verified_and_benched(command, built):
    report = json.loads(command("verify", built, "-n", 16, "--json"))
    assert report["passed"], report
    size = ("--prompts", 1, "--prompt-tokens", 32, "-n", 16)
    rows = json.loads(command("bench", built, "--methods", "all", *size, "--json"))["rows"]
    assert {"repeat", "ngram", "suffix"} <= {row["method"] for row in rows}


def test_it_is_served(python, built):
    server = subprocess.Popen(
        [python, "-m", "specexport", "serve", str(built), "--port", "0", "--no-calibrate"],
        stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        url = next(match[0] for line in server.stderr if (match := re.search(r"http://127\.0\.0\.1:\d+", line)))
        client = OpenAI(base_url=f"{url}/v1", api_key="none")
        texts = [
            client.completions.create(
                model=client.models.list().data[0].id,
                prompt=PROMPT,
                max_tokens=16,
                temperature=0,
                extra_body={"speculative": choice, "include_speculation": True},
            )
            for choice in ({"method": "repeat"}, {"num_speculative_tokens": 0})
        ]
    finally:
        server.terminate()
        server.wait(30)
    fast, plain = texts
    assert fast.choices[0].text == plain.choices[0].text
    usage = [text.usage.model_dump() for text in texts if text.usage is not None]
    assert usage[0] != usage[1]  # what speculation did is told


def test_the_tutorial_is_this_package():
    text = (PACKAGE.parent.parent / "docs" / "methods.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:python|toml)\n(.*?)```", text, flags=re.DOTALL)
    for name in ("specexport_repeat.py", "pyproject.toml"):
        assert (PACKAGE / name).read_text(encoding="utf-8") in blocks, name
