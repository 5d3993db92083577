"""The actions: each calls the SQL function of its name, except that retry calls redrive_job.

One that cannot be undone asks first, and shows what it would do: `ask` makes that page, and `act` does it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

import psycopg
from psycopg.rows import dict_row

from pgqueue.client import JobNotFound
from pgqueue.dashboard.pages import SESSION, Connection, NotFound, Page, Row
from pgqueue.terminal import sentences


@dataclass(frozen=True)
class Action:
    """Done to one thing; `said` makes a sentence from its arguments and its result."""

    call: str
    where: str  # to look at its effect
    said: Callable[[Row, Any], str]
    label: str = ""
    asks: str = ""  # else it is done at once


def scope(of: Row) -> str:
    """Name what a pause is for."""
    parts = [
        f"{what} {of[key]}"
        for what, key in (("kind", "kind"), ("group", "group_key"))
        if of.get(key)
    ]
    queue = "all queues" if of["queue"] is None else f"queue {of['queue']}"
    return f"{' and '.join(parts)} of {queue}" if parts else queue


SCOPE = "%(queue)s::text, %(kind)s::text, %(group_key)s::text"
CANCELLED = {
    "cancelled": "Job {id} is cancelled.",
    "cancelling": "Job {id} was asked to stop; its worker learns of it at its next heartbeat.",
}
ONE = {
    "pause": Action(
        f"select pgqueue.pause({SCOPE})",
        "/queue?name={queue}",
        lambda of, _: f"Paused: {scope(of)}. Running jobs go on.",
        "Pause all queues",
        "No queue hands out jobs until it is resumed. Running jobs go on, and jobs can be enqueued.",
    ),
    "resume": Action(
        f"select pgqueue.resume({SCOPE})",
        "/queue?name={queue}",
        lambda of, _: f"Resumed: {scope(of)}.",
        "Resume all queues",
        "Every queue hands out jobs again, including those that were paused one by one.",
    ),
    "cancel": Action(
        "select pgqueue.cancel(%(id)s::bigint)",
        "/job?id={id}",
        lambda of, how: CANCELLED[how].format_map(of),
    ),
    "run_now": Action(
        "select pgqueue.run_now(%(id)s::bigint)",
        "/job?id={id}",
        lambda of, _: f"Job {of['id']} is due now.",
    ),
    "retry": Action(
        "select pgqueue.redrive_job(%(id)s::bigint)",
        "/job?id={id}",
        lambda of, back: (
            f"Job {of['id']} was redriven."
            if back
            else f"Job {of['id']} stays dead: another job has its unique key."
        ),
    ),
    "discard": Action(
        "select pgqueue.discard(%(id)s::bigint)",
        "/dead",
        lambda of, _: f"Job {of['id']} is deleted.",
    ),
    "rerun": Action(
        "select pgqueue.rerun(%(id)s::bigint)",
        "/job?id={result}",
        lambda of, new: f"Job {of['id']} was enqueued again, as this job {new}.",
        "Run again",
        "A new job is enqueued, with the payload of this one; what this one did is not undone.",
    ),
    "pause_schedule": Action(
        "select pgqueue.pause_schedule(%(name)s::text)",
        "/schedules",
        lambda of, _: f"Paused: schedule {of['name']}.",
    ),
    "resume_schedule": Action(
        "select pgqueue.resume_schedule(%(name)s::text)",
        "/schedules",
        lambda of, _: f"Resumed: schedule {of['name']}, from its next slot on.",
    ),
    "run_schedule": Action(
        "select pgqueue.run_schedule(%(name)s::text)",
        "/job?id={result}",
        lambda of, _: f"A job of schedule {of['name']} was enqueued: this one.",
        "Run now",
        "A job of this schedule is enqueued now, in addition to those of its slots.",
    ),
}


@dataclass(frozen=True)
class Wording:
    """What a dry run says about jobs: to which of the selected ones it applies, and what happens to them."""

    label: str
    applies: str
    would: str
    did: str
    note: str = ""


LIVING = "select id, queue, kind, state, last_error as error from pgqueue.jobs"
DEAD = "select id, queue, kind, 'dead' as state, error from pgqueue.dead_job"
STAYS = "A job whose unique key is taken by another one stays dead."
NO_RUN = "A waiting job is gone at once. The worker of a running one is asked to stop. None of them runs again."
FOR_GOOD = "They are deleted for good, with their payloads."
JOBS = {
    "cancel": Wording(
        "Cancel", LIVING, "would be cancelled", "cancelled, or asked to stop", NO_RUN
    ),
    "run_now": Wording("Run now", LIVING, "would be due now", "due now"),
    "retry": Wording("Retry", DEAD, "would be redriven", "redriven", STAYS),
    "discard": Wording("Discard", DEAD, "would be deleted", "deleted", FOR_GOOD),
}
# By queue, kind and error.
BY_FILTER = {
    "redrive": replace(JOBS["retry"], label="Redrive"),
    "discard_many": JOBS["discard"],
    "cancel_many": JOBS["cancel"],
}
MANY = """
select pgqueue.{}(
    %(queue)s::text, %(kind)s::text, %(error_like)s::text, max_jobs => %(max_jobs)s::int,
    dry_run => %(dry_run)s::boolean
) as id
"""
ACTIONS = (*ONE, *BY_FILTER)
ID = "{} where id = any (%(ids)s::bigint[]) order by id"


def jobs(number: int) -> str:
    return f"{number:,} {'job' if number == 1 else 'jobs'}"


def connect(dsn: str, notes: list[str]) -> Connection:
    conn = psycopg.connect(dsn, row_factory=dict_row, prepare_threshold=None)
    conn.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    conn.add_notice_handler(lambda notice: notes.append(sentences(notice)))
    conn.execute(SESSION)
    return conn


def many(conn: Connection, action: str, of: Row, max_jobs: int, dry: bool) -> list[int]:
    values = {**of, "max_jobs": max_jobs, "dry_run": dry}
    return [row["id"] for row in conn.execute(MANY.format(action), values)]


def ask(dsn: str, action: str, of: Row, max_jobs: int, back: str) -> Page:
    """Show what an action would do. Nothing of it stays done."""
    shown: Row = {"action": action, "of": of, "back": back, "max_jobs": max_jobs}
    notes: list[str] = []
    known: Action | Wording
    with connect(dsn, notes) as conn:
        if action in BY_FILTER:
            known = BY_FILTER[action]
            shown["ids"] = many(conn, action, of, max_jobs, dry=True)
            shown["is_all"] = len(shown["ids"]) < max_jobs
        elif "ids" in of and action in JOBS:
            if not of["ids"]:
                raise NotFound("No job is selected: go back, and tick some.")
            known = JOBS[action]
            found = conn.execute(ID.format(known.applies), of).fetchall()
            shown |= {"found": found, "missing": len(of["ids"]) - len(found)}
            shown["of"] = {"ids": [row["id"] for row in found]}
        else:
            known = ONE[action]
        conn.rollback()
    return Page("confirm.html", {**shown, "known": known, "notes": notes}, False)


def act(dsn: str, action: str, of: Row, max_jobs: int, back: str) -> tuple[str, str]:
    """Call the function with the arguments in `of`; return where to look, and what to say."""
    with connect(dsn, []) as conn:
        if action in BY_FILTER:
            ids = many(conn, action, of, max_jobs, dry=False)
            left = "" if len(ids) < max_jobs else " More may be left."
            return back or "/dead", f"{jobs(len(ids))} {BY_FILTER[action].did}.{left}"
        done = ONE[action]
        if of.get("ids") and action in JOBS:
            where = done.where if len(of["ids"]) == 1 else "/jobs"
            said = each(conn, action, of["ids"])
            return back or where.format(id=of["ids"][0]), said
        values = {"kind": None, "group_key": None, **of}
        row = conn.execute(done.call, values).fetchone() or {}
    (result,) = row.values()
    where = "/" if of.get("queue", "") is None else done.where
    names = {**of, "result": result}
    where = where.format_map({k: quote(str(v), safe="") for k, v in names.items()})
    return back or where, done.said(values, result)


def each(conn: Connection, action: str, ids: list[int]) -> str:
    """Do it to each of these jobs; one that has changed meanwhile does not stop the others."""
    # In the order in which everything that locks several jobs locks them.
    ids = sorted(set(ids))
    said, done = [], 0
    for id in ids:
        try:
            with conn.transaction():
                row = conn.execute(ONE[action].call, {"id": id}).fetchone() or {}
        except JobNotFound:
            said.append(f"Job {id} no longer exists.")
        else:
            (result,) = row.values()
            # Only redrive_job can decline: then it returns null.
            done += action != "retry" or result is not None
            said.append(ONE[action].said({"id": id}, result))
    if len(ids) == 1:
        return said[0]
    left = len(ids) - done
    rest = f" {jobs(left)} changed meanwhile, or had a unique key that was taken."
    return f"{jobs(done)} {JOBS[action].did}.{rest if left else ''}"
