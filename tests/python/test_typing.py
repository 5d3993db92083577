"""What type checkers say about code that uses the package; they must find what is wrong."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from recipes import blocks, sections

PACKAGE = Path(__file__).resolve().parents[2] / "python"
PYRIGHT = shutil.which("pyright") or shutil.which("basedpyright")
HEAD = """
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
import psycopg
from psycopg import AsyncConnection
from sqlalchemy.ext.asyncio import AsyncConnection as AsyncEngineConnection, AsyncSession
from sqlalchemy.orm import Session
import pgqueue
from pgqueue import testing

Conn = psycopg.Connection[tuple[object, ...]]
AsyncConn = AsyncConnection[tuple[object, ...]]

class AsyncpgConnection:  # as in its stubs: the package itself has no types
    async def fetch(
        self, query: str, *args: object, timeout: float | None = None
    ) -> list[dict[str, object]]:
        raise NotImplementedError

@dataclass
class Parcel:
    weight: float

app = pgqueue.App(timeout=60)

@app.job("welcome", queue="emails", max_attempts=5)
def welcome(to: str, copies: int = 1) -> str:
    return to

@app.job("later", retry_for=(OSError,), retry_base=timedelta(seconds=1))
async def later(job: pgqueue.Job, when: datetime) -> int:
    return job.id

@app.job("ship")
def ship(parcel: Parcel) -> None: ...

@app.job("untyped")
def untyped(a, b=1):  # type: ignore[no-untyped-def]
    return a

@app.job("job last")
def job_last(to: str, job: pgqueue.Job) -> None: ...
"""
ARGUMENTS = """
def right(conn: Conn, cursor: psycopg.Cursor[object], session: Session) -> int:
    later.enqueue(session, when=datetime.now())
    ship.enqueue(cursor, Parcel(1.5))
    untyped.enqueue(conn, 1, b=2)
    text: str = welcome("ada")
    return welcome.enqueue(conn, "ada", copies=2) + welcome.enqueue(conn, to=text)

def ended(conn: Conn) -> str:
    status = pgqueue.wait(conn, 1)
    if status.state == "completed":
        return "done"
    return {"dead": "no", "cancelled": "stopped", "gone": "?"}[status.state]

def wrong(conn: Conn) -> None:
    if pgqueue.status(conn, 1).state == "complete":  # wrong
        pass
    welcome.enqueue(conn)  # wrong
    welcome.enqueue(conn, to=1)  # wrong
    welcome.enqueue(conn, to="ada", copy=1)  # wrong
    welcome.enqueue(conn, "ada", 1, 2)  # wrong
    later.enqueue(conn, when="now")  # wrong
    later.enqueue(conn)  # wrong
    ship.enqueue(conn, 1.5)  # wrong
    ship.enqueue(conn, weight=1.5)  # wrong
    number: int = welcome("ada")  # wrong
    job_last.enqueue(conn, to="ada")  # wrong: it has to be first
"""
OPTIONS = """
def right(conn: Conn) -> None:
    task = welcome.with_options(priority=3, unique_key="u", on_duplicate="replace")
    task = task.with_options(unique_for=timedelta(hours=1), expires_at=timedelta(hours=2))
    task.with_options(run_at=timedelta(1), queue="q", headers={"a": 1}).enqueue(conn, "ada")
    pgqueue.enqueue(conn, "q", {"any": ["thing"]}, kind="k", run_at=datetime.now())
    ids: list[int] = pgqueue.enqueue_many(conn, "q", [1, 2], unique_keys=["a", None])
    batch: int = pgqueue.create_batch(conn, "q", {}, priority=1)
    pgqueue.enqueue(conn, "q", batch_id=batch, after=ids, if_dead="run")
    for ran in testing.drain(conn, app, scheduled=True):
        print(ran.job.id, ran.outcome.upper())

def wrong(conn: Conn) -> None:
    welcome.with_options(priority="high")  # wrong
    welcome.with_options(importance=1)  # wrong
    welcome.with_options(on_duplicate="ignore")  # wrong
    welcome.with_options(run_at=60)  # wrong
    welcome.with_options(unique_for=60)  # wrong
    welcome.with_options(expires_at=60)  # wrong
    welcome.with_options(queue=None)  # wrong
    welcome.with_options(priority=1).enqueue(conn)  # wrong
    pgqueue.enqueue(conn, "q", prio=1)  # wrong
    pgqueue.enqueue(conn, "q", after=1)  # wrong
    pgqueue.enqueue(conn, "q", if_dead="skip")  # wrong
    pgqueue.create_batch(conn, "q", unique_key="u")  # wrong
    pgqueue.enqueue(conn, kind="k")  # wrong
    pgqueue.enqueue_many(conn, "q", [1], unique_key="u")  # wrong
    app.job("x", max_attempts="5")  # wrong
    app.job("x", retry_for=OSError)  # wrong
    raise pgqueue.Retry(after="soon")  # wrong
"""
ASYNC = """
async def right(
    conn: AsyncConn,
    cursor: psycopg.AsyncCursor[object],
    engine: AsyncEngineConnection,
    session: AsyncSession,
    native: AsyncpgConnection,
) -> int:
    first: int = await welcome.enqueue(conn, to="ada")
    second: int = await pgqueue.enqueue(cursor, "q")
    third: int = await welcome.with_options(priority=1).enqueue(engine, "ada")
    fourth: list[int] = await pgqueue.enqueue_many(session, "q", [1])
    fifth: int = await welcome.enqueue(native, to="ada")
    return first + second + third + fifth + await later(1, datetime.now())

async def wrong(conn: AsyncConn, session: AsyncSession, native: AsyncpgConnection) -> int:
    pgqueue.enqueue(conn, "q")  # wrong: nobody awaits it
    await welcome.enqueue(session)  # wrong
    await welcome.enqueue(native, to=1)  # wrong
    number: int = welcome.enqueue(native, to="ada")  # wrong
    ids: list[int] = pgqueue.enqueue_many(session, "q", [1])  # wrong
    return pgqueue.enqueue(session, "q")  # wrong

def not_async(conn: Conn) -> None:
    pgqueue.enqueue(conn, "q").real
    pgqueue.enqueue(conn, "q").close()  # wrong
"""
AROUND = """
@contextmanager
def around(job: pgqueue.Job) -> Iterator[None]:
    print(job.deadline, job.lost)
    yield

@contextmanager
def about(number: int) -> Iterator[None]:
    yield

other = pgqueue.App(middleware=around)
pgqueue.App(middleware=about)  # wrong
pgqueue.App(middleware=print)  # wrong

@other.on_startup
async def begin() -> None: ...

async def serve() -> None:
    worker = pgqueue.Worker(other, {"a": pgqueue.Share(weight=2, limit=1), "b": 1})
    async with worker.running() as the_same:
        the_same.stop()
    pgqueue.Worker(other, ["a"])  # wrong
    pgqueue.Worker(other, {"a": "1"})  # wrong
    pgqueue.Worker(other, {"a": 1}, threads=1)  # wrong
"""
STEPS = """
def charge(number: int, *, twice: bool = False) -> str:
    return str(number)

async def ask(number: int) -> list[int]:
    return [number]

@app.job("order")
def order(job: pgqueue.Job, number: int) -> str:
    text: str = job.step("charge", charge, number)
    job.step("again", charge, number, twice=True)
    job.sleep("a day", timedelta(days=1))
    payload = job.wait_for("paid", timeout=60)
    results: list[object] = job.wait_for_jobs([1, 2])
    for one in job.results:
        print(one.outcome)
    job.step("charge", charge, "7")  # wrong
    job.step("charge", charge)  # wrong
    job.step("charge", charge, 7, thrice=True)  # wrong
    other: int = job.step("charge", charge, 7)  # wrong
    job.step(charge, 7)  # wrong
    job.sleep("a day", "1 day")  # wrong
    job.wait_for_jobs(7)  # wrong
    return text

@app.job("aorder")
async def aorder(job: pgqueue.Job, number: int) -> list[int]:
    await job.sleep("a day", 86400)
    numbers: list[int] = await job.step("ask", ask, number)
    other: list[str] = await job.step("ask", ask, number)  # wrong
    wrong: list[int] = job.step("ask", ask, number)  # wrong
    return numbers

def hook(conn: Conn) -> bool:
    pgqueue.emit(conn, 7)  # wrong
    return pgqueue.emit(conn, "paid", {"any": ["thing"]})

async def ahook(conn: AsyncConn) -> bool:
    return await pgqueue.emit(conn, "paid")

async def none(conn: AsyncConn) -> bool:
    return pgqueue.emit(conn, "paid")  # wrong
"""


def check(folder: Path, *args: str) -> str:
    """Run mypy on the modules of a folder, and return what it says."""
    # What it finds in packages, it need not find again in each run of the tests.
    cache = Path(sys.prefix, "mypy", folder.name)
    options = ("--no-error-summary", "--cache-dir", str(cache))
    command = [sys.executable, "-m", "mypy", *options, *args]
    env = {**os.environ, "MYPYPATH": f"{PACKAGE}:{folder}"}
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=env)
    return ran.stdout + ran.stderr


def test_mypy_finds_every_wrong_call_and_nothing_else(tmp_path) -> None:
    parts = {"arguments", "options", "async", "around", "steps"}
    wanted = set()
    for part in parts:
        code = HEAD + globals()[part.upper()]
        (tmp_path / f"code_{part}.py").write_text(code)
        lines = enumerate(code.splitlines(), 1)
        wanted |= {(f"code_{part}.py", n) for n, line in lines if "# wrong" in line}
    said = check(tmp_path, "--strict", *(f"code_{part}.py" for part in parts))
    lines = [line.split(":") for line in said.splitlines() if ": error:" in line]
    assert {(line[0], int(line[1])) for line in lines} == wanted, said


@pytest.mark.skipif(PYRIGHT is None, reason="there is no pyright, nor basedpyright")
def test_pyright_finds_every_wrong_use_of_steps_and_nothing_else(tmp_path) -> None:
    code = HEAD + STEPS
    (tmp_path / "code.py").write_text(code)
    options = {"typeCheckingMode": "standard", "extraPaths": [str(PACKAGE)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(options))
    command = [PYRIGHT, "--pythonpath", sys.executable, "--outputjson", "code.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    said = json.loads(ran.stdout)["generalDiagnostics"]
    assert {d["range"]["start"]["line"] + 1 for d in said} == {
        n for n, line in enumerate(code.splitlines(), 1) if "# wrong" in line
    }, said


def test_the_recipes_pass_a_type_checker(tmp_path) -> None:
    found = [block for section in sections() for block in blocks(section)]
    assert len(found) > 12
    (tmp_path / "jobs.py").write_text(found[0])
    names = ["jobs.py"]
    for number, block in enumerate(found[1:]):
        names.append(f"recipe_{number}.py")
        (tmp_path / names[-1]).write_text(block)
    lenient = ("--ignore-missing-imports", "--check-untyped-defs")
    # Django and the modules of the project are not there to be checked.
    said = check(tmp_path, *lenient, *names)
    assert said == ""
