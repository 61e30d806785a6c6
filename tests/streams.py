"""Requests that run side by side, and what they say."""

from collections.abc import Iterable

from specexport.runtime import Chunk, Stream


def started(streams: Iterable[Stream]) -> list[Stream]:
    """Starts streams, whose steps are taken as any of them is read."""
    result = list(streams)
    for stream in result:
        stream.start()
    return result


def tokens_of(chunks: Iterable[Chunk]) -> tuple[int, ...]:
    """The tokens of chunks; of a stream, which is read to its end, those that it had not said yet."""
    return tuple(token for chunk in chunks for token in chunk.token_ids)
