"""The table of model families in docs/support.md, from results of building and running each of them.

    python -m scripts.families run [--rtx] [--only NAME ...]    # builds, checks, and writes docs/families.json
    python -m scripts.families table                            # writes the table of the results that are there

Every family is a tiny random checkpoint. It is built in fp32, for which the build compares its lowering with
transformers, and the bundle's greedy text is compared with transformers'; so is that of a portable bundle. It is built
in int4, whose logits the build measures. With ``--rtx``, TensorRT-RTX compiles its fp32 bundle in fp16. What ``build``
refuses is written down with its reason.
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

from specexport.contract.errors import SpecExportError
from specexport.contract.reading import read_manifest
from specexport.exporter.build import build
from specexport.exporter.checkpoints.reference import load_reference
from specexport.exporter.engines.bundle import compile_bundle
from specexport.exporter.engines.options import CompileOptions
from specexport.exporter.options import BuildOptions
from specexport.runtime import Engine, SamplingParams
from specexport.verify.logits import LIMITS
from tests.checkpoints import EOS, FAMILIES, GROUPED, HYBRIDS, LAYERS_DIFFER, WINDOW, make_checkpoint
from tests.test_families import REFUSED
from tests.test_mixtures import MIXTURES

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "docs" / "families.json", ROOT / "docs" / "support.md"
BEGIN, END = "<!-- families: made by scripts/families.py -->", "<!-- families end -->"
TITLES = {"fp32": "fp32", "greedy": "greedy text", "portable": "portable", "int4": "int4", "rtx": "RTX build"}
TOKENS = 24

_PLAIN = {name: value for name, value in GROUPED.items() if name != "num_key_value_heads"}
_HEAD = {**GROUPED, "head_dim": 16}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
_GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}

MORE: dict[str, dict[str, Any]] = {
    "apertus": GROUPED,
    "arcee": GROUPED,
    "cohere": GROUPED,
    "cohere2": {**_HEAD, **_WINDOWS},
    "ernie4_5": _HEAD,
    "exaone4": {**GROUPED, **_WINDOWS},
    "gemma": _HEAD,
    "gemma4_text": {
        **_HEAD,
        **_WINDOWS,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 320,
        "num_kv_shared_layers": 0,
    },
    "glm": _HEAD,
    "glm4": _HEAD,
    "helium": _HEAD,
    "hunyuan_v1_dense": _HEAD,
    "lfm2": {**GROUPED, "layer_types": ["full_attention"] * 2},
    "minicpm3": {**_PLAIN, **_LATENT, "num_key_value_heads": 4},
    "ministral": {**_HEAD, **_WINDOWS},
    "nemotron": GROUPED,
    "olmo": GROUPED,
    "olmo3": {**GROUPED, **_WINDOWS},
    "phi": {**GROUPED, "num_key_value_heads": 4},
    "seed_oss": _HEAD,
    "stablelm": GROUPED,
    "starcoder2": {**GROUPED, "sliding_window": WINDOW},
    "vaultgemma": {**_HEAD, **_WINDOWS},
    "gptj": {**_GPT, "rotary_dim": 8},
    "minimax": {**_HEAD, **_LINEAR, "num_local_experts": 4},
    **{f"{name}, hybrid": {"model_type": name, **config} for name, config in HYBRIDS.items()},
}
"""Families besides those that tests trace or find refused, with the sizes of tiny models."""

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
"""What would help families that are refused."""


def families() -> dict[str, dict[str, Any]]:
    """Every row of the table: settings of its tiny model."""
    tested = {name: {"num_hidden_layers": 2 if name in LAYERS_DIFFER else 1} for name in FAMILIES}
    refused = {f"{name}, {why}": {"model_type": name, **config} for why, (name, config) in REFUSED.items()}
    return {**tested, **MIXTURES, **MORE, **refused}


def measured(name: str, settings: dict[str, Any], *, rtx: bool) -> dict[str, str]:
    """What became of a family: by check, ``yes`` or what is wrong; a refused one has a reason alone."""
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
    except Exception as error:  # a row says what went wrong
        return _line(error)
    return "yes"


def _line(error: Exception) -> str:
    """One line of an error, without folders of this machine."""
    return re.sub(r"/\S+?/(model|fp32)(/|: )", "", " ".join(f"{error or type(error).__name__}".split()))[:240]


def _same_text(source: Path, bundle: Path) -> None:
    """Compares greedy tokens, speculating by look-ups, with transformers' own."""
    model, text = load_reference(source, read_manifest(bundle).target), list(range(3, 15))
    expected = list(text)
    while len(expected) < len(text) + TOKENS and expected[-1] != EOS:
        with torch.no_grad():
            expected.append(int(model(torch.tensor([expected]), use_cache=False).logits[0, -1].argmax()))
    with Engine.load(bundle, threads=1, calibrate=False) as engine:
        found = engine.generate(text, SamplingParams(temperature=0.0, max_tokens=TOKENS)).token_ids
    if list(found) != expected[len(text) :]:
        raise RuntimeError("greedy text parts from transformers'")


def _portable(source: Path, output: Path) -> None:
    build(_options(source, output, lowering="portable"))
    _same_text(source, output)


def _four_bits(source: Path, output: Path) -> None:
    build(_options(source, output, precision="int4"))
    error, limit = read_manifest(output).target.precision.logits_rms_error, LIMITS["int4"].rms
    assert error is not None
    if error > limit:
        raise RuntimeError(f"logits are {error:.2f} of their spread from the model's; verify allows {limit}")


def _compiled(bundle: Path) -> None:
    compile_bundle(bundle, CompileOptions("tensorrt-rtx", compute_capability=((8, 9),), compute="fp16"))


def table(results: dict[str, dict[str, str]]) -> str:
    """The page's part between its two marks."""
    rows = [f"| family | {' | '.join(TITLES.values())} |", "|---" * (1 + len(TITLES)) + "|"]
    notes: dict[str, int] = {}
    for name, found in sorted(results.items()):
        if "refused" in found:
            continue
        cells = []
        for check in TITLES:
            text = found.get(check, "not run")
            if text not in ("yes", "not run"):
                text = f"no ({notes.setdefault(text, len(notes) + 1)})"
            cells.append(text)
        rows.append(f"| {name} | {' | '.join(cells)} |")
    rows += ["", *(f"{number}. {text}" for text, number in notes.items())] if notes else []
    rows += ["", "| refused | why | what would help |", "|---|---|---|"]
    for name, found in sorted(results.items()):
        if "refused" in found:
            why = found["refused"].replace("|", "\\|")
            rows.append(f"| {name} | {why} | {HELP.get(name, 'not known')} |")
    return "\n".join(rows)


def with_table(page: str, results: dict[str, dict[str, str]]) -> str:
    """A page with the table between its marks made anew."""
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n\n{table(results)}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description="The table of model families in docs/support.md.")
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of these families")
    parser.add_argument("--rtx", action="store_true", help="compile with TensorRT-RTX, and nothing else")
    asked = parser.parse_args()
    if asked.what == "table":
        results = json.loads(RESULTS.read_text(encoding="utf-8"))
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
        return
    torch.set_num_threads(1)
    known = families()
    for name in asked.only or known:
        found = measured(name, known[name], rtx=asked.rtx)
        print(name, json.dumps(found), flush=True)
        with FileLock(Path(tempfile.gettempdir()) / "specexport-families.lock"):
            results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
            # An engine is one check more; anything else measures a family anew.
            results[name] = {**(results.get(name, {}) if asked.rtx else {}), **found}
            RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
