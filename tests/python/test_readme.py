"""The README's blocks, run as written."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pgqueue
import pytest
from conftest import column, one

README = Path(__file__).parents[2] / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.M | re.S)


def test_the_sql_runs_in_order_in_a_fresh_database(db):
    db.execute("drop extension pgqueue")
    assert len(blocks("sql")) >= 3
    for block in blocks("sql"):
        ran = subprocess.run(
            ["psql", "-Xq", "-v", "ON_ERROR_STOP=1", "-d", db.info.dbname],
            input=block, capture_output=True, text=True,
        )  # fmt: skip
        assert (ran.returncode, ran.stderr) == (0, ""), f"{block}\n{ran.stderr}"
    assert column(db, "select outcome from pgqueue.run") == ["completed"]


@pytest.fixture
def here(db, tmp_path, monkeypatch) -> Path:
    """A folder with the modules that the README speaks of, in the environment."""
    (tmp_path / "jobs.py").write_text(blocks("python")[0])
    (tmp_path / "handlers.py").write_text(blocks("python")[1])
    (tmp_path / "test_jobs.py").write_text(blocks("python")[2])
    monkeypatch.setenv("PGDATABASE", db.info.dbname)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{README.parent / 'python'}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*args: str) -> str:
    command = [sys.executable, *args]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_python_enqueues_and_the_command_runs_it(db, here):
    command = shlex.split(blocks("sh")[0])
    assert command[0] == "python"
    run(
        "-c",
        "import psycopg, jobs; jobs.sign_up(psycopg.connect(autocommit=True), 'ada')",
    )
    assert one(db, "select kind from pgqueue.jobs") == "welcome"
    assert "hello ada" in run(*command[1:])
    assert column(db, "select outcome from pgqueue.run") == ["completed"]


def test_the_handlers_and_the_commands_run(db, here):
    db.execute("create table account as select 1 as id, 0 as balance")
    (here / "text").write_text("three little words")
    pgqueue.enqueue(db, "work", {"path": "text"}, kind="count words")
    pgqueue.enqueue(db, "work", {"to": "ada"}, kind="remind")
    pgqueue.enqueue(db, "work", {"account": 1, "amount": 7}, kind="pay")
    run("-m", "pgqueue.worker", "--app", "handlers", "--queue", "work", "--burst")
    outcomes = dict(db.execute("select kind, outcome from pgqueue.run"))
    assert outcomes == {
        "count words": "completed",
        "remind": "retry",
        "pay": "completed",
    }
    assert one(db, "select result from pgqueue.run where result is not null") == {
        "words": 3
    }
    assert one(db, "select balance from account") == 7

    _, check, status = blocks("sh")[1].splitlines()
    assert run(*shlex.split(check, comments=True)[1:]).startswith("ok: ")
    assert "work" in run(*shlex.split(status, comments=True)[1:])


def test_the_test_passes(here):
    assert "1 passed" in run("-m", "pytest", "-p", "no:cacheprovider", "test_jobs.py")


def test_every_public_function_is_in_the_reference(db):
    names = column(
        db,
        "select proname from pg_proc where pronamespace = 'pgqueue'::regnamespace "
        "and proname not like '\\_%' and proname <> 'version'",
    )
    assert [name for name in names if f"`{name}(" not in README.read_text()] == []
