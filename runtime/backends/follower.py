"""A process that follows the first rank of a split target: ``python -m specexport.runtime.backends.follower``."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import sys

import msgspec
import numpy as np

from specexport.contract.engines import ENGINE_RUNTIMES
from specexport.contract.errors import SpecExportError
from specexport.runtime.backend import Graph
from specexport.runtime.backends.onnxruntime.segments import open_rank
from specexport.runtime.backends.ranks import LENGTH, ORPHANED, Job, ProcessGroup, RankLostError, Run
from specexport.runtime.bundle import Bundle


def main() -> int:
    """Follows the first rank until that closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first rank handles it
    read = sys.stdin.buffer.read
    job = msgspec.msgpack.decode(read(*LENGTH.unpack(read(LENGTH.size))), type=Job)
    peers = {rank: socket.socket(fileno=number) for rank, number in job.peers.items()}
    group = ProcessGroup(job.rank, peers, mmap.mmap(job.memory, 0))
    try:
        graph = _open(job, group)
        group.barrier()
        while head := read(LENGTH.size):
            _follow(graph, msgspec.msgpack.decode(read(*LENGTH.unpack(head)), type=Run))
    except RankLostError:
        return ORPHANED
    except SpecExportError as error:
        sys.stderr.write(f"rank {job.rank}: {error}\n")
        return 1
    return 0


def _open(job: Job, group: ProcessGroup) -> Graph:
    bundle = Bundle.open(job.bundle, check_hashes=False)
    if job.options.name not in ENGINE_RUNTIMES:
        return open_rank(bundle, job, group)
    from specexport.runtime.backends.cuda.backend import CudaBackend

    return CudaBackend(bundle, job.options).follow(job, group)


def _follow(graph: Graph, message: Run) -> None:
    for name, arguments in message.changes:
        if name == "commit":
            graph.commit(arguments[0], arguments[1], arguments[2:])
        else:
            getattr(graph, name)(*arguments)
    inputs = graph.inputs(message.shape)
    for name, content in message.inputs.items():
        inputs[name][...] = np.frombuffer(content, inputs[name].dtype).reshape(inputs[name].shape)
    graph.run(message.shape)


if __name__ == "__main__":
    # At once: the system releases what libraries hold of the device and of ended ranks.
    os._exit(main())
