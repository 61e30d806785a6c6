"""Without a home folder everything works, and nothing is remembered."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HOMELESS = """
import os, pwd, sys
for name in ("HOME", "XDG_CACHE_HOME", "SPECEXPORT_CACHE"):
    os.environ.pop(name, None)
def none(_):
    raise KeyError("getpwuid(): uid not found: 54321")
pwd.getpwuid = none
"""
"""As in a container whose user the system does not know."""
COMMAND = "from specexport.cli import main\nsys.exit(main(sys.argv[1:]))\n"
BUILT = """
import warnings
warnings.simplefilter("error")
from specexport import LLM
from specexport.contract.errors import BuildError
from specexport.contract.folders import temporary_folder
try:
    LLM(sys.argv[1])
except UserWarning as warning:
    print("warned", warning)
warnings.simplefilter("ignore")
for _ in range(2):
    with LLM(sys.argv[1], max_model_len=64, max_batch_size=1, speculative_config="ngram") as llm:
        (output,) = llm.generate("one two one two", use_tqdm=False)
        assert len(output.outputs[0].token_ids)
print("built", len(list((temporary_folder() / "bundles").glob("[!.]*"))), temporary_folder())
"""


def homeless(
    program: str, *words: object, cwd: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(cwd), **(env or {})}
    command = [sys.executable, "-c", (HOMELESS if env is None else "import sys\n") + program, *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "words",
    [
        ["run", "-p", "one two", "-n", "4"],
        ["bench", "--methods", "ngram", "--prompts", "1", "--prompt-tokens", "32", "-n", "4"],
        ["inspect"],
    ],
    ids=lambda words: words[0],
)
def test_commands_work(bundle, tmp_path, words):
    done = homeless(COMMAND, words[0], bundle("qwen3-lookup"), *words[1:], cwd=tmp_path)
    assert (done.returncode, done.stderr.count("Traceback"), "home" in done.stderr) == (0, 0, False), done.stderr
    assert list(tmp_path.iterdir()) == []  # nor a folder that is called ~


@pytest.mark.exporter
def test_a_model_is_built_for_as_long_as_the_process_lives(tmp_path):
    from tests.checkpoints import make_checkpoint

    model = make_checkpoint(tmp_path / "model", "llama", num_hidden_layers=1)
    (tmp_path / "here").mkdir()
    done = homeless(BUILT, model, cwd=tmp_path / "here")
    assert done.returncode == 0, done.stderr
    warned, built = done.stdout.splitlines()
    assert warned.startswith("warned there is no writable home folder: the bundle is deleted when this process")
    assert "set SPECEXPORT_CACHE to a folder to keep it" in warned
    assert built.split()[:2] == ["built", "1"]
    assert list((tmp_path / "here").iterdir()) == []
    # The same where there is a home folder that nobody can write.
    done = homeless(BUILT, model, cwd=tmp_path / "here", env={"HOME": "/proc/none", "SPECEXPORT_CACHE": ""})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("warned there is no writable home folder")


@pytest.mark.exporter
def test_build_works(tmp_path):
    from tests.checkpoints import make_checkpoint

    model = make_checkpoint(tmp_path / "model", "llama", num_hidden_layers=1)
    (tmp_path / "here").mkdir()
    done = homeless(COMMAND, "build", "--target", model, "--ngram", "-o", "out", cwd=tmp_path / "here")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["out"]


@pytest.mark.parametrize("words", [["run", "~/bundle", "-p", "x"], ["inspect", "~/bundle"], ["serve", "~/bundle"]])
def test_a_path_in_the_home_folder_is_explained(tmp_path, words):
    done = homeless(COMMAND, *words, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "~/bundle: " in done.stderr
