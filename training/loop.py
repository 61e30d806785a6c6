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
from specexport.training.muon import Muon
from specexport.training.options import LEARNING_RATES, Optimizer

Loss = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""A scalar to minimise, and figures to show by name, each a vector, such as one number a head."""
Log = Callable[[str], None]
"""Is given lines that say how a training goes."""


def progress_bar(name: str, total: int, done: int = 0) -> tqdm[NoReturn]:
    """A bar on standard error, if it is a terminal, with what is done and how long the rest takes."""
    shape = "{desc} {bar:20} {n_fmt}/{total_fmt} {remaining} left{postfix}"
    return tqdm(desc=name, total=total, initial=done, bar_format=shape, disable=None)


@dataclass(frozen=True)
class Schedule:
    """The factor on the learning rates: a linear warm-up, then a cosine to zero, or a constant and a linear decay.

    The constant middle makes the first steps of a long and of a short run the same (Hägele et al., arXiv 2405.18392).

    Attributes:
        decay: share of the steps at the end over which a constant rate decays to zero; None is the cosine.
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
    """AdamW without weight decay, over groups of parameters with a learning rate each."""
    return torch.optim.AdamW(
        [{"params": list(parameters), "lr": rate} for parameters, rate in groups], betas=(0.9, 0.95), weight_decay=0.0
    )


def muon_and_adamw(
    parameters: Iterable[torch.nn.Parameter], outer: Iterable[torch.nn.Module], rate: float
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, and AdamW for norms, biases and the ``outer`` ones: embedding and output projection."""
    outside = {id(module.weight) for module in outer}
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for parameter in parameters:
        (matrices if parameter.ndim == 2 and id(parameter) not in outside else others).append(parameter)
    return [Muon(matrices, lr=rate, weight_decay=0.05), adamw([(others, rate)])]


def optimizers(
    name: Optimizer, parameters: Collection[torch.nn.Parameter], outer: Iterable[torch.nn.Module], rate: float | None
) -> list[torch.optim.Optimizer]:
    """Those of a name in :data:`LEARNING_RATES`; see :func:`muon_and_adamw`.

    Args:
        name: ``adamw`` or ``muon``.
        parameters: to train.
        outer: the output projection and the embedding, of those that are trained.
        rate: the learning rate; None for the name's own.
    """
    rate = rate or LEARNING_RATES[name]
    return muon_and_adamw(parameters, outer, rate) if name == "muon" else [adamw([(list(parameters), rate)])]


@dataclass(frozen=True)
class Trained:
    """What a training did.

    Attributes:
        seconds: spent in all runs.
        history: at each checkpoint the step, the running loss and figures, and what ``evaluate`` said.
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
    """Trains until the schedule ends, from where ``checkpoint`` left off if there is one.

    ``loss_at(batch)`` must depend on nothing but the parameters and the batch's number. A run that goes on from a
    checkpoint is then equal to a whole one: bit for bit on a CPU, with the same number of threads.

    Args:
        name: to show.
        parameters: what is trained, by name; gradients are clipped to a norm of 1 over all of it.
        optimizers: over the same parameters.
        schedule: factor on the learning rates the optimizers have now.
        loss_at: the loss of a batch, of which a step takes ``accumulate``.
        checkpoint: file, written beside its place and renamed.
        log: given a line at each checkpoint.
        evaluate: called for a line's last words.
        every: steps from a checkpoint to the next.
        accumulate: batches a step.

    Raises:
        TrainError: the checkpoint is malformed or of another training, or the loss is not finite any more.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    rates = [group.setdefault("base_lr", group["lr"]) for group in groups]
    state: dict[str, Any] = {"step": 0, "seconds": 0.0, "running": {}, "history": []}
    if checkpoint.exists():
        state = _restore(checkpoint, parameters, optimizers, schedule)
        # The optimizers' groups are new ones now.
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        log(f"{name}: going on from step {state['step']}")
    step, running, history = state["step"], state["running"], state["history"]
    every = every or max(10, min(50, schedule.steps // 10))
    began = time.monotonic() - state["seconds"]
    with progress_bar(name, schedule.steps, step) as bar:
        while step < schedule.steps:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * schedule(step)
            seen: dict[str, list[float]] = {}
            for part in range(accumulate):
                loss, figures = loss_at(step * accumulate + part)
                (loss / accumulate).backward()  # type: ignore[no-untyped-call]
                for figure, value in {"loss": loss, **figures}.items():
                    added = [x / accumulate for x in value.detach().flatten().tolist()]
                    seen[figure] = [a + b for a, b in zip(seen[figure], added, strict=True)] if part else added
            if not math.isfinite(seen["loss"][0]):
                raise TrainError(
                    f"{name}: the loss is {seen['loss'][0]} at step {step + 1}; try a smaller learning rate (--lr), or "
                    "--precision fp32"
                )
            torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            running = {
                figure: [0.95 * old + 0.05 * new for old, new in zip(running.get(figure, values), values, strict=True)]
                for figure, values in seen.items()
            }
            bar.set_postfix_str(_words(running), refresh=False)
            bar.update()
            if step % every == 0 or step == schedule.steps:
                said = evaluate() if evaluate is not None else ""
                spent = time.monotonic() - began
                with bar.external_write_mode():  # above the bar
                    log(f"{name}: step {step} {_words(running)} {said + ' ' if said else ''}after {spent:.0f} s")
                history.append({"step": step, **running} | ({"evaluation": said} if said else {}))
                state = {"step": step, "seconds": spent, "running": running, "history": history}
                state["parameters"] = {key: value.detach() for key, value in parameters.items()}
                state["optimizers"] = [optimizer.state_dict() for optimizer in optimizers]
                save_tensors(checkpoint, state)
    return Trained(round(state["seconds"], 1), history)


def _words(running: Mapping[str, Sequence[float]]) -> str:
    """Figures in a line."""
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
    """Puts a checkpoint's numbers where they belong; returns the rest of it."""
    state = load_tensors(path)
    kinds = {"step": int, "seconds": float, "running": dict, "history": list, "parameters": dict, "optimizers": list}
    for key, kind in kinds.items():
        if not isinstance(state.get(key), kind):
            raise TrainError(f"{path}: {key} is {type(state.get(key)).__name__}, expected {kind.__name__}; {_ANEW}")
    found = state["parameters"]
    if not 0 <= state["step"] <= schedule.steps or list(found) != list(parameters):
        raise TrainError(
            f"{path}: {len(found)} parameters after {state['step']} steps; expected {len(parameters)} and at most "
            f"{schedule.steps}. It is of another training; {_ANEW}"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            if not isinstance(found[name], torch.Tensor) or found[name].shape != parameter.shape:
                shape = list(getattr(found[name], "shape", ()))
                raise TrainError(f"{path}: {name!r} is {shape}, expected {list(parameter.shape)}; {_ANEW}")
            parameter.copy_(found[name])
    try:
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
    except (ValueError, KeyError, TypeError) as error:
        raise TrainError(f"{path}: its optimizers are of another training ({error}); {_ANEW}") from error
    return state


_ANEW = "delete it to train from the start"


def save_tensors(path: Path, state: dict[str, Any]) -> None:
    """Writes tensors and numbers into a file that appears only when it is whole."""
    partial = path.with_suffix(".tmp")
    with writing(path), partial.open("wb") as file:  # by name torch would say of a full disk that a stream failed
        torch.save(state, file)
    partial.replace(path)


def load_tensors(path: Path) -> dict[str, Any]:
    """Reads a file of ours with tensors and numbers; nothing in it is run.

    Raises:
        TrainError: it cannot be read.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle and zip errors of many kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise TrainError(f"{path}: not a file this training wrote ({reason}); {_ANEW}") from error
    if not isinstance(state, dict):
        raise TrainError(f"{path}: holds {type(state).__name__}, expected a dictionary; {_ANEW}")
    return state
