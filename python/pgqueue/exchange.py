"""One round trip and one commit: reports to the server, jobs from it."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import psycopg

from pgqueue.app import Job, Report
from pgqueue.client import LeaseLost, to_array
from pgqueue.database import OUTAGE, Connection, transaction

log = logging.getLogger("pgqueue")

CLAIM = (
    "select id, token, kind, queue, attempt, max_attempts,"
    " payload::text, headers::text,"
    " date_part('epoch', lease_expires_at - claimed_at)"
    " from pgqueue.claim(%s, %s, %s, %s::float8 * interval '1 s', %s::text[])"
)
# These say how many, in one row; which, is read only when some are missing.
COMPLETE_MANY = (
    "select count(*), array_agg(d.id)::text"
    " from pgqueue.complete_many(%s::bigint[], %s::bigint[]) as d (id)"
)
# A moment becomes a delay by the server's clock.
FINISH = (
    "select f.job_id, f.status from pgqueue.finish("
    "%s::bigint[], %s::bigint[], %s::text[], %s::text[], array("
    "select coalesce(d.delay, case when d.until is not null"
    " then greatest(d.until - clock_timestamp(), interval '0') end)"
    " from unnest(%s::interval[], %s::timestamptz[]) with ordinality"
    " as d (delay, until, place) order by d.place)) as f"
)
REST = (
    "select extract(epoch from pgqueue.rest("
    "%s::text[], %s::text[], park => %s))::float8"
)


@dataclass
class Ask:
    """What to ask for beside the reports; nothing by default."""

    claim: tuple[str, str, int, float | None, list[str] | None] | None = None
    rest: tuple[list[str], list[str] | None, bool] | None = None


@dataclass
class Answer:
    """What came back."""

    jobs: list[Job] = field(default_factory=list)
    since: float = 0.0  # the monotonic time from which their leases count
    rest: float | None = None  # seconds to sleep, unless notified before
    outcomes: dict[int, str] = field(default_factory=dict)  # by job id
    missing: set[int] = field(default_factory=set)  # ids of jobs that were lost


def exchange(
    conn: Connection,
    reported: Sequence[Job],
    ask: Ask,
    meanwhile: Callable[[], None] = lambda: None,
) -> Answer:
    """Report and ask in one transaction; all of it happens, or none.

    Calls `meanwhile` while the server works. Raises what psycopg raises, among them
    LeaseLost for one job of many: then tell them one by one.
    """
    answer = Answer(since=time.monotonic())
    tellings, rested, claimed = [], None, None
    # A claim alone, as when an idle worker is woken, is quicker without a pipeline.
    is_alone = not reported
    with nullcontext() if is_alone else conn.pipeline(), transaction(conn):
        for query, params, jobs in _statements(reported):
            tellings.append((query, conn.execute(query, params), jobs))
        if ask.claim:
            claimed = conn.execute(CLAIM, ask.claim, binary=True)
        if ask.rest:
            rested = conn.execute(REST, ask.rest)
        meanwhile()

    for query, cursor, jobs in tellings:
        if query == FINISH:
            answer.outcomes.update(cursor.fetchall())
        elif (told := cursor.fetchone()) and told[0] < len(jobs):
            there = (told[1] or "{}")[1:-1]
            answer.missing |= {job.id for job in jobs} - set(
                map(int, filter(None, there.split(",")))
            )
    if rested and (row := rested.fetchone()):
        answer.rest = row[0]
    if claimed:
        answer.jobs = [Job(*row) for row in claimed.fetchall()]
    return answer


def _statements(
    jobs: Sequence[Job],
) -> list[tuple[str, tuple[Any, ...], list[Job]]]:
    """Sort the reports into as few calls as there are verbs."""
    plain: list[Job] = []
    others: list[Job] = []
    for job in sorted(jobs, key=lambda job: job.id):
        report = job.report
        if report.verb == "complete" and report.text is None:
            plain.append(job)
        elif report.verb in ("complete", "fail", "release"):
            others.append(job)

    calls: list[tuple[str, tuple[Any, ...], list[Job]]] = []
    if plain:
        calls.append((COMPLETE_MANY, _names(plain), plain))
    if others:
        calls.append((*finish(others), others))
    return calls


def finish(jobs: Sequence[Job]) -> tuple[str, tuple[Any, ...]]:
    """Tell all outcomes in one call."""
    reports = [job.report for job in jobs]
    outcomes = ["reject" if r.permanent else r.verb for r in reports]
    delays = [
        max(r.until, timedelta()) if isinstance(r.until, timedelta) else r.after
        for r in reports
    ]
    untils = [r.until if isinstance(r.until, datetime) else None for r in reports]
    texts = to_array(r.text for r in reports)
    return FINISH, (*_names(jobs), outcomes, texts, delays, untils)


def _names(jobs: Sequence[Job]) -> tuple[str, str]:
    """Write ids and tokens as arrays, many times faster than psycopg adapts lists."""
    ids, tokens = [str(job.id) for job in jobs], [str(job.token) for job in jobs]
    return "{" + ",".join(ids) + "}", "{" + ",".join(tokens) + "}"


def tell(jobs: Sequence[Job], answer: Answer) -> None:
    """Log what became of reported jobs, by the server's word."""
    is_talkative = log.isEnabledFor(logging.DEBUG)
    for job in jobs:
        verb = job.report.verb
        if verb == "lost":
            log.warning("%r lost its lease", job, extra=_fields(job))
        elif job.id in answer.missing:
            log.warning("%r was lost or ended before", job, extra=_fields(job))
        elif verb == "fail" or answer.outcomes.get(job.id) in ("retry", "dead", "lost"):
            outcome = answer.outcomes.get(job.id, "lost")
            level = logging.ERROR if outcome == "dead" else logging.WARNING
            summary = (job.report.text or "").strip().partition("\n")[0]
            log.log(level, "%r: %s: %s", job, outcome, summary, extra=_fields(job))
        elif is_talkative:
            log.debug("%r: %s", job, verb, extra=_fields(job))


def _fields(job: Job) -> dict[str, Any]:
    taken = time.monotonic() - job.started if job.started else 0.0
    return {
        "job_id": job.id,
        "kind": job.kind,
        "queue": job.queue,
        "attempt": job.attempt,
        "token": job.token,
        "ms": round(taken * 1000, 1),
    }


def tell_one_by_one(conn: Connection, jobs: Sequence[Job]) -> None:
    """Report jobs when one among them made all fail; raises only what is an outage."""
    for job in jobs:
        try:
            try:
                tell([job], exchange(conn, [job], Ask()))
            except (*OUTAGE, LeaseLost):
                raise
            except psycopg.Error as error:
                # What the server refuses to store is the handler's failure.
                job.report = Report("fail", f"{job.report.verb} was refused: {error}")
                tell([job], exchange(conn, [job], Ask()))
        except OUTAGE:
            raise
        except psycopg.Error as error:
            log.warning("%r was not reported: %s", job, error, extra=_fields(job))
