"""docs/tutorial.md, typed from its beginning to its end into a database of its own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import documents
import psycopg
import pytest
from conftest import column
from documents import Block
from projects import PACKAGE, Project
from test_readme import without_moment_and_machine
from worker_harness import wait_until

DATABASE = "shop"
BLOCKS = documents.blocks(documents.text("docs/tutorial.md"))


@pytest.fixture
def shop(db, tmp_path) -> Iterator[Project]:
    """The folder and the environment of the reader, whose first command makes the database."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {"PATH": path, "PYTHONPATH": f"{tmp_path}:{PACKAGE}", "PYTHONUNBUFFERED": "1"}
    project = Project(tmp_path, **env)
    yield project
    project.end()
    db.execute(f"drop database if exists {DATABASE} with (force)")


def run_shell(block: Block, shop: Project) -> str:
    if block.text.endswith("worker --app shop\n"):  # which does not end by itself
        shop.start("-m", "pgqueue.worker", "--app", "shop", PGDATABASE=DATABASE)
        return ""
    ran = subprocess.run(
        ["sh", "-e", "-c", block.text],
        cwd=shop.folder,
        env=shop.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stdout
    if block.output:
        shown = without_moment_and_machine(block.output)
        assert without_moment_and_machine(ran.stdout) == shown
    return ran.stdout


def wait_for_the_worker(shop: Project) -> None:
    """By the time somebody reads on, it has run what there is."""
    with psycopg.connect(dbname=DATABASE, autocommit=True) as conn:
        wait_until(
            lambda: (
                not shop.processes or column(conn, "select id from pgqueue.job") == []
            )
        )


def test_a_newcomer_sees_what_the_tutorial_shows(shop) -> None:
    for block in BLOCKS:
        if block.language == "python":
            shop.write("shop.py", block.text)
        elif block.language == "sql":
            documents.run_sql(block, DATABASE)
            wait_for_the_worker(shop)
        else:
            said = run_shell(block, shop)
    assert "we do not write to mallory" in said and "wrong" in said


def test_every_block_of_the_tutorial_is_typed() -> None:
    languages = [block.language for block in BLOCKS]
    assert set(languages) == {"sh", "sql", "python"}
    assert len(languages) >= 15
