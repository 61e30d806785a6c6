"""Reads the header of a GGUF file: metadata and tensor locations, checked before any memory is allocated.

The ``gguf`` library's reader trusts a file's counts, lengths and offsets; this reader refuses damaged files by name.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, ReaderField

from specexport.contract.errors import BuildError
from specexport.contract.folders import describe_error

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_MAX_FIELDS, _MAX_TENSORS, _MAX_DIMENSIONS = 1 << 16, 1 << 17, 4
_MAX_KEY, _MAX_NAME = (1 << 16) - 1, 256
_MAX_SIZE, _MAX_ALIGNMENT, _MAX_ELEMENTS = 1 << 40, 1 << 20, 1 << 24
_ALIGNMENT = 32
_NUMBERS: Final[Mapping[GGUFValueType, str]] = {
    GGUFValueType.UINT8: "u1", GGUFValueType.INT8: "i1", GGUFValueType.UINT16: "<u2", GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4", GGUFValueType.INT32: "<i4", GGUFValueType.FLOAT32: "<f4", GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8", GGUFValueType.INT64: "<i8", GGUFValueType.FLOAT64: "<f8",
}  # fmt: skip
_FETCH = "fetch the file again"


@dataclass(frozen=True)
class Field:
    """A value of the metadata.

    Attributes:
        kinds: the value's type, and the type of the elements of an array.
        value: a number, a boolean, a string, or a list of these.
    """

    kinds: tuple[GGUFValueType, ...]
    value: Any


@dataclass(frozen=True)
class TensorPlace:
    """A tensor of a file.

    Attributes:
        shape: the shape in NumPy's order, rows first.
        data: memory-mapped bytes, uint8 ``[..., bytes of a row]``.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Header:
    """The header of a file, or of all parts of a split file.

    Attributes:
        path: the file, or the first part.
    """

    path: Path
    fields: dict[str, Field]
    tensors: dict[str, TensorPlace]

    def get(self, key: str, kind: type[Any] | tuple[type[Any], ...], default: Any = None) -> Any:
        if key not in self.fields:
            return default
        value = self.fields[key].value
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            expected = " or ".join(type_.__name__ for type_ in (kind if isinstance(kind, tuple) else (kind,)))
            raise BuildError(f"{self.path}: {key} is {str(value)[:60]!r}; expected {expected}; {_FETCH}")
        return value

    @property
    def architecture(self) -> str:
        """``general.architecture``, llama.cpp's name of the family."""
        name: str = self.get("general.architecture", str, "")
        if not name:
            raise BuildError(f"{self.path}: general.architecture is missing; expected the file of a language model")
        return name


def read_header(files: list[Path]) -> Header:
    """The header of a GGUF file, or of all parts of a split file, in order."""
    headers = [_read(path) for path in files]
    first = headers[0]
    count = first.get("split.count", int, 1)
    for number, header in enumerate(headers):
        split = header.get("split.no", int, 0), header.get("split.count", int, 1)
        if split != (number, len(files)):
            raise BuildError(
                f"{header.path}: split.no and split.count are {split[0]} and {split[1]}; expected {number} and "
                f"{len(files)}: the files that the model was split into, each under the name it had"
            )
    tensors: dict[str, TensorPlace] = {}
    for header in headers:
        if doubled := tensors.keys() & header.tensors.keys():
            raise BuildError(f"{header.path}: tensor {min(doubled)!r} is in an earlier file too; {_FETCH}")
        tensors |= header.tensors
    stated = first.get("split.tensors.count", int, len(tensors)) if count > 1 else len(tensors)
    if stated != len(tensors):
        raise BuildError(f"{first.path}: split.tensors.count is {stated}, but the files hold {len(tensors)}; {_FETCH}")
    return Header(first.path, first.fields, tensors)


def _read(path: Path) -> Header:
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < 24:
                raise BuildError(f"{path}: {size} bytes; expected a GGUF file; {_FETCH}")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise BuildError(describe_error(error, path)) from error
    return _Reader(path, mapped).header()


class _Reader:
    """A cursor over a mapped file."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self._path, self._mapped, self._at = path, mapped, 0

    def _refuse(self, field: str, value: object, expected: str) -> BuildError:
        return BuildError(f"{self._path}: {field} is {str(value)[:80]}; expected {expected}; {_FETCH}")

    def _take(self, size: int, field: str) -> int:
        """Advances by ``size`` bytes, and returns their start."""
        start, remaining = self._at, len(self._mapped) - self._at
        if size > remaining:
            raise BuildError(f"{self._path}: {field} takes {size} bytes, but the file has {remaining} left; {_FETCH}")
        self._at += size
        return start

    def _number(self, form: str, field: str) -> Any:
        return struct.unpack_from(f"<{form}", self._mapped, self._take(struct.calcsize(f"<{form}"), field))[0]

    def _text(self, field: str, longest: int | None = None) -> str:
        length = self._number("Q", field)
        if longest is not None and length > longest:
            raise self._refuse(f"the length of {field}", length, f"at most {longest}")
        start = self._take(length, field)
        try:
            return self._mapped[start : self._at].decode()
        except UnicodeDecodeError as error:
            raise self._refuse(field, f"not UTF-8: {error}", "text") from error

    def header(self) -> Header:
        magic = self._mapped[self._take(4, "the header") : 4]
        if magic != _MAGIC:
            raise self._refuse("the beginning", repr(magic), f"{_MAGIC!r}, with which GGUF files begin")
        version = self._number("I", "the version")
        if version not in _VERSIONS:
            swapped = " (written for big-endian machines)" if version >> 24 in _VERSIONS else ""
            raise self._refuse("the version", f"{version}{swapped}", "2 or 3, little-endian")
        counts = self._number("Q", "the number of tensors"), self._number("Q", "the number of fields")
        for part, count, most in zip(("tensors", "fields"), counts, (_MAX_TENSORS, _MAX_FIELDS), strict=True):
            if count > most:
                raise self._refuse(f"the number of {part}", count, f"at most {most}")
        fields: dict[str, Field] = {}
        for number in range(counts[1]):
            key = self._text(f"the key of field {number}", _MAX_KEY)
            if key in fields:
                raise self._refuse(f"field {number}", repr(key[:80]), "another key: there is one of this name")
            fields[key] = self._field(repr(key[:80]))
        return self._add_tensors(Header(self._path, fields, {}), counts[0])

    def _kind(self, field: str) -> GGUFValueType:
        number = self._number("I", field)
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self._refuse(f"the type of {field}", number, "0 to 12") from None

    def _field(self, name: str) -> Field:
        kind = self._kind(name)
        if kind is GGUFValueType.STRING:
            return Field((kind,), self._text(name))
        if kind is not GGUFValueType.ARRAY:
            number = np.dtype(_NUMBERS[kind])
            return Field((kind,), np.frombuffer(self._mapped, number, 1, self._take(number.itemsize, name))[0].item())
        element, count = self._kind(name), self._number("Q", name)
        if element is GGUFValueType.ARRAY:
            raise self._refuse(name, "an array of arrays", "an array of numbers or of texts")
        if count > _MAX_ELEMENTS:
            raise self._refuse(f"the length of {name}", count, f"at most {_MAX_ELEMENTS}")
        dtype = None if element is GGUFValueType.STRING else np.dtype(_NUMBERS[element])
        self._at = self._take(count * (8 if dtype is None else dtype.itemsize), name)  # at least
        if dtype is None:
            return Field((kind, element), [self._text(name) for _ in range(count)])
        start = self._take(count * dtype.itemsize, name)
        return Field((kind, element), np.frombuffer(self._mapped, dtype, count, start).tolist())

    def _add_tensors(self, header: Header, count: int) -> Header:
        infos: dict[str, tuple[tuple[int, ...], GGMLQuantizationType, int]] = {}
        for number in range(count):
            name = self._text(f"the name of tensor {number}", _MAX_NAME)
            if name in infos:
                raise self._refuse(f"tensor {number}", repr(name), "another name: there is one of this name")
            infos[name] = self._tensor_info(f"tensor {name!r}")
        alignment = header.get("general.alignment", int, _ALIGNMENT)
        if not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._refuse("general.alignment", alignment, f"a power of two up to {_MAX_ALIGNMENT}")
        begin = self._at + -self._at % alignment
        for name, (shape, stored, offset) in infos.items():
            block, block_bytes = GGML_QUANT_SIZES[stored]
            row = shape[-1] // block * block_bytes
            size, remaining = math.prod(shape[:-1]) * row, max(0, len(self._mapped) - begin)
            if offset % alignment or offset > remaining or size > remaining - offset:
                raise BuildError(
                    f"{self._path}: tensor {name!r} is {size} bytes from {offset} on; expected a multiple of "
                    f"{alignment} and at most the {remaining} bytes that the file has for tensors; {_FETCH}"
                )
            data = np.frombuffer(self._mapped, np.uint8, size, begin + offset).reshape(*shape[:-1], row)
            header.tensors[name] = TensorPlace(name, shape, stored, data)
        return header

    def _tensor_info(self, label: str) -> tuple[tuple[int, ...], GGMLQuantizationType, int]:
        """A tensor's shape, its type, and its offset in bytes among the tensors' data."""
        rank = self._number("I", label)
        if not 1 <= rank <= _MAX_DIMENSIONS:
            raise self._refuse(f"the number of dimensions of {label}", rank, f"1 to {_MAX_DIMENSIONS}")
        sizes = [self._number("Q", label) for _ in range(rank)]
        if not all(sizes) or math.prod(sizes) > _MAX_SIZE:
            raise self._refuse(f"the shape of {label}", sizes, f"1 to {_MAX_SIZE} numbers")
        kind = self._number("I", label)
        try:
            stored = GGMLQuantizationType(kind)
        except ValueError:
            raise self._refuse(f"the type of {label}", kind, "a type that the gguf library knows") from None
        block = GGML_QUANT_SIZES[stored][0]
        if sizes[0] % block:
            raise self._refuse(f"the shape of {label}", sizes, f"rows of blocks of {block}, as {stored.name} has")
        return tuple(sizes[::-1]), stored, self._number("Q", label)


def as_library_reader(header: Header) -> Callable[[object], Any]:
    """A stand-in for the ``gguf`` library's reader class that returns a header read and checked here."""

    class Reader:
        def __init__(self, _path: object) -> None:
            self.tensors = list(header.tensors.values())
            self.fields = {key: _library_field(key, field) for key, field in header.fields.items()}

    return Reader


def _library_field(key: str, field: Field) -> ReaderField:
    values = field.value if field.kinds[0] is GGUFValueType.ARRAY else [field.value]
    parts: list[Any] = [value.encode() if isinstance(value, str) else [value] for value in values]
    return ReaderField(0, key, parts, list(range(len(parts))), list(field.kinds))
