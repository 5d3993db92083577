"""Workers against faults: kills, stops, dead sessions, dead servers, cut links, poolers.

Each test says how many jobs were enqueued, run, run twice, and lost. The long form
makes them as long as the requirements say.
"""

import contextlib
import os
import random
import re
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pgqueue
import psycopg
import pytest
from cluster import Cluster
from conftest import LONG, column, one
from worker_harness import (
    QUEUE,
    RESTING,
    is_empty,
    outcomes,
    tally,
    wait_until,
    where,
    workers_on,
)

pytest_plugins = ["worker_harness"]

KILL = (
    "select count(pg_terminate_backend(pid)) from pg_stat_activity"
    " where application_name like 'pgqueue %' and datname = current_database()"
)
HELD = "select count(*) from pgqueue.job where lease_expires_at is not null"
QUICK = "select pgqueue.configure(null, retry_base => '100 ms', max_attempts => 1000)"
# With groups: at most two jobs of each run, six of all, and five of one kind.
LIMITS = [
    "select pgqueue.configure(null, group_limit => 2, max_running => 6)",
    "select pgqueue.configure(null, kind => 'nap', max_running => 5)",
]
OVER = """
    select count(*) from pgqueue.job where lease_expires_at is not null
    group by grouping sets ((group_key), (kind), ())
    having count(*) > case
        -- A job that waits for others of its batch has no group.
        when grouping(group_key) = 0 and min(group_key) is not null then 2
        when min(kind) = max(kind) and min(kind) = 'nap' then 5 else 6
    end
"""
UNFINISHED = """
    select m.*, b.*
    from batched as m
    left join pgqueue.batches as b on b.id = m.batch_id
    where (b.state = 'finished' and b.completed = m.jobs) is not true
"""
EXTENDING = (
    "from pg_stat_activity"
    " where query like '%pgqueue.extend(%' and datname = current_database()"
    " and application_name like 'pgqueue %'"
)
# Whose reconnects come late, as after a long outage.
PATIENT = """
from pgqueue import database
from worker_app import app

database.backoff = lambda failures: 60.0
"""
Groups = tuple[str | None, ...]
grouped = pytest.mark.parametrize(
    "groups", [(None,), ("a", "b", "c", "d", "e")], ids=["plain", "groups"]
)


def enqueue_all(
    db: psycopg.Connection, count: int, seconds: float = 0.01, groups: Groups = (None,)
) -> list[int]:
    """Enqueue jobs of every kind of handler: sync and async, with and without a transaction.

    They are a batch, and its last job waits for the first and the one before.
    """
    db.execute("create table if not exists effect (job_id bigint)")
    db.execute("create table if not exists batched (batch_id bigint, jobs bigint)")
    batch = pgqueue.create_batch(db, "callbacks")
    ids: list[int] = []
    for kind, payload, jobs in (
        ("amark", None, count // 4),
        ("effect", None, count // 4),
        ("aeffect", None, count // 4),
        ("nap", {"seconds": seconds}, count - 3 * (count // 4)),
    ):
        ids += pgqueue.enqueue_many(
            db,
            QUEUE,
            [payload] * jobs,
            kind=kind,
            group_keys=[groups[n % len(groups)] for n in range(jobs)],
            batch_id=batch,
        )
    ends = [ids[0], ids[-1]]
    ids.append(pgqueue.enqueue(db, QUEUE, kind="effect", after=ends, batch_id=batch))
    pgqueue.close_batch(db, batch)
    db.execute("insert into batched values (%s, %s)", [batch, len(ids)])
    return ids


def limit(db: psycopg.Connection, groups: Groups) -> None:
    for setting in LIMITS * (groups != (None,)):
        db.execute(setting)


def check_limits(db: psycopg.Connection, groups: Groups) -> None:
    if groups != (None,):
        assert column(db, OVER) == []


def check_effects(db: psycopg.Connection) -> None:
    """Check that a handler that writes in the completing transaction has written exactly once.

    And that each batch has called back once, with all its jobs.
    """
    db.execute("select pgqueue.maintain()")
    assert db.execute(UNFINISHED).fetchall() == []
    callbacks = column(db, "select id from pgqueue.job where queue = 'callbacks'")
    assert len(callbacks) == one(db, "select count(*) from batched")
    # What a look has met while its batch was just finishing is looked at once more.
    for table in ("dependency", "loose_end", "tally"):
        empty = f"select count(*) = 0 from pgqueue.maintain(), pgqueue.{table}"
        wait_until(lambda empty=empty: one(db, empty))
    db.execute("select pgqueue.purge('callbacks')")
    query = "select array_agg(id) from pgqueue.jobs"
    assert one(db, query) is None
    want = "select job_id from pgqueue.run where kind like '%effect' and outcome = 'completed'"
    assert sorted(column(db, "select job_id from effect")) == sorted(column(db, want))


@grouped
def test_killed_workers_lose_no_job(db, workers, say, groups) -> None:
    db.execute(QUICK)
    limit(db, groups)
    ids = enqueue_all(db, 400, 0.05, groups)
    for _ in range(50 if LONG else 3):
        seen = workers.notes().total()
        worker = workers.start("--lease", "1", "--poll-interval", "1")
        wait_until(lambda: workers.notes().total() > seen or is_empty(db))  # noqa: B023
        time.sleep(random.uniform(0, 0.1))
        worker.kill()
        worker.wait(20)
        check_limits(db, groups)
        ids += enqueue_all(db, 40, 0.05, groups)
    worker = workers.start("--lease", "1", "--poll-interval", "1")
    wait_until(lambda: check_limits(db, groups) or is_empty(db), 60)
    tally(say, "kill -9", db, workers, ids)
    check_effects(db)
    assert workers.finish(worker) == 0


def test_a_job_that_kills_its_worker_ends_dead(db, workers, say) -> None:
    ids = [pgqueue.enqueue(db, QUEUE, kind="suicide", max_attempts=3)]
    ids += enqueue_all(db, 40)
    worker = workers.start("--lease", "1", "--poll-interval", "0.5")
    while not is_empty(db):
        if worker.poll() is not None:
            worker = workers.start("--lease", "1", "--poll-interval", "0.5")
        time.sleep(0.05)
    assert column(db, "select id from pgqueue.dead_job") == ids[:1]
    assert one(db, "select attempt from pgqueue.dead_job") == 3
    tally(say, "poison pill", db, workers, ids)


def test_no_job_is_dead_that_never_began(db, workers, say) -> None:
    """Quick jobs are claimed ahead, but not on their last attempt."""
    ids = pgqueue.enqueue_many(db, QUEUE, [None] * 10_000, kind="noop")
    ids += pgqueue.enqueue_many(
        db, QUEUE, [None] * 4000, kind="began", max_attempts=1, priority=-1
    )
    worker = workers.start("--lease", "1", "-c", "4")
    wait_until(lambda: workers.notes("began").total() > 200)
    worker.kill()
    worker.wait(20)
    wait_until(
        lambda: one(db, "select pgqueue.reap()") is not None and not one(db, HELD)
    )
    dead = column(db, "select id from pgqueue.dead_job")
    began = workers.notes("began")
    say(f"\nlast attempts, kill -9: {len(began)} begun, {len(dead)} dead")
    assert len(set(dead) - set(began)) <= 4  # which had a slot each
    worker = workers.start("--lease", "1")
    wait_until(lambda: is_empty(db), 60)
    tally(say, "last attempts", db, workers, ids)
    assert workers.finish(worker) == 0


@pytest.mark.parametrize("kind", ["hold", "ahold", "hold_effect"])
def test_a_worker_stopped_past_its_lease_reports_nothing(
    db, workers, say, kind
) -> None:
    db.execute("create table effect (job_id bigint)")
    job = pgqueue.enqueue(db, QUEUE, kind=kind)
    zombie = workers.start("--lease", "1")
    workers.began()
    zombie.send_signal(signal.SIGSTOP)
    # Its lease runs out; another takes the job.
    lapsed = "select state = 'expired' from pgqueue.jobs"
    wait_until(lambda: one(db, lapsed))
    # The transaction of the stopped worker may still lock what it wrote, but not the job.
    other = workers.start("--lease", "5")
    wait_until(lambda: workers.notes("began")[job] == 2)
    zombie.send_signal(signal.SIGCONT)
    if kind == "ahold":
        wait_until(lambda: workers.notes("cancelled")[job])
    else:
        wait_until(lambda: "lost" in workers.log() or workers.let_go() or True)
    time.sleep(0.5)
    workers.let_go()
    wait_until(lambda: is_empty(db))
    wait_until(lambda: "lost" in workers.log())
    assert outcomes(db) == {"expired": 1, "completed": 1}
    name = one(db, "select worker from pgqueue.run where outcome = 'completed'")
    assert f":{other.pid}:" in name
    assert one(db, "select count(*) from effect") == (kind == "hold_effect")
    tally(say, f"SIGSTOP, {kind}", db, workers, [job])
    assert workers.finish(zombie) == 0


@grouped
def test_a_worker_replaces_killed_sessions_and_loses_no_job(
    db, workers, say, groups
) -> None:
    db.execute(QUICK)
    limit(db, groups)
    seconds = 60 if LONG else 3
    worker = workers.start("--lease", "2", "--concurrency", "4")
    ids: list[int] = []
    end = time.monotonic() + seconds
    kills = 0
    while time.monotonic() < end:
        # No more than the worker can do in the time that it has for what is left.
        if one(db, "select count(*) from pgqueue.job") < 3000:
            ids += enqueue_all(db, 40, groups=groups)
        kills += one(db, KILL)
        check_limits(db, groups)
        time.sleep(0.2)
    spent = cpu_seconds(worker.pid) / seconds
    wait_until(lambda: is_empty(db), 60)
    tally(say, f"{kills} sessions terminated, {spent:.0%} of a core", db, workers, ids)
    check_effects(db)
    assert worker.poll() is None
    channels = (
        "select count(*) from pg_stat_activity where application_name like 'pgqueue %'"
    )
    assert one(db, channels) <= 2 + 8
    assert workers.finish(worker) == 0


def test_quick_jobs_survive_killed_sessions(db, workers, say) -> None:
    ids = pgqueue.enqueue_many(db, QUEUE, [None] * 40_000, kind="noop")
    worker = workers.start("--lease", "2", "-v")
    end = time.monotonic() + 60
    while not is_empty(db) and time.monotonic() < end:
        one(db, KILL)
        time.sleep(0.2)
    wait_until(lambda: is_empty(db), 60)
    done = "select count(distinct job_id) from pgqueue.run where outcome = 'completed'"
    assert one(db, done) == len(ids)
    assert "finisher waits for the server" in workers.log()
    tally(say, "quick jobs, sessions terminated", db, workers, ids)
    assert workers.finish(worker) == 0


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("mode", ["immediate", "fast"])
def test_a_worker_survives_a_restart_of_the_server(server, say, mode) -> None:
    with workers_on(where(server)) as workers:
        with psycopg.connect(where(server), autocommit=True) as db:
            db.execute(QUICK)
            db.execute("truncate pgqueue.run")
            db.execute("drop table if exists effect, batched")
            ids = enqueue_all(db, 800, seconds=0.05)
        worker = workers.start("--lease", "2")
        for _ in range(10 if LONG else 2):
            seen = workers.notes().total()
            wait_until(lambda: workers.notes().total() > seen + 50)  # noqa: B023
            server.stop(mode)
            time.sleep(0.3)
            server.start()
            with psycopg.connect(where(server), autocommit=True) as db:
                ids += enqueue_all(db, 200)
        with psycopg.connect(where(server), autocommit=True) as db:
            wait_until(lambda: is_empty(db), 60)
            tally(say, f"server stopped ({mode}) and started", db, workers, ids)
            check_effects(db)
        assert worker.poll() is None
        assert workers.finish(worker) == 0


def test_a_worker_waits_for_a_server_that_is_read_only_or_full(server, say) -> None:
    with workers_on(where(server)) as workers, contextlib.ExitStack() as stack:
        db = stack.enter_context(psycopg.connect(where(server), autocommit=True))
        db.execute("truncate pgqueue.run")
        db.execute("alter system set default_transaction_read_only = on")
        db.execute("select pg_reload_conf()")
        worker = workers.start()
        wait_until(lambda: "read-only" in workers.log())
        db.execute("alter system reset default_transaction_read_only")
        db.execute("select pg_reload_conf()")
        wait_until(lambda: one(db, "show default_transaction_read_only") == "off")
        ids = [pgqueue.enqueue(db, QUEUE, kind="mark")]
        wait_until(lambda: is_empty(db))

        full = contextlib.ExitStack()
        db.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name like 'pgqueue %'"
        )
        with contextlib.suppress(psycopg.OperationalError):
            while True:
                full.enter_context(psycopg.connect(where(server)))
        ids += [pgqueue.enqueue(db, QUEUE, kind="mark")]
        wait_until(lambda: "too many" in workers.log() or is_empty(db))
        full.close()
        wait_until(lambda: is_empty(db), 60)
        tally(say, "read-only, then full", db, workers, ids)
        assert workers.finish(worker) == 0


def test_a_worker_that_gets_no_session_to_report_by_claims_no_more(
    db, dsn, role, workers
) -> None:
    """Its one session claims; without the others, jobs would run, and run again until they are dead."""
    db.execute("select pgqueue.grant_access(%s, 'worker')", (role,))
    db.execute(f"alter role {role} connection limit 1")
    terms = "--lease", "1", "--concurrency", "2"
    worker = workers.start(*terms, dsn=f"{dsn} user={role}")
    wait_until(lambda: one(db, RESTING))
    ids = [pgqueue.enqueue(db, QUEUE, kind="mark") for _ in range(60)]
    wait_until(lambda: "waits for the server" in workers.log())
    expired = "select min(lease_expires_at) < now() - interval '2 s' from pgqueue.job"
    wait_until(lambda: one(db, expired))
    assert max(workers.notes().values()) == 1
    assert workers.notes().keys() < set(ids)
    db.execute(f"alter role {role} connection limit 9")
    wait_until(lambda: is_empty(db), 60)
    assert workers.notes().keys() == set(ids)
    assert one(db, "select count(*) from pgqueue.dead_job") == 0
    assert workers.finish(worker) == 0


def test_a_worker_works_with_one_second_timeouts_and_serializable_by_default(
    db, dsn, workers, say
) -> None:
    name = psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]
    for setting in (
        "statement_timeout = '1s'",
        "lock_timeout = '1s'",
        "idle_in_transaction_session_timeout = '1s'",
        "idle_session_timeout = '1s'",
        "default_transaction_isolation = 'serializable'",
    ):
        db.execute(f"alter database {name} set {setting}")
    worker = workers.start("--no-listen", "--poll-interval", "1.5")
    listener = workers.start()
    ids = enqueue_all(db, 40)
    wait_until(lambda: is_empty(db))
    time.sleep(2.5)
    ids += enqueue_all(db, 40)
    wait_until(lambda: is_empty(db))
    tally(say, "one-second timeouts", db, workers, ids)
    check_effects(db)
    assert workers.finish(worker) == workers.finish(listener) == 0
    assert "serializ" not in workers.log().lower()


def test_a_worker_claims_when_rest_has_said_without_any_news(
    db, connect, workers
) -> None:
    limit(db, ("a",))
    pgqueue.enqueue(db, QUEUE, kind="amark", group_key="a")
    other = connect()
    with other.transaction():
        # What a claim of a session that is just dying has locked.
        other.execute("select from pgqueue.permit for update")
        worker = workers.start()
        rests = "select true from pg_stat_activity where starts_with(query, 'select extract(epoch from pgqueue.rest')"
        wait_until(lambda: one(db, rests))
    wait_until(lambda: is_empty(db))
    assert workers.finish(worker) == 0


def test_sessions_lost_while_idle_cost_no_attempt(db, workers) -> None:
    worker = workers.start()
    for _ in range(2):
        enqueue_all(db, 40)
        wait_until(lambda: is_empty(db))
        db.execute(KILL)
    assert column(db, "select distinct attempt from pgqueue.run") == [1]
    check_effects(db)
    assert workers.finish(worker) == 0


def test_a_heartbeat_comes_back_before_leases_end_however_long_the_others_wait(
    db, workers
) -> None:
    (workers.folder / "patient.py").write_text(PATIENT)
    worker = workers.start("--app", "patient", "--lease", "3")
    pgqueue.enqueue(db, QUEUE, kind="hold")
    workers.began()
    wait_until(lambda: column(db, f"select pg_terminate_backend(pid) {EXTENDING}"))
    after = one(db, "select clock_timestamp() + interval '3 s'")
    wait_until(lambda: one(db, "select lease_expires_at from pgqueue.job") > after)
    workers.let_go()
    wait_until(lambda: is_empty(db))
    assert outcomes(db) == {"completed": 1}
    assert workers.finish(worker) == 0


def test_a_worker_polls_behind_pgbouncer_in_transaction_mode(
    db, workers, pooler, say
) -> None:
    db.execute(QUICK)
    worker = workers.start("--poll-interval", "0.5", "--lease", "5", dsn=pooler)
    wait_until(lambda: "polling every" in workers.log())
    ids = []
    for _ in range(3):
        ids += enqueue_all(db, 200)
        wait_until(lambda: is_empty(db))
    fast = pgqueue.enqueue_many(db, QUEUE, [None] * 5000, kind="noop")
    held = pgqueue.enqueue(db, QUEUE, kind="hold")
    wait_until(lambda: workers.notes("began")[held])
    time.sleep(6)  # longer than its lease
    workers.let_go()
    wait_until(lambda: is_empty(db))
    tally(say, "pgbouncer", db, workers, ids + fast + [held])
    check_effects(db)
    assert workers.log().count("polling every") == 1
    assert "expired" not in outcomes(db)
    assert one(db, "select count(*) from pg_locks where locktype = 'advisory'") == 0
    assert workers.finish(worker) == 0


def test_behind_a_pooler_a_failover_is_noticed_without_a_new_connection(
    db, workers, pooler
) -> None:
    worker = workers.start("--poll-interval", "0.1", dsn=pooler)
    pgqueue.enqueue(db, QUEUE, kind="mark")
    wait_until(lambda: outcomes(db) == {"completed": 1})
    # As on the standby that the pooler now points to.
    db.execute("select setval('pgqueue._cell_timeline', 7)")
    pgqueue.enqueue(db, QUEUE, kind="mark")
    wait_until(lambda: outcomes(db) == {"completed": 2})
    assert one(db, "select last_value from pgqueue.token_seq") > 1_000_000
    assert "ids and tokens were skipped" in workers.log()
    assert workers.finish(worker) == 0


@pytest.fixture
def link() -> Iterator[tuple[str, str, str]]:
    """A network namespace, this side's end of the link to it, and its address.

    Named at random: another run may go on beside this one.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can make a network namespace")
    if shutil.which("ip") is None:
        pytest.skip("there is no ip to make a network namespace with (iproute2)")
    tag = secrets.token_hex(3)
    name, near, far = f"pgqueue-{tag}", f"pgq-near-{tag}", f"pgq-far-{tag}"
    net = f"10.213.{random.randrange(256)}"
    script = (
        f"ip netns add {name} && ip link add {near} type veth peer name {far} netns {name}"
        f" && ip addr add {net}.1/30 dev {near} && ip link set {near} up"
        f" && ip -n {name} addr add {net}.2/30 dev {far} && ip -n {name} link set {far} up"
        f" && ip netns exec {name} true"
    )
    made = subprocess.run(["sh", "-c", script], capture_output=True, text=True)
    try:
        if made.returncode:
            pytest.skip(f"no network namespace can be made here: {made.stderr.strip()}")
        yield name, near, f"{net}.1"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", near], capture_output=True)


def test_a_worker_notices_a_cut_network_link_and_survives_it(link, say) -> None:
    name, near, address = link
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Cluster(settings={"listen_addresses": "*"}))
        with (server.data / "pg_hba.conf").open("a") as hba:
            hba.write(f"host all all {address}/30 trust\n")
        server.restart()
        workers = stack.enter_context(workers_on(where(server)))
        db = stack.enter_context(psycopg.connect(where(server), autocommit=True))
        db.execute("create extension pgqueue")
        db.execute(QUICK)
        prefix = ("ip", "netns", "exec", name)
        far = where(server, address)
        worker = workers.start("--lease", "3", dsn=far, prefix=prefix)
        ids = enqueue_all(db, 40)
        wait_until(lambda: is_empty(db))
        held = pgqueue.enqueue(db, QUEUE, kind="ahold")
        wait_until(lambda: workers.notes("began")[held])
        cut = time.monotonic()
        subprocess.run(["ip", "link", "set", near, "down"], check=True)
        wait_until(lambda: workers.notes("cancelled")[held], 10)
        fenced = time.monotonic() - cut
        wait_until(lambda: "waits for the server" in workers.log(), 20)
        noticed = time.monotonic() - cut
        subprocess.run(["ip", "link", "set", near, "up"], check=True)
        ids += enqueue_all(db, 40)
        workers.let_go()
        wait_until(lambda: is_empty(db), 60)
        what = f"link cut: fenced after {fenced:.1f} s, noticed after {noticed:.1f} s"
        tally(say, what, db, workers, [*ids, held])
        assert fenced < 5
        assert noticed < 15
        assert workers.finish(worker) == 0


@pytest.mark.parametrize("wrong", ["dbname=no_such_database", "user=no_such_role"])
@pytest.mark.parametrize("more", [[], ["--burst"]])
def test_a_database_that_refuses_the_worker_at_its_start_ends_it(
    db, dsn, workers, wrong, more
) -> None:
    worker = workers.start(*more, dsn=f"{dsn} {wrong}")
    assert worker.wait(30) == 1
    assert re.search(r'has failed: .*"no_such_\w+" does not exist', workers.log())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PGSSLMODE", "bogus"),
        ("PGPORT", "bogus"),
        ("PGTARGETSESSIONATTRS", "bogus"),
        ("PGOPTIONS", "-c work_mem=bogus"),
        ("PGOPTIONS", "-c bogus=1"),
    ],
)
def test_a_variable_that_libpq_or_the_server_refuses_ends_a_worker_at_its_start(
    db, workers, name, value
) -> None:
    worker = workers.start(dsn=f"dbname={db.info.dbname}", env={name: value})
    assert worker.wait(30) == 1
    assert re.search('has failed: .*"bogus"', workers.log())


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ("alter role {} nologin", "is not permitted to log in"),
        ("revoke connect on database {} from public", "permission denied for database"),
    ],
)
def test_a_role_that_may_not_connect_ends_a_worker_at_its_start(
    db, dsn, role, workers, lacks, said
) -> None:
    db.execute(lacks.format(role if "role" in lacks else db.info.dbname))
    worker = workers.start(dsn=f"{dsn} user={role}")
    assert worker.wait(30) == 1
    assert re.search(f"has failed: .*{said}", workers.log())


def test_a_database_that_is_missing_for_a_while_is_waited_for(db, workers) -> None:
    worker = workers.start()
    # What is refused before its first claim is a mistake, and ends it.
    pgqueue.enqueue(db, QUEUE, kind="noop")
    wait_until(lambda: outcomes(db) == {"completed": 1})
    name = db.info.dbname
    db.close()
    with psycopg.connect(dbname="postgres", autocommit=True) as other:
        other.execute(f"alter database {name} allow_connections false")
        other.execute(
            "select pg_terminate_backend(pid, 10000) from pg_stat_activity"
            f" where datname = '{name}'"
        )
        other.execute(f"alter database {name} rename to {name}_away")
        other.execute(f"alter database {name}_away allow_connections true")
        wait_until(lambda: "does not exist" in workers.log())
        other.execute(f"alter database {name}_away rename to {name}")
    with psycopg.connect(dbname=name, autocommit=True) as conn:
        pgqueue.enqueue(conn, QUEUE, kind="noop")
        wait_until(lambda: outcomes(conn) == {"completed": 2})
    assert workers.finish(worker) == 0
