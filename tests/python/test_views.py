"""The views after random work: every number, counted by hand from the tables."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal
from random import Random
from typing import Any

import psycopg
import pytest
from conftest import LONG, column, one
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.rows import dict_row
from worker_harness import QUEUE, wait_until

pytest_plugins = ["worker_harness"]

Rows = list[dict[str, Any]]

QUEUES = ["q", "r", "Ü"]
ERRORS = [
    "KeyError: 'a b'",
    "KeyError: 'c'\nat line 7",
    "late by 30 s",
    "100% \\ boom",
    "",
]
# No sum of these is one of the limits of the views.
AGES = [17, 101, 331, 733, 2999]
WEIGHTS = {
    "enqueue": 16,
    "claim": 12,
    "complete": 10,
    "fail": 10,
    "progress": 4,
    "cancel": 2,
    "redrive": 2,
    "expire": 2,
    "age": 2,
    "maintain": 1,
    "create_batch": 2,
    "close_batch": 2,
    "tick": 1,
    "pause": 1,
    "resume": 1,
}
CALLS = {
    "enqueue": "select pgqueue.enqueue(%s, kind => %s, run_at => clock_timestamp() + %s * interval '1 s',"
    " priority => %s, group_key => %s, batch_id => %s, unique_key => %s, unique_for => %s, after => %s,"
    " if_dead => %s, expires_at => clock_timestamp() + %s * interval '1 s') from generate_series(1, %s)",
    "claim": "select count(*) from pgqueue.claim(%s, %s, %s, '1 hour')",
    "complete": "select pgqueue.complete(%s, %s)",
    "fail": "select pgqueue.fail(%s, %s, %s, '1 second', %s)",
    "progress": "select pgqueue.progress(%s, %s, %s, %s, %s)",
    "cancel": "select pgqueue.cancel(%s)",
    "redrive": "select pgqueue.redrive_job(%s)",
    "expire": "update pgqueue.job set lease_expires_at = now() - interval '1 s' where id = %s",
    "maintain": "select count(*) from pgqueue.maintain()",
    "create_batch": "select pgqueue.create_batch('after', kind => %s)",
    "close_batch": "select pgqueue.close_batch(%s)",
    # Its next slot is one that has just passed, by however much.
    "tick": "update pgqueue.schedule as s set next_slot = a.slot, due_at = a.slot from ("
    " select name, next_slot - coalesce(every, '1 year') as slot from pgqueue.schedule"
    ") as a where s.name = a.name and not s.is_paused and s.name = %s",
    "pause": "select pgqueue.pause_schedule(%s)",
    "resume": "select pgqueue.resume_schedule(%s)",
}
LEASED = "from pgqueue.job where lease_expires_at is not null order by id"
SCHEDULES = "select name from pgqueue.schedule order by name"
FOUND = {
    "complete": f"select id, token {LEASED}",
    "fail": f"select id, token {LEASED}",
    "progress": f"select id, token {LEASED}",
    "expire": f"select id {LEASED}",
    "tick": SCHEDULES,
    "pause": SCHEDULES,
    "resume": SCHEDULES,
    "cancel": "select id from pgqueue.job order by id",
    # What comes back to a batch that has finished does not belong to it any more.
    "redrive": "select d.id from pgqueue.dead_job as d where not exists ("
    " select from pgqueue.batch as b where b.id = (d.terms).batch_id and b.finished_at is not null"
    ") order by d.id",
    "close_batch": "select id from pgqueue.batch order by id",
}
SETUP = """
    truncate pgqueue.job, pgqueue.dead_job, pgqueue.run;  -- large, of earlier examples
    select pgqueue.configure('Ü', group_limit => 1);
    select pgqueue.configure(null, keep_payloads => true);
    select pgqueue.schedule('yearly', 'q', '@yearly', kind => 'tick');
    select pgqueue.schedule('often', 'r', every => '1000 days', kind => 'tick', catch_up => 'all', jitter => '1 s');
    select pgqueue.schedule('kindless', 'idle', every => '3000 days')
"""
# Everything was longer ago, but leases hold.
AGE = """
    update pgqueue.job set run_at = run_at - a.age, claimed_at = claimed_at - a.age,
        cancelled_at = cancelled_at - a.age, terms.expires_at = (terms).expires_at - a.age
    from (select %(age)s * interval '1 s' as age) as a;
    update pgqueue.run set finished_at = finished_at - %(age)s * interval '1 s';
    update pgqueue.dead_job set died_at = died_at - %(age)s * interval '1 s'
"""
# Nothing becomes due while the views are compared.
PUT_OFF = """
    update pgqueue.job set run_at = run_at + interval '1 hour'
    where run_at between clock_timestamp() - interval '1 ms' and clock_timestamp() + interval '10 minutes'
"""
FAILED = ("retry", "expired", "dead")
# All examples have the test's database, and take what time they take.
ONE_DATABASE = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
AS_STORED = (
    "id", "queue", "kind", "priority", "enqueued_at", "attempt", "max_attempts", "worker", "claimed_at",
    "lease_expires_at", "cancelled_at", "unique_key", "group_key",
)  # fmt: skip
# What lasts till now.
NEAR = (
    "oldest_wait", "p99_wait", "longest", "stuck_for", "time_to_empty", "time_left", "age",
)  # fmt: skip


def work(db: psycopg.Connection, rng: Random) -> dict[int, set[int]]:
    """Do 300 things that jobs, workers and time do; return which jobs came to which batch."""
    batches = {}
    for verb in rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=300):
        found = db.execute(FOUND.get(verb, "select")).fetchall()
        if not found:
            continue
        args = list(rng.choice(found))
        if verb == "enqueue":
            open_ = "select id from pgqueue.batch where finished_at is null order by id"
            batch = rng.choice([None, *column(db, open_)])
            jobs = column(db, "select id from pgqueue.job order by id")
            key = None if batch else rng.choice([None, None, "k"])
            after = rng.sample(jobs, 1) if jobs and rng.random() < 0.3 else None
            args = [
                rng.choice(QUEUES),
                rng.choice("xy"),
                rng.choice([0, 0, -500, 5000]),
                rng.choice([0, 0, 5]),
                rng.choice([None, "g", "h"]),
                batch,
                key,
                key and "1 hour",
                after,
                after and rng.choice([None, "run"]),
                rng.choice([None, None, 300]),
                rng.randint(1, 4),
            ]
        elif verb == "claim":
            args = [rng.choice([*QUEUES, "after"]), rng.choice("vw"), rng.randint(1, 3)]
        elif verb == "age":
            psycopg.ClientCursor(db).execute(AGE, {"age": rng.choice(AGES)})
            continue
        elif verb == "fail":
            args += [rng.choice(ERRORS), rng.random() < 0.5]
        elif verb == "progress":
            args += [
                rng.randint(0, 9),
                rng.choice([None, 6, 80]),
                rng.choice(["", "m"]),
            ]
        elif verb == "create_batch":
            args = [rng.choice([None, "x"])]
        returned = db.execute(CALLS[verb], args)
        if verb == "tick":
            db.execute(CALLS["maintain"])
        if verb == "create_batch":
            batches[returned.fetchone()[0]] = set()
        elif verb == "enqueue" and batch:
            batches[batch] |= {row[0] for row in returned}
    return batches


def rows(db: psycopg.Connection, query: str) -> Rows:
    return db.cursor(row_factory=dict_row).execute(query).fetchall()


def by(found: Rows, *keys: str) -> dict[Any, Rows]:
    groups = defaultdict(list)
    for row in found:
        groups[tuple(row[key] for key in keys)].append(row)
    return groups


def percentile(values: Iterable, share: float) -> Any:
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1] if ordered else None


def rounded(value: Decimal) -> Decimal:
    return value.quantize(Decimal("0.001"), ROUND_HALF_UP)


def count(found: Rows, are: Callable[[dict], bool]) -> int:
    return sum(map(are, found))


class Truth:
    """What the tables say, as of one moment."""

    def __init__(self, db: psycopg.Connection, members: dict[int, set[int]]) -> None:
        self.db = db
        self.members = members
        self.jobs = rows(
            db,
            f"select {', '.join(AS_STORED)}, nullif(run_at, 'infinity') as run_at, run_at = 'infinity' as waits,"
            " exists (select from pgqueue.ticket as t where (t.queue, t.group_key, t.priority)"
            " = (j.queue, j.group_key, j.priority) and t.is_full and (t.at > clock_timestamp() or t.served < 0 and ("
            " t.at > clock_timestamp() - interval '1 minute' or exists ("
            "select from pgqueue.permit as p join pgqueue.job as h on h.id = p.job_id"
            " where (p.queue, p.kind, p.group_key) = (j.queue, '', j.group_key) and p.free_at = 'infinity' and not p.is_rate"
            " and (h.token is not null or h.run_at > clock_timestamp()))))) as is_full,"
            " errors, payload, headers, (progress).*, (terms).expires_at"
            " from pgqueue.job as j",
        )
        self.runs = rows(
            db,
            "select *, case when outcome = any ('{retry,expired,dead}') then pgqueue._error_like(error) end"
            " as error_like from pgqueue.run order by finished_at, outcome <> 'expired'",
        )
        self.dead = rows(
            db,
            "select *, pgqueue._error_like(error) as error_like from pgqueue.dead_job",
        )
        self.now = one(db, "select clock_timestamp()")
        for job in self.jobs:
            job["state"] = self.state(job)
        for run in self.runs:
            run["age"] = self.now - run["finished_at"]
            run["failed"] = run["outcome"] in FAILED
        self.last = {run["job_id"]: run["outcome"] for run in self.runs}
        self.last |= {job["id"]: "dead" for job in self.dead}
        self.last |= {job["id"]: job["state"] for job in self.jobs}

    def state(self, job: dict) -> str:
        if job["lease_expires_at"] is not None:
            return "running" if job["lease_expires_at"] > self.now else "expired"
        if job["expires_at"] and job["expires_at"] <= self.now:
            return "expired"
        if job["waits"]:
            return "blocked"
        if job["run_at"] > self.now:
            return "scheduled"
        return "blocked" if job["is_full"] else "ready"

    def all_jobs(self) -> dict[int, dict[str, Any]]:
        found = {}
        for job in self.jobs:
            row = {name: job[name] for name in (*AS_STORED, "run_at", "expires_at")}
            row |= {name: job[name] for name in ("state", "done", "total", "message")}
            row["last_error"] = job["errors"][-1]["error"] if job["errors"] else None
            row["rate"] = row["time_left"] = None
            if job["done"] is not None:
                took = job["told_at"] - job["claimed_at"]
                row["rate"] = rounded(
                    job["done"] * 10**6 / (took // timedelta(0, 0, 1))
                )
                if job["done"] and job["total"]:
                    ends_at = job["claimed_at"] + took * float(
                        job["total"] / job["done"]
                    )
                    row["time_left"] = max(ends_at - self.now, timedelta())
            found[job["id"]] = row
        return found

    def batches(self) -> dict[int, dict[str, Any]]:
        callbacks = {
            int(job["payload"]["batch"]["id"]): job
            for job in self.jobs + self.dead + self.runs
            if job["queue"] == "after" and job["payload"]
        }
        found = {}
        for batch in rows(self.db, "select * from pgqueue.batch"):
            ends = [self.last[id] for id in self.members[batch["id"]]]
            leased = {job["id"] for job in self.jobs if job["worker"]}
            row = {end: ends.count(end) for end in ("completed", "dead", "cancelled")}
            row["running"] = len(self.members[batch["id"]] & leased)
            row["waiting"] = len(ends) - sum(row.values())
            row |= {name: batch[name] for name in ("created_at", "closed_at", "queue")}
            row["kind"] = batch["kind"] or "after"
            row["state"] = "closed" if batch["closed_at"] else "open"
            row["callback_id"] = row["finished_at"] = None
            row["age"] = self.now - batch["created_at"]
            if callback := callbacks.get(batch["id"]):
                row["state"] = "finished"
                row["callback_id"] = callback.get("id") or callback["job_id"]
                row["finished_at"] = batch["finished_at"]
                row["age"] = batch["finished_at"] - batch["created_at"]
                assert batch["finished_at"] and batch["closed_at"]
                assert callback["payload"]["batch"] == {"id": batch["id"]} | {
                    name: row[name] for name in ("completed", "dead", "cancelled")
                }
            found[batch["id"]] = row
        return found

    def schedules(self) -> dict[str, dict[str, Any]]:
        fired = {}
        for job in self.jobs + self.dead + self.runs:
            if headers := job["headers"]:
                id = job.get("id") or job["job_id"]
                name, last = headers["schedule"], (id, headers["slot"])
                fired[name] = max(fired.get(name, last), last)
        paused = column(self.db, "select name from pgqueue.schedule where is_paused")
        monday = datetime(1970, 1, 5, tzinfo=UTC)
        found = {}
        for name, queue, kind, days, catch_up, jitter in [
            ("yearly", "q", "tick", None, "one", None),
            ("often", "r", "tick", 1000, "all", timedelta(seconds=1)),
            ("kindless", "idle", "idle", 3000, "one", None),
        ]:
            every = days and timedelta(days=days)
            coming = datetime(self.now.astimezone(UTC).year + 1, 1, 1, tzinfo=UTC)
            if every:
                coming = self.now - (self.now - monday) % every + every
            last_id, slot = fired.get(name, (None, None))
            found[name] = {
                "queue": queue,
                "kind": kind,
                "cron": None if every else "@yearly",
                "every": every,
                "timezone": "UTC",
                "catch_up": catch_up,
                "jitter": jitter,
                "paused": name in paused,
                "next_slot": None if name in paused else coming,
                "last_slot": slot
                and datetime.fromisoformat(slot.replace("Z", "+00:00")),
                "last_job_id": last_id,
                "last_state": self.last.get(last_id),
                "problem": None,
            }
        return found

    def retention(self) -> dict[str, dict[str, Any]]:
        def kept(found: Rows, since: str, kept_for: timedelta | None = None) -> dict:
            oldest = min((row[since] for row in found), default=None)
            return {"rows": len(found), "oldest": oldest, "kept_for": kept_for}

        windows = column(self.db, "select unique_key from pgqueue.recent_key")
        return {
            "jobs": kept(self.jobs, "enqueued_at"),
            "dead jobs": kept(self.dead, "died_at"),
            "runs": kept(self.runs, "finished_at", timedelta(days=7)),
            "windows": {"rows": len(windows), "oldest": None, "kept_for": None},
        }

    def since(self, **age: int) -> Rows:
        return [run for run in self.runs if run["age"] <= timedelta(**age)]

    def queues(self) -> dict[str, dict[str, Any]]:
        hour, found = self.since(hours=1), {}
        names = {row["queue"] for row in self.jobs + self.dead + hour} | {"Ü", "idle"}
        for name in names:
            jobs = [job for job in self.jobs if job["queue"] == name]
            runs = [run for run in hour if run["queue"] == name]
            due = [job["run_at"] for job in jobs if job["state"] == "ready"]
            waits = [run["waited"] for run in runs if run["worker"]]
            holders = {job["worker"] for job in jobs if job["state"] == "running"}
            row = {
                state: count(jobs, lambda job, state=state: job["state"] == state)
                for state in ("ready", "scheduled", "running", "expired", "blocked")
            }
            row |= {
                "dead": count(self.dead, lambda job, name=name: job["queue"] == name),
                "is_estimate": False,
                "paused": False,
                "pauses": 0,
                "parked": 0,
                "p50_wait_last_hour": percentile(waits, 0.5),
                "p99_wait_last_hour": percentile(waits, 0.99),
                "finished_last_hour": count(
                    runs, lambda run: run["outcome"] == "completed"
                ),
                "failed_last_hour": count(runs, lambda run: run["failed"]),
            }
            for window, seconds in ("1m", 60), ("5m", 300), ("1h", 3600):
                ended = [
                    run for run in runs if run["age"] <= timedelta(seconds=seconds)
                ]
                done = count(ended, lambda run: run["outcome"] == "completed")
                failed = count(ended, lambda run: run["failed"])
                row[f"rate_{window}"] = rounded(Decimal(done) / seconds)
                row[f"failure_rate_{window}"] = (
                    rounded(Decimal(failed) / (done + failed))
                    if done + failed
                    else None
                )
                if window == "5m":
                    seen = {run["worker"] for run in ended if run["worker"]}
                    row["workers"] = len(holders | seen)
                    row["time_to_empty"] = (
                        timedelta(seconds=300 * row["ready"] / done) if done else None
                    )
            if not row["ready"]:
                row["time_to_empty"] = timedelta()
            row["oldest_wait"] = min(due, default=None)
            row["p99_wait"] = percentile(due, 0.01)
            found[name] = row
        return found

    def workers(self) -> dict[str, dict[str, Any]]:
        held = by([job for job in self.jobs if job["state"] == "running"], "worker")
        runs = by([run for run in self.since(hours=1) if run["worker"]], "worker")
        found = {}
        for key in held.keys() | runs.keys():
            jobs, ended = held.get(key, []), runs.get(key, [])
            claims = [job["claimed_at"] for job in jobs]
            claims += [run["finished_at"] - run["taken"] for run in ended]
            found[key[0]] = {
                "queues": sorted({row["queue"] for row in jobs + ended}),
                "held": len(jobs),
                "longest": min((job["claimed_at"] for job in jobs), default=None),
                "last_claimed_at": max(claims),
                "last_finished_at": max(
                    (run["finished_at"] for run in ended), default=None
                ),
                "finished_last_hour": count(
                    ended, lambda run: run["outcome"] == "completed"
                ),
                "failed_last_hour": count(ended, lambda run: run["failed"]),
                "sessions": 0,
                "parked": False,
            }
        return found

    def kinds(self) -> dict[tuple, dict[str, Any]]:
        ran = [run for run in self.runs if run["outcome"] != "cancelled"]
        return {
            key: {
                "runs": len(runs),
                "failures": count(runs, lambda run: run["failed"]),
                "p50_taken": percentile((run["taken"] for run in runs), 0.5),
                "p99_taken": percentile((run["taken"] for run in runs), 0.99),
                "last_finished_at": max(run["finished_at"] for run in runs),
            }
            for key, runs in by(ran, "queue", "kind").items()
        }

    def throughput(self) -> dict[tuple, dict[str, Any]]:
        minute = {"second": 0, "microsecond": 0}
        first = self.now.replace(**minute) - timedelta(minutes=59)
        ran = [
            run for run in self.runs if run["worker"] and run["finished_at"] >= first
        ]
        for run in ran:
            run["minute"] = run["finished_at"].replace(**minute)
        return {
            key: {
                "finished": count(runs, lambda run: run["outcome"] == "completed"),
                "failed": count(runs, lambda run: run["failed"]),
                "p50_waited": percentile((run["waited"] for run in runs), 0.5),
                "p99_waited": percentile((run["waited"] for run in runs), 0.99),
                "p50_taken": percentile((run["taken"] for run in runs), 0.5),
                "p99_taken": percentile((run["taken"] for run in runs), 0.99),
            }
            for key, runs in by(ran, "minute", "queue").items()
        }

    def hours(self) -> dict[tuple, dict[str, Any]]:
        ran = [run for run in self.since(days=6) if run["worker"]]
        for run in ran:
            run["hour"] = run["finished_at"].replace(minute=0, second=0, microsecond=0)
        return {
            key: {
                "finished": count(runs, lambda run: run["outcome"] == "completed"),
                "failed": count(runs, lambda run: run["failed"]),
                "p99_waited": percentile((run["waited"] for run in runs), 0.99),
                "p99_taken": percentile((run["taken"] for run in runs), 0.99),
                "is_estimate": False,
            }
            for key, runs in by(ran, "hour", "queue").items()
        }

    def batch_jobs(self) -> dict[tuple, dict[str, Any]]:
        return {
            (batch, id): {"state": self.last[id]}
            for batch, ids in self.members.items()
            for id in ids
            if self.last[id] not in ("completed", "cancelled")
        }

    def failures(self) -> dict[tuple, dict[str, Any]]:
        failed = [run for run in self.since(days=1) if run["failed"]]
        return {
            key: {
                "failures": len(runs),
                "first_at": min(run["finished_at"] for run in runs),
                "last_at": max(run["finished_at"] for run in runs),
            }
            for key, runs in by(failed, "queue", "kind", "error_like").items()
        }

    def dead_jobs(self) -> dict[tuple, dict[str, Any]]:
        return {
            key: {
                "jobs": len(jobs),
                "first_died_at": min(job["died_at"] for job in jobs),
                "last_died_at": max(job["died_at"] for job in jobs),
            }
            for key, jobs in by(self.dead, "queue", "kind", "error_like").items()
        }

    def stuck(self) -> dict[int, dict[str, Any]]:
        minute, found = timedelta(minutes=1), {}
        kinds = self.kinds()
        for job in self.jobs:
            kind = kinds.get((job["queue"], job["kind"]), {"p99_taken": timedelta()})
            slow = max(timedelta(minutes=10), 10 * kind["p99_taken"])
            if job["lease_expires_at"] is None:
                continue
            if self.now - job["lease_expires_at"] > minute:
                problem, since = "expired", job["lease_expires_at"]
            elif job["cancelled_at"] and self.now - job["cancelled_at"] > minute:
                problem, since = "cancelling", job["cancelled_at"]
            elif self.now - job["claimed_at"] > slow:
                problem, since = "slow", job["claimed_at"]
            else:
                continue
            found[job["id"]] = {
                "problem": problem,
                "worker": job["worker"],
                "stuck_for": since,
            }
        return found


def seen(
    db: psycopg.Connection,
    view: str,
    keys: tuple[str, ...],
    columns: dict,
    truth: Truth,
):
    """Return what a view says of these columns; what lasts till now as since when."""
    found = {}
    for row in rows(db, f"select * from pgqueue.{view}"):
        for name in ("oldest_wait", "p99_wait", "longest", "stuck_for"):
            if row.get(name) is not None:
                row[name] = truth.now - row[name]
        key = tuple(row[key] for key in keys)
        found[key if len(keys) > 1 else key[0]] = {name: row[name] for name in columns}
    return found


def differences(said: dict, true: dict) -> list:
    """What differs, where moments are counted back from different nows by a second or so."""
    found = [("keys", said.keys() ^ true.keys())] if said.keys() != true.keys() else []
    for key in said.keys() & true.keys():
        for name, value in true[key].items():
            other = said[key][name]
            if name in NEAR and None not in (value, other):
                if abs(value - other) < timedelta(seconds=5):
                    continue
            if value != other:
                found.append((key, name, other, value))
    return found


@settings(ONE_DATABASE, max_examples=20 if LONG else 6)
@given(st.randoms(use_true_random=True))
def test_every_number_of_every_view_is_what_the_tables_say(db, rng) -> None:
    with db.transaction(force_rollback=True):
        db.execute(SETUP)
        members = work(db, rng)
        db.execute(PUT_OFF)
        truth = Truth(db, members)
        for view, keys, true in [
            ("jobs", ("id",), truth.all_jobs()),
            ("queues", ("queue",), truth.queues()),
            ("batches", ("id",), truth.batches()),
            ("schedules", ("name",), truth.schedules()),
            ("retention", ("what",), truth.retention()),
            ("workers", ("worker",), truth.workers()),
            ("kinds", ("queue", "kind"), truth.kinds()),
            ("throughput", ("minute", "queue"), truth.throughput()),
            ("hours", ("hour", "queue"), truth.hours()),
            ("batch_jobs", ("batch_id", "id"), truth.batch_jobs()),
            ("failures", ("queue", "kind", "error_like"), truth.failures()),
            ("dead", ("queue", "kind", "error_like"), truth.dead_jobs()),
            ("stuck", ("id",), truth.stuck()),
        ]:
            columns = next(iter(true.values()), {})
            assert not differences(seen(db, view, keys, columns, truth), true), view
        leased = {job["id"] for job in truth.jobs if job["lease_expires_at"]}
        assert set(column(db, "select id from pgqueue.running")) == leased


# What is set

# Of any setting of this type that has no list of its own.
VALUES = {
    "boolean": ["true", "false"],
    "int": ["3", "5", "7"],
    "interval": ["00:00:02", "00:09:00"],
}
CAPS = ("max_running", "rate_limit", "rate_period")
Scope = tuple[str | None, str | None, str | None]
Said = dict[Scope, dict[str, str]]


def is_within(scope: Scope, wider: Scope) -> bool:
    return all(w in (None, s) for s, w in zip(scope, wider, strict=True))


def narrowness(scope: Scope) -> tuple[bool, ...]:
    queue, kind, group = scope
    return bool(group), group != "*", bool(kind), bool(queue)


def say(db: psycopg.Connection, rng: Random) -> Said:
    """Call configure, pause and resume at random; return what was set for what."""
    said: Said = defaultdict(dict)
    listed = "select name, type, range from pgqueue._setting where name <> 'paused'"
    values = {
        name: VALUES.get(type_, range_) for name, type_, range_ in db.execute(listed)
    }
    values["handler"] = [f"public.{name}(jsonb)" for name in ("one", "two")]
    for handler in values["handler"]:
        db.execute(f"create function {handler} returns void language sql as ''")
    for _ in range(40):
        verb = rng.choice(["configure", "configure", "pause", "resume"])
        scope = tuple(rng.choice([None, *pair]) for pair in ("qr", "kl", "gh"))
        named = {}
        if verb == "configure":
            if rng.random() < 0.1:
                scope = scope[0], None, "*"
            names = rng.sample(sorted(values), 2)
            named = {name: rng.choice(values[name]) for name in names}
            named["reset"] = str(rng.random() < 0.2)
        args = "".join(f", {name} => %s" for name in named)
        try:
            with db.transaction():
                db.execute(
                    f"select pgqueue.{verb}(%s, kind => %s, group_key => %s{args})",
                    [*scope, *named.values()],
                )
        except psycopg.errors.InvalidParameterValue:
            continue  # kinds and groups do not have all settings
        if verb == "configure":
            if named.pop("reset") == "True":
                said[scope] = {k: v for k, v in said[scope].items() if k == "paused"}
            said[scope] |= named
            continue
        for other in said:
            if is_within(other, scope):
                said[other].pop("paused", None)
        said[scope]["paused"] = str(verb == "pause").lower()
        paused = [s for s in said if said[s].get("paused") == "true"]
        for other in said:
            if said[other].get("paused") == "false" and not any(
                is_within(other, wider) for wider in paused
            ):
                del said[other]["paused"]
    return {scope: settings for scope, settings in said.items() if settings}


def in_force(said: Said, defaults: dict[str, Any]) -> dict[tuple, dict[str, Any]]:
    found = {}
    for scope in said.keys() | {(None, None, None)}:
        for name, default in defaults.items():
            row = {"value": default, "set_for": "default"}
            for wider in sorted(said, key=narrowness):
                queue, kind, group = wider
                holds = is_within(scope, wider) or (
                    scope[2] and group == "*" and is_within(scope, (queue, kind, None))
                )
                # A queue has its caps beside those of its kinds and groups.
                is_beside = name in CAPS and any(scope[1:]) and not any(wider[1:])
                if name not in said[wider] or not holds or is_beside:
                    continue
                what = " and ".join(["kind"] * bool(kind) + ["group"] * bool(group))
                where = " in all queues" if what and not queue else ""
                whose = what or ("queue" if queue else "all queues")
                row = {"value": said[wider][name], "set_for": whose + where}
            found[*scope, name] = row
    return found


@settings(ONE_DATABASE, max_examples=20)
@given(st.randoms(use_true_random=True))
def test_the_settings_in_force_are_the_narrowest_that_were_said(db, rng) -> None:
    with db.transaction(force_rollback=True):
        defaults = dict(
            db.execute(
                "select s.name, coalesce(d.value, case when s.is_seldom then s.fallback::interval::text end) "
                "from pgqueue._setting as s left join "
                "jsonb_each_text(to_jsonb(pgqueue._defaults())) as d on d.key = s.name"
            ).fetchall()
        )
        given = say(db, rng)
        true = in_force(given, defaults)
        said = {
            (row["queue"], row["kind"], row["group_key"], row["setting"]): row
            for row in rows(db, "select * from pgqueue.settings")
        }
        assert not differences(said, true)
        for queue, pauses in db.execute("select queue, pauses from pgqueue.queues"):
            narrower = {
                scope[1:]: settings["paused"]
                for whose in (None, queue)
                for scope, settings in given.items()
                if scope[0] == whose and any(scope[1:]) and "paused" in settings
            }
            assert pauses == list(narrower.values()).count("true"), queue
        # So do the functions.
        query = """
            select s.* from pgqueue.settings as s
            join pgqueue._setting as l on l.name = s.setting
            where s.value is distinct from case
                when l.is_seldom then pgqueue._seldom(coalesce(s.queue, ''), s.setting, coalesce(s.kind, ''))
                else to_jsonb(pgqueue._in_force(
                    coalesce(s.queue, ''), coalesce(s.kind, ''), coalesce(s.group_key, '')
                )) ->> s.setting
            end
        """
        assert not rows(db, query)


# Where there is too much to count


def near(value, true: float) -> bool:
    return float(value) == pytest.approx(true, rel=0.2)


def buffers(db: psycopg.Connection, query: str) -> int:
    plan = one(db, f"explain (analyze, buffers, format json) {query}")[0]["Plan"]
    return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]


def test_of_very_many_jobs_what_runs_and_short_queues_are_counted_and_the_rest_estimated(
    db,
):
    for queue, priority, when, jobs in [
        ("long", 0, "0", 40000),
        ("long", 5, "1 day", 20000),
        ("long", -5, "1 day", 20000),
        ("short", 0, "-1 hour", 70),
    ]:
        db.execute(
            "select pgqueue.enqueue_many(%s, array_fill(to_jsonb(repeat('x', 200)), array[%s]), priority => %s,"
            " run_at => clock_timestamp() + %s::interval)",
            (queue, jobs, priority, when),
        )
    db.execute("select pgqueue.enqueue('one ' || n) from generate_series(1, 300) as n")
    # Those in front could still begin.
    db.execute(
        "update pgqueue.job as j set terms.expires_at = now()"
        " where j.id in (select id from pgqueue.job where priority = -5 order by id offset 5000)"
    )
    held = column(db, "select id from pgqueue.claim('long', 'w', 200)")
    assert one(db, "select pg_relation_size('pgqueue.job')") > 2**24
    found = {row["queue"]: row for row in rows(db, "select * from pgqueue.queues")}
    long, short = found["long"], found["short"]
    assert near(long["ready"], 39800) and near(long["scheduled"], 25000)
    assert near(long["expired"], 15000)
    assert (long["running"], long["workers"], long["is_estimate"]) == (200, 1, True)
    assert (short["ready"], short["is_estimate"]) == (70, False)
    assert sum(row["ready"] for name, row in found.items() if "one" in name) == 300
    for row in (long, short):
        query = "select clock_timestamp() - min(run_at) from pgqueue.jobs where queue = %s and state = 'ready'"
        assert abs(one(db, query, row["queue"]) - row["oldest_wait"]) < timedelta(
            seconds=5
        )
    assert sorted(column(db, "select id from pgqueue.running")) == sorted(held)
    assert buffers(db, "select * from pgqueue._count_jobs()") < 10000

    db.execute(
        "delete from pgqueue.job where queue <> 'short' and id <> all (%s)", (held,)
    )
    db.execute("vacuum pgqueue.job")
    found = {row["queue"]: row for row in rows(db, "select * from pgqueue.queues")}
    assert [found["long"][name] for name in ("ready", "running", "is_estimate")] == [
        0,
        200,
        False,
    ]
    assert buffers(db, "select * from pgqueue._count_jobs()") < 500


def test_of_very_many_jobs_those_of_groups_that_run_are_counted_wherever_they_are(db):
    """They are at the front of their groups, and far behind in their lane."""
    for group, jobs in [("large", 60000), ("busy", 400), *((g, 3) for g in "abcdefgh")]:
        db.execute(
            "select pgqueue.enqueue_many('q', array_fill(to_jsonb(repeat('x', 200)), array[%(n)s]),"
            " group_keys => array_fill(%(group)s::text, array[%(n)s]))",
            {"n": jobs, "group": group},
        )
    assert one(db, "select pg_relation_size('pgqueue.job')") > 2**24
    held = column(db, "select id from pgqueue.claim('q', 'w', 900)")
    of_groups = (
        "select group_key, count(*) from pgqueue.job where token is not null group by 1"
    )
    counts = dict(db.execute(of_groups).fetchall())
    assert len(counts) == 10 and counts["busy"] > 200
    assert sorted(column(db, "select id from pgqueue.running")) == sorted(held)
    (queue,) = rows(db, "select * from pgqueue.queues")
    assert (queue["running"], queue["workers"]) == (len(held), 1)
    assert one(db, "select held from pgqueue.workers") == len(held)
    db.execute(
        "update pgqueue.job set lease_expires_at = now() - interval '1 hour' where token is not null and group_key = 'a'"
    )
    (queue,) = rows(db, "select * from pgqueue.queues")
    assert (queue["running"], queue["expired"]) == (len(held) - 3, 3)
    assert column(db, "select problem from pgqueue.stuck") == ["expired"] * 3
    query = "select h.status from pgqueue.health() as h where h.check = 'leases'"
    assert one(db, query) == "critical"

    db.execute(
        "select pgqueue.enqueue('q', group_key => 'group ' || n) from generate_series(1, 3000) as n"
    )
    assert buffers(db, "select * from pgqueue._leased()") < 10000


def test_of_very_many_jobs_those_of_two_queues_with_one_hash_are_told_apart(db):
    """They share lanes, in which their jobs come in turn."""
    names = "select 'queue ' || n as name from generate_series(1, 300000) as n"
    pair = db.execute(
        f"select min(name), max(name) from ({names}) as n group by hashtext(name) having count(*) > 1 limit 1"
    ).fetchone()
    db.execute(
        "select pgqueue.enqueue_many('filler', array_fill(to_jsonb(repeat('x', 1000)), array[17000]))"
    )
    assert one(db, "select pg_relation_size('pgqueue.job')") > 2**24
    for few in True, False:
        in_turn = "select pgqueue.enqueue(q) from generate_series(1, %s), unnest(%s::text[]) as q"
        db.execute(in_turn, (4 if few else 20, list(pair)))
        if few:
            for name in pair:
                db.execute("select pgqueue.claim(%s, %s)", (name, f"w of {name}"))
        found = {row["queue"]: row for row in rows(db, "select * from pgqueue.queues")}
        for name in pair:
            row = found[name]
            assert (row["ready"], row["running"]) == (3 if few else 23, 1), name
            assert row["workers"] == 1 and not row["is_estimate"]
    held = column(db, "select id from pgqueue.job where token is not null")
    assert sorted(column(db, "select id from pgqueue.running")) == sorted(held)


def test_very_many_dead_jobs_are_estimated_by_queue_and_by_error(db):
    db.execute(
        "insert into pgqueue.dead_job (id, died_at, enqueued_at, run_at, priority, attempt, max_attempts,"
        " queue, kind, error, payload, errors)"
        " select n, now(), now(), now(), 0, 1, 1, case when n % 1000 = 0 then 'few' else 'many' end, 'k',"
        " case when n % 4 = 0 then 'KeyError: ' else 'TimeoutError: ' end || n || E'\\n' || repeat('x', 500),"
        " '{}', '[]' from generate_series(1, 30000) as n"
    )
    found = {row["queue"]: row for row in rows(db, "select * from pgqueue.queues")}
    assert near(found["many"]["dead"], 29970) and found["many"]["is_estimate"]
    assert (found["few"]["dead"], found["few"]["is_estimate"]) == (30, False)
    dead = {
        row["error_like"]: row
        for row in rows(db, "select * from pgqueue.dead where queue = 'many'")
    }
    assert near(dead["KeyError: %"]["jobs"], 7470) and near(
        dead["TimeoutError: %"]["jobs"], 22500
    )
    for row in dead.values():
        assert row["is_estimate"]
        said = "select split_part(error, E'\\n', 1) from pgqueue.dead_job where id = %s"
        assert row["sample_error"] == one(db, said, row["sample_id"])
    db.execute("delete from pgqueue.dead_job where id % 5000 <> 7")
    assert one(db, "select sum(jobs) from pgqueue.dead where not is_estimate") == 6


def test_of_very_many_runs_some_pages_stand_for_all_and_no_others_are_read(db):
    db.execute(
        "insert into pgqueue.run (slot, attempt, job_id, finished_at, waited, taken, queue, kind, outcome, worker)"
        " select n %% 2, 1, n, clock_timestamp() - %s::interval * (1 - n / 120000.0), random() * 100 * '1 s'::interval,"
        " '1 s', 'q', 'k', case when n %% 5 = 0 then 'retry' else 'completed' end, 'w'"
        " from generate_series(1, 120000) as n",
        ("2 hours",),
    )
    (row,) = rows(db, "select * from pgqueue.queues")
    assert row["is_estimate"]
    assert near(row["finished_last_hour"], 48000) and near(
        row["failed_last_hour"], 12000
    )
    assert near(row["rate_1h"], 48000 / 3600) and near(row["rate_5m"], 48000 / 3600)
    assert near(row["failure_rate_1h"], 0.2)
    assert near(row["p50_wait_last_hour"].total_seconds(), 50)
    query = "pgqueue._recent_runs(clock_timestamp() - interval '1 hour', %s)"
    sampled = rows(db, f"select weight, count(*) from {query % 40} group by 1")
    assert len(sampled) == 1 and sampled[0]["weight"] > 5
    assert near(sampled[0]["weight"] * sampled[0]["count"], 60000)
    few, all_ = (buffers(db, f"select from {query % most}") for most in (40, 10000))
    assert few < 0.6 * all_
    (kind,) = rows(db, "select * from pgqueue.kinds")
    assert kind["runs"] == 120000  # a page in four, and each has as many


def test_a_queue_with_few_runs_beside_a_busy_one_is_counted(db):
    db.execute(
        "insert into pgqueue.run (slot, attempt, job_id, finished_at, waited, taken, queue, kind, outcome, worker)"
        " select 1, 1, n, clock_timestamp() - interval '50 minutes' * (1 - n / 30000.0), '1 s', '1 s',"
        " case when n between 20001 and 20003 then 'quiet' else 'busy' end, 'k', 'completed', 'w'"
        " from generate_series(1, 30000) as n"
    )
    query = "select max(weight) from pgqueue._recent_runs(now() - interval '1 hour')"
    assert one(db, query) > 1
    db.execute("select pgqueue.enqueue('silent')")
    busy, quiet, silent = rows(db, "select * from pgqueue.queues order by queue")
    estimates = [row["is_estimate"] for row in (busy, quiet, silent)]
    assert estimates == [True, False, False]
    assert near(busy["finished_last_hour"], 29997)
    assert (quiet["queue"], quiet["finished_last_hour"]) == ("quiet", 3)


def test_of_a_queue_that_the_sample_may_have_missed_it_is_said_to_be_an_estimate(db):
    db.execute(
        "insert into pgqueue.run (slot, attempt, job_id, finished_at, waited, taken, queue, kind, outcome, worker)"
        " select 1, 1, n, clock_timestamp() - interval '50 minutes' * (1 - n / 90000.0), '1 s', '1 s', 'busy', 'k',"
        " 'completed', 'w' from generate_series(1, 90000) as n"
    )
    db.execute("select pgqueue.enqueue('silent')")
    query = "select max(weight) from pgqueue._recent_runs(now() - interval '1 hour')"
    assert one(db, query) == 8
    found = column(db, "select is_estimate from pgqueue.queues order by queue")
    assert found == [True, True]


def test_the_last_state_of_a_schedule_is_found_without_reading_all_runs(db):
    db.execute(
        "insert into pgqueue.run (slot, attempt, job_id, finished_at, waited, taken, queue, kind, outcome, worker)"
        " select n / 10000, 1, n, clock_timestamp() - interval '1 day' * (1 - n / 120000.0), '0 s', '1 s', 'q', 'k',"
        " 'completed', 'w' from generate_series(1, 119999) as n"
    )
    db.execute("select pgqueue.schedule('s', 'q', '@daily')")
    db.execute("update pgqueue.schedule set last_job_id = 70000")
    db.execute("vacuum analyze pgqueue.run, pgqueue.schedule")
    last = "select last_state from pgqueue.schedules"
    assert one(db, last) == "completed"
    assert buffers(db, last) < 500
    assert buffers(db, "select next_slot from pgqueue.schedules") < 20


# Errors of one cause


@pytest.mark.parametrize(
    ("error", "pattern"),
    [
        ("KeyError: 'user 7'", "KeyError: %"),
        ('job 42 of "a b" took 3.5s\n  at line 8', "job % of % took %"),
        ("no route to 10.0.0.1:5432, fe80::1", "no route to %, %"),
        ("ada@example.org: see https://x.org/?a=1 or /var/log/x", "%: see % or %"),
        ("8b0a1c9e-0b1d-4c6f-9a57-3a4c1d2e5f60 is not there", "% is not there"),
        ("can't read what isn't there", "can't read what isn't there"),
        (r"100% of c:\_x", r"%\% of c:\\\_x"),
        ("", ""),
    ],
)
def test_a_pattern_leaves_out_what_differs(db, error, pattern):
    assert one(db, "select pgqueue._error_like(%s)", error) == pattern


@settings(ONE_DATABASE, max_examples=300)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=60))
def test_a_pattern_is_found_by_what_it_was_made_of(db, error) -> None:
    query = "select pgqueue._summary(%(e)s) ilike pgqueue._error_like(%(e)s)"
    assert one(db, query, {"e": error})


# Who works


def test_a_worker_is_seen_while_it_works_sleeps_and_when_it_is_gone(db, workers):
    def seen() -> dict[str, Any]:
        (row,) = rows(db, "select * from pgqueue.workers") or [{}]
        return row

    worker = workers.start("--name", "wörker " + "x" * 30 + "ö" + "x" * 30)
    wait_until(lambda: seen().get("parked"))
    asleep = seen()
    assert (asleep["held"], asleep["queues"], asleep["last_claimed_at"]) == (
        0,
        [],
        None,
    )
    assert asleep["worker"].startswith("xxx") and asleep["sessions"] >= 1
    assert rows(db, "select * from pgqueue.queues") == []
    id = one(db, "select pgqueue.enqueue(%s, kind => 'hold')", QUEUE)
    workers.began()
    wait_until(lambda: seen()["sessions"] >= 2)  # one that finishes connects meanwhile
    busy = seen()
    assert busy["worker"] == one(db, "select worker from pgqueue.job where id = %s", id)
    assert (busy["held"], busy["queues"]) == (1, [QUEUE]) and busy["sessions"] >= 2
    (queue,) = rows(db, "select * from pgqueue.queues")
    assert (queue["running"], queue["workers"]) == (1, 1)
    workers.let_go()
    wait_until(lambda: seen()["finished_last_hour"] == 1 and seen()["parked"])
    (queue,) = rows(db, "select * from pgqueue.queues")
    assert (queue["workers"], queue["parked"]) == (1, 1)
    assert workers.finish(worker) == 0
    wait_until(lambda: seen()["sessions"] == 0)
    gone = seen()
    assert (gone["worker"], gone["held"], gone["parked"]) == (busy["worker"], 0, False)
    assert gone["last_claimed_at"] == busy["last_claimed_at"] < gone["last_finished_at"]
