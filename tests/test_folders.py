"""Folders that are whole or not there: full disks, two writers, and processes that are killed at any moment."""

import contextlib
import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specexport.cli import main
from specexport.contract import folders
from specexport.contract.errors import BuildError
from specexport.contract.folders import describe_error, expanded, write_lock, writing, written_beside
from specexport.contract.manifest import MANIFEST_NAME
from specexport.contract.reading import changing, exchange_manifest, read_manifest
from specexport.runtime.bundle import Bundle
from specexport.training.loop import save_tensors
from tests.checkpoints import VOCAB, make_checkpoint
from tests.make_bundles import DICE

pytestmark = pytest.mark.exporter


def write(output: Path, text: str, size: int = 1, **options: Any) -> None:
    with written_beside(output, **options) as folder:
        for name in ("a", "b"):
            (folder / name).write_text(text * size, encoding="ascii")


def read(output: Path) -> tuple[str, ...]:
    return tuple(path.read_text(encoding="ascii") for path in sorted(output.iterdir()))


@contextlib.contextmanager
def file_sizes_at_most(count: int) -> Iterator[None]:
    """No file may become larger, as under ``ulimit -f``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A file system of its own; where the system allows none, the reason is said."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=False, capture_output=True
    )
    if done.returncode:
        pytest.skip(f"no file system may be mounted here: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def failure(cli: Callable[..., Any]) -> Callable[..., str]:
    """Gives the one line of an explained failure of the command line."""

    def run(*words: object) -> str:
        (line,) = [line for line in cli(*words, status=1).err.splitlines() if line.startswith("specexport: error: ")]
        return line

    return run


# --- what the system refuses ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "model", "llama", **{**DICE, "vocab_size": VOCAB})


def built(checkpoint: Path, output: Path, *more: str) -> list[str]:
    words = ["build", "--target", str(checkpoint), "--max-seq-len", "48", "--max-batch-size", "1", "-o", str(output)]
    return [*words, *more]


def test_the_home_folder_of_an_unknown_user_is_named():
    with pytest.raises(BuildError, match=r"^~nobody-here/x: no home folder is known, as there is no such user; give"):
        expanded("~nobody-here/x")


def test_a_build_that_the_disk_has_no_room_for_leaves_nothing(checkpoint, tmp_path, cli, failure):
    cli(*built(checkpoint, tmp_path / "whole"))
    sizes = {file.stat().st_size: file.name for file in (tmp_path / "whole").rglob("*") if file.is_file()}
    shutil.rmtree(tmp_path / "whole")
    for size in sorted(sizes)[2:]:  # so that each kind of file is the first that is too large
        with file_sizes_at_most(size - 1):
            line = failure(*built(checkpoint, tmp_path / "new" / "bundle"))
        assert "File too large; raise the limit on the size of files (ulimit -f)" in line
        assert str(tmp_path / "new") in line
        assert list(tmp_path.iterdir()) == []


def test_a_full_and_a_read_only_file_system_are_named(checkpoint, tmp_path, failure):
    disk = tmp_path / "disk"
    with mounted(disk, "size=64k"):
        line = failure(*built(checkpoint, disk / "bundle"))
        assert "No space left on device; free space there, or write elsewhere" in line and str(disk) in line
        assert list(disk.iterdir()) == []
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        line = failure(*built(checkpoint, disk / "new" / "bundle"))
        assert "Read-only file system; choose a folder that can be written" in line and str(disk) in line


@pytest.mark.parametrize("place", ["file/bundle", "file/new/bundle"])
def test_a_place_below_a_file_is_named(checkpoint, tmp_path, failure, place):
    (tmp_path / "file").touch()
    line = failure(*built(checkpoint, tmp_path / place))
    assert str(tmp_path / "file") in line and line.endswith("choose a place whose parents are folders")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_in_place_changes_do_not_leak(bundle, tmp_path):
    copy = shutil.copytree(bundle("dice-near"), tmp_path / "bundle")
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    refused = pytest.raises(BuildError, match="too large; raise the limit")
    with file_sizes_at_most(1000), refused, changing(copy) as old:
        (copy / "target.new.onnx").write_bytes(b"graph")
        exchange_manifest(copy, old)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("words", [["inspect"], ["--help"], ["run", "--help"], ["--version"]], ids=" ".join)
def test_a_full_standard_output_is_reported(bundle, words):
    with Path("/dev/full").open("w") as full:
        words = [sys.executable, "-m", "specexport", *words, *[str(bundle("dice-near"))][: words == ["inspect"]]]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, check=False, text=True, cwd="/")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("specexport: error: standard output: No space left on device")


def test_a_system_without_a_temporary_folder_is_told_how_to_name_one(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/none"])
    with pytest.raises(OSError) as caught:
        tempfile.mkdtemp()
    assert describe_error(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))) == "there is not enough memory"
    line = describe_error(caught.value)
    assert line == "No usable temporary directory found in ['/proc/none']; set TMPDIR to a folder that can be written"


def test_a_file_is_whole_or_as_it_was(tmp_path, cli, failure):
    picture, link = tmp_path / "tree.svg", tmp_path / "link.svg"
    words = ["draw", "mc_sim_7b_63", "-o", str(picture)]
    with file_sizes_at_most(1000):
        assert f"{picture}: File too large; raise the limit" in failure(*words)
        assert list(tmp_path.iterdir()) == []
        picture.write_text("old")
        picture.chmod(0o600)
        assert f"{picture}: File too large; raise the limit" in failure(*words)
        assert picture.read_text() == "old"
    link.symlink_to(picture)
    cli(*words[:-1], link)
    assert picture.read_text().startswith("<svg") and picture.stat().st_mode & 0o777 == 0o600
    assert sorted(tmp_path.iterdir()) == [link, picture] and link.is_symlink()


def test_a_link_keeps_pointing_to_the_bundle_that_is_replaced(checkpoint, tmp_path):
    folder, link = tmp_path / "versions" / "bundle", tmp_path / "current"
    assert main(built(checkpoint, folder)) == 0
    link.symlink_to(folder)
    before = folder.stat().st_ino
    assert main(built(checkpoint, link, "--overwrite")) == 0
    assert link.is_symlink() and folder.stat().st_ino != before
    assert list(folder.parent.iterdir()) == [folder]


def test_a_copy_that_the_disk_has_no_room_for_is_named_by_its_first_file(bundle, tmp_path, failure):
    with file_sizes_at_most(1000):
        line = failure("export", "triton", bundle("dice-near"), "-o", tmp_path / "triton")
    assert line.count("File too large") == 1 and line.endswith("(ulimit -f), or write elsewhere")
    assert list(tmp_path.iterdir()) == []


def test_library_errors_are_translated(tmp_path):
    import torch
    from safetensors.torch import save_file

    state = {"weight": torch.zeros(4096)}
    with file_sizes_at_most(4096):
        with pytest.raises(BuildError, match=r"out: File too large"), writing(tmp_path / "out"):
            save_file(state, tmp_path / "out")
        with pytest.raises(BuildError, match=r"out.*File too large"), writing(tmp_path / "out"):
            save_tensors(tmp_path / "out", state)
        assert list(tmp_path.iterdir()) == []


# --- two writers ------------------------------------------------------------------------------------------------------


def test_a_second_writer_is_refused_and_a_dead_one_holds_nothing(tmp_path):
    output = tmp_path / "out"
    program = f"""
import time
from pathlib import Path
from specexport.contract.folders import written_beside
with written_beside(Path({str(output)!r})) as folder:
    (folder / "a").write_text("half")
    print("begun", flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"begun\n"
        for overwrite in (False, True):
            with pytest.raises(BuildError, match=f"process {other.pid} is writing {output}; wait for it to end"):
                write(output, "mine", overwrite=overwrite)
        other.kill()
    write(output, "mine")
    assert read(output) == ("mine", "mine")
    assert list(tmp_path.iterdir()) == [output]


def test_an_output_that_came_meanwhile_is_not_replaced(tmp_path):
    output = tmp_path / "out"
    with pytest.raises(BuildError, match="somebody else wrote it meanwhile"), written_beside(output) as folder:
        (folder / "a").write_text("mine")
        output.mkdir()
        (output / "a").write_text("theirs")
    assert read(output) == ("theirs",)
    assert list(tmp_path.iterdir()) == [output]


def test_two_commands_that_build_to_one_place_make_one_bundle(checkpoint, tmp_path):
    command = [str(Path(sys.executable).parent / "specexport"), *built(checkpoint, tmp_path / "bundle")]
    both = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [process.communicate(timeout=300)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 1]
    (loser,) = (error for process, error in zip(both, errors, strict=True) if process.returncode)
    assert any(words in loser for words in ("is writing", "exists already", "wrote it meanwhile"))
    Bundle.open(tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == [tmp_path / "bundle"]


# --- killed at any moment ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exchanges", [True, False], ids=["one act", "two renames"])
def test_killed_writers_leave_whole_outputs_only(tmp_path, monkeypatch, exchanges):
    """Where the system cannot exchange folders, the next writer puts back what was there."""
    if not exchanges:
        monkeypatch.setattr(folders, "_exchange", lambda *_: False)
    output, draw = tmp_path / "out", random.Random(0)
    write(output, "0", 1000)
    for turn in range(1, 40):
        process = os.fork()
        if process == 0:
            while True:  # most of its time it replaces what is there
                write(output, str(turn % 10), 1000, overwrite=True)
        time.sleep(draw.uniform(0.0005, 0.02))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        if exchanges:
            assert len(set(read(output))) == 1 and len(read(output)[0]) == 1000
        with contextlib.suppress(LookupError), written_beside(output, overwrite=True):
            raise LookupError
        assert len(set(read(output))) == 1 and len(read(output)[0]) == 1000
        assert list(tmp_path.iterdir()) == [output]


def test_leftovers_of_killed_writes_are_removed(bundle, tmp_path):
    copy = shutil.copytree(bundle("dice-near"), tmp_path / "bundle")
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    process = os.fork()
    if process == 0:
        with changing(copy):
            for name in ("target.new.onnx", "target.new.engine", "target.new.bin", f"{MANIFEST_NAME}.part"):
                (copy / name).write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(process, 0)
    assert {path for path in tmp_path.rglob("*") if path.is_file()} != before
    Bundle.open(copy)
    (copy / "NOTES.txt").write_text("not ours")
    with changing(copy) as manifest, pytest.raises(BuildError, match=f"process {os.getpid()} is writing"):
        assert manifest == read_manifest(copy)
        with write_lock(copy):
            pass
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == before | {copy / "NOTES.txt"}
