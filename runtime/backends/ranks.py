"""A target split among processes of this host: the first rank takes the steps, and the others follow it.

The followers receive the changes of their caches and the inputs of each run through a pipe. Within a run the ranks
combine their parts in shared memory, and signal each part by a byte through a socket. A process that ends closes its
sockets, so that no rank waits for it; followers end with the first rank.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np

from specexport.contract.engines import ENGINE_RUNTIMES
from specexport.contract.errors import BackendError
from specexport.contract.tensors import COLLECTIVES
from specexport.runtime.backend import Array, BackendOptions, RunShape
from specexport.runtime.bundle import Bundle

_BLOCK = 1 << 18
"""Numbers that are combined at a time; larger parts are combined piece by piece."""
_SPIN = 200e-6
"""Seconds to poll for the others' bytes before sleeping; most parts arrive sooner."""
_TIMEOUT = 60.0
"""Seconds after which a silent rank counts as lost."""
_SHUTDOWN = 5.0
"""Seconds that a follower gets to end by itself."""
ORPHANED = 3
"""Exit status of a rank that ended because another one ended."""
_FOLLOWER = "specexport.runtime.backends.follower"

Change = tuple[str, tuple[Any, ...]]
"""A method of :class:`~specexport.runtime.backend.Graph` that changes the cache, and its arguments."""
Run = tuple[Sequence[Change], RunShape, Mapping[str, Array]]
"""A later message to a follower: the changes of its cache since the last run, in order, and a run's inputs."""
Combine = Callable[[str, Array, Array], None]
"""Combines a tensor of all ranks, from its name and a rank's part; writes the result into the last argument."""


def combine(name: str, parts: Sequence[Array], whole: Array) -> None:
    """Sums the parts of all ranks, in order, or joins them along the last axis, as the tensor's name says."""
    _, join = COLLECTIVES
    if name.startswith(join):
        np.concatenate(parts, -1, out=whole)
        return
    np.add(parts[0], parts[1], out=whole)
    for part in parts[2:]:
        whole += part


class RankLostError(BackendError):
    """A rank ended, or is silent."""

    def __init__(self, rank: int, silent: bool = False) -> None:
        super().__init__(f"rank {rank} is gone")
        self.rank = rank
        self.silent = silent


class ProcessGroup:
    """Combines the parts of all ranks in shared memory; see :data:`Combine`.

    ``peers`` has a socket to each of the other ranks, and ``memory`` two blocks for each rank, as some may still read
    one while others write the next.

    Attributes:
        timeout: seconds to wait for a rank; None waits for ever.
    """

    def __init__(self, rank: int, peers: Mapping[int, socket.socket], memory: mmap.mmap) -> None:
        self._rank = rank
        self._peers = peers
        self._blocks = np.frombuffer(memory, np.float32).reshape(2, len(peers) + 1, _BLOCK)
        self._turn = 0
        self.timeout: float | None = None
        for peer in peers.values():
            peer.setblocking(False)

    def __call__(self, name: str, part: Array, whole: Array) -> None:
        flat, parts = part.reshape(-1), []
        several = flat.size > _BLOCK
        for start in range(0, flat.size, _BLOCK):
            piece = flat[start : start + _BLOCK]
            blocks = self._blocks[self._turn]
            self._turn ^= 1
            blocks[self._rank, : piece.size] = piece
            self.barrier()
            shared = blocks[:, : piece.size]
            parts.append(shared.copy() if several else shared)
        gathered = np.concatenate(parts, 1) if several else parts[0]
        combine(name, list(gathered.reshape(len(gathered), *part.shape)), whole)

    def barrier(self) -> None:
        """Returns when every rank has called it.

        Raises:
            RankLostError: a rank ended or is silent.
        """
        rank = 0
        try:
            for rank in self._peers:
                self._peers[rank].send(b"\0")
            for rank, peer in self._peers.items():
                if not self._receive(rank, peer):
                    raise RankLostError(rank)
        except OSError:
            raise RankLostError(rank) from None

    def watch(self, lost: Callable[[int], None]) -> None:
        """Calls ``lost`` from a new thread when a rank ends, for ranks that wait for a device."""
        ranks, ends = {peer.fileno(): rank for rank, peer in self._peers.items()}, select.poll()
        for number in ranks:
            ends.register(number, 0)  # a closed peer is always reported

        def wait() -> None:
            (number, _), *_ = ends.poll()
            lost(ranks[number])

        threading.Thread(target=wait, name="specexport-ranks", daemon=True).start()

    def _receive(self, rank: int, peer: socket.socket) -> bytes:
        """The byte that a rank sent; empty if it ended."""
        asleep_from = time.perf_counter() + _SPIN
        while time.perf_counter() < asleep_from:
            with contextlib.suppress(BlockingIOError):
                return peer.recv(1)
            os.sched_yield()
        asleep = select.poll()  # select() is limited to low file numbers
        asleep.register(peer, select.POLLIN)
        if not asleep.poll(None if self.timeout is None else 1e3 * self.timeout):
            raise RankLostError(rank, silent=True)
        return peer.recv(1)


@dataclass(frozen=True)
class Job:
    """The first message to a follower.

    Attributes:
        bundle: the bundle's folder.
        options: how each rank opens its backend; on GPUs it sees one of them.
        unique_id: on GPUs, identifies the communicator to join.
        memory: file descriptor of the shared memory, which it inherits.
        peers: file descriptors of its sockets to the other ranks.
    """

    bundle: str
    slots: int
    options: BackendOptions
    unique_id: bytes = b""
    rank: int = 0
    memory: int = -1
    peers: Mapping[int, int] = field(default_factory=dict)


class Followers:
    """The processes of all ranks but the first, and the messages to them; ``job`` is what they share.

    Attributes:
        close: ends them; later calls do nothing.
        lost: the rank that ended while the first one waited for a device, if any.
        group: combines the first rank's parts with theirs.
    """

    def __init__(self, bundle: Bundle, job: Job) -> None:
        if not (hasattr(os, "sched_yield") and hasattr(select, "poll")):
            raise BackendError(
                f"{bundle.folder}: its target is split among ranks, which {sys.platform} cannot run; build it without "
                "--tensor-parallel"
            )
        ranks = range(len(bundle.manifest.target.ranks))
        self.lost: RankLostError | None = None
        self._changes: list[Change] = []
        self._error: BackendError | None = None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        ends: dict[int, dict[int, socket.socket]] = {rank: {} for rank in ranks}
        for rank in ranks:
            for peer in range(rank):
                ends[rank][peer], ends[peer][rank] = socket.socketpair()
        with tempfile.TemporaryFile(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as file:
            file.truncate(2 * len(ranks) * _BLOCK * 4)
            self._memory = mmap.mmap(file.fileno(), 0)
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            for rank in ranks[1:]:
                peers = {number: end.fileno() for number, end in ends[rank].items()}
                if job.options.name in ENGINE_RUNTIMES:  # there are as many GPUs; the leader has the first
                    environment["CUDA_VISIBLE_DEVICES"] = gpus.split(",")[rank] if gpus else str(rank)
                self._processes[rank] = subprocess.Popen(
                    [sys.executable, "-m", _FOLLOWER],
                    stdin=subprocess.PIPE,
                    env=environment,
                    pass_fds=[file.fileno(), *peers.values()],
                )
                self._send(rank, replace(job, rank=rank, memory=file.fileno(), peers=peers))
        for rank in ranks[1:]:
            for end in ends[rank].values():
                end.close()
        self.group = ProcessGroup(0, ends[0], self._memory)
        self.close = weakref.finalize(self, _stop, list(self._processes.values()), list(ends[0].values()))

    def wait_until_open(self) -> None:
        """Returns when every rank has opened its part; from then on a silent rank counts as lost.

        Raises:
            RankLostError: a rank ended.
        """
        self.group.barrier()
        self.group.timeout = _TIMEOUT

    def mirror(self, name: str, *arguments: Any) -> None:
        """Has the followers change their caches in the same way before their next run; see :data:`Change`."""
        self._changes.append((name, arguments))

    def run_with(
        self, run: Callable[[RunShape], dict[str, Array]], shape: RunShape, inputs: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Runs the first rank's part while the followers run theirs with the same inputs; returns its outputs.

        Raises:
            BackendError: a rank is lost, or ``run`` fails.
        """
        outputs: dict[str, Array] = {}
        try:
            if self._error is not None:
                raise self._error
            for rank in self._processes:
                self._send(rank, (self._changes, shape, inputs))
            self._changes = []
            outputs = run(shape)
        except RankLostError as lost:
            self.give_up(lost)
        except BackendError:
            if self.lost is None:
                raise
        if self.lost is not None:
            self.give_up(self.lost)
        return outputs

    def _send(self, rank: int, message: Job | Run) -> None:
        pipe = self._processes[rank].stdin
        assert pipe is not None
        try:
            pickle.dump(message, pipe)
            pipe.flush()
        except OSError:
            raise RankLostError(rank) from None

    def give_up(self, lost: RankLostError) -> NoReturn:
        """Ends the remaining ranks, as none can go on without the others.

        Raises:
            BackendError: says which rank was lost and how, now and at any later run.
        """
        reason = f"rank {lost.rank} has been silent for {_TIMEOUT:.0f} seconds"
        if not lost.silent:
            reason = f"rank {lost.rank} ended"
            time.sleep(0.1)  # so that ranks that ended because of it have the status ORPHANED
            for rank, process in self._processes.items():
                if (status := process.poll()) not in (None, ORPHANED):
                    reason = f"rank {rank} ended " + (f"by signal {-status}" if status < 0 else f"with status {status}")
                    break
        self.close()
        self._error = BackendError(
            f"{reason} of the {len(self._processes) + 1} processes that share the target; the others were ended. Load "
            "the bundle again"
        )
        raise self._error from None


def _stop(processes: Sequence[subprocess.Popen[bytes]], peers: Iterable[socket.socket]) -> None:
    for process in processes:
        with contextlib.suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
    for peer in peers:
        peer.close()
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_SHUTDOWN)
        process.kill()
        process.wait()
