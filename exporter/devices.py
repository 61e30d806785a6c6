"""What ``specexport plan`` knows about devices. Memory and bandwidth are their vendor's figures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """A device.

    Attributes:
        memory: bytes of memory a GPU can use; on Jetson the CPU's too.
        bandwidth: bytes a second.
        capability: compute capability.
        reserved: bytes that are not there for a model: of the system and of CUDA itself.
    """

    memory: int
    bandwidth: float
    capability: str
    reserved: int


_GB = 10**9
_GIB = 2**30
_BOARD = 2 * _GIB
"""A Jetson without a desktop takes about 1.2 GB after boot, a CUDA context and the libraries the rest."""
_CARD = _GIB


DEVICES: dict[str, Device] = {
    "orin-nano-4gb": Device(4 * _GIB, 51 * _GB, "8.7", _BOARD),
    "orin-nano-8gb": Device(8 * _GIB, 102 * _GB, "8.7", _BOARD),
    "orin-nx-8gb": Device(8 * _GIB, 102 * _GB, "8.7", _BOARD),
    "orin-nx-16gb": Device(16 * _GIB, 102 * _GB, "8.7", _BOARD),
    "agx-orin-32gb": Device(32 * _GIB, 204 * _GB, "8.7", _BOARD),
    "agx-orin-64gb": Device(64 * _GIB, 204 * _GB, "8.7", _BOARD),
    "thor-64gb": Device(64 * _GIB, 273 * _GB, "11.0", _BOARD),
    "thor-128gb": Device(128 * _GIB, 273 * _GB, "11.0", _BOARD),
    "rtx-3060-12gb": Device(12 * _GIB, 360 * _GB, "8.6", _CARD),
    "rtx-3090": Device(24 * _GIB, 936 * _GB, "8.6", _CARD),
    "rtx-4060-8gb": Device(8 * _GIB, 272 * _GB, "8.9", _CARD),
    "rtx-4090": Device(24 * _GIB, 1008 * _GB, "8.9", _CARD),
    "rtx-5090": Device(32 * _GIB, 1792 * _GB, "12.0", _CARD),
}
"""Orin Nano with the clocks of its ``MAXN SUPER`` mode; without it, it has two thirds of that bandwidth."""
