"""A rank's part of a split target on the CPU."""

from __future__ import annotations

from typing import Any

from specexport.runtime.backend import Buffers
from specexport.runtime.backends.onnxruntime.graph import OnnxRuntimeGraph, open_cached
from specexport.runtime.backends.onnxruntime.segments import Segments
from specexport.runtime.backends.ranks import Followers, Job, Leading, Meeting, RankLostError
from specexport.runtime.bundle import Bundle


class LeadingGraph(Leading, OnnxRuntimeGraph):
    """The first rank's part of a target on the CPU; its runs have the results of the whole graph."""

    @classmethod
    def open(cls, bundle: Bundle, slots: int, buffers: Buffers, threads: int, keep: bool) -> LeadingGraph:
        """Starts the other ranks, and opens this one's part.

        Args:
            bundle: a bundle with a split target.
            slots: number of slots of the cache.
            buffers: creates the arrays of a shape point.
            threads: threads of all ranks together.
            keep: see :func:`open_cached`.

        Raises:
            BackendError: a rank cannot be started, or its graph is refused.
        """
        share = max(1, threads // len(bundle.manifest.target.ranks))
        followers = Followers(bundle, Job(str(bundle.folder.absolute()), slots, threads=share, keep=keep))
        try:
            graph: LeadingGraph = open_rank(cls, bundle, 0, slots, buffers, share, keep, followers.meeting)
            graph._followers = followers
            followers.wait_until_open()
        except RankLostError as lost:
            followers.give_up(lost)
        except BaseException:
            followers.close()
            raise
        return graph

    def close(self) -> None:
        """Ends the other ranks."""
        self._followers.close()


def open_rank(
    kind: type[Any],
    bundle: Bundle,
    rank: int,
    slots: int,
    buffers: Buffers,
    threads: int,
    keep: bool,
    meeting: Meeting,
) -> Any:
    """Opens a rank's part of the target as a graph of the class ``kind``."""
    model, lowering = bundle.manifest.target, bundle.manifest.lowering
    files = model.ranks[rank].segments
    sessions = [open_cached(bundle, model, name, threads, keep) for name in files]
    segments = Segments(sessions, len(model.ranks), lowering, meeting)
    return kind(bundle.file(files[0]), segments, model.of_rank(rank), lowering, slots, buffers)
