"""``specexport train draft``: distills a target into a draft model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specexport.exporter.checkpoints.tokenizer import load_tokenizer, require_same_tokenizer
from specexport.methods.draft_model import DraftTraining
from specexport.training.data import Windows, sampled_windows, seeded
from specexport.training.distill import (
    acceptance_length,
    accepted_positions,
    continue_text,
    distillation_loss,
    inherit_embedding,
    mixed_temperatures,
)
from specexport.training.loop import Log, Loss, optimizers
from specexport.training.run import Run, TrainingModel, load_model, load_target, open_run, save_model

_MEASURED_TEXTS, _MEASURED_TOKENS = 32, 96
_MEASURED_DEPTHS = range(1, 7)
_REPORTED_DEPTH = 4


def train_draft(options: DraftTraining, log: Log) -> dict[str, Any]:
    """Trains a draft and writes it as a Hugging Face folder.

    ``acceptance`` in the record holds the acceptance lengths for one to six draft tokens, before and after training.
    """
    target = load_target(options)
    torch.manual_seed(options.seed)
    draft = _draft(options, target)
    with open_run("train draft", options, target, log, draft) as run:
        acceptance = _Acceptance(run, draft.model)
        before = acceptance.table()
        if options.samples == "target":
            run.windows = run.texts_of(target, run.windows, options.texts, "sampled")
        run.describe_data()
        parameters = dict(draft.model.requires_grad_(True).named_parameters())
        outer = (draft.model.get_input_embeddings(), draft.model.get_output_embeddings())
        optimizer_list = optimizers(options.optimizer, parameters.values(), outer, options.lr)
        keep = run.window - 1 if options.samples == "data" else run.window - run.prompt

        def loss_at(number: int) -> Loss:
            batch = _own_texts(run, draft, number) if options.samples == "draft" else run.batch(number, options.seed)
            learnt = batch.learnt_from(1)[:, -keep - 1 : -1]
            loss = distillation_loss(
                draft.model, target.model, batch.ids, keep, options.divergence, learnt=learnt, bf16=target.place.bf16
            )
            return loss, {}

        run.train(
            "draft",
            parameters,
            optimizer_list,
            run.total_steps,
            loss_at,
            lambda: f"greedy acceptance length {acceptance_length(acceptance.accepted(0.0), _REPORTED_DEPTH):.2f}",
        )
        run.record["acceptance"] = {"before": before, "after": acceptance.table()}
        with run.output() as folder:
            save_model(folder, draft.model.cpu().to(draft.stored), draft.tokenizer)
    return run.record


def _own_texts(run: Run[DraftTraining], draft: TrainingModel, number: int) -> Windows:
    """A batch of texts sampled from the draft at this step."""
    rows = run.options.batch_size
    generator = seeded(run.options.seed, 700_000 + number)
    temperatures = mixed_temperatures(rows, generator).to(run.place.device)
    prompts = run.windows.prompts(rows, run.prompt, generator).to(run.place.device)
    with run.place.autocast():
        texts = continue_text(draft.model, prompts, run.window - run.prompt, temperatures, generator)
    return sampled_windows(texts.cpu(), run.prompt, run.target.ends).rows(torch.arange(rows)).to(run.place.device)


def new_llama(
    vocab: int, hidden: int, heads: int, kv_heads: int, ffn: int, layers: int, positions: int, end: int
) -> LlamaForCausalLM:
    """A newly initialized Llama with tied embeddings and heads of 64 channels."""
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


def _draft(options: DraftTraining, target: TrainingModel) -> TrainingModel:
    """The draft to train: an existing model with the target's tokenizer, or a new one."""
    if options.draft is not None:
        draft = load_model(options.draft, target.place, frozen=False)
        ours, theirs = load_tokenizer(target.path).tokenizer, load_tokenizer(draft.path).tokenizer
        require_same_tokenizer(ours, theirs, options.draft)
        return draft
    assert options.layers is not None and options.hidden is not None  # DraftTraining.check requires them
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
        path=Path(),
        model=model.to(target.place.device).eval(),
        tokenizer=target.tokenizer,
        stored=target.stored,
        ends=target.ends,
        max_positions=positions,
        place=target.place,
    )


class _Acceptance:
    """Measures how many draft tokens the target accepts in its own continuations of held-out prompts."""

    def __init__(self, run: Run[DraftTraining], draft: Any) -> None:
        self._run, self._draft = run, draft
        generator = seeded(run.options.seed, 600_000)
        prompts = run.held_out.prompts(_MEASURED_TEXTS, run.prompt, generator).to(run.place.device)
        new = min(_MEASURED_TOKENS, run.window - run.prompt)
        self._texts = {
            temperature: continue_text(
                run.target.model, prompts, new, torch.full((len(prompts),), temperature, device=run.place.device),
                generator,
            )
            for temperature in (0.0, 1.0)
        }  # fmt: skip

    def table(self) -> dict[str, list[float]]:
        """Acceptance lengths at 1 to 6 draft tokens, greedy and at temperature 1."""
        return {
            name: [round(acceptance_length(accepted, k), 3) for k in _MEASURED_DEPTHS]
            for name, accepted in (("greedy", self.accepted(0.0)), ("temperature 1", self.accepted(1.0)))
        }

    def accepted(self, temperature: float) -> torch.Tensor:
        """The tokens that were accepted draft tokens, by the draft in its present state."""
        run = self._run
        with run.place.autocast():
            return accepted_positions(
                run.target.model, self._draft, self._texts[temperature], run.prompt, temperature, run.options.seed
            )
