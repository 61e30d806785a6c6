"""A process that follows the first rank of a split target: ``python -m specexport.runtime.backends.follower``."""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import signal
import socket
import sys
from typing import Any

from specexport.contract.errors import SpecExportError
from specexport.runtime.backend import Graph, open_backend
from specexport.runtime.backends.ranks import ORPHANED, Job, ProcessGroup, RankLostError, Run
from specexport.runtime.bundle import Bundle


def main() -> int:
    """Follows the first rank until that closes the pipe; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first rank handles it
    job: Job | None = _receive()
    if job is None:
        return ORPHANED
    peers = {rank: socket.socket(fileno=number) for rank, number in job.peers.items()}
    group = ProcessGroup(job.rank, peers, mmap.mmap(job.memory, 0))
    try:
        backend: Any = open_backend(Bundle.open(job.bundle, check_hashes=False), job.options)
        graph = backend.follow(job, group)
        group.barrier()
        while (message := _receive()) is not None:
            _run(graph, message)
    except RankLostError:
        return ORPHANED
    except SpecExportError as error:
        sys.stderr.write(f"rank {job.rank}: {error}\n")
        return 1
    return 0


def _receive() -> Any:
    """The first rank's next message; None if it closed the pipe, or ended while it wrote."""
    with contextlib.suppress(EOFError, pickle.UnpicklingError):  # at a message's end, and within one
        return pickle.load(sys.stdin.buffer)
    return None


def _run(graph: Graph, message: Run) -> None:
    changes, shape, arrays = message
    for name, arguments in changes:
        getattr(graph, name)(*arguments)
    inputs = graph.inputs(shape)
    for name, array in arrays.items():
        inputs[name][...] = array
    graph.run(shape)


if __name__ == "__main__":
    # Without cleaning up, as the system frees the libraries' resources, also those shared with ended ranks.
    os._exit(main())
