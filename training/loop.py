"""The training loop: schedules, optimizers, checkpoints, a progress bar."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from tqdm import tqdm

from specexport.contract.errors import TrainError
from specexport.contract.folders import writing
from specexport.exporter.checkpoints.quiet import failing_as, first_line
from specexport.training.options import LEARNING_RATES, Optimizer

Loss = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""A scalar to minimize, and figures to show by name, each a vector, such as a number per head."""
Log = Callable[[str], None]
"""Receives lines about the progress of a training."""
_HINT = "delete it to train from the start"


def progress_bar(name: str, total: int, done: int = 0) -> tqdm[NoReturn]:
    """A progress bar on standard error, shown only in a terminal."""
    shape = "{desc} {bar:20} {n_fmt}/{total_fmt} {remaining} left{postfix}"
    return tqdm(desc=name, total=total, initial=done, bar_format=shape, disable=None)


@dataclass(frozen=True)
class Schedule:
    """The factor of the learning rates: a linear warm-up, then a cosine to zero or a constant with a linear decay.

    With a constant rate, long and short runs take the same first steps (Hägele et al., arXiv 2405.18392).

    Attributes:
        decay: share of the steps at the end over which a constant rate decays to zero; None for the cosine.
    """

    steps: int
    warmup: int
    decay: float | None = None

    def __call__(self, step: int) -> float:
        """The factor at ``step``, counted from 0."""
        rising = (step + 1) / max(1, self.warmup)
        if self.decay is not None:
            return min(1.0, rising, (self.steps - step) / max(1.0, self.decay * self.steps))
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return min(rising, 0.5 * (1 + math.cos(math.pi * max(0.0, done))))


def adamw(groups: Sequence[tuple[Sequence[torch.nn.Parameter], float]]) -> torch.optim.Optimizer:
    """AdamW without weight decay, over groups of parameters with their learning rates."""
    return torch.optim.AdamW(
        [{"params": list(parameters), "lr": rate} for parameters, rate in groups], betas=(0.9, 0.95), weight_decay=0.0
    )


def optimizers(
    name: Optimizer, parameters: Collection[torch.nn.Parameter], outer: Iterable[torch.nn.Module], rate: float | None
) -> list[torch.optim.Optimizer]:
    """AdamW; or Muon for matrices, with AdamW for norms, biases and the ``outer`` modules (embedding and head).

    A rate of None is the optimizer's default. Muon's updates have a root mean square of 0.2, so that it takes AdamW's
    rates (Liu et al., arXiv 2502.16982, section 2.2).
    """
    rate = rate or LEARNING_RATES[name]
    if name == "adamw":
        return [adamw([(list(parameters), rate)])]
    outside = {id(module.weight) for module in outer}
    matrices = [parameter for parameter in parameters if parameter.ndim == 2 and id(parameter) not in outside]
    inner = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in parameters if id(parameter) not in inner]
    muon = torch.optim.Muon(matrices, lr=rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    return [muon, adamw([(others, rate)])]


@dataclass(frozen=True)
class Trained:
    """The course of a training.

    Attributes:
        history: the step, the running loss and figures, and the result of ``evaluate``, for each checkpoint.
    """

    seconds: float
    history: list[dict[str, Any]]


def train(
    name: str,
    parameters: Mapping[str, torch.nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
    schedule: Schedule,
    loss_at: Callable[[int], Loss],
    *,
    checkpoint: Path,
    log: Log,
    evaluate: Callable[[], str] | None = None,
    every: int | None = None,
    accumulate: int = 1,
) -> Trained:
    """Trains until the schedule ends, resuming from ``checkpoint`` if it exists.

    ``loss_at(number)`` must depend on nothing but the parameters and the number of the batch. A resumed run then equals
    an uninterrupted run: bit for bit on a CPU, with the same number of threads.

    Args:
        parameters: the parameters to train, by name; gradients are clipped to a total norm of 1.
        checkpoint: the checkpoint's file, which is replaced atomically.
        evaluate: returns the end of that line.
        every: number of steps between checkpoints.
        accumulate: number of batches per step.
    """
    rates = [group["lr"] for group in _groups(optimizers)]
    state: dict[str, Any] = {"step": 0, "seconds": 0.0, "running": {}, "history": []}
    if checkpoint.exists():
        state = _restore(checkpoint, parameters, optimizers, schedule)
        log(f"{name}: resuming from step {state['step']}")
    every = every or max(10, min(50, schedule.steps // 10))
    began = time.monotonic() - state["seconds"]
    with progress_bar(name, schedule.steps, state["step"]) as bar:
        for step in range(state["step"], schedule.steps):
            for group, rate in zip(_groups(optimizers), rates, strict=True):
                group["lr"] = rate * schedule(step)
            figures = _add_gradients(loss_at, range(step * accumulate, (step + 1) * accumulate))
            if not math.isfinite(figures["loss"][0]):
                raise TrainError(
                    f"{name}: the loss is {figures['loss'][0]} at step {step + 1}; try a smaller learning rate (--lr), "
                    "or --precision fp32"
                )
            torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            state["step"] = step + 1
            state["running"] = {
                figure: [0.95 * a + 0.05 * b for a, b in zip(state["running"].get(figure, new), new, strict=True)]
                for figure, new in figures.items()
            }
            bar.set_postfix_str(_words(state["running"]), refresh=False)
            bar.update()
            if state["step"] % every == 0 or state["step"] == schedule.steps:
                evaluation = evaluate() if evaluate is not None else ""
                state["seconds"] = time.monotonic() - began
                summary = " ".join(filter(None, (_words(state["running"]), evaluation)))
                with bar.external_write_mode():  # printed above the bar
                    log(f"{name}: step {state['step']}/{schedule.steps} {summary} after {state['seconds']:.0f} s")
                entry = {"step": state["step"], **state["running"]}
                state["history"].append(entry | ({"evaluation": evaluation} if evaluation else {}))
                trained = {key: value.detach() for key, value in parameters.items()}
                states = [optimizer.state_dict() for optimizer in optimizers]
                save_tensors(checkpoint, state | {"parameters": trained, "optimizers": states})
    return Trained(round(state["seconds"], 1), state["history"])


def _groups(optimizers: Iterable[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def _add_gradients(loss_at: Callable[[int], Loss], numbers: range) -> dict[str, list[float]]:
    """Adds the gradients of the mean loss of batches; returns the means of the loss and of the figures."""
    means: dict[str, list[float]] = {}
    for number in numbers:
        loss, figures = loss_at(number)
        (loss / len(numbers)).backward()  # type: ignore[no-untyped-call]
        for figure, value in {"loss": loss, **figures}.items():
            part = [x / len(numbers) for x in value.detach().flatten().tolist()]
            means[figure] = [a + b for a, b in zip(means[figure], part, strict=True)] if figure in means else part
    return means


def _words(running: Mapping[str, Sequence[float]]) -> str:
    """Formats figures in one line."""
    return " ".join(
        f"{figure} {values[0]:.3f}" if len(values) == 1 else f"{figure} " + " ".join(f"{x:.2f}" for x in values)
        for figure, values in running.items()
    )


def _restore(
    path: Path,
    parameters: Mapping[str, torch.nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
    schedule: Schedule,
) -> dict[str, Any]:
    """Restores parameters and optimizers from a checkpoint; returns its other entries."""
    state = load_tensors(path)
    kinds = {"step": int, "seconds": float, "running": dict, "history": list, "parameters": dict, "optimizers": list}
    for key, kind in kinds.items():
        if not isinstance(state.get(key), kind):
            raise TrainError(f"{path}: {key} is {type(state.get(key)).__name__}, expected {kind.__name__}; {_HINT}")
    stored = state["parameters"]
    if not 0 <= state["step"] <= schedule.steps or list(stored) != list(parameters):
        raise TrainError(
            f"{path}: {len(stored)} parameters after {state['step']} steps; expected {len(parameters)}, and at most "
            f"{schedule.steps} steps. It belongs to another training; {_HINT}"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            if not isinstance(stored[name], torch.Tensor) or stored[name].shape != parameter.shape:
                shape = list(getattr(stored[name], "shape", ()))
                raise TrainError(f"{path}: {name!r} is {shape}, expected {list(parameter.shape)}; {_HINT}")
            parameter.copy_(stored[name])
    try:
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
    except (ValueError, KeyError, TypeError) as error:
        raise TrainError(f"{path}: its optimizers belong to another training ({error}); {_HINT}") from error
    return {key: state[key] for key in ("step", "seconds", "running", "history")}


def save_tensors(path: Path, state: dict[str, Any]) -> None:
    """Writes tensors and numbers to a file, atomically."""
    partial = path.with_suffix(".tmp")
    try:
        # Given a path, torch reports a full disk as a failure of a stream.
        with writing(path), partial.open("wb") as file:
            torch.save(state, file)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load_tensors(path: Path) -> dict[str, Any]:
    """Reads a file of :func:`save_tensors`, without running code in it."""
    with failing_as(lambda error: f"{path}: no checkpoint of a training ({first_line(error)}); {_HINT}", TrainError):
        state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict):
        raise TrainError(f"{path}: holds {type(state).__name__}, expected a dictionary; {_HINT}")
    return state
