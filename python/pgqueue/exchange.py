"""One round trip and one commit: reports to the server, jobs from it."""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
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
RELEASE_AT = (
    "select count(*), array_agg(d.id)::text"
    " from pgqueue.release(%s::bigint[], %s::bigint[], %s::timestamptz) as d (id)"
)
RELEASE_IN = (
    "select count(*), array_agg(d.id)::text from pgqueue.release("
    "%s::bigint[], %s::bigint[], clock_timestamp() + %s::interval) as d (id)"
)
COMPLETE = (
    "select j.id, pgqueue.complete(j.id, j.token, j.result::jsonb)"
    " from unnest(%s::bigint[], %s::bigint[], %s::text[]) as j (id, token, result)"
)
FAIL = (
    "select j.id, pgqueue.fail(j.id, j.token, j.error, j.retry_in, j.permanent)"
    " from unnest("
    "%s::bigint[], %s::bigint[], %s::text[], %s::interval[], %s::boolean[])"
    " as j (id, token, error, retry_in, permanent)"
)
NEXT_DUE = "select extract(epoch from pgqueue.next_due(%s::text[]))::float8"
PARK = "select pgqueue.park(%s::text[])"
UNPARK = "select pgqueue.unpark(%s::text[])"


@dataclass
class Ask:
    """What to ask for beside the reports; nothing by default."""

    claim: tuple[str, str, int, float | None, list[str] | None] | None = None
    due_in: list[str] | None = None
    park: list[str] | None = None
    unpark: list[str] | None = None


@dataclass
class Answer:
    """What came back."""

    jobs: list[Job] = field(default_factory=list)
    since: float = 0.0  # the monotonic time from which their leases count
    due: float | None = None  # seconds until the next scheduled job
    is_quiet: bool = True  # what park said
    outcomes: dict[int, str] = field(default_factory=dict)  # of failures, by job id
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
    tellings, due, quiet, claimed = [], None, None, None
    # A claim alone, as when an idle worker is woken, is quicker without a pipeline.
    is_alone = not (reported or ask.due_in or ask.park or ask.unpark)
    with nullcontext() if is_alone else conn.pipeline(), transaction(conn):
        for query, params, jobs in _statements(reported):
            tellings.append((query, conn.execute(query, params), jobs))
        # In this order: what falls due, or is enqueued, in between is claimed.
        if ask.due_in:
            due = conn.execute(NEXT_DUE, (ask.due_in,))
        if ask.park:
            quiet = conn.execute(PARK, (ask.park,))
        if ask.unpark:
            conn.execute(UNPARK, (ask.unpark,))
        if ask.claim:
            claimed = conn.execute(CLAIM, ask.claim, binary=True)
        meanwhile()

    for query, cursor, jobs in tellings:
        if query in (COMPLETE, FAIL):
            answer.outcomes.update(cursor.fetchall())
        elif (told := cursor.fetchone()) and told[0] < len(jobs):
            there = (told[1] or "{}")[1:-1]
            answer.missing |= {job.id for job in jobs} - set(
                map(int, filter(None, there.split(",")))
            )
    if due and (row := due.fetchone()):
        answer.due = row[0]
    if quiet and (row := quiet.fetchone()):
        answer.is_quiet = row[0]
    if claimed:
        answer.jobs = [Job(*row) for row in claimed.fetchall()]
    return answer


def _statements(
    jobs: Sequence[Job],
) -> list[tuple[str, tuple[Any, ...], list[Job]]]:
    """Sort the reports into as few calls as there are verbs."""
    plain: list[Job] = []
    results: list[Job] = []
    failed: list[Job] = []
    released: defaultdict[Any, list[Job]] = defaultdict(list)
    for job in sorted(jobs, key=lambda job: job.id):
        report = job.report
        if report.verb == "complete":
            (plain if report.text is None else results).append(job)
        elif report.verb == "fail":
            failed.append(job)
        elif report.verb == "release":
            released[report.until].append(job)

    calls: list[tuple[str, tuple[Any, ...], list[Job]]] = []
    if plain:
        calls.append((COMPLETE_MANY, _names(plain), plain))
    if results:
        texts = to_array(job.report.text for job in results)
        calls.append((COMPLETE, (*_names(results), texts), results))
    if failed:
        reports = [job.report for job in failed]
        errors = to_array(r.text for r in reports)
        afters, permanent = [r.after for r in reports], [r.permanent for r in reports]
        calls.append((FAIL, (*_names(failed), errors, afters, permanent), failed))
    for until, group in released.items():
        release = RELEASE_IN if isinstance(until, timedelta) else RELEASE_AT
        calls.append((release, (*_names(group), until), group))
    return calls


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
        elif verb == "fail":
            outcome = answer.outcomes.get(job.id, "lost")
            level = logging.ERROR if outcome == "dead" else logging.WARNING
            last = (job.report.text or "").strip().rpartition("\n")[2]
            log.log(level, "%r: %s: %s", job, outcome, last, extra=_fields(job))
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
