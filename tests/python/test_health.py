"""health(): what only a second session, or a setting of the server, can cause, and that its hints fix it."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from cluster import Cluster
from conftest import Connect, column, one
from psycopg import errors
from test_plans import fill, pages
from worker_harness import (  # noqa: F401 (a fixture)
    wait_until,
    where,
    workers,
)

Row = tuple[str, str, str]


def run_hint(db: psycopg.Connection, hint: str) -> None:
    for statement in hint.split("; "):
        db.execute(statement)


def found(db: psycopg.Connection, check: str) -> list[Row]:
    """What a check finds: of health() by its name, or with thresholds of its own as further arguments."""
    if "'" not in check:
        query = f"select status, detail, hint from pgqueue.health() as h where h.check = '{check}' and status <> 'ok'"
    else:
        query = f"select 'found', detail, hint from pgqueue._found({check})"
    return db.execute(query).fetchall()


def fix(db: psycopg.Connection, check: str) -> str:
    """Run the hints of what a check finds until it finds nothing; return what it found."""
    wait_until(lambda: found(db, check))
    rows = found(db, check)
    for _, _, hint in rows:
        run_hint(db, hint)
    wait_until(lambda: not found(db, check))
    return "\n".join(detail for _, detail, _ in rows)


@pytest.fixture
def owner(db, connect: Connect, role: str) -> Iterator[psycopg.Connection]:
    """A session of the owner of pgqueue, who is nobody special."""
    db.execute(
        f"drop extension pgqueue; grant create on database {db.info.dbname} to {role}"
    )
    owner = connect(user=role)
    owner.execute("create extension pgqueue")
    yield owner
    db.execute("drop extension pgqueue")


def bury(connect, rows: int) -> None:
    """Leave dead rows in the table job; the counts are written when the session ends."""
    with connect() as db:
        fill(db, rows)
        db.execute("delete from pgqueue.job")


# Who holds the horizon


def test_a_session_that_keeps_vacuum_from_its_work_is_named_and_can_be_ended(
    db, connect
):
    holder = connect(autocommit=False, application_name="report")
    holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    holder.execute("select 'a long report'")
    # 50 ms, which any other session of this test is done in.
    check = "'horizon', '50 ms', 100000, few => 20000"
    assert found(db, check) == []
    bury(connect, 21_000)
    detail = fix(db, check)
    assert f"session {holder.info.backend_pid} (" in detail
    assert "report, idle in transaction" in detail
    assert detail.endswith(": select 'a long report'")


def test_a_prepared_transaction_is_named_and_can_be_rolled_back(db, connect):
    with connect(autocommit=False) as holder:
        holder.execute("select pgqueue.enqueue('q')")
        holder.execute("prepare transaction 'o''clock'")
    db.execute("select pgqueue.enqueue('q')")
    (row,) = [
        r for r in found(db, "'horizon', '0', 100000, few => 0") if "prep" in r[1]
    ]
    assert row[1].startswith("prepared transaction o'clock (postgres) keeps VACUUM")
    assert row[2] == "rollback prepared 'o''clock'"
    run_hint(db, row[2])
    rows = found(db, "'horizon', '0', 100000, few => 0")
    assert not [detail for _, detail, _ in rows if "prep" in detail]


def test_who_writes_in_another_database_is_named_because_snapshots_here_see_it(
    db, connect
):
    with psycopg.connect(dbname="postgres") as holder:
        holder.execute("select pg_current_xact_id()")
        holder.execute("prepare transaction 'far'")
    try:
        bury(connect, 10)
        reader = connect(autocommit=False)
        reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        reader.execute("select")
        db.execute("vacuum pgqueue.job")
        reader.rollback()
        dead = "select pg_stat_get_dead_tuples('pgqueue.job'::regclass)"
        wait_until(lambda: one(db, dead) == 10)
        rows = found(db, "'horizon', '0', 100000, few => 0")
        (hint,) = [row[2] for row in rows if "prepared transaction far" in row[1]]
        assert hint == "in database postgres: rollback prepared 'far'"
    finally:
        with psycopg.connect(dbname="postgres", autocommit=True) as holder:
            holder.execute("rollback prepared 'far'")


def test_a_query_is_shown_to_those_who_might_see_it_anyway(db, connect, role):
    db.execute(f"select pgqueue.grant_access('{role}', 'reader')")
    db.execute("alter function pgqueue._found security definer")
    db.execute(f"grant execute on function pgqueue._found to {role}")
    holder = connect(autocommit=False)
    holder.execute("select 'secret' from pgqueue.job for update")
    holder.execute("select pg_current_xact_id(), 'secret'")
    db.execute("select pgqueue.enqueue('q')")
    reader = connect(user=role)
    session = f"session {holder.info.backend_pid} ("

    def said(by=reader) -> str:
        rows = found(by, "'horizon', '0', 100000, few => 0")
        return next(detail for _, detail, _ in rows if session in detail)

    assert "secret" not in said() and "pg_read_all_stats" in said()
    assert said(db).endswith("'secret'")
    db.execute(f"set role {role}")
    assert "secret" not in said(db)
    db.execute("reset role")
    db.execute(f"grant pg_read_all_stats to {role}")
    assert said().endswith("'secret'")
    assert len(reader.execute("select from pgqueue.health()").fetchall()) >= 13


def test_an_owner_who_may_see_little_still_finds_the_holder(connect, owner):
    holder = connect(autocommit=False)
    holder.execute("select pg_current_xact_id()")
    for _ in range(20):
        owner.execute("select pgqueue.enqueue('q')")
    check = "'horizon', '0', {}, few => 0"
    session = f"session {holder.info.backend_pid} (postgres) keeps VACUUM from removing"
    (detail,) = [d for _, d, _ in found(owner, check.format(10)) if session in d]
    assert " transactions: its query is shown to members of pg_read_all_stats" in detail
    assert not [d for _, d, _ in found(owner, check.format(1000)) if session in d]
    assert len(owner.execute("select from pgqueue.health()").fetchall()) >= 13
    ((_, detail, hint),) = found(owner, "'notifications', most => -1")
    assert "perhaps" not in detail
    assert holder.info.backend_pid in [pid for pid, _ in owner.execute(hint)]
    holder.close()


def test_a_check_that_fails_says_so_and_stops_no_other(db, owner):
    db.execute("revoke execute on function pg_current_wal_lsn() from public")
    owner.execute("alter table pgqueue.schedule rename problem to trouble")
    rows = owner.execute("select h.check, status, detail from pgqueue.health() as h")
    failed = {check: detail for check, status, detail in rows if status == "critical"}
    assert failed == {
        "wal": "health could not look: permission denied for function pg_current_wal_lsn"
        " (SQLSTATE 42501)",
        "schedules": "health could not look: column s.problem does not exist (SQLSTATE 42703)",
    }
    assert len(owner.execute("select from pgqueue.health()").fetchall()) == 28


# What VACUUM needs


def test_dead_rows_that_nobody_removes_are_reported_and_vacuum_fixes_it(db, connect):
    db.execute("alter table pgqueue.job set (autovacuum_enabled = off)")
    bury(connect, 21_000)
    assert found(db, "'vacuum', '0', 10") == [], "as many come before autovacuum can"
    detail = fix(db, "'vacuum', '0', 1")
    assert detail.startswith(
        "table job has 21,000 dead rows, and no VACUUM has ended for"
    )


def test_a_large_and_empty_table_is_reported_with_its_indexes(db, connect):
    bury(connect, 40_000)
    db.execute("vacuum pgqueue.job")
    assert found(db, "bloat") == []
    said = fix(db, "'bloat', most => 1000000").splitlines()
    assert {detail.split(" takes ")[0] for detail in said} >= {
        "table job",
        "index job_lane_idx",
    }
    fill(db, 40_000)
    db.execute("vacuum analyze pgqueue.job")
    assert found(db, "'bloat', most => 1000000") == [], "a full one is not too large"


def test_an_unused_replication_slot_is_reported(db):
    slot = f"left behind {db.info.dbname}".replace(" ", "_")
    db.execute("select pg_create_physical_replication_slot(%s, true)", (slot,))
    db.execute("select pgqueue.enqueue('q')")
    assert found(db, "wal") == []
    assert fix(db, "'wal', most => 1").startswith(
        f"the unused replication slot {slot} keeps "
    )


# What must not run out


def test_a_listener_that_fills_the_notification_queue_can_be_ended(db, connect):
    listener = connect()
    listener.execute("listen anything")
    listener.execute("begin; select 1")
    db.execute(
        "select pg_notify('anything', repeat('x', 7000) || n) from generate_series(1, 200) as n"
    )
    assert found(db, "notifications") == []
    assert f"perhaps {listener.info.backend_pid} in database " in fix(
        db, "'notifications', most => 0"
    )


RAN = """
insert into pgqueue.run (slot, attempt, job_id, finished_at, waited, taken, queue, kind, outcome)
select (floor(extract(epoch from now()) / 86400)::int - 6) %% 16, 1, 1, now() - interval '13 days', '0', '0', 'q', 'k',
    %s
"""


def test_who_keeps_old_runs_from_being_forgotten_is_named(db, connect):
    db.execute(RAN, ("completed",))
    reader = connect(autocommit=False)
    reader.execute("select from pgqueue.run")
    db.execute("select from pgqueue.maintain()")
    ((status, detail, hint),) = found(db, "runs")
    assert status == "critical"
    assert f": session {reader.info.backend_pid} has used it since " in detail
    run_hint(db, hint)
    wait_until(lambda: "nobody has called maintain()" in found(db, "runs")[0][1])
    with connect(autocommit=False) as reader:
        reader.execute("select pg_current_xact_id() from pgqueue.run")
        reader.execute("prepare transaction 'read it'")
    ((_, detail, hint),) = found(db, "runs")
    assert detail.endswith(": prepared transaction read it has used it")
    run_hint(db, hint)
    assert "nobody uses it" in fix(db, "runs")


@pytest.mark.parametrize("is_prepared", [False, True])
def test_who_locks_a_table_is_named_and_can_be_ended(db, connect, is_prepared):
    other = connect(autocommit=False)
    other.execute("lock table pgqueue.job; select pg_current_xact_id()")
    if is_prepared:
        other.execute("prepare transaction 'locks'")
    db.execute("set statement_timeout = '20 s'")
    (check, status, detail, hint), *others = db.execute(
        "select * from pgqueue.health()"
    )
    assert (check, status) == ("waits", "critical")
    assert {status for _, status, _, _ in others} == {"ok"}
    who = "prepared transaction locks" if is_prepared else other.info.backend_pid
    assert "pgqueue.job is locked: " in detail and f"{who} has used it" in detail
    run_hint(db, hint)
    wait_until(lambda: not found(db, "waits"))


def test_a_locked_table_stops_no_check_that_does_not_read_it(db, connect):
    db.execute("create function gone(jsonb) returns void return null")
    db.execute("select pgqueue.configure('q', handler => 'public.gone(jsonb)')")
    db.execute("drop function gone")
    checks = set(column(db, "select name from pgqueue.checks"))
    other = connect(autocommit=False)
    other.execute("lock table pgqueue.schedule")
    first, second, *others = db.execute("select * from pgqueue.health()").fetchall()
    stopped = ["schedules", "workers", "backlog", "failures", "dead"]
    assert first[:2] == ("schedules", "critical")
    assert f"session {other.info.backend_pid} has used it since" in first[2]
    assert first[2].endswith(f"; this stops {', '.join(stopped)}")
    assert second[:2] == ("handlers", "critical")
    assert {name for name, _, _, _ in others} == checks - {*stopped, "handlers"}


def test_a_timeout_loses_only_what_was_not_looked_at(db):
    checks = column(db, "select name from pgqueue.checks")
    db.execute("select pgqueue.enqueue('q', run_at => now() - interval '1 day')")
    slow = "create or replace function pgqueue._dead_kinds() returns table (queue text, kind text, oldest timestamptz)"
    db.execute(f"{slow} language sql as $$select '', '', now() from pg_sleep(60)$$")
    db.execute("set statement_timeout = '5 s'")
    rows = db.execute("select * from pgqueue.health()").fetchall()
    db.execute("reset statement_timeout")
    last = checks[checks.index("dead") :]
    (said,) = [row for row in rows if row[0] == "dead"]
    assert said[1] == "critical"
    assert said[2].startswith("health could not look: canceling statement due to")
    assert said[2].endswith(f" (SQLSTATE 57014); this stops {', '.join(last)}")
    assert said[3].startswith("set statement_timeout = ")
    assert {row[0] for row in rows} == set(checks) - set(last[1:])
    assert "waits" in {check for check, status, _, _ in rows if status == "critical"}


def test_a_timeout_before_that_for_a_lock_still_names_who_has_locked(db, connect):
    other = connect(autocommit=False)
    other.execute("lock table pgqueue.job")
    db.execute("set statement_timeout = '300 ms'")
    (row,) = db.execute("select * from pgqueue.health()").fetchall()
    assert row[:2] == ("waits", "critical")
    assert "pgqueue.job is locked: " in row[2] and "; this stops waits, locks" in row[2]
    run_hint(db, row[3])


def test_who_waits_for_a_lock_and_lets_nobody_pass_is_named(db, connect):
    reader = connect(autocommit=False)
    reader.execute("select from pgqueue.job")
    other = connect()
    other.pgconn.send_query(b"begin; lock table pgqueue.job")
    detail = fix(db, "waits")
    assert f"{other.info.backend_pid} has waited for it since " in detail


def test_of_those_who_change_settings_the_one_who_holds_up_the_others_is_named(
    db, connect
):
    holder = connect(autocommit=False)
    holder.execute("select pgqueue.pause('q')")
    waiting = [connect() for _ in range(3)]
    for other in waiting:
        other.pgconn.send_query(b"select pgqueue.resume('q')")
    wait_until(
        lambda: "3 sessions wait" in "".join(d for _, d, _ in found(db, "locks"))
    )
    for _, detail, hint in found(db, "locks"):
        assert f": session {holder.info.backend_pid} has used it since " in detail
        assert str(holder.info.backend_pid) in hint
    fix(db, "locks")
    for other in waiting:
        assert other.pgconn.get_result().error_message == b""


LOCK = "'locks', '500 ms'"


@pytest.mark.parametrize(
    ("mode", "table", "call"),
    [
        ("share", "job", "select pgqueue.enqueue('q')"),
        ("exclusive", "job, pgqueue.run", "select pgqueue.enqueue('q')"),
        ("share row exclusive", "run", "select pgqueue.complete(id, token) from j"),
        # As REINDEX CONCURRENTLY does, which bars no writers.
        ("share update exclusive", "queue", "select pgqueue.pause('q')"),
    ],
)
def test_who_locks_a_table_below_access_exclusive_is_named_with_who_waits(
    db, connect, mode, table, call
):
    db.execute("select pgqueue.enqueue('q')")
    db.execute("create table j as select id, token from pgqueue.claim('q', 'w')")
    other = connect(autocommit=False, application_name="index builder")
    other.execute(f"lock table pgqueue.{table} in {mode} mode")
    waiting = connect()
    waiting.pgconn.send_query(call.encode())
    pid = other.info.backend_pid
    wait_until(lambda: "waits" in "".join(d for _, d, _ in found(db, "locks")))
    ((status, detail, hint),) = found(db, "locks")
    assert detail.startswith(f"table {table.split(',')[0]}"), detail
    assert f": session {pid} has used it since " in detail
    assert "(postgres, index builder, idle in transaction); a session waits" in detail
    assert " is locked in " + mode.title().replace(" ", "") + " mode" in detail
    assert (", and 2 more: session" in detail) is ("," in table)
    wait_until(lambda: found(db, LOCK) and found(db, "locks")[0][0] == status)
    run_hint(db, hint)
    wait_until(lambda: not found(db, "locks"))
    waiting.close()


def test_an_owner_who_may_see_little_finds_a_lock_once_a_session_waits(
    db, connect, owner
):
    other = connect(autocommit=False)
    other.execute("lock table pgqueue.job in share mode")
    always = "'locks', '0'"
    assert found(db, always) and found(owner, always) == []
    waiting = connect()
    waiting.pgconn.send_query(b"select pgqueue.enqueue('q')")
    wait_until(lambda: found(owner, always))
    ((_, detail, _),) = found(owner, always)
    assert f"session {other.info.backend_pid} " in detail
    other.rollback()
    assert waiting.pgconn.get_result().error_message == b""


def test_who_has_locked_a_sequence_is_named(db, connect):
    other, waiting = connect(autocommit=False), connect()
    other.execute("alter sequence pgqueue.job_id_seq cache 1")
    waiting.pgconn.send_query(b"select pgqueue.enqueue('q')")
    wait_until(lambda: "waits" in "".join(d for _, d, _ in found(db, "locks")))
    ((_, detail, hint),) = found(db, "locks")
    holder = f"session {other.info.backend_pid} has used it since "
    mode = "ShareRowExclusive mode"
    assert detail.startswith(f"sequence job_id_seq is locked in {mode}: {holder}")
    ((_, detail, _),) = found(db, "sequences")
    assert f", because pgqueue.job_id_seq is locked: {holder}" in detail
    run_hint(db, hint)
    wait_until(lambda: not found(db, "locks"))
    assert found(db, "sequences") == []
    waiting.close()


def test_a_lock_comes_before_what_it_holds_up_and_why_names_it(db, connect):
    db.execute("select pgqueue.enqueue('q') from generate_series(1, 2)")
    fail = "select pgqueue.fail(id, token, 'boom', permanent => true)"
    db.execute(f"{fail} from pgqueue.claim('q', 'w')")
    db.execute("update pgqueue.job set run_at = run_at - interval '1 hour'")
    other = connect(autocommit=False)
    other.execute("lock table pgqueue.job in share mode")
    low = '{"locks": {"patience": "10 ms"}, "dead": {"most": 0.1}}'
    db.execute(f"set pgqueue.thresholds = '{low}'")
    wait_until(lambda: found(db, "locks") and found(db, "locks")[0][0] == "critical")
    critical = """select "check" from pgqueue.health() where status = 'critical'"""
    assert column(db, critical) == ["locks", "dead", "waits"]
    who = f"its table is locked: session {other.info.backend_pid} has used it since"
    assert who in found(db, "waits")[0][1]
    assert who in one(db, "select pgqueue.why(id) from pgqueue.job")


def test_a_lock_that_nobody_waits_for_is_reported_after_a_while(db, connect):
    other = connect(autocommit=False)
    other.execute("lock table pgqueue.ticket in share mode")
    assert found(db, "locks") == []
    assert str(other.info.backend_pid) in fix(db, LOCK)


@pytest.mark.parametrize("is_prepared", [False, True])
def test_who_has_locked_the_rows_of_jobs_is_named(db, connect, is_prepared):
    many = "select pgqueue.enqueue_many('q', array_fill('{}'::jsonb, array[30]))"
    job = min(column(db, many))
    db.execute("update pgqueue.job set run_at = run_at - interval '1 hour'")
    other = connect(autocommit=False)
    other.execute("select from pgqueue.job for update")
    who = f"session {other.info.backend_pid} has used it"
    if is_prepared:
        other.execute("prepare transaction 'rows'")
        who = "prepared transaction rows has used it"
    assert f"its row is locked: {who}" in one(db, "select pgqueue.why(%s)", job)
    (waits,) = [detail for _, detail, _ in found(db, "waits")]
    assert f"its row is locked: {who}" in waits
    assert found(db, "locks") == []
    detail = fix(db, LOCK)
    assert f"the row of job {job} of queue q is locked, and " in detail
    assert f" more: {who}" in detail
    assert one(db, "select pgqueue.why(%s)", job).startswith("ready")


@pytest.mark.parametrize("is_prepared", [False, True])
def test_who_has_locked_a_job_whose_lease_expired_is_named(db, connect, is_prepared):
    db.execute("select pgqueue.enqueue('q')")
    (job, token) = db.execute(
        "select id, token from pgqueue.claim('q', 'w')"
    ).fetchone()
    late = "interval '1 hour'"
    db.execute(f"update pgqueue.job set lease_expires_at = lease_expires_at - {late}")
    other = connect(autocommit=False)
    other.execute("select pgqueue.save_step(%s, %s, 'step')", (job, token))
    who = f"session {other.info.backend_pid} has used it"
    if is_prepared:
        other.execute("prepare transaction 'step'")
        who = "prepared transaction step has used it"
    said = one(db, "select pgqueue.why(%s)", job)
    assert said.startswith(f"its row is locked: {who}")
    assert "; its lease expired at " in said
    assert one(db, "select pgqueue.reap()") == 0
    ((_, detail, hint),) = found(db, "leases")
    assert f"; its row is locked: {who}" in detail
    run_hint(db, hint)
    wait_until(lambda: "locked" not in found(db, "leases")[0][1])
    assert one(db, "select pgqueue.why(%s)", job).startswith("its lease expired at ")
    fix(db, "leases")


def test_who_keeps_an_end_of_a_job_waiting_is_named(db, connect):
    db.execute("select pgqueue.enqueue('q')")
    db.execute("create table j as select id, token from pgqueue.claim('q', 'w')")
    other = connect(autocommit=False)
    other.execute("select from pgqueue.job for update")
    waiting = connect()
    waiting.pgconn.send_query(b"select pgqueue.complete(id, token) from j")
    wait_until(lambda: found(db, "locks"))
    detail = fix(db, "locks")
    assert detail.startswith(f"a row is locked: session {other.info.backend_pid} has")
    assert detail.endswith("; a session waits for it")
    waiting.close()


@pytest.mark.parametrize("window", ["", ", unique_for => '1 hour'"])
def test_who_keeps_an_enqueue_with_the_same_key_waiting_is_named(db, connect, window):
    enqueue = f"select pgqueue.enqueue('q', unique_key => 'k'{window})"
    other = connect(autocommit=False)
    other.execute(enqueue)
    waiting = connect()
    waiting.pgconn.send_query(enqueue.encode())
    wait_until(lambda: found(db, "locks"))
    detail = fix(db, "locks")
    assert detail.startswith(f"a row is locked: session {other.info.backend_pid} has")
    assert detail.endswith("; a session waits for it")
    waiting.close()


@pytest.mark.parametrize(
    ("table", "enqueue", "waits"),
    [
        (
            "(n int primary key)",
            "select pgqueue.enqueue('q', unique_key => 'k')",
            "insert into mine values (1)",
        ),
        (
            "as select 1 as n",
            "select pgqueue.enqueue('q')",
            "select from mine for update",
        ),
    ],
    ids=["key", "row"],
)
def test_who_waits_for_what_is_not_ours_after_an_enqueue_is_no_concern_of_health(
    db, connect, table, enqueue, waits
):
    db.execute(f"create table mine {table}")
    other = connect(autocommit=False)
    other.execute(waits)
    waiting = connect()
    waiting.pgconn.send_query(f"begin; {enqueue}; {waits}".encode())
    wait_until(lambda: one(db, "select count(*) from pg_locks where not granted"))
    assert found(db, "'locks', '0 s'") == []
    waiting.close()


# Who serves what


def late(db: psycopg.Connection, queue: str, kind: str | None = None) -> int:
    """Enqueue a job that has been due for three minutes."""
    due = "now() - interval '3 minutes'"
    enqueue = f"select pgqueue.enqueue(%s, kind => %s, run_at => {due})"
    return one(db, enqueue, queue, kind)


def test_a_queue_is_served_by_a_session_that_is_busy_with_another_until_it_ends(
    db, connect
):
    late(db, "rare")
    assert "queue rare has 1 ready jobs" in found(db, "workers")[0][1]
    worker = connect()
    worker.execute("select pgqueue.rest(array['rare', 'often'])")
    db.execute("select pgqueue.enqueue('often')")
    worker.execute("select pgqueue.claim('often', 'w')")
    worker.execute("select pgqueue._unpark()")
    assert found(db, "workers") == []
    worker.close()
    wait_until(lambda: found(db, "workers"))
    # The next session that says what it serves forgets what others have left.
    db.execute("select pgqueue.rest(array['often'])")
    assert column(db, "select queue from pgqueue.service") == ["often"]


def test_no_lock_and_no_queue_of_the_same_fold_stands_for_a_worker(db, connect, role):
    late(db, "q")
    stranger = connect(user=role)
    stranger.execute(
        "select pg_advisory_lock_shared(7366514, n) from generate_series(0, 255) as n"
    )
    others = "select array_agg('other ' || n) from generate_series(1, 3000) as n"
    connect().execute(f"select pgqueue.rest(({others}))")
    assert [detail for _, detail, _ in found(db, "workers")]


def test_a_number_of_a_process_that_comes_again_does_not_serve_what_it_did(db):
    late(db, "q")
    db.execute("select pgqueue.rest(array['q'])")
    db.execute("update pgqueue.service set started = started - interval '1 day'")
    assert found(db, "workers"), "another session had this number"
    db.execute("select set_config('pgqueue.serves', '', false)")
    db.execute("select pgqueue.rest(array['other'])")
    assert column(db, "select queue from pgqueue.service") == ["other"]


def test_behind_a_pooler_a_queue_is_served_for_ten_minutes(db):
    late(db, "q")
    db.execute("select pgqueue.rest(array['q'], park => false)")
    assert found(db, "workers") == []
    db.execute("update pgqueue.service set until = until - interval '10 minutes'")
    assert found(db, "workers")


def test_a_session_says_what_it_serves_once_and_not_in_what_is_rolled_back(db):
    rest = "select pgqueue.rest(array['a', 'b'], array['k'])"
    db.execute("begin")
    db.execute(rest)
    db.execute("rollback")
    rows = "select count(*) from pgqueue.service"
    assert one(db, rows) == 0
    for _ in range(3):
        db.execute(rest)
        db.execute("select pgqueue.rest(array['a'], array['k'])")
        db.execute("select pgqueue.rest(array['b'], array['j'])")
    assert one(db, rows) == 3
    # Of this session alone: others of the server may write at any time.
    (plan,) = one(
        db,
        "explain (analyze, wal, format json) select pgqueue.rest(array['b'], array['j'])",
    )
    assert plan["Plan"]["WAL Bytes"] < 200


def test_a_kind_without_a_handler_is_reported_while_a_python_worker_puts_it_off(
    db,
    workers,  # noqa: F811
):
    late(db, "q", "no such kind")
    db.execute("update pgqueue.job set enqueued_at = now() - interval '3 minutes'")
    worker = workers.start("--queue", "q")
    wait_until(lambda: found(db, "kinds"))
    ((_, detail, _),) = found(db, "kinds")
    assert detail.startswith("queue q: nobody has taken job 1 of kind no such kind for")
    assert detail.endswith("puts them off: no handler for its kind")
    assert found(db, "workers") == []
    worker.terminate()


def test_a_python_worker_says_what_it_serves_before_it_is_idle(db, workers):  # noqa: F811
    naps = "select pgqueue.enqueue('busy', '{\"seconds\": 60}', 'nap')"
    for _ in range(9):
        db.execute(naps)
    worker = workers.start("--queue", "busy", "--queue", "rare", "--concurrency", "1")
    wait_until(lambda: one(db, "select count(*) from pgqueue.running"))
    late(db, "rare")
    assert set(column(db, "select queue from pgqueue.service")) == {"busy", "rare"}
    assert found(db, "workers") == []
    worker.kill()


def test_an_index_that_an_interrupted_reindex_has_left_is_reported(db, connect):
    reader = connect(autocommit=False)
    reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    reader.execute("select from pgqueue.job")
    reader.execute("select pg_current_xact_id()")
    db.execute("set statement_timeout = '1 s'")
    with pytest.raises(psycopg.errors.QueryCanceled):
        db.execute("reindex index concurrently pgqueue.job_lane_idx")
    db.execute("reset statement_timeout")
    reader.close()
    assert "index job_lane_idx_ccnew of table job is invalid" in fix(db, "indexes")
    valid = "select bool_and(indisvalid) from pg_index where indrelid = 'pgqueue.job'::regclass"
    assert one(db, valid)


def test_an_index_that_somebody_has_dropped_is_named_with_what_creates_it(db):
    query = """
        select c.relname, pg_get_indexdef(c.oid) from pg_class as c
        where c.relnamespace = 'pgqueue'::regnamespace and c.relkind in ('i', 'I') and not c.relispartition
    """
    made = dict(db.execute(query).fetchall())
    dropped = [name for name in made if name.endswith("_idx")]
    assert len(dropped) > 30
    for name in dropped:
        db.execute(f"drop index pgqueue.{name}")
    assert {status for status, _, _ in found(db, "indexes")} == {"critical"}
    said = fix(db, "'indexes'")
    assert [name for name in dropped if f"index {name} is missing" not in said] == []
    assert dict(db.execute(query).fetchall()) == made


# A healthy system

PASS = """
update pgqueue.job
set run_at = run_at - %(span)s, enqueued_at = enqueued_at - %(span)s, claimed_at = claimed_at - %(span)s,
    lease_expires_at = lease_expires_at - %(span)s;
update pgqueue.run set finished_at = finished_at - %(span)s;
update pgqueue.dead_job set died_at = died_at - %(span)s;
update pgqueue.ticket set at = at - %(span)s;
update pgqueue.permit set free_at = free_at - %(span)s;
update pgqueue.batch set created_at = created_at - %(span)s;
update pgqueue.service set until = until - %(span)s;
update pgqueue.schedule set due_at = due_at - %(span)s, next_slot = next_slot - %(span)s;
""".replace("%(span)s", "interval '1 minute'")


def words(db: psycopg.Connection) -> list[tuple[str, str]]:
    query = "select h.check, h.detail from pgqueue.health() as h where status <> 'ok'"
    return db.execute(query).fetchall()


def begin_hour(db: psycopg.Connection, worker: psycopg.Connection) -> None:
    worker.execute("select pgqueue.rest(array['mail', 'reports', 'tenants'])")
    db.execute("select pgqueue.configure('nightly', wait_target => '1 day')")
    db.execute("select pgqueue.configure('tenants', group_limit => 1)")
    db.execute("select pgqueue.schedule('s', 'reports', every => '5 minutes')")


def test_an_hour_of_a_quiet_system_passes_without_a_word(db, connect):
    worker = connect()
    begin_hour(db, worker)
    db.execute("select pgqueue.enqueue('nightly')")
    for minute in range(60):
        db.execute("select from pgqueue.maintain()")
        worker.execute("select pgqueue.rest(array['mail', 'reports', 'tenants'])")
        ran = "select pgqueue.complete(id, token) from pgqueue.claim('reports', 'w')"
        worker.execute(ran)
        assert words(db) == [], minute
        db.execute(PASS)
    assert one(db, "select count(*) from pgqueue.run") >= 11


def test_an_hour_of_a_busy_system_passes_without_a_word(db, connect):
    """Retries, a few deaths, long jobs, full groups, a batch, a queue for the night."""
    worker = connect()
    begin_hour(db, worker)
    batch = one(db, "select pgqueue.create_batch('mail')")
    held: list[tuple[int, int]] = []
    for minute in range(60):
        db.execute(
            "select pgqueue.enqueue_many('mail', array_fill('{}'::jsonb, array[60]), kind => k)"
            " from unnest(array['welcome', 'invoice']) as k"
        )
        db.execute(
            "select pgqueue.enqueue('mail', batch_id => %s, max_attempts => %s)",
            (batch, 1 if minute % 15 == 0 else 20),
        )
        db.execute("select pgqueue.enqueue('nightly')")
        db.execute(
            "select pgqueue.enqueue_many('tenants', array_fill('{}'::jsonb, array[3]),"
            " group_keys => array['a', 'a', 'b'])"
        )
        # A report takes eight minutes; its lease is extended.
        if minute % 8 == 0:
            done = "select pgqueue.complete(%s, %s)"
            worker.cursor().executemany(done, held)
            db.execute("select pgqueue.enqueue('reports', kind => 'long')")
            claim = "select id, token from pgqueue.claim('reports', 'w 2', kinds => array['long'])"
            held = worker.execute(claim).fetchall()
        for job, token in held:
            worker.execute("select pgqueue.extend(array[%s], array[%s])", (job, token))
        for _ in range(4):
            worker.execute(
                "select case"
                " when attempt = 1 and queue = 'mail' and id % 50 = 0 or max_attempts = 1 then pgqueue.fail(id, token, 'E')"
                " else pgqueue.complete(id, token)::text end"
                " from pgqueue.claim_from(array['mail', 'tenants', 'reports'], 'w 1', 50)",
            )
        db.execute("select from pgqueue.maintain()")
        assert words(db) == [], minute
        db.execute(PASS)
        # Only a log that has grown is sampled, and this one only moves.
        db.execute("vacuum pgqueue.run")
    assert 1 < one(db, "select count(*) from pgqueue.dead_job") < 10
    assert one(db, "select count(*) from pgqueue.run") > 7000


# What it costs


def test_a_number_that_is_an_estimate_is_not_given_as_exact(db):
    fill(db, 150_000, after="n * interval '1 us' - interval '1 day'")
    assert "queue q has about 1" in found(db, "workers")[0][1]
    db.execute("delete from pgqueue.job where id % 1000 > 0")
    db.execute("vacuum full pgqueue.job")
    assert "queue q has 150 ready jobs" in found(db, "workers")[0][1]


def test_health_reads_no_more_of_a_long_queue_than_of_a_short_one(db):
    """The session has its plans from when there was none."""
    health = "select from pgqueue.health()"
    for _ in range(6):
        db.execute(health)
    fill(db, 2000, after="n * interval '1 us' - interval '1 day'")
    db.execute("select from pgqueue.claim('q', 'w', 1000)")
    short = pages(db, health)
    fill(db, 300_000)
    assert pages(db, health) < 1.5 * short
    assert found(db, "waits")[0][0] == "critical"


@pytest.mark.parametrize("setting", ["wait_target => '1 hour'", "max_attempts => 5"])
def test_health_finds_the_settings_of_one_of_many_queues_by_an_index(db, setting):
    for _ in range(6):
        db.execute("select from pgqueue.health()")
    late = (
        "select pgqueue.enqueue('queue ' || n, run_at => now() - interval '3 minutes')"
        " from generate_series(1, 2000) as n"
    )
    db.execute(late)
    health = "select from pgqueue.health()"
    without = pages(db, health)
    db.execute(
        f"select pgqueue.configure('queue ' || n, {setting}) from generate_series(1, 2000) as n"
    )
    # A few pages for each queue; the table has dozens.
    assert pages(db, health) - without < 10 * 2000
    db.execute("analyze pgqueue.queue")
    assert pages(db, health) - without < 10 * 2000


@pytest.mark.parametrize(
    ("due", "most"),
    [
        # One more page says whether anything is set for a queue.
        ("now()", 1.5),
        # And two descents for each lane, but not to each job: five are named.
        ("now() - interval '1 hour'", 2.9),
    ],
)
def test_health_looks_up_only_the_jobs_that_it_names(db, due, most):
    db.execute(
        f"select pgqueue.enqueue('queue ' || n, run_at => {due}) from generate_series(1, 1000) as n"
    )
    for query in (
        waits := "select from pgqueue._found('waits')",
        lanes := "select from pgqueue._lanes()",
    ):
        db.execute(query)
    assert pages(db, waits) < most * pages(db, lanes)


def test_health_asks_what_is_set_only_for_queues_with_a_rate(db):
    db.execute("select pgqueue.configure(null, max_attempts => 5)")
    db.execute(
        "select pgqueue.enqueue('queue ' || n, run_at => now() - interval '1 hour') from generate_series(1, 1000) as n"
    )
    seen = "select from (select array(select q from pgqueue.queues as q) as seen offset 0) as s"
    backlog = (
        f"{seen} cross join lateral pgqueue._found('backlog', '2 minutes', 12, s.seen)"
    )
    for query in seen, backlog:
        db.execute(query)
    assert pages(db, backlog) - pages(db, f"{seen} where seen <> '{{}}'") < 100


# The whole server


@pytest.fixture(scope="module")
def server() -> Iterator[Cluster]:
    with Cluster(fast=True) as cluster:
        with psycopg.connect(where(cluster), autocommit=True) as db:
            db.execute("create extension pgqueue")
        yield cluster


def test_autovacuum_that_is_off_is_critical_and_can_be_switched_on(server):
    with psycopg.connect(where(server), autocommit=True) as db:
        assert found(db, "autovacuum") == []
        db.execute("alter system set autovacuum = off")
        db.execute("select pg_reload_conf()")
        wait_until(lambda: found(db, "autovacuum"))
        assert [row[0] for row in found(db, "autovacuum")] == ["critical"]
        assert (
            fix(db, "autovacuum")
            == "autovacuum is off on this server: dead rows pile up"
        )


READ_ONLY = "default_transaction_read_only"


@pytest.mark.parametrize(
    ("made", "whom"),
    [
        (f"alter database postgres set {READ_ONLY} = true", "database postgres"),
        (f"alter role all set {READ_ONLY} = on", "role all"),
        (f"alter system set {READ_ONLY} = on; select pg_reload_conf()", "this server"),
        ("select pg_reload_conf()", "this server"),
    ],
)
def test_a_database_that_was_made_read_only_is_named_and_can_be_made_to_write(
    server, made, whom
):
    with psycopg.connect(where(server), autocommit=True) as db:
        assert found(db, "writes") == []
        if "set" not in made:
            with Path(one(db, "show config_file")).open("a") as file:
                file.write(f"{READ_ONLY} = yes\n")
            db.execute(f"alter system reset {READ_ONLY}")
        for statement in made.split(";"):
            db.execute(statement)

    def writes() -> bool:
        with psycopg.connect(where(server), autocommit=True) as db:
            return bool(one(db, f"show {READ_ONLY}") == "off")

    wait_until(lambda: not writes())
    # As the person on call finds it.
    with psycopg.connect(where(server), autocommit=True) as db:
        with pytest.raises(errors.ReadOnlySqlTransaction):
            db.execute("select pgqueue.enqueue('q')")
        assert [row[0] for row in found(db, "writes")] == ["critical"]
        assert fix(db, "writes").startswith(f"{READ_ONLY} is on for {whom}, ")
    wait_until(writes)


def test_a_role_that_shall_only_read_is_no_finding(server):
    with psycopg.connect(where(server), autocommit=True) as db:
        db.execute(f"create role auditor; alter role auditor set {READ_ONLY} = on")
        db.execute(f"set {READ_ONLY} = on")
        assert found(db, "writes") == []


def test_old_transaction_ids_are_reported_and_vacuum_freezes_them(server):
    with psycopg.connect(where(server), autocommit=True) as db:
        for _ in range(200):
            db.execute("select pg_current_xact_id()")
        assert found(db, "wraparound") == []
        hints = {row[2] for row in found(db, "'wraparound', most => 150")}
        assert hints > {"vacuum (freeze)", "in database template1: vacuum (freeze)"}
        db.execute("vacuum (freeze)")
        hints = {row[2] for row in found(db, "'wraparound', most => 150")}
        assert hints and "vacuum (freeze)" not in hints


def test_newer_files_on_the_server_are_reported_until_the_extension_is_updated(server):
    (folder,) = server.home.glob("server/**/extension")
    control = folder / "pgqueue.control"
    with psycopg.connect(where(server), autocommit=True) as db:
        version = one(db, "select pgqueue.version()")
        source = one(db, "select pg_get_functiondef('pgqueue.version'::regproc)")
        script = folder / f"pgqueue--{version}--9.9.9.sql"
        script.write_text(source.replace(version, "9.9.9") + ";")
        control.write_text(control.read_text().replace(version, "9.9.9"))
        db.execute("begin")
        db.execute(source.replace(version, "9.9.8"))
        assert [row[0] for row in found(db, "version")] == ["critical"]
        db.execute("rollback")
        assert [row[0] for row in found(db, "version")] == ["warning"]
        assert fix(db, "version") == (
            f"the extension is of version {version}, its functions of {version}, the files on the server of 9.9.9"
        )
        assert found(db, "version") == []
        updated = control.read_text()
        control.write_text(updated.replace("9.9.9", version))
        lacks = "put the files of version 9.9.9 on this server"
        assert [(row[0], row[2]) for row in found(db, "version")] == [
            ("warning", lacks)
        ]
        control.rename(folder / "gone")
        assert [(row[0], row[2]) for row in found(db, "version")] == [
            ("warning", lacks)
        ]
        db.execute("create schema pgtle")
        assert found(db, "version") == [], "what pg_tle installs has no files"


@contextlib.contextmanager
def standby_of(primary: Cluster) -> Iterator[Cluster]:
    standby = Cluster(fast=True)
    try:
        standby.create()
        with psycopg.connect(where(primary), autocommit=True) as db:
            db.execute("select pg_create_physical_replication_slot('standby')")
        primary.stop()
        subprocess.run(["rm", "-r", standby.data], check=True)
        subprocess.run(["cp", "-a", primary.data, standby.data], check=True)
        primary.start()
        with (standby.data / "postgresql.conf").open("a") as conf:
            for name, value in {
                "port": standby.port,
                "unix_socket_directories": standby.home,
                "primary_conninfo": f"host={primary.home} port={primary.port} user=postgres",
                "primary_slot_name": "standby",
                "hot_standby_feedback": "on",
                "wal_receiver_status_interval": "1",
            }.items():
                conf.write(f"{name} = '{value}'\n")
        (standby.data / "standby.signal").touch()
        standby.start()
        yield standby
    finally:
        standby.remove()


def test_a_standby_that_holds_the_horizon_is_named_and_names_its_session(server):
    check = "'horizon', '0', 0, few => 0"
    with (
        standby_of(server) as standby,
        psycopg.connect(where(standby), autocommit=True) as far,
        contextlib.closing(psycopg.connect(where(standby))) as holder,
        psycopg.connect(where(server), autocommit=True) as db,
    ):

        def said(conn: psycopg.Connection, start: str) -> list[str]:
            rows = found(conn, check)
            return [f"{detail} | {hint}" for _, detail, hint in rows if start in detail]

        rows = far.execute("select * from pgqueue.health()").fetchall()
        assert {row[0] for row in rows if row[1] != "ok"} <= {"version"}
        far.execute("select pg_wal_replay_pause()")
        # At the next record.
        db.execute("select pg_current_xact_id()")
        stands_still = "this standby stands still, because its replay was paused"
        assert fix(far, "wal").startswith(stands_still)
        # All WAL that it has not said to have got is kept for it.
        slow = found(db, "'wal', most => -1")
        assert "the slow replication slot standby keeps " in slow[0][1]
        assert slow[0][2] == "there: select * from pgqueue.health()"

        holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        holder.execute("select 'far away'")
        db.execute("select pg_current_xact_id()")
        wait_until(lambda: said(db, "replication slot standby (active)"))
        wait_until(lambda: said(far, f"session {holder.info.backend_pid} ("))
        (there,) = said(far, f"session {holder.info.backend_pid} (")
        assert "select 'far away' | select pg_terminate_backend" in there

        far.execute("alter system set primary_slot_name = ''")
        far.execute("select pg_reload_conf()")
        wait_until(lambda: said(db, "replication slot standby (inactive)"))
        (left,) = said(db, "replication slot standby (inactive)")
        run_hint(db, left.split(" | ")[1])
        wait_until(lambda: said(db, "standby walreceiver"))
        assert not said(db, "replication slot")
        (row,) = said(db, "standby walreceiver")
        assert row.endswith(" | there: select * from pgqueue.health()")
        far.execute(there.split(" | ")[1])
        db.execute("select pg_current_xact_id()")
        wait_until(lambda: not said(db, "standby walreceiver"))
