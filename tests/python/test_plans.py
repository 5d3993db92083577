"""The claim stays flat: its buffers and plans, however deep the queue and whatever the statistics."""

import json

import psycopg
import pytest
from conftest import column, one

FILL = (
    "insert into pgqueue.job (run_at, enqueued_at, priority, max_attempts, queue, kind, payload) "
    "select now() - interval '1 hour' + {after}, now(), {priority}, 20, 'q', 'q', '{{}}' "
    "from generate_series(1, {jobs}) as n"
)


def fill(
    db: psycopg.Connection,
    jobs: int,
    after: str = "n * interval '1 us'",
    priority: int = 0,
):
    db.execute(FILL.format(jobs=jobs, after=after, priority=priority))


def buffers(db: psycopg.Connection, batch: int = 50) -> int:
    """The pages that one claim touches."""
    plan = one(
        db,
        "explain (analyze, buffers, format json) "
        f"select from pgqueue.claim('q', 'w', {batch})",
    )
    root = (json.loads(plan) if isinstance(plan, str) else plan)[0]["Plan"]
    assert root["Actual Rows"] == batch
    return root["Shared Hit Blocks"] + root["Shared Read Blocks"]


def warmed(db: psycopg.Connection) -> list[int]:
    """Claims of 50 in a session that has its plans: full walks are rare, so the first is left out."""
    for _ in range(2):
        buffers(db)
    return [buffers(db) for _ in range(10)]


@pytest.fixture
def usual(dsn, template) -> float:
    """What a claim of 50 costs, at most, in a queue of 1,000 jobs."""
    with psycopg.connect(dsn, autocommit=True) as db:
        fill(db, 1000)
        usual = max(warmed(db))
        db.execute("truncate pgqueue.job")
    return usual


def is_flat(counts: list[int], usual: float) -> bool:
    """All but the rare full walk, at most 5 % of the time, within three times the usual."""
    return sum(count > 3 * usual for count in counts) <= len(counts) // 10


def test_a_million_ready_jobs_cost_no_more_than_a_thousand(db, usual):
    fill(db, 1_000_000)
    assert is_flat(counts := warmed(db), usual), (counts, usual)


def test_a_million_scheduled_jobs_of_a_higher_priority_cost_nothing(db, usual):
    fill(db, 1_000_000, after="interval '1 day' + n * interval '1 us'", priority=9)
    fill(db, 1000)
    assert is_flat(counts := warmed(db), usual), (counts, usual)


def test_five_thousand_running_jobs_are_not_walked_by_every_claim(db, usual):
    fill(db, 6000)
    assert one(db, "select count(*) from pgqueue.claim('q', 'w', 5000)") == 5000
    assert is_flat(counts := warmed(db), usual), (counts, usual)


def test_half_a_million_dead_rows_under_a_held_snapshot_are_not_walked_by_every_claim(
    db, connect, usual
):
    holder = connect(autocommit=False)
    holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    holder.execute("select count(*) from pgqueue.job")
    fill(db, 500_000, after="interval '0'")
    db.execute("delete from pgqueue.job")
    fill(db, 1000)
    assert is_flat(counts := warmed(db), usual), (counts, usual)
    assert one(db, "select count(*) from pgqueue.job where token is not null") == 600


def test_two_thousand_queues_cost_no_more_than_one(db, usual):
    db.execute(
        "insert into pgqueue.job (run_at, enqueued_at, priority, max_attempts, queue, kind, payload) "
        "select now(), now(), 0, 20, 'queue ' || n % 2000, 'k', '{}' from generate_series(1, 100000) as n"
    )
    fill(db, 1000)
    assert is_flat(counts := warmed(db), usual), (counts, usual)


STATES = {
    "never analysed": ["fill"],
    "analysed empty": ["analyze", "fill"],
    "analysed when all was done": ["fill", "claim all", "analyze", "empty", "fill"],
    "vacuumed when all was done": [
        "fill",
        "analyze",
        "claim all",
        "empty",
        "vacuum",
        "fill",
    ],
    "analysed full": ["fill", "analyze"],
    "planned while small": ["fill few", "analyze", "claim few", "fill"],
}


@pytest.mark.parametrize("state", STATES)
def test_no_statistics_make_a_claim_sort_or_scan(connect, state):
    plans: list[str] = []
    db = connect()
    db.add_notice_handler(lambda notice: plans.append(notice.message_primary or ""))
    steps = {
        "fill": lambda: fill(db, 60_000),
        "fill few": lambda: fill(db, 20),
        "claim few": lambda: [
            one(db, "select count(*) from pgqueue.claim('q', 'w')") for _ in range(9)
        ],
        "claim all": lambda: [
            one(db, "select count(*) from pgqueue.claim('q', 'w', 10000)")
            for _ in range(6)
        ],
        "empty": lambda: db.execute("delete from pgqueue.job"),
        "analyze": lambda: db.execute("analyze"),
        "vacuum": lambda: db.execute("vacuum analyze pgqueue.job"),
    }
    for step in STATES[state]:
        steps[step]()
    db.execute("load 'auto_explain'")
    for setting in (
        "auto_explain.log_min_duration = 0",
        "auto_explain.log_nested_statements = on",
        "client_min_messages = log",
    ):
        db.execute(f"set {setting}")
    lease = db.execute("select id, token from pgqueue.claim('q', 'w')").fetchone()
    for verb in (
        "claim('q', 'w', 50)",
        "extend(array[%s], array[%s])",
        "complete_many(array[%s], array[%s])",
        "fail(%s, %s, 'e')",
        "release(array[%s], array[%s])",
        "complete(%s, %s)",
    ):
        needs = "%s" in verb
        if needs:
            lease = db.execute(
                "select id, token from pgqueue.claim('q', 'w')"
            ).fetchone()
        db.execute(f"select from pgqueue.{verb}", lease if needs else None)
    assert len(plans) > 20, "auto_explain has shown the plans inside the functions"
    pick = [
        plan
        for plan in plans
        if "for update skip locked" in plan and "job_lane_idx" in plan
    ]
    assert pick and not any("Sort" in plan for plan in pick)
    # Jobs are locked in the order of their ids, as an index scan that is not joined does.
    (many,) = (plan for plan in plans if "any (complete_many.job_ids)" in plan)
    deletes = many.partition("CTE done")[2].partition("CTE logged")[0]
    assert "Index Scan using job_pkey" in deletes and "Index Cond: (id = ANY" in deletes
    assert not any(node in deletes for node in ("Join", "Nested Loop", "Sort"))
    # Nor is a whole lane index read in search of ids.
    lanes = [plan for plan in plans if "job_lane_idx" in plan]
    assert all("Index Cond: ((hashtext(" in plan for plan in lanes)
    scans = [plan for plan in plans if "Seq Scan on job" in plan]
    assert not scans, scans[0]


def test_claims_and_heartbeats_are_hot_updates(db):
    fill(db, 3000)
    for _ in range(60):
        rows = db.execute(
            "select id, token from pgqueue.claim('q', 'w', 50)"
        ).fetchall()
        leases = [list(column) for column in zip(*rows, strict=True)]
        db.execute("select pgqueue.extend(%s::bigint[], %s::bigint[])", leases)
    db.execute(
        "select pg_stat_force_next_flush()"
        if db.info.server_version >= 150000
        else "select pg_sleep(1)"
    )
    updated, hot = db.execute(
        "select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where relid = 'pgqueue.job'::regclass"
    ).fetchone()
    assert updated == 6000
    # What is left found a page full that could not be pruned yet.
    assert hot > 0.85 * updated, f"{hot} of {updated} wrote no index"


def test_the_settings_of_the_pick_do_not_leak_into_the_session(db):
    fill(db, 10)
    settings = "select setting from pg_settings where name = any (%s) order by name"
    names = ["search_path", "plan_cache_mode", "enable_sort", "enable_seqscan"]
    before = column(db, settings, names)
    db.execute("select pgqueue.claim('q', 'w')")
    assert column(db, settings, names) == before
