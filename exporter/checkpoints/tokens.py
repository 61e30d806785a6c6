"""Comparison of tokenizers. Imports nothing heavy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from specexport.contract.errors import BuildError


def stored_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint's ``tokenizer.json``, or transformers' conversion of its other files.

    Raises:
        BuildError: there is none.
        ImportError: transformers is needed and not installed.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        # Imported here: torch takes seconds.
        from specexport.exporter.checkpoints.checkpoint import load_tokenizer

        return load_tokenizer(folder).tokenizer
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # tokenizers raises plain Exceptions
        raise BuildError(f"{path}: its tokenizer could not be loaded: {error}") from error


def require_same_tokenizer(target: Tokenizer, draft: Tokenizer, target_path: Path, draft_path: Path) -> None:
    """Checks that two tokenizers give every token the same id, except padding of the vocabularies.

    Raises:
        BuildError: they differ; it names the first token that does.
    """
    ours, theirs = target.get_vocab(with_added_tokens=True), draft.get_vocab(with_added_tokens=True)
    if ours == theirs and _pipeline(target) == _pipeline(draft):
        return
    differing = [(index, token) for token, index in ours.items() if theirs.get(token) != index]
    if differing:
        index, token = min(differing)
        detail = f"token {token!r} is {index} in {target_path} and {theirs.get(token, 'absent')} in {draft_path}"
    elif len(ours) != len(theirs):
        detail = f"{draft_path} has {len(theirs)} tokens against {len(ours)} in {target_path}"
    else:
        detail = f"{draft_path} has the same tokens, split differently, as {target_path}"
    raise BuildError(
        f"target and draft use different tokenizers: {detail}. A draft must use the target's tokenizer: choose one "
        f"from the same family, or draft through text with --method universal_draft:{draft_path}"
    )


def _pipeline(tokenizer: Tokenizer) -> dict[str, Any]:
    """The parts of a tokenizer that determine tokenization, without those that only add tokens around sequences."""
    parts = json.loads(tokenizer.to_str())
    return {name: parts.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")} | {
        "merges": parts.get("model", {}).get("merges")
    }
