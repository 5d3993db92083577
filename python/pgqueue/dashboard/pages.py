"""What each page shows: the views, read in one read-only transaction."""

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import psycopg
from psycopg.rows import dict_row

Row = dict[str, Any]
Connection = psycopg.Connection[Row]
Asked = Mapping[str, str]

SHOWN = 200  # rows of a list that may be long

# The role's own settings do not change what is read. A page that takes longer is not worth the load, and
# whoever waits for a lock should soon see who holds it. A laptop that is closed while it reads must not
# hold a snapshot that VACUUM would wait for.
SESSION = """
set local search_path = pg_catalog, pg_temp;
set local statement_timeout = '5s';
set local lock_timeout = '2s';
set local idle_in_transaction_session_timeout = '5s';
set local timezone = 'UTC';
set local datestyle = 'ISO';
set local intervalstyle = 'postgres';
set local jit = off
"""
RIGHTS = """
select
    clock_timestamp() as now,
    has_function_privilege('pgqueue.pause(text, text, text)', 'execute')
        and not pg_is_in_recovery() as may_act,
    has_table_privilege('pgqueue.run', 'select') as sees_all,
    has_function_privilege('pgqueue.health()', 'execute') as has_health,
    -- null if the SQL is too old to have it
    has_function_privilege(to_regprocedure('pgqueue.steps(bigint)'), 'execute') as sees_steps
"""
MORE = re.compile(r"; and ([\d,]+) more(?:, ([\d,]+) of them critical)?$")
HEALTH = 'select "check", status, detail, hint from pgqueue.health()'
QUEUES = "select * from pgqueue.queues order by queue"
QUEUE = "select * from pgqueue.queues where queue = %(queue)s"
# The minute may change during the query; the drawing has room for 60.
AGO = "(extract(epoch from date_trunc('minute', clock_timestamp()) - minute) / 60)::int"
ENDED = f"""
select queue, array_agg({AGO}) as ago, array_agg(finished + failed) as ended
from pgqueue.throughput
group by queue
"""
THROUGHPUT = f"""
select
    minute as moment, finished, failed, p50_waited, p99_waited, p50_taken, p99_taken, {AGO} as ago,
    false as is_estimate
from pgqueue.throughput
where queue = %(queue)s
order by minute desc
"""
HOURS = """
select *
from (
    select
        hour as moment, finished, failed, null::interval as p50_waited, p99_waited,
        null::interval as p50_taken, p99_taken, is_estimate,
        (extract(epoch from date_trunc('hour', clock_timestamp()) - hour) / 3600)::int as ago
    from pgqueue.hours
    where queue = %(queue)s
) as h
where ago < %(slots)s
order by moment desc
"""
KINDS = "select * from pgqueue.kinds where queue = %(queue)s order by kind limit 200"
FAILURES = "select * from pgqueue.failures where queue = %(queue)s limit 20"
SETTINGS = """
select kind, group_key, setting, value, set_for
from pgqueue.settings
where queue = %(queue)s and set_for <> 'default' and value is not null
limit 200
"""
# Only the first ones in the index of the lanes: a queue may have ten million.
FIRST = """
from (
    select * from pgqueue.jobs
    where hashtext(queue) = hashtext(%(queue)s) and queue = %(queue)s
    limit 10000
) as j
"""
WAITING_KINDS = f"""
select kind, count(*) as jobs {FIRST} group by kind order by jobs desc, kind limit 200
"""
# What is paused within the queue, at the level at which it was paused.
PAUSES = """
select queue, kind, group_key
from pgqueue.settings
where (queue = %(queue)s or queue is null) and num_nonnulls(kind, group_key) > 0
    and setting = 'paused' and value = 'true' and (queue is null) = (set_for like '%% in all queues')
limit 200
"""
GROUPS = f"""
select
    group_key, count(*) as jobs, count(*) filter (where state = 'running') as running,
    clock_timestamp() - min(run_at) filter (where state = 'ready') as oldest_wait
{FIRST}
where group_key is not null
group by group_key
order by jobs desc, group_key
limit 20
"""
JOBS = f"""
select id, kind, state, priority, run_at, attempt, max_attempts, worker, group_key, last_error
{FIRST}
order by priority desc, run_at, id
limit 50
"""
RUNNING = "select *, count(*) over () as matches from pgqueue.running limit %(shown)s"
STUCK = "select * from pgqueue.stuck limit %(shown)s"
WORKERS = "select *, count(*) over () as matches from pgqueue.workers limit %(shown)s"
DEAD = """
select *, count(*) over () as matches, sum(jobs) over () as all_jobs
from pgqueue.dead
where %(queue)s::text is null or queue = %(queue)s
limit %(shown)s
"""
SCHEDULES = "select *, count(*) over () as matches from pgqueue.schedules limit 1000"
# The columns that cost nothing: counting the jobs of unfinished batches may take long.
BATCH = """
select id, queue, kind, state, created_at, closed_at, finished_at, age, callback_id
from pgqueue.batches
"""
COUNTS = """
select id, waiting, running, completed, dead, cancelled
from pgqueue.batches
where id = any (%(ids)s)
"""
BATCH_JOBS = """
select *
from (select * from pgqueue.batch_jobs where batch_id = %(id)s limit 10000) as j
order by state, id
"""
BATCHES = f"""
select *, count(*) over () as matches from ({BATCH}) as b order by id desc limit %(shown)s
"""


@dataclass(frozen=True)
class Span:
    """A time that charts show, in slots."""

    query: str
    slots: int
    slot: timedelta
    unit: str
    tick: str  # how a moment is written
    ticks: int

    def axis(self, now: datetime) -> list[str]:
        """Write the moments at equal distances, from the first slot on."""
        whole = self.slot * self.slots
        parts = (now - whole * (1 - n / self.ticks) for n in range(self.ticks))
        return [format(moment, self.tick) for moment in parts]


SPANS = {
    "hour": Span(THROUGHPUT, 60, timedelta(minutes=1), "minute", "%H:%M", 4),
    "day": Span(HOURS, 24, timedelta(hours=1), "hour", "%H:%M", 4),
    "week": Span(HOURS, 168, timedelta(hours=1), "hour", "%a %d", 7),
}
NO_RUNS = dict.fromkeys("runs failures p50_taken p99_taken last_finished_at".split())
# By which queues are sorted, if not by their names.
ORDERS = (
    "ready running scheduled blocked expired dead oldest_wait rate_5m failure_rate_5m"
    " workers"
).split()


LATE = (psycopg.errors.QueryCanceled, psycopg.errors.LockNotAvailable)


class NotFound(Exception):
    """Nothing has that name."""


@dataclass
class Page:
    template: str
    context: dict[str, Any] = field(default_factory=dict)
    is_live: bool = True  # refreshed while somebody is looking


@dataclass
class Reading:
    """One transaction, and what its role may do."""

    conn: Connection
    asked: Asked
    rights: Row

    def rows(self, query: str, **values: Any) -> list[Row]:
        return self.conn.execute(query, {"shown": SHOWN, **values}).fetchall()

    def row(self, query: str, **values: Any) -> Row | None:
        return self.conn.execute(query, values).fetchone()

    def tried(self, query: str, **values: Any) -> list[Row] | None:
        """Return what a page can do without: None if it takes more than a second."""
        try:
            with self.conn.transaction():
                self.conn.execute("set local statement_timeout = '1s'")
                return self.rows(query, **values)
        except LATE:
            return None


def read(dsn: str, page: Callable[[Reading], Page], asked: Asked) -> Page:
    """Read what a page shows, all of it from one snapshot."""
    with psycopg.connect(dsn, row_factory=dict_row, prepare_threshold=None) as conn:
        conn.read_only = True
        conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        conn.execute(SESSION)
        rights = conn.execute(RIGHTS).fetchone() or {}
        found = page(Reading(conn, asked, rights))
        found.context.update(rights)
        conn.rollback()
    return found


def queues(reading: Reading) -> Page:
    found = all_queues = reading.rows(QUEUES)
    if part := reading.asked.get("name", ""):
        found = [row for row in found if part.lower() in row["queue"].lower()]
    order = reading.asked.get("order", "")
    if order in ORDERS:
        # Those about which nothing is known come last.
        found = sorted(
            found, key=lambda row: (row[order] is not None, row[order]), reverse=True
        )
    return Page(
        "queues.html",
        {
            "queues": found[:1000],
            "matches": len(found),
            "all_queues": all_queues,
            "part": part,
            "order": order if order in ORDERS else "queue",
            "ended": {r["queue"]: (r["ago"], r["ended"]) for r in reading.rows(ENDED)},
            "health": health(reading) if reading.rights["has_health"] else None,
        },
    )


def health(reading: Reading) -> list[Row]:
    """What is wrong, the worst first: the findings of each check that are listed, and how many there are."""
    wrong = itertools.groupby(
        reading.rows(HEALTH), key=lambda row: (row["status"], row["check"])
    )
    listed = [(status, list(rows)) for (status, _), rows in wrong if status != "ok"]
    return [
        {"status": status, "rows": rows, "count": len(rows) + unlisted(rows[-1])}
        for status, rows in listed
    ]


def late(reading: Reading) -> Page:
    """Say what was not read in time, and who has locked it."""
    found = reading.rows(HEALTH) if reading.rights["has_health"] else []
    found = [row for row in found if " locked" in row["detail"] and row["hint"]]
    first = f": {found[0]['detail']}" if found else ""
    text = f"Postgres has not answered in time{first}."
    return Page("error.html", {"text": text, "found": found})


def unlisted(last: Row) -> int:
    """How many more of this status there are, which only the last of five findings says."""
    if (more := MORE.search(last["detail"])) is None:
        return 0
    count, critical = (int((n or "0").replace(",", "")) for n in more.groups())
    return critical if last["status"] == "critical" else count - critical


def queue(reading: Reading) -> Page:
    name = reading.asked.get("name", "")
    found = reading.row(QUEUE, queue=name)
    if found is None:
        raise NotFound(
            f"No queue is called {name[:200]!r}, or nothing is known about it."
        )
    # Without statistics, Postgres would make a bitmap of all its jobs to find the first.
    reading.conn.execute("set local enable_bitmapscan = off")
    rows = partial(reading.rows, queue=name)
    span = SPANS.get(reading.asked.get("span", ""), SPANS["hour"])
    # Also the kinds that are waiting, and of which no job has run yet.
    kinds, waiting = rows(KINDS), {r["kind"]: r["jobs"] for r in rows(WAITING_KINDS)}
    ran = {row["kind"] for row in kinds}
    kinds += [NO_RUNS | {"kind": kind} for kind in waiting if kind not in ran]
    pauses = rows(PAUSES)
    own = [row for row in pauses if row["queue"] == name]
    return Page(
        "queue.html",
        {
            "queue": found,
            "kinds": kinds,
            "waiting": waiting,
            "pauses": pauses,
            "groups": rows(GROUPS),
            "jobs": rows(JOBS),
            "failures": rows(FAILURES),
            "settings": rows(SETTINGS),
            "spans": SPANS,
            "span": span,
            "axis": span.axis(reading.rights["now"]),
            "slots": rows(span.query, slots=span.slots),
            "paused_kinds": {r["kind"] for r in own if r["group_key"] is None},
            "paused_groups": {r["group_key"] for r in own if r["kind"] is None},
        },
    )


def running(reading: Reading) -> Page:
    return Page(
        "running.html", {"stuck": reading.rows(STUCK), "running": reading.rows(RUNNING)}
    )


def workers(reading: Reading) -> Page:
    return Page("workers.html", {"workers": reading.rows(WORKERS)})


def dead(reading: Reading) -> Page:
    queue = reading.asked.get("queue") or None
    found = reading.rows(DEAD, queue=queue)
    # If there are very many, a queue's few may not be in the sample.
    kept = reading.row(QUEUE, queue=queue) if queue and not found else None
    return Page("dead.html", {"dead": found, "queue": queue, "kept": kept})


def schedules(reading: Reading) -> Page:
    return Page("schedules.html", {"schedules": reading.rows(SCHEDULES)})


def batches(reading: Reading) -> Page:
    found = reading.rows(BATCHES)
    for is_over in (True, False):
        ids = [row["id"] for row in found if (row["state"] == "finished") == is_over]
        counts = {row["id"]: row for row in reading.tried(COUNTS, ids=ids) or []}
        found = [row | counts.get(row["id"], {}) for row in found]
    return Page("batches.html", {"batches": found})


def batch(reading: Reading) -> Page:
    id = job_id(reading.asked.get("id", ""))
    found = reading.row(f"{BATCH} where id = %(id)s", id=id)
    if found is None:
        raise NotFound(
            f"There is no batch {id}; a batch is known for 14 days after it has finished."
        )
    for counts in reading.tried(COUNTS, ids=[id]) or []:
        found |= counts
    jobs = reading.tried(BATCH_JOBS, id=id)
    return Page("batch.html", {"batch": found, "jobs": jobs})


def job_id(text: str) -> int:
    try:
        id = int(text)
    except ValueError:
        raise NotFound(
            f"{text[:100]!r} is not a job's id, which is a whole number."
        ) from None
    if not -(2**63) <= id < 2**63:
        raise NotFound("No job has an id that large.")
    return id
