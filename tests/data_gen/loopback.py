"""An HTTP server on loopback, in a thread of the tests' process."""

import contextlib
import socket
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from werkzeug import Request, Response
from werkzeug.serving import WSGIRequestHandler, make_server

from tests.ranks import free_port


class Loopback:
    """Used in a `with` statement; `stop` and `start` are dying and coming back. Subclasses say what is answered."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.lock = threading.RLock()
        self._connections: set[socket.socket] = set()
        self._http: Any = None

    def start(self) -> None:
        self._http = make_server("127.0.0.1", self.port, self._serve, threaded=True, request_handler=_Quiet)
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Drops every connection and listens no more."""
        http, self._http = self._http, None
        if http is not None:
            http.shutdown()
            http.server_close()
            for connection in list(self._connections):
                drop(connection)

    def __enter__(self) -> Any:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def answer(self, request: Request) -> Response:
        raise NotImplementedError

    def _serve(self, environ: Any, start: Any) -> Iterable[bytes]:
        connection = environ["werkzeug.socket"]
        self._connections.add(connection)
        try:
            return self.answer(Request(environ))(environ, start)
        finally:
            self._connections.discard(connection)


def drop(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it was gone
        connection.shutdown(socket.SHUT_RDWR)


def cut(request: Request, reply: Response, sent: int) -> Response:
    """The reply, whose connection is dropped behind so many bytes of the body; with none, its headers do not come."""

    def begin(content: bytes) -> Iterator[bytes]:
        if sent:
            yield content[:sent]
        drop(request.environ["werkzeug.socket"])

    content = reply.get_data()
    reply.response = begin(content)
    reply.headers["Content-Length"] = str(len(content))
    return reply


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        pass
