"""All settings that transformers reads besides a model's configuration and weights, and their handling.

A setting is honoured, refused, named in a warning by ``build`` and ``inspect`` as it changes transformers' text but not
ours, or has no effect on texts. ``python -m scripts.docs`` writes the table in docs/settings.md from this list.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from specexport.contract.errors import BuildError
from specexport.contract.manifest import SettingNote, short
from specexport.exporter.checkpoints.documents import ADAPTER, CONFIG, GENERATION, read_object

Handling = Literal["honoured", "refused", "named", "no effect"]
Documents = Mapping[str, Mapping[str, Any]]
"""The JSON files of a checkpoint's folder by name; missing files, and those without an object, are empty."""

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"


class Setting(NamedTuple):
    """Settings of a file with the same handling.

    Attributes:
        listed: top-level keys, with commas; for a text file, a description.
        note: the effect here, or in transformers.
        neutral: values besides null that change nothing.
        changes: for named settings, whether a value changes transformers' text, given all files; None if every value
            that is not neutral does.
    """

    file: str
    listed: str
    handling: Handling
    note: str
    neutral: tuple[Any, ...] = ()
    changes: Callable[[Any, Documents], bool] | None = None

    @property
    def keys(self) -> list[str]:
        return self.listed.split(", ")


def _cleans_up(value: Any, documents: Documents) -> bool:
    """Whether transformers removes spaces from decoded text; for BPE tokenizers two settings must ask for it."""
    model = documents[TOKENIZER].get("model")
    kind = model.get("type") if isinstance(model, dict) else None
    return bool(value) and (kind != "BPE" or bool(documents[TOKENIZER_CONFIG].get(_CLEAN_BPE)))


_CLEAN_BPE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"

SETTINGS: tuple[Setting, ...] = (
    Setting(
        TOKENIZER_CONFIG,
        "chat_template",
        "honoured",
        "one template, or several by name; not read where there is a chat_template.jinja, as in transformers",
    ),
    Setting("chat_template.jinja", "the file", "honoured", "the default template"),
    Setting("additional_chat_templates/*.jinja", "the files", "honoured", "templates by their files' names"),
    Setting(
        "processor_config.json",
        "chat_template",
        "honoured",
        "where the tokenizer has no template; one that differs is named, as transformers' processors take it",
    ),
    Setting("chat_template.json", "chat_template", "honoured", "where neither of them has one; likewise"),
    Setting(
        ADAPTER,
        "base_model_name_or_path, revision, r, lora_alpha, rank_pattern, alpha_pattern, use_rslora, use_dora, "
        "fan_in_fan_out, modules_to_save, trainable_token_indices",
        "honoured",
        "merged by peft as weights are read",
    ),
    Setting(
        ADAPTER,
        "peft_type, init_lora_weights, bias, lora_bias, layer_replication, target_parameters, alora_invocation_tokens",
        "refused",
        "kinds of adapters, and of starts, that change more than the matrices they are added to",
    ),
    Setting(
        TOKENIZER,
        "version, added_tokens, normalizer, pre_tokenizer, post_processor, decoder, model",
        "honoured",
        "the bundle has them as transformers loads them",
    ),
    Setting(
        TOKENIZER,
        "truncation, padding",
        "no effect",
        "texts are neither cut nor padded, as in transformers where a call does not ask for it",
    ),
    Setting(
        TOKENIZER_CONFIG,
        "tokenizer_class, backend, init_inputs, added_tokens_decoder, extra_special_tokens, "
        "additional_special_tokens, model_specific_special_tokens, unk_token, sep_token, pad_token, cls_token, "
        "mask_token, add_prefix_space, add_bos_token, add_eos_token, fix_mistral_regex, unk_id",
        "honoured",
        "transformers loads the tokenizer, and what it makes of them is what the bundle has",
    ),
    Setting(TOKENIZER_CONFIG, "bos_token", "honoured", "in chat templates, and as the text of an empty prompt"),
    Setting(
        TOKENIZER_CONFIG,
        "eos_token",
        "honoured",
        "in chat templates; it ends texts too, also where generation_config.json names other tokens, which is named "
        "in a warning, as transformers' generate does not stop there",
    ),
    Setting(TOKENIZER_CONFIG, "split_special_tokens", "honoured", "special tokens in a text are read as text"),
    Setting(
        TOKENIZER_CONFIG,
        "clean_up_tokenization_spaces, clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
        "named",
        "transformers takes spaces before punctuation out of decoded texts, of BPE tokenizers only with the longer key",
        (False,),
        _cleans_up,
    ),
    Setting(TOKENIZER_CONFIG, "auto_map", "refused", "code of a checkpoint is never run"),
    Setting(
        TOKENIZER_CONFIG,
        "model_max_length, max_len, max_length, padding_side, truncation_side, truncation_strategy, stride, "
        "pad_to_multiple_of, pad_token_type_id, model_input_names, processor_class, verbose, name_or_path, is_local, "
        "local_files_only, files_loaded, response_schema, response_template, chat_control_tokens",
        "no effect",
        "for padding, truncation, other inputs and other programs; the longest text is the model's own",
    ),
    Setting("special_tokens_map.json", "all", "honoured", "where tokenizer_config.json has no added_tokens_decoder"),
    Setting("added_tokens.json", "all", "honoured", "where tokenizer_config.json has no added_tokens_decoder"),
    Setting(
        GENERATION,
        "do_sample, temperature, top_k, top_p, min_p, top_h, typical_p, epsilon_cutoff, eta_cutoff",
        "honoured",
        "defaults of requests; without do_sample texts are greedy. Where it names no top_k transformers keeps 50 "
        "tokens, and specexport all of them",
    ),
    Setting(
        GENERATION,
        "repetition_penalty, max_new_tokens, min_new_tokens, stop_strings",
        "honoured",
        "defaults of requests",
    ),
    Setting(
        GENERATION,
        "max_length, min_length",
        "honoured",
        "where a request says neither max_tokens (min_tokens) nor the file max_new_tokens (min_new_tokens)",
    ),
    Setting(
        GENERATION,
        "encoder_repetition_penalty, no_repeat_ngram_size, encoder_no_repeat_ngram_size, bad_words_ids, "
        "sequence_bias, suppress_tokens, begin_suppress_tokens, forced_bos_token_id, forced_eos_token_id, "
        "exponential_decay_length_penalty",
        "honoured",
        "in every request with the model's defaults; each yields where it would leave no token, of those that a "
        "grammar allows for instance",
    ),
    Setting(
        GENERATION,
        "eos_token_id",
        "honoured",
        "where it names none, config.json's; the tokenizer's eos_token ends texts too",
    ),
    Setting(GENERATION, "num_beams, num_beam_groups", "named", "transformers searches with beams", (1,)),
    Setting(GENERATION, "diversity_penalty", "named", "transformers searches with groups of beams", (0,)),
    Setting(GENERATION, "constraints, force_words_ids", "named", "transformers searches with constrained beams"),
    Setting(GENERATION, "num_return_sequences", "named", "transformers gives several texts; send n", (1,)),
    Setting(GENERATION, "max_time", "named", "transformers stops after so many seconds; send timeout"),
    Setting(GENERATION, "guidance_scale", "named", "transformers guides with a second, unconditional text", (1,)),
    Setting(GENERATION, "watermarking_config", "named", "transformers marks the text"),
    Setting(GENERATION, "token_healing", "named", "transformers replaces the prompt's last token", (False,)),
    Setting(GENERATION, "penalty_alpha", "named", "transformers searches contrastively", (0,)),
    Setting(GENERATION, "dola_layers", "named", "transformers contrasts the logits of layers"),
    Setting(
        GENERATION,
        "early_stopping, length_penalty, renormalize_logits, remove_invalid_values",
        "no effect",
        "of beams alone, or of logits that are no numbers",
    ),
    Setting(
        GENERATION,
        "use_mtp, use_cache, cache_implementation, cache_config, max_cache_len, prefill_chunk_size, compile_config, "
        "disable_compile, continuous_batching_config, low_memory, output_attentions, output_hidden_states, "
        "output_scores, output_logits, return_dict_in_generate",
        "no effect",
        "how transformers computes, and what else it returns",
    ),
    Setting(
        GENERATION,
        "is_assistant, num_assistant_tokens, num_assistant_tokens_schedule, assistant_confidence_threshold, "
        "assistant_early_exit, assistant_lookbehind, target_lookbehind, assistant_ensemble_weight, "
        "prompt_lookup_num_tokens, max_matching_ngram_size, speculation_type",
        "no effect",
        "how transformers speculates; build and requests say how specexport does",
    ),
    Setting(
        GENERATION,
        "bos_token_id, pad_token_id, decoder_start_token_id, _from_model_config, transformers_version",
        "no effect",
        "of padding, of encoder-decoder models, or a label; an empty prompt is the tokenizer's bos_token",
    ),
    Setting(
        CONFIG,
        "those of generation_config.json",
        "honoured",
        "like those of generation_config.json, where there is no such file",
    ),
    Setting(CONFIG, "eos_token_id", "honoured", "where generation_config.json names none"),
    Setting("preprocessor_config.json", "all", "no effect", "of pictures and sound, which prompts hold as embeddings"),
    Setting(
        "video_preprocessor_config.json",
        "all",
        "no effect",
        "of pictures and sound, which prompts hold as embeddings",
    ),
)


def read_documents(folder: Path) -> Documents:
    """Reads the JSON files with a checkpoint's settings."""
    documents: dict[str, Mapping[str, Any]] = {}
    for name in dict.fromkeys(setting.file for setting in SETTINGS):
        documents[name] = {}
        if name.endswith(".json") and (folder / name).is_file():
            with contextlib.suppress(BuildError):  # the code that needs the file reports its faults
                documents[name] = read_object(folder / name)
    return documents


def setting_notes(folder: Path, end: int | None, ends: Collection[int]) -> tuple[SettingNote, ...]:
    """Warnings about settings of a checkpoint that change transformers' text but not ours, or the other way round.

    ``end`` is the tokenizer's own end token, ``ends`` are those of the model's configurations.
    """
    documents = read_documents(folder)
    notes = []
    generation = GENERATION if (folder / GENERATION).is_file() else CONFIG
    for setting in SETTINGS:
        if setting.handling != "named":
            continue
        file = generation if setting.file == GENERATION else setting.file
        for key in setting.keys:
            value = documents[file].get(key)
            if value is None or value in setting.neutral:
                continue
            if setting.changes is None or setting.changes(value, documents):
                note = f"{setting.note}; specexport does not"
                notes.append(SettingNote(file=file, key=key, value=short(value), note=note))
    if end is not None and end not in ends:
        others = f"{', '.join(map(str, ends))} alone" if ends else "no token"
        note = f"it ends texts here; transformers' generate stops at {others} (eos_token_id of {generation})"
        token = documents[TOKENIZER_CONFIG].get("eos_token")
        value = token.get("content") if isinstance(token, dict) else token
        notes.append(SettingNote(file=TOKENIZER_CONFIG, key="eos_token", value=short(value or end), note=note))
    return tuple(notes)
