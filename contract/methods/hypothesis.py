"""Speculation by a text that the request brings."""

from __future__ import annotations

from typing import ClassVar

from specexport.contract.methods.base import Flag, TextMethod


class Hypothesis(TextMethod, frozen=True, kw_only=True, tag="hypothesis"):
    """The expected output, proposed as far as it is right."""

    suits: ClassVar[str] = "free; for requests whose answer is mostly known up front"
    flags: ClassVar[tuple[Flag, ...]] = (
        Flag("--hypothesis", None, "verify expected outputs given with requests, in chains of up to 16 tokens"),
    )
    takes_hypothesis: ClassVar[bool] = True
    default_sizes: ClassVar[tuple[int, ...]] = (16, 8, 4, 2)
