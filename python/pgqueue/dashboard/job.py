"""One job: what is known about it, wherever it is, and about the jobs around it."""

from collections import defaultdict
from datetime import datetime

from pgqueue.dashboard.pages import Page, Reading, Row, job_id

MOST = 20_000  # characters of a payload
AROUND = 50  # jobs

LIVE = "select * from pgqueue.jobs where id = %(id)s"
STATUS = """
select
    queue, kind, state, attempt, max_attempts, priority, enqueued_at, run_at, expires_at, claimed_at,
    finished_at, worker, done, total, message, rate, time_left, last_error, errors,
    payload is not null as has_payload,
    case when %(payload)s then left(jsonb_pretty(payload), %(most)s) end as payload,
    case when %(payload)s then length(jsonb_pretty(payload)) end as payload_length
from pgqueue.status(%(id)s)
"""
# What only the tables know.
REST = """
select left(headers::text, %(most)s) as headers, (terms).batch_id, group_key, unique_key
from pgqueue.job where id = %(id)s
union all
select left(headers::text, %(most)s), (terms).batch_id, group_key, unique_key
from pgqueue.dead_job where id = %(id)s
"""
RUNS = """
select attempt, finished_at, waited, taken, outcome, worker, left(error, 20000) as error,
    left(result::text, 20000) as result, left(headers::text, 20000) as headers
from pgqueue.run
where job_id = %(id)s and finished_at <= coalesce(%(ended)s::timestamptz + interval '1 hour', 'infinity')
order by finished_at desc, attempt desc
limit 200
"""
# The last ones: a job may have 10,000.
STEPS = """
select s.name, s.saved_at, count(*) over () as matches,
    left(s.value::text, 1000) || case when length(s.value::text) > 1000 then '…' else '' end as value
from pgqueue.steps(%(id)s) with ordinality as s (name, value, saved_at, place)
order by s.place desc
limit %(shown)s
"""
# Each by its id, however many jobs there are.
NEAR = """
select d.{1} as id, coalesce(j.state, 'ended') as state, j.queue, j.kind
from (select d.{1} from pgqueue.dependencies as d where d.{0} = %(id)s order by 1 limit %(most)s) as d
left join lateral (select * from pgqueue.jobs as j where j.id = d.{1} limit 1) as j on true
order by d.{1}
"""


def page(reading: Reading) -> Page:
    """Show a job. A reader of the views sees why(), and what waits or runs."""
    id = job_id(reading.asked.get("id", ""))
    why = reading.row("select pgqueue.why(%(id)s) as why", id=id) or {}
    found = reading.row(LIVE, id=id) or {}
    is_living, runs = bool(found), None
    errors: list[Row] = []
    steps: list[Row] = []
    if reading.rights["sees_all"]:
        wants = {"payload": "payload" in reading.asked, "most": MOST}
        status = reading.row(STATUS, id=id, **wants) or {}
        found = {**status, **(reading.row(REST, id=id, most=MOST) or {}), **found}
        # Of one that has ended the log has the same.
        if is_living or found["state"] == "dead":
            errors = status.get("errors") or []
            if reading.rights["sees_steps"]:
                steps = reading.rows(STEPS, id=id)
        # The log may be long: it is read once, not every two seconds.
        if not is_living or "log" in reading.asked:
            reading.conn.execute("set local enable_seqscan = off")
            runs = reading.rows(RUNS, id=id, ended=found.get("finished_at"))
            found["headers"] = found.get("headers") or (runs and runs[0]["headers"])

    def near(own: str, other: str) -> list[Row]:
        return reading.rows(NEAR.format(own, other), id=id, most=AROUND + 1)

    return Page(
        "job.html",
        {
            "id": id,
            "why": why["why"],
            "job": defaultdict(lambda: None, found),  # what nothing knows is None
            "is_living": is_living,
            "errors": [
                {**error, "at": datetime.fromisoformat(error["at"])}
                for error in reversed(errors)
            ],
            "steps": steps,
            "runs": runs,
            "waits_for": near("waiter_id", "job_id"),
            "waiters": near("job_id", "waiter_id"),
            "around": AROUND,
            "most": MOST,
        },
        is_live=is_living and runs is None,
    )
