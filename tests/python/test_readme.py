"""The README's blocks, run as written."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

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


def test_the_python_enqueues_and_the_command_runs_it(db, tmp_path):
    (tmp_path / "jobs.py").write_text(blocks("python")[0])
    command = shlex.split(blocks("sh")[0])
    assert command[0] == "python"
    environment = os.environ | {
        "PGDATABASE": db.info.dbname,
        "PYTHONPATH": f"{tmp_path}:{README.parent / 'python'}",
    }
    script = (
        "import psycopg, jobs; jobs.sign_up(psycopg.connect(autocommit=True), 'ada')"
    )
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    assert one(db, "select kind from pgqueue.jobs") == "welcome"
    ran = subprocess.run(
        [sys.executable, *command[1:]],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "hello ada" in ran.stdout, ran.stderr
    assert column(db, "select outcome from pgqueue.run") == ["completed"]


def test_every_public_function_is_in_the_reference(db):
    names = column(
        db,
        "select proname from pg_proc where pronamespace = 'pgqueue'::regnamespace "
        "and proname not like '\\_%' and proname <> 'version'",
    )
    assert [name for name in names if f"`{name}(" not in README.read_text()] == []
