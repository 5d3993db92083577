"""Finds jobs by what is known about them, a page at a time.

Whatever is asked, a page costs as much with ten million jobs as with ten thousand: it scans an index for
at most 5,000 rows from where the last page stopped, and says so if that was not enough.
"""

import json
import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from urllib.parse import urlencode

from pgqueue.dashboard.pages import NotFound, Page, Reading, Row

LOOKED = 5_000
ROWS = 50
FIELDS = ("queue", "kind", "group", "key", "worker", "error", "payload", "batch")
LIVING = ("ready", "scheduled", "running", "expired", "blocked")
OUTCOMES = {
    "completed": ["completed"],
    "cancelled": ["cancelled"],
    "failed attempts": ["retry", "expired", "dead"],
}
STATES = ("", *LIVING, "dead", *OUTCOMES)


@dataclass(frozen=True)
class Walk:
    """An index in its order. After a row's place, the text of each part, the next page goes on."""

    table: str
    order: tuple[str, ...]
    where: str = "true"
    goes_up: bool = True

    def sql(self, place: list[str] | None) -> tuple[str, Row]:
        """Return the query for the rows after a place, and its parameters."""
        way, sign = ("", ">") if self.goes_up else (" desc", "<")
        order = ", ".join(part + way for part in self.order)
        behind = "true"
        if place is not None:
            marks = ", ".join(f"%(place{n})s" for n in range(len(place)))
            behind = f"({', '.join(self.order)}) {sign} ({marks})"
        own = ", ".join(f"({part})::text" for part in self.order)
        query = (
            f"select w.*, array[{own}] as place from {self.table} as w"
            f" where {self.where} and {behind} order by {order} limit {LOOKED}"
        )
        return query, {f"place{n}": part for n, part in enumerate(place or [])}


def each(table: str, ids: str) -> str:
    """One after the other: to have them in order, the planner would read the whole table."""
    one = f"select * from {table} as j where j.id = b.id offset 0"
    return f"(select j.* from ({ids} offset 0) as b cross join lateral ({one}) as j)"


OF_BATCH = "select id from pgqueue.batch_jobs where batch_id = %(batch)s::bigint"
LANE = "(priority + 1000 * num_nonnulls(group_key))"
IN_QUEUE = "hashtext(queue) = hashtext(%(queue)s) and queue = %(queue)s"
GROUP = "hashtextextended(group_key, hashtext(queue))"
# The first whose fields are asked for.
LIVE_WALKS = {
    # Before all others: the jobs of a batch are known to its walk only, and to no filter.
    ("batch",): Walk(each("pgqueue.job", OF_BATCH), ("id",)),
    ("queue", "key"): Walk(
        "pgqueue.job", ("id",), "queue = %(queue)s and unique_key = %(key)s"
    ),
    ("queue", "group"): Walk(
        "pgqueue.job",
        (GROUP, "(-priority)", "run_at", "id"),
        "group_key is not null"
        f" and {GROUP} = hashtextextended(%(group)s, hashtext(%(queue)s))",
    ),
    ("leased",): Walk(each("pgqueue.job", "select id from pgqueue.running"), ("id",)),
    ("queue",): Walk(
        "pgqueue.job", ("hashtext(queue)", LANE, "run_at", "id"), IN_QUEUE
    ),
    (): Walk("pgqueue.job", ("id",), goes_up=False),
}
BY_DEATH = ("died_at", "id")
BY_KIND = ("kind", *BY_DEATH)
KIND = "queue = %(queue)s and kind = %(kind)s"
DEAD_WALKS = {
    ("batch",): Walk(each("pgqueue.dead_job", OF_BATCH), ("id",)),
    ("queue", "kind"): Walk("pgqueue.dead_job", BY_DEATH, KIND, goes_up=False),
    ("queue",): Walk("pgqueue.dead_job", BY_KIND, "queue = %(queue)s", goes_up=False),
    (): Walk("pgqueue.dead_job", BY_DEATH, goes_up=False),
}
FILTERS = {
    "queue": "w.queue = %(queue)s",
    "kind": "w.kind = %(kind)s",
    "group": "w.group_key = %(group)s",
    "key": "w.unique_key = %(key)s",
    "worker": "w.worker = %(worker)s",
    "payload": "w.payload @> %(payload)s::jsonb",
}
# As redrive and discard_many compare it: the first line.
FIRST_LINE = (
    "left(split_part(ltrim({}, E' \\t\\r\\n'), E'\\n', 1), 500) ilike %(error)s"
)
DEAD_FILTERS = FILTERS | {"error": FIRST_LINE.format("w.error")}
LIVE_FILTERS = FILTERS | {"error": FIRST_LINE.format("w.errors -> -1 ->> 'error'")}
ENDED_FILTERS = DEAD_FILTERS | {"group": "w.options ->> 'group_key' = %(group)s"}
# The state is that of the view, looked up for the rows that match everything else.
LIVE = """
select
    v.id, v.state, v.queue, v.kind, v.run_at as at, v.priority, v.attempt, v.max_attempts, v.worker, v.group_key,
    v.unique_key, v.last_error as error, w.place
from ({walk}) as w
cross join lateral (select * from pgqueue.jobs as v where v.id = w.id offset 0) as v
where {filters} and (%(state)s = '' or v.state = %(state)s)
limit {rows}
"""
DEAD = """
select
    w.id, 'dead' as state, w.queue, w.kind, w.died_at as at, w.priority, w.attempt, w.max_attempts, w.worker,
    w.group_key, w.unique_key, w.error, w.place
from ({walk}) as w
where {filters}
limit {rows}
"""
ENDED = """
select
    w.job_id as id, w.outcome as state, w.queue, w.kind, w.finished_at as at, w.attempt, w.worker, w.error,
    array[w.finished_at::text, w.job_id::text] as place
from (
    select * from pgqueue.run as r
    where r.finished_at >= %(since)s::timestamptz and r.finished_at <= %(until)s::timestamptz
        and (r.finished_at, r.job_id) < (%(until)s::timestamptz, %(below)s::bigint)
    limit {looked}
) as w
where {filters} and w.outcome = any (%(outcomes)s)
order by w.finished_at desc, w.job_id desc
limit {rows}
"""
COUNT = """
select count(*) as rows from (
    select from pgqueue.run as r
    where r.finished_at >= %(since)s::timestamptz and r.finished_at <= %(until)s::timestamptz
    limit {looked}
) as r
"""
LIVE_SEARCH = LIVE, LIVE_WALKS, LIVE_FILTERS
DEAD_SEARCH = DEAD, DEAD_WALKS, DEAD_FILTERS
# The log is read back in steps of time, each longer than the last, unless there are many runs.
SHORTEST, LOG = timedelta(milliseconds=10), timedelta(days=15)


def page(reading: Reading) -> Page:
    """Show a form, and the jobs that match it."""
    asked = {name: reading.asked.get(name, "") for name in ("state", *FIELDS)}
    if asked["state"] not in STATES:
        raise NotFound(f"No job has the state {asked['state'][:100]!r}.")
    given = {name: value for name, value in asked.items() if value and name != "state"}
    shown: Row = {"asked": asked, "states": STATES, "looked": LOOKED}
    shown |= {"jobs": None, "back_to": None, "short": False, "next": None, "of": None}
    shown["problem"] = problem(asked["state"], given)
    if reading.rights["sees_all"] and not shown["problem"]:
        reading.conn.execute(
            "set local enable_seqscan = off; set local enable_bitmapscan = off"
        )
        shown |= find(reading, asked["state"], given)
        if shown["next"] is not None:
            given_too = {name: value for name, value in asked.items() if value}
            place = {"from": json.dumps(shown["next"])}
            shown["next"] = urlencode(given_too | place)
        shown["is_first"] = "from" not in reading.asked
        # What redrive, discard_many and cancel_many can do to all of them.
        is_one = asked["state"] == "dead" or (asked["state"] == "" and given)
        if is_one and given.keys() <= {"queue", "kind", "error"}:
            shown["of"] = {
                "queue": given.get("queue"),
                "kind": given.get("kind"),
                "error_like": given.get("error"),
            }
    return Page("jobs.html", shown, is_live=False)


def problem(state: str, given: Row) -> str | None:
    """Say what cannot be searched for."""
    try:
        json.loads(given.get("payload", "{}"))
    except (ValueError, RecursionError):
        return """What the payload contains has to be JSON, such as {"to": "ada"}."""
    if not re.fullmatch("[0-9]{1,18}", given.get("batch", "0")):
        return "The id of a batch is a whole number."
    if state in OUTCOMES and {"key", "batch"} & given.keys():
        return (
            "Of a job that has ended, the log has neither its unique key nor its batch."
        )
    return None


def place_of(text: str | None, parts: int) -> list[str] | None:
    """Read where the last page stopped."""
    try:
        place = None if text is None else [str(part) for part in json.loads(text)]
        "".join(place or ()).encode()  # half a character is not UTF-8
    except (TypeError, ValueError, RecursionError):
        place = []
    if place is not None and len(place) != parts:
        raise NotFound("There is no such page of the search.")
    return place


def where(filters: Row, given: Row) -> str:
    return " and ".join(filters[name] for name in given if name in filters) or "true"


def find(reading: Reading, state: str, given: Row) -> Row:
    """Return a page of jobs, where the next one begins if there is one, and whether the scan was cut short."""
    if state in OUTCOMES:
        return find_ended(reading, state, given)
    query, walks, filters = DEAD_SEARCH if state == "dead" else LIVE_SEARCH
    has = {*given, *(["leased"] if state == "running" or "worker" in given else [])}
    walk = next(walks[fields] for fields in walks if has.issuperset(fields))
    sql, values = walk.sql(place_of(reading.asked.get("from"), len(walk.order)))
    values |= {**given, "state": state}
    query = query.format(walk=sql, filters=where(filters, given), rows=ROWS + 1)
    found = reading.rows(query, **values)
    if len(found) > ROWS:
        return {"jobs": found[:ROWS], "next": found[ROWS - 1]["place"]}
    end = reading.row(f"select w.place from ({sql}) as w offset {LOOKED - 1}", **values)
    return {"jobs": found, "next": end and end["place"], "short": end is not None}


def find_ended(reading: Reading, state: str, given: Row) -> Row:
    """Look back in the log, step by step, until there is a page, or too much to read."""
    reading.conn.execute("set local enable_bitmapscan = on")
    now = reading.rights["now"]
    place = place_of(reading.asked.get("from"), 2) or [str(now), str(2**63 - 1)]
    since, below = moment(place[0]), place[1]
    oldest, span, growth, left = since - LOG, SHORTEST, 10, LOOKED
    found: list[Row] = []
    while since > oldest:
        step = {**given, "outcomes": OUTCOMES[state], "below": below}
        step |= {"until": since, "since": since - span}
        read = (reading.row(COUNT.format(looked=left), **step) or {})["rows"]
        if read >= left and span > SHORTEST:
            span, growth = max(span / 4, SHORTEST), 2
            continue
        # The first step is taken whatever it has, so that each page gets further.
        if read >= left < LOOKED:
            break
        query = ENDED.format(
            filters=where(ENDED_FILTERS, given), looked=left, rows=ROWS + 1 - len(found)
        )
        found += reading.rows(query, **step) if read else []
        if len(found) > ROWS:
            return {"jobs": found[:ROWS], "next": found[ROWS - 1]["place"]}
        since, below, left, span = since - span, "0", left - read, span * growth
    is_short = since > oldest
    following = [since.isoformat(), "0"] if is_short else None
    return {"jobs": found, "next": following, "short": is_short, "back_to": since}


def moment(text: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = datetime.min
    if found.tzinfo is None or found.year < 2000:
        raise NotFound("There is no such page of the search.")
    return found
