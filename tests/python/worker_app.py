"""The handlers of the worker tests. They note what they do in the file $RAN."""

import asyncio
import atexit
import contextlib
import contextvars
import ctypes
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pgqueue
import psycopg
import pydantic

app = pgqueue.App()
empty = pgqueue.App()
RAN = os.environ.get("RAN", os.devnull)


def note(word: str, job_id: int) -> None:
    # One small append is atomic, from any number of threads and processes.
    with open(RAN, "a", buffering=1) as file:
        file.write(f"{word} {job_id}\n")


def may_go() -> bool:
    return Path(RAN + ".go").exists()


@app.job("noop")
def noop() -> None:
    pass


@app.job("began")
def began(job: pgqueue.Job) -> None:
    note("began", job.id)


@app.job("mark")
def mark(job: pgqueue.Job) -> None:
    note("ran", job.id)


@app.job("amark")
async def amark(job: pgqueue.Job) -> dict[str, int]:
    await asyncio.sleep(0)
    note("ran", job.id)
    return {"attempt": job.attempt}


@app.job("effect", transaction=True)
def effect(job: pgqueue.Job) -> None:
    note("ran", job.id)
    job.connection.execute("insert into effect values (%s)", (job.id,))


@app.job("told", transaction=True)
def told(job: pgqueue.Job, mark: int) -> None:
    """Tell the outside, which forgets nothing, what has run as which job by whose token."""
    query = "select token, current_setting('port') from pgqueue.job where id = %s"
    ((token, port),) = job.connection.execute(query, (job.id,)).fetchall()
    with open(RAN, "a", buffering=1) as file:
        file.write(f"{mark} {job.id} {token} {port}\n")
    time.sleep(0.005)
    job.connection.execute("insert into effect values (%s)", (mark,))


@app.job("aeffect", transaction=True)
async def aeffect(job: pgqueue.Job) -> int:
    note("ran", job.id)
    await job.connection.execute("insert into effect values (%s)", (job.id,))
    return job.id


@app.job("hold")
def hold(job: pgqueue.Job) -> str:
    note("began", job.id)
    while not may_go():
        time.sleep(0.01)
    note("lost" if job.lost else "ran", job.id)
    return "held"


@app.job("ahold")
async def ahold(job: pgqueue.Job) -> str:
    note("began", job.id)
    try:
        while not may_go():
            await asyncio.sleep(0.01)
    except asyncio.CancelledError:
        note("cancelled", job.id)
        raise
    note("ran", job.id)
    return "held"


@app.job("hold_effect", transaction=True)
def hold_effect(job: pgqueue.Job) -> None:
    job.connection.execute("insert into effect values (%s)", (job.id,))
    hold(job)


@app.job("ahold_effect", transaction=True)
async def ahold_effect(job: pgqueue.Job) -> None:
    await job.connection.execute("insert into effect values (%s)", (job.id,))
    await ahold.function(job)


@app.job("polite")
def polite(job: pgqueue.Job) -> None:
    note("began", job.id)
    while job.extend():
        time.sleep(0.05)
    raise RuntimeError("stopped when told")


@app.job("attentive")
def attentive(job: pgqueue.Job) -> None:
    note("began", job.id)
    while not job.cancelled:
        time.sleep(0.01)
    raise RuntimeError("stopped when told")


@app.job("tells")
def tells(job: pgqueue.Job, numbers: list[float | str], total: float | None) -> None:
    for number in numbers:
        job.progress(float(number), total, f"now \0 {number}\nmore")
    while not may_go():
        time.sleep(0.01)


@app.job("atells")
async def atells(job: pgqueue.Job) -> None:
    while not may_go():
        job.progress(7, 10)
        await asyncio.sleep(0.001)


@app.job("nap")
def nap(job: pgqueue.Job, seconds: float) -> None:
    note("began", job.id)
    time.sleep(seconds)
    note("ran", job.id)


@app.job("nap_without_timeout", timeout=math.inf)
def nap_without_timeout(job: pgqueue.Job, seconds: float) -> None:
    assert job.deadline is None
    nap.function(job, seconds)


@app.job("late_in_group", timeout=0.3)
def late_in_group(job: pgqueue.Job) -> None:
    nap.function(job, 1.5)


@app.job("late_in_transaction", timeout=0.3, transaction=True)
def late_in_transaction(job: pgqueue.Job) -> None:
    job.connection.execute("insert into effect values (%s)", (job.id,))
    nap.function(job, 1.5)


@app.job("slow", timeout=0.5)
def slow(job: pgqueue.Job) -> None:
    while not may_go():
        time.sleep(0.01)
    note("ran", job.id)


@app.job("aslow", timeout=timedelta(seconds=0.5))
async def aslow(job: pgqueue.Job) -> None:
    await asyncio.sleep(60)


@app.job("suicide")
def suicide(job: pgqueue.Job) -> None:
    note("ran", job.id)
    os.kill(os.getpid(), signal.SIGKILL)


@app.job("sets_variables")
def sets_variables(variables: dict[str, str]) -> None:
    os.environ.update(variables)


@app.job("exits")
def exits(code: int) -> None:
    os._exit(code)


@app.job("gil")
def gil() -> None:
    """Hold the GIL for some seconds in one call."""
    time.sleep(0.5)
    sum(range(150_000_000))


@app.job("holds_interpreter")
def holds_interpreter() -> None:
    note("began", os.getpid())
    ctypes.PyDLL(None).sleep(300)


@dataclass
class Person:
    name: str
    age: int = 0


@app.job("person")
def person(someone: Person) -> str:
    return f"{someone.name} {someone.age}"


class Order(pydantic.BaseModel):
    number: int
    due: date


@app.job("order")
async def order(order: Order, job: pgqueue.Job) -> str:
    return f"{order.number} by {order.due:%d.%m.%Y}"


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text for this")


BAD = {
    "exception": lambda: ValueError("plain"),
    "base exception": lambda: BaseException("base"),
    "system exit": lambda: SystemExit(3),
    "keyboard interrupt": lambda: KeyboardInterrupt(),
    "generator exit": lambda: GeneratorExit(),
    "stop iteration": lambda: StopIteration(),
    "cancelled error": lambda: asyncio.CancelledError(),
    "timeout error": lambda: TimeoutError(),
    "unprintable": lambda: Unprintable(),
    "ten megabytes": lambda: ValueError("x" * 10_000_000),
    "nul": lambda: ValueError("a\0b"),
    "surrogate": lambda: ValueError("a\ud800b"),
    "not utf-8": lambda: ValueError(os.fsdecode(b"\xff\xfe")),
    "group": lambda: ExceptionGroup("many", [ValueError("one"), TypeError("two")]),
    "recursion": lambda: RecursionError("deep"),
    "memory": lambda: MemoryError(),
}
UNSTORABLE = {
    "nan": float("nan"),
    "nul in a result": {"a": ["b\0"]},
    "surrogate in a result": "\ud800",
    "no json": object(),
    "huge number": 10**200_000,
}


@app.job("bad")
def bad(case: str) -> object:
    if case in BAD:
        raise BAD[case]()
    return UNSTORABLE[case]


@app.job("abad")
async def abad(case: str) -> object:
    return bad(case)


@app.job("bad_in_transaction", transaction=True)
def bad_in_transaction(case: str) -> object:
    return bad(case)


@app.job("echo")
def echo(value: object) -> object:
    return value


@app.job("echo_length")
def echo_length(value: str) -> int:
    return len(value)


@app.job("retry")
def retry(job: pgqueue.Job) -> None:
    if job.attempt == 1:
        raise pgqueue.Retry(after=0.2)


@app.job("retry_absurd")
def retry_absurd() -> None:
    raise pgqueue.Retry(after=timedelta.max)


@app.job("snooze")
def snooze() -> None:
    raise pgqueue.Snooze(timedelta(hours=1))


@app.job("reject")
def reject() -> None:
    raise pgqueue.Reject("never will")


@app.job("headers")
def headers(job: pgqueue.Job, **payload: object) -> dict[str, object]:
    return {"headers": job.headers, "payload": payload, "attempt": job.attempt}


async def exiting() -> None:
    sys.exit(3)


@app.job("exit_in_child")
async def exit_in_child() -> None:
    await asyncio.gather(exiting())


class Careless(pgqueue.Retry):
    def __init__(self) -> None:
        pass


class CarelessSnooze(pgqueue.Snooze):
    def __init__(self) -> None:
        pass


@app.job("careless")
def careless() -> None:
    raise Careless


@app.job("careless_snooze")
async def careless_snooze() -> None:
    raise CarelessSnooze


@app.job("cleans_up")
async def cleans_up(job: pgqueue.Job, seconds: float) -> None:
    note("began", job.id)
    try:
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(seconds)
        note("cleaned", job.id)


@app.job("streams", timeout=0.3, transaction=True)
async def streams(job: pgqueue.Job) -> None:
    rows = job.connection.cursor().stream("select generate_series(1, 1000)")
    async for _ in rows:
        await asyncio.sleep(60)


@app.job("groups")
async def groups(job: pgqueue.Job) -> None:
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(0.01))
    note("ran", job.id)


@app.job("blocks", timeout=1)
async def blocks(job: pgqueue.Job) -> None:
    note("began", job.id)
    while not may_go():
        time.sleep(0.01)


@app.job("forks")
def forks(job: pgqueue.Job) -> int:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join(10)
    return child.exitcode or 0


@app.job("forks_and_returns")
def forks_and_returns(job: pgqueue.Job) -> None:
    if child := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        note("ran", job.id)


@app.job("forks_in_transaction", transaction=True)
def forks_in_transaction(job: pgqueue.Job, ends: str) -> int:
    """Write before and after a child has ended, and return how it did."""
    job.connection.execute("insert into effect values (1)")
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        job.connection.execute("insert into effect values (2)")
        return code
    if ends == "exit":
        sys.exit(7)
    if ends == "raise":
        raise ValueError
    return 0


@app.job("leaves_a_child", transaction=True)
def leaves_a_child(job: pgqueue.Job) -> None:
    job.connection.execute("insert into effect values (1)")
    if child := os.fork():
        note("child", child)
        hold.function(job)
    time.sleep(60)


leak: contextvars.ContextVar[int] = contextvars.ContextVar("leak", default=0)


def leaked(job: pgqueue.Job) -> int:
    before = leak.get()
    leak.set(job.id)
    return before


@app.job("leaks")
def leaks(job: pgqueue.Job) -> int:
    return leaked(job)


@app.job("aleaks")
async def aleaks(job: pgqueue.Job) -> int:
    return leaked(job)


@app.job("leaks_into_session", transaction=True)
def leaks_into_session(job: pgqueue.Job) -> list[object]:
    conn = job.connection
    row = conn.execute(
        "select current_setting('search_path'), pg_backend_pid()"
    ).fetchone()
    conn.row_factory = psycopg.rows.dict_row
    conn.execute("set search_path = nowhere")
    conn.execute("create temp table left_behind (n int)")
    return list(row)


@app.job("aleaks_into_session", transaction=True)
async def aleaks_into_session(job: pgqueue.Job) -> list[object]:
    conn = job.connection
    cursor = await conn.execute(
        "select current_setting('search_path'), pg_backend_pid()"
    )
    row = await cursor.fetchone()
    conn.row_factory = psycopg.rows.dict_row
    await conn.execute("set search_path = nowhere")
    await conn.execute("create temp table left_behind (n int)")
    return list(row)


@app.job("hangs", timeout=0.5)
def hangs(job: pgqueue.Job) -> None:
    note("began", job.id)
    time.sleep(60)


@app.job("hangs_with_lock", timeout=0.5, transaction=True)
def hangs_with_lock(job: pgqueue.Job) -> None:
    job.step("locks its job", lambda: 1)
    note("began", job.id)
    while not may_go():
        time.sleep(0.01)


@app.job("ahangs_with_lock", transaction=True)
async def ahangs_with_lock(job: pgqueue.Job) -> None:
    await job.step("locks its job", asyncio.sleep, 0)
    await ahang_stubborn.function(job)


# Handlers that do not end, each in its own way.


def begin(job: pgqueue.Job) -> None:
    print(f"said by {job.id}")  # to a file, so it stays in a buffer
    note("began", job.id)


@app.job("hang")
def hang(job: pgqueue.Job) -> None:
    begin(job)
    time.sleep(60)


class Finalized:
    """Notes when Python clears the modules, its own way to end."""

    def __init__(self, file: int) -> None:
        self.file = file

    def __del__(self, write=os.write) -> None:
        write(self.file, b"finalized 0\n")


@app.job("watch_the_end")
def watch_the_end(job: pgqueue.Job, seconds: float) -> None:
    file = os.open(RAN, os.O_APPEND | os.O_WRONLY)
    atexit.register(os.write, file, b"atexit 0\n")
    globals()["finalized"] = Finalized(file)
    note("began", job.id)
    time.sleep(seconds)


@app.job("hang_in_query", transaction=True)
def hang_in_query(job: pgqueue.Job) -> None:
    begin(job)
    job.connection.execute("select pg_sleep(60)")


@app.job("hang_in_left_thread")
def hang_in_left_thread(job: pgqueue.Job) -> None:
    threading.Thread(target=time.sleep, args=(60,)).start()
    begin(job)


@app.job("ahang_in_query", transaction=True)
async def ahang_in_query(job: pgqueue.Job) -> None:
    begin(job)
    await job.connection.execute("select pg_sleep(60)")


@app.job("ahang_in_thread")
async def ahang_in_thread(job: pgqueue.Job) -> None:
    begin(job)
    await asyncio.to_thread(time.sleep, 60)


@app.job("ahang_in_left_thread", timeout=0.3)
async def ahang_in_left_thread(job: pgqueue.Job) -> None:
    begin(job)
    await asyncio.to_thread(time.sleep, 60)


@app.job("ahang_stubborn")
async def ahang_stubborn(job: pgqueue.Job) -> None:
    begin(job)
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)


@app.job("ahang_blocking")
async def ahang_blocking(job: pgqueue.Job) -> None:
    begin(job)
    time.sleep(60)


# What hostile handlers do.


@app.job("exit_in_callback")
async def exit_in_callback() -> None:
    asyncio.get_running_loop().call_soon(sys.exit, 3)
    await asyncio.sleep(0.1)


@app.job("exit_in_left_task")
async def exit_in_left_task() -> None:
    leaks_task.append(asyncio.get_running_loop().create_task(exiting()))


leaks_task: list[asyncio.Task[None]] = []


@app.job("stops_loop")
async def stops_loop() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.1)


@app.job("cancels_itself")
async def cancels_itself() -> None:
    task = asyncio.current_task()
    assert task
    task.cancel()
    await asyncio.sleep(0)


@app.job("cancels_all")
async def cancels_all() -> None:
    for task in asyncio.all_tasks():
        task.cancel()


@app.job("recurses")
def recurses() -> None:
    recurses()


class Later(pgqueue.Snooze):
    """Overrides `until` with what the base class would have refused."""

    until = 30  # type: ignore[assignment]

    def __init__(self) -> None:
        pass


class Soon(pgqueue.Retry):
    after = "soon"  # type: ignore[assignment]

    def __init__(self) -> None:
        pass


class Objectionable(pgqueue.Retry):
    after = object()  # type: ignore[assignment]

    def __init__(self) -> None:
        pass


class Faceless(Exception):
    @property
    def __class__(self) -> type:
        raise ValueError("no class for this")


CARELESS = {"until": Later, "soon": Soon, "object": Objectionable, "class": Faceless}


@app.job("careless_with")
def careless_with(what: str) -> None:
    raise CARELESS[what]()


@app.job("acareless_with")
async def acareless_with(what: str) -> None:
    raise CARELESS[what]()


@app.job("aforks_and_returns")
async def aforks_and_returns(job: pgqueue.Job) -> None:
    forks_and_returns(job)


def interrupt(thread: threading.Thread) -> None:
    """Raise SystemExit in a thread, as soon as it runs Python again."""
    assert thread.ident
    number, error = ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(number, error) == 1


@app.job("kills_thread")
def kills_thread(name: str) -> None:
    mine = threading.current_thread()
    found = [
        thread
        for thread in threading.enumerate()
        if thread is not mine and thread.name == f"pgqueue-{name}"
    ]
    assert found, [thread.name for thread in threading.enumerate()]
    interrupt(found[0])


@app.job("interrupts_itself")
def interrupts_itself(after: float) -> None:
    """As a timeout made of such exceptions does that comes too late."""
    thread = threading.current_thread()
    threading.Timer(after, interrupt, [thread]).start()


@app.job("closes_output")
def closes_output() -> None:
    sys.stdout.close()
    sys.stderr.close()


@app.job("blocks_until_told")
async def blocks_until_told(job: pgqueue.Job) -> None:
    note("began", job.id)
    while not may_go():
        time.sleep(0.01)
    note("ran", job.id)


@app.job("leaves_loop_blocked")
async def leaves_loop_blocked(job: pgqueue.Job) -> None:
    asyncio.get_running_loop().call_soon(time.sleep, 120)


peak_lock = threading.Lock()
at_work: set[int] = set()


def arrive(job: pgqueue.Job) -> int:
    with peak_lock:
        at_work.add(job.id)
        return len(at_work)


def leave(job: pgqueue.Job) -> None:
    with peak_lock:
        at_work.remove(job.id)


@app.job("peak")
def peak(job: pgqueue.Job) -> int:
    try:
        return arrive(job)
    finally:
        time.sleep(0.01)
        leave(job)


@app.job("apeak")
async def apeak(job: pgqueue.Job) -> int:
    try:
        return arrive(job)
    finally:
        await asyncio.sleep(0.01)
        leave(job)


@app.job("peak_hangs", timeout=0.3)
def peak_hangs(job: pgqueue.Job) -> None:
    arrive(job)
    time.sleep(60)


@app.job("mega")
def mega(bytes: int) -> str:
    return "x" * bytes


@app.job("mega_together")
def mega_together(job: pgqueue.Job, bytes: int) -> str:
    hold(job)
    return "x" * bytes


@app.job("mega_transaction", transaction=True)
def mega_transaction(job: pgqueue.Job, bytes: int) -> str:
    job.connection.execute("insert into effect values (%s)", (job.id,))
    return "x" * bytes


hurried = pgqueue.App(timeout=0.5)
hurried.job("hang")(hang.function)
hurried.job("ahold")(ahold.function)
hurried.job("nap", timeout=30)(nap.function)


# What transactional handlers leave in their session.

STATE = """
    select jsonb_build_object(
        'settings', (
            select jsonb_object_agg(name, setting) from pg_settings
            where name in ('search_path', 'timezone', 'datestyle', 'statement_timeout',
                'work_mem', 'role', 'transaction_isolation', 'transaction_read_only',
                'default_transaction_read_only', 'client_encoding')
        ),
        'custom', coalesce(current_setting('app.tenant', true), ''),
        'user', current_user,
        'temporary', (
            select count(*) from pg_class where relpersistence = 't'
                and pg_table_is_visible(oid)
        ),
        'listening', (select count(*) from pg_listening_channels()),
        'prepared', (select count(*) from pg_prepared_statements where name = 'left'),
        'cursors', (select count(*) from pg_cursors where is_holdable),
        'locks', (
            select count(*) from pg_locks
            where locktype = 'advisory' and pid = pg_backend_pid()
        )
    )
"""
DIRT = """
    set search_path = nowhere;
    set timezone = 'Asia/Jakarta';
    set datestyle = 'SQL, DMY';
    set statement_timeout = '1h';
    set work_mem = '1 MB';
    set client_encoding = 'latin1';
    set default_transaction_read_only = on;
    set app.tenant = 'ada';
    set role pg_monitor;
    create temp table left_behind (n int);
    declare left_open cursor with hold for select 1;
    listen left_listening;
    prepare "left" as select 1;
    select pg_advisory_lock(4711);
"""


def state_of(conn: Any, row: Any) -> dict[str, Any]:
    row["row_factory"] = conn.row_factory.__name__
    row["cursor_factory"] = conn.cursor_factory.__name__
    row["threshold"] = conn.prepare_threshold
    row["autocommit"] = conn.autocommit
    row["loader"] = conn.adapters.get_loader(23, psycopg.pq.Format.TEXT).__name__
    row["handlers"] = len(conn._notice_handlers) + len(conn._notify_handlers)
    return row


class Shouting(psycopg.adapt.Loader):
    def load(self, data: Any) -> str:
        return "!"


def soil(conn: Any) -> None:
    conn.row_factory = psycopg.rows.dict_row
    is_async = isinstance(conn, psycopg.AsyncConnection)
    conn.cursor_factory = psycopg.AsyncRawCursor if is_async else psycopg.RawCursor
    conn.prepare_threshold = 1
    conn.adapters.register_loader("int4", Shouting)
    conn.add_notice_handler(print)
    conn.add_notify_handler(print)


@app.job("soils", transaction=True)
def soils(job: pgqueue.Job) -> dict[str, Any]:
    conn = job.connection
    found = state_of(conn, conn.execute(STATE).fetchone()[0])
    soil(conn)
    conn.execute(DIRT)
    conn.execute("reset role")
    return found


@app.job("asoils", transaction=True)
async def asoils(job: pgqueue.Job) -> dict[str, Any]:
    conn = job.connection
    found = state_of(conn, (await (await conn.execute(STATE)).fetchone())[0])
    soil(conn)
    await conn.execute(DIRT)
    await conn.execute("reset role")
    return found


@app.job("wrecks", transaction=True)
def wrecks(job: pgqueue.Job, how: str) -> None:
    conn = job.connection
    conn.execute("insert into effect values (%s)", (job.id,))
    match how:
        case "close":
            conn.close()
        case "copy":
            conn.pgconn.exec_(b"copy (select 1) to stdout")
        case "unread":
            conn.pgconn.send_query(b"select 1")
        case "commit" | "rollback":
            conn.execute(how)
        case "terminate":
            conn.execute("select pg_terminate_backend(pg_backend_pid())")
        case "abort":
            with contextlib.suppress(psycopg.DataError):
                conn.execute("select 1 / 0")
        case "stream":
            rows = conn.cursor().stream("select generate_series(1, 1000)")
            raise ValueError(next(rows))  # whose traceback keeps the rows
        case "break":
            for _ in conn.cursor().stream("select generate_series(1, 1000)"):
                break
        case "pipeline":
            kept.append(conn.pipeline())
            kept[-1].__enter__()


@app.job("awrecks", transaction=True)
async def awrecks(job: pgqueue.Job, how: str) -> None:
    conn = job.connection
    await conn.execute("insert into effect values (%s)", (job.id,))
    match how:
        case "close":
            await conn.close()
        case "copy":
            conn.pgconn.exec_(b"copy (select 1) to stdout")
        case "unread":
            conn.pgconn.send_query(b"select 1")
        case "commit" | "rollback":
            await conn.execute(how)
        case "terminate":
            await conn.execute("select pg_terminate_backend(pg_backend_pid())")
        case "abort":
            with contextlib.suppress(psycopg.DataError):
                await conn.execute("select 1 / 0")
        case "stream":
            rows = conn.cursor().stream("select generate_series(1, 1000)")
            raise ValueError(await anext(rows))
        case "break":
            async for _ in conn.cursor().stream("select generate_series(1, 1000)"):
                break
        case "pipeline":
            kept.append(conn.pipeline())
            await kept[-1].__aenter__()


kept: list[Any] = []


@app.job("keeps_connection", transaction=True)
def keeps_connection(job: pgqueue.Job) -> None:
    kept.append(job.connection)


@app.job("uses_kept_connection", transaction=True)
def uses_kept_connection(job: pgqueue.Job) -> None:
    with contextlib.suppress(psycopg.Error):
        kept[0].execute("insert into effect values (0)")


@app.job("adds")
def adds(job: pgqueue.Job, more: int) -> None:
    with psycopg.connect(os.environ["PGQUEUE_DSN"]) as conn:
        for _ in range(more):
            adds.with_options(batch_id=job.batch_id, queue=job.queue).enqueue(
                conn, more - 1
            )
