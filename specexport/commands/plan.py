"""Estimate how much memory models take on a device, whether they fit, and what speculation can gain.

Example:
    specexport plan --target Qwen/Qwen3-4B --draft Qwen/Qwen3-0.6B --device orin-nano-8gb --precision int4
"""

from __future__ import annotations

import argparse
import json

import msgspec

from specexport.building import exporter
from specexport.commands.inspect import bytes_text
from specexport.contract.engines import ENGINE_RUNTIMES
from specexport.contract.errors import BuildError
from specexport.contract.folders import expanded
from specexport.contract.manifest import MANIFEST_NAME
from specexport.contract.methods import parse_method, read_method
from specexport.contract.reading import read_manifest
from specexport.tables import Table, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``specexport plan``."""
    parser.add_argument(
        "--target", required=True, metavar="DIR_OR_ID", help="bundle, folder with a config.json, or hub id"
    )
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--draft", metavar="DIR_OR_ID", help="smaller model with the same tokenizer (default: none)")
    way.add_argument(
        "--method",
        metavar="NAME[:VALUE]",
        help="what drafts: draft_model, eagle3, dflash or mtp, as for build (default: none)",
    )
    parser.add_argument(
        "--device",
        required=True,
        metavar="NAME",
        help="device, such as orin-nano-8gb; an unknown name lists all",
    )
    parser.add_argument(
        "--precision",
        choices=("fp16", "bf16", "fp8", "int8", "int4"),
        help="type of the weights of both models (default: int4, or a bundle's own)",
    )
    parser.add_argument(
        "--max-seq-len",
        type=int,
        metavar="S",
        help="most tokens of a prompt and its output (default: 4096, or a bundle's own)",
    )
    parser.add_argument(
        "--acceptance", type=float, default=0.7, metavar="A", help="probability that a draft token is accepted"
    )
    parser.add_argument("--backend", choices=ENGINE_RUNTIMES, default="tensorrt", help="what runs the models")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def main(arguments: argparse.Namespace) -> int:
    """Runs ``specexport plan``; returns 1 if the models do not fit."""
    bundle = (expanded(arguments.target) / MANIFEST_NAME).is_file()
    if not bundle:
        exporter()
    from specexport.exporter.plan import DEVICES, EFFICIENCY, plan, plan_bundle

    device = DEVICES.get(arguments.device)
    if device is None:
        raise BuildError(f"device is {arguments.device!r}; expected one of {', '.join(DEVICES)}")
    method = parse_method(arguments.method) if arguments.method else None
    if arguments.draft is not None:
        method = read_method({"method": "draft_model", "model": arguments.draft}, "--draft")
    if bundle:
        for name in ("draft", "method", "precision", "max_seq_len"):
            if getattr(arguments, name) is not None:
                raise BuildError(
                    f"--{name.replace('_', '-')} was given with a bundle, which says so itself; leave it out, or give "
                    "the model"
                )
        manifest = read_manifest(expanded(arguments.target))
        arguments.precision, arguments.max_seq_len = manifest.target.precision.weights, manifest.max_seq_len
        found = plan_bundle(manifest, arguments.target, device, acceptance=arguments.acceptance)
        method = manifest.methods[0] if len(found.models) > 1 else None
    else:
        arguments.precision, arguments.max_seq_len = arguments.precision or "int4", arguments.max_seq_len or 4096
        found = plan(
            arguments.target,
            method,
            device,
            precision=arguments.precision,
            context=arguments.max_seq_len,
            acceptance=arguments.acceptance,
            backend=arguments.backend,
        )
    if arguments.json:
        print(json.dumps(msgspec.to_builtins(found) | {"fits": found.fits, "best_k": found.best_k}, indent=2))
        return 0 if found.fits else 1
    table = Table(
        f"{arguments.device}, {arguments.precision}, {arguments.max_seq_len} tokens",
        ("model", "parameters", "a token uses", "weights", "KV cache", "scratch", "all"),
        "lr",
    )
    for model in found.models:
        sizes = map(bytes_text, (model.weights, model.cache, model.scratch, model.total))
        table.add_row(model.source, f"{model.parameters:,}", f"{model.active:,}", *sizes)
    verdict = "fits" if found.fits else "does not fit"
    said = [
        f"{verdict}: {bytes_text(found.needed)} of {bytes_text(found.available)}",
        f"plain decoding: about {found.speeds[0]:.0f} tokens/s",
    ]
    accepted = f"if {arguments.acceptance:.0%} of draft tokens are accepted"
    if found.best_k:
        said.append(f"with the draft: about {max(found.speeds):.0f} tokens/s at K = {found.best_k}, {accepted}")
    elif method is not None:
        said.append(f"the draft gains nothing {accepted}")
    said.append(f"estimated from {EFFICIENCY:.0%} of the memory's bandwidth; not measured")
    show(table, "", *said)
    return 0 if found.fits else 1
