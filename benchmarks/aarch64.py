"""Runs the lean runtime on emulated 64-bit ARM processors, and compares its texts with those on x86.

Runs on Debian 12, x86-64, as any user, and installs nothing outside ``build/aarch64``: qemu's user-mode emulator and
Debian's Python for arm64 from apt, aarch64 wheels from pip, the one that ``make wheels`` built, and bundles built here.
It runs the kernels' tests, compares the greedy texts of all bundles token for token, and runs some of the tests that
need no exporter. If a text differs, it prints the margin of the chosen token over the next on both sides, in nats.

Exits with 1 if a test fails, the wheel's kernels are not used, or a text differs at a token that was not nearly tied.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

from scripts.wheels import compiler

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / "build" / "aarch64"
SYSTEM, SITE, BUNDLES, HOST = HOME / "root", HOME / "site", HOME / "bundles", HOME / "host"
TOOLS = ROOT / "build" / "wheels" / "tools" / "bin" / "python"
"""The Python in which ``make wheels`` has installed its compiler."""
PACKAGES = ("onnxruntime", "numpy", "msgspec", "tokenizers", "filelock", "jinja2", "tabulate", "tqdm")
TEST_PACKAGES = ("pytest", "hypothesis")
PROCESSORS = {"cortex-a76": "as Jetson Orin's: dot products of int8, fp16", "max": "all that qemu emulates"}
FEATURES = (
    {1: "asimd", 8: "atomics", 10: "asimdhp", 20: "asimddp", 22: "sve"},
    {1: "sve2", 13: "i8mm", 14: "bf16", 23: "sme"},
)
"""Linux's names of the bits in AT_HWCAP and AT_HWCAP2 by which kernels are chosen."""
TESTS = (
    "tests/test_tree.py",
    "tests/test_commit.py",
    "tests/test_exactness.py::test_texts_are_plain_decodings_bit_for_bit[llama-near-batch]",
    "tests/test_exactness.py::test_texts_are_plain_decodings_bit_for_bit[qwen3-medusa]",
    "tests/test_engine.py::test_a_seed_makes_the_text_reproducible",
    "tests/test_engine.py::test_a_prompt_may_be_text_or_its_tokens",
    "tests/test_engine.py::test_prompts_of_every_length_at_the_borders_of_prefill_chunks[llama-near-65]",
    "tests/test_engine.py::test_a_text_ends_with_the_context[True-llama-near]",
    "tests/test_engine.py::test_the_caches_grow_without_changing_the_text[llama-near]",
    "tests/test_engine.py::test_typical_acceptance_accepts_more_and_greedy_stays_exact",
    "tests/test_engine.py::test_a_stream_closed_by_another_thread_ends_and_frees_the_engine",
)
BUILT = (
    "llama-near",
    "llama-near-portable",
    "gpt2-tree",
    "qwen3-medusa",
    "llama-near-batch",
    "llama-near-batch-portable",
)
PRECISIONS: tuple[Literal["int8", "int4"], ...] = ("int8", "int4")
ROUNDING = 1e-3
"""Difference of log-probabilities below which tokens may swap, as kernels sum in different orders."""


class Text(NamedTuple):
    """A greedy text: its tokens, their log-probabilities, and their margins over the next most probable tokens."""

    tokens: list[int]
    logprobs: list[float]
    gaps: list[float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``python -m benchmarks aarch64``."""
    parser.add_argument("--cpu", choices=PROCESSORS, action="append", help="processor to emulate (default: both)")
    parser.add_argument("--texts", type=Path, metavar="FILE", help=argparse.SUPPRESS)  # run on both machines


def main(args: argparse.Namespace) -> int:
    """Runs the checks; returns the exit status."""
    if args.texts:
        from specexport.runtime.backends.onnxruntime.kernels import kernels

        if not kernels().devices:
            sys.exit(f"aarch64: expected the kernels, found {kernels().described}")
        args.texts.write_text(json.dumps({name: greedy_texts(BUNDLES / name) for name in (*BUILT, *PRECISIONS)}))
        return 0
    install()
    install_wheel()
    kernels_test = build_kernels_test()
    build()
    here = HOME / "x86-64.json"
    texts = ("-m", "benchmarks", "aarch64", "--texts")
    subprocess.run([sys.executable, *texts, here], cwd=ROOT, check=True)
    failed = False
    for processor in args.cpu or PROCESSORS:
        describe(processor)
        failed |= emulate(processor, kernels_test, "60").returncode != 0
        result = HOME / f"{processor}.json"
        run_python(processor, *texts, str(result), check=True)
        failed |= differ(*(json.loads(path.read_text()) for path in (here, result)))
    # with the last processor's cpuinfo
    done = run_python(processor, "-m", "pytest", "-p", "no:cacheprovider", "--import-mode=importlib", "-rs", *TESTS)
    print(f"tests on {processor}: {'passed' if done.returncode == 0 else 'failed'}")
    return int(failed or done.returncode != 0)


def install() -> None:
    """Unpacks Debian's arm64 Python and the emulator, and installs the wheels."""
    done = HOME / "installed"
    if done.exists():
        return
    for folder in (SYSTEM, SITE, HOST):
        shutil.rmtree(folder, ignore_errors=True)
    state = HOME / "apt"
    for name in ("lists/partial", "archives/partial"):
        (state / name).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()  # nothing is installed there, so that all dependencies are fetched
    host = subprocess.run(["dpkg", "--print-architecture"], check=True, capture_output=True, text=True).stdout.strip()
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures": f"arm64,{host}",
        "Dir::State": state,
        "Dir::State::status": state / "status",
        "Dir::Cache": state,
        "APT::Sandbox::User": "root",
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
    subprocess.run([*apt, "update"], check=True)
    packages = ["python3", "libstdc++6", f"qemu-user-static:{host}"]
    subprocess.run([*apt, "install", "--yes", "--download-only", "--no-install-recommends", *packages], check=True)
    for package in (state / "archives").glob("*.deb"):
        folder = HOST if package.stem.endswith(f"_{host}") else SYSTEM
        subprocess.run(["dpkg-deb", "--extract", package, folder], check=True)
    shutil.rmtree(state)
    version = python().name.removeprefix("python")
    platforms = (f"--platform=manylinux_2_{minor}_aarch64" for minor in (17, 24, 26, 27, 28, 31, 34))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(SITE)]
    pip += ["--only-binary=:all:", "--implementation=cp", f"--python-version={version}", *platforms]
    subprocess.run([*pip, *PACKAGES, *TEST_PACKAGES], check=True)
    done.touch()


def install_wheel() -> None:
    """Unpacks the newest wheel beside its dependencies, whatever there was before."""
    wheels = sorted((ROOT / "dist").glob("*_aarch64.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        sys.exit("aarch64: there is no wheel for it in dist/; run make wheels")
    shutil.rmtree(SITE / "specexport", ignore_errors=True)
    with zipfile.ZipFile(wheels[-1]) as archive:
        archive.extractall(SITE)


def build_kernels_test() -> Path:
    """Compiles the kernels' own tests; returns the program."""
    room, program = ROOT / "kernels", HOME / "kernels_test"
    sources = [room / "packing.cc", *sorted(room.glob("kernels*.cc")), *sorted((room / "tests").glob("*.cc"))]
    with mock.patch.dict(os.environ, CXX=compiler("aarch64", TOOLS)):
        runpy.run_path(str(room / "build.py"))["build"](program, ROOT / "build" / "kernels", (), sources, shared=False)
    return program


def python() -> Path:
    """The path of Debian's Python."""
    return (SYSTEM / "usr/bin/python3").resolve()


def build() -> None:
    """Builds the bundles on x86."""
    from benchmarks.pair import built
    from tests.checkpoints import make_checkpoint
    from tests.make_bundles import make

    for name in BUILT:
        make(name, BUNDLES)
    for precision in PRECISIONS:
        model = BUNDLES / "checkpoints" / "wide"
        if not model.exists():
            make_checkpoint(model, "llama", hidden_size=256, intermediate_size=512)
        methods: Any = f"draft_model:{model},num_speculative_tokens=4"
        built(BUNDLES / precision, model, methods=methods, precision=precision)


def greedy_texts(bundle: Path) -> list[Text]:
    """The greedy texts of a bundle, with every method and without."""
    from specexport.runtime import Engine, SamplingParams
    from specexport.runtime.speculative import PLAIN, Speculative

    greedy = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, logprobs=2)
    draw, texts = random.Random(0), []
    with Engine.load(bundle, threads=1) as engine:
        vocabulary = engine.manifest.target.vocab_size
        prompts = [[draw.randrange(3, vocabulary) for _ in range(length)] for length in (1, 7, 30, 130)]
        methods = (name for name, method in engine.methods.items() if not method.takes_hypothesis)
        for speculation in (PLAIN, *(Speculative(method=name) for name in methods)):
            for prompt in prompts:
                done = engine.generate(prompt, greedy, speculation)
                gaps = [entry.top[0][1] - entry.top[1][1] for entry in done.logprobs]
                texts.append(Text(list(done.token_ids), [entry.logprob for entry in done.logprobs], gaps))
    return texts


def run_python(processor: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs Debian's Python on an emulated processor; takes the options of ``subprocess.run``."""
    return emulate(processor, python(), "-P", *arguments, **options)


def emulate(processor: str, program: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a program on an emulated processor; takes the options of ``subprocess.run``."""
    (qemu,) = (path for path in (HOST / "usr/bin").glob("qemu-aarch64*") if "_be" not in path.name)
    paths = os.pathsep.join(map(str, (SITE, ROOT)))
    environment = {**os.environ, "PYTHONPATH": paths, "SPECEXPORT_CACHE": str(HOME / "cache" / processor)}
    environment["SPECEXPORT_TEST_BUNDLES"] = str(BUNDLES)
    command = [str(qemu), "-cpu", processor, "-L", str(SYSTEM), str(program), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, text=True, **options)


def describe(processor: str) -> None:
    """Prints the features of a processor and writes a matching ``/proc/cpuinfo``, which onnxruntime needs."""
    program = "import ctypes; ask = ctypes.CDLL(None).getauxval; ask.restype = ctypes.c_ulong; print(ask(16), ask(26))"
    words = map(int, run_python(processor, "-c", program, check=True, capture_output=True).stdout.split())
    names = [name for word, bits in zip(words, FEATURES, strict=True) for bit, name in bits.items() if word >> bit & 1]
    fields = {"Features": " ".join(["fp", *names]), "CPU implementer": "0x41", "CPU architecture": 8}
    fields |= {"CPU variant": "0x1", "CPU part": "0xd0b", "CPU revision": 1}
    entries = ({"processor": core} | fields for core in range(os.cpu_count() or 1))
    (SYSTEM / "proc").mkdir(exist_ok=True)
    (SYSTEM / "proc/cpuinfo").write_text(
        "\n".join("".join(f"{name}\t: {value}\n" for name, value in entry.items()) for entry in entries)
    )
    print(f"{processor} ({PROCESSORS[processor]}): {' '.join(names)}", flush=True)


def differ(expected: dict[str, Any], emulated: dict[str, Any]) -> bool:
    """Prints the comparison of texts; returns whether any differs by more than rounding."""
    wrong = False
    for name, texts in expected.items():
        equal, largest, first = 0, 0.0, ""
        for a, b in zip((Text(*text) for text in texts), (Text(*text) for text in emulated[name]), strict=True):
            pairs = list(zip(a.tokens, b.tokens, strict=True))
            same = next((at for at, (text, other) in enumerate(pairs) if text != other), len(pairs))
            largest = max(largest, 0.0, *(abs(x - y) for x, y in zip(a.logprobs[:same], b.logprobs, strict=False)))
            equal += same == len(pairs)
            if same < len(pairs):
                gaps = a.gaps[same], b.gaps[same]
                wrong |= max(gaps) > ROUNDING
                first = first or f"; the first token that differs was {gaps[0]:.1e} and {gaps[1]:.1e} above the next"
        print(
            f"  {name}: {equal} of {len(texts)} texts equal; log-probabilities within {largest:.1e}{first}", flush=True
        )
    return wrong
