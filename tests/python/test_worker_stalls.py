"""Connections that hang without breaking: the worker gives them up, and says so."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator

import pgqueue
import psycopg
import pytest
from conftest import column, one
from pgqueue import Worker
from pgqueue.attempt import Attempt
from pgqueue.worker.deadline import Server, notices_silence
from pgqueue.worker.heartbeat import Heartbeat
from worker_harness import OF_WORKERS, QUEUE, RESTING, is_empty, outcomes, wait_until

pytest_plugins = ["worker_harness"]

GIVEN_UP = "no answer in 1 s: connection given up"
QUICKLY = ("--call-timeout", "1", "--poll-interval", "0.5")


def test_a_call_may_take_as_long_as_the_shortest_lease_but_3_to_30_seconds():
    server = Server("")
    heartbeat, leases = Heartbeat(server, print), (600.0, 10.0, 20.0, 1.0)

    def patience(lease: float) -> float:
        heartbeat.hold([Attempt(1, 1, "k", "q", 1, 1, "{}", None, lease)], 0.0)
        return server.patience()

    assert [patience(lease) for lease in leases] == [30.0, 10.0, 10.0, 3.0]


class Proxy:
    """Passes on what it gets; those connections that it had when it stalled stay open, silent."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        # So that little is on its way.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._servers: list[socket.socket] = []
        self._stalled: set[socket.socket] = set()
        self._stalls_next = False
        self._garbles_next = False
        self._last: bytes | None = None
        self._may_go = threading.Event()
        self.pause = 0.0  # seconds after each 64 kB
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._server)
            self._open += [client, server]
            if self._stalls_next:
                self._stalls_next = False
                self._stalled.update((client, server))
            self._servers.append(server)
            for way in (client, server), (server, client):
                threading.Thread(target=self._pass_on, args=way, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                if source in self._stalled:
                    self._may_go.wait()
                    return
                if self._garbles_next and source in self._servers:
                    self._garbles_next = False
                    data = b"HTTP/1.1 502 Bad Gateway\r\n\r\n"
                sink.sendall(data)
                if self._last is not None and self._last in data:
                    self._last = None
                    self._stalled.add(source)
                self._may_go.wait(self.pause * len(data) / 65536)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def stall(self) -> None:
        self._stalled.update(self._open)

    def stall_answers(self) -> None:
        self._stalled.update(self._servers)

    def stall_the_next(self) -> None:
        self._stalls_next = True

    def stall_after(self, statement: bytes) -> None:
        self._last = statement

    def garble_the_next_answer(self) -> None:
        self._garbles_next = True

    def close(self) -> None:
        self._may_go.set()
        for one_of_us in [self._listener, *self._open]:
            with contextlib.suppress(OSError):  # or it would go on waiting
                one_of_us.shutdown(socket.SHUT_RDWR)
            one_of_us.close()


@pytest.fixture
def proxy(db: psycopg.Connection) -> Iterator[Proxy]:
    found = Proxy(f"{db.info.host}/.s.PGSQL.{db.info.port}")
    yield found
    found.close()


def through(proxy: Proxy, db: psycopg.Connection) -> str:
    info = db.info
    return f"host=127.0.0.1 port={proxy.port} user={info.user} dbname={info.dbname}"


def test_a_worker_gives_up_connections_that_a_proxy_has_forgotten(
    db, workers, proxy
) -> None:
    file = workers.folder / "alive"
    args = (*QUICKLY, "--lease", "3", "--health-file", str(file))
    worker = workers.start(*args, dsn=through(proxy, db))
    wait_until(lambda: one(db, RESTING))
    held = pgqueue.enqueue(db, QUEUE, kind="hold")
    workers.began()
    proxy.stall()
    after = pgqueue.enqueue_many(db, QUEUE, [None] * 3, kind="mark")
    wait_until(lambda: set(after) <= set(workers.notes()))
    wait_until(lambda: workers.log().count("the server answers again"))
    before = file.stat().st_mtime_ns
    wait_until(lambda: file.stat().st_mtime_ns > before)
    workers.let_go()
    wait_until(lambda: is_empty(db))
    assert outcomes(db) == {"completed": 4}
    assert held in workers.notes()
    assert workers.log().count(GIVEN_UP) == 1
    assert workers.finish(worker) == 0


def test_a_worker_outlives_an_answer_that_no_server_gives(db, workers, proxy) -> None:
    worker = workers.start("--poll-interval", "0.5", dsn=through(proxy, db))
    wait_until(lambda: one(db, RESTING))
    proxy.garble_the_next_answer()
    wait_until(lambda: "lost synchronization" in workers.log())
    pgqueue.enqueue(db, QUEUE, kind="mark")
    wait_until(lambda: outcomes(db) == {"completed": 1})
    assert workers.finish(worker) == 0


def test_a_worker_gives_up_backends_that_stand_still(db, workers) -> None:
    worker = workers.start(*QUICKLY)
    wait_until(lambda: one(db, RESTING))
    first = pgqueue.enqueue(db, QUEUE, kind="mark")
    wait_until(lambda: is_empty(db) and one(db, RESTING))
    stopped = column(db, f"select pid {OF_WORKERS}")
    try:
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        after = pgqueue.enqueue(db, QUEUE, kind="mark")
        wait_until(lambda: is_empty(db))
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    assert list(workers.notes()) == [first, after]
    assert workers.log().count(GIVEN_UP) == 1
    assert workers.finish(worker) == 0


def test_a_connection_that_is_never_made_is_given_up_as_soon_as_a_call(
    db, workers, proxy
) -> None:
    worker = workers.start(*QUICKLY, dsn=through(proxy, db))
    wait_until(lambda: one(db, RESTING))
    proxy.stall_the_next()  # the finisher's, or the heartbeat's
    held = pgqueue.enqueue(db, QUEUE, kind="mark")
    wait_until(lambda: is_empty(db))
    assert outcomes(db) == {"completed": 1}
    assert list(workers.notes()) == [held]
    wait_until(lambda: "connection timeout expired" in workers.log())
    assert workers.finish(worker) == 0


def test_a_worker_is_not_healthy_while_a_call_is_past_its_deadline(db, dsn) -> None:
    ticks: list[None] = []
    app = pgqueue.App()
    worker = Worker(app, {QUEUE: 1}, dsn=dsn, on_tick=lambda: ticks.append(None))
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        wait_until(lambda: worker.sources.dispatchers[0].is_ready and ticks)
        with worker.sources.dispatchers[0].connect() as conn:
            conn.waits_since = 0.0
            own, worker.sources.dispatchers[0].conn = (
                worker.sources.dispatchers[0].conn,
                conn,
            )
            assert worker.sources.dispatchers[0].is_late()
            worker._check()  # that of the other thread may have begun before
            count = len(ticks)
            worker._check()
            assert len(ticks) == count
            worker.sources.dispatchers[0].conn = own
        wait_until(lambda: len(ticks) > count)
    finally:
        worker.stop()
        thread.join(30)


@pytest.mark.parametrize("kind", ["effect", "aeffect"])
def test_a_transactional_handler_is_not_hung_by_a_session_that_was_forgotten(
    db, workers, proxy, kind
) -> None:
    db.execute("create table effect (job_id bigint)")
    worker = workers.start(*QUICKLY, "-c", "1", dsn=through(proxy, db))
    first = pgqueue.enqueue(db, QUEUE, kind=kind)
    wait_until(lambda: outcomes(db) == {"completed": 1})
    wait_until(lambda: one(db, RESTING))
    proxy.stall()
    after = pgqueue.enqueue(db, QUEUE, kind=kind)
    wait_until(lambda: outcomes(db) == {"completed": 2})
    assert column(db, "select job_id from effect order by 1") == [first, after]
    assert "its connection is given up" in workers.log()
    assert workers.finish(worker) == 0


@pytest.mark.parametrize("kind", ["hold_effect", "ahold_effect"])
def test_a_transaction_that_gets_no_answer_at_its_end_fails_its_attempt(
    db, workers, proxy, kind
) -> None:
    db.execute("select pgqueue.configure(null, retry_base => '100 ms')")
    db.execute("create table effect (job_id bigint)")
    worker = workers.start(*QUICKLY, "-c", "1", dsn=through(proxy, db))
    job = pgqueue.enqueue(db, QUEUE, kind=kind)
    workers.began()
    proxy.stall()
    workers.let_go()
    # The server still holds what the first transaction has written.
    wait_until(lambda: outcomes(db) == {"retry": 1, "completed": 1})
    assert column(db, "select job_id from effect") == [job]
    assert workers.finish(worker) == 0


@pytest.mark.parametrize("kind", ["tsleeps", "tasleeps"])
def test_a_suspension_in_a_transaction_that_cannot_be_committed_is_given_up(
    db, workers, proxy, kind
) -> None:
    db.execute("create table written (what text)")
    app = ("--app", "worker_steps_app")
    # The server keeps the lock of that transaction, so the attempt cannot be reported.
    stop = ("--shutdown-timeout", "2")
    worker = workers.start(*app, *QUICKLY, *stop, dsn=through(proxy, db))
    proxy.stall_after(b"pgqueue.suspend(")
    pgqueue.enqueue(db, QUEUE, {"seconds": 3600}, kind=kind)
    wait_until(lambda: "its connection is given up" in workers.log())
    assert column(db, "select * from written") == []
    assert workers.finish(worker) == 0


def test_a_job_whose_completion_arrived_unanswered_is_not_said_to_be_lost(
    db, workers, proxy
) -> None:
    worker = workers.start(*QUICKLY, dsn=through(proxy, db))
    pgqueue.enqueue(db, QUEUE, kind="mark")
    wait_until(lambda: ": completed" in workers.log())  # so it has all its sessions
    job = pgqueue.enqueue(db, QUEUE, kind="hold")
    workers.began()
    proxy.stall_answers()
    workers.let_go()
    wait_until(lambda: f"job {job} 'hold' of {QUEUE!r}, attempt 1: " in workers.log())
    assert outcomes(db) == {"completed": 2}
    said = "attempt 1: reported: the connection broke before the answer"
    assert said in workers.log()
    assert workers.finish(worker) == 0


def test_a_link_that_is_slow_but_not_silent_carries_a_large_payload_and_result(
    db, proxy
) -> None:
    app = pgqueue.App()

    @app.job("echo")
    def echo(text: str) -> str:
        return text

    # The link takes several seconds each way, longer than the server may take, on a busy machine, too.
    proxy.pause = 0.06
    pgqueue.enqueue(db, "q", {"text": "x" * 5_000_000}, kind="echo")
    worker = Worker(app, {"q": 1}, dsn=through(proxy, db), call_timeout=3)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        wait_until(lambda: outcomes(db) == {"completed": 1}, 90)
    finally:
        worker.stop()
        worker.stop()
        thread.join(30)
    assert one(db, "select length(result::text) from pgqueue.run") > 5_000_000


def test_it_is_known_which_psycopg_does_not_notice_silence() -> None:
    assert notices_silence()
    said = [notices_silence(v) for v in ("3.2", "3.2.10", "3.2.11", "3.3", "3.10.dev1")]
    assert said == [False, False, True, True, True]


def test_calls_that_were_given_up_do_not_pile_up_behind_a_lock(db, workers, connect):
    """As behind a VACUUM FULL, until no session is left for others."""
    waiting = f"select pid {OF_WORKERS} and wait_event_type = 'Lock'"
    seen: set[int] = set()

    def see() -> int:
        found = set(column(observer, waiting))
        seen.update(found)
        return len(found)

    observer = connect()
    workers.start("--call-timeout", "0.3", "--poll-interval", "0.1")
    wait_until(lambda: one(db, RESTING) == 1)
    with db.transaction():
        db.execute("lock table pgqueue.job in access exclusive mode")
        wait_until(lambda: (see(), len(seen))[1] >= 6)
        wait_until(lambda: see() <= 2)
    pgqueue.enqueue(db, QUEUE, kind="mark")
    wait_until(lambda: outcomes(db) == {"completed": 1})
