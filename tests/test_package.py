"""What people install: sdist and wheel, built from the tracked files and used where there is no repository."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from specexport import __version__
from specexport.cli import main
from specexport.version import commit
from tests.serving import free_port
from tests.threads import wait_until

ROOT = Path(__file__).parent.parent
NAME = f"specexport-{__version__}"
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
LIBRARY = "specexport/kernels/libspecexport.so"
COMPILER = any(shutil.which(name) for name in ("c++", "g++", "clang++"))
IMPORTS = """
import importlib, json, pkgutil, sys
import specexport
assert specexport.__file__.startswith(sys.prefix), specexport.__file__
names = [one.name for one in pkgutil.walk_packages(specexport.__path__, "specexport.")]
for name in names:
    if name != "specexport.__main__":
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:  # an extra that is not installed here
            assert not str(error.name).startswith("specexport"), error
print(len(names))
"""


KERNELS = "from specexport.runtime.backends.onnxruntime.kernels import kernels; print(kernels().described)"
LEAN = """
import sys
for name in ("huggingface_hub", "hf_xet", "pygments", "markdown_it"):
    sys.modules[name] = None  # importing it fails
from specexport.cli import main
sys.exit(main(sys.argv[1:]))
"""
"""What dependencies depend on, nearly half of what pip adds to onnxruntime, is not needed to run bundles."""


def environment() -> dict[str, str]:
    """One in which nothing points to the repository."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "GIT_"))}


def run(*words: str | Path, cwd: Path, **more: str) -> str:
    """What a program prints, in a folder and such an environment."""
    done = subprocess.run(words, cwd=cwd, env=environment() | more, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def git(*words: str, cwd: Path) -> str:
    return run("git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words, cwd=cwd).strip()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone in which the tracked files are as they are here, committed, and something lies that is not tracked."""
    pytest.importorskip("setuptools", minversion="77")
    if not (ROOT / ".git").exists():
        pytest.skip("what is tracked is known in a clone only")
    folder = tmp_path_factory.mktemp("clone") / "specexport"
    for name in git("ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0"):
        if name and os.path.lexists(ROOT / name) and not name.startswith("examples/models/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    git("init", "-q", cwd=folder)
    git("add", "-A", cwd=folder)
    git("commit", "-qm", "all", cwd=folder)
    (folder / "specexport" / "__pycache__").mkdir()
    (folder / "specexport" / "__pycache__" / "cli.cpython-311.pyc").write_bytes(b"stale")
    return folder


def build(source: Path, output: Path, **more: str) -> tuple[Path, Path]:
    """The sdist and the wheel of a folder, built without what was built in it before, its compiled files aside."""
    for old in source.glob("build/[!k]*"):
        shutil.rmtree(old)
    shutil.rmtree(source / "specexport.egg-info", ignore_errors=True)
    output.mkdir()
    for hook in ("build_sdist", "build_wheel"):
        settings = {"SOURCE_DATE_EPOCH": "1700000000", "CXXFLAGS": "-O0", **more}
        run(sys.executable, "-c", BUILD, hook, output, cwd=source, **settings)
    (wheel,) = output.glob("*.whl")
    return output / f"{NAME}.tar.gz", wheel


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(source, tmp_path_factory.mktemp("built") / "dist")


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` of a new virtual environment with the wheel, which sees the dependencies installed for the tests."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet")
    run(*pip, "--no-deps", "--no-index", built[1], cwd=folder.parent)
    (packages,) = folder.glob("lib/python*/site-packages")
    seen = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "dependencies.pth").write_text("\n".join(seen))  # whose own .pth files, the clone's, are not read
    return folder / "bin"


@pytest.mark.slow
def test_package_contents(source, built):
    sdist, wheel = built
    tracked = set(git("ls-files", cwd=source).split("\n"))
    links = [name for name in tracked if (source / name).is_symlink()]
    for link in links:
        neighbour = Path(link).name
        tracked |= {f"specexport/{name}" for name in tracked if name.startswith(f"{neighbour}/")}
    inside = {name for name in tracked if name.startswith("specexport/")} - set(links)
    kernels = {name for name in inside if name.startswith("specexport/kernels/")}
    code = {name for name in inside - kernels if name.endswith(".py")}
    folders = (
        *("specexport/commands/assets/", "specexport/server/assets/"),
        *("specexport/exporter/texts/", "specexport/contract/trees.json"),
    )
    assets = {name for name in inside if name.startswith(folders)}
    assert {"specexport/server/assets/index.html", "specexport/exporter/texts/calibration.txt"} <= assets
    assert {"specexport/runtime/engine.py", "specexport/exporter/build.py"} <= code
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        about = f"{NAME}.dist-info"
        assert f"{about}/licenses/LICENSE" in names
        assert names - {name for name in names if name.startswith(f"{about}/")} == (
            code | assets | {"specexport/py.typed", "specexport/commit.txt"} | ({LIBRARY} if COMPILER else set())
        )
    with tarfile.open(sdist) as archive:
        held = {name.removeprefix(f"{NAME}/") for name in archive.getnames()}
        files = {member.name.removeprefix(f"{NAME}/") for member in archive if member.isfile()}
    extra = {"PKG-INFO", "setup.cfg", "specexport/commit.txt"}
    assert {name for name in files if not name.startswith("specexport.egg-info/")} <= tracked | extra
    kept = {"LICENSE", "README.md", "pyproject.toml", "setup.py", "specexport/py.typed"}
    assert kept | code | assets | kernels <= held
    assert not {name.partition("/")[0] for name in held} & {"tests", "benchmarks", "scripts", "examples", ".ci"}


@pytest.mark.slow
def test_building_again_gives_the_same_bytes(source, built, tmp_path):
    for path in source.rglob("*.py"):
        os.utime(path, (1e9, 1e9))  # as another clone has other times
    again = build(source, tmp_path / "again")
    with tarfile.open(built[0]) as archive:
        archive.extractall(tmp_path, filter="data")
    from_sdist = build(tmp_path / NAME, tmp_path / "from-sdist")
    assert again[0].read_bytes() == built[0].read_bytes()
    assert again[1].read_bytes() == built[1].read_bytes() == from_sdist[1].read_bytes()


@pytest.mark.slow
def test_a_wheel_is_for_one_platform_if_the_kernels_are_in_it(source, built, installed, tmp_path):
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert built[1].name == f"{NAME}-py3-none-{platform if COMPILER else 'any'}.whl"
    output = run(installed / "python", "-c", KERNELS, cwd=tmp_path)
    assert output.startswith("specexport's for " if COMPILER else "onnxruntime's alone: specexport's are not compiled")
    plain = build(source, tmp_path / "without", CXX="no-such-compiler")[1]
    assert plain.name == f"{NAME}-py3-none-any.whl"
    with zipfile.ZipFile(built[1]) as ours, zipfile.ZipFile(plain) as other:
        assert set(ours.namelist()) - set(other.namelist()) == ({LIBRARY} if COMPILER else set())
        assert not set(other.namelist()) - set(ours.namelist())


@pytest.mark.slow
def test_it_runs_where_there_is_no_repository(source, installed, bundle, tmp_path):
    folder = tmp_path / "bundle"
    shutil.copytree(bundle("llama-near"), folder)
    head = git("rev-parse", "--short=12", "HEAD", cwd=source)
    assert run(installed / "specexport", "--version", cwd=tmp_path) == f"specexport {__version__} ({head})\n"
    words = ("run", folder, "--prompt", "one two three", "-n", "8", "--temperature", "0", "--threads", "1")
    words = (*words, "--no-calibrate")
    output = run(installed / "specexport", *words, cwd=tmp_path)
    assert output == run(sys.executable, "-m", "specexport", *words, cwd=tmp_path)
    assert output.strip()
    assert run(installed / "python", "-c", LEAN, *words, cwd=tmp_path) == output
    assert "llama" in run(installed / "python", "-c", LEAN, "inspect", folder, cwd=tmp_path)
    assert int(run(installed / "python", "-c", IMPORTS, cwd=tmp_path)) > 100
    page = "from specexport.server import app; print(app.__file__)"
    home = Path(run(installed / "python", "-c", page, cwd=tmp_path).strip()).parent
    assert (home / "assets" / "index.html").read_bytes() == (ROOT / "specexport/server/assets/index.html").read_bytes()


USER = """
import numpy as np

from specexport import LLM, AsyncEngine, QueueFullError, RequestOutput, SamplingParams
from specexport.runtime import Chunk, Engine

llm = LLM(model="m", speculative_config={"method": "ngram"}, precision="int8")
params = SamplingParams(stop=["x"], stop_token_ids=[5], logit_bias={3: 1}, json_schema={"type": "object"})
outputs: list[RequestOutput] = llm.generate(["one", "two"], params.replace(stop="y"), speculative="suffix")
llm.generate(np.zeros((2, 3), np.int64), params)
llm.chat([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], tools=[{}])

async def texts(engine: AsyncEngine) -> list[str]:
    try:
        return [part.text async for part in engine.generate("one", params, speculative={"method": "ngram"}, timeout=3)]
    except QueueFullError as error:
        return [str(error.retry_after)]

def chunks(engine: Engine) -> list[Chunk]:
    return list(engine.stream([5, 6], engine.params(max_tokens=4)))

LLM("m", precision="int9")  # type: ignore[arg-type]
LLM("m", unknown=1)  # type: ignore[call-arg]
"""
"""What a user of a type checker writes."""


@pytest.mark.slow
def test_users_may_check_types(installed, tmp_path):
    (tmp_path / "user.py").write_text(USER)
    words = ("--strict", "--follow-imports=silent", "--python-executable", installed / "python")
    output = run(sys.executable, "-m", "mypy", *words, "user.py", cwd=tmp_path)
    assert output == "Success: no issues found in 1 source file\n"


@pytest.mark.slow
def test_the_container_files_command_serves(installed, bundle, tmp_path):
    """No container is built here: these are the words that it runs, with other folders and another port."""
    shutil.copytree(bundle("llama-near"), tmp_path / "bundle")
    places = {"python": str(installed / "python"), "specexport": str(installed / "specexport"), "/bundle": "bundle"}
    text = re.findall(
        r"^(?:HEALTHCHECK .*)?(CMD|ENTRYPOINT) (\[.*\])$", (ROOT / "Containerfile").read_text(), re.MULTILINE
    )
    assert [name for name, _ in text] == ["CMD", "ENTRYPOINT", "CMD"]
    port = str(free_port())
    healthy, entry, default = (
        [places.get(word, word).replace("8000", port) for word in json.loads(words)] for _, words in text
    )

    def health() -> int:
        return subprocess.run(healthy, env=environment(), stderr=subprocess.DEVNULL, check=False).returncode

    assert health() == 1
    home = environment() | {"HOME": str(tmp_path)}
    with subprocess.Popen([*entry, *default], cwd=tmp_path, env=home) as process:
        try:
            wait_until(lambda: health() == 0 or process.poll() is not None, "it is not healthy")
            assert process.poll() is None
        finally:
            process.terminate()
        assert process.wait(30) == 0


def test_the_version_says_the_commit(capsys, monkeypatch):
    current = commit()
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"specexport {__version__}" + (f" ({current})\n" if current else "\n")
    if (ROOT / ".git").exists():
        assert git("rev-parse", "HEAD", cwd=ROOT).startswith(current.removesuffix("-dirty"))
    monkeypatch.setenv("PATH", "")  # without git
    assert commit() is None


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "tcsh"])
def test_completion(shell, capsys, tmp_path):
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit) as stopped:
        main(["--print-completion", shell])
    assert stopped.value.code == 0
    script = capsys.readouterr().out
    assert "specexport" in script
    if shutil.which(shell) is not None:
        (tmp_path / "script").write_text(script)
        run(shell, "-n", tmp_path / "script", cwd=tmp_path)
    if shell == "bash":
        (tmp_path / "bundle").mkdir()
        (tmp_path / "builder.txt").touch()
        for line, answers in (("tune tree --max", ["--max-nodes", "--max-tokens"]), ("run b", ["bundle"])):
            words = f"COMP_WORDS=(specexport {line}); COMP_CWORD={len(line.split())}"
            ask = f'source ./script; {words}; _shtab_specexport; echo "${{COMPREPLY[@]}}"'
            assert run("bash", "-c", ask, cwd=tmp_path).split() == answers
