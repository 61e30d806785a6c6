"""A target split among processes of this host: the first one takes the steps, and the others follow it.

The followers are told what changes their caches, and what a step is given, through a pipe. Within a step all ranks meet
in shared memory, and tell each other by a byte through a socket that their part is there. A process that ends closes
its sockets, so that nobody waits for it; followers end with the first.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import msgspec
import numpy as np

from specexport.contract.engines import EngineRuntime
from specexport.contract.errors import BackendError
from specexport.runtime.bundle import Bundle
from specexport.runtime.graph import FIRST, Array, Buffers, Graph
from specexport.runtime.ort import OnnxRuntimeGraph, open_kept
from specexport.runtime.segments import Segments, put_together

_ROOM = 1 << 18
"""Numbers that a rank shows at a time; larger parts are put together piece by piece."""
_SPIN = 200e-6
"""Seconds to look for the others' bytes before sleeping until they come; parts are mostly there within less."""
_PATIENCE = 60.0
"""Seconds after which a rank that is there and says nothing is given up."""
_GOODBYE = 5.0
ORPHANED = 3
"""Exit status of a rank that ended because another one had."""
LENGTH = struct.Struct("<I")
"""Of what is told through a pipe, before it."""
_FOLLOWER = "specexport.runtime.follower"


class RankLostError(BackendError):
    """A rank ended, or says nothing."""

    def __init__(self, rank: int, silent: bool = False) -> None:
        super().__init__(f"rank {rank} is gone")
        self.rank = rank
        self.silent = silent


class Meeting:
    """Where the ranks put their parts together.

    Args:
        rank: this one.
        peers: a socket to each of the others.
        memory: of all ranks, twice: while some still read, others write what comes next.
    """

    def __init__(self, rank: int, peers: Mapping[int, socket.socket], memory: mmap.mmap) -> None:
        self._rank = rank
        self._peers = peers
        self._places = np.frombuffer(memory, np.float32).reshape(2, len(peers) + 1, _ROOM)
        self._turn = 0
        self.patience: float | None = None
        for peer in peers.values():
            peer.setblocking(False)

    def __call__(self, name: str, part: Array, whole: Array) -> None:
        """See :data:`~specexport.runtime.segments.Meet`. Sums are in the order of ranks, so the same for all."""
        flat, parts = part.reshape(-1), []
        several = flat.size > _ROOM
        for start in range(0, flat.size, _ROOM):
            piece = flat[start : start + _ROOM]
            places = self._places[self._turn]
            self._turn ^= 1
            places[self._rank, : piece.size] = piece
            self.wait()
            shown = places[:, : piece.size]
            parts.append(shown.copy() if several else shown)
        together = np.concatenate(parts, 1) if several else parts[0]
        put_together(name, list(together.reshape(len(together), *part.shape)), whole)

    def wait(self) -> None:
        """Returns when every rank is here.

        Raises:
            RankLostError: one is gone.
        """
        rank = 0
        try:
            for rank in self._peers:
                self._peers[rank].send(b"\0")
            for rank, peer in self._peers.items():
                if not self._heard(rank, peer):
                    raise RankLostError(rank)
        except OSError:
            raise RankLostError(rank) from None

    def watch(self, lost: Callable[[int], None]) -> None:
        """Calls a function once, from a thread of its own, when a rank ends: for ranks that wait for a device."""
        ranks, ends = {peer.fileno(): rank for rank, peer in self._peers.items()}, select.poll()
        for number in ranks:
            ends.register(number, 0)  # that the other end is closed is always told

        def wait() -> None:
            (number, _), *_ = ends.poll()
            lost(ranks[number])

        threading.Thread(target=wait, name="specexport-ranks", daemon=True).start()

    def _heard(self, rank: int, peer: socket.socket) -> bytes:
        """What a rank said; nothing if it is gone."""
        asleep_from = time.perf_counter() + _SPIN
        while time.perf_counter() < asleep_from:
            with contextlib.suppress(BlockingIOError):
                return peer.recv(1)
            os.sched_yield()
        asleep = select.poll()  # not select(), which knows few open files
        asleep.register(peer, select.POLLIN)
        if not asleep.poll(None if self.patience is None else 1e3 * self.patience):
            raise RankLostError(rank, silent=True)
        return peer.recv(1)


class Job(msgspec.Struct):
    """What a follower is told first.

    Attributes:
        bundle: what to open.
        slots: of the cache.
        rank: which one it is.
        memory: the number of the file in which ranks meet, which it inherits.
        peers: those of its sockets to the others.
        threads: on the CPU, of each rank.
        keep: there, see :func:`~specexport.runtime.ort.open_kept`.
        backend: on GPUs, what runs the engines; then each rank sees one GPU.
        utilization: there, the part of its memory that may be used.
        unique_id: there, of the communicator that it is to join.
    """

    bundle: str
    slots: int
    rank: int = 0
    memory: int = -1
    peers: dict[int, int] = {}
    threads: int = 1
    keep: bool = False
    backend: EngineRuntime | None = None
    utilization: float = 0.0
    unique_id: bytes = b""


class Run(msgspec.Struct):
    """What changed since the last run, in order, and what this one is given."""

    changes: list[tuple[str, list[int]]]
    shape: tuple[int, int, int]
    slots: tuple[int, int]
    given: dict[str, bytes]


class Followers:
    """The processes of all ranks but the first, and what they are told.

    Args:
        bundle: its target is split.
        job: for all of them.

    Raises:
        BackendError: this system cannot start them.
    """

    def __init__(self, bundle: Bundle, job: Job) -> None:
        if not (hasattr(os, "sched_yield") and hasattr(select, "poll")):
            raise BackendError(
                f"{bundle.folder}: its target is split among ranks, which {sys.platform} cannot run; build it without "
                "--tensor-parallel"
            )
        ranks = range(len(bundle.manifest.target.ranks))
        self.lost: RankLostError | None = None
        """Which one is known to have ended while the first one waited for a device."""
        self._changes: list[tuple[str, list[int]]] = []
        self._error: BackendError | None = None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        ends: dict[int, dict[int, socket.socket]] = {rank: {} for rank in ranks}
        for one in ranks:
            for other in range(one):
                ends[one][other], ends[other][one] = socket.socketpair()
        with tempfile.TemporaryFile(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as file:
            file.truncate(2 * len(ranks) * _ROOM * 4)
            self._memory = mmap.mmap(file.fileno(), 0)
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            for rank in ranks[1:]:
                peers = {other: peer.fileno() for other, peer in ends[rank].items()}
                if job.backend is not None:  # the leader has the first GPU that it sees, and counted them
                    environment["CUDA_VISIBLE_DEVICES"] = gpus.split(",")[rank] if gpus else str(rank)
                self._processes[rank] = subprocess.Popen(
                    [sys.executable, "-m", _FOLLOWER],
                    stdin=subprocess.PIPE,
                    env=environment,
                    pass_fds=[file.fileno(), *peers.values()],
                )
                self._tell(rank, msgspec.structs.replace(job, rank=rank, memory=file.fileno(), peers=peers))
        for rank in ranks[1:]:
            for peer in ends[rank].values():
                peer.close()
        self.meeting = Meeting(0, ends[0], self._memory)
        self._finalizer = weakref.finalize(self, _stop, list(self._processes.values()), list(ends[0].values()))

    def note(self, name: str, *arguments: int) -> None:
        """Has the followers do the same to their caches before their next run."""
        self._changes.append((name, list(arguments)))

    def run(self, shape: tuple[int, int, int], slots: range, given: Mapping[str, Array]) -> None:
        """Has them run too."""
        if self._error is not None:
            raise self._error
        inputs = {name: array.tobytes() for name, array in given.items()}
        told = Run(self._changes, shape, (slots.start, slots.stop), inputs)
        self._changes = []
        for rank in self._processes:
            self._tell(rank, told)

    def _tell(self, rank: int, what: msgspec.Struct) -> None:
        content, pipe = msgspec.msgpack.encode(what), self._processes[rank].stdin
        assert pipe is not None
        try:
            pipe.write(LENGTH.pack(len(content)) + content)
            pipe.flush()
        except OSError:
            raise RankLostError(rank) from None

    def give_up(self, lost: RankLostError) -> NoReturn:
        """Ends the others, as none can go on without the rest.

        Raises:
            BackendError: says which rank was lost and how, now and whenever they are to run again.
        """
        found = f"rank {lost.rank} says nothing for {_PATIENCE:.0f} seconds"
        if not lost.silent:
            found = f"rank {lost.rank} ended"
            time.sleep(0.1)  # so that those that went with it can be told from it
            ended = {rank: process.poll() for rank, process in self._processes.items()}
            first = {rank: status for rank, status in ended.items() if status not in (None, ORPHANED)}
            for rank, status in first.items():
                by = f"by signal {-status}" if status and status < 0 else f"with status {status}"
                found = f"rank {rank} ended {by}"
                break
        self.close()
        self._error = BackendError(
            f"{found} of the {len(self._processes) + 1} processes that share the target; the others were ended. Load "
            "the bundle again"
        )
        raise self._error from None

    def close(self) -> None:
        """Ends them; then does nothing."""
        self._finalizer()


def _stop(processes: Sequence[subprocess.Popen[bytes]], peers: Iterable[socket.socket]) -> None:
    for process in processes:
        with contextlib.suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
    for peer in peers:
        peer.close()
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GOODBYE)
        process.kill()
        process.wait()


class Leading(Graph):
    """What makes a graph of the first rank's part lead: put before its class, runs are the whole's.

    The others do to their caches what the first does, and run when it runs.
    """

    _followers: Followers

    def reserve(self, rows: int) -> None:
        super().reserve(rows)  # type: ignore[safe-super]
        self._note("reserve", rows)

    def shrink_cache(self, rows: int) -> None:
        super().shrink_cache(rows)  # type: ignore[safe-super]
        self._note("shrink_cache", rows)

    def copy(self, source: int, to: int, rows: int) -> None:
        super().copy(source, to, rows)  # type: ignore[safe-super]
        self._note("copy", source, to, rows)

    def commit(self, slot: int, past: int, nodes: Sequence[int]) -> None:
        super().commit(slot, past, nodes)  # type: ignore[safe-super]
        self._note("commit", slot, past, *nodes)

    def _note(self, name: str, *arguments: int) -> None:
        if hasattr(self, "_followers"):  # each opens with the same cache
            self._followers.note(name, *map(int, arguments))

    def run(self, tokens: int, rows: int = 0, drafts: int = 0, slots: range = FIRST) -> dict[str, Array]:
        try:
            self._followers.run((tokens, rows, drafts), slots, self.inputs(tokens, rows, drafts, slots))
            made = super().run(tokens, rows, drafts, slots)  # type: ignore[safe-super]
        except RankLostError as lost:
            self._followers.give_up(lost)
        except BackendError:
            if self._followers.lost is None:
                raise
        if self._followers.lost is not None:
            self._followers.give_up(self._followers.lost)
        return made


class LeadingGraph(Leading, OnnxRuntimeGraph):
    """The first rank's part of a target on the CPU, whose runs are the whole's."""

    @classmethod
    def open(cls, bundle: Bundle, slots: int, made_by: Buffers, threads: int, keep: bool) -> LeadingGraph:
        """Starts the other ranks, and opens this one's part.

        Args:
            bundle: its target is split.
            slots: of the cache.
            made_by: makes the arrays of a shape point.
            threads: of all ranks together.
            keep: see :func:`~specexport.runtime.ort.open_kept`.

        Raises:
            BackendError: a rank cannot be started, or its graph is refused.
        """
        own = max(1, threads // len(bundle.manifest.target.ranks))
        followers = Followers(bundle, Job(str(bundle.folder.absolute()), slots, threads=own, keep=keep))
        try:
            made: LeadingGraph = open_rank(cls, bundle, 0, slots, made_by, own, keep, followers.meeting)
            made._followers = followers
            followers.meeting.wait()
        except RankLostError as lost:
            followers.give_up(lost)
        except BaseException:
            followers.close()
            raise
        followers.meeting.patience = _PATIENCE
        return made

    def close(self) -> None:
        """Ends the other ranks."""
        self._followers.close()


def open_rank(
    kind: type[Any],
    bundle: Bundle,
    rank: int,
    slots: int,
    made_by: Buffers,
    threads: int,
    keep: bool,
    meeting: Meeting,
) -> Any:
    """A rank's part of the target, as a graph of that kind."""
    model, lowering = bundle.manifest.target, bundle.manifest.lowering
    files = model.ranks[rank].segments
    sessions = [open_kept(bundle, model, name, threads, keep) for name in files]
    segments = Segments(sessions, len(model.ranks), lowering, meeting)
    return kind(bundle.file(files[0]), segments, model.of_rank(rank), lowering, slots, made_by)
