"""The scripts for psql in sql/ops, as a reader runs them."""

import os
import re
import subprocess

import psycopg
import pytest
from conftest import column, one
from documents import REPO
from worker_harness import wait_until

OPS = REPO / "sql/ops"
SCRIPTS = sorted(path.stem for path in OPS.iterdir())
HOSTILE = ['it\'s "100%"', "a\\b_%s", "%L %%", "é" * 100, "tab\tesc\x1b[31m\nnl\x9bC1"]


@pytest.fixture
def run(db, role):
    db.execute("select pgqueue.grant_access(%s, 'reader')", (role,))

    def run(script: str, encoding: str = "UTF8", **variables: str) -> str:
        """Run a script as a reader, and return what it prints."""
        given = [f"--set={name}={value}" for name, value in variables.items()]
        ran = subprocess.run(
            ["psql", "-X", *given, "-U", role, "-f", OPS / f"{script}.sql"],
            env=os.environ
            | {
                "PGDATABASE": db.info.dbname,
                "PGCLIENTENCODING": encoding,
                # A script uses no backslash that this would take for an escape.
                "PGOPTIONS": "-c standard_conforming_strings=off",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,
        )
        assert ran.returncode == 0
        said = ran.stdout.decode("utf8" if encoding == "UTF8" else "latin1")
        assert "psql:" not in said, said
        return "\n".join(line.rstrip() for line in said.splitlines())

    return run


def do(db: psycopg.Connection, *queries: str) -> None:
    for query in queries:
        db.execute(query)


@pytest.mark.parametrize("script", SCRIPTS)
def test_nothing_is_wrong_where_there_is_nothing(run, script):
    said = run(script)
    assert "ERROR" not in said and len(said.splitlines()) < 8


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_that_may_not_read_says_so_and_fails(db, role, script):
    ran = subprocess.run(
        ["psql", "-X", "-U", role, "-f", OPS / f"{script}.sql"],
        env=os.environ | {"PGDATABASE": db.info.dbname},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 3 and "permission denied" in ran.stderr


def test_top_shows_queues_with_their_last_minutes_and_what_runs(db, run):
    do(
        db,
        "select pgqueue.enqueue('mail', kind => 'welcome') from generate_series(1, 12)",
        "select pgqueue.complete(id, token) from pgqueue.claim('mail', 'w', 9)",
        # Four in this minute, three five minutes ago, two at the beginning.
        "update pgqueue.run set finished_at = clock_timestamp() - interval '1 minute'"
        " * case when job_id <= 4 then 0 when job_id <= 7 then 5 else 28 end",
        "select pgqueue.progress(id, token, 40, 100) from pgqueue.claim('mail', 'worker 1')",
        "update pgqueue.job set claimed_at = now() - interval '50 hours 2 minutes',"
        " lease_expires_at = now() - interval '1 s' where worker is not null",
        "update pgqueue.job set run_at = now() - interval '90 minutes' where worker is null",
        "select pgqueue.enqueue('reports')",
        "select pgqueue.pause('reports')",
    )
    said = run("top")
    head, _, *lines = re.sub(r"(\d\d:\d\d):\d\d(?= )", r"\1:SS", said).splitlines()
    version = one(db, "select pgqueue.version()")
    assert head.startswith(f"pgqueue {version} on {db.info.dbname}, ")
    spark = lines[1][69:].strip()
    assert spark == "▄" + 22 * " " + "▆    █"
    assert [line[:69].rstrip() for line in lines[:6]] == [
        "QUEUE               READY          RUN   DEAD   OLDEST  DONE/s  FAIL",
        "mail                    2 ######     0      0 01:30:SS     0.0    0%",
        "reports                 1 ###        0      0 00:00:SS     0.0     -",
        "",
        "LONGEST RUNNING  KIND             WORKER                     FOR",
        "10               welcome          worker 1              50:02:SS   ex",
    ]
    assert lines[2].endswith(" - paused")
    assert lines[5].endswith("expired  ####...... 40%")
    assert max(map(len, said.splitlines())) <= 100
    assert "4" + 22 * " " + "6    8" in run("top", encoding="LATIN1")


def test_top_cuts_no_number(db, run):
    do(
        db,
        "select pgqueue.enqueue('mail', run_at => now() - interval '500 days')",
        "select count(*) from pgqueue.claim('mail', 'w', lease => '30 days')",
        "update pgqueue.job set claimed_at = now() - interval '200000 hours'",
        "select pgqueue.enqueue('late', run_at => now() - interval '500 days')",
    )
    said = run("top")
    for shown in r" 12000:00:\d\d ", r" 200000:00:\d\d ", r" 719:59:\d\d":
        assert re.search(shown, said), said


def test_top_has_the_worst_finding_of_each_check_of_health(db, run):
    do(
        db,
        "select pgqueue.enqueue(q, run_at => now() - interval '2 days')"
        " from unnest(array['mail', 'reports']) as q",
    )
    found = [line for line in run("top").splitlines() if " waits: " in line]
    assert len(found) == 1
    assert found[0].startswith("critical waits: 1 of 2, queue mail: job 1 ")
    late = "now() - interval '1 day' - n * interval '1 hour'"
    do(
        db,
        f"select pgqueue.enqueue('q ' || n, run_at => {late}) from generate_series(1, 9) as n",
    )
    assert "critical waits: 1 of 11, queue mail: job 1 " in run("top")


def test_top_is_drawn_again_in_one_place(db, role, run):
    """It never ends by itself, and psql drops the query when its session is ended."""
    run("top")
    process = subprocess.Popen(
        ["psql", "-X", "-v", "every=0.1", "-U", role, "-f", OPS / "top.sql"],
        env=os.environ | {"PGDATABASE": db.info.dbname},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    said = b""
    while said.count(b"\033[H") < 3:
        said += os.read(process.stdout.fileno(), 1000)
    process.terminate()
    process.wait(20)
    _, first, second, _ = said.split(b"\033[H", 3)
    version = one(db, "select pgqueue.version()").encode()
    assert first.startswith(b"pgqueue " + version)
    assert first.endswith(b"\033[K\033[J\n")
    # But for the clock in the first line.
    assert first.partition(b"\n")[2] == second.partition(b"\n")[2]


def test_waits_draws_a_histogram_of_each_queue(db, run):
    do(
        db,
        "select pgqueue.enqueue(q) from unnest(array['mail', 'other']) as q, generate_series(1, 30)",
        "select pgqueue.complete(id, token) from pgqueue.claim_from(array['mail', 'other'], 'w', 60)",
        "update pgqueue.run set waited = interval '2 ms', taken = interval '1 day'",
        "update pgqueue.run set waited = interval '40 ms', taken = interval '20 s'"
        " where queue = 'mail' and job_id <= 20",
        "update pgqueue.run set taken = '1 min' where job_id = 1",
        "select pgqueue.cancel(pgqueue.enqueue('mail'))",  # which never began
    )
    assert run("waits", queue="mail").splitlines()[2:] == [
        " mail  | up to 3 ms   |     10 | ##########             |       |",
        " mail  | up to 10 ms  |        |                        |       |",
        " mail  | up to 30 ms  |        |                        |       |",
        " mail  | up to 100 ms |     20 | ####################   |       |",
        *(
            f" mail  | up to {step:6} |        |                        |       |"
            for step in ("300 ms", "1 s", "3 s", "10 s")
        ),
        " mail  | up to 30 s   |        |                        |    19 | ####################",
        " mail  | up to 1 min  |        |                        |       |",
        " mail  | up to 5 min  |        |                        |     1 | ##",
        *(
            f" mail  | up to {step:6} |        |                        |       |"
            for step in ("15 min", "1 h", "3 h", "12 h", "1 day")
        ),
        " mail  | more         |        |                        |    10 | ###########",
        "(17 rows)",
    ]
    assert " other | " in run("waits")


def test_dead_brings_the_call_that_sends_each_error_back(db, run):
    do(
        db,
        "select pgqueue.enqueue('mail', kind => 'welcome') from generate_series(1, 3)",
        "select pgqueue.fail(id, token, e'KeyError: \\'' || id || e'\\'\\nat line 1', permanent => true)"
        " from pgqueue.claim('mail', 'w', 3)",
        "update pgqueue.dead_job set died_at = '2026-03-01 12:00' ",
    )
    assert run("dead", queue="mail").splitlines() == [
        "* Record 1",
        "jobs    3",
        "queue   mail",
        "kind    welcome",
        "died    2026-03-01 12:00:00 to 2026-03-01 12:00:00",
        "sample  3: KeyError: '3'",
        "redrive select pgqueue.redrive('mail', 'welcome', error_like => 'KeyError: %',"
        " max_jobs => 1000, dry_run => true);",
    ]
    assert "KeyError" not in run("dead", queue="other")


def calls(said: str, label: str) -> list[str]:
    return re.findall(rf"^{label} +(select .*;)$", said, re.M)


def test_the_calls_of_dead_are_right_whatever_the_names_and_errors(db, run):
    for name in HOSTILE[:4]:
        do(
            db,
            f"select pgqueue.enqueue({sql_text(name)}, kind => {sql_text(name)})",
            f"select pgqueue.fail(id, token, {sql_text(name + chr(27))}, permanent => true)"
            f" from pgqueue.claim({sql_text(name)}, 'w')",
        )
    found = calls(run("dead"), "redrive")
    assert len(found) == 4
    for call in found:
        assert len(column(db, call.replace("dry_run => true", "dry_run => false"))) == 1
    assert column(db, "select id from pgqueue.dead_job") == []


def sql_text(text: str) -> str:
    return psycopg.sql.quote(text)


def test_no_script_sends_the_terminal_what_others_have_named(db, run):
    for name in HOSTILE:
        text = sql_text(name)
        do(
            db,
            f"select pgqueue.enqueue({text}, kind => {text}) from generate_series(1, 4)",
            f"select pgqueue.fail(id, token, {text}, permanent => true) from pgqueue.claim({text}, {text})",
            f"select pgqueue.complete(id, token) from pgqueue.claim({text}, {text})",
            f"select count(*) from pgqueue.claim({text}, {text})",
        )
    do(
        db,
        "update pgqueue.job set lease_expires_at = now() - interval '1 hour' where worker is not null",
    )
    for script in SCRIPTS:
        said = run(script)
        assert re.findall(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", said) == []
        assert "it's" in said, script
    assert max(map(len, run("top").splitlines())) <= 100


def test_stuck_names_who_has_locked_a_table_or_a_job(db, run, connect):
    do(db, "select pgqueue.enqueue('q')")
    other = connect(autocommit=False)
    other.execute("select from pgqueue.job for update")
    end = f"select pg_terminate_backend({other.info.backend_pid});"
    (hint,) = calls(run("stuck"), "fix")
    assert hint == end
    other.rollback()
    other.execute("lock table pgqueue.job in share mode")
    waiting = connect()
    waiting.pgconn.send_query(b"select pgqueue.enqueue('q')")
    wait_until(lambda: "is locked in Share mode" in run("stuck"))
    assert calls(run("stuck"), "fix") == [end, end]
    do(db, end)
    wait_until(lambda: "locked" not in run("stuck"))
    waiting.close()
    ghost = connect(autocommit=False)
    ghost.execute("select from pgqueue.job for update")
    ghost.execute("prepare transaction 'it''s a ghost'")
    (end,) = re.findall("^fix +(rollback .*;)$", run("stuck"), re.M)
    do(db, end)
    assert "locked" not in run("stuck")


@pytest.mark.parametrize("worker", ["w", "its row is locked: session 1"])
def test_stuck_names_who_has_locked_a_job_whose_lease_expired(db, run, connect, worker):
    do(
        db,
        "select pgqueue.enqueue('q')",
        f"select from pgqueue.claim('q', '{worker}')",
        "update pgqueue.job set lease_expires_at = now() - interval '1 hour'",
    )
    other = connect(autocommit=False)
    other.execute("select from pgqueue.job for update")
    (end,) = calls(run("stuck"), "fix")
    assert end == f"select pg_terminate_backend({other.info.backend_pid});"
    do(db, end)
    wait_until(
        lambda: calls(run("stuck"), "fix") == ["select * from pgqueue.maintain();"]
    )


def test_stuck_has_a_lost_lease_ended_where_it_fills_a_cap(db, run):
    do(
        db,
        "select pgqueue.configure('q', max_running => 1)",
        "select pgqueue.enqueue('q', run_at => now() - interval '1 hour') from generate_series(1, 2)",
        "select from pgqueue.claim('q', 'w')",
        "update pgqueue.job set lease_expires_at = clock_timestamp() where worker is not null",
    )
    assert set(calls(run("stuck"), "fix")) == {"select * from pgqueue.maintain();"}
    db.execute("select from pgqueue.maintain()")
    assert len(column(db, "select id from pgqueue.claim('q', 'w', 2)")) == 1
    assert re.findall("^fix +(raise max_running .*)$", run("stuck"), re.M)


def test_stuck_prints_the_calls_that_fix_it(db, run):
    do(
        db,
        "select pgqueue.enqueue(q) from unnest(array['expired', 'slow', 'paused', 'kind', 'group', 'pair', 'idle']) as q",
        "update pgqueue.job set group_key = 'it''s' where queue in ('group', 'pair')",
        "select count(*) from pgqueue.claim_from(array['expired', 'slow'], 'w', 2)",
        "update pgqueue.job set claimed_at = now() - interval '1 hour', lease_expires_at = now() + interval '2 hours'"
        " * case queue when 'slow' then 1 else -1 end where worker is not null",
        "select pgqueue.pause('paused')",
        "select pgqueue.pause('kind', kind => 'kind')",
        "select pgqueue.pause('group', group_key => 'it''s')",
        "select pgqueue.pause(null, kind => 'pair', group_key => 'it''s')",
    )
    said = run("stuck")
    assert re.findall("^fix +(.*)$", said, re.M) == [
        "select * from pgqueue.maintain();",
        "select pgqueue.cancel(2, 'too slow');",
        "start a worker",
        "select pgqueue.resume('paused');",
        "select pgqueue.resume('kind', kind => 'kind');",
        "select pgqueue.resume('group', group_key => 'it''s');",
        "select pgqueue.resume('pair', kind => 'pair', group_key => 'it''s');",
    ]
    do(db, *calls(said, "fix"))
    queues = "array['paused', 'kind', 'group', 'pair', 'idle']"
    claimed = column(db, f"select queue from pgqueue.claim_from({queues}, 'w', 9)")
    assert len(claimed) == 5
    fixed = run("stuck")
    assert re.findall("^queue +(.*)$", fixed, re.M) == ["slow", "expired"]


def test_stuck_fixes_what_keeps_the_job_that_another_waits_for(db, run, connect):
    do(
        db,
        "select pgqueue.configure('cap', max_running => 1)",
        "select pgqueue.configure(q, group_limit => 1, group_on_retry => 'block') from unnest(array['one', 'two', 'three']) as q",
        "select pgqueue.enqueue('cap') from generate_series(1, 2)",
        # The second comes first, but the first has been due for longer.
        "select pgqueue.enqueue(q, kind => k, group_key => 'g', priority => n, run_at => now() - interval '1 hour' / n)"
        " from unnest(array['one', 'two', 'three']) as q, (values ('one', 1), ('two', 2)) as k (k, n)",
        "select from pgqueue.claim_from(array['cap', 'one'], 'w', 2)",
        "update pgqueue.job set lease_expires_at = clock_timestamp() where worker is not null",
        "select pgqueue.fail(id, token, 'e', retry_in => '0') from pgqueue.claim('two', 'w')",
        "select pgqueue.pause(q, kind => 'two') from unnest(array['two', 'three']) as q",
    )
    fixes = [f"select pgqueue.resume('{q}', kind => 'two');" for q in ("two", "three")]
    end = "select * from pgqueue.maintain();"
    assert sorted(calls(run("stuck", queue="cap"), "fix")) == [end]
    assert calls(run("stuck", queue="one"), "fix") == [end]
    for queue, fix in zip(("two", "three"), fixes, strict=True):
        assert set(calls(run("stuck", queue=queue), "fix")) == {fix}
    other = connect(autocommit=False)
    other.execute("select from pgqueue.job where worker is not null for key share")
    end = f"select pg_terminate_backend({other.info.backend_pid});"
    for queue in "cap", "one":
        assert calls(run("stuck", queue=queue), "fix") == [end]
    do(db, end)
    wait_until(lambda: "locked" not in run("stuck"))
    do(db, "select from pgqueue.maintain()", *fixes)
    claim = "select kind from pgqueue.claim_from(array['cap', 'one', 'two', 'three'], 'w', 9)"
    assert sorted(column(db, claim)) == ["cap", "two", "two", "two"]


def test_what_stuck_and_health_resume_is_no_more_than_keeps_the_job(db, run):
    do(
        db,
        "select pgqueue.enqueue('q', kind => 'k', group_key => 'g', run_at => now() - interval '1 hour')",
        "select pgqueue.enqueue('q', kind => 'other')",
        "select pgqueue.pause('q')",
        "select pgqueue.resume('q', kind => 'k')",
        "select pgqueue.pause('q', group_key => 'g')",
    )
    (fix,) = calls(run("stuck"), "fix")
    hint = "select h.hint from pgqueue.health() as h where h.check = 'waits'"
    assert fix == one(db, hint) + ";"
    do(db, fix)
    assert column(db, "select kind from pgqueue.claim('q', 'w', 9)") == ["k"]


def test_stuck_shows_what_should_run_behind_what_is_paused(db, run, connect):
    do(
        db,
        "select pgqueue.pause('q', kind => 'report')",
        "select pgqueue.pause(kind => 'mail', group_key => 'g')",
        "select pgqueue.pause(kind => 'sms')",
        "select pgqueue.resume('q', kind => 'sms', group_key => 'h')",
        "select pgqueue.configure('q', group_key => 'h', weight => 2)",
        "select pgqueue.enqueue('q', kind => 'report') from generate_series(1, 3)",
        "select pgqueue.enqueue('q', kind => 'mail', group_key => 'g')",
        "select pgqueue.enqueue('q', kind => 'sms')",
        "select pgqueue.enqueue('q', kind => 'sms', group_key => 'h')",
        "select pgqueue.enqueue('q', kind => 'mail')",
    )
    shown = re.findall("^(?:kind|fix) +(.*)$", run("stuck"), re.M)
    resume = "select pgqueue.resume('q', kind => 'report');"
    assert shown == ["sms", "start a worker", "report", resume]
    do(db, "select pgqueue.pause('q', group_key => 'h')")
    shown = re.findall("^(?:kind|fix) +(.*)$", run("stuck"), re.M)
    assert shown == ["mail", "start a worker", "report", resume]
    for number in range(12):
        do(
            db,
            f"select pgqueue.enqueue('other {number}', run_at => now() - interval '1 hour')",
            f"select pgqueue.pause('other {number}')",
        )
    assert "start a worker" in run("stuck")


def test_stuck_names_each_queue_before_it_names_more_of_one(db, run):
    """Fifty jobs of a worker that had died used to hide those of another queue."""
    db.execute("select pgqueue.enqueue('many') from generate_series(1, 20)")
    rare = one(db, "select pgqueue.enqueue('rare')")
    for queue, ago in ("many", "1 hour"), ("rare", "2 minutes"):
        db.execute("select from pgqueue.claim(%s, 'w', 20)", (queue,))
        db.execute(
            "update pgqueue.job set lease_expires_at = now() - %s::interval where queue = %s",
            (ago, queue),
        )
    shown = re.findall(r"^id +(\d+)$", run("stuck"), re.M)
    assert len(shown) == 10 and int(shown[1]) == rare


def test_stuck_points_to_the_job_that_others_wait_for(db, run):
    do(
        db,
        "select pgqueue.configure('q', group_limit => 1, group_on_retry => 'block')",
        "select pgqueue.enqueue('q', group_key => 'waits for the retry of job 7 at') from generate_series(1, 2)",
        "select pgqueue.fail(id, token, 'boom', retry_in => '1 h') from pgqueue.claim('q', 'w')",
        "select from pgqueue.claim('q', 'w')",
        "select pgqueue.enqueue('later', after => array[1])",
    )
    found = set(calls(run("stuck"), "fix"))
    assert found == {"select pgqueue.run_now(1);", "select pgqueue.why(1);"}
