"""Encodes prompts: text, token ids, or embeddings, such as an encoder's output for sound or an image."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from specexport.contract.errors import RequestError
from specexport.contract.manifest import Manifest
from specexport.contract.values import Array, is_sequence, plain, require_text, shown, token_ids
from specexport.runtime.sampling import Floats, Ints

_KEY = secrets.token_bytes(16)
_FIRST_MARK = -2
"""The largest mark of an embedding; -1 separates the outputs that suffix decoding stores."""


class EmbedsPrompt:
    """A prompt that holds embeddings.

    >>> EmbedsPrompt(["User: ", sound, " Transcribe it."])  # doctest: +SKIP

    Embeddings are transformers' ``inputs_embeds``, as ``model.get_input_embeddings()`` returns them for token ids. So
    they are scaled if the model's embedding layer scales (Gemma), but not if the model multiplies afterwards (Granite).
    The prompt may end with them.

    Args:
        parts: embeddings, or a list or tuple of parts that follow each other. A part is text; embeddings, ``[N,H]``
            floating-point numbers; or token ids, ``[N]`` whole numbers. Arrays may be anything that ``numpy.asarray``
            accepts, such as a torch tensor on the CPU, also with a batch dimension of one. Only a text at the beginning
            gets the tokenizer's special tokens, such as a start token.
    """

    def __init__(self, parts: Any) -> None:
        self.parts: tuple[Any, ...] = tuple(parts) if isinstance(parts, (list, tuple)) else (parts,)


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt with embeddings as an engine reads it.

    Attributes:
        tokens: the token id of each position; for an embedding a negative number that only equal embeddings share, so
            that texts can be compared by their tokens.
        rows: float32 ``[N,H]``, the embeddings.
        at: int64 ``[P]``, the row for each position; -1 for a token.
    """

    tokens: list[int]
    rows: Floats
    at: Ints

    def __len__(self) -> int:
        return len(self.tokens)

    def put(self, start: int, inputs_embeds: Floats, embeds_mask: npt.NDArray[np.bool_]) -> None:
        """Writes the embeddings of T positions into a step graph's inputs.

        Args:
            start: the first position.
            inputs_embeds: float32 ``[T,H]``; rows of tokens stay unchanged.
            embeds_mask: bool ``[T]``; False for tokens, and after the prompt.
        """
        part = self.at[start : start + len(embeds_mask)]
        embeds_mask[:] = False
        embeds_mask[: len(part)] = part >= 0
        inputs_embeds[embeds_mask] = self.rows[part[part >= 0]]


Prompt = str | Sequence[int] | Array | EmbedsPrompt | EncodedPrompt
"""The start of a text that a request continues."""


class PromptEncoder:
    """Encodes a bundle's prompts."""

    def __init__(self, manifest: Manifest, tokenizer: Tokenizer) -> None:
        self._manifest = manifest
        self._tokenizer = tokenizer

    @overload
    def encode(self, prompt: str | Sequence[int] | Array) -> list[int]: ...

    @overload
    def encode(self, prompt: EmbedsPrompt | EncodedPrompt) -> EncodedPrompt: ...

    def encode(self, prompt: Prompt) -> list[int] | EncodedPrompt:
        """Encodes a prompt, with the tokenizer's special tokens; an empty prompt becomes the start token.

        An :class:`EmbedsPrompt` is encoded with its embeddings.

        Raises:
            RequestError: the prompt is neither text nor token ids, has a token id outside the vocabulary, is empty
                without a known start token, or has embeddings that are invalid or that the bundle was not built for.
        """
        if isinstance(prompt, EncodedPrompt):
            return prompt
        if isinstance(prompt, EmbedsPrompt):
            return self._encode_embeds(prompt)
        if isinstance(prompt, str):
            require_text(prompt, "the prompt", "prompt")
            tokens = list(self._tokenizer.encode(prompt).ids)
        elif is_sequence(plain(prompt)):
            tokens = token_ids(prompt, "the prompt", "prompt")
        else:
            raise RequestError(
                f"the prompt is {shown(prompt)}; expected text, token ids or an EmbedsPrompt", param="prompt"
            )
        if not tokens:
            info = self._manifest.tokenizer
            start = self._tokenizer.token_to_id(info.special_tokens.get("bos_token", ""))
            if start is None and not info.eos_token_ids:
                raise RequestError(
                    "the prompt is empty and the tokenizer has no start token; give at least one token", param="prompt"
                )
            tokens = [start if start is not None else info.eos_token_ids[0]]
        self._require_in_vocabulary(tokens)
        return tokens

    def continuation(self, prompt: Prompt, text: str | Sequence[int]) -> list[int]:
        """Encodes a text that follows a prompt; token ids are checked and returned.

        Raises:
            RequestError: a token id is outside the vocabulary, or the text is not valid.
        """
        if not isinstance(text, str):
            return self.encode(text) if len(text) else []
        require_text(text, "hypothesis", "hypothesis")
        if isinstance(prompt, str) and prompt:
            # A text's first token may depend on what precedes it.
            before, whole = self.encode(prompt), self.encode(prompt + text)
            if whole[: len(before)] == before:
                return whole[len(before) :]
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _encode_embeds(self, prompt: EmbedsPrompt) -> EncodedPrompt:
        size, longest = self._manifest.target.embedding_size, self._manifest.max_seq_len
        if size is None:
            raise RequestError("the prompt has embeddings, but the bundle was built without --inputs-embeds")
        tokens: list[int] = []
        at: list[Ints] = []
        rows: list[Floats] = []
        count = 0
        for index, part in enumerate(prompt.parts):
            name = f"prompt_embeds: part {index}"
            if isinstance(part, str):
                require_text(part, "prompt_embeds", "prompt")
                part = np.array(self._tokenizer.encode(part, add_special_tokens=index == 0).ids, np.int64)
            else:
                part = _array(part, name, size)
            length = len(part)
            if len(tokens) + length > longest:
                raise RequestError(
                    f"prompt_embeds: {len(tokens) + length} positions up to part {index}, but this bundle's context "
                    f"holds {longest}, output included; shorten the prompt or build with a larger --max-seq-len"
                )
            if part.ndim == 2:
                with np.errstate(over="ignore"):
                    embeds = np.array(part, np.float32)
                if not np.isfinite(embeds).all():
                    raise RequestError(f"{name} has numbers that are not finite in float32")
                tokens += [_mark(row) for row in embeds]
                rows.append(embeds)
                at.append(np.arange(count, count + length))
                count += length
            else:
                ids = part.tolist()
                self._require_in_vocabulary(ids)
                tokens += ids
                at.append(np.full(length, -1))
        if not count:
            raise RequestError("prompt_embeds: no part holds embeddings; give a prompt of text or token ids as one")
        return EncodedPrompt(tokens, np.concatenate(rows), np.concatenate(at))

    def _require_in_vocabulary(self, tokens: Sequence[int]) -> None:
        limit = self._manifest.target.vocab_size
        wrong = next((token for token in tokens if not 0 <= token < limit), None)
        if wrong is not None:
            raise RequestError(f"the prompt holds token {wrong}; the model has tokens 0 to {limit - 1}", param="prompt")


def _array(part: Any, name: str, size: int) -> npt.NDArray[Any]:
    """Reads a part other than text as an array: embeddings ``[N,H]``, or token ids ``[N]``."""
    try:
        array = np.asarray(part)
    except Exception as error:  # another library's array may raise anything
        raise RequestError(f"{name}: cannot be read as an array: {error}; expected float32 [N,{size}]") from error
    if array.ndim > 1 and len(array) == 1 and array.dtype.kind in ("f" if array.ndim == 3 else "iu"):
        array = array[0]  # a batch of one
    ids, embeds = array.ndim == 1 and array.dtype.kind in "iu", array.ndim == 2 and array.dtype.kind == "f"
    if not (ids or (embeds and array.shape[1] == size)) or not len(array):
        shape = ",".join(map(str, array.shape))
        raise RequestError(
            f"{name} is {array.dtype}[{shape}]; expected embeddings, floating-point [N,{size}], or token ids, or text"
        )
    return array


def _mark(row: Floats) -> int:
    """A negative number that identifies an embedding: 62 bits of its hash, with a key of this process."""
    digest = hashlib.blake2b(row.tobytes(), digest_size=8, key=_KEY).digest()
    return _FIRST_MARK - (int.from_bytes(digest, "little") >> 2)


def is_embedding(token: int) -> bool:
    """Whether a text's token stands for an embedding, which is never proposed."""
    return token < 0


def tokens_before_embeddings(tokens: Sequence[int]) -> list[int]:
    """The tokens of a text up to its first embedding."""
    end = next((at for at, token in enumerate(tokens) if is_embedding(token)), len(tokens))
    return list(tokens[:end])
