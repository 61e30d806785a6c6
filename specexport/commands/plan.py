"""Commands before a build: ``plan`` and ``suggest``."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from specexport.building import needs_extra
from specexport.commands.flags import UsageError
from specexport.contract.engines import EngineRuntime
from specexport.contract.errors import BuildError
from specexport.contract.folders import expanded
from specexport.contract.manifest import Manifest
from specexport.contract.methods import method_name, parse_method, read_method, text_methods
from specexport.contract.options import Options, dashed, option
from specexport.contract.reading import is_bundle, read_manifest
from specexport.tables import Table, bytes_text, show

if TYPE_CHECKING:
    from specexport.exporter.plan import DevicePlan


class _TargetOptions(Options, frozen=True, kw_only=True):
    """Options of commands that need no build.

    Attributes:
        model: bundle, folder with a config.json, hub id or .gguf file.
        target: the same, as a flag (default: TARGET).
    """

    model: Annotated[str | None, option("TARGET", positional=True)] = None
    target: Annotated[str | None, option("TARGET")] = None

    def check(self) -> None:
        """Requires the argument or the flag."""
        if (self.model is None) == (self.target is None):
            raise UsageError("give a bundle or a model, either by itself or with --target")

    @property
    def source(self) -> str:
        """The bundle or the model."""
        return self.target or self.model or ""


class PlanOptions(_TargetOptions, frozen=True, kw_only=True):
    """Options of ``specexport plan``.

    Attributes:
        draft: smaller model with the same tokenizer (default: none).
        method: method with a draft, as for build: draft_model, universal_draft, eagle3, dflash or mtp (default: none).
        device: device, such as orin-nano-8gb; an unknown name lists all.
        precision: precision of the weights of both models (default: int4, or the bundle's).
        max_seq_len: maximum number of tokens of a prompt and its output (default: the model's, at most 4096, or the
            bundle's).
        acceptance: probability that a draft token is accepted (default: 0.7).
        backend: backend that runs the models (default: tensorrt, or the bundle's).
        json: print the plan as JSON.
    """

    draft: Annotated[str | None, option("DIR_OR_ID")] = None
    method: Annotated[str | None, option("NAME[:VALUE]")] = None
    device: Annotated[str, option("NAME")]
    precision: Literal["fp16", "bf16", "fp8", "int8", "int4"] | None = None
    max_seq_len: Annotated[int | None, option("S", ge=2)] = None
    acceptance: Annotated[float | None, option("A", ge=0, lt=1)] = None
    backend: EngineRuntime | None = None
    json: bool = False

    def check(self) -> None:
        """Also refuses a draft besides a method."""
        super().check()
        if self.draft is not None and self.method is not None:
            raise UsageError("--draft was given with --method; give one of them")


def plan_command(command: PlanOptions) -> int:
    """Estimate the memory of models on a device, whether they fit, and how much speculation can gain.

    Example:
        specexport plan Qwen/Qwen3-4B --draft Qwen/Qwen3-0.6B --device orin-nano-8gb --precision int4
    """
    from specexport.exporter.plan import DEVICES, EFFICIENCY, plan, plan_bundle

    target, acceptance = command.source, 0.7 if command.acceptance is None else command.acceptance
    device = DEVICES.get(command.device)
    if device is None:
        raise BuildError(f"device is {command.device!r}; expected one of {', '.join(DEVICES)}", param="device")
    method = parse_method(command.method) if command.method else None
    if command.draft is not None:
        method = read_method({"method": "draft_model", "model": command.draft}, "--draft")
    if is_bundle(target):
        for name in ("draft", "method", "precision", "max_seq_len", "backend"):
            if getattr(command, name) is not None:
                raise UsageError(
                    f"{dashed(name)} was given with a bundle, which is built already; leave it out, or give the model"
                )
        manifest = read_manifest(expanded(target))
        estimate = plan_bundle(manifest, target, device, acceptance=acceptance)
        methods = [method for method in manifest.methods if method.needs_graph]
        drafts = next((method.name for method in methods if method.draft is not None), None)
        without = ", ".join(method.name for method in methods if method.draft is None)
        stored = ", ".join(dict.fromkeys(model.precision.weights for model in manifest.models.values()))
        title = f"{command.device}, {stored} as built, {manifest.max_seq_len} tokens"
    else:
        precision = command.precision or "int4"
        with needs_extra(f"{target}: reading this model", "export"):
            estimate = plan(
                target,
                method,
                device,
                precision=precision,
                context=command.max_seq_len,
                acceptance=acceptance,
                backend=command.backend or "tensorrt",
            )
        drafts, without = (method.name if method else None), ""
        title = f"{command.device}, {precision}, {estimate.context} tokens"
    if drafts is None and command.acceptance is not None:
        raise UsageError("--acceptance was given without a draft; leave it out")
    if command.json:
        print(json.dumps(msgspec.to_builtins(estimate) | {"fits": estimate.fits, "best_k": estimate.best_k}, indent=2))
    else:
        notes = _notes(estimate, acceptance, drafts)
        if without:
            notes.append(f"{without}: part of the target's graph; 'specexport bench' measures the gain")
        notes.append(f"estimated from {EFFICIENCY:.0%} of the memory's bandwidth, not measured")
        show(_models(title, estimate), "", *notes)
    return 0 if estimate.fits else 1


def _models(title: str, estimate: DevicePlan) -> Table:
    table = Table(title, ("model", "parameters", "a token uses", "weights", "KV cache", "scratch", "all"), "lr")
    for model in estimate.models:
        sizes = map(bytes_text, (model.weights, model.cache, model.scratch, model.total))
        table.add_row(model.source, f"{model.parameters:,}", f"{model.active:,}", *sizes)
    return table


def _notes(estimate: DevicePlan, acceptance: float, drafts: str | None) -> list[str]:
    """Sentences about memory and speed; ``drafts`` is the method with a draft, if there is one."""
    verdict = "fits" if estimate.fits else "does not fit"
    notes = [
        f"{verdict}: {bytes_text(estimate.needed)} of {bytes_text(estimate.available)}",
        f"plain decoding: about {estimate.speeds[0]:.0f} tokens/s",
    ]
    accepted = f"if {acceptance:.0%} of draft tokens are accepted"
    if estimate.best_k:
        notes.append(f"with {drafts}: about {max(estimate.speeds):.0f} tokens/s at K = {estimate.best_k}, {accepted}")
    elif drafts is not None:
        notes.append(f"{drafts} gains nothing {accepted}")
    return notes


class SuggestOptions(_TargetOptions, frozen=True, kw_only=True):
    """Options of ``specexport suggest``.

    Attributes:
        draft: a smaller model to choose from (default: none).
        device: device that will run the bundle.
    """

    draft: Annotated[tuple[str, ...], option("DIR_OR_ID", repeat=True)] = ()
    device: Literal["cpu", "gpu"] = "cpu"


def suggest_command(command: SuggestOptions) -> int:
    """Suggest methods for a model or a bundle's target; 'bench' measures the methods of a bundle.

    Examples:
        specexport suggest Qwen/Qwen3-4B --draft Qwen/Qwen3-0.6B --draft Qwen/Qwen3-1.7B
        specexport suggest qwen3/
    """
    target = command.source
    with needs_extra(f"{target}: reading this model", "export"):
        from specexport.exporter.suggest import suggest

        advice = suggest(target, command.draft, command.device)
    manifest = read_manifest(expanded(target)) if is_bundle(target) else None
    table = Table(
        f"{target}: {advice.parameters:,} parameters, on a {command.device.upper()}",
        ("method", *([] if manifest is None else ["in this bundle"]), "settings", "why"),
    )
    for suggestion in advice.suggestions:
        state = [] if manifest is None else [_state(manifest, suggestion.method)]
        table.add_row(suggestion.method, *state, suggestion.settings, suggestion.why)
    show(table)
    if advice.active < advice.parameters:
        print(
            f"a token uses {advice.active:,} of the parameters: a step of several tokens reads more experts than a "
            "plain step, so that speculation gains less than with a dense model of that size; 'bench' measures it"
        )
    for name, reason in advice.refused.items():
        print(f"not {name}: {reason}")
    built = () if manifest is None or command.draft else [method.name for method in manifest.methods]
    flags = [flag for suggestion in advice.suggestions if suggestion.method not in built for flag in suggestion.flags]
    if manifest is None:
        print("\n" + _build(target, flags))
        return 0
    names = ", ".join(method.name for method in manifest.methods) or "no method"
    print(f"\nbuilt for {names}; text is looked up in any case. To compare them on this machine:")
    print(shlex.join(["specexport", "bench", target, "--methods", "all"]))
    print("\nother methods need another build of the target" + (", for instance:" if flags else ""))
    if flags:
        flags += ["--precision", manifest.target.precision.weights]
        print(_build(manifest.target.source, flags))
    return 0


def _state(manifest: Manifest, name: str) -> str:
    if any(method.name == name for method in manifest.methods):
        return "built"
    return "always" if any(method_name(kind) == name for kind in text_methods()) else "not built"


def _build(target: str, flags: list[str]) -> str:
    return shlex.join(["specexport", "build", "--target", target, *flags, "-o", "bundle/"])
