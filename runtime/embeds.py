"""Prompts that hold embeddings instead of tokens: what an encoder made of sound, images or anything else."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specexport.contract.errors import RequestError

Floats = npt.NDArray[np.float32]
Encode = Callable[[str, bool], list[int]]
"""Tokens of a text; the flag asks for the tokenizer's own special tokens."""

_KEY = secrets.token_bytes(16)
_FIRST_MARK = -2
"""The largest mark: -1 ends the outputs that suffix decoding stores."""


class EmbedsPrompt:
    """A prompt with embeddings.

    >>> EmbedsPrompt(["User: ", sound, " Transcribe it."])  # doctest: +SKIP

    Embeddings are what transformers takes as ``inputs_embeds``: what ``model.get_input_embeddings()`` makes of token
    ids. So they are scaled where the model's embedding layer scales (Gemma), and are not where the model multiplies
    afterwards (Granite). The prompt may end with them.

    Args:
        parts: embeddings, or a list or tuple of parts that are read one after another. A part is embeddings, an array
            ``[N,H]`` of floating-point numbers, or what ``numpy.asarray`` makes one of, such as a torch tensor on the
            CPU; or token ids, ``[N]`` whole numbers; either also as a batch of one; or text.
            Only a text that comes first gets the tokenizer's special tokens, such as a start token.
    """

    def __init__(self, parts: Any) -> None:
        self.parts: tuple[Any, ...] = tuple(parts) if isinstance(parts, (list, tuple)) else (parts,)


@dataclass(frozen=True)
class Embeddings:
    """The embeddings of a prompt.

    Attributes:
        rows: float32 ``[N,H]``.
        at: int64 ``[P]``, for each position of the prompt which of the rows is read there; -1 where a token is.
    """

    rows: Floats
    at: npt.NDArray[np.int64]

    def put(self, start: int, inputs_embeds: Floats, embeds_mask: npt.NDArray[np.bool_]) -> None:
        """Lays out what is read from a position of the prompt on, as a step graph takes it.

        Args:
            start: the position.
            inputs_embeds: float32 ``[T,H]``; rows where tokens are read are left as they are.
            embeds_mask: bool ``[T]``; positions behind the prompt are tokens.
        """
        part = self.at[start : start + len(embeds_mask)]
        embeds_mask[:] = False
        embeds_mask[: len(part)] = part >= 0
        inputs_embeds[embeds_mask] = self.rows[part[part >= 0]]


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt with embeddings as an engine reads it.

    Attributes:
        tokens: of each position its token id; where an embedding is read a negative number instead, the same one for
            equal embeddings and no others, so that texts are told apart by their tokens alone.
        embeddings: theirs.
    """

    tokens: list[int]
    embeddings: Embeddings

    def __len__(self) -> int:
        return len(self.tokens)


def encoded(prompt: EmbedsPrompt, encode: Encode, size: int, longest: int) -> EncodedPrompt:
    """Reads a prompt's parts.

    Raises:
        RequestError: a part is none, has embeddings of another width, or numbers that are not finite; or there are too
            many. Names the part.
    """
    tokens: list[int] = []
    at: list[npt.NDArray[np.int64]] = []
    rows: list[Floats] = []
    made = 0
    for index, part in enumerate(prompt.parts):
        name = f"prompt_embeds: part {index}"
        found = encode(part, index == 0) if isinstance(part, str) else _array(part, name, size)
        count = len(found)
        if len(tokens) + count > longest:
            raise RequestError(
                f"prompt_embeds: {len(tokens) + count} positions up to part {index}, but this bundle's context holds "
                f"{longest}, output included; shorten the prompt or build with a larger --max-seq-len"
            )
        if isinstance(found, np.ndarray) and found.ndim == 2:
            with np.errstate(over="ignore"):
                own = np.array(found, np.float32)
            if not np.isfinite(own).all():
                raise RequestError(f"{name} has numbers that are not finite in float32")
            tokens += [_mark(row) for row in own]
            rows.append(own)
            at.append(np.arange(made, made + count))
            made += count
        else:
            tokens += [int(token) for token in found]
            at.append(np.full(count, -1))
    if not made:
        raise RequestError("prompt_embeds: no part holds embeddings; give a prompt of text or token ids as one")
    return EncodedPrompt(tokens, Embeddings(np.concatenate(rows), np.concatenate(at)))


def _array(part: Any, name: str, size: int) -> npt.NDArray[Any]:
    """A part that is no text, as an array: of embeddings ``[N,H]``, or of token ids ``[N]``."""
    try:
        array = np.asarray(part)
    except Exception as error:  # whatever the library whose array it is raises
        raise RequestError(f"{name}: cannot be read as an array: {error}; expected float32 [N,{size}]") from error
    if array.ndim > 1 and len(array) == 1 and array.dtype.kind == ("f" if array.ndim == 3 else "i"):
        array = array[0]  # a batch of one
    ids, embeds = array.ndim == 1 and array.dtype.kind in "iu", array.ndim == 2 and array.dtype.kind == "f"
    if not (ids or (embeds and array.shape[1] == size)) or not len(array):
        shape = ",".join(map(str, array.shape))
        raise RequestError(
            f"{name} is {array.dtype}[{shape}]; expected embeddings, floating-point [N,{size}], or token ids, or text"
        )
    return array


def _mark(row: Floats) -> int:
    """A negative number that stands for an embedding: 62 bits of a hash of it, with a key of this process."""
    digest = hashlib.blake2b(row.tobytes(), digest_size=8, key=_KEY).digest()
    return _FIRST_MARK - (int.from_bytes(digest, "little") >> 2)


def is_embedding(token: int) -> bool:
    """Whether a text's token is one that stands for an embedding, which nothing may propose."""
    return token < 0


def tokens_before_embeddings(tokens: Sequence[int]) -> list[int]:
    """The tokens of a text's part up to its first embedding."""
    end = next((at for at, token in enumerate(tokens) if is_embedding(token)), len(tokens))
    return list(tokens[:end])
