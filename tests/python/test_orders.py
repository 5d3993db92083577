"""The order of docs/steps.md, in Python and in SQL: killed between any two lines, each effect happens once."""

import ctypes
import importlib.util
import itertools
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import documents
import pgqueue
import psycopg
import pytest
from conftest import LONG, chance, column, one
from pgqueue.worker import worker as supervision
from psycopg import errors

PAGE = documents.sections("docs/steps.md")
TABLES, PYTHON = (b.text for b in documents.blocks(PAGE["An order"], "sql", "python"))
FULFIL = documents.blocks(PAGE["The same in SQL"], "sql")[0].text
ITEMS = {"shipped": ["tea", "milk"], "broken": ["tea", "pot"], "unpaid": ["tea"]}
# What has to be in the end: the mail, and what is left in stock and was sent and told.
END = {
    "shipped": ("on its way", {"tea": 9, "milk": 9}, ["milk", "tea"], ["charge"]),
    "broken": ("cancelled, ", {"tea": 9, "pot": 3}, ["tea"], ["charge", "refund"]),
    "unpaid": ("cancelled, ", {"tea": 10}, [], ["charge", "refund"]),
}
QUICK = "select pgqueue.configure(null, retry_base => '0', retry_cap => '0', max_attempts => 50)"
# No worker is alive: what one has claimed is free at once.
EXPIRE = "update pgqueue.job set lease_expires_at = clock_timestamp() where token is not null"
LEFT = "select from pgqueue.job where queue <> 'provider'"
# Three days later.
LATER = """
    with step as (
        update pgqueue.step set value = to_jsonb(now()) where name ~ 'until$' returning job_id
    )
    select pgqueue.run_now(s.job_id) from step as s
"""


@pytest.fixture
def db(db: psycopg.Connection) -> psycopg.Connection:
    db.execute(TABLES)
    db.execute("insert into stock values ('milk', 10)")
    db.execute(QUICK)
    return db


def look(db: psycopg.Connection, how: str, told: list[str]) -> None:
    """Look whether each effect is there, once."""
    text, left, sent, provider = END[how]
    (mail,) = column(db, "select text from mail")
    assert mail.startswith(text)
    items = list(left)
    stock = db.execute("select item, free from stock where item = any (%s)", (items,))
    assert dict(stock.fetchall()) == left
    assert column(db, "select item from parcel order by item") == sent
    assert sorted(set(told)) == provider
    end = "shipped" if how == "shipped" else "cancelled"
    ends = (
        "select result from pgqueue.run where outcome = 'completed' and kind = 'order'"
    )
    assert column(db, ends) == [end]


def forget(db: psycopg.Connection) -> None:
    db.execute("delete from mail")
    db.execute("delete from parcel")
    db.execute("update stock set free = 10 where item <> 'pot'")
    db.execute("update stock set free = 3 where item = 'pot'")
    for table in "run", "dead_job", "job", "event", "step", "wait":
        db.execute(f"delete from pgqueue.{table}")


def drive(db: psycopg.Connection, how: str, work: Callable[[], bool]) -> bool:
    """Let workers work, and whatever else has to happen, until the order is done.

    Returns whether one of them was killed.
    """
    was_killed = False
    for _ in range(50):
        was_killed |= work()
        if not one(db, f"select exists ({LEFT})"):
            return was_killed
        db.execute(EXPIRE)
        if one(db, "select exists (select from pgqueue.wait where event is not null)"):
            if how == "unpaid":
                db.execute(LATER)
            else:
                pgqueue.emit(db, "order 7 paid")
                pgqueue.emit(db, "order 7 paid", "again")
    raise AssertionError("it does not end")


# In Python


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the page."""
    path = tmp_path / "orders.py"
    path.write_text(PYTHON)
    monkeypatch.setenv("PROVIDER", str(tmp_path / "provider"))
    spec = importlib.util.spec_from_file_location("orders", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["orders"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["orders"]


def run_a_worker(dsn: str, orders: Any, line: Any, killed_at: int) -> None:
    """Work until nothing is due; die before a line of the page, if it is the one."""

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename != orders.__file__:
            return None
        if event == "line":
            line.value += 1
            if line.value == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    threading.settrace(trace)
    supervision.TICK = 0.01  # to end at once
    pgqueue.Worker(orders.app, dsn=dsn, burst=True, concurrency=1).run()
    os._exit(0)


def places(how: str, step: int) -> Iterator[int]:
    """Where it is killed: in the long form everywhere, in the short one at every so many."""
    return (
        itertools.count(1)
        if LONG
        else itertools.count(chance(how).randint(1, step), step)
    )


@pytest.mark.parametrize("how", END)
def test_a_worker_killed_between_any_two_lines_of_the_example_does_all_of_it_once(
    db, dsn, orders, tmp_path, how
) -> None:
    fork = multiprocessing.get_context("fork")
    line = fork.Value(ctypes.c_int, 0, lock=False)
    provider = tmp_path / "provider"

    def work(killed_at: int) -> bool:
        child = fork.Process(target=run_a_worker, args=(dsn, orders, line, killed_at))
        child.start()
        child.join()
        assert child.exitcode in (0, -signal.SIGKILL)
        return child.exitcode != 0

    # The ways have most lines in common.
    for killed_at in places(how, 6 if how == "broken" else 12):
        line.value = 0
        provider.write_text("")
        orders.order.enqueue(db, number=7, items=ITEMS[how])
        was_killed = drive(db, how, partial(work, killed_at))
        look(db, how, [each.split()[0] for each in provider.read_text().splitlines()])
        forget(db)
        if not was_killed:
            break
    assert killed_at > 20


# In SQL

KILL = """
create sequence line;
create function line(killed_at bigint) returns void language plpgsql as $$
begin
    if nextval('line') = killed_at then
        perform pg_terminate_backend(pg_backend_pid());
        perform pg_sleep(60);
    end if;
end $$;
"""


def traced(source: str) -> str:
    """Let a function of the page die before the statement of its that is the one."""
    statement = re.compile(
        r"^( +)(?=(?:if|perform|update|return|insert|assert|until|parcels|why|end if)\b(?! then))",
        re.M,
    )

    def body(found: re.Match[str]) -> str:
        head, code = found.group(1), found.group(2)
        return head + statement.sub(
            r"\1perform line(current_setting('test.killed_at')::bigint);\n\1", code
        )

    return re.sub(
        r"(language plpgsql as \$\$.*?\nbegin\n)(.*?\nend\n)", body, source, flags=re.S
    )


@pytest.mark.parametrize("how", END)
def test_a_backend_killed_between_any_two_statements_does_all_of_it_once(
    db, connect, how
) -> None:
    db.execute(KILL)
    db.execute(FULFIL)
    assert traced(FULFIL).count("killed_at") > 15
    db.execute(traced(FULFIL).replace("create function", "create or replace function"))

    def work(killed_at: int) -> bool:
        worker = connect()
        worker.execute(f"set test.killed_at = {killed_at}")
        try:
            worker.execute("call pgqueue.work('sql orders')")
        except errors.AdminShutdown:
            return True
        worker.close()
        return False

    for killed_at in places(how, 3):
        db.execute("select setval('line', 1, false)")
        payload = {"number": 7, "items": ITEMS[how]}
        pgqueue.enqueue(db, "sql orders", payload, kind="order")
        was_killed = drive(db, how, partial(work, killed_at))
        told = column(db, "select kind from pgqueue.job where queue = 'provider'")
        assert len(told) == len(set(told))
        look(db, how, told)
        forget(db)
        if not was_killed:
            break
    assert killed_at > 10
