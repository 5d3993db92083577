"""The recipes of docs/moving.md, on what the packages of the other systems make: `make move-in`."""

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from importlib import resources
from pathlib import Path

import documents
import psycopg
import pytest
from conftest import Connect, column, one
from projects import PACKAGE, Project

SECTIONS = documents.sections("docs/moving.md")
NODE = Path(os.environ.get("MOVE_IN", documents.REPO / ".venv/move-in"))
JOBS = """
select kind, payload, priority, round(extract(epoch from run_at - now()) / 3600)::int, unique_key,
    group_key, max_attempts, headers ->> 'moved_from'
from pgqueue.job order by id
"""


def move(db: psycopg.Connection, section: str) -> int:
    """Run a recipe, and say how many jobs it moved."""
    for block in documents.blocks(SECTIONS[section], "sql"):
        row = db.execute(block.text).fetchone()
    assert row
    return row[0]


def work_off(db: psycopg.Connection, queue: str) -> list[str]:
    """Run what is due, and return the kinds in their order."""
    kinds: list[str] = []
    while job := db.execute(
        "select id, token, kind from pgqueue.claim(%s, 'w')", (queue,)
    ).fetchone():
        db.execute("select pgqueue.complete(%s, %s)", job[:2])
        kinds.append(job[2])
    return kinds


def test_every_system_of_the_page_is_tested() -> None:
    assert list(SECTIONS)[1:] == [
        "procrastinate", "pgmq", "graphile-worker", "Celery on Redis"
    ]  # fmt: skip


# procrastinate


@pytest.fixture
def procrastinate(db):
    procrastinate = pytest.importorskip("procrastinate", reason="make move-in")
    connector = procrastinate.SyncPsycopgConnector(conninfo=f"dbname={db.info.dbname}")
    app = procrastinate.App(connector=connector)
    with app.open():
        app.schema_manager.apply_schema()

        def defer(task: str, **options) -> int:
            args = options.pop("args", {})
            return app.configure_task(task, queue="mails", **options).defer(**args)

        yield defer


def test_what_waits_in_procrastinate_moves_and_what_runs_stays(db, procrastinate):
    running = procrastinate("first", lock="order 1")
    behind = procrastinate("behind", lock="order 1", priority=50)
    procrastinate("plain", args={"to": "ada"})
    later = {"hours": 2}
    procrastinate("later", schedule_in=later, priority=7, queueing_lock="nightly")
    procrastinate("urgent", priority=1000, lock="order 2")
    assert one(db, "select count(*) from procrastinate_jobs") == 5
    db.execute("update procrastinate_jobs set status = 'doing' where id = %s", (running,))  # fmt: skip
    assert move(db, "procrastinate") == 3
    assert db.execute(JOBS).fetchall() == [
        ("plain", {"to": "ada"}, 0, 0, None, None, 20, "procrastinate 3"),
        ("later", {}, 7, 2, "nightly", None, 20, "procrastinate 4"),
        ("urgent", {}, 100, 0, None, "order 2", 20, "procrastinate 5"),
    ]
    assert column(db, "select id from procrastinate_jobs order by id") == [running, behind]  # fmt: skip
    assert work_off(db, "mails") == ["urgent", "plain"]
    db.execute("update procrastinate_jobs set status = 'succeeded' where id = %s", (running,))  # fmt: skip
    assert [move(db, "procrastinate"), move(db, "procrastinate")] == [1, 0]
    assert work_off(db, "mails") == ["behind"]


def test_a_move_that_is_refused_moves_nothing(db, procrastinate):
    procrastinate("plain")
    procrastinate("refused", lock="x" * 201)
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        move(db, "procrastinate")
    assert one(db, "select count(*) from procrastinate_jobs") == 2
    assert one(db, "select count(*) from pgqueue.job") == 0


# pgmq


def test_what_waits_in_pgmq_moves_and_what_was_read_stays(db, connect: Connect):
    pytest.importorskip("pgmq", reason="make move-in")
    db.execute("create schema pgmq")
    db.execute(resources.files("pgmq").joinpath("sql/pgmq.sql").read_text())
    db.execute("select pgmq.create('emails')")
    send = "select pgmq.send('emails', %s::jsonb, %s::jsonb, %s::int)"
    for name, headers, delay in (
        ("read", None, 0),
        ("locked", None, 0),
        ("grouped", '{"x-pgmq-group": "g", "trace": 1}', 0),
        ("later", None, 7200),
        ("lapsed", None, 0),
    ):
        db.execute(send, (f'{{"n": "{name}"}}', headers, delay))
    db.execute("select pgmq.read('emails', 3600, 1)")
    # Read before, and its time is over.
    db.execute("update pgmq.q_emails set read_ct = 1 where msg_id = 5")
    worker = connect(autocommit=False)
    worker.execute("select from pgmq.q_emails where msg_id = 2 for update")
    assert move(db, "pgmq") == 3
    moved = [(*row[1].values(), *row[3:6], row[7]) for row in db.execute(JOBS)]
    assert moved == [
        ("grouped", 0, None, "g", "pgmq 3"),
        ("later", 2, None, None, "pgmq 4"),
        ("lapsed", 0, None, None, "pgmq 5"),
    ]
    worker.rollback()
    assert [move(db, "pgmq"), move(db, "pgmq")] == [1, 0]
    assert column(db, "select msg_id from pgmq.q_emails") == [1]
    assert len(work_off(db, "emails")) == 3


# graphile-worker

ADD = """
import { createRequire } from "node:module";
const { makeWorkerUtils } = createRequire(process.argv[2] + "/")("graphile-worker");
const utils = await makeWorkerUtils({ connectionString: process.argv[3] });
await utils.migrate();
const later = new Date(Date.now() + 7200e3);
await utils.addJob("first", {}, { queueName: "order 1" });
await utils.addJob("behind", {}, { queueName: "order 1" });
await utils.addJob("plain", { to: "ada" });
await utils.addJob("later", {}, { runAt: later, jobKey: "nightly", priority: 5, maxAttempts: 7 });
await utils.addJob("urgent", [1, 2], { priority: -3, queueName: "order 2" });
await utils.addJob("exhausted", {}, { maxAttempts: 1 });
await utils.release();
"""


def test_what_waits_in_graphile_worker_moves_and_what_runs_stays(db, tmp_path):
    if not (NODE / "node_modules" / "graphile-worker").exists():
        pytest.skip("no graphile-worker here: make move-in")
    (tmp_path / "add.mjs").write_text(ADD)
    info = db.info
    url = f"postgresql:///{info.dbname}?host={info.host}&port={info.port}&user={info.user}"  # fmt: skip
    subprocess.run(["node", tmp_path / "add.mjs", NODE, url], check=True, timeout=60)
    jobs = "graphile_worker._private_jobs"
    db.execute(f"update {jobs} set locked_at = now(), locked_by = 'w' where id = 1")
    db.execute("update graphile_worker._private_job_queues set locked_at = now() where queue_name = 'order 1'")  # fmt: skip
    db.execute(f"update {jobs} set attempts = 1 where id in (4, 6)")
    assert move(db, "graphile-worker") == 3
    assert db.execute(JOBS).fetchall() == [
        ("plain", {"to": "ada"}, 0, 0, None, None, 25, "graphile-worker 3"),
        ("later", {}, -5, 2, "nightly", None, 6, "graphile-worker 4"),
        ("urgent", [1, 2], 3, 0, None, "order 2", 25, "graphile-worker 5"),
    ]
    assert work_off(db, "default") == ["urgent", "plain"]
    db.execute(f"delete from {jobs} where id = 1")
    db.execute("update graphile_worker._private_job_queues set locked_at = null")
    assert [move(db, "graphile-worker"), move(db, "graphile-worker")] == [1, 0]
    assert column(db, f"select id from {jobs}") == [6]


# Celery


@pytest.fixture
def server(tmp_path) -> Iterator[str]:
    """Start a Redis of our own, and say where it is."""
    redis = pytest.importorskip("redis", reason="make move-in")
    program = shutil.which("redis-server")
    if not program:
        pytest.skip("no redis-server here: make move-in")
    socket = tmp_path / "redis"
    options = ["--port", "0", "--unixsocket", socket, "--save", "", "--dir", tmp_path]
    running = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while not socket.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert redis.Redis(unix_socket_path=str(socket)).ping()
        yield str(socket)
    finally:
        running.terminate()
        running.wait(20)


HANDLERS = """
import pgqueue

app = pgqueue.App()


@app.job("plain")
def plain(to):
    return to


@app.job("urgent")
def urgent(args):
    return sum(args)


@app.job("middle")
def middle(): ...
"""


def test_what_waits_in_celery_moves_once_though_the_move_dies(db, server, tmp_path):
    celery = pytest.importorskip("celery", reason="make move-in")
    import redis

    app = celery.Celery(broker=f"redis+socket://{server}")
    app.conf.broker_transport_options = {"queue_order_strategy": "priority"}
    app.conf.task_default_queue = "mails"
    app.send_task("plain", kwargs={"to": "ada"})
    app.send_task("later", countdown=7200, priority=9)
    app.send_task("urgent", args=[1, 2], priority=0)
    app.send_task("stale", expires=-1)
    app.send_task("middle", priority=3)

    project = Project(tmp_path, PGDATABASE=db.info.dbname, PYTHONPATH=f"{PACKAGE}:{os.pathsep.join(sys.path)}")  # fmt: skip
    (recipe,) = documents.blocks(SECTIONS["Celery on Redis"], "python")
    project.write("move_celery.py", recipe.text)
    # One that died after its commit: the message is still aside.
    there = redis.Redis(unix_socket_path=server)
    again = there.lindex("mails", -1)
    assert again
    (command,) = documents.blocks(SECTIONS["Celery on Redis"], "sh")
    python, script, *_ = shlex.split(command.text)
    assert python == "python"
    url = f"unix://{server}"
    assert project.run(script, url, "mails").stdout == "mails 5\n"
    moved = [row[:4] for row in db.execute(JOBS)]
    assert sorted(moved, key=str) == [
        ("later", {}, -9, 2),
        ("middle", {}, -3, 0),
        ("plain", {"to": "ada"}, 0, 0),
        ("urgent", {"args": [1, 2]}, 0, 0),
    ]
    project.write("jobs.py", HANDLERS)
    project.run("-m", "pgqueue.worker", "--app", "jobs", "-q", "mails", "--burst", "-c", "1")  # fmt: skip
    ran = "select kind, result from pgqueue.run where outcome = 'completed' order by finished_at"
    assert db.execute(ran).fetchall() == [("plain", "ada"), ("urgent", 3), ("middle", None)]  # fmt: skip
    there.lpush("moving:mails", again)
    assert project.run(script, url, "mails").stdout == "mails 1\n"
    assert one(db, "select count(*) from pgqueue.job") == 1
    assert not [key for key in there.keys() if there.type(key) == b"list"]


@pytest.mark.parametrize("made_by", ["link", "group"])
def test_a_celery_task_that_others_wait_for_is_refused(db, server, tmp_path, made_by):
    celery = pytest.importorskip("celery", reason="make move-in")
    import redis

    app = celery.Celery(broker=f"redis+socket://{server}")
    second = app.signature("second")
    if made_by == "link":
        app.send_task("first", link=second)
    else:
        celery.group(second, second).apply_async()
    there = redis.Redis(unix_socket_path=server)
    waiting = there.lrange("celery", 0, -1)
    project = Project(tmp_path, PGDATABASE=db.info.dbname, PYTHONPATH=f"{PACKAGE}:{os.pathsep.join(sys.path)}")  # fmt: skip
    (recipe,) = documents.blocks(SECTIONS["Celery on Redis"], "python")
    project.write("move_celery.py", recipe.text)
    with pytest.raises(AssertionError, match="is part of a workflow"):
        project.run("move_celery.py", f"unix://{server}", "celery")
    assert one(db, "select count(*) from pgqueue.job") == 0
    assert there.lrange("celery", 0, -1) == waiting


def test_a_time_without_a_zone_is_utc_as_in_celery(db, server, tmp_path):
    celery = pytest.importorskip("celery", reason="make move-in")
    app = celery.Celery(broker=f"redis+socket://{server}")
    in_two_hours = datetime.now(UTC).replace(tzinfo=None) + timedelta(hours=2)
    app.send_task("timed", eta=in_two_hours, expires=in_two_hours)
    project = Project(tmp_path, PGDATABASE=db.info.dbname, PGTZ="Asia/Tokyo", PYTHONPATH=f"{PACKAGE}:{os.pathsep.join(sys.path)}")  # fmt: skip
    (recipe,) = documents.blocks(SECTIONS["Celery on Redis"], "python")
    project.write("move_celery.py", recipe.text)
    assert project.run("move_celery.py", f"unix://{server}", "celery").stdout == "celery 1\n"  # fmt: skip
    assert [row[:4] for row in db.execute(JOBS)] == [("timed", {}, 0, 2)]
