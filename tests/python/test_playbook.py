"""docs/playbook.md: each problem is caused, and fixed by its blocks."""

import re
import shutil
import subprocess

import documents
import psycopg
import pytest
from cluster import Cluster
from conftest import column, one
from psycopg import errors
from worker_harness import (  # noqa: F401 (fixtures)
    Workers,
    pooler,
    wait_until,
    where,
    workers,
)

ENTRIES = {
    title: [block.text for block in documents.blocks(entry, "sql")]
    for title, entry in documents.sections("docs/playbook.md").items()
}
LOSE_LEASES = (
    "update pgqueue.job set lease_expires_at = now() - interval '3 minutes'"
    " where lease_expires_at is not null"
)
DIE = "select pgqueue.fail(id, token, {}, permanent => true) from pgqueue.claim('emails', 'w', {})"
READY = "select count(*) from pgqueue.jobs where state = 'ready'"
DEAD = "select count(*) from pgqueue.dead_job"


def psql(block: str, dsn: str) -> str:
    """Run a block as it stands on the page, and return all that psql says."""
    ran = subprocess.run(
        ["psql", "-XqAt", "-v", "ON_ERROR_STOP=1", "-d", dsn],
        input=block,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, block + ran.stdout
    return ran.stdout


def test_each_entry_with_sql_is_tried_here():
    with_sql = [title for title, blocks in ENTRIES.items() if blocks]
    tested = re.findall(r'ENTRIES\["(.*?)"\]', open(__file__).read())
    assert set(with_sql) == set(tested) - {"(.*?)"}


def test_jobs_pile_up(db, dsn):
    look, shed = ENTRIES["Jobs pile up"]
    db.execute(
        "select pgqueue.enqueue('emails', kind => k)"
        " from unnest(array['newsletter', 'welcome']) as k, generate_series(1, 20)"
    )
    late = "update pgqueue.job set enqueued_at = now() - interval '2 days'"
    db.execute(f"{late} where kind = 'welcome' or id % 2 = 0")
    assert psql(look, dsn).startswith("emails|40|f|0|0.000||")
    said = psql(shed, dsn)
    assert "10 of the jobs to cancel" in said, said
    kinds = "select kind, count(*) from pgqueue.job group by kind order by kind"
    assert db.execute(kinds).fetchall() == [("newsletter", 10), ("welcome", 20)]
    db.execute(
        "select pgqueue.complete(id, token) from pgqueue.claim('emails', 'w', 20)"
    )
    assert psql(look, dsn).startswith("emails|10|f|1|0.067|00:02:30|")
    db.execute(
        "select pgqueue.complete(id, token) from pgqueue.claim('emails', 'w', 20)"
    )
    assert psql(look, dsn) == ""


def test_nothing_moves(db, dsn):
    look, fix = ENTRIES["Nothing moves"]
    for queue in "emails", "hung", "lost":
        db.execute("select pgqueue.enqueue(%s)", (queue,))
    db.execute("select pgqueue.pause('emails')")
    db.execute("select pgqueue.claim('lost', 'w')")
    db.execute(LOSE_LEASES)
    db.execute("select pgqueue.claim('hung', 'w', lease => '1 hour')")
    db.execute(
        "update pgqueue.job set claimed_at = now() - interval '1 hour' where queue = 'hung'"
    )
    said = psql(look, dsn)
    assert "hung|slow|01:00:" in said and "lost|expired|00:03:" in said
    assert said.endswith("\nits queue is paused\n")
    psql(fix, dsn)
    waiting = "select queue from pgqueue.claim_from(array['emails', 'lost'], 'w', 9)"
    assert sorted(column(db, waiting)) == ["emails", "lost"]
    db.execute(LOSE_LEASES)  # that worker was ended
    assert column(db, "select pgqueue.claim('hung', 'w')") == []
    gone = "select outcome from pgqueue.run where queue = 'hung'"
    assert column(db, gone) == ["cancelled"]


def test_the_first_job_of_a_queue_is_the_one_that_has_been_due_for_longest(db, dsn):
    look, _ = ENTRIES["Nothing moves"]
    db.execute("select pgqueue.enqueue('emails') from generate_series(1, 3)")
    # So that it is not the first in the table.
    db.execute("update pgqueue.job set run_at = run_at where id = 1")
    db.execute("analyze pgqueue.job")
    assert psql(look, dsn).startswith("ready: next in its queue")


def test_everything_is_slow(db, dsn, connect):
    look, end = ENTRIES["Everything is slow"]
    db.execute("select pgqueue.enqueue('emails')")
    db.execute("select pgqueue.complete(id, token) from pgqueue.claim('emails', 'w')")
    holder = connect(autocommit=False)
    holder.execute("select 'held' from pgqueue.queue")
    pid = holder.info.backend_pid
    said = psql(look, dsn)
    assert "|emails|1|00:00:00" in said and f"\n{pid}|idle in transaction|" in said
    psql(end, dsn)
    assert str(pid) in psql(look, dsn), "it is not old enough"
    psql(end.replace("1 hour", "0 s"), dsn)
    with pytest.raises(errors.AdminShutdown):
        holder.execute("select")
    wait_until(lambda: f"\n{pid}|" not in psql(look, dsn))


def test_who_holds_what_is_shown_and_ended_by_members_of_two_roles_and_no_operator(
    db, dsn, connect, role
):
    look, end = ENTRIES["Everything is slow"]
    end = end.replace("1 hour", "0 s")
    db.execute(f"select pgqueue.grant_access('{role}', 'operator')")
    on_call = psycopg.conninfo.make_conninfo(dsn, user=role)
    holder = connect(autocommit=False)
    holder.execute("select 'held' from pgqueue.queue")
    pid = holder.info.backend_pid
    assert f"\n{pid}|||<insufficient privilege>" in "\n" + psql(look, on_call)
    assert psql(end, on_call) == ""
    db.execute(f"create role {role}_dba in role pg_read_all_stats, pg_signal_backend")
    try:
        db.execute(f"grant {role}_dba to {role}")
        assert f"\n{pid}|idle in transaction|" in "\n" + psql(look, on_call)
        # Only a superuser ends a session of one.
        holder.close()
        holder = connect(autocommit=False, user=role)
        holder.execute("select pg_current_xact_id()")
        assert psql(end, on_call) == "t\n"
    finally:
        db.execute(f"drop role {role}_dba")


def test_one_job_kills_its_workers(db, dsn):
    look, fix = ENTRIES["One job kills its workers"]
    killer = one(db, "select pgqueue.enqueue('emails', '{\"n\": 1}', kind => 'k')")
    db.execute(
        "select pgqueue.enqueue('emails', kind => 'fine') from generate_series(1, 3)"
    )
    # A busy worker always holds others as well, which may do nothing for that.
    for other in "v", "v", "w":
        db.execute("select pgqueue.claim('emails', 'v', kinds => array['k'])")
        db.execute(
            "select pgqueue.claim('emails', %s, 9, kinds => array['fine'])", (other,)
        )
        db.execute(LOSE_LEASES)
        db.execute("select pgqueue.maintain()")
    found = psql(look, dsn).splitlines()
    assert len(found) == 4 and found[0].startswith(f"{killer}|k|3|the lease expired: ")
    psql(fix.replace("4711", str(killer)), dsn)
    assert column(db, "select distinct kind from pgqueue.job") == ["fine"]
    again = one(db, "select pgqueue.rerun(%s)", killer)
    assert one(db, "select payload from pgqueue.job where id = %s", again) == {"n": 1}


def test_a_batch_never_calls_back(db, dsn):
    look, fix = ENTRIES["A batch never calls back"]
    batches = [
        one(db, """select pgqueue.create_batch('mail', '{"subject": "hello"}')""")
        for _ in "abc"
    ]
    db.execute("select pgqueue.enqueue('pages', batch_id => %s)", [batches[1]])
    db.execute("update pgqueue.batch set created_at = created_at - interval '2 days'")
    db.execute("select pgqueue.configure('mail', max_payload_bytes => 10)")
    db.execute("select pgqueue.close_batch(%s)", [batches[2]])
    assert [line.split("|")[0] for line in psql(look, dsn).splitlines()] == [
        str(id) for id in batches[:2]
    ]
    db.execute("select pgqueue.configure('mail', reset => true)")
    psql(fix, dsn)
    called = "select payload -> 'batch' ->> 'id' from pgqueue.job where queue = 'mail'"
    assert {int(id) for id in column(db, called)} == {batches[0], batches[2]}


def test_a_bad_deploy_filled_the_dead_letters(db, dsn):
    count_and_try, portion = ENTRIES["A bad deploy filled the dead letters"]
    db.execute("select pgqueue.enqueue('emails') from generate_series(1, 260)")
    db.execute(DIE.format("'KeyError: ''old'''", 5))
    db.execute("update pgqueue.dead_job set died_at = now() - interval '3 days'")
    db.execute(DIE.format("'TimeoutError'", 5))
    db.execute(DIE.format("'KeyError: ' || id", 250))
    said = psql(count_and_try, dsn)
    assert said.count("NOTICE:  1 of the dead jobs to redrive: KeyError: ") == 20, said
    assert (one(db, READY), one(db, DEAD)) == (1, 259)
    assert psql(portion, dsn) == "100\n"
    assert (one(db, READY), one(db, DEAD)) == (101, 159)
    # Interactively, until somebody stops it.
    watched = subprocess.Popen(
        ["psql", "-XqAt", "-d", dsn],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    watched.stdin.write(portion.replace(";", " \\watch 0.1"))
    watched.stdin.close()
    wait_until(lambda: one(db, DEAD) == 10)
    watched.terminate()
    watched.wait(20)
    left = "select distinct left(error, 12) from pgqueue.dead_job order by 1"
    assert column(db, left) == ["KeyError: 'o", "TimeoutError"]


def test_restored_from_a_backup_nothing_runs_twice(db, dsn, tmp_path):
    hold, take_out = ENTRIES["Restored from a backup"]
    db.execute("select pgqueue.enqueue('emails') from generate_series(1, 10)")
    db.execute("select pgqueue.claim('emails', 'w', 2)")  # run while it is dumped
    follows = one(db, "select pgqueue.enqueue('reports', after => '{1,2,3}')")
    for name in "news", "quiet":
        db.execute(
            "select pgqueue.schedule(%s, 'emails', every => '1 second', catch_up => 'all')",
            (name,),
        )
    db.execute("select pgqueue.pause_schedule('quiet')")
    backup = tmp_path / "backup.sql"
    dump = ["pg_dump", "-f", backup, "-d", dsn]
    dumped = subprocess.run(dump, capture_output=True, text=True)
    if "server version mismatch" in dumped.stderr:
        pytest.skip("pg_dump is older than the server")
    assert dumped.returncode == 0, dumped.stderr
    db.execute(
        "select pgqueue.complete(id, token) from pgqueue.job where token is not null"
    )
    done = "select id, token from pgqueue.claim('emails', 'w', 3)"
    db.execute(f"select pgqueue.complete(id, token) from ({done}) as d")
    lost_id = one(db, "select pgqueue.enqueue('emails')")
    (lost_token,) = column(db, "select last_value from pgqueue.token_seq")
    ran = column(db, "select job_id from pgqueue.run order by job_id")
    assert len(ran) == 5

    name = f"{db.info.dbname}_restored"
    db.execute(f"create database {name}")
    try:
        restored_dsn = psycopg.conninfo.make_conninfo(dsn, dbname=name)
        subprocess.run(
            ["psql", "-Xq", "-o", "/dev/null", "-f", backup, "-d", name], check=True
        )
        with psycopg.connect(restored_dsn, autocommit=True) as restored:
            psql(hold, restored_dsn)
            claim = "select id from pgqueue.claim('emails', 'w', 20)"
            assert column(restored, claim) == []
            assert one(restored, "select pgqueue.enqueue('emails')") > lost_id
            restored.cursor().executemany(
                "insert into ran values (%s)", [(id,) for id in ran]
            )
            resumed_at = one(restored, "select clock_timestamp()")
            psql(take_out, restored_dsn)
            restored.execute(LOSE_LEASES)
            waits = column(restored, claim)
            assert len(waits) == 6 and not set(waits) & set(ran)
            least = "select min(token) from pgqueue.job where token is not null"
            assert one(restored, least) > lost_token
            reasons = (
                "select result #>> '{}' from pgqueue.run where outcome = 'cancelled'"
            )
            assert column(restored, reasons) == ["ran before the restore"] * 5
            report = "select id from pgqueue.claim('reports', 'w')"
            wait_until(lambda: column(restored, report) == [follows])
            paused = "select paused from pgqueue.schedules order by name"
            assert column(restored, paused) == [False, True]
            slot = "min((headers ->> 'slot')::timestamptz)"
            late = f"select {slot} >= %s from pgqueue.job where headers ? 'slot'"
            wait_until(
                lambda: one(restored, "select true from pgqueue.claim('emails', 'w')")
            )
            assert one(restored, late, resumed_at)
    finally:
        db.execute(f"drop database {name} with (force)")


@pytest.mark.parametrize("is_held", [False, True])
def test_failover_to_a_standby_that_lagged_may_give_a_token_again(is_held):
    """It comes up as the data directory was before the last claim."""
    (look,) = ENTRIES["Failover"]
    claim = "select id, token from pgqueue.claim('emails', 'w', lease => '1 hour')"
    with Cluster(fast=True) as cluster:
        dsn = where(cluster)
        with psycopg.connect(dsn, autocommit=True) as db:
            db.execute("create extension pgqueue")
            db.execute("select pgqueue.enqueue('emails')")
        assert psql(look, dsn) == ""  # no standby here
        cluster.stop()
        standby = cluster.data.with_name("standby")
        subprocess.run(["cp", "-a", cluster.data, standby], check=True)
        cluster.start()
        with psycopg.connect(dsn, autocommit=True) as db:
            lost = db.execute(claim).fetchone()
        cluster.stop()
        shutil.rmtree(cluster.data)
        standby.rename(cluster.data)
        cluster.start()
        if is_held:
            psql("select pgqueue.after_failover(always => true)", dsn)
        with psycopg.connect(dsn, autocommit=True) as db:
            given = db.execute(claim).fetchone()
            assert given[0] == lost[0]
            assert (given == lost) is not is_held
            if is_held:
                with pytest.raises(psycopg.DatabaseError, match="lease"):
                    db.execute("select pgqueue.complete(%s, %s)", lost)


def test_after_a_failover_workers_find_the_new_primary_by_themselves(tmp_path):
    with Cluster(fast=True) as old, Cluster(fast=True) as new:
        for cluster in old, new:
            with psycopg.connect(where(cluster), autocommit=True) as db:
                db.execute("create extension pgqueue")
        dsn = (
            f"host=127.0.0.1,127.0.0.1 port={old.port},{new.port} user=postgres"
            " dbname=postgres target_session_attrs=read-write"
        )
        workers = Workers(dsn, tmp_path)
        try:
            workers.start("--queue", "emails")
            with psycopg.connect(where(old), autocommit=True) as db:
                db.execute("select pgqueue.enqueue('emails', kind => 'noop')")
                wait_until(lambda: one(db, "select count(*) from pgqueue.run"))
            old.stop("immediate")
            with psycopg.connect(where(new), autocommit=True) as db:
                db.execute("select pgqueue.enqueue('emails', kind => 'noop')")
                wait_until(lambda: one(db, "select count(*) from pgqueue.run"))
        finally:
            workers.end()


def test_behind_a_pooler_no_worker_parks(db, dsn, workers, pooler):  # noqa: F811
    (look,) = ENTRIES["Behind a pooler"]
    workers.start("--name", "pooled", dsn=pooler)
    wait_until(lambda: "polling every" in workers.log())
    workers.start("--name", "direct")
    wait_until(lambda: re.search(r"^direct\S*\|\d+\|t$", psql(look, dsn), re.M))
    assert re.search(r"^pooled\S*\|\d+\|f$", psql(look, dsn), re.M)
