"""The tables of the documentation, as Markdown, from ``benchmarks/results``; ``python -m scripts.docs`` writes them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")
PRECISIONS = ("stored", "fp32", "bf16", "int8", "int4")
WITH_DRAFT = ", with a draft"
"""Follows the precision of real models that were measured with one."""
ENGINES = {
    "specexport": "specexport",
    "transformers": "transformers",
    "ort": "ONNX Runtime GenAI",
    "openvino": "OpenVINO GenAI",
    "llamacpp": "llama.cpp",
}
"""Display names of the compared engines."""


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    r"""A Markdown table; ``|`` in a cell becomes ``\|``, as GitHub ends cells there even in code.

    Args:
        header: titles of the columns.
        rows: cells in row order; each row is as long as the header.
    """
    cells = [header, ["---"] * len(header), *rows]
    lines = (" | ".join(cell.replace("|", r"\|") for cell in row) for row in cells)
    return "\n".join(f"| {line} |" for line in lines)


def load(name: str) -> Any:
    """The content of ``benchmarks/results/NAME.json``."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def machines() -> str:
    """The processor and the libraries behind each result file."""
    rows = []
    for path in sorted(RESULTS.glob("*.json")):
        report = load(path.stem)
        # real.json has a machine for each model and precision, all alike.
        entries = [report, *(entry for model in report.values() if isinstance(model, dict) for entry in model.values())]
        machine = next((entry["machine"] for entry in entries if isinstance(entry, dict) and "machine" in entry), None)
        if machine is not None:
            features = ", ".join(machine.get("features", ()))
            versions = (machine["onnxruntime"], machine["python"])
            rows.append((f"`{path.name}`", machine["cpu"], features, str(machine["threads"]), *versions))
    return markdown(("results", "processor", "instruction sets", "threads", "onnxruntime", "Python"), rows)


def _gpu_checks(kind: str) -> dict[str, dict[str, str]]:
    """The findings of each bundle's check of a kind on a GPU, by name."""
    return {
        name.partition(":")[2]: {finding["name"]: finding["found"] for finding in check["findings"]}
        for name, check in load("gpu-h200").items()
        if name.partition(":")[0] == kind
    }


def gpu_checks() -> str:
    """How many bundles passed each check on a GPU, and which did not."""
    kinds: dict[str, dict[str, str]] = {}
    for name, check in load("gpu-h200").items():
        kind, _, bundle = name.partition(":")
        kinds.setdefault(kind, {})[bundle] = check["status"]
    rows = []
    for kind, statuses in kinds.items():
        others = [", ".join(bundle for bundle, now in statuses.items() if now == of) for of in ("fail", "not measured")]
        rows.append((kind, str(list(statuses.values()).count("pass")), *others))
    return markdown(("check", "bundles that pass", "fail", "not measured"), rows)


def gpu_steps() -> str:
    """The time of a step's parts on a GPU, in milliseconds."""
    rows = []
    for bundle, findings in _gpu_checks("events").items():
        times = [
            findings.get(part, "").removesuffix(" us") for part in ("draft", "target", "accept", "step, one graph")
        ]
        times.append(findings.get("gaps between launches a step", "").removesuffix(" us"))
        if all(times):  # else the check failed
            rows.append((bundle, *(f"{float(time) / 1e3:.2f}" for time in times)))
    return markdown(("bundle", "draft", "target", "accept", "the step, one graph", "the host, between steps"), rows)


def gpu_engines() -> str:
    """Tokens a second on a GPU beside transformers'."""
    rows = []
    for bundle, findings in _gpu_checks("transformers").items():
        speeds = {name.removesuffix(", tokens a second"): value for name, value in findings.items()}
        if not speeds:  # not measured
            continue
        names = ("ours, plain", "ours, draft_model", "ours, ngram", "ours, default")
        others = ("transformers, plain", "transformers, plain, compiled", "transformers, with the draft model")
        rows.append((bundle, *(speeds.get(name, "") for name in (*names, *others))))
    header = ("plain", "draft model", "look-ups", "default", "transformers", "compiled", "with the draft model")
    return markdown(("bundle", *header), rows)


def real_models(results: Any = None) -> str:
    """Published models beside llama.cpp.

    Args:
        results: measurements; None reads the committed ones.
    """
    header = ("model", "weights", "MB", "", "tokens/s", "a step", "over our plain", "over llama.cpp's best")
    rows = []
    for model, entry in (results or load("real")).items():
        for precision in (f"{name}{draft}" for name in PRECISIONS for draft in ("", WITH_DRAFT)):
            for row in entry.get(precision, {}).get("ways", []):
                size = f"{entry[precision]['bytes'] / 1e6:.0f}" if row["engine"] == "specexport" else ""
                way = {"ngram": "look-ups", "default": "by default"}.get(row["way"], row["way"])
                ratios = (f"{row['over_our_plain']:.2f}", f"{row['over_best_llamacpp']:.2f}")
                speed = (f"{row['decode_tokens_per_s']:.1f}", f"{row['tokens_per_step']:.2f}")
                rows.append((model, precision, size, f"{ENGINES[row['engine']]}, {way}", *speed, *ratios))
    return markdown(header, rows)


def real_models_chart() -> str:
    """Tokens a second as bars, in SVG: our default, our plain decoding, and the best of llama.cpp.

    At the precisions that people run on a CPU; the table has the others.
    """
    groups: list[tuple[str, list[tuple[str, str, float]]]] = []
    for model, entry in load("real").items():
        for precision in ("stored", "int8", "int4"):
            ways = entry.get(precision, {}).get("ways", [])
            speeds = {(row["engine"], row["way"]): row["decode_tokens_per_s"] for row in ways}
            if speeds:
                llamacpp = max(speed for (engine, _), speed in speeds.items() if engine == "llamacpp")
                bars = [
                    ("specexport", "#2f7d4f", speeds["specexport", "default"]),
                    ("without speculation", "#8fbfa1", speeds["specexport", "plain"]),
                    ("llama.cpp, its best", "#9a9a9a", llamacpp),
                ]
                groups.append((f"{model}, {precision}", bars))
    longest = max(speed for _, bars in groups for *_, speed in bars)
    lines, top = [], 10
    for title, bars in groups:
        lines.append(f'<text x="0" y="{top + 11}" font-weight="bold">{title}</text>')
        for label, colour, speed in bars:
            top += 18
            width = 380 * speed / longest
            lines.append(f'<text x="150" y="{top + 11}" text-anchor="end">{label}</text>')
            lines.append(f'<rect x="158" y="{top}" width="{width:.0f}" height="14" fill="{colour}"/>')
            lines.append(f'<text x="{164 + width:.0f}" y="{top + 11}">{speed:.0f} tokens/s</text>')
        top += 30
    # A grey that can be read on white and on black.
    style = 'font-family="sans-serif" font-size="12" fill="#777"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {top}" width="640" height="{top}" {style}>'
    return "\n".join([head, *lines, "</svg>"]) + "\n"


def clients() -> str:
    """The checks of OpenAI's clients."""
    rows = [
        (client, result["version"], check, outcome)
        for client, result in load("clients").items()
        for check, outcome in result["checks"].items()
    ]
    return markdown(("client", "version", "check", ""), rows)


def precision(results: Any = None) -> str:
    """The effect of rounding on models.

    Args:
        results: measurements; None reads the committed ones.
    """
    rows = []
    for model, variants in (results or load("precision")).items():
        for name, row in variants.items():
            perplexity = f"{row['perplexity']:.4g} ({row['reference_perplexity']:.4g})"
            size, divergence, share = f"{row['bytes'] / 1e6:.1f}", f"{row['kl']:.4f}", f"{row['same_choice']:.1%}"
            rows.append((model, name, size, divergence, perplexity, share))
    return markdown(("model", "weights", "MB", "KL", "perplexity (fp32)", "same first choice"), rows)


def _decode(cell: Any) -> str:
    points = load("decode")["points"]
    precisions = list(dict.fromkeys(point["precision"] for point in points))
    by_k = {(point["precision"], point["k"]): point for point in points}
    counts = (0, 1, 2, 4, 6, 8)
    rows = [(str(k) if k else "plain", *(cell(by_k[name, k]) for name in precisions)) for k in counts]
    return markdown(("K", *precisions), rows)


def decode_speed() -> str:
    """Tokens a second, speed-up and acceptance length by K and precision."""

    def cell(point: dict[str, Any]) -> str:
        speed = f"{point['tokens_per_second']:.1f}"
        return f"{speed}, {point['speed_up']:.2f}x, {point['acceptance_length']:.2f}" if point["k"] else speed

    return _decode(cell)


def decode_costs() -> str:
    """c(K+1) and d(K) in milliseconds."""

    def cell(point: dict[str, Any]) -> str:
        verify = f"{point['verify_ms']:.1f}"
        return f"{verify} + {point['propose_ms']:.1f}" if point["k"] else verify

    return _decode(cell)


def verify_costs(name: str = "kernels") -> str:
    """A step of one token, and of T over it, on our kernels and on ONNX Runtime's."""
    report, rows = load(name), []
    widths = report["tokens"]
    for precision, result in report["results"].items():
        ours, theirs = result["seconds"]["ours"], result["seconds"]["onnxruntime"]
        step, products = f"{result['weights'] / ours[0] / result['reading']:.0%}", ""
        if "products" in result:
            products = f"{result['products'] / result['reading']:.0%}"
        for name, seconds in (("specexport", ours), ("ONNX Runtime", theirs)):
            ratios = [f"{time / seconds[0]:.2f}" for time in seconds[1:]]
            read = (step, products) if seconds is ours else ("", "")
            rows.append((precision, name, f"{1e3 * seconds[0]:.1f}", *ratios, *read))
        rows.append((precision, "ours / theirs", *(f"{a / b:.2f}" for a, b in zip(ours, theirs, strict=True)), "", ""))
    ratios = [f"c({T}) / c(1)" for T in widths[1:]]
    return markdown(("weights", "kernels", "c(1), ms", *ratios, "step / reading", "products"), rows)


def opening() -> str:
    """The time to a first token, and a decoding process's memory."""
    rows = []
    for precision, row in load("opening")["results"].items():
        parts = (sum(row["first"]), row["seconds"], row["import"], row["load"], row["first_token"])
        sizes = (row["weights"], row["caches"], row["resident"])
        over = row["resident"] / (row["weights"] + row["caches"])
        rows.append((precision, *(f"{x:.2f}" for x in parts), *(f"{x / 1e6:.0f}" for x in sizes), f"{over:.2f}"))
    times = ("first opening, s", "later ones", "import", "load", "first token")
    return markdown(("weights", *times, "weights, MB", "caches", "process", "ratio"), rows)


def real_sizes() -> str:
    """Builds and steps at the sizes of published models."""
    rows = []
    for pair in load("real-size")["pairs"]:
        sizes = [f"{pair[key] / 1e3:.1f}" for key in ("build_peak_mb", "bundle_mb", "resident_mb")]
        costs = [", ".join(f"{ms:.0f}" for ms in pair[key].values()) for key in ("step_ms", "propose_ms")]
        gains = [
            ", ".join(f"{pair['speed_up'][k][length]:.2f}x" for length in lengths)
            for k, lengths in (("2", ("2.0", "3.0")), ("4", ("3.0", "4.0", "5.0")))
        ]
        minutes = f"{pair['build_seconds'] / 60:.1f}"
        rows.append((f"{pair['target']}, {pair['precision']}", minutes, *sizes, *costs, *gains))
    return markdown(("target", "build, minutes", "memory", "bundle", "process", "c", "d", "K = 2", "K = 4"), rows)


def split_targets() -> str:
    """A step of a target in one process and in two, in milliseconds."""
    report = load("ranks")
    precisions = list(dict.fromkeys(name.partition(",")[0] for name in report["found"]))
    rows = [
        (label, *(f"{ms:.1f}" for name in precisions for ms in report["found"][f"{name}, {count}"]))
        for label, count in (("one process", 1), ("two", 2))
    ]
    return markdown(("", *(f"{name}, T = {width}" for name in precisions for width in report["tokens"])), rows)


def methods() -> str:
    """Each method's fastest tree, at fp32 and int8."""
    reports = [load("methods")["rows"], load("methods-int8")["rows"]]
    rows = []
    for method in ("draft_model", "eagle3", "dflash", "medusa_draft", "medusa"):
        samplings = ("greedy", "T = 0.7, lossless", "T = 0.7, typical") if method == "medusa" else ("greedy",)
        for sampling in samplings:
            cells = [method if sampling == "greedy" else f"{method}, {sampling}"]
            for report in reports:
                matching = [
                    row for row in report if row["method"].partition(",")[0] == method and row["sampling"] == sampling
                ]
                best = max(matching, key=lambda row: row["speed_up"])
                cells += [str(best["nodes"]), f"{best['tokens_per_step']:.2f}", f"{best['speed_up']:.2f}x"]
            rows.append(cells)
    measures = ("tokens a step", "against plain")
    return markdown(("method", "fp32: nodes", *measures, "int8: nodes", *measures), rows)


def engines(name: str = "peers") -> str:
    """Other engines' best speeds over our plain decoding."""
    cells = load(name)["cells"]
    # OpenVINO decodes plainly with either attention implementation, and the faster one counts.
    best = {
        (cell["engine"], cell["precision"], cell["method"].replace("sdpa", "plain")): cell
        for cell in cells
        if cell["best"]
    }

    def ratio(engine: str, precision: str, method: str) -> str:
        cell = best.get((engine, precision, method))
        return "" if cell is None else f"{cell['over_our_plain'][0]:.2f}"

    methods = ("plain", "draft", "ngram", "default")
    rows = [
        (precision, ENGINES[engine], *(ratio(engine, precision, method) for method in methods))
        for precision in ("fp32", "int8", "int4")
        for engine in ENGINES
        if (engine, precision, "plain") in best
    ]
    return markdown(("weights", "engine", "plain", "draft", "n-gram", "by default"), rows)


def prompts() -> str:
    """Seconds to the first token after prompts of two lengths, by engine."""
    lengths = ("128", "1024")
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for length in lengths:
        for cell in load(f"peers-{length}")["cells"]:
            if cell["best"]:
                name = ENGINES[cell["engine"]] + (", by default" if cell["method"] == "default" else "")
                rows.setdefault((cell["precision"], name), {})[length] = cell["first_token_s"]
    cells = [(*key, *(f"{row[at]:.2f}" if at in row else "" for at in lengths)) for key, row in rows.items()]
    return markdown(("weights", "engine", "128 tokens", "1,024"), cells)


def lookup() -> str:
    """Look-ups by kind of text."""
    rows: dict[str, list[str]] = {}
    for row in load("lookup")["rows"]:
        if row["method"] != "plain":
            share, microseconds = f"{row['steps_with_draft']:.0%}", f"{row['propose_us']:.0f} us"
            text = f"{row['tokens_per_step']:.2f}, {share}, {microseconds}, {row['speed_up']:.2f}x"
            rows.setdefault(row["workload"], []).append(text)
    return markdown(("workload", "ngram", "suffix"), [(name, *cells) for name, cells in rows.items()])


def batches() -> str:
    """Requests at once, with the default against plain decoding, on code to complete, greedily."""
    rows = [row for row in load("auto")["rows"] if row["text"] == "code" and row["temperature"] == 0]
    precisions = ("fp32", "int8", "int4")
    by_load = {(row["precision"], row["concurrency"]): row for row in rows}
    table = []
    for count in sorted({row["concurrency"] for row in rows}):
        cells = [str(count)]
        for name in precisions:
            row = by_load[name, count]
            cells.append(f"{row['speeds']['plain']:.0f}, {row['speeds']['default']:.0f}, {row['over_plain']:.2f}x")
        table.append(cells)
    return markdown(("at once", *precisions), table)


def bench() -> str:
    """``specexport bench`` on one bundle with all its methods."""
    workloads = ("completion", "edit", "text")
    rows = []
    for row in load("bench-all")["rows"]:
        memory = f"{row['extra_memory_bytes'] / 1e6:.1f} MB" if row["extra_memory_bytes"] else "none"
        results = [row["workloads"].get(name) for name in workloads]
        speeds = [f"{result['tokens_per_step']:.2f}, {result['speed_up']:.2f}x" if result else "" for result in results]
        rows.append((row["method"], memory, *speeds))
    return markdown(("method", "extra memory", *workloads), rows)


def auto(result: str = "auto") -> str:
    """The default over plain decoding and over the best fixed choice: median and least of all kinds of requests."""
    rows = load(result)["rows"]
    table = []
    for name in ("fp32", "int8", "int4"):
        for count in sorted({row["concurrency"] for row in rows}):
            cells = [row for row in rows if (row["precision"], row["concurrency"]) == (name, count)]
            if not cells:
                continue
            ratios = [
                f"{statistics.median(row[key] for row in cells):.2f}x, {min(row[key] for row in cells):.2f}x"
                for key in ("over_plain", "over_best")
            ]
            table.append((f"{name}, {count}", *ratios))
    return markdown(("at once", "over plain", "over the best fixed"), table)


def serve() -> str:
    """The server under load; milliseconds at the client."""
    rows = []
    for row in load("serve")["rows"]:
        first, between = (
            " / ".join(f"{1e3 * row[f'{key}_{percentile}']:.0f}" for percentile in ("p50", "p99"))
            for key in ("first", "token")
        )
        name = {"speculation": "with speculation"}.get(row["name"], row["name"])
        rows.append((name, f"{row['tokens_per_second']:.1f}", first, between, f"{row['acceptance_length']:.2f}"))
    return markdown(("", "tokens/s", "first token", "between tokens", "tokens a step"), rows)


def losslessness() -> str:
    """The tests of the sampled distribution, for the real acceptance and for two biased ones."""
    report = load("losslessness")
    rows = []
    for name in ("lossless", "accepts 1 point too often", "accepts 1 % too often"):
        result = report[name]
        values = [p for row in report["rows"] if (row["bias"] or "lossless") == name for p in row["p"]]
        least = f"{min(values):.2g}"
        rows.append((name, str(result["cells"]), f"{result['samples']:,}", least, f"{result['overall']:.2g}"))
    return markdown(("acceptance", "cells", "samples", "least p-value", "all p-values, corrected"), rows)


def soak() -> str:
    """The soak of the server."""
    report = load("soak")
    outcomes, memory = report["outcomes"], report["memory_mb"]
    refused = sum(count for name, count in outcomes.items() if name.startswith("refused"))
    row = (
        f"{report['minutes']:g}",
        f"{report['requests']:,}",
        f"{refused:,}",
        f"{outcomes['cancelled by the client']:,}",
        str(report["errors"] + len(report["failures"])),
        f"{memory['late'] - memory['early']:.1f} MB",
        f"{report['health_ms']['max']:.0f} ms",
    )
    return markdown(("minutes", "requests", "refused", "cancelled", "failures", "growth", "/health"), [row])
