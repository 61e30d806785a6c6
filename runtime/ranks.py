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
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import msgspec
import numpy as np

from specexport.contract.errors import BackendError
from specexport.runtime.buffers import buffers
from specexport.runtime.bundle import Bundle
from specexport.runtime.graph import FIRST, Array, Buffers
from specexport.runtime.ort import OnnxRuntimeGraph, open_kept
from specexport.runtime.segments import Segments, put_together

_ROOM = 1 << 18
"""Numbers that a rank shows at a time; larger parts are put together piece by piece."""
_SPIN = 200e-6
"""Seconds to look for the others' bytes before sleeping until they come; parts are mostly there within less."""
_PATIENCE = 60.0
"""Seconds after which a rank that is there and says nothing is given up."""
_GOODBYE = 5.0
_ORPHANED = 3
"""Exit status of a rank that ended because another one had."""
_LENGTH = struct.Struct("<I")


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


class _Job(msgspec.Struct):
    """What a follower is told first: what to open, and the numbers of the files it inherits."""

    bundle: str
    rank: int
    ranks: int
    slots: int
    threads: int
    keep: bool
    memory: int
    peers: dict[int, int]


class _Run(msgspec.Struct):
    """What changed since the last run, in order, and what this one is given."""

    changes: list[tuple[str, list[int]]]
    shape: tuple[int, int, int]
    slots: tuple[int, int]
    given: dict[str, bytes]


class Followers:
    """The processes of all ranks but the first, and what they are told.

    Raises:
        BackendError: this system cannot start them.
    """

    def __init__(self, bundle: Bundle, slots: int, threads: int, keep: bool) -> None:
        if not (hasattr(os, "sched_yield") and hasattr(select, "poll")):
            raise BackendError(
                f"{bundle.folder}: its target is split among ranks, which {sys.platform} cannot run; build it without "
                "--tensor-parallel"
            )
        ranks = range(len(bundle.manifest.target.ranks))
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
            for rank in ranks[1:]:
                peers = {other: peer.fileno() for other, peer in ends[rank].items()}
                folder = str(bundle.folder.absolute())
                job = _Job(folder, rank, len(ranks), slots, threads, keep, file.fileno(), peers)
                self._processes[rank] = subprocess.Popen(
                    [sys.executable, "-m", __name__],
                    stdin=subprocess.PIPE,
                    env=environment,
                    pass_fds=[file.fileno(), *peers.values()],
                )
                self._tell(rank, job)
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
        told = _Run(self._changes, shape, (slots.start, slots.stop), inputs)
        self._changes = []
        for rank in self._processes:
            self._tell(rank, told)

    def _tell(self, rank: int, what: msgspec.Struct) -> None:
        content, pipe = msgspec.msgpack.encode(what), self._processes[rank].stdin
        assert pipe is not None
        try:
            pipe.write(_LENGTH.pack(len(content)) + content)
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
            first = {rank: status for rank, status in ended.items() if status not in (None, _ORPHANED)}
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


class LeadingGraph(OnnxRuntimeGraph):
    """The first rank's part of a target, whose runs are the whole's; see :class:`~specexport.runtime.graph.Graph`."""

    _followers: Followers

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
        followers = Followers(bundle, slots, own, keep)
        try:
            made: LeadingGraph = _opened(cls, bundle, 0, slots, made_by, own, keep, followers.meeting)
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

    def reserve(self, rows: int) -> None:
        super().reserve(rows)
        self._note("reserve", rows)

    def shrink_cache(self, rows: int) -> None:
        super().shrink_cache(rows)
        self._note("shrink_cache", rows)

    def copy(self, source: int, to: int, rows: int) -> None:
        super().copy(source, to, rows)
        self._note("copy", source, to, rows)

    def commit(self, slot: int, past: int, nodes: Sequence[int]) -> None:
        super().commit(slot, past, nodes)
        self._note("commit", slot, past, *nodes)

    def _note(self, name: str, *arguments: int) -> None:
        if hasattr(self, "_followers"):  # each opens with the same cache
            self._followers.note(name, *map(int, arguments))

    def run(self, tokens: int, rows: int = 0, drafts: int = 0, slots: range = FIRST) -> dict[str, Array]:
        try:
            self._followers.run((tokens, rows, drafts), slots, self.inputs(tokens, rows, drafts, slots))
            return super().run(tokens, rows, drafts, slots)
        except RankLostError as lost:
            self._followers.give_up(lost)


def _opened(
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
    return kind(bundle.file(files[0]), segments, model.part, lowering, slots, made_by)


def main() -> int:
    """Follows the first rank until that closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # that of the first rank is enough
    read = sys.stdin.buffer.read
    job = msgspec.msgpack.decode(read(*_LENGTH.unpack(read(_LENGTH.size))), type=_Job)
    peers = {rank: socket.socket(fileno=number) for rank, number in job.peers.items()}
    meeting = Meeting(job.rank, peers, mmap.mmap(job.memory, 0))
    bundle = Bundle.open(job.bundle, check_hashes=False)
    made_by = buffers(bundle.manifest.target_signature)
    try:
        graph = _opened(OnnxRuntimeGraph, bundle, job.rank, job.slots, made_by, job.threads, job.keep, meeting)
        meeting.wait()
        while head := read(_LENGTH.size):
            _follow(graph, msgspec.msgpack.decode(read(*_LENGTH.unpack(head)), type=_Run))
    except RankLostError:
        return _ORPHANED
    return 0


def _follow(graph: OnnxRuntimeGraph, told: _Run) -> None:
    for name, arguments in told.changes:
        if name == "commit":
            graph.commit(arguments[0], arguments[1], arguments[2:])
        else:
            getattr(graph, name)(*arguments)
    slots = range(*told.slots)
    inputs = graph.inputs(*told.shape, slots)
    for name, content in told.given.items():
        inputs[name][...] = np.frombuffer(content, inputs[name].dtype).reshape(inputs[name].shape)
    graph.run(*told.shape, slots)


if __name__ == "__main__":
    sys.exit(main())
