"""The device, models, data, work folder and output of a training."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic

import torch
from transformers import AutoTokenizer

from specexport import __version__
from specexport.contract.errors import TrainError
from specexport.contract.folders import write_file, write_lock, written_beside
from specexport.contract.values import counted
from specexport.exporter.checkpoints.config import load_causal_lm, read_configs, require_stored
from specexport.exporter.checkpoints.locate import locate
from specexport.exporter.checkpoints.quiet import failing_as, quiet
from specexport.exporter.checkpoints.stored import share_weights
from specexport.training.data import Windows, read_windows, sampled_windows
from specexport.training.distill import sample_texts
from specexport.training.loop import Log, Loss, Schedule, train
from specexport.training.options import RECORD, O, RunOptions

_SETTINGS = "settings.json"
_MEASURED_TEXTS = 64
"""Maximum number of texts sampled for evaluation."""


@dataclass(frozen=True)
class Place:
    """The device and the precision of a training.

    Attributes:
        bf16: whether matrices are multiplied in bfloat16; trained weights are float32 anyway.
    """

    device: torch.device
    bf16: bool

    @property
    def frozen_dtype(self) -> torch.dtype:
        """The dtype of weights that are not trained."""
        return torch.bfloat16 if self.bf16 else torch.float32

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)


def _choose_place(options: RunOptions) -> Place:
    """The device and precision that options ask for; ``auto`` prefers a GPU, and bfloat16 where it is fast."""
    cuda = torch.cuda.is_available()
    if options.device == "cuda" and not cuda:
        raise TrainError("--device cuda: torch finds no CUDA device; pass --device cpu, or install torch with CUDA")
    kind = "cuda" if cuda and options.device != "cpu" else "cpu"
    bf16 = options.precision == "bf16"
    if options.precision == "auto":
        # CPUs without these instructions emulate bfloat16, several times slower than float32.
        bf16 = torch.cuda.is_bf16_supported() if kind == "cuda" else torch.cpu._is_avx512_bf16_supported()
    return Place(torch.device(kind), bf16)


@dataclass(frozen=True)
class TrainingModel:
    """A causal LM and its tokenizer.

    Attributes:
        path: the local folder; empty for a new model.
        model: the model in evaluation mode, without dropout; no parameter requires a gradient.
        stored: dtype of the checkpoint's weights.
    """

    path: Path
    model: Any
    tokenizer: Any
    stored: torch.dtype
    ends: tuple[int, ...]
    max_positions: int
    place: Place

    @property
    def layers(self) -> int:
        return int(self.model.config.num_hidden_layers)

    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights of the embedding and of the head, ``[V,H]`` each."""
        table, head = self.model.get_input_embeddings().weight, self.model.get_output_embeddings().weight
        if table.shape != head.shape:
            raise TrainError(
                f"{self.path}: its embedding is {list(table.shape)} and its head {list(head.shape)}; expected the "
                "same shape, as the draft uses both"
            )
        return table, head

    def fingerprint(self) -> str:
        """A hash of the checkpoint's settings and of a sample of its weights."""
        if self.path == Path():
            return "new"
        digest = hashlib.sha256((self.path / "config.json").read_bytes())
        for file in sorted(self.path.glob("*.safetensors")):
            size = file.stat().st_size
            with file.open("rb") as stream:
                stream.seek(max(0, size - (1 << 20)))
                digest.update(f"{file.name} {size}".encode() + stream.read())
        return digest.hexdigest()[:16]


def load_target(options: RunOptions, *, frozen: bool = True) -> TrainingModel:
    """Loads the target of a training onto the device of the options; see :func:`load_model`."""
    return load_model(options.target, _choose_place(options), frozen=frozen)


def load_model(source: str, place: Place, *, frozen: bool) -> TrainingModel:
    """Loads a model in float32, or in ``place.frozen_dtype`` if it is ``frozen``, that is, not trained."""
    path = locate(source)
    with failing_as(lambda error: f"{path}: could not be loaded: {error}", TrainError), quiet():
        whole, config = read_configs(path)
        require_stored(path, config)
        stored = config.dtype
        # torch's attention would silently ignore Gemma 2's soft cap.
        attention = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"
        dtype = place.frozen_dtype if frozen else torch.float32
        model, *_ = load_causal_lm(path, config, dtype=dtype, attn_implementation=attention)
    with failing_as(lambda error: f"{path}: its tokenizer could not be loaded: {error}", TrainError):
        tokenizer = AutoTokenizer.from_pretrained(path, config=whole, trust_remote_code=False)
    if not getattr(tokenizer, "is_fast", False):
        raise TrainError(f"{path}: its tokenizer ({type(tokenizer).__name__}) has no fast form")
    if model.get_output_embeddings() is None:
        raise TrainError(f"{path}: model family '{config.model_type}' has no language-model head; expected a causal LM")
    ends = model.generation_config.eos_token_id
    if ends is None:
        ends = tokenizer.eos_token_id
    longest = getattr(config, "max_position_embeddings", None)
    return TrainingModel(
        path=path,
        model=model.to(place.device).eval().requires_grad_(False),
        tokenizer=tokenizer,
        stored=stored if isinstance(stored, torch.dtype) else torch.float32,
        ends=(ends,) if isinstance(ends, int) else tuple(ends or ()),
        max_positions=longest if isinstance(longest, int) else 1 << 30,
        place=place,
    )


def save_model(
    folder: Path, model: Any, tokenizer: Any, extra_tensors: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Writes a Hugging Face folder, with ``extra_tensors`` besides the model's."""
    with quiet():
        model.save_pretrained(folder, state_dict=model.state_dict() | dict(extra_tensors or {}))
        tokenizer.save_pretrained(folder)
    share_weights(folder)


@dataclass
class Run(Generic[O]):
    """A training run, from its data to its output folder.

    Attributes:
        record: the content of ``training.json``.
    """

    options: O
    log: Log
    target: TrainingModel
    window: int
    prompt: int
    windows: Windows
    held_out: Windows
    work: Path
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> Place:
        return self.target.place

    @property
    def total_steps(self) -> int:
        """The number of optimizer steps over the data."""
        options, windows = self.options, len(self.windows)
        return options.steps or max(1, round(options.epochs * windows / (options.batch_size * options.accumulate)))

    def prepare(self, texts: int) -> None:
        """Replaces the data with ``texts`` texts of the target, unless 0; logs the data; seeds torch's generator."""
        if texts:
            self.self_distill(self.target, texts)
        self.describe_data()
        torch.manual_seed(self.options.seed)

    def describe_data(self) -> None:
        """Logs and records the training data."""
        learnt, tokens = int(self.windows.learn.sum()), self.windows.ids.numel()
        self.log(
            f"data: {counted(len(self.windows), 'window')} of {self.window} tokens, {learnt / tokens:.0%} of them to "
            f"learn; {counted(len(self.held_out), 'window')} held out"
        )
        counts = {"windows": len(self.windows), "tokens": tokens, "learnt_tokens": learnt}
        self.record = counts | {"held_out_windows": len(self.held_out)} | self.record

    def texts_of(self, model: TrainingModel, data: Windows, count: int, name: str) -> Windows:
        """Samples ``count`` continuations of prompts cut from ``data``; stores them in the work folder as ``name``."""
        ids = sample_texts(
            model.model,
            lambda rows, generator: data.prompts(rows, self.prompt, generator),
            count,
            self.window - self.prompt,
            seed=self.options.seed,
            work=self.work / name,
            rows=self.options.sample_batch,
        )
        return sampled_windows(ids, self.prompt, model.ends)

    def self_distill(self, model: TrainingModel, count: int) -> None:
        """Replaces the data with texts of the model: ``count`` to learn, and an eighth as many to hold out."""
        self.windows = self.texts_of(model, self.windows, count, "sampled-train")
        self.held_out = self.texts_of(model, self.held_out, min(_MEASURED_TEXTS, -(-count // 8)), "sampled-held-out")

    def batch(self, number: int, seed: int) -> Windows:
        return self.windows.rows(self.windows.order(number, self.options.batch_size, seed)).to(self.place.device)

    def train(
        self,
        name: str,
        parameters: Mapping[str, torch.nn.Parameter],
        optimizers: Sequence[torch.optim.Optimizer],
        steps: int,
        loss_at: Callable[[int], Loss],
        evaluate: Callable[[], str] | None = None,
    ) -> None:
        """Trains with :func:`specexport.training.loop.train`, and records the result under ``name``."""
        options = self.options
        self.record[name] = asdict(
            train(
                name,
                parameters,
                optimizers,
                Schedule(steps, round(options.warmup * steps)),
                loss_at,
                checkpoint=self.work / f"{name}.pt",
                log=self.log,
                evaluate=evaluate,
                every=options.save_every,
                accumulate=options.accumulate,
            )
        )

    @contextlib.contextmanager
    def output(self) -> Iterator[Path]:
        """Context of a folder that becomes the output, with the record, if the block succeeds."""
        with written_beside(self.options.output, overwrite=self.options.overwrite) as folder:
            yield folder
            (folder / RECORD).write_text(json.dumps(self.record, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def open_run(command: str, options: O, target: TrainingModel, log: Log, *drafts: TrainingModel) -> Iterator[Run[O]]:
    """Context of a run, with its data and its work folder, from which a run with the same options resumes.

    The target's tokenizer encodes the data; ``drafts`` are further models on which the result depends.
    """
    window, prompt = options.lengths(min(model.max_positions for model in (target, *drafts)))
    windows, held_out = _read(options, target.tokenizer, window)
    settings = options.settings() | {
        "target": target.fingerprint(),
        "drafts": [draft.fingerprint() for draft in drafts],
        "data": windows.fingerprint(),
        "held_out": held_out.fingerprint(),
        "bf16": target.place.bf16,
    }
    with _work_folder(options, settings, log) as work:
        run = Run(options, log, target, window, prompt, windows, held_out, work)
        run.record |= {
            "command": command,
            "specexport": __version__,
            "torch": torch.__version__,
            "options": options.record(),
            "device": str(run.place.device),
            "bf16": run.place.bf16,
        }
        yield run


def _read(options: RunOptions, tokenizer: Any, window: int) -> tuple[Windows, Windows]:
    windows = read_windows(options.data, tokenizer, seq_len=window, seed=options.seed)
    share = options.held_out_share()
    if share is not None:
        return windows.hold_out(share)
    return windows, read_windows([Path(options.held_out)], tokenizer, seq_len=window, seed=options.seed)


@contextlib.contextmanager
def _work_folder(options: RunOptions, settings: Mapping[str, Any], log: Log) -> Iterator[Path]:
    """Context of the locked work folder: the user's, which is kept, or ``OUTPUT.work``, which a success deletes.

    A run that fails before it has stored anything leaves no folder.
    """
    work = options.work if options.work is not None else options.output.parent / f"{options.output.name}.work"
    work.parent.mkdir(parents=True, exist_ok=True)
    with write_lock(work):
        _claim(work, settings)
        try:
            yield work
        except BaseException as error:
            if list(work.iterdir()) == [work / _SETTINGS]:  # so that other options may follow
                shutil.rmtree(work)
            elif isinstance(error, (KeyboardInterrupt, SystemExit)):
                log(f"stopped; the same command resumes from {work}")
            raise
        if options.work is None:
            shutil.rmtree(work)


def _claim(work: Path, settings: Mapping[str, Any]) -> None:
    """Makes a folder the work folder of a training, or checks that it is."""
    path = work / _SETTINGS
    expected = json.loads(json.dumps(settings))
    if path.is_file():
        try:
            stored = dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise TrainError(f"{path}: {error}; delete the folder to train from the start") from error
        for name in [*expected, *stored]:
            if stored.get(name) != expected.get(name):
                raise TrainError(
                    f"{work}: holds an unfinished training with {name} {stored.get(name)}, not {expected.get(name)}. "
                    "Train with the same options to resume, delete the folder to start again, or choose another with "
                    "--work"
                )
    elif work.exists() and (not work.is_dir() or any(work.iterdir())):
        raise TrainError(f"{work}: exists and is no work folder; choose another with --work")
    else:
        work.mkdir(exist_ok=True)
        write_file(path, json.dumps(expected, indent=2).encode() + b"\n")
