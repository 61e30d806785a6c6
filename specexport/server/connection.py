"""Connections of clients that send a request and end their side of the connection before the answer."""

from __future__ import annotations

import socket

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_TICK = 0.02
"""Seconds between two looks at whether a client is still there."""


class Connection(HttpToolsProtocol):
    """Answers a client that has ended its side; uvicorn would close the connection, which cancels the request.

    A client that is gone looks the same until its system refuses what is sent to it. Until an answer begins, the
    interim response 100 may be sent, but not to HTTP/1.0: such a client, and one that ends its side during its answer,
    counts as gone.
    """

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open, until it is answered."""
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_started or cycle.scope["http_version"] == "1.0":
            return False
        cycle.keep_alive = False
        self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._watch()
        return True

    def _watch(self) -> None:
        if self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self.loop.call_later(_TICK, self._watch)
