"""NCCL over sockets between processes of this host, for targets that GPUs share.

As with the real one a rank that is gone is waited for until the communicator is closed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specexport.runtime.backends.cuda import api, backend, ort, trt
from specexport.runtime.backends.cuda.memory import Tensor
from specexport.runtime.backends.ranks import combine
from tests.cuda_stand_in import StandIn
from tests.onnxruntime_stand_in import OnnxRuntimeGpu
from tests.tensorrt_stand_in import TensorRT

_HEAD = struct.Struct("<I")
_counted = itertools.count()


class Nccl:
    def __init__(self, cuda: StandIn) -> None:
        self._cuda = cuda

    def unique_id(self) -> bytes:
        return f"\0specexport-{os.getpid()}-{next(_counted)}".encode().ljust(128, b" ")

    def join(self, unique_id: bytes, rank: int, ranks: int) -> Communicator:
        name, peers = unique_id.rstrip(), []
        if rank:
            peers.append(_connected(name))
        else:
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(name)
                listening.listen(ranks)
                arrived = [listening.accept()[0] for _ in range(ranks - 1)]
            peers = [peer for _, peer in sorted((_HEAD.unpack(_read(peer, 4)), peer) for peer in arrived)]
        if rank:
            peers[0].sendall(_HEAD.pack(rank))
        return Communicator(self._cuda, rank, ranks, peers)


class Communicator:
    """A star: the first rank reads what the others have, and tells them what became of it."""

    def __init__(self, cuda: StandIn, rank: int, ranks: int, peers: list[socket.socket]) -> None:
        self._cuda = cuda
        self.capsule = self  # what the stand-in of TensorRT takes
        self.rank, self.ranks = rank, ranks
        self._peers = peers
        self._closed = threading.Event()

    def barrier(self) -> None:
        self.meet("sum.", np.zeros(1, np.float32))

    def all_reduce(self, part: Tensor, stream: int) -> None:
        self._give("sum.", part, part, stream)

    def all_gather(self, part: Tensor, whole: Tensor, stream: int) -> None:
        assert whole.shape == (self.ranks, *part.shape)
        self._give("join.", part, whole, stream)

    def _give(self, name: str, part: Tensor, whole: Tensor, stream: int) -> None:
        def work() -> None:
            source, to = (
                self._cuda.array(tensor.address, tensor.dtype, tensor.shape).reshape(-1) for tensor in (part, whole)
            )
            to[:] = self.meet(name, source)

        self._cuda.give(stream, work, (part.address, part.nbytes), (whole.address, whole.nbytes))

    def meet(self, name: str, part: Any) -> Any:
        whole = np.empty(
            (*part.shape[:-1], part.shape[-1] * (1 if name.startswith("sum.") else self.ranks)), part.dtype
        )
        try:
            if self.rank:
                self._peers[0].sendall(part.tobytes())
                whole[...] = np.frombuffer(_read(self._peers[0], whole.nbytes), whole.dtype).reshape(whole.shape)
            else:
                theirs = [
                    np.frombuffer(_read(peer, part.nbytes), part.dtype).reshape(part.shape) for peer in self._peers
                ]
                combine(name, [part, *theirs], whole)
                for peer in self._peers:
                    peer.sendall(whole.tobytes())
        except OSError:
            assert self._closed.wait(20), "a rank is gone, and nobody closed the communicator"
        return whole

    def close(self) -> None:
        self._closed.set()
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
            peer.close()


def _connected(name: bytes) -> socket.socket:
    for _ in range(200):
        result = socket.socket(socket.AF_UNIX)
        try:
            result.connect(name)
        except OSError:
            result.close()
            time.sleep(0.05)
        else:
            return result
    raise AssertionError("the first rank does not listen")


def _read(peer: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        if not (got := peer.recv(count - len(parts))):
            raise OSError
        parts += got
    return bytes(parts)


def followed(monkeypatch: pytest.MonkeyPatch, folder: Path, bundle: Path, cuda: StandIn) -> None:
    """Puts it into this process, and it and the other stand-ins into those that it starts."""
    folder.mkdir()
    start = f"from tests import nccl_stand_in\nnccl_stand_in.in_a_follower({str(bundle)!r})\n"
    (folder / "sitecustomize.py").write_text(start, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(backend, "Nccl", lambda: Nccl(cuda))


def in_a_follower(bundle: str) -> None:
    """What a process does first that runs a rank; others are left alone."""
    if "specexport.runtime.backends.follower" in sys.orig_argv:
        cuda = StandIn()
        module = TensorRT(cuda, Path(bundle))
        api.Cuda.load = lambda: api.Cuda(cuda)
        trt.import_tensorrt = lambda runtime: module
        ort.import_onnxruntime = lambda: OnnxRuntimeGpu(cuda)
        backend.Nccl = lambda: Nccl(cuda)
