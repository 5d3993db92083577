"""Schedules between sessions, workers and crashes: each slot has one job, in time."""

import re
import signal
import subprocess
import threading
from collections import Counter

import documents
import pgqueue
import psycopg
import pytest
from cluster import Cluster
from conftest import LONG, column, one
from psycopg import errors
from test_plans import pages
from worker_harness import wait_until, where

pytest_plugins = ["worker_harness", "command_line"]

FIRE = "select done from pgqueue.maintain() where task = 'fire schedules'"
SLOTS = "select headers ->> 'slot' from pgqueue.job where headers ? 'schedule'"

IS_SLOT_OF_SEVEN_MINUTES = """
    select next_slot > now() and next_slot <= now() + interval '7 minutes'
        and next_slot = date_bin('7 minutes', next_slot, '1970-01-05 00:00 UTC')
    from pgqueue.schedules
"""


def make_due(db: psycopg.Connection, name: str = "s", ago: str = "1 second") -> None:
    db.execute(
        "update pgqueue.schedule set next_slot = now() - %(ago)s::interval,"
        " due_at = now() - %(ago)s::interval where name = %(name)s",
        {"name": name, "ago": ago},
    )


@pytest.fixture
def due(db: psycopg.Connection) -> None:
    """A schedule with one slot that is due."""
    db.execute("select pgqueue.schedule('s', 'q', every => '1 hour')")
    make_due(db)


# Two sessions at one slot


@pytest.mark.parametrize("verb", [FIRE, "select pgqueue.rest('{q}')"])
@pytest.mark.parametrize("commits", [True, False])
def test_a_slot_that_one_session_fires_has_one_job_whoever_else_fires(
    db, connect, due, verb, commits
):
    other = connect()
    with db.transaction(force_rollback=not commits):
        db.execute(verb)
        other.execute(verb)  # and does not wait
        assert one(other, "select count(*) from pgqueue.job") == 0
    other.execute(verb)
    assert one(other, "select count(*) from pgqueue.job") == 1


@pytest.fixture
def call_while_it_fires(db, connect, due, blocked):
    """Make a call that waits for the open transaction that fires the slot; it fires once."""

    def call(query: str) -> None:
        other = connect()
        with db.transaction():
            db.execute(FIRE)
            caller = threading.Thread(target=other.execute, args=(query,))
            caller.start()
            blocked(other)
        caller.join()
        assert one(db, FIRE) == 0
        assert one(db, "select count(*) from pgqueue.job") == 1

    return call


def test_a_schedule_that_is_made_anew_while_its_slot_is_fired_fires_it_once(
    db, call_while_it_fires
):
    call_while_it_fires(
        "select pgqueue.schedule('s', 'q', every => '1 hour', priority => 3)"
    )
    assert one(db, "select next_slot > now() from pgqueue.schedules")


@pytest.mark.parametrize("call", ["pause_schedule", "unschedule"])
def test_who_pauses_or_ends_a_schedule_waits_for_the_slot_that_is_just_fired(
    call_while_it_fires, call
):
    call_while_it_fires(f"select pgqueue.{call}('s')")


@pytest.mark.parametrize("commits", [True, False])
def test_a_slot_that_is_due_when_the_rule_changes_has_one_job_whoever_fires(
    db, connect, due, commits
):
    other = connect()
    with db.transaction(force_rollback=not commits):
        db.execute("select pgqueue.schedule('s', 'q', every => '7 minutes')")
        assert one(other, FIRE) == 0  # and does not wait
    assert one(other, FIRE) == (0 if commits else 1)
    assert one(other, "select count(*) from pgqueue.job") == 1


def test_a_call_that_changes_nothing_holds_up_no_slot(db, connect, due):
    with db.transaction():
        db.execute("select pgqueue.schedule('s', 'q', every => '1 hour')")
        assert one(connect(), FIRE) == 1


def test_a_rule_that_changes_while_a_slot_is_fired_fires_no_other_slot(
    db, call_while_it_fires
):
    call_while_it_fires("select pgqueue.schedule('s', 'q', every => '7 minutes')")
    assert one(db, IS_SLOT_OF_SEVEN_MINUTES)


def test_a_schedule_that_is_resumed_while_its_rule_changes_fires_at_the_new_slots(
    db, connect, blocked
):
    db.execute("select pgqueue.schedule('s', 'q', every => '1 hour')")
    db.execute("select pgqueue.pause_schedule('s')")
    other = connect()
    with db.transaction():
        db.execute("select pgqueue.schedule('s', 'q', every => '7 minutes')")
        call = "select pgqueue.resume_schedule('s')"
        caller = threading.Thread(target=other.execute, args=(call,))
        caller.start()
        blocked(other)
    caller.join()
    assert one(db, "select not paused from pgqueue.schedules")
    assert one(db, IS_SLOT_OF_SEVEN_MINUTES)
    assert one(db, "select next_slot = due_at from pgqueue.schedule")


@pytest.mark.parametrize("ending", ["commit", "rollback", "unschedule"])
def test_two_sessions_that_make_a_schedule_at_once_make_one(
    db, connect, blocked, ending
):
    """The second one's change holds, whatever the first one does with its own."""
    first, second = connect(autocommit=False), connect()
    if ending == "unschedule":
        db.execute("select pgqueue.schedule('s', 'q', every => '1 hour')")
        first.execute("select pgqueue.unschedule('s')")
    else:
        first.execute("select pgqueue.schedule('s', 'q', every => '1 hour')")
    call = "select pgqueue.schedule('s', 'q', every => '7 minutes')"
    caller = threading.Thread(target=second.execute, args=(call,))
    caller.start()
    blocked(second)
    first.rollback() if ending == "rollback" else first.commit()
    caller.join()
    assert one(db, IS_SLOT_OF_SEVEN_MINUTES)
    assert one(db, "select every from pgqueue.schedules").total_seconds() == 420


def test_many_sessions_that_claim_give_each_slot_one_job(db, connect):
    for number in range(20):
        db.execute(
            "select pgqueue.schedule(%s, 'q', '* * * * * *', jitter => '1 second',"
            " catch_up => 'all')",
            [f"s{number}"],
        )
    stop, claimed = threading.Event(), []

    def claim(conn: psycopg.Connection) -> None:
        while not stop.is_set():
            claimed.extend(
                conn.execute(
                    "select headers ->> 'schedule', headers ->> 'slot'"
                    " from pgqueue.claim('q', 'w', 5)"
                )
            )

    threads = [threading.Thread(target=claim, args=(connect(),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(claimed) >= 60)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert max(Counter(claimed).values()) == 1
    slots = {name: sorted(s for n, s in claimed if n == name) for name, _ in claimed}
    for name, found in slots.items():  # without a gap
        first, last = found[0], found[-1]
        seconds = one(
            db,
            "select extract(epoch from %s::timestamptz - %s::timestamptz)::int",
            last,
            first,
        )
        assert len(found) == seconds + 1, name


# Who fires, and when


def test_a_claim_fires_what_is_due_and_gets_it_at_once(db, due):
    assert one(db, "select headers ->> 'schedule' from pgqueue.claim('q', 'w')") == "s"


def test_a_claim_in_a_longer_transaction_leaves_the_slot_to_others_for_a_second(
    db, connect
):
    claim = "select count(*) from pgqueue.claim('q', 'w')"
    db.execute("select pgqueue.schedule('s', 'q', '* * * * * *')")
    with db.transaction(force_rollback=True):
        db.execute("select pg_sleep_until(next_slot) from pgqueue.schedule")
        assert one(db, claim) == 0
        assert one(connect(), claim) == 1
    with db.transaction(force_rollback=True):
        # A second after somebody would have looked; on a busy machine that is not at the slot.
        db.execute(
            "select pg_sleep_until(interval '1.1 s' + greatest(next_slot, timestamptz '2020-01-01 00:00 UTC'"
            " + interval '1 us' * pg_sequence_last_value('pgqueue._cell_due'))) from pgqueue.schedule"
        )
        assert one(db, claim) == 1


def test_a_claim_looks_again_within_a_second_for_a_schedule_that_was_not_committed(
    db, connect
):
    """Its transaction has told the cell, and a look before the commit has seen nothing."""
    claimer = connect()
    db.execute("select pgqueue.schedule('other', 'other', every => '1 day')")
    with db.transaction():
        db.execute("select pgqueue.schedule('s', 'q', every => '1 hour')")
        make_due(db)
        assert one(claimer, "select count(*) from pgqueue.claim('q', 'w')") == 0
    wait_until(lambda: one(claimer, "select count(*) from pgqueue.claim('q', 'w')"), 5)


def test_a_rest_lasts_until_the_next_slot_of_its_queues(db):
    db.execute("select pgqueue.schedule('far', 'q', every => '3650 days')")
    db.execute("select pgqueue.schedule('other', 'other', '* * * * * *')")
    query = "select extract(epoch from pgqueue.rest(%s))"
    assert one(db, query, ["q"]) > 100
    assert one(db, query, ["q", "other"]) <= 1
    db.execute("select pgqueue.pause_schedule('other')")
    db.execute("select pgqueue.purge('other')")  # if a slot has come due meanwhile
    assert one(db, query, ["other"]) is None


def test_a_new_schedule_wakes_a_session_that_rests(db, connect):
    sleeper = connect()
    sleeper.execute("listen pgqueue")
    assert one(sleeper, "select pgqueue.rest('{q}')") is None
    db.execute("select pgqueue.schedule('s', 'q', '* * * * * *')")
    assert list(sleeper.notifies(timeout=20, stop_after=1))
    assert one(sleeper, "select pgqueue.rest('{q}') <= '1 second'")


def test_a_session_that_rests_while_another_fires_looks_again_soon(db, connect, due):
    other = connect()
    with db.transaction():
        db.execute(FIRE)
        assert one(other, "select pgqueue.rest('{q}')").total_seconds() < 0.2


# Ten thousand of them


def test_ten_thousand_schedules_cost_a_claim_and_a_rest_nothing(db):
    claim, rest = (
        "select from pgqueue.claim('q', 'w', 10)",
        "select pgqueue.rest('{q}')",
    )
    db.execute(
        "select count(*) from pgqueue.enqueue_many('q', array_fill('{}'::jsonb, array[500]))"
    )
    for _ in range(3):
        few = pages(db, claim), pages(db, rest)
    db.execute(
        "select count(*) from (select pgqueue.schedule('s' || n, 'other', every => '3650 days')"
        " from generate_series(1, 10000) as n) as s"
    )
    pages(db, claim)  # looks once
    many = min(pages(db, claim) for _ in range(5)), pages(db, rest)
    assert many[0] <= few[0] + 5
    assert many[1] <= few[1] + 50


def test_a_thousand_slots_at_one_moment_are_fired_in_bounded_claims(db):
    db.execute(
        "select count(*) from (select pgqueue.schedule('s' || n, 'q', every => '1 day')"
        " from generate_series(1, 1000) as n) as s"
    )
    db.execute(
        "update pgqueue.schedule set next_slot = now() - interval '1 s', due_at = now() - interval '1 s'"
    )
    assert one(db, FIRE) == 100
    fired = [100]
    # A claim that is held up between its planning and its start leaves it to the next.
    while sum(fired) < 1000 and len(fired) < 1000:
        db.execute("select from pgqueue.claim('none', 'w')")
        fired.append(one(db, "select count(*) from pgqueue.job") - sum(fired))
    assert sum(fired) == 1000
    assert max(fired[1:]) == 10


def test_schedules_are_found_by_their_index_in_a_session_that_knew_none(db, connect):
    db.execute("select pgqueue.schedule('s', 'q', every => '3650 days')")
    for query in (FIRE, "select pgqueue.rest('{q}')"):
        for _ in range(7):
            db.execute(query)
    connect().execute(
        "insert into pgqueue.schedule (due_at, next_slot, every, name, queue, timezone, catch_up, payload)"
        " select now() + n * interval '1 hour', now() + n * interval '1 hour', '1 day', 's' || n,"
        " 'q' || n, 'UTC', 'one', '{}' from generate_series(1, 50000) as n"
    )
    assert pages(db, "select pgqueue.rest('{q}')") < 200
    make_due(db)
    assert pages(db, "select pgqueue._fire_due(clock_timestamp(), 100)") < 300


# Faults


@pytest.fixture(scope="module")
def server():
    """A server of its own, which the tests crash."""
    with Cluster(settings={"restart_after_crash": "on"}) as cluster:
        with psycopg.connect(where(cluster), autocommit=True) as conn:
            conn.execute("create extension pgqueue")
        yield cluster


def test_a_firing_that_a_crash_cuts_off_is_done_again_and_one_that_committed_is_not(
    server,
):
    with psycopg.connect(where(server), autocommit=True) as db:
        db.execute("select pgqueue.schedule('s', 'q', every => '1 hour')")
        db.execute("select pgqueue.schedule('other', 'q', every => '1 hour')")
        make_due(db, "other")
        assert one(db, FIRE) == 1
        make_due(db)
    firing = psycopg.connect(where(server))
    assert one(firing, FIRE) == 1
    server.restart("immediate")
    firing.close()
    with psycopg.connect(where(server), autocommit=True) as db:
        assert one(db, FIRE) == 1
        assert column(
            db, "select headers ->> 'schedule' from pgqueue.job order by id"
        ) == [
            "other",
            "s",
        ]


def test_a_restored_dump_fires_what_was_due_once_and_nothing_again(db, tmp_path, due):
    db.execute(FIRE)
    db.execute("select pgqueue.schedule('late', 'q', every => '1 hour')")
    make_due(db, "late", "3 hours")
    slots = sorted(column(db, SLOTS))
    dump = tmp_path / "dump"
    subprocess.run(["pg_dump", "-Fc", "-f", dump, db.info.dbname], check=True)
    copy = f"{db.info.dbname}_copy"
    with psycopg.connect(dbname="postgres", autocommit=True) as admin:
        admin.execute(f"create database {copy}")
        try:
            subprocess.run(["pg_restore", "-d", copy, dump], check=True)
            with psycopg.connect(dbname=copy, autocommit=True) as restored:
                assert sorted(column(restored, SLOTS)) == slots
                assert one(restored, FIRE) == 1
                assert one(restored, FIRE) == 0
                assert len(column(restored, SLOTS)) == 2
        finally:
            admin.execute(f"drop database {copy} with (force)")


def test_a_time_zone_that_the_server_no_longer_knows_holds_up_nothing(db, due):
    db.execute("select pgqueue.schedule('lost', 'q', '@daily')")
    make_due(db, "lost", "1 hour")
    db.execute("update pgqueue.schedule set timezone = 'Mars/Base' where name = 'lost'")
    assert one(db, FIRE) == 1
    assert "Mars/Base" in one(
        db, "select problem from pgqueue.schedules where name = 'lost'"
    )


def test_a_clock_that_is_set_back_fires_no_slot_again(db, due):
    db.execute(FIRE)
    db.execute(  # as if an hour and a half had not passed yet
        "update pgqueue.schedule set next_slot = next_slot + interval '90 minutes',"
        " last_slot = last_slot + interval '90 minutes', due_at = due_at + interval '90 minutes'"
    )
    last = one(db, "select last_slot from pgqueue.schedule")
    db.execute("select pgqueue.schedule('s', 'q', every => '7 minutes')")
    assert one(db, "select next_slot from pgqueue.schedule") > last
    db.execute("select pgqueue.pause_schedule('s'), pgqueue.resume_schedule('s')")
    assert one(db, "select next_slot from pgqueue.schedule") > last
    assert one(db, FIRE) == 0


@pytest.mark.parametrize(
    "cell",
    ["alter sequence %s restart", "select setval('%s', 4e15::bigint)"],
    ids=["restored", "set back"],
)
def test_a_claim_fires_what_is_due_on_a_server_that_has_not_looked_yet(db, cell):
    """A dump does not have the cell that says when to look, and another clock may have written it."""
    db.execute("select pgqueue.schedule('s', 'q', every => '1 hour')")
    make_due(db, "s", "1 hour")
    db.execute(cell % "pgqueue._cell_due")
    assert column(db, "select kind from pgqueue.claim('q', 'w')") == ["q"]


# The worker


def test_a_handler_recurs_once_for_each_slot_with_two_workers_one_of_them_killed(
    db, workers
):
    first, _ = (workers.start("--app", "worker_schedule_app") for _ in range(2))
    done = (
        "select count(*) from pgqueue.run where kind = 'tick' and outcome = 'completed'"
    )
    wait_until(lambda: one(db, done) >= 2)
    first.send_signal(signal.SIGKILL)
    wait_until(lambda: one(db, done) >= 5)
    assert db.execute(
        "select name, queue, cron, timezone, catch_up from pgqueue.schedules"
    ).fetchall() == [("tick", "work", "* * * * * *", "Europe/Berlin", "skip")]
    slots = workers.ran.read_text().splitlines()
    assert max(Counter(slots).values()) == 1


def test_a_handler_that_recurs_must_be_callable_without_arguments() -> None:
    app = pgqueue.App()
    with pytest.raises(TypeError, match="missing"):

        @app.job("report", cron="@daily")
        def report(day: str) -> None: ...

    assert not app.tasks


@pytest.mark.parametrize("more", [[], ["--burst"]])
def test_a_worker_whose_cron_text_is_wrong_ends_with_its_error(run, tmp_path, more):
    (tmp_path / "wrong.py").write_text(
        "import pgqueue\napp = pgqueue.App()\n\n"
        "@app.job('x', cron='0 0 30 2 *')\ndef x() -> None: ...\n"
    )
    worker = run("pgqueue.worker", "--app", "wrong", "--queue", "q", *more)
    assert worker.returncode != 0
    assert "cron names a day that never comes" in worker.stderr


# Without a worker


def test_the_line_for_pg_cron_fires_schedules():
    with Cluster(
        settings={
            "shared_preload_libraries": "pg_cron",
            "cron.use_background_workers": "on",
        }
    ) as cluster:
        reference = documents.text("docs/reference/schedule.md")
        (line,) = re.findall(r"`(select cron\.schedule.*?)`", reference)
        with psycopg.connect(where(cluster), autocommit=True) as db:
            db.execute("create extension pgqueue")
            db.execute("create extension pg_cron")
            db.execute("select pgqueue.schedule('s', 'q', every => '3650 days')")
            make_due(db)
            db.execute(line)
            if LONG:
                wait_until(lambda: one(db, "select count(*) from pgqueue.job"), 90)
            else:  # as pg_cron does at the next minute
                db.execute(one(db, "select command from cron.job"))
                assert one(db, "select count(*) from pgqueue.job") == 1


def test_an_error_of_schedule_is_the_same_in_every_date_style(db):
    db.execute("set datestyle = 'german'")
    db.execute("set intervalstyle = 'sql_standard'")
    with pytest.raises(errors.InvalidParameterValue):
        db.execute("select pgqueue.schedule('s', 'q', every => '1 month')")
    db.execute("select pgqueue.schedule('s', 'q', every => '1 hour')")
    make_due(db)
    assert one(db, FIRE) == 1
    (slot,) = column(db, SLOTS)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", slot)
