"""Builds and checks every model family, for the table in docs/support.md.

Every family is a tiny random checkpoint. It is built in fp32, and the build compares its lowering with transformers.
The greedy texts of this bundle and of a portable bundle are compared with transformers'. An int4 build measures the
error of the logits. With ``--rtx``, TensorRT-RTX compiles the fp32 bundle in fp16. If ``build`` refuses a family, the
reason is recorded. The results are added to benchmarks/results/families.json.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from benchmarks.tables import RESULTS, load, markdown
from specexport.contract.errors import SpecExportError
from specexport.contract.reading import read_manifest
from specexport.exporter.build import build
from specexport.exporter.checkpoints.checkpoint import load_reference
from specexport.exporter.engines.bundle import compile_bundle
from specexport.exporter.options import BuildOptions, CompileOptions
from specexport.runtime import Engine, SamplingParams
from specexport.verify.logits import LIMITS
from tests.checkpoints import EOS, FAMILIES, GROUPED, HYBRIDS, LAYERS_DIFFER, WINDOW, make_checkpoint
from tests.test_families import REFUSED
from tests.test_mixtures import MIXTURES

TITLES = {"fp32": "fp32", "greedy": "greedy text", "portable": "portable", "int4": "int4", "rtx": "RTX build"}
TOKENS = 24

_PLAIN = {name: value for name, value in GROUPED.items() if name != "num_key_value_heads"}
_HEAD = {**GROUPED, "head_dim": 16}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
_GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}

MORE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("apertus", "arcee", "cohere", "nemotron", "olmo", "stablelm"), GROUPED),
    **dict.fromkeys(("ernie4_5", "gemma", "glm", "glm4", "helium", "hunyuan_v1_dense", "seed_oss"), _HEAD),
    **{name: {**_HEAD, **_WINDOWS} for name in ("cohere2", "ministral", "vaultgemma")},
    **{name: {**GROUPED, **_WINDOWS} for name in ("exaone4", "olmo3")},
    "gemma4_text": {
        **_HEAD,
        **_WINDOWS,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 320,
        "num_kv_shared_layers": 0,
    },
    "lfm2": {**GROUPED, "layer_types": ["full_attention"] * 2},
    "minicpm3": {**_PLAIN, **_LATENT, "num_key_value_heads": 4},
    "phi": {**GROUPED, "num_key_value_heads": 4},
    "starcoder2": {**GROUPED, "sliding_window": WINDOW},
    "gptj": {**_GPT, "rotary_dim": 8},
    "minimax": {**_HEAD, **_LINEAR, "num_local_experts": 4},
    **{f"{name}, hybrid": {"model_type": name, **config} for name, config in HYBRIDS.items()},
}
"""Families without a test that traces or refuses them, with the sizes of tiny models."""

_INTERFACE = "attention through transformers' interface in the family's code"
HELP = {
    "bloom, ALiBi": f"{_INTERFACE}, with a bias for the distance",
    "diffllama, two softmaxes": "the difference of two softmaxes in one attention call",
    "falcon, attention of its own": _INTERFACE,
    "gemma3_text, bidirectional": "nothing: its tokens see later ones",
    "gptj": _INTERFACE,
    "llama4_text, chunks": "real instead of complex rotary embeddings, and chunks in the graph's masks",
    "mamba, no attention": "graphs without any cache",
    "minimax": "lightning attention in a function of the family's code, as other rules are, and the usual cache",
    "mpt, ALiBi, another": f"{_INTERFACE}, with a bias for the distance",
    "phimoe, window in the mask": "a family that tells its attention the window",
    "qwen2_moe, window in the mask of some layers": "a family that tells its attention the window",
}
"""The work that refused families would take."""


def families() -> dict[str, dict[str, Any]]:
    """The rows of the table, with the settings of each tiny model."""
    tested = {name: {"num_hidden_layers": 2 if name in LAYERS_DIFFER else 1} for name in FAMILIES}
    refused = {f"{name}, {why}": {"model_type": name, **config} for why, (name, config) in REFUSED.items()}
    return {**tested, **MIXTURES, **MORE, **refused}


def check_family(name: str, settings: dict[str, Any], *, rtx: bool) -> dict[str, str]:
    """The result of each check: ``yes`` or an error; for a family that the build refuses, the reason alone."""
    settings = dict(settings)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        source = make_checkpoint(root / "model", settings.pop("model_type", name), **settings)
        try:
            build(_options(source, root / "fp32", backend="tensorrt-rtx" if rtx else "onnxruntime"))
        except SpecExportError as error:
            return {"refused": _line(error)}
        if rtx:
            return {"rtx": _tried(lambda: _compiled(root / "fp32"))}
        return {
            "fp32": "yes",
            "greedy": _tried(lambda: _same_text(source, root / "fp32")),
            "portable": _tried(lambda: _portable(source, root / "portable")),
            "int4": _tried(lambda: _four_bits(source, root / "int4")),
        }


def _options(source: Path, output: Path, **more: Any) -> BuildOptions:
    return BuildOptions(str(source), output, max_seq_len=128, max_batch_size=1, **{"precision": "fp32", **more})


def _tried(step: Callable[[], None]) -> str:
    try:
        step()
    except Exception as error:  # the table reports it
        return _line(error)
    return "yes"


def _line(error: Exception) -> str:
    """The error in one line, without local paths."""
    return re.sub(r"/\S+?/(model|fp32)(/|: )", "", " ".join(f"{error or type(error).__name__}".split()))[:240]


def _same_text(source: Path, bundle: Path) -> None:
    """Compares greedy tokens, decoded with look-ups, with transformers' tokens."""
    model, text = load_reference(source, read_manifest(bundle).target), list(range(3, 15))
    expected = list(text)
    while len(expected) < len(text) + TOKENS and expected[-1] != EOS:
        with torch.no_grad():
            expected.append(int(model(torch.tensor([expected]), use_cache=False).logits[0, -1].argmax()))
    with Engine.load(bundle, threads=1, calibrate=False) as engine:
        tokens = engine.generate(text, SamplingParams(temperature=0.0, max_tokens=TOKENS)).token_ids
    if list(tokens) != expected[len(text) :]:
        raise RuntimeError("greedy text differs from transformers'")


def _portable(source: Path, output: Path) -> None:
    build(_options(source, output, lowering="portable"))
    _same_text(source, output)


def _four_bits(source: Path, output: Path) -> None:
    build(_options(source, output, precision="int4"))
    quality, limit = read_manifest(output).target.precision.quality, LIMITS["int4"].rms
    assert quality is not None
    if quality.logits_rms_error > limit:
        raise RuntimeError(
            f"logits are {quality.logits_rms_error:.2f} of their spread from the model's; verify allows {limit}"
        )


def _compiled(bundle: Path) -> None:
    compile_bundle(bundle, CompileOptions("tensorrt-rtx", compute_capability=((8, 9),), compute="fp16"))


def table() -> str:
    """Markdown tables of the supported families with their checks, of failed checks, and of refused families."""
    rows, refused, notes = [], [], dict[str, int]()
    for name, checks in sorted(load("families").items()):
        if "refused" in checks:
            refused.append((name, checks["refused"].replace("|", "\\|"), HELP.get(name, "not known")))
            continue
        cells = [name]
        for check in TITLES:
            text = checks.get(check, "not run")
            cells.append(text if text in ("yes", "not run") else f"no ({notes.setdefault(text, len(notes) + 1)})")
        rows.append(cells)
    numbered = "\n".join(f"{number}. {text}" for text, number in notes.items())
    supported = markdown(("family", *TITLES.values()), rows)
    return "\n\n".join((supported, numbered, markdown(("refused", "why", "what would help"), refused)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``python -m benchmarks families``."""
    parser.add_argument("--only", nargs="+", metavar="NAME", help="families to check (default: all)")
    parser.add_argument("--rtx", action="store_true", help="run only the check of TensorRT-RTX")


def main(args: argparse.Namespace) -> int:
    """Checks families and adds the results to the earlier ones."""
    torch.set_num_threads(1)
    settings = families()
    path = RESULTS / "families.json"
    for name in args.only or settings:
        checks = check_family(name, settings[name], rtx=args.rtx)
        print(name, json.dumps(checks), flush=True)
        with FileLock(Path(tempfile.gettempdir()) / "specexport-families.lock"):
            results = load("families")
            # The check of an engine is added to earlier results; the others run together and replace them.
            results[name] = {**(results.get(name, {}) if args.rtx else {}), **checks}
            path.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n", encoding="utf-8")
    return 0
