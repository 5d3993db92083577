"""The blocks of the README and of docs/python.md, run as written, and the defaults of docs/jobs.md."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import documents
import pgqueue
import psycopg
import pytest
from conftest import column, one
from documents import REPO, Block, run_sql
from projects import PACKAGE, Project

TEXT = documents.text("README.md")
PYTHON = [block.text for block in documents.blocks(TEXT, "python")]
SHELL = documents.blocks(TEXT, "sh")
(HANDLERS,) = documents.blocks(documents.text("docs/python.md"), "python")
(COMMANDS,) = documents.blocks(documents.text("docs/python.md"), "sh")


def test_every_block_is_of_a_language_that_is_run_here():
    languages = [block.language for block in documents.blocks(TEXT)]
    assert set(languages) == {"sql", "python", "sh"}
    assert (len(PYTHON), len(SHELL)) == (1, 4)


def test_the_sql_runs_in_order_and_says_what_the_page_shows(db):
    found = documents.blocks(TEXT, "sql")
    assert sum(block.output is not None for block in found) >= 3
    for block in found:
        run_sql(block, db.info.dbname)
    assert column(db, "select outcome from pgqueue.run") == ["completed"]


# Installing


@pytest.fixture
def shell(db, tmp_path, monkeypatch):
    """Run a block of the page in a clone, on the database of the test."""
    clone = tmp_path / "clone"
    unwanted = (".git", ".venv", ".*_cache", "build", "*.egg-info", "__pycache__")
    ignore = shutil.ignore_patterns(*unwanted, "pgqueue--*.sql")
    shutil.copytree(REPO, clone, symlinks=True, ignore=ignore)
    env = {k: v for k, v in os.environ.items() if "MAKE" not in k and k != "PYTHONPATH"}
    env["PGDATABASE"] = db.info.dbname
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"

    def shell(block: Block, **more: str) -> str:
        ran = subprocess.run(
            ["sh", "-e", "-c", block.text],
            cwd=clone,
            env=env | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=100,
        )
        assert ran.returncode == 0, ran.stdout
        return ran.stdout

    return shell


def test_the_extension_installs_from_the_clone(db, shell, tmp_path):
    pg_config = os.environ.get("PG_CONFIG", "pg_config")
    found = subprocess.run([pg_config, "--pgxs"], capture_output=True, text=True)
    if found.returncode or not Path(found.stdout.strip()).exists():
        pytest.skip("no PGXS here")
    db.execute("drop extension pgqueue")
    shell(SHELL[0], DESTDIR=str(tmp_path / "server"))
    assert list((tmp_path / "server").rglob("pgqueue.control"))
    assert one(db, "select count(*) from pg_extension where extname = 'pgqueue'") == 1


def test_the_script_installs_the_same_without_an_extension(db, shell):
    version = one(db, "select pgqueue.version()")
    db.execute("drop extension pgqueue")
    shell(SHELL[1])
    assert one(db, "select pgqueue.version()") == version
    assert one(db, "select count(*) from pg_extension where extname = 'pgqueue'") == 0


def test_the_package_installs_from_the_clone_until_it_is_published(shell, tmp_path):
    assert SHELL[2].text == "pip install ./python\n"
    # Without the network: what it depends on and is built with is here.
    alone = {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    shell(SHELL[2], PIP_TARGET=str(tmp_path / "site"), **alone)
    assert (tmp_path / "site" / "pgqueue" / "pgqueue.sql").exists()


# Python


@pytest.fixture
def project(db, tmp_path) -> Project:
    """A folder with the modules that the page speaks of, on the test's database."""
    env = {"PGDATABASE": db.info.dbname, "PYTHONPATH": f"{tmp_path}:{PACKAGE}"}
    project = Project(tmp_path, **env)
    project.write("jobs.py", PYTHON[0])
    project.write("handlers.py", HANDLERS.text)
    return project


def without_moment_and_machine(log: str) -> str:
    log = re.sub(r"^\d{4}-\d\d-\d\d [\d:,]+[+-]\d{4} \d+ ", "NOW ", log, flags=re.M)
    return re.sub(r"\S+:\d+:[0-9a-f]{8}\b", "WORKER", log).strip()


def test_the_python_enqueues_and_the_worker_says_what_the_page_shows(db, project):
    enqueue, work = (shlex.split(line) for line in SHELL[3].text.splitlines())
    pgqueue.enqueue(db, "other")  # as the job of the SQL above, which had the id 1
    assert enqueue[0] == work[0] == "python"
    project.run(*enqueue[1:])
    assert one(db, "select kind from pgqueue.jobs where queue = 'emails'") == "welcome"
    ran = subprocess.run(
        [sys.executable, *work[1:]],
        cwd=project.folder,
        env=project.env | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    said, shown = (
        without_moment_and_machine(t or "") for t in (ran.stdout, SHELL[3].output)
    )
    assert (ran.returncode, said) == (0, shown)


def test_the_handlers_and_the_commands_run(db, project):
    db.execute("create table account as select 1 as id, 0 as balance")
    project.write("text", "three little words")
    for queue, kind, payload in (
        ("emails", "count words", {"path": "text"}),
        ("emails", "remind", {"to": "ada"}),
        ("reports", "pay", {"account": 1, "amount": 7}),
    ):
        pgqueue.enqueue(db, queue, payload, kind=kind)
    work, check, status = (shlex.split(line) for line in COMMANDS.text.splitlines())
    project.run(*work[1:])
    assert dict(db.execute("select kind, outcome from pgqueue.run")) == {
        "count words": "completed",
        "remind": "retry",
        "pay": "completed",
    }
    results = "select result from pgqueue.run where result is not null"
    assert column(db, results) == [{"words": 3}]
    assert one(db, "select balance from account") == 7
    assert project.run(*check[1:]).stdout.startswith("ok: ")
    assert "reports" in project.run(*status[1:]).stdout


def test_the_scripts_for_psql_run_in_the_clone(db, shell):
    pgqueue.enqueue(db, "emails")
    (scripts,) = documents.blocks(documents.text("docs/playbook.md"), "sh")
    said = shell(scripts)
    assert "LONGEST RUNNING" in said and "start a worker" in said


# Defaults


def test_the_defaults_of_the_table_are_those_in_force(db):
    """Forty jobs, so that random delays would leave any other range."""
    db.execute("select pgqueue.enqueue_many('q', array_fill('1'::jsonb, array[40]))")
    assert set(column(db, "select max_attempts from pgqueue.jobs")) == {20}
    assert set(column(db, "select priority from pgqueue.jobs")) == {0}
    leases = "select lease_expires_at - claimed_at from pgqueue.claim('q', 'w', 40)"
    assert {lease.total_seconds() for lease in column(db, leases)} == {30}
    assert 2.5 <= min(delays(db)) < max(delays(db)) <= 5
    db.execute("update pgqueue.job set run_at = now(), attempt = 18")
    db.execute("select count(*) from pgqueue.claim('q', 'w', 40)")
    assert 1800 <= min(delays(db)) < max(delays(db)) <= 3600
    kept = "select distinct (slot - extract(epoch from finished_at)::bigint / 86400 % 16 + 16) % 16"
    assert column(db, f"{kept} from pgqueue.run") == [7]

    said = dict(documents.table(documents.text("docs/jobs.md"), "default"))
    assert said["lease"].startswith("30 seconds;")
    assert said["attempts"].startswith("20;")
    assert said["backoff"].startswith(
        "5 seconds, doubled for each attempt up to 1 hour,"
    )
    assert said["finished attempts"] == "kept for 7 days"
    assert said["priority"].startswith("0, from -100 to 100;")


def delays(db: psycopg.Connection) -> list[float]:
    """Fail what is running, if anything, and return how long each job then has to wait."""
    db.execute(
        "select pgqueue.fail(id, token, 'e') from pgqueue.job where token is not null"
    )
    moment = "(select max(finished_at) from pgqueue.run where job_id = j.id)"
    waits = (
        f"select extract(epoch from run_at - {moment})::float8 from pgqueue.job as j"
    )
    return column(db, waits)
