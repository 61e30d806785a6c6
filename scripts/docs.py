"""Write the tables and charts of the documentation from results and declarations: ``python -m scripts.docs``.

A page marks the place of a table by ``<!-- table: NAME -->`` and ``<!-- end of table -->``, between which everything is
replaced; :data:`TABLES` has the functions that write tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path

from gguf import GGML_QUANT_SIZES

from benchmarks import families, tables
from specexport.commands.flags import flag
from specexport.contract import signature, tensors
from specexport.contract.options import REQUIRED, Options, options
from specexport.contract.tensors import Tensor
from specexport.exporter.checkpoints.gguf.tensors import KEPT
from specexport.exporter.checkpoints.settings import SETTINGS
from specexport.exporter.options import BuildSettings, CompileOptions
from specexport.methods.dflash import block_inputs
from specexport.methods.hidden_states import own_state_inputs
from specexport.methods.mlp_speculator import speculator_inputs
from specexport.options import EngineOptions, ServerOptions
from specexport.runtime import SamplingParams
from specexport.server.tools import call_format
from tests import tool_families

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n\n).*?(\n\n<!-- end of table -->)", re.DOTALL)


def settings() -> str:
    """The settings of checkpoints and their effects."""
    rows = [
        (setting.file, ", ".join(f"`{key}`" for key in setting.keys), setting.handling, setting.note)
        for setting in SETTINGS
    ]
    return tables.markdown(("file", "settings", "handling", ""), rows)


def gguf_types() -> str:
    """The block types of GGUF: their form in a bundle, and their bits per weight in the file and in the bundle."""
    names = {
        "half": "fp16 scales",
        "half, offset": "fp16 scales and offsets",
        "two levels": "scales in two levels",
        "two levels, offset": "scales and offsets in two levels",
    }
    rows = []
    for kind, block in KEPT.items():
        weights, size = GGML_QUANT_SIZES[kind]
        factor = 16 / block.group if block.scales.startswith("half") else 8 / block.group + 16 / 256
        factors = 2 if block.scales.endswith("offset") else 1
        bits = int(block.kind.removeprefix("int")) + factors * factor
        rows.append((kind.name, block.kind, names[block.scales], f"{8 * size / weights:.4g}", f"{bits:.4g}"))
    rows += [("F16, BF16, F32", "the same", "", "", ""), ("others", "int8, rounded again; `build` warns", "", "", "")]
    return tables.markdown(("type", "kept as", "with", "bits in the file", "bits in the bundle"), rows)


def tools() -> str:
    """The tool support of each family of models."""
    rows = []
    for family in tool_families.FAMILIES:
        supported = call_format(family.template) is not None
        form = family.form if supported else "its template knows no tools; JSON"
        rows.append((family.name, form, "works" if supported else "refused", "work"))
    return tables.markdown(("family", "a call", "`auto`", "`required`, a named tool"), rows)


def _names(kind: type[Options], without: Collection[str] = ()) -> list[str]:
    return [name for name in options(kind) if name not in without]


_ENGINE = _names(EngineOptions, _names(BuildSettings))
OPTION_TABLES: dict[str, tuple[type[Options], Collection[str], bool]] = {
    "engine": (EngineOptions, _ENGINE, False),
    "build": (EngineOptions, _names(BuildSettings), False),
    "sampling": (SamplingParams, _names(SamplingParams), False),
    "compile": (CompileOptions, _names(CompileOptions, ["backend"]), True),
    "serve": (ServerOptions, _names(ServerOptions, [*_ENGINE, *_names(BuildSettings)]), True),
}
"""The options of each table in ``docs/``, and whether they are shown as flags."""


def option_table(name: str) -> str:
    """A table of options in Markdown, from the struct that declares them."""
    kind, names, flags = OPTION_TABLES[name]
    rows = [f"| {'flag' if flags else 'option'} | values | default | |", "|---|---|---|---|"]
    for option in options(kind).values():
        if option.name in names:
            negated = flags and option.default is True
            words = option.about.get("off", option.help) if negated else option.help
            unset = negated or option.default is REQUIRED or (flags and option.default is False)
            default = "" if unset else option.default_text or str(option.default)
            values = "" if option.kind is bool and flags else option.expected
            words += "; repeatable" if flags and option.about.get("repeat") else ""
            shown = flag(option) if flags else option.name
            rows.append(f"| `{shown}` | {values} | {default} | {words} |".replace("  ", " "))
    return "\n".join(rows)


_STEP = signature.step_signature((), "H")
_PROPOSE = signature.propose_signature("M")
_ACCEPT = (signature.accept_signature("lossless", "M"), signature.accept_signature("typical", "M"))
_FILL = signature.fill_signature("M")
_LAYERED = (f"{tensors.LAYER_STATES}.", *tensors.CACHES, *tensors.STATES)


def _without_sampling(declared: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple(dict.fromkeys(tensor for tensor in declared if tensor not in tensors.SAMPLING))


TENSOR_TABLES: dict[str, tuple[Tensor, ...]] = {
    "sampling": tensors.SAMPLING,
    "caches": (
        tensors.PAST_KEY,
        tensors.PAST_VALUE,
        tensors.PRESENT_KEY,
        tensors.PRESENT_VALUE,
        tensors.NEW_KEY,
        tensors.NEW_VALUE,
    ),
    "step-inputs": _STEP.inputs,
    "step-outputs": (tensors.LOGITS, tensors.CANDIDATES, tensors.HIDDEN, tensors.LAYER_STATES),
    "states": (
        tensors.KNOWN_TOKENS,
        tensors.CELL_ROWS,
        tensors.PAST_CONV,
        tensors.NEW_CONV,
        tensors.PAST_UPDATES,
        tensors.NEW_UPDATES,
        tensors.PAST_STATE,
        tensors.NEW_STATE,
    ),
    "propose-inputs": _without_sampling(_PROPOSE.inputs),
    "propose-outputs": _PROPOSE.outputs,
    "own-state": (*own_state_inputs("n*H", "H"), tensors.NEXT_STATE),
    "block": (*block_inputs("n*H")[:2], tensors.BLOCK_ROWS),
    "speculator": speculator_inputs("stages", "H"),
    "accept-inputs": _without_sampling(tensor for accept in _ACCEPT for tensor in accept.inputs),
    "accept-outputs": _ACCEPT[0].outputs,
    "fill": (tensors.TREE_ROWS, tensors.TREE_RANKS, *_FILL.outputs),
}


def tensor_table(name: str) -> str:
    """The name, type, shape and meaning of each tensor; tensors of layers end with the layer's number."""
    rows = ["| tensor | type | shape | |", "|---|---|---|---|"]
    for tensor in TENSOR_TABLES[name]:
        shown = f"{tensor}.{{i}}" if f"{tensor}." in _LAYERED and tensor.dims[-1] != "n*H" else str(tensor)
        rows.append(f"| `{shown}` | {tensor.dtype} | `[{', '.join(map(str, tensor.dims))}]` | {tensor.meaning} |")
    return "\n".join(rows)


_RESULTS = (
    *("auto", "batches", "bench", "clients", "decode-costs", "decode-speed", "engines", "lookup", "losslessness"),
    *("machines", "methods", "precision", "real-models", "real-sizes", "serve", "soak", "split-targets"),
    *("opening", "prompts", "verify-costs", "gpu-checks", "gpu-engines", "gpu-steps"),
)
"""Tables that functions of ``benchmarks.tables`` write, by the names of these."""
TABLES: dict[str, Callable[[], str]] = {
    **{name: getattr(tables, name.replace("-", "_")) for name in _RESULTS},
    "auto-avx512": partial(tables.auto, "auto-avx512"),
    "engines-avx512": partial(tables.engines, "peers-avx512"),
    "engines-zen5": partial(tables.engines, "peers-zen5"),
    "families": families.table,
    "gguf-types": gguf_types,
    "settings": settings,
    "tools": tools,
    "verify-costs-avx512": partial(tables.verify_costs, "kernels-avx512"),
    "verify-costs-zen4": partial(tables.verify_costs, "kernels-zen4"),
    "verify-costs-zen5": partial(tables.verify_costs, "kernels-zen5"),
    **{f"options-{name}": partial(option_table, name) for name in OPTION_TABLES},
    **{f"tensors-{name}": partial(tensor_table, name) for name in TENSOR_TABLES},
}
CHARTS: dict[Path, Callable[[], str]] = {ROOT / "docs" / "speed.svg": tables.real_models_chart}


def current() -> dict[Path, str]:
    """The content of each page with tables, and of each chart.

    Raises:
        KeyError: a page names a table that is not in :data:`TABLES`.
    """
    files = {path: chart() for path, chart in CHARTS.items()}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        files[page] = _TABLE.sub(lambda mark: f"{mark[1]}{TABLES[mark[2]]()}{mark[3]}", text)
    return files


def main() -> None:
    """Writes the files that are not current, and prints their names."""
    for path, text in current().items():
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
