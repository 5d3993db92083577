"""A worker of several databases: it shares its slots between them, whatever becomes of one."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator

import forked
import pgqueue
import psycopg
import pytest
from cluster import Cluster
from conftest import database, one
from pgqueue import database as connections
from pgqueue.worker import Share, Worker
from psycopg.conninfo import conninfo_to_dict
from worker_harness import OF_WORKERS, RESTING, Workers, wait_until, where, workers_on

pytest_plugins = ["worker_harness"]

COUNT = "select count(*) from pgqueue.jobs"
RAN = "select count(*) from pgqueue.run"
RUNNING = "select count(*) from pgqueue.running"


@pytest.fixture
def two(template: str) -> Iterator[list[str]]:
    with database(template) as first, database(template) as second:
        yield [first, second]


@pytest.fixture
def three(two: list[str], template: str) -> Iterator[list[str]]:
    with database(template) as third:
        yield [*two, third]


@pytest.fixture(scope="module")
def others() -> Iterator[list[Cluster]]:
    """Two more servers, of which a test may hurt one."""
    with Cluster(fast=True) as first, Cluster(fast=True) as second:
        for cluster in first, second:
            with psycopg.connect(where(cluster), autocommit=True) as conn:
                conn.execute("create extension pgqueue")
        yield [first, second]


@contextlib.contextmanager
def sessions(dsns: list[str]) -> Iterator[list[psycopg.Connection]]:
    with contextlib.ExitStack() as stack:
        connect = psycopg.connect
        yield [stack.enter_context(connect(dsn, autocommit=True)) for dsn in dsns]


def fill(dsns: list[str], kind: str, count: int = 1, payload: str = "{}") -> None:
    with sessions(dsns) as conns:
        for conn in conns:
            conn.execute(
                "select pgqueue.enqueue('work', %s::jsonb, kind => %s) from generate_series(1, %s)",
                (payload, kind, count),
            )


def counts(dsns: list[str], query: str) -> list[int]:
    with sessions(dsns) as conns:
        return [one(conn, query) for conn in conns]


def wait_for_counts(
    dsns: list[str], query: str, wanted: list[int], timeout: float = 30
) -> None:
    """Wait until each database counts so much, in one session of each."""
    with sessions(dsns) as conns:
        wait_until(lambda: [one(conn, query) for conn in conns] == wanted, timeout)


def named(dsns: list[str]) -> list[str]:
    return [word for dsn in dsns for word in ("--dsn", dsn)]


def uri(dsn: str, server: psycopg.Connection) -> str:
    name, info = conninfo_to_dict(dsn)["dbname"], server.info
    return f"postgresql://{info.user}@/{name}?host={info.host}&port={info.port}"


# Which databases


@pytest.mark.parametrize("how", ["repeated", "semicolons", "lines", "URIs", "commas"])
def test_a_worker_runs_the_jobs_of_all_databases_that_it_is_given(
    three, db, workers, how
):
    fill(three, "mark", 3)
    env, args = {}, ["--burst"]
    if how == "repeated":
        env, args = {"PGQUEUE_DSN": "dbname=nowhere"}, [*args, *named(three)]
    elif how == "semicolons":
        env = {"PGQUEUE_DSN": "; ".join(three)}
    elif how == "lines":
        env = {"PGQUEUE_DSN": "\n".join(three) + "\n"}
    else:
        between = " " if how == "URIs" else ", "
        env = {"PGQUEUE_DSN": between.join(uri(dsn, db) for dsn in three)}
    assert workers.start(*args, env=env).wait(30) == 0, workers.log()
    # Which have the same ids: these databases were not told to be shards.
    assert workers.notes() == {1: 3, 2: 3, 3: 3}
    assert counts(three, COUNT) == [0, 0, 0]
    assert "in 3 databases" in workers.log()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", [""]),
        ("dbname=a", ["dbname=a"]),
        ("host=a,b dbname=c", ["host=a,b dbname=c"]),
        ("dbname=a;dbname=b", ["dbname=a", "dbname=b"]),
        ("dbname=a ;\n dbname=b;", ["dbname=a", "dbname=b"]),
        ("password='x;y' dbname=a", ["password='x;y' dbname=a"]),
        ("postgresql://a,b/c", ["postgresql://a,b/c"]),
        ("postgres://a;postgresql://b", ["postgres://a", "postgresql://b"]),
        ("postgresql+psycopg://a, dbname=b", ["postgresql+psycopg://a, dbname=b"]),
        ("dbname=a postgresql://b", ["dbname=a", "postgresql://b"]),
    ],
)
def test_a_list_of_databases_is_split_between_them_and_nowhere_else(text, found):
    assert connections.several(text) == found


def test_a_database_that_is_given_twice_counts_once(two, monkeypatch):
    assert len(Worker(pgqueue.App(), dsn=[two[0], two[0], two[1]]).sources) == 2
    monkeypatch.setenv("PGQUEUE_DSN", f"{two[0]};{two[1]};{two[0]}")
    assert len(Worker(pgqueue.App()).sources) == 2


# The slots


class Gate:
    """Handlers that wait in it, the first one first, and which database they come from."""

    def __init__(self) -> None:
        self.app = pgqueue.App()
        self.inside: Counter[str] = Counter()
        self.most = 0
        self.order: list[str] = []
        self._may_leave = 0
        self._lock = threading.Condition()
        self.app.job("wait", queue="work")(self.wait)
        self.app.job("nap", queue="work")(self.nap)

    def wait(self, job: pgqueue.Job) -> None:
        where = job._attempt.source.name
        with self._lock:
            self.inside[where] += 1
            self.order.append(where)
            self.most = max(self.most, self.inside.total())
            place = len(self.order)
            self._lock.wait_for(lambda: place <= self._may_leave)
            self.inside[where] -= 1

    def nap(self, job: pgqueue.Job, seconds: float = 0.005) -> None:
        with self._lock:
            self.order.append(job._attempt.source.name)
        time.sleep(seconds)

    def let_go(self, count: int = 1) -> None:
        with self._lock:
            self._may_leave += count
            self._lock.notify_all()


@contextlib.contextmanager
def running(worker: Worker) -> Iterator[None]:
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield
    finally:
        worker.stop()
        worker.stop()
        thread.join(20)


def name(dsn: str) -> str:
    return connections.name(connections.conninfo(dsn))


def test_all_databases_share_one_set_of_slots_evenly(three):
    gate = Gate()
    fill(three, "wait", 20)
    with running(Worker(gate.app, dsn=three, concurrency=6)):
        wait_until(lambda: gate.inside.total() == 6)
        for _ in range(30):
            gate.let_go()
            time.sleep(0.02)
        assert wait_until(lambda: gate.inside.total() == 6)
        assert gate.most == 6
        # The first slots are those of the one that was connected first.
        shares = Counter(gate.order[6:36])
        assert min(shares.values()) >= 8, gate.order
        gate.let_go(1000)
        wait_for_counts(three, COUNT, [0, 0, 0])
    assert gate.most == 6


def test_one_slot_serves_the_databases_in_turn(two):
    gate = Gate()
    worker = Worker(gate.app, dsn=two, concurrency=1)
    with running(worker):
        wait_until(lambda: worker.sources.is_drained)  # both are connected
        fill(two, "wait", 20)
        for count in range(1, 21):
            wait_until(lambda count=count: len(gate.order) == count)
            gate.let_go()
    first = Counter(gate.order[:20])[name(two[0])]
    assert 7 <= first <= 13, gate.order


def test_a_database_without_jobs_takes_no_slot(three):
    gate = Gate()
    worker = Worker(gate.app, dsn=three, concurrency=6, poll_interval=60)
    worker.batch = 0  # what was claimed ahead would come first
    with running(worker):
        wait_until(lambda: worker.sources.is_drained)
        fill(three[1:2], "wait", 20)
        wait_until(lambda: gate.inside == {name(three[1]): 6})
        fill(three[:1], "wait", 20)  # whose turn it is with the next slots
        first, *_ = worker.sources.dispatchers
        wait_until(first.is_hungry)
        gate.let_go(3)
        wait_until(lambda: gate.inside[name(three[0])] == 3)
        gate.let_go(1000)
        wait_for_counts(three, COUNT, [0, 0, 0])
    assert gate.most == 6


def test_quick_jobs_of_all_databases_run_side_by_side(two):
    gate = Gate()
    fill(two, "nap", 600)
    with running(Worker(gate.app, dsn=two, concurrency=4)):
        wait_for_counts(two, COUNT, [0, 0])
    # From when both are connected.
    start = max(gate.order.index(name(dsn)) for dsn in two)
    half = Counter(gate.order[start : start + 600])
    assert min(half.values()) > 200, half


def test_max_jobs_counts_the_jobs_of_all_databases(three):
    gate = Gate()
    fill(three, "nap", 30)
    Worker(gate.app, dsn=three, concurrency=4, max_jobs=50).run()
    assert len(gate.order) == 50
    assert sum(counts(three, RAN)) == 50


def test_a_limit_of_a_queue_is_that_of_the_worker(three):
    gate = Gate()
    fill(three, "wait", 10)
    with running(Worker(gate.app, {"work": Share(limit=2)}, dsn=three)):
        wait_until(lambda: gate.inside.total() == 2)
        for _ in range(28):
            gate.let_go()
        wait_until(lambda: sum(counts(three, RAN)) == 28)
        gate.let_go(1000)
        wait_for_counts(three, COUNT, [0, 0, 0])
    assert gate.most == 2


@pytest.mark.parametrize(
    ("queues", "max_jobs"), [({"work": Share(limit=2)}, None), (None, 2)]
)
def test_a_claim_that_comes_late_gives_back_what_is_too_much(two, queues, max_jobs):
    """The others do not wait for it, so meanwhile they may have taken all."""
    gate = Gate()
    worker = Worker(gate.app, queues, dsn=two, max_jobs=max_jobs, poll_interval=60)
    with running(worker), sessions(two) as (first, _):
        wait_until(lambda: worker.sources.is_drained)  # both are connected
        with first.transaction():
            first.execute("lock table pgqueue.job in exclusive mode")
            first.execute(
                "select pgqueue.enqueue('work', kind => 'wait') from generate_series(1, 2)"
            )
            asks, _ = worker.sources.dispatchers
            asks.look_again()
            wait_until(lambda: asks.asked)
            fill(two[1:], "wait", 2)
            wait_until(lambda: gate.inside == {name(two[1]): 2})
        wait_until(lambda: not asks.asked and not asks.held)
        assert gate.most == 2
        gate.let_go(1000)
        if max_jobs:
            wait_until(lambda: worker.turns.left == 0 and not worker.sources.held)
            assert counts(two, COUNT) == [2, 0]
        else:
            wait_for_counts(two, COUNT, [0, 0])
    assert gate.most == 2


def test_a_queue_with_a_limit_that_another_database_was_just_asked_for_is_not_forgotten(
    two,
):
    gate = Gate()
    gate.let_go(1000)
    shares = {"work": Share(limit=1), "other": Share()}
    worker = Worker(gate.app, shares, dsn=two, poll_interval=60)
    with running(worker), sessions(two) as (first, second), sessions(two) as (hub, _):
        wait_until(lambda: worker.sources.is_drained)  # both are connected
        with first.transaction():
            first.execute("lock table pgqueue.job in exclusive mode")
            asks, other = worker.sources.dispatchers
            before = other.served_at
            other._has_news = True  # so the first leaves it half of the slots
            hub.execute("notify pgqueue")
            wait_until(lambda: asks.asked)
            pgqueue.enqueue(second, "work", kind="wait")
            wait_until(lambda: other.served_at > before and not other.is_hungry())
        wait_for_counts(two, COUNT, [0, 0])


def test_a_burst_ends_when_no_database_has_anything_due(two):
    app = pgqueue.App()

    @app.job("there", queue="work")
    def there(left: int) -> None:
        """Enqueue the next into the other database."""
        if left:
            with psycopg.connect(two[left % 2]) as conn:
                there.enqueue(conn, left=left - 1)

    with psycopg.connect(two[0]) as conn:
        there.enqueue(conn, left=9)
    Worker(app, dsn=two, burst=True).run()
    assert counts(two, RAN) == [5, 5]


def test_only_the_first_database_has_the_schedules(two):
    app = pgqueue.App()
    app.job("nightly", queue="work", cron="@daily")(lambda: None)
    with running(Worker(app, dsn=two)):
        wait_until(
            lambda: counts(two, "select count(*) from pgqueue.schedule") == [1, 0]
        )
        time.sleep(0.3)
    assert counts(two, "select count(*) from pgqueue.schedule") == [1, 0]


def test_a_shard_has_the_schedules_that_move_groups_would_bring_to_it(role, two):
    """The list of a worker need not be in the order of the shards."""
    of_0, of_1 = (
        next(k for k in map(str, range(99)) if pgqueue.shard_of(k, 2) == n)
        for n in (0, 1)
    )
    app = pgqueue.App()
    groups = {of_0: None, of_1: None, "group of 0": of_0, "group of 1": of_1}
    for kind, group_key in groups.items():
        app.job(kind, queue="work", cron="@daily", group_key=group_key)(lambda: None)
    for number, dsn in enumerate(two, 1):
        with psycopg.connect(dsn) as conn:
            conn.execute("select pgqueue.shard(%s)", (number,))
            for kind in "worker", "scheduler":
                conn.execute("select pgqueue.grant_access(%s, %s)", (role, kind))
    there = "select array_agg(name order by length(name)) from pgqueue.schedule"
    with running(Worker(app, dsn=[f"{dsn} user={role}" for dsn in two[::-1]])):
        want = [[of_0, "group of 0"], [of_1, "group of 1"]]
        wait_until(lambda: counts(two, there) == want)
    moved = command("pgqueue", *named(two), "move-groups")
    assert "moved 0 jobs and schedules" in moved.stdout


def test_a_schedule_is_declared_in_the_shard_that_has_it_until_it_moves(two):
    """As while shards are added, or after an upgrade."""
    name = next(k for k in map(str, range(99)) if pgqueue.shard_of(k, 2))
    app = pgqueue.App()
    app.job(name, queue="work", cron="@daily", max_attempts=3)(lambda: None)
    there = "select max(max_attempts) from pgqueue.schedule"
    with sessions(two) as conns:
        for number, conn in enumerate(conns, 1):
            conn.execute("select pgqueue.shard(%s)", (number,))
        conns[0].execute("select pgqueue.schedule(%s, 'work', '@daily')", (name,))
        with running(Worker(app, dsn=two)):
            wait_until(lambda: counts(two, there) == [3, None])
    moved = command("pgqueue", *named(two), "move-groups")
    assert "moved 1 jobs and schedules" in moved.stdout
    app.tasks[name].options["max_attempts"] = 4
    with running(Worker(app, dsn=two)):
        wait_until(lambda: counts(two, there) == [None, 4])


def test_only_some_of_the_shards_have_the_schedules_in_the_first(two):
    app = pgqueue.App()
    app.job("nightly", queue="work", cron="@daily")(lambda: None)
    with sessions(two) as conns:
        for number, conn in enumerate(conns, 3):
            conn.execute("select pgqueue.shard(%s)", (number,))
    with running(Worker(app, dsn=two)):
        wait_until(
            lambda: counts(two, "select count(*) from pgqueue.schedule") == [1, 0]
        )


def test_a_transaction_is_in_the_database_of_its_job(two, workers):
    for dsn in two:
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("create table effect (job_id bigint)")
    fill(two, "effect", 5)
    fill(two, "aeffect", 5)
    assert workers.start("--burst", *named(two)).wait(30) == 0
    assert counts(two, "select count(*) from effect") == [10, 10]


def test_the_lease_of_a_long_job_is_extended_in_its_database(two):
    gate = Gate()
    fill(two, "wait")
    with running(Worker(gate.app, dsn=two, lease=1)):
        wait_until(lambda: gate.inside.total() == 2)
        time.sleep(2)
        assert counts(
            two, "select count(*) from pgqueue.running where lease_left > '0'"
        ) == [1, 1]
        gate.let_go(2)
        wait_for_counts(two, RAN, [1, 1])
    assert counts(two, "select attempt from pgqueue.run") == [1, 1]


# One is down


def start(workers: Workers, dsns: list[str], *args: str) -> subprocess.Popen[bytes]:
    return workers.start(*named(dsns), "-c", "4", "--lease", "3", *args)


def ran(dsn: str) -> int:
    return counts([dsn], RAN)[0]


def test_a_server_that_is_killed_stops_no_other_and_comes_back(others, tmp_path):
    dsns = [where(cluster) for cluster in others]
    health = tmp_path / "health"
    with workers_on(dsns[0]) as workers:
        worker = start(workers, dsns, "--health-file", str(health))
        fill(dsns, "mark", 5)
        wait_until(lambda: min(map(ran, dsns)) >= 5)
        before = ran(dsns[0])
        lines = wait_until(lambda: health.exists() and health.read_text().splitlines())
        assert [line.rpartition(": ")[2] for line in lines] == ["ok", "ok"]
        fill(dsns[1:], "nap", 4, '{"seconds": 1}')
        wait_until(lambda: len(workers.notes("began")) >= 4)
        others[1].kill()
        for count in range(1, 21):
            since = time.monotonic()
            fill(dsns[:1], "mark")
            wait_until(lambda count=count: ran(dsns[0]) == before + count)
            assert time.monotonic() - since < 2.5
        wait_until(
            lambda: f"{name(dsns[1])}: waits for the server" in health.read_text()
        )
        assert f"{name(dsns[0])}: ok\n" in health.read_text()
        assert time.time() - health.stat().st_mtime < 3
        others[1].start()
        fill(dsns[1:], "mark", 7)
        wait_for_counts(dsns[1:], COUNT, [0], 60)
        wait_until(lambda: health.read_text().count(": ok\n") == 2)
        assert f"the server {name(dsns[1])} answers again" in workers.log()
        assert f"waits for the server {name(dsns[1])}" in workers.log()
        assert workers.finish(worker) == 0


def test_a_server_that_hangs_slows_no_other(others, tmp_path):
    from test_worker_stop import frozen

    dsns = [where(cluster) for cluster in others]
    fill(dsns, "nap", 400, '{"seconds": 0.02}')
    with workers_on(dsns[0]) as workers:
        start(workers, dsns, "--call-timeout", "20")
        before = wait_until(lambda: ran(dsns[0]) > 40 and ran(dsns[0]))
        with frozen(others[1]):
            time.sleep(0.5)  # what it had asked for counts no more
            before, since = ran(dsns[0]), time.monotonic()
            wait_until(lambda: ran(dsns[0]) >= before + 200)
            # Two seconds in two slots, one in four.
            assert time.monotonic() - since < 2.5
        wait_for_counts(dsns, COUNT, [0, 0], 60)


@pytest.mark.parametrize("what", ["no database", "no pgqueue", "no server"])
def test_a_database_that_refuses_the_worker_stops_no_other(two, db, workers, what):
    bad = {
        "no database": "dbname=pgqueue_nowhere",
        "no pgqueue": "dbname=template1",
        "no server": "host=127.0.0.1 port=1 dbname=x",
    }[what]
    workers.start(*named([bad, *two]))
    fill(two, "mark", 3)
    wait_for_counts(two, RAN, [3, 3])
    wait_until(lambda: f"waits for the server {name(bad)}" in workers.log())
    burst = workers.start("--burst", *named([*two, bad]))
    fill(two, "mark", 3)
    assert burst.wait(30) in (1, 3)
    wait_for_counts(two, RAN, [6, 6])


def test_a_database_in_which_it_can_extend_no_lease_stops_no_other(role, two):
    """It claims nothing there, and keeps no slot for that."""
    gate = Gate()
    dsns = [f"{two[0]} user={role}", two[1]]
    worker = Worker(gate.app, dsn=dsns, concurrency=1, lease=2)
    with sessions(two) as (first, _), running(worker):
        first.execute("select pgqueue.grant_access(%s, 'worker')", (role,))
        wait_until(lambda: worker.sources.is_drained)
        fill(two[:1], "wait")
        wait_until(lambda: gate.inside)
        cut_off, _ = worker.sources.dispatchers
        conn = wait_until(lambda: cut_off._finisher.conn and cut_off._heartbeat.conn)
        first.execute(f"alter role {role} connection limit 1")
        pid = conn.info.backend_pid
        first.execute("select pg_terminate_backend(%s)", (pid,))
        wait_until(lambda: cut_off._heartbeat.is_cut_off)
        gate.let_go(1000)
        wait_for_counts(two[:1], RAN, [1])
        fill(two, "wait", 20)
        wait_for_counts(two[1:], COUNT, [0])
        assert counts(two[:1], COUNT) == [20]


def test_a_worker_that_all_databases_refuse_ends(workers):
    nowhere = ["dbname=pgqueue_nowhere", "dbname=pgqueue_nowhere_either"]
    assert workers.start(*named(nowhere)).wait(30) == 1
    assert 'database "pgqueue_nowhere" does not exist' in workers.log()


# What is said of each


def test_the_log_says_which_database_a_job_is_of(two, workers):
    fill(two, "mark")
    assert workers.start("--burst", *named(two)).wait(30) == 0
    for dsn in two:
        line = f"job 1 'mark' of 'work' in {name(dsn)}, attempt 1: completed"
        assert line in workers.log()


def command(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": forked.PATH, **env}
    return forked.run([sys.executable, "-m", *args], env=env)


def test_check_status_and_health_say_it_of_each(two):
    fill(two[1:], "mark", 3)
    checked = command("pgqueue.worker", "--check", *named(two))
    assert checked.returncode == 0
    says = [line.partition(": ok")[0] for line in checked.stdout.splitlines()]
    assert says == [name(dsn) for dsn in two]
    down = "dbname=pgqueue_nowhere"
    checked = command("pgqueue.worker", "--check", *named([down, two[0]]))
    assert checked.returncode == 1
    assert checked.stdout.startswith("pgqueue_nowhere: failed:")
    asked = command("pgqueue", *named([two[0], down, two[1]]), "status")
    assert asked.returncode == 1
    assert asked.stdout.index(f"-- {name(two[0])}") < asked.stdout.index(
        "-- pgqueue_nowhere"
    )
    assert "\nwork  " in asked.stdout.partition(f"-- {name(two[1])}")[2]
    assert "does not exist" in asked.stderr
    listed = command("pgqueue", "status", "--json", PGQUEUE_DSN=";".join(two))
    found = [json.loads(line) for line in listed.stdout.splitlines()]
    assert [len(one["queues"]) for one in found] == [0, 1]
    assert [one["database"] for one in found] == [name(dsn) for dsn in two]
    listed = command("pgqueue", *named([down, two[1]]), "health", "--json")
    assert [json.loads(line)["database"] for line in listed.stdout.splitlines()] == [
        name(two[1])
    ]
    asked = command("pgqueue", *named(two), "health")
    assert asked.returncode == 0
    assert asked.stdout.count("nothing wrong") == 2


def test_other_commands_take_one_database(two):
    refused = command("pgqueue", *named(two), "purge", "work")
    assert refused.returncode == 2
    assert "2 databases are named" in refused.stderr


def test_a_database_that_can_write_nothing_stops_no_other_and_comes_back(
    three, workers
):
    """As one whose disk is full, or that has become a standby."""
    name_of = conninfo_to_dict(three[1])["dbname"]
    with psycopg.connect(three[0], autocommit=True) as admin:
        only_read = f"alter database {name_of} {{}} default_transaction_read_only"
        fill(three, "mark", 3)
        admin.execute(only_read.format("set") + " = on")
        worker = workers.start(*named(three))
        wait_for_counts([three[0], three[2]], RAN, [3, 3])
        wait_until(lambda: f"waits for the server {name(three[1])}" in workers.log())
        fill(three[:1], "mark", 3)
        wait_for_counts(three[:1], RAN, [6])
        assert counts(three[1:2], RAN) == [0]
        admin.execute(only_read.format("reset"))
        wait_for_counts(three, RAN, [6, 3, 3], 60)
        assert workers.finish(worker) == 0


def test_a_database_behind_a_pooler_takes_the_notifications_from_no_other(
    two, workers, pooler
):
    worker = workers.start(*named([two[0], pooler]), "--poll-interval", "300")
    with psycopg.connect(two[0], autocommit=True) as direct:
        wait_until(lambda: "polling every" in workers.log())
        wait_until(lambda: one(direct, RESTING))
        direct.execute(f"select pg_terminate_backend(pid) {OF_WORKERS}")
        wait_until(lambda: "answers again" in workers.log())
        wait_until(lambda: one(direct, RESTING))
        fill(two[:1], "mark")
        wait_for_counts(two[:1], RAN, [1])
    assert workers.finish(worker) == 0


def test_a_database_of_an_older_version_is_served_beside_the_others(two, db, workers):
    older = "pgqueue_older"
    db.execute(f"drop database if exists {older} with (force)")
    db.execute(f"create database {older}")
    dsns = [f"dbname={older}", *two]
    try:
        with psycopg.connect(dsns[0], autocommit=True) as conn:
            conn.execute("create extension pgqueue version '0.2.0'")
        fill(dsns, "mark", 3)
        worker = workers.start(*named(dsns))
        wait_for_counts(dsns, RAN, [3, 3, 3])
        assert "update pgqueue" in workers.log()
        assert workers.finish(worker) == 0
    finally:
        db.execute(f"drop database {older} with (force)")


@pytest.mark.parametrize(
    "when", ["idle", "one down", "one hung", "all down", "running"]
)
def test_a_worker_of_several_databases_ends_when_told_in_any_state(others, when):
    from test_worker_stop import frozen

    dsns = [where(cluster) for cluster in others]
    with workers_on(dsns[0]) as workers, contextlib.ExitStack() as stack:
        worker = start(workers, dsns, "--shutdown-timeout", "3", "--call-timeout", "2")
        fill(dsns, "mark")
        wait_until(lambda: workers.log().count("completed") >= 2)
        if when == "running":
            fill(dsns, "nap", 2, '{"seconds": 1}')
            wait_until(lambda: workers.notes("began").total() == 4)
        for cluster in others:
            if when == "all down" or (when == "one down" and cluster is others[1]):
                cluster.stop()
                stack.callback(cluster.start)
        if when == "one hung":
            stack.enter_context(frozen(others[1]))
        if when not in ("idle", "running"):
            wait_until(lambda: "waits for the server" in workers.log(), 30)
        since = time.monotonic()
        assert workers.finish(worker) == 0
        assert time.monotonic() - since < 12
    if when == "running":
        assert counts(dsns, RUNNING) == [0, 0]
