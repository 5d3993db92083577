"""Serves the dashboard on loopback, as uvicorn does it. PYTEST_DONT_REWRITE."""

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import psycopg
import pytest
import uvicorn
from pgqueue.dashboard import app
from psycopg.conninfo import make_conninfo

PAGES = ["/", "/jobs", "/running", "/workers", "/dead", "/schedules", "/batches"]


@dataclass
class Answer:
    status: int
    headers: http.client.HTTPMessage
    text: str


@dataclass
class Site:
    port: int
    dashboard: Any = None
    name: str = "127.0.0.1"

    @property
    def host(self) -> str:
        return f"{self.name}:{self.port}"

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, None, headers)

    def post(self, path: str, form: dict[str, str], **headers: str) -> Answer:
        """As a browser does it from a page of ours."""
        own = {
            "Content-Type": "application/x-www-form-urlencoded",
            "Origin": f"http://{self.host}",
        }
        return self.ask("POST", path, urlencode(form), {**own, **headers})

    def ask(self, method: str, path: str, body: str | None, headers) -> Answer:
        headers = {"Host": self.host, **headers}
        conn = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        conn.request(method, path, body, headers)
        answer = conn.getresponse()
        text = answer.read().decode()
        conn.close()
        return Answer(answer.status, answer.headers, text)

    @classmethod
    def wait_for(cls, port: int) -> "Site":
        """Wait until somebody listens there."""
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return cls(port)
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.05)


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def serve() -> Iterator[Callable[..., Site]]:
    """Serve an app, or that of a dsn, until the test ends."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def serve(what, **options) -> Site:
        if isinstance(what, str):
            what = app(what, **options)
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(what, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        running.append((server, thread))
        return Site(listener.getsockname()[1], what)

    yield serve
    for server, thread in running:
        server.should_exit = True
        thread.join(20)


@pytest.fixture
def site(dsn: str, serve) -> Callable[..., Site]:
    """Serve the dashboard of the test's database; keywords are its options, or libpq's."""

    def site(allow_actions=False, hosts=None, **connection) -> Site:
        named = {} if hosts is None else {"hosts": hosts}
        return serve(
            make_conninfo(dsn, **connection), allow_actions=allow_actions, **named
        )

    return site


def kill(db: psycopg.Connection, queue: str, error: str, jobs: int = 1000) -> None:
    """Make jobs of a queue dead jobs."""
    db.execute(
        "select pgqueue.fail(id, token, %s, permanent => true)"
        " from pgqueue.claim(%s, 'killer', %s)",
        (error, queue, jobs),
    )
