"""Reads training text from files into windows of tokens, with a mask of the tokens to learn.

A text file is one document. JSON and JSON Lines files hold objects with ``text``, ``conversations`` (ShareGPT) or
``messages`` (role and content). Chats are rendered with the tokenizer's template, and only the assistant's messages are
learned.
"""

from __future__ import annotations

import hashlib
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from tokenizers import Tokenizer

from specexport.contract.errors import UNREADABLE, TrainError, explained
from specexport.exporter.checkpoints.quiet import failing_as

MAX_WHOLE, MAX_LINE = 1 << 30, 64 << 20
"""Maximum size in bytes of a JSON or text file, and of a line of JSON Lines."""
_ENCODED_AT_ONCE = 4 << 20
"""Number of characters encoded in one call of the tokenizer, which splits them among threads."""

_ROLES = {
    "human": "user", "user": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant",
    "system": "system",
}  # fmt: skip


def seeded(seed: int, number: int) -> torch.Generator:
    """The random generator for draw ``number`` of a run."""
    return torch.Generator().manual_seed(seed * 1_000_003 + number)


@dataclass(frozen=True)
class Windows:
    """Windows of L tokens.

    Attributes:
        ids: tokens ``[N,L]``, int64 in batches and int32 in data sets.
        learn: mask of the tokens to learn, bool ``[N,L]``.
        document: number of each token's document, int32 ``[N,L]``.
    """

    ids: torch.Tensor
    learn: torch.Tensor
    document: torch.Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, rows: torch.Tensor) -> Windows:
        """The windows at these indices, ``[B]``, as a batch."""
        return Windows(self.ids[rows].long(), self.learn[rows], self.document[rows])

    def to(self, device: torch.device) -> Windows:
        return Windows(self.ids.to(device), self.learn.to(device), self.document.to(device))

    def learnt_from(self, ahead: int) -> torch.Tensor:
        """Mask of positions whose token ``ahead`` later is to be learned and in the same document, bool ``[N,L]``."""
        learnt = torch.zeros_like(self.learn)
        if ahead < self.learn.shape[1]:
            same = self.document[:, ahead:] == self.document[:, :-ahead]
            learnt[:, :-ahead] = self.learn[:, ahead:] & same
        return learnt

    def order(self, step: int, size: int, seed: int) -> torch.Tensor:
        """Indices of the windows of batch ``step``, int64 ``[size]``.

        Each epoch is a permutation that depends on the seed and the number of the epoch, and batches cross epochs
        without gaps. Batches can be drawn in any order.
        """
        parts: list[torch.Tensor] = []
        position, missing = step * size, size
        while missing:
            epoch, start = divmod(position, len(self))
            permutation = torch.randperm(len(self), generator=seeded(seed, 100_000 + epoch))
            parts.append(permutation[start : start + missing])
            position += len(parts[-1])
            missing -= len(parts[-1])
        return torch.cat(parts)

    def fingerprint(self) -> str:
        digest = hashlib.sha256(repr(tuple(self.ids.shape)).encode())
        for tensor in (self.ids, self.learn):
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def in_order(self, size: int) -> tuple[torch.Tensor, ...]:
        """Indices of all windows, at most ``size`` at a time."""
        return torch.split(torch.arange(len(self)), size)

    def hold_out(self, share: float) -> tuple[Windows, Windows]:
        """Splits off the last windows, at least one, for evaluation."""
        if len(self) < 2:
            raise TrainError(
                f"the data fill {len(self)} window of {self.ids.shape[1]} tokens; expected at least 2, of which one is "
                "held out. Give more --data, a shorter --seq-len, or a separate file as --held-out"
            )
        cut = min(len(self) - 1, max(1, round(len(self) * (1 - share))))
        first = torch.arange(len(self)) < cut
        return self.part(first), self.part(~first)

    def part(self, rows: torch.Tensor) -> Windows:
        """The windows selected by bool ``[N]``."""
        return Windows(self.ids[rows], self.learn[rows], self.document[rows])

    def prompts(self, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
        """Cuts ``count`` prompts that end right before a token to learn: int64 ``[count,length]``."""
        possible = self.learn[:, length:]
        usable = possible.any(dim=1).nonzero()[:, 0]
        if not len(usable):
            raise TrainError(
                f"no window of {self.ids.shape[1]} tokens has a token to learn after its first {length} tokens, the "
                "prompt. Pass a smaller --prompt-len or a longer --seq-len"
            )
        chosen = usable[torch.randint(len(usable), (count,), generator=generator)]
        ends = torch.multinomial(possible[chosen].float(), 1, generator=generator)
        return self.ids[chosen[:, None], ends + torch.arange(length)].long()


def sampled_windows(ids: torch.Tensor, prompt: int, ends: Sequence[int]) -> Windows:
    """Windows of sampled texts, int64 ``[N,L]``; the tokens to learn follow the prompt, up to the first end token."""
    over = torch.isin(ids[:, prompt:], torch.tensor(list(ends), dtype=ids.dtype)).long().cumsum(dim=1)
    learn = torch.zeros(ids.shape, dtype=torch.bool)
    # The end token is learned too, as the model generated it.
    learn[:, prompt] = True
    learn[:, prompt + 1 :] = over[:, :-1] == 0
    return Windows(ids.to(torch.int32), learn, torch.zeros(ids.shape, dtype=torch.int32))


def read_windows(files: Sequence[Path], tokenizer: Any, *, seq_len: int, seed: int) -> Windows:
    """Reads files, shuffles their documents and packs them into windows of ``seq_len`` tokens.

    The last window is padded with tokens that are not learned; windows without tokens to learn are dropped.
    """
    encode = _Encoder(tokenizer)
    documents: list[_Encoded] = []
    waiting: list[str] = []
    characters = 0
    for path in files:
        for where, document in _read(path):
            if isinstance(document, str):
                waiting.append(document)
                characters += len(document)
                if characters > _ENCODED_AT_ONCE:
                    documents.extend(encode.texts(waiting))
                    waiting, characters = [], 0
            else:
                documents.extend(encode.chat(document, where))
    documents.extend(encode.texts(waiting))
    order = torch.randperm(len(documents), generator=seeded(seed, 0)).tolist()
    lengths = torch.tensor([len(documents[n].ids) for n in order], dtype=torch.int64)
    count = -(-int(lengths.sum()) // seq_len)
    missing = count * seq_len - int(lengths.sum())
    ids = torch.cat([*(documents[n].ids for n in order), torch.full((missing,), encode.filler, dtype=torch.int32)])
    learn = torch.cat([*(documents[n].learn for n in order), torch.zeros(missing, dtype=torch.bool)])
    number = torch.repeat_interleave(torch.arange(len(order), dtype=torch.int32), lengths)
    number = torch.cat([number, torch.full((missing,), len(order), dtype=torch.int32)])
    windows = Windows(*(flat.view(count, seq_len) for flat in (ids, learn, number)))
    useful = windows.learnt_from(1).any(dim=1)
    if not bool(useful.any()):
        named = str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files"
        raise TrainError(f"{named}: nothing to learn; expected text, or chats in which the assistant speaks")
    return windows.part(useful)


class _Turn(msgspec.Struct):
    """A turn in ShareGPT's format."""

    role: str = msgspec.field(name="from")
    content: str = msgspec.field(name="value")


class _Message(msgspec.Struct):
    role: str
    content: str


class _Row(msgspec.Struct):
    text: str | None = None
    conversations: list[_Turn] | None = None
    messages: list[_Message] | None = None


_Chat = list[dict[str, str]]


def _read(path: Path) -> Iterator[tuple[str, str | _Chat]]:
    """Yields the documents of a file, each after its place in the file, for error messages."""
    if not path.is_file():
        raise TrainError(f"{path}: no such file; expected text, .jsonl or .json")
    lines = path.suffix.lower() in (".jsonl", ".ndjson")
    if not lines and (size := path.stat().st_size) > MAX_WHOLE:
        raise TrainError(f"{path}: {size} bytes; expected at most {MAX_WHOLE}. Split it, or make it JSON Lines")
    if lines:
        with path.open("rb") as file:
            file.seek(len(BOM_UTF8) if file.read(len(BOM_UTF8)) == BOM_UTF8 else 0)
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), 1):
                if len(line) > MAX_LINE:
                    raise TrainError(
                        f"{path}:{number}: a line of more than {MAX_LINE} bytes; expected one object per line"
                    )
                if line.strip():
                    yield from _row(line, f"{path}:{number}")
    elif path.suffix.lower() == ".json":
        try:
            rows: list[msgspec.Raw] = msgspec.json.decode(
                path.read_bytes().removeprefix(BOM_UTF8), type=list[msgspec.Raw]
            )
        except UNREADABLE as error:
            raise TrainError(
                f"{path}: {explained(error)}; its items are objects with text, conversations or messages"
            ) from error
        for number, raw in enumerate(rows):
            yield from _row(bytes(raw), f"{path}[{number}]")
    else:
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise TrainError(f"{path}: not a text in UTF-8 ({error.reason} at byte {error.start})") from error
        if text:
            yield str(path), text


def _row(raw: bytes, where: str) -> Iterator[tuple[str, str | _Chat]]:
    try:
        row = msgspec.json.decode(raw, type=_Row)
    except UNREADABLE as error:
        raise TrainError(
            f"{where}: {explained(error)}; expected an object with text, conversations or messages"
        ) from error
    fields = [name for name in ("text", "conversations", "messages") if getattr(row, name) is not None]
    if len(fields) != 1:
        raise TrainError(
            f"{where}: has {' and '.join(fields) or 'none of these'}; expected one of text, conversations and messages"
        )
    if row.text is not None:
        if row.text:
            yield where, row.text
        return
    chat: _Chat = []
    for number, turn in enumerate([*(row.conversations or ()), *(row.messages or ())]):
        role = _ROLES.get(turn.role.lower())
        if role is None:
            raise TrainError(f"{where}: turn {number} is by {turn.role!r}; expected one of {', '.join(_ROLES)}")
        # Conversations that ShareGPT split may begin with an answer, which templates refuse.
        if role != "assistant" or any(message["role"] == "user" for message in chat):
            chat.append({"role": role, "content": turn.content})
    if any(turn["role"] == "assistant" for turn in chat):
        yield where, chat


@dataclass(frozen=True)
class _Encoded:
    ids: torch.Tensor
    learn: torch.Tensor


class _Encoder:
    """Encodes documents."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # A copy without truncation and padding, which a tokenizer.json may ask for.
        self._fast = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._fast.no_truncation()
        self._fast.no_padding()
        self._fast.encode_special_tokens = tokenizer.split_special_tokens
        self._end: int | None = tokenizer.eos_token_id
        self.filler: int = self._end or 0
        template = tokenizer.chat_template
        self._template: str | None = template.get("default") if isinstance(template, dict) else template

    def texts(self, texts: Sequence[str]) -> Iterator[_Encoded]:
        for encoding in self._fast.encode_batch(list(texts)):
            ids = encoding.ids
            if self._end is not None and ids[-1:] != [self._end]:
                ids = [*ids, self._end]
            yield _Encoded(torch.tensor(ids, dtype=torch.int32), torch.ones(len(ids), dtype=torch.bool))

    def chat(self, chat: _Chat, where: str) -> Iterator[_Encoded]:
        """Encodes a chat as one document, or as one per answer if the template renders earlier answers differently."""
        if self._template is None:
            raise TrainError(
                f"{where}: a chat, and the tokenizer has no chat template; expected text, or a model made for chats"
            )
        # Some templates mark the assistant's messages.
        if "endgeneration" in self._template:
            rendered = self._applied(chat, where, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
            yield _Encoded(
                torch.tensor(rendered["input_ids"], dtype=torch.int32),
                torch.tensor(rendered["assistant_masks"], dtype=torch.bool),
            )
            return
        answers = [n for n, turn in enumerate(chat) if turn["role"] == "assistant"]
        until = {n: self._applied(chat[: n + 1], where, tokenize=False) for n in answers}
        prompts = {n: self._applied(chat[:n], where, tokenize=False, add_generation_prompt=True) for n in answers}
        for n in answers:
            if not until[n].startswith(prompts[n]):
                raise TrainError(
                    f"{where}: turn {n}: the chat template renders the prompt differently once the answer follows "
                    f"({_difference(prompts[n], until[n])}), so the assistant's part is ambiguous. Mark it in the "
                    "template with {% generation %} … {% endgeneration %}, or render the chats to text yourself"
                )
        last = until[answers[-1]]
        if all(last.startswith(until[n]) for n in answers):
            yield self._spans(last, [(len(prompts[n]), len(until[n])) for n in answers])
        else:
            for n in answers:
                yield self._spans(until[n], [(len(prompts[n]), len(until[n]))])

    def _applied(self, chat: _Chat, where: str, **options: Any) -> Any:
        refused = f"{where}: the tokenizer's chat template refused this chat"
        with failing_as(lambda error: f"{refused}: {error}", TrainError):
            return self._tokenizer.apply_chat_template(chat, **options)

    def _spans(self, text: str, spans: Sequence[tuple[int, int]]) -> _Encoded:
        # The template has added the special tokens.
        encoding = self._fast.encode(text, add_special_tokens=False)
        starts = torch.tensor([start for start, _ in encoding.offsets])
        learn = torch.zeros(len(starts), dtype=torch.bool)
        for first, end in spans:
            learn |= (starts >= first) & (starts < end)
        return _Encoded(torch.tensor(encoding.ids, dtype=torch.int32), learn)


def _difference(prompt: str, answered: str) -> str:
    """The texts from where they begin to differ, for error messages."""
    at = next((n for n, (a, b) in enumerate(zip(prompt, answered, strict=False)) if a != b), len(answered))
    return f"{prompt[at : at + 20]!r} against {answered[at : at + 20]!r}"
