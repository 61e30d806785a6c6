"""``specexport train draft``: from a target and data to a draft model that speaks as it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specexport.checkpoints.checkpoint import load_tokenizer, require_same_tokenizer
from specexport.contract.errors import TrainError
from specexport.contract.folders import written_beside
from specexport.training.data import Windows, sampled_windows, seeded
from specexport.training.distill import (
    DIVERGENCES,
    acceptance_length,
    accepted_positions,
    continue_text,
    distillation_loss,
    inherit_embedding,
    mixed_temperatures,
    own_texts,
)
from specexport.training.loop import Loss, Schedule, adamw, muon_and_adamw, train
from specexport.training.options import RunOptions, within
from specexport.training.setup import (
    Place,
    TrainingModel,
    Watch,
    choose_place,
    described,
    fingerprint,
    load_model,
    new_record,
    run_settings,
    save_model,
    told,
    work_folder,
    write_record,
)

SAMPLES = ("target", "draft", "data")
_RATES = {"adamw": 3e-4, "muon": 4e-3}
"""Learning rates by optimizer."""
_MEASURED_TEXTS, _MEASURED_TOKENS = 32, 96
_MEASURED_DEPTHS = range(1, 7)
_SHOWN_DEPTH = 4


@dataclass(frozen=True, kw_only=True)
class DraftOptions(RunOptions):
    """What ``specexport train draft`` is asked for; each field is the flag of its name.

    Attributes:
        draft: folder or hub id to start from.
        layers: instead of ``draft``, of a new Llama.
        hidden: instead of ``draft``, its hidden size.
        divergence: one of ``DIVERGENCES``.
        samples: whose texts are learnt: the target's, the draft's own as it is (on-policy), or the data.
        texts: with samples ``target``, how many are sampled.
        optimizer: ``adamw`` or ``muon``.
    """

    draft: str | None = None
    layers: int | None = None
    hidden: int | None = None
    divergence: str = "forward_kl"
    samples: str = "target"
    texts: int = 1024
    optimizer: str = "adamw"

    def check(self) -> None:
        super().check()
        within("layers", self.layers, 1, 64)
        within("hidden", self.hidden, 32, 8192)
        within("texts", self.texts, 1)
        if self.divergence not in DIVERGENCES:
            raise TrainError(f"--divergence: {self.divergence!r}; expected one of {', '.join(DIVERGENCES)}")
        if self.samples not in SAMPLES:
            raise TrainError(f"--samples: {self.samples!r}; expected one of {', '.join(SAMPLES)}")
        new = [f"--{name}" for name in ("layers", "hidden") if getattr(self, name) is not None]
        if self.draft is not None and new:
            raise TrainError(f"--draft was given together with {new[0]}, which is of a draft that starts from nothing")
        if self.draft is None and len(new) < 2:
            raise TrainError("no draft to train; expected --draft, or --layers and --hidden for a new one")
        if self.samples != "target" and self.texts != DraftOptions.texts:
            raise TrainError(
                f"--texts was given with --samples {self.samples}; only those of a target are sampled once"
            )


def train_draft(options: DraftOptions, watch: Watch) -> dict[str, Any]:
    """Trains a draft and writes it as a Hugging Face folder.

    A run that was interrupted goes on from its last checkpoint when it is started again with the same options.

    Returns:
        The record that the output holds as ``training.json``; its ``acceptance`` are mean tokens a step for one to six
        draft tokens, before and after.

    Raises:
        SpecExportError: an option, the data, a model or a checkpoint is wrong; says which.
    """
    options.check()
    place = choose_place(options.device, options.precision)
    target = load_model(options.target, place, frozen=True)
    torch.manual_seed(options.seed)
    draft = _draft(options, target, place)
    window, prompt = options.lengths(min(target.max_positions, draft.max_positions))
    windows, held_out = options.read(target.tokenizer, window)
    settings = run_settings(options, target, windows, held_out, place)
    settings["draft"] = fingerprint(draft.path) if options.draft is not None else None
    with work_folder(options.work, options.output, settings) as work:
        measured = _Measured(target, held_out, prompt, options.seed, place)
        before = measured.lengths(draft.model)
        texts = windows
        if options.samples == "target":
            texts = own_texts(target, windows, options.texts, prompt, options, work=work / "sampled", watch=watch)
        watch.log(described(texts, held_out))
        rate = options.lr or _RATES[options.optimizer]
        parameters = dict(draft.model.named_parameters())
        optimizers = (
            muon_and_adamw(draft.model, rate, rate)
            if options.optimizer == "muon"
            else [adamw([(list(parameters.values()), rate)])]
        )
        steps = options.total_steps(len(texts))

        def batch_at(number: int) -> Windows:
            if options.samples != "draft":
                return texts.rows(texts.order(number, options.batch_size, options.seed)).to(place.device)
            generator = seeded(options.seed, 700_000 + number)
            temperatures = mixed_temperatures(options.batch_size, generator).to(place.device)
            prompts = texts.prompts(options.batch_size, prompt, generator).to(place.device)
            with place.autocast():
                own = continue_text(draft.model, prompts, window - prompt, temperatures, generator)
            sampled = sampled_windows(own.cpu(), prompt, target.ends)
            return sampled.rows(torch.arange(len(sampled))).to(place.device)

        def loss_at(number: int) -> Loss:
            batch = batch_at(number)
            keep = window - 1 if options.samples == "data" else window - prompt
            learnt = batch.learnt_from(1)[:, -keep - 1 : -1]
            loss = distillation_loss(
                draft.model, target.model, batch.ids, keep, options.divergence, learnt=learnt, bf16=place.bf16
            )
            return loss, {}

        trained = train(
            "draft",
            parameters,
            optimizers,
            Schedule(steps, round(options.warmup * steps)),
            loss_at,
            checkpoint=work / "draft.pt",
            log=watch.log,
            evaluate=lambda: f"greedy acceptance length {measured.length(draft.model):.2f}",
            every=options.save_every,
            accumulate=options.accumulate,
            console=watch.console,
        )
        record = new_record("train draft", options, place, texts, held_out)
        record["draft"] = told(trained)
        record["acceptance"] = {"before": before, "after": measured.lengths(draft.model)}
        with written_beside(options.output) as folder:
            save_model(folder, draft.model.cpu().to(draft.stored), draft.tokenizer)
            write_record(folder, record)
    return record


def new_llama(
    vocab: int, hidden: int, heads: int, kv_heads: int, ffn: int, layers: int, positions: int, end: int
) -> LlamaForCausalLM:
    """A freshly initialised Llama with tied embeddings and heads of 64 channels.

    Args:
        vocab: V.
        hidden: H.
        heads: of queries.
        kv_heads: of keys and values.
        ffn: hidden size of the feed-forward layers.
        layers: how many.
        positions: longest text.
        end: token that begins and ends a text.
    """
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=ffn,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=64,
            max_position_embeddings=positions,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=True,
            bos_token_id=end,
            eos_token_id=end,
        )
    )


def _draft(options: DraftOptions, target: TrainingModel, place: Place) -> TrainingModel:
    """The draft to train: one that is there, whose tokenizer is the target's, or a new one."""
    if options.draft is not None:
        draft = load_model(options.draft, place, frozen=False)
        ours, theirs = load_tokenizer(target.path).tokenizer, load_tokenizer(draft.path).tokenizer
        require_same_tokenizer(ours, theirs, target.path, draft.path)
        return draft
    if options.layers is None or options.hidden is None:
        raise TrainError("no draft to train; expected --draft, or --layers and --hidden for a new one")
    heads = -(-options.hidden // 64)
    vocab = int(target.model.get_output_embeddings().weight.shape[0])
    positions = min(target.max_positions, 1 << 17)
    end = target.ends[0] if target.ends else 0
    model = new_llama(
        vocab, options.hidden, heads, heads, -(-8 * options.hidden // 96) * 32, options.layers, positions, end
    )
    if options.hidden <= target.model.get_input_embeddings().weight.shape[1]:
        inherit_embedding(model, target.model)
    model.generation_config = target.model.generation_config
    return TrainingModel(
        source="a new draft",
        path=Path(),
        model=model.to(place.device).eval(),
        tokenizer=target.tokenizer,
        stored=target.stored,
        ends=target.ends,
        max_positions=positions,
    )


class _Measured:
    """How many of a draft's tokens the target takes, over its own continuations of held-out prompts."""

    def __init__(self, target: TrainingModel, held_out: Windows, prompt: int, seed: int, place: Place) -> None:
        self._target = target.model
        self._prompt = prompt
        self._seed = seed
        self._place = place
        generator = seeded(seed, 600_000)
        prompts = held_out.prompts(_MEASURED_TEXTS, prompt, generator).to(place.device)
        new = min(_MEASURED_TOKENS, held_out.ids.shape[1] - prompt)
        self._texts = {
            temperature: continue_text(
                self._target, prompts, new, torch.full((len(prompts),), temperature, device=place.device), generator
            )
            for temperature in (0.0, 1.0)
        }

    def length(self, draft: Any) -> float:
        """Greedy acceptance length, quickly."""
        return acceptance_length(self._accepted(draft, 0.0), _SHOWN_DEPTH)

    def lengths(self, draft: Any) -> Mapping[str, list[float]]:
        """Acceptance lengths at 1 to 6 draft tokens, greedy and at temperature 1."""
        return {
            name: [round(acceptance_length(self._accepted(draft, temperature), k), 3) for k in _MEASURED_DEPTHS]
            for name, temperature in (("greedy", 0.0), ("temperature 1", 1.0))
        }

    def _accepted(self, draft: Any, temperature: float) -> torch.Tensor:
        with self._place.autocast():
            return accepted_positions(
                self._target, draft, self._texts[temperature], self._prompt, temperature, self._seed
            )
