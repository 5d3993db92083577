"""The cost of a claim in pages, and its plan, do not depend on the depth of the queue or on statistics."""

import contextlib
import re
import time
from itertools import pairwise

import psycopg
import pytest
from conftest import LONG, column, one, persist, soon
from worker_harness import wait_until

FILL = (
    "insert into pgqueue.job (run_at, enqueued_at, priority, max_attempts, queue, kind, payload) "
    "select now() - interval '1 hour' + {after}, now(), {priority}, 20, 'q', 'q', '{{}}' "
    "from generate_series(1, {jobs}) as n"
)

MANY = 1_000_000 if LONG else 100_000


def fill(
    db: psycopg.Connection,
    jobs: int,
    after: str = "n * interval '1 us'",
    priority: int = 0,
):
    db.execute(FILL.format(jobs=jobs, after=after, priority=priority))
    if priority:
        db.execute("select pgqueue._use_lanes('q')")


def explained(db: psycopg.Connection, query: str, counts: str = "buffers") -> dict:
    """Run a query, and return the root of its plan with what it counts."""
    (plan,) = one(db, f"explain (analyze, {counts}, format json) {query}")
    return plan["Plan"]


def pages(db: psycopg.Connection, query: str) -> int:
    """The pages that a query touches."""
    root = explained(db, query)
    return root["Shared Hit Blocks"] + root["Shared Read Blocks"]


def records(db: psycopg.Connection, query: str) -> int:
    """The WAL records that a query writes."""
    return explained(db, query, "wal")["WAL Records"]


def buffers(db: psycopg.Connection, batch: int = 50) -> int:
    """The pages that one claim touches."""
    root = explained(db, f"select from pgqueue.claim('q', 'w', {batch})")
    assert root["Actual Rows"] == batch
    return root["Shared Hit Blocks"] + root["Shared Read Blocks"]


def warmed(db: psycopg.Connection) -> list[int]:
    """The pages of ten claims of 50 in a session that has its plans and has walked the lane once."""
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
    """Whether all claims, except one in ten that may walk the lane, cost at most three times the usual."""
    return sum(count > 3 * usual for count in counts) <= len(counts) // 10


def test_a_claim_from_very_many_ready_jobs_costs_no_more_than_from_a_thousand(
    db, usual
):
    fill(db, MANY)
    assert is_flat(counts := warmed(db), usual), (counts, usual)


def test_very_many_scheduled_jobs_of_a_higher_priority_cost_a_claim_nothing(db, usual):
    fill(db, MANY, after="interval '1 day' + n * interval '1 us'", priority=9)
    fill(db, 1000)
    assert is_flat(counts := warmed(db), usual), (counts, usual)


def test_five_thousand_running_jobs_are_not_walked_by_every_claim(db, usual):
    fill(db, 6000)
    assert one(db, "select count(*) from pgqueue.claim('q', 'w', 5000)") == 5000
    assert is_flat(counts := warmed(db), usual), (counts, usual)


def test_very_many_dead_rows_under_a_held_snapshot_are_not_walked_by_every_claim(
    db, usual, held_snapshot
):
    fill(db, MANY // 2, after="interval '0'")
    db.execute("delete from pgqueue.job")
    fill(db, 1000)
    assert is_flat(counts := warmed(db), usual), (counts, usual)
    assert one(db, "select count(*) from pgqueue.job where token is not null") == 600


# Groups


def fill_groups(
    db: psycopg.Connection, groups: int, each: int, name: str = "g", run_at: str = ""
):
    """Enqueue jobs of many groups, one of each and then the next of each."""
    one(
        db,
        "select count(*) from pgqueue.enqueue_many('q', array_fill('{}'::jsonb, array[%(jobs)s]), "
        "run_at => nullif(%(run_at)s, '')::timestamptz, "
        "group_keys => array(select %(name)s || n %% %(groups)s from generate_series(1, %(jobs)s) as n))",
        {"jobs": groups * each, "groups": groups, "name": name, "run_at": run_at},
    )


def test_a_tenant_with_very_many_jobs_holds_up_no_other_and_costs_a_claim_nothing(
    db, usual
):
    fill_groups(db, 1, MANY // 2, "big")
    fill_groups(db, 1000, 5, "small")
    assert is_flat(counts := warmed(db), usual), (counts, usual)
    # With 12 claims of 50 before: five rounds of 1,001, and a little more.
    served = [
        one(
            db,
            "select count(*) from pgqueue.claim('q', 'w', 500) where group_key like 'small%'",
        )
        for _ in range(10)
    ]
    assert sum(served) > 5000 - 12 * 50 - 10
    assert (
        one(db, "select count(*) from pgqueue.jobs where state = 'ready'")
        > MANY // 2 - 10_000
    )
    assert is_flat(counts := warmed(db), usual), (counts, usual)


@pytest.mark.parametrize("batch", [1, 50])
def test_a_claim_from_groups_costs_at_most_three_times_what_it_costs_without(db, batch):
    def median() -> int:
        return sorted(buffers(db, batch) for _ in range(15))[7]

    fill(db, 3000)
    plain = median()
    db.execute("truncate pgqueue.job")
    fill_groups(db, 50_000, 2)
    buffers(db, 50)
    assert median() <= 3 * plain


def test_groups_with_only_scheduled_jobs_cost_a_claim_nothing(db, usual):
    fill_groups(db, 50_000, 1, "later", "2100-01-01")
    fill_groups(db, 500, 2)
    assert is_flat(counts := warmed(db), usual), (counts, usual)


@pytest.mark.sample(1)
@pytest.mark.parametrize("groups", [1, 1000, 50_000])
def test_finished_jobs_of_groups_under_a_held_snapshot_are_not_walked(
    db, usual, held_snapshot, groups
):
    fill_groups(db, groups, 100_000 // groups)
    filled_at = one(db, "select clock_timestamp()")
    # A claim of so many comes back short after 100 ms.
    while one(db, "select count(*) from pgqueue.claim('q', 'w', 10000)"):
        pass
    assert one(db, "select count(*) from pgqueue.job where token is null") == 0
    db.execute("delete from pgqueue.job")
    # A new ticket begins a second before its first job.
    is_past = "select clock_timestamp() > %s + interval '1 second'"
    wait_until(lambda: one(db, is_past, filled_at))
    fill_groups(db, 500, 2)
    assert is_flat(counts := warmed(db), usual), (counts, usual)


@pytest.mark.parametrize("limit", [1, 3])
def test_finished_jobs_of_a_limited_group_are_not_walked_by_every_claim(
    db, held_snapshot, limit
):
    """Nor by the end of an attempt; in a session that planned them when the queue was short."""

    def medians() -> tuple[int, int]:
        claims, ends = [], []
        for _ in range(15):
            claims.append(buffers(db, 10))
            ids, tokens = db.execute(
                "select array_agg(id), array_agg(token) from pgqueue.job where token is not null"
            ).fetchone()
            end = f"select from pgqueue.complete_many(array{ids}, array{tokens})"
            ends.append(pages(db, end))
        return sorted(claims)[7], sorted(ends)[7]

    db.execute("select pgqueue.configure('q', group_limit => %s)", (limit,))
    fill_groups(db, 10, 20)
    claim, end = medians()
    db.execute("delete from pgqueue.job")
    fill_groups(db, 10, 5000)
    db.execute(
        "delete from pgqueue.job where id <= (select max(id) - 1000 from pgqueue.job)"
    )
    later_claim, later_end = medians()
    # It puts off groups that it has just filled, so that no claim looks for their permits in vain.
    assert later_claim <= 2.5 * claim
    assert later_end <= 2.5 * end


def test_a_claim_beside_two_thousand_queues_costs_no_more_than_beside_none(db, usual):
    db.execute(
        "insert into pgqueue.job (run_at, enqueued_at, priority, max_attempts, queue, kind, payload) "
        "select now(), now(), 0, 20, 'queue ' || n % 2000, 'k', '{}' from generate_series(1, 100000) as n"
    )
    fill(db, 1000)
    assert is_flat(counts := warmed(db), usual), (counts, usual)


# Ageing


def age(db: psycopg.Connection, after: str = "10 minutes") -> None:
    db.execute("select pgqueue.configure('q', age_after => %s::interval)", (after,))


def two_lanes(db: psycopg.Connection, aged: int = 2500) -> None:
    """Many jobs of a high priority, and some of a low one that have waited for an hour."""
    fill(db, 100_000, "interval '59 minutes' + n * interval '1 us'", 3)
    fill(db, aged, "interval '1 s' + n * interval '1 us'")


@pytest.mark.parametrize("batch", [1, 50])
@pytest.mark.parametrize("after", ["10 minutes", "1 day"])
def test_a_claim_with_ageing_costs_at_most_twice_what_it_costs_without(
    db, batch, after
):
    def median() -> int:
        return sorted(buffers(db, batch) for _ in range(15))[7]

    two_lanes(db)
    plain = median()
    age(db, after)
    assert median() <= 2 * plain
    high = one(db, "select bool_and(priority = 3) from pgqueue.claim('q', 'w', 50)")
    assert high == (after == "1 day")


@pytest.mark.sample(2)
@pytest.mark.parametrize("after", ["10 minutes", "1 day"])
@pytest.mark.parametrize("dead", [0, 3])
def test_finished_jobs_of_a_lane_are_not_walked_by_every_claim_with_ageing(
    db, usual, held_snapshot, after, dead
):
    age(db, after)
    fill(db, 100_000, priority=dead)
    db.execute("delete from pgqueue.job")
    two_lanes(db)
    assert is_flat(counts := warmed(db), usual), (counts, usual)
    ones = [buffers(db, 1) for _ in range(10)]
    assert is_flat(ones, usual / 3), (ones, usual)


@pytest.mark.sample(1)
@pytest.mark.parametrize("after", ["10 minutes", "1 day"])
def test_finished_jobs_of_groups_are_not_walked_by_every_claim_with_ageing(
    db, usual, held_snapshot, after
):
    age(db, after)
    fill_groups(db, 1000, 50, run_at="2019-01-01")
    while one(db, "select count(*) from pgqueue.claim('q', 'w', 10000)"):
        pass
    db.execute("delete from pgqueue.job")
    fill(db, 50_000, "interval '59 minutes'", 3)
    # A walk that is long lets what comes say where it begins, for a second: a slow machine needs more.
    fill_groups(db, 20, 1, run_at="2020-01-01")
    while one(db, "select count(*) from pgqueue.ticket"):
        one(db, "select count(*) from pgqueue.claim('q', 'w', 50)")
    fill_groups(db, 500, 2, run_at="2020-01-01")
    assert [True] * 500 == column(
        db,
        "update pgqueue.ticket set start_until = start_until + interval '50 seconds' "
        "where start_at = '2019-12-31 23:59:59+00' returning start_until is not null",
    )
    # It looks at the groups once more before it picks.
    assert is_flat(counts := warmed(db), usual * 1.5), (counts, usual)


def test_jobs_of_other_kinds_are_not_walked_by_every_claim_with_ageing(db, usual):
    age(db, "1 day")
    two_lanes(db)
    db.execute(FILL.replace("'q', 'q'", "'q', 'other'").format(
        after="interval '0'", priority=0, jobs=100_000))  # fmt: skip
    claim = "select from pgqueue.claim('q', 'w', 50, kinds => '{q}')"
    counts = [pages(db, claim) for _ in range(12)][2:]
    assert is_flat(counts, usual), (counts, usual)


def test_ninety_six_sessions_with_ageing_share_their_positions(
    dsn, db, usual, held_snapshot
):
    age(db)
    fill(db, 50_000)
    db.execute("delete from pgqueue.job")
    two_lanes(db, 20_000)
    with contextlib.ExitStack() as stack:
        sessions = [
            stack.enter_context(psycopg.connect(dsn, autocommit=True))
            for _ in range(96)
        ]
        for session in sessions:
            buffers(session)  # so that it has its plans
        assert is_flat(counts := [buffers(each) for each in sessions], usual), counts


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


def listen_to_plans(db: psycopg.Connection, *settings: str) -> list[str]:
    """Collect the plans of all statements from now on, also those inside the functions."""
    plans: list[str] = []
    db.add_notice_handler(lambda notice: plans.append(notice.message_primary or ""))
    db.execute("load 'auto_explain'")
    for setting in (
        "auto_explain.log_min_duration = 0",
        "auto_explain.log_nested_statements = on",
        "client_min_messages = log",
        *settings,
    ):
        db.execute(f"set {setting}")
    return plans


@pytest.mark.sample(3)
@pytest.mark.parametrize("state", STATES)
def test_no_state_of_the_statistics_makes_a_claim_sort_or_scan(connect, state):
    db = connect()
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
    plans = listen_to_plans(db)
    lease = db.execute("select id, token from pgqueue.claim('q', 'w')").fetchone()
    for verb in (
        "claim('q', 'w', 50)",
        "configure('q', age_after => '1 hour')",
        "enqueue('q', priority => 1)",
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
    look = [plan for plan in plans if "_look.moment" in plan and "job_lane_idx" in plan]
    assert look and not any("Sort" in plan for plan in look)
    # Jobs are locked in the order of their ids, as an index scan that is not joined does.
    (many,) = (plan for plan in plans if "any (complete_many.job_ids)" in plan)
    deletes = many.partition("CTE done")[2].partition("CTE logged")[0]
    assert "Index Scan using job_pkey" in deletes and "Index Cond: (id = ANY" in deletes
    assert not any(node in deletes for node in ("Join", "Nested Loop", "Sort"))
    # A lane index is never read as a whole in search of ids.
    lanes = [plan for plan in plans if "job_lane_idx" in plan]
    assert all("Index Cond: ((hashtext(" in plan for plan in lanes)
    scans = [plan for plan in plans if "Seq Scan on job" in plan]
    assert not scans, scans[0]


def test_claim_and_extend_are_hot_updates(db):
    fill(db, 3000)
    for _ in range(60):
        rows = db.execute(
            "select id, token from pgqueue.claim('q', 'w', 50)"
        ).fetchall()
        leases = [list(column) for column in zip(*rows, strict=True)]
        db.execute("select pgqueue.extend(%s::bigint[], %s::bigint[])", leases)

    def counted() -> tuple[int, int]:
        return db.execute(
            "select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where relid = 'pgqueue.job'::regclass"
        ).fetchone()

    soon(lambda: counted()[0] == 6000)  # sessions report what they did later
    updated, hot = counted()
    assert updated == 6000
    # The others met a full page that could not be pruned yet.
    assert hot > 0.85 * updated, f"{hot} of {updated} wrote no index"


def test_the_planner_settings_of_claim_do_not_leak_into_the_session(db):
    fill(db, 10)
    settings = "select setting from pg_settings where name = any (%s) order by name"
    names = ["search_path", "plan_cache_mode", "enable_sort", "enable_seqscan"]
    before = column(db, settings, names)
    db.execute("select pgqueue.claim('q', 'w')")
    assert column(db, settings, names) == before


# One position for all sessions


def lease(db: psycopg.Connection, jobs: int) -> None:
    """Lease the first ready jobs to another worker."""
    held = (
        "update pgqueue.job set token = nextval('pgqueue.token_seq'), attempt = 1, "
        "worker = 'other', claimed_at = now(), lease_expires_at = now() + interval '1 hour' "
        "where id in (select id from pgqueue.job where lease_expires_at is null order by run_at limit %s)"
    )
    db.execute(held, (jobs,))


def test_ninety_six_sessions_with_fifty_leases_each_do_not_walk_each_others_jobs(
    dsn, db, usual
):
    fill(db, 96 * 50 + 20_000)
    with contextlib.ExitStack() as stack:
        sessions = [
            stack.enter_context(psycopg.connect(dsn, autocommit=True))
            for _ in range(96)
        ]
        for session in sessions:
            assert one(session, "select count(*) from pgqueue.claim('q', 'w', 50)")
        for session in sessions:
            buffers(session)  # so that it has its plans
        # Now and then one walks from the beginning, for all of them.
        assert is_flat(counts := [buffers(each) for each in sessions], usual), counts


@pytest.mark.parametrize("scope", ["kind => 'held'", "group_key => 'held'"])
def test_a_hundred_thousand_paused_jobs_are_not_walked_by_every_claim(db, usual, scope):
    held = "array_fill('1'::jsonb, array[100000]), kind => 'held'"
    if scope.startswith("group"):
        held += ", group_keys => array_fill('held'::text, array[100000])"
    db.execute(f"select count(*) from pgqueue.enqueue_many('q', {held})")
    db.execute(f"select pgqueue.pause('q', {scope})")
    fill(db, 1000, after="interval '1 hour'")
    assert is_flat(counts := warmed(db), usual), (counts, usual)
    db.execute(f"select pgqueue.resume('q', {scope})")
    ready = "select count(*) from pgqueue.claim('q', 'w', 10000, kinds => '{held}')"
    assert one(db, ready) == 10000


SETTINGS_READ = (
    "select sum(pg_stat_get_xact_tuples_returned(oid)) from pg_class "
    "where oid = 'pgqueue.queue'::regclass "
    "or oid in (select indexrelid from pg_index where indrelid = 'pgqueue.queue'::regclass)"
)


def test_ten_thousand_paused_groups_are_not_read_by_every_claim(db):
    fill_groups(db, 10_000, 1, name="paused")
    with db.transaction():
        db.execute(
            "insert into pgqueue.queue (name, kind, group_key, paused) "
            "select 'q', '', 'paused' || n, true from generate_series(0, 9998) as n"
        )
        db.execute("select pgqueue.pause('q', group_key => 'paused9999')")
    db.execute("vacuum analyze pgqueue.queue, pgqueue.job, pgqueue.ticket")
    for _ in range(20):
        assert not db.execute("select from pgqueue.claim('q', 'w', 10)").fetchall()
    fill_groups(db, 100, 20)
    counts = []
    for _ in range(12):
        with db.transaction():
            before = one(db, SETTINGS_READ)
            buffers(db, 10)
            counts.append(one(db, SETTINGS_READ) - before)
    assert sum(count > 1000 for count in counts[2:]) <= 1, counts
    db.execute("select pgqueue.resume('q', group_key => 'paused7')")
    keys = "select group_key from pgqueue.claim('q', 'w', 10)"
    wait_until(lambda: "paused7" in column(db, keys))


def test_a_hundred_thousand_jobs_of_a_full_kind_are_not_walked_by_every_claim(db):
    db.execute("select pgqueue.configure('q', kind => 'x', max_running => 1)")
    fill = "select pgqueue.enqueue_many('q', array_fill('{}'::jsonb, array[%s]), kind => %s)"
    cost = {}
    for full in (0, 100_000):
        db.execute("truncate pgqueue.job")
        for kind, count in (("x", full + 1), ("y", 2000)):
            for start in range(0, count, 50_000):
                db.execute(fill, (min(50_000, count - start), kind))
        db.execute("vacuum analyze pgqueue.job")
        for _ in range(5):
            buffers(db)
        cost[full] = min(buffers(db) for _ in range(5))
    assert cost[100_000] < 2 * cost[0], cost


MAY_NOT_TAKE = {
    "asked for others": ("", "kinds => '{mine}'"),
    "paused": ("select pgqueue.pause('q', kind => 'q')", ""),
    "full": (
        "select pgqueue.configure('q', kind => 'q', max_running => 1);"
        "select from pgqueue.claim('q', 'w', kinds => '{q}')",
        "",
    ),
}


@pytest.mark.parametrize("why", ["asked for others", "paused"])
def test_claims_that_are_cancelled_get_past_many_jobs_that_they_may_not_take(db, why):
    before, kinds = MAY_NOT_TAKE[why]
    fill(db, 200_000)
    db.execute("select pgqueue.enqueue('q', kind => 'mine')")
    db.execute(before)
    claim = "select kind from pgqueue.claim('q', 'w', 10%s)" % (kinds and f", {kinds}")
    # The first one reads what nobody has read before.
    for _ in range(2):
        with db.transaction(force_rollback=True):
            began = time.monotonic()
            assert column(db, claim) == ["mine"]
            took = time.monotonic() - began
        forget(db, 60)
    db.execute(f"set statement_timeout = '{took / 2} s'")
    assert persist(db, claim) == ["mine"], took


def test_a_claim_under_many_caps_reads_no_job_once_for_each(db):
    kinds = 400
    fill(db, 3000)
    db.execute("update pgqueue.job set kind = 'k' || id %% %s", (kinds,))
    db.execute(
        "insert into pgqueue.queue (name, kind, max_running)"
        " select 'q', 'k' || n, 100 from generate_series(0, %s - 1) as n",
        (kinds,),
    )
    db.execute("select pgqueue._resolve('q'), pgqueue._apply_caps('q', null)")
    # The first ones create permits.
    while one(db, "select count(*) from pgqueue.claim('q', 'w', 50)") < 50:
        pass
    few, many = (max(buffers(db, batch) for _ in range(3)) for batch in (1, 50))
    assert many <= 3 * few, (few, many)


def test_ten_thousand_running_jobs_are_not_walked_by_every_claim(db, usual):
    fill(db, 11_000)
    lease(db, 10_000)
    assert is_flat(counts := warmed(db), usual), (counts, usual)


def test_a_claim_over_201_priorities_costs_no_more_than_over_one(db, usual):
    """201 lanes, of which all but the lowest have only jobs for tomorrow."""
    for priority in range(-99, 101):
        fill(db, 20, after="interval '1 day' + n * interval '1 us'", priority=priority)
    fill(db, 1000, priority=-100)
    assert is_flat(counts := warmed(db), usual), (counts, usual)


def test_finished_jobs_of_other_priorities_under_a_held_snapshot_are_not_walked(
    db, usual, held_snapshot
):
    for priority in (5, 3, -3):
        fill(db, 50_000, priority=priority)
    db.execute("delete from pgqueue.job")
    fill(db, 1000)
    assert is_flat(counts := warmed(db), usual), (counts, usual)


def test_many_queues_and_kinds_in_one_session_keep_their_positions_apart(db, usual):
    """A position shared by several queues or kinds would be lost at each claim."""
    queues = [f"queue {n}" for n in range(40)]
    for queue in queues:
        db.execute(FILL.replace("'q', 'q'", f"'{queue}', 'k' || n % 2").format(
            jobs=3000, after="n * interval '1 us'", priority=0))  # fmt: skip
        db.execute(f"select count(*) from pgqueue.claim('{queue}', 'w', 2000)")
    claim = "select from pgqueue.claim('{}', 'w', 25, kinds => {})"
    asked = [
        (queue, kinds)
        for queue in queues
        for kinds in ("null", "array['k0']", "array['k1']")
    ]
    for _ in range(2):
        for queue, kinds in asked:
            db.execute(claim.format(queue, kinds))
    counts = [pages(db, claim.format(queue, kinds)) for queue, kinds in asked]
    # Of 120 lanes a few find both their records taken.
    assert sum(count > 3 * usual for count in counts) <= 12, (counts, usual)


def test_of_two_lanes_with_the_same_first_record_one_takes_its_second(db, usual):
    first = "hashtextextended(q, 0) & 127"
    twins = column(
        db,
        f"select array_agg(q) from (select 'q' || n as q from generate_series(1, 2000) as n) as s "
        f"group by {first} having count(*) >= 2 limit 1",
    )[0][:2]
    for queue in twins:
        db.execute(FILL.replace("'q', 'q'", f"'{queue}', 'k'").format(
            jobs=8000, after="n * interval '1 us'", priority=0))  # fmt: skip
        db.execute(f"select count(*) from pgqueue.claim('{queue}', 'w', 5000)")
    claim = "select from pgqueue.claim('{}', 'w', 50)"
    for _ in range(5):
        for queue in twins:
            db.execute(claim.format(queue))
    counts = [pages(db, claim.format(queue)) for _ in range(10) for queue in twins]
    assert is_flat(counts, usual), (counts, usual)


def test_jobs_with_one_run_at_drain_at_constant_cost_under_a_held_snapshot(
    db, usual, held_snapshot
):
    fill(db, 100_000, after="interval '0'")
    done = (
        "select count(*) from (select array_agg(id) as ids, array_agg(token) as tokens "
        "from pgqueue.claim('q', 'w', 10000)) as c, pgqueue.complete_many(c.ids, c.tokens)"
    )
    for _ in range(9):
        assert one(db, done) == 10_000
    assert one(db, "select count(*) from pgqueue.job") == 10_000
    # Enough jobs for the check of their ids to wrap around twice.
    counts = warmed(db) + [buffers(db) for _ in range(180)]
    assert is_flat(counts, usual), (counts, usual)


@pytest.mark.parametrize(
    "over",
    [
        "attempt = 1, max_attempts = 1, lease_expires_at = now() - interval '1 s'",
        "terms.expires_at = now()",
    ],
)
def test_ten_thousand_jobs_that_are_over_cost_a_claim_no_more_than_a_thousand(db, over):
    """An early version was quadratic in them: 5.75 s for a claim of one job."""
    fill(db, 10_000)
    db.execute(f"update pgqueue.job set {over}")
    fill(db, 1, after="interval '1 minute'")
    first = pages(db, "select from pgqueue.claim('q', 'w')")
    ended = "select count(*) from pgqueue.run where outcome in ('dead', 'cancelled')"
    assert one(db, ended) == 1000
    assert one(db, "select count(*) from pgqueue.job where worker = 'w'") == 1
    # About thirty pages for each job that ends, and one walk past the others.
    assert first < 60_000
    so_far = 1000
    while so_far < 10_000:
        # One walk from the position, and one from the beginning before it returns no job.
        assert column(db, "select id from pgqueue.claim('q', 'w')") == []
        before, so_far = so_far, one(db, ended)
        assert before + 1000 <= so_far <= before + 2000


@pytest.mark.parametrize("running", [0, 1])
@pytest.mark.parametrize("queues", [1, 10])
def test_an_idle_worker_walks_dead_entries_once_for_a_claim_and_once_for_a_rest(
    db, held_snapshot, running, queues
):
    """With 500,000 entries and a claim every five seconds, two or three percent of a core."""
    names = f"array(select 'q' || repeat('.', n) from generate_series(0, {queues - 1}) as n)"
    claim = f"select pgqueue.claim_from({names}, 'w', 10)"
    rest = f"select pgqueue.rest({names})"
    fill(db, 100_000)
    walk = (
        "select from pgqueue.job where hashtext(queue) = hashtext('q') and queue = 'q' "
        "and priority = 0 and run_at <= now() order by run_at, id limit 1"
    )
    db.execute("delete from pgqueue.job")
    db.execute("set enable_seqscan = off")
    db.execute("set enable_bitmapscan = off")
    db.execute("set enable_sort = off")
    once = pages(db, walk)
    assert once > 1000
    fill(db, running)
    for _ in range(2):
        db.execute(claim)
        db.execute(rest)
    assert pages(db, claim) < 1.2 * once
    assert pages(db, rest) < 1.2 * once


HANDLED = {
    "loose ends": (
        "insert into pgqueue.loose_end (look_at, id, what)"
        " select now() - interval '1 hour', n, 'ended' from generate_series(1, 300000) as n",
        "delete from pgqueue.loose_end where look_at < now() - interval '30 minutes'",
        "select pgqueue.emit('first')",
    ),
    "schedules": (
        "insert into pgqueue.schedule (due_at, next_slot, every, name, queue, timezone, catch_up, owner, payload)"
        " select now() - interval '1 hour', now(), '1 hour', n, 'q', 'UTC', 'one', current_user, '{}'"
        " from generate_series(1, 300000) as n",
        "delete from pgqueue.schedule",
        "select pgqueue.schedule('s', 'q', every => '1 hour')",
    ),
}


@pytest.mark.parametrize("what", HANDLED)
def test_what_was_handled_under_an_old_snapshot_is_not_walked_by_each_rest(
    db, held_snapshot, what
):
    rest = "select pgqueue.rest('{none}', park => false)"
    fill, handle, begin = HANDLED[what]
    db.execute(begin)
    db.execute(rest)
    alone = pages(db, rest)
    db.execute(fill)
    db.execute(handle)
    walk = pages(db, rest)
    assert walk > 10 * alone
    if what == "loose ends":
        db.execute("select pgqueue.emit('second')")
    # Some look may be the long one of that time.
    costs = sorted(pages(db, rest) for _ in range(5))
    assert costs[2] <= 3 * alone, (alone, walk, costs)


def test_very_many_loose_ends_are_handled_as_quickly_under_an_old_snapshot(
    db, held_snapshot
):
    db.execute("select pgqueue.emit('first')")
    db.execute(HANDLED["loose ends"][0])
    for _ in range(301):
        db.execute("select pgqueue._tie_loose_ends(1000, clock_timestamp())")
    assert one(db, "select count(*) from pgqueue.loose_end") == 0


def test_a_worker_of_a_thousand_queues_looks_only_at_those_that_have_jobs(db):
    db.execute("set track_functions = 'all'")
    names = [f"queue {n}" for n in range(1000)]
    for name in names[::400]:
        db.execute("select pgqueue.enqueue(%s)", (name,))

    def calls(function: str) -> int:
        count = "select coalesce(pg_stat_get_xact_function_calls(%s::regproc), 0)"
        return one(db, count, f"pgqueue.{function}")

    with db.transaction():
        claim = "select queue from pgqueue.claim_from(%s, 'w', 10)"
        assert sorted(column(db, claim, names)) == names[::400]
        assert calls("claim") <= 2 * 3
        looks = [0]
        for _ in range(5):
            db.execute("select pgqueue.rest(%s, park => false)", (names,))
            looks.append(calls("_until_due"))
        # On a busy machine a queue may seem to be behind dead entries: its look-up takes 5 ms.
        assert min(after - before for before, after in pairwise(looks)) == 3


@pytest.mark.sample(3)
@pytest.mark.parametrize("groups", [0, 10])
@pytest.mark.parametrize("why", MAY_NOT_TAKE)
def test_an_idle_worker_rarely_walks_over_a_hundred_thousand_jobs_that_it_may_not_take(
    db, why, groups
):
    before, kinds = MAY_NOT_TAKE[why]
    if groups:
        # What has come in the last second, each looks at.
        fill_groups(db, groups, 100_000 // groups, run_at="yesterday")
        fill_groups(db, groups, 10_000 // groups, run_at="tomorrow")
    else:
        fill(db, 100_000)
        fill(db, 10_000, after="interval '1 day' + n * interval '1 us'")
    db.execute(before)
    more = f", {kinds}" if kinds else ""
    looks = (
        f"select id from pgqueue.claim('q', 'w', 10{more})",
        f"select pgqueue.rest(array['q']{more})",
    )
    for look in looks * 2:
        db.execute(look)
    counts = [pages(db, look) for _ in range(10) for look in looks]
    # A rest looks at all groups.
    assert sum(count > 300 + 30 * groups for count in counts) <= 2, counts
    # What comes is found at once; what comes back from elsewhere, with the next walk.
    enqueue = (
        "select pgqueue.enqueue('q', kind => 'mine', run_at => {}, group_key => %s)"
        % ("'g1'" if groups else "null")
    )
    new = one(db, enqueue.format("now()"))
    assert column(db, looks[0]) == [new]
    old = one(db, enqueue.format("now() - interval '1 minute'"))
    wait_until(lambda: column(db, looks[0]) == [old])
    db.execute(enqueue.format("now() + interval '5 seconds'"))
    assert one(db, looks[1]).total_seconds() <= 5


def forget(db: psycopg.Connection, seconds: int) -> None:
    """As if so much time had passed for what claims remember for each other."""
    for record in range(0, 32, 2):
        cell = f"pgqueue._cell_{record}"
        db.execute(
            "select setval(%(cell)s, v - %(us)s) from (values (pg_sequence_last_value(%(cell)s))) as c (v) "
            "where v & 2251799813685247 > %(us)s",
            {"cell": cell, "us": seconds * 1_000_000},
        )


@pytest.mark.parametrize("settings", ["group_limit => 1", "weight => 1"])
def test_a_worker_of_a_rare_kind_gets_behind_ten_thousand_groups_of_others_and_then_looks_at_what_is_new(
    db, settings
):
    """However seldom it looks: each claim goes on where the one before it was cut off."""
    db.execute(f"select pgqueue.configure('q', {settings})")
    kinds = ["common", "rare"] if "limit" in settings else ["common"]
    for kind in kinds:
        for part in range(2 if len(kinds) == 2 else 4):
            db.execute(
                "select count(*) from pgqueue.enqueue_many('q', array_fill('{}'::jsonb, array[5000]), kind => %s, run_at => 'yesterday', "
                "group_keys => array(select 'g' || n from generate_series(%s::int, %s::int) as n))",
                (kind, part * 5000 + 1, part * 5000 + 5000),
            )
    enqueue = "select pgqueue.enqueue('q', kind => 'rare', group_key => %s)"
    look = "select id from pgqueue.claim('q', 'w', 10, kinds => '{rare}')"
    far = one(db, enqueue, "far")
    for _ in range(20):
        if found := column(db, look):
            break
        forget(db, 3)
    assert found == [far]
    for _ in range(20):
        assert column(db, look) == []
    looks = []
    for _ in range(10):
        db.execute(SWEPT)
        looks.append(pages(db, look))
    assert max(looks) < 100, looks
    new = one(db, enqueue, "new")
    assert column(db, look) == [new]
    if len(kinds) == 1:
        # Into a group whose turn is long over.
        new = one(db, enqueue, "g1")
        assert column(db, look) == [new]
    # Who has taken what was before it.
    first = "select id, token, group_key from pgqueue.claim('q', 'w', 5, kinds => '{common}')"
    served = db.execute(first).fetchall()
    db.execute("select pgqueue.complete(%s, %s)", served[0][:2])
    if len(kinds) == 2:
        assert column(db, look.replace("id", "group_key")) == [served[0][2]]
        # Or has cancelled it.
        first = "select id, group_key from pgqueue.job where group_key = 'g7' order by id limit 1"
        db.execute(f"select pgqueue.cancel(id) from ({first}) as first")
        assert column(db, look.replace("id", "group_key")) == ["g7"]


def test_jobs_of_a_rare_kind_are_found_at_once_and_round_robin_in_groups_that_were_passed_over(
    db,
):
    """Claims look at new ones beside the tickets that have moved, and at what comes back."""
    fill_groups(db, 5000, 4, run_at="yesterday")
    look = "select id from pgqueue.claim('q', 'w', %s, kinds => '{rare}')"
    enqueue = (
        "select pgqueue.enqueue('q', kind => 'rare', run_at => %s, group_key => %s || n)"
        " from generate_series(%s::int, %s::int) as n"
    )

    # Some that were there: each group gives one at a time.
    wanted = {
        id for _ in range(3) for id in column(db, enqueue, "yesterday", "h", 1, 10)
    }
    assert {id for _ in range(3) for id in column(db, look, 10)} == wanted
    for _ in range(2):
        assert column(db, look, 10) == []

    # New ones, in groups that have tickets, and in others.
    wanted = set(column(db, enqueue, "now", "g", 1, 30))
    wanted |= set(column(db, enqueue, "now", "new", 1, 30))
    assert {id for _ in range(6) for id in column(db, look, 10)} == wanted

    # Many of one group, and then some of others.
    for _ in range(20):
        column(db, enqueue, "now", "g", 40, 40)
    wanted = set(column(db, enqueue, "now", "g", 41, 45))
    assert wanted <= {one(db, look, 1) for _ in range(8)}
    assert len(column(db, look, 100)) == 17

    # One that was taken, and comes back: with the next walk.
    column(db, enqueue, "now", "new", 50, 50)
    ((id, token),) = db.execute(look.replace("id", "id, token"), [1]).fetchall()
    for _ in range(2):
        assert column(db, look, 10) == []
    db.execute("select pgqueue.release(array[%s], array[%s])", [id, token])
    assert wait_until(lambda: column(db, look, 10)) == [id]


@pytest.mark.needs_hints
def test_what_is_next_in_a_group_is_found_though_who_looked_in_vain_had_its_ticket(
    db, connect
):
    """Others believe whoever looked at so many groups, and who served one meanwhile could not move its ticket."""
    db.execute("select pgqueue.configure('q', group_limit => 1)")
    for kind in ["common", "rare"]:
        db.execute(
            "select count(*) from pgqueue.enqueue_many('q', array_fill('{}'::jsonb, array[2000]), kind => %s, "
            "group_keys => array(select 'g' || n from generate_series(1, 2000) as n))",
            (kind,),
        )
    # For a while, so that who finds their tickets locked does not wait for who has locked them.
    db.execute("update pgqueue.ticket set at = at - interval '1 s'")
    claim = "select id, token, group_key from pgqueue.claim('q', 'w', 10, kinds => array[%s])"
    other = connect()
    with other.transaction():
        assert other.execute(claim, ("rare",)).fetchall() == []
        served = db.execute(claim, ("common",)).fetchall()
        assert len(served) == 10
    for id, token, _ in served:
        db.execute("select pgqueue.complete(%s, %s)", (id, token))
    found = db.execute(claim, ("rare",)).fetchall()
    assert {key for _, _, key in found} == {key for _, _, key in served}
    # Nor do they believe anything once it is no longer a limit that keeps them from it.
    db.execute("select pgqueue.configure('q', reset => true)")
    assert len(db.execute(claim, ("rare",)).fetchall()) == 10


@pytest.mark.parametrize("group", ["null", "'g1'"])
def test_when_a_walk_from_the_beginning_is_short_again_all_claims_begin_there(
    db, group
):
    """Or what has come back to its old place would be served by one claim a second."""
    if group == "null":
        fill(db, 100_000)
    else:
        fill_groups(db, 100, 1000)
    claim = "select id from pgqueue.claim('q', 'w', kinds => '{mine}')"
    for _ in range(2):
        assert column(db, claim) == []
    db.execute("delete from pgqueue.job")
    enqueue = (
        "select pgqueue.enqueue('q', kind => 'mine', group_key => %s, run_at => now() - interval '%s')"
        " from generate_series(1, %s)"
    )
    old = set(column(db, enqueue % (group, "1 day", 30)))
    db.execute(enqueue % (group, "1 ms", 2000))
    served = [wait_until(lambda: old.intersection(column(db, claim))).pop()]
    served += [one(db, claim) for _ in range(29)]
    assert set(served) == old


def test_a_position_from_before_a_restore_or_from_another_clock_is_ignored(db):
    fill(db, 6000)
    assert one(db, "select count(*) from pgqueue.claim('q', 'w', 5000)") == 5000
    for _ in range(3):
        db.execute("select pgqueue.claim('q', 'w', 10)")
    # The rows are a day older than the cells: a dump leaves cells out, a copy of the files does not.
    db.execute(
        "update pgqueue.job set run_at = run_at - interval '1 day', lease_expires_at = null, token = null"
    )
    first = column(db, "select id from pgqueue.job order by run_at, id limit 10")
    found: list[int] = []
    while len(found) < 6000:
        taken = column(db, "select id from pgqueue.claim('q', 'w', 500)")
        assert taken, "never empty while jobs are due"
        found += taken
    assert sorted(found) == sorted(set(found)) and set(first) <= set(found)


@pytest.mark.parametrize("texts", ["", ", array_fill(null::text, array[50])"])
def test_finish_without_results_costs_no_more_than_complete_many(db, texts):
    fill(db, 300)
    claimed = (
        "(select array_agg(id) as ids, array_agg(token) as tokens "
        "from pgqueue.claim('q', 'w', 50)) as c"
    )
    completed = (
        f"select count(*) from {claimed}, pgqueue.complete_many(c.ids, c.tokens)"
    )
    outcomes = "array_fill('complete'::text, array[50])"
    finished = f"select count(*) from {claimed}, pgqueue.finish(c.ids, c.tokens, {outcomes}{texts})"
    for query in (completed, finished):
        assert one(db, query) == 50
    # It does not lock rows before it deletes them either.
    assert records(db, finished) <= records(db, completed) + 10


@pytest.mark.parametrize(
    "setting", ["max_running => 10", "rate_limit => 50, rate_period => '1 ms'"]
)
def test_permits_taken_before_under_a_held_snapshot_are_not_walked_by_every_claim(
    db, held_snapshot, setting
):
    def median() -> int:
        counts = []
        for _ in range(15):
            counts.append(buffers(db, 5))
            db.execute(
                "select pgqueue.complete_many(array_agg(id), array_agg(token)) "
                "from pgqueue.job where token is not null"
            )
        return sorted(counts)[7]

    db.execute(f"select pgqueue.configure('q', {setting})")
    fill(db, 1000)
    usual = median()
    db.execute(
        "do $$ begin for past in 1 .. 2000 loop update pgqueue.permit set free_at = now() - interval '1 hour' + past * interval '1 us'; "
        "commit; end loop; end $$"
    )
    assert median() <= 2 * usual


@pytest.mark.parametrize("setting", ["max_running", "group_limit"])
def test_a_claim_finds_the_last_free_permit_of_a_thousand_at_once(db, setting):
    fill_groups(db, 1, 3000) if setting == "group_limit" else fill(db, 3000)
    costs = []
    for limit in (20, 1000):
        db.execute(f"select pgqueue.configure('q', {setting} => %s)", (limit,))
        # A claim that finds too few permits makes more, for the next.
        while one(db, "select count(*) from pgqueue.claim('q', 'w', 1000)"):
            pass
        # Out of the way: how often a claim crosses those that run is a matter of time.
        db.execute("update pgqueue.job set priority = -5 where token is not null")
        db.execute("vacuum pgqueue.job")
        ends = "(select pgqueue.complete(id, token) from pgqueue.job where token is not null limit 1)"
        pages = []
        for _ in range(10):
            db.execute(f"select {ends}")
            pages.append(buffers(db, 1))
        costs.append(sorted(pages)[5])
    assert costs[1] <= 2 * costs[0], costs


# As a claim sets them; and without nested loops, where a join reads all rows, as a plan from a short queue may do anyway.
PLANS = """plans as materialized (
    select
        set_config('enable_seqscan', 'off', true), set_config('enable_nestloop', 'off', true),
        set_config('plan_cache_mode', 'force_generic_plan', true)
)"""
VERBS = {
    "look at a doubtful permit": f"with {PLANS}, doubtful as materialized ("
    "update pgqueue.permit set token = -1"
    " where ctid = any ((select permits from pgqueue.job where id = {id})::tid[]) and not is_rate returning ctid as place"
    ") select pgqueue._free_lost_permits(array_agg(place), clock_timestamp()) from plans cross join doubtful",
    "look at the permits of a group": f"with {PLANS} select pgqueue._merge_permits('q', '', array['none']),"
    " pgqueue._forget_future('q', '', array['none'], clock_timestamp()) from plans",
    "put a job back": f"with {PLANS} select pgqueue._put_back('q', null, null, array[id], permits)"
    " from plans cross join pgqueue.job where id = {id}",
    "refuse what never was": f"with {PLANS} select pgqueue._check_after(array[1000000000000000], 'run') from plans",
    "enqueue": "select pgqueue.enqueue('q', kind => 'k', group_key => 'g1')",
    "enqueue in place of another": "select pgqueue.enqueue('q', unique_key => '7', on_duplicate => 'replace')",
    "enqueue in place of others": "select count(*) from pgqueue.enqueue_many('q', array_fill('{{}}'::jsonb, array[3]),"
    " unique_keys => '{{7,8,new {id}}}', on_duplicate => 'postpone')",
    "enqueue within a window": f"with {PLANS}"
    " select pgqueue.enqueue('q', unique_key => 'once', unique_for => '1 hour') from plans",
    "claim": "select from pgqueue.claim('q', 'w', 10)",
    # 4 would share a cell with a position of q, and take half of its share.
    "claim from many queues": "select from pgqueue.claim_from(array['q', '1', '2', '3', '5'], 'w', 10)",
    "claim as a claim plans": f"with {PLANS} select from plans, pgqueue.claim('q', 'w', 10)",
    "claim of a kind at first": "select from pgqueue.claim('q', 'w', 10, kinds => array['none'])",
    "claim of a kind": "select from pgqueue.claim('q', 'w', 10, kinds => array['none'])",
    "complete": "select pgqueue.complete({id}, {token})",
    "complete_many": "select from pgqueue.complete_many(array[{id}], array[{token}])",
    "finish": "select from pgqueue.finish(array[{id}], array[{token}], array['complete'])",
    "retry": "select pgqueue.fail({id}, {token}, 'e', '1 hour')",
    "dead": "select pgqueue.fail({id}, {token}, 'e', permanent => true)",
    "release": "select from pgqueue.release(array[{id}], array[{token}])",
    "finish with an error": "select from pgqueue.finish(array[{id}], array[{token}], array['fail'], array['e'])",
    "extend": "select from pgqueue.extend(array[{id}], array[{token}])",
    "progress": "select pgqueue.progress({id}, {token}, 1)",
    "save_step": "select pgqueue.save_step({id}, {token}, 'e')",
    "suspend": f"with {PLANS} select pgqueue.suspend({{id}}, {{token}}, 'e') from plans",
    "suspend until a job has ended": "with first as materialized (select pgqueue.enqueue('q') as job)"
    " select pgqueue.suspend({id}, {token}, 'e', now() + interval '1 day', array[job]) from first",
    "suspend in a batch": f"with {PLANS} select from plans,"
    " pgqueue.finish(array[{id}], array[{token}], array['suspend'], array[jsonb_build_object('event', 'e')::text])",
    "emit": "select pgqueue.emit('e {id}')",
    "status": "select pgqueue.status({id})",
    "result": "select pgqueue.result({id})",
    "await": "select pgqueue.await({id})",
    "cancel": "select pgqueue.cancel({id})",
    "run_now": "select pgqueue.run_now((select id from pgqueue.job where id < {id} and token is null limit 1))",
    "redrive_job": "with dead as materialized (select pgqueue.fail({id}, {token}, 'e', permanent => true))"
    " select pgqueue.redrive_job({id}) from dead",
    "why": "select pgqueue.why({id})",
    "why not": "with late as materialized (select pgqueue.fail({id}, {token}, 'e', '1 hour'))"
    " select pgqueue.why({id}) from late",
    "rest": "select pgqueue.rest(array['q'], park => false)",
    "claim past a late job": "with late as materialized ("
    "select pgqueue.enqueue('q', priority => 9, group_key => 'g1', expires_at => now())"
    ") select from late cross join lateral pgqueue.claim('q', 'w', 1)",
    "enqueue in place of a late job": "with late as materialized ("
    "select pgqueue.enqueue('q', priority => 9, unique_key => 'k', expires_at => now())"
    ") select pgqueue.enqueue('q', unique_key => 'k', expires_at => now()) from late",
    "complete what another waits for": "with waits as materialized ("
    "select pgqueue.enqueue('q', after => array[{id}::bigint], group_key => 'g1')"
    ") select pgqueue.complete({id}, {token}) from waits",
    "cancel what a suspended one waits for": f"with {PLANS}, first as materialized ("
    "select pgqueue.enqueue('q') as job from plans), suspended as materialized ("
    "select job, pgqueue.suspend({id}, {token}, 'e', now() + interval '1 day', array[job]) from first"
    ") select pgqueue.cancel(job) from suspended",
    "finish a batch": "with made as materialized (select pgqueue.create_batch('q') as batch), "
    "joined as materialized (select batch, pgqueue.enqueue('q', batch_id => batch) as job from made), "
    "closed as materialized (select job, pgqueue.close_batch(batch) from joined) "
    "select pgqueue.cancel(job) from closed",
    "look at loose ends": "select pgqueue._tie_loose_ends(1000)",
    "health": "select * from pgqueue.health()",
}
# For a minute no claim sweeps, nor looks at loose ends, which reads so much for each of 50 groups or ends: see below.
SWEPT = (
    "select setval(cell, (extract(epoch from clock_timestamp()) * 1000000)::bigint - 1577836741000000)"
    " from unnest('{pgqueue._cell_groups_due,pgqueue._cell_due}'::regclass[]) as c (cell)"
)


def fill_keys(db: psycopg.Connection, jobs: int) -> None:
    """Enqueue jobs with unique keys."""
    db.execute(
        "select count(*) from pgqueue.enqueue_many('q', array_fill('{}'::jsonb, array[%(jobs)s]),"
        " unique_keys => array(select n::text from generate_series(1, %(jobs)s) as n), priority => -9)",
        {"jobs": jobs},
    )


def fill_tables(db: psycopg.Connection, rows: int) -> None:
    """Fill the tables beside that of the jobs."""
    some = "generate_series(1, %s) as n"
    jobs = "pgqueue.enqueue_many('first', array_fill('{}'::jsonb, array[%s])) as n"
    for insert in (
        f"event (name, emitted_at, payload) select 'other ' || n, now(), '1' from {some}",
        "recent_key (job_id, expires_at, queue, unique_key)"
        f" select 10^15::bigint + n, '2999-01-01', 'q', 'once ' || n from {some}",
        f"wait (job_id, since, event) select 10^15::bigint + n, now(), 'never ' || n from {some}",
        f"dependency (job_id, waiter_id, runs_if_dead) select n, 10^15::bigint + n, false from {jobs}",
    ):
        db.execute(f"insert into pgqueue.{insert}", [rows])


def drain(db: psycopg.Connection) -> None:
    """Leave tables of many pages and no row, and statistics that say so."""
    fill_groups(db, 5000, 4)
    fill_keys(db, 20_000)
    fill_tables(db, 20_000)
    for table in ("job", "ticket", "event", "recent_key", "wait", "dependency"):
        db.execute(f"delete from pgqueue.{table}")
        db.execute(f"vacuum (analyze, truncate off) pgqueue.{table}")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("setting", "statistics"),
    [
        ("weight => 1", "none"),
        ("weight => 1", "of none left"),
        ("group_limit => 2", "none"),
        ("group_limit => 2", "of few"),
        ("group_limit => 2", "of none left"),
        ("max_running => 500", "of few"),
        ("group_key => '*', rate_limit => 1000, rate_period => '1 ms'", "none"),
    ],
)
def test_no_function_reads_more_in_a_long_queue_by_a_session_that_began_in_a_short_one(
    db, setting, statistics
):
    def counts() -> dict[str, int]:
        found = {}
        for name, verb in VERBS.items():
            running = db.execute(
                "select id, token from pgqueue.claim('q', 'w', 1)"
            ).fetchone()
            db.execute(SWEPT)
            found[name] = pages(db, verb.format(id=running[0], token=running[1]))
        return found

    # If autovacuum analyzes a table just before a call, the call has to plan anew, and reads the catalog.
    for table in column(
        db,
        "select oid::regclass::text from pg_class"
        " where relnamespace = 'pgqueue'::regnamespace and relkind = 'r'",
    ):
        db.execute(f"alter table {table} set (autovacuum_enabled = off)")
    db.execute(f"select pgqueue.configure('q', {setting})")
    if statistics == "of none left":
        drain(db)
    fill_groups(db, 100, 2)
    fill_keys(db, 10)
    db.execute(
        "insert into pgqueue.recent_key values (10^15, '2999-01-01', 'q', 'once')"
    )
    if statistics == "of few":
        db.execute("analyze")
    short = [counts() for _ in range(2)][1]
    fill_groups(db, 100, 400, run_at="yesterday")
    fill_groups(db, 5000, 2, "h", run_at="yesterday")
    # Few enough to be walked in a moment, and more than any of the others may read.
    fill_keys(db, 5_000)
    fill_tables(db, 20_000)
    long = [counts() for _ in range(2)][1]
    # A rest looks at many groups, and so does the first claim that finds none of its kind; health at all jobs.
    looks = {
        "claim as a claim plans": 2000,
        "claim of a kind": 2000,
        "rest": 30 * 600,
        "look at loose ends": 12 * 1000,
        "claim of a kind at first": 50 * 5100,
        "health": 5 * 50_000,
    }
    most = {n: 3 * short[n] + looks.get(n, 60) for n in VERBS}
    assert {n: (short[n], long[n]) for n in VERBS if long[n] > most[n]} == {}


def test_a_look_at_waits_reads_no_more_in_a_session_that_planned_it_beside_few_jobs(db):
    """For events, and for jobs that were suspended, as claims and rests plan it."""
    look = (
        "with due as materialized (insert into pgqueue.loose_end (look_at, id, what)"
        " values (now(), 1, 'event'), (now(), 1, 'wait') returning id),"
        " plans as materialized (select set_config('enable_seqscan', 'off', true),"
        " set_config('plan_cache_mode', 'force_generic_plan', true))"
        " select pgqueue._tie_loose_ends(100) from plans cross join (select count(*) from due) as d"
    )
    fill_groups(db, 100, 1)
    short = [pages(db, look) for _ in range(2)][1]
    fill_groups(db, 100, 500)
    assert pages(db, look) <= 2 * short


@pytest.mark.parametrize("limit", [None, 2])
def test_a_sweep_reads_as_much_of_a_deep_group_as_of_a_short_one(db, limit):
    """In a session that planned it when there was nothing."""
    sweep = "select pgqueue._sweep_permits(), pgqueue._sweep_groups()"
    # As in a claim, which sweeps now and then.
    db.execute("set plan_cache_mode = force_generic_plan; set enable_seqscan = off")
    db.execute("select pgqueue.configure('q', group_limit => %s)", (limit,))
    pages(db, sweep)
    costs = []
    for depth in (1, 500):
        fill_groups(db, 100, depth)
        one(db, "select count(*) from pgqueue.claim('q', 'w', 20)")
        # The sweep doubts tickets that nobody has taken for a second, and a slow fill makes such.
        db.execute(
            "update pgqueue.ticket set at = clock_timestamp() where at < clock_timestamp()"
        )
        costs.append(max(pages(db, sweep) for _ in range(4)))
    # 50 groups; each is found by four descents of indexes that are two pages higher.
    assert costs[1] <= costs[0] + 50 * 4 * 2, costs


@pytest.mark.parametrize(
    "call",
    [
        "enqueue({q}, unique_key => {k})",
        "enqueue({q}, unique_key => {gone}, unique_for => '1 day')",
        "enqueue_many({q}, array['7'::jsonb], unique_keys => array[{k}], on_duplicate => 'replace')",
    ],
)
def test_a_key_of_another_collation_is_found_by_its_index(db, connect, call):
    """As those of columns that are declared so, or of the type name."""
    db.execute(
        "insert into pgqueue.job (run_at, enqueued_at, priority, max_attempts, queue, kind, payload, unique_key)"
        " select now(), now(), 0, 20, 'q', 'q', '{}', 'k' || n from generate_series(1, 20000) as n"
    )
    db.execute(
        "insert into pgqueue.recent_key (job_id, expires_at, queue, unique_key)"
        " select -n, now() + interval '1 day', 'q', 'gone' || n from generate_series(1, 20000) as n"
    )
    found = []
    for given in "'%s'", "'%s' collate \"C\"":
        q, k, gone = (given % text for text in ("q", "k777", "gone777"))
        query = "select pgqueue." + call.format(q=q, k=k, gone=gone)
        session = connect()
        found.append([pages(session, query) for _ in range(3)][2])
    assert found[1] < found[0] + 20, found


def test_a_job_that_has_ended_is_found_without_reading_all_runs(db):
    id = one(db, "select pgqueue.enqueue('q')")
    lease = db.execute("select id, token from pgqueue.claim('q', 'w')").fetchone()
    db.execute("select pgqueue.complete(%s, %s)", lease)
    verbs = ("result", "status", "why", "await")
    for verb in verbs:  # their plans are made now
        db.execute(f"select pgqueue.{verb}({id})")
    db.execute(
        "insert into pgqueue.run select r.slot, 1, n, r.finished_at + n * interval '1 ms', '0', '0', 'q', 'k', 'completed'"
        " from pgqueue.run as r, generate_series(2, 200000) as n"
    )
    db.execute("vacuum pgqueue.run")
    all_pages = one(
        db,
        "select sum(pg_relation_size(i.inhrelid)) / 8192 from pg_inherits as i where i.inhparent = 'pgqueue.run'::regclass",
    )
    for verb in verbs:
        assert pages(db, f"select pgqueue.{verb}(100000)") < all_pages / 5


def test_a_page_of_results_costs_as_much_in_a_long_batch_as_in_a_short_one(db):
    """Each page used to read the log of the whole batch."""
    costs = []
    for jobs in (20_000, 200_000):
        batch = one(db, "select pgqueue.create_batch('done')")
        # As if these jobs had ended; of each five, one belongs to another batch.
        db.execute(
            "insert into pgqueue.run"
            " (slot, attempt, job_id, finished_at, waited, taken, queue, kind, outcome, options)"
            " select 0, 1, %(id)s + n, now(), '0', '0', 'q', 'q', 'completed',"
            " jsonb_build_object('batch_id', case when n %% 5 = 0 then 0 else %(id)s end)"
            " from generate_series(1, %(jobs)s) as n",
            {"id": batch, "jobs": jobs},
        )
        db.execute(
            "select setval('pgqueue.job_id_seq', %s::bigint)", (batch + jobs + 1,)
        )
        db.execute("vacuum pgqueue.run")  # which brings the index up to date
        db.execute(
            "select pgqueue.close_batch(%s), pgqueue._look_around(now(), 9)", (batch,)
        )
        lease = db.execute("select id, token from pgqueue.claim('done', 'w')")
        id, token = lease.fetchone()
        page = (
            f"select * from pgqueue.results_of({id}, {token}, {batch + jobs // 3}, 100)"
        )
        costs.append([pages(db, page) for _ in range(2)][1])
    assert costs[1] <= 1.5 * costs[0], costs


def test_a_job_that_has_ended_is_found_though_others_were_put_off_for_a_day(db):
    """The index by id then points to nearly all that was logged since a job was enqueued."""
    id = one(db, "select pgqueue.enqueue('q')")
    lease = db.execute("select id, token from pgqueue.claim('q', 'w')").fetchone()
    db.execute("select pgqueue.complete(%s, %s)", lease)
    for verb in ("result", "status", "why", "await"):  # their plans are made now
        db.execute(f"select pgqueue.{verb}({id})")
    db.execute("truncate pgqueue.run")
    db.execute(
        "insert into pgqueue.run"
        " select (floor(extract(epoch from now()) / 86400)::int + 1 + day) %% 16, 1,"
        " case when n %% 100 = 0 then %(id)s + 1 + (random() * j.id)::int else j.id end,"
        " now() + (day - 7) * interval '1 day' + n * interval '1 s', '0', '0', 'q', 'k', 'completed'"
        " from generate_series(0, 6) as day, generate_series(1, 20000) as n,"
        " lateral (select %(id)s + 20000 * day + n) as j (id) order by day, n",
        {"id": id},
    )
    db.execute("vacuum pgqueue.run")
    all_pages = one(
        db,
        "select sum(pg_relation_size(i.inhrelid)) / 8192 from pg_inherits as i where i.inhparent = 'pgqueue.run'::regclass",
    )
    for verb in ("result", "why", "await", "status"):
        # On the second day, and on the last.
        for job in (id + 30_001, id + 130_001):
            assert pages(db, f"select pgqueue.{verb}({job})") < all_pages / 2, (
                verb,
                job,
            )


def test_an_enqueue_with_terms_plans_nothing_at_each_call(connect, db):
    """Planning its check of the jobs in after anew cost ten times as much as a plain enqueue."""
    first = one(db, "select pgqueue.enqueue('q')")
    batch = one(db, "select pgqueue.create_batch('q')")
    plans = listen_to_plans(session := connect())
    checks = {}
    for terms in (
        "expires_at => 'tomorrow'",
        f"batch_id => {batch}",
        f"after => array[{first}::bigint]",
    ):
        for _ in range(8):  # of which five may have a plan of their own
            plans.clear()
            session.execute(f"select pgqueue.enqueue('q', {terms})")
        checks[terms] = [plan for plan in plans if "unnest(after)" in plan]
    (looked,) = checks.popitem()[1]
    assert not any(checks.values())
    assert re.search(r"id < 1\) OR \(.*id > \$\d", looked), looked


def test_a_setting_for_all_reads_each_queue_with_settings_once(db):
    """Also if the table was never analyzed, as after a restore; the settings of each queue used to read those of all."""
    costs = []
    for queues in (200, 2000):
        db.execute(
            "insert into pgqueue.queue (name, max_attempts) select 'q' || n, 5 from generate_series(1, %s) as n"
            " on conflict do nothing",
            (queues,),
        )
        db.execute("select pgqueue._resolve('')")
        call = "select pgqueue.configure(null, max_attempts => 7)"
        costs.append([pages(db, call) for _ in range(2)][1])
    assert costs[1] <= 2 * 10 * costs[0], costs


@pytest.mark.parametrize("is_analyzed", [False, True])
@pytest.mark.parametrize("call", ["pause('q', group_key => 'g 1')", "resume('q 1')"])
def test_a_pause_reads_only_what_it_may_change(db, call, is_analyzed):
    """Of ten thousand pauses one after the other, each used to read all the settings there were."""
    costs = []
    for rows in (200, 20_000):
        db.execute(
            "insert into pgqueue.queue (name, group_key, paused)"
            " select n.name, n.group_key, true from generate_series(1, %s) as i"
            " cross join lateral (values ('q', 'g ' || i), ('q ' || i, '')) as n (name, group_key)"
            " on conflict do nothing",
            (rows // 2,),
        )
        db.execute("select pgqueue._resolve('')")
        if is_analyzed:
            db.execute("analyze pgqueue.queue")
        costs.append([pages(db, f"select pgqueue.{call}") for _ in range(3)][2])
    assert costs[1] <= 2 * costs[0], costs


@pytest.mark.parametrize("call", ["resume('q'", "configure('q', group_limit => 2"])
def test_a_setting_of_a_group_reads_nothing_of_the_others(db, call):
    """Each used to read all tickets or, for a limit, all jobs."""
    costs = []
    for groups in (200, 20_000):
        fill_groups(db, groups, 1)
        db.execute("select from pgqueue.claim('q', 'w')")
        query = f"select pgqueue.{call}, group_key => 'g7')"
        # Some calls also plan.
        costs.append(min(pages(db, query) for _ in range(5)))
    assert costs[1] <= 2 * costs[0], costs


@pytest.mark.parametrize(
    "call",
    [
        "resume('r')",
        "configure('r', group_limit => 2)",
        "configure('r', group_key => '*', rate_limit => 9)",
    ],
)
def test_a_setting_for_the_groups_of_a_queue_reads_nothing_of_other_queues(db, call):
    """Each used to read all tickets or, for a limit, all jobs."""
    db.execute(
        "select pgqueue.enqueue('r', group_key => 'g ' || n) from generate_series(1, 9) as n"
    )
    costs = []
    for groups in (200, 20_000):
        fill_groups(db, groups, 1)
        costs.append(min(pages(db, f"select pgqueue.{call}") for _ in range(5)))
    db.execute("analyze pgqueue.job, pgqueue.ticket")
    costs.append(min(pages(db, f"select pgqueue.{call}") for _ in range(5)))
    assert max(costs) <= 2 * costs[0], costs


def test_of_many_sessions_that_maintain_one_reads_a_long_table_of_jobs(connect, db):
    """It was each of them, once a minute."""
    maintain = "select * from pgqueue.maintain()"
    sessions = [connect() for _ in range(3)]
    for session in sessions:
        session.execute(maintain)
    fill(db, 100_000, after="interval '1 day'")
    # As if it were later.
    db.execute("update pgqueue.cut set at = at - interval '20 s'")
    costs = [pages(session, maintain) for session in sessions]
    read = one(db, "select pg_relation_size('pgqueue.job') / 8192")
    assert costs[0] > read > 2048 and max(costs[1:]) < read / 2, costs
    lease(db, 1)
    db.execute(
        "update pgqueue.job set lease_expires_at = now() where token is not null"
    )
    reaped = "select done from pgqueue.maintain() where task = 'reap'"
    assert one(db, reaped) == 0
    db.execute("update pgqueue.cut set at = at - interval '20 s'")
    assert one(db, reaped) == 1


# Dead jobs

BURY = """
insert into pgqueue.dead_job (
    id, died_at, enqueued_at, run_at, priority, attempt, max_attempts, queue, kind, group_key, error, payload, errors
)
select n, now() - n * interval '1 s', now(), now(), 0, 1, 1, 'q ' || n %% 100, 'k', 'g ' || n %% 1000, 'e', '{}', '[]'
from generate_series(1, %s) as n
"""


def test_maintain_reads_no_dead_job_that_stays(db):
    """The session has its plans from when there was none."""
    db.execute("select pgqueue.configure(null, keep_dead => '30 days')")
    db.execute(
        "select pgqueue.configure('q 1', group_key => 'g 1', keep_dead => '20 days')"
    )
    forget = "select pgqueue._forget_dead() as dropped"
    # As in maintain.
    db.execute("set plan_cache_mode = force_generic_plan; set enable_seqscan = off")
    for _ in range(6):
        assert one(db, forget) == 0
    db.execute(BURY, (100_000,))
    one(db, forget)
    assert pages(db, forget) < 2000
    # One in a hundred is of the group, which keeps them for a day only.
    db.execute(
        "select pgqueue.configure(null, group_key => 'g 2', keep_dead => '1 day')"
    )
    assert pages(db, forget) < 4000
    assert (
        one(db, "select count(*) from pgqueue.dead_job where group_key = 'g 2'") == 87
    )
    db.execute("select pgqueue.configure(null, keep_dead => '1 hour')")
    assert [one(db, forget) for _ in range(3)] == [10_000, 10_000, 10_000]
    assert pages(db, forget) < 100_000


def test_dead_jobs_are_found_by_when_they_died(db):
    db.execute(BURY, (100_000,))
    db.execute("analyze pgqueue.dead_job")
    for verb in "redrive", "discard_many":
        asked = (
            f"(died_before => now() - interval '{100_000 - 100} s', dry_run => true)"
        )
        # With the locks of a hundred, and without the first plan.
        found = [pages(db, f"select pgqueue.{verb}{asked}") for _ in range(2)]
        assert found[1] < 300
    # As the command dead asks.
    last = "select id from pgqueue.dead_job order by died_at desc limit 20"
    assert pages(db, last) < 20


# What is done to many jobs at once; held are the ids and tokens of those that run.
AT_ONCE = {
    "complete_many": "select count(*) from held, pgqueue.complete_many(ids, tokens)",
    "finish": "select count(*) from held, pgqueue.finish(ids, tokens, array_fill('fail'::text, array[cardinality(ids)]))",
    "release": "select count(*) from held, pgqueue.release(ids, tokens)",
    "extend": "select count(*) from held, pgqueue.extend(ids, tokens)",
    "die": "select count(*) from held, pgqueue.finish(ids, tokens, array_fill('reject'::text, array[cardinality(ids)]))",
    "redrive": "select count(*) from pgqueue.redrive('q')",
    "discard_many": "select count(*) from pgqueue.discard_many('q')",
    "cancel_many": "select count(*) from pgqueue.cancel_many('q')",
    "purge": "select pgqueue.purge('q')",
}


@pytest.mark.parametrize("setting", ["weight => 1", "group_limit => 2"])
def test_no_function_compares_many_jobs_with_each_other(db, setting):
    """Where the tables were empty when they were last analyzed, a join seems to need no index."""
    db.execute(f"select pgqueue.configure('q', {setting})")
    plans = listen_to_plans(
        db, "auto_explain.log_analyze = on", "auto_explain.log_timing = off"
    )
    compared = {}
    for verb, query in AT_ONCE.items():
        db.execute("delete from pgqueue.job; delete from pgqueue.dead_job; analyze")
        fill_groups(db, 400, 1)
        db.execute(
            "create temp table held as select array_agg(id) as ids, array_agg(token) as tokens"
            " from pgqueue.claim('q', 'w', 400)"
        )
        if verb in ("redrive", "discard_many"):
            db.execute(AT_ONCE["die"])
        elif verb in ("cancel_many", "purge"):
            db.execute(AT_ONCE["release"])
        plans.clear()
        db.execute(query)
        assert any("actual rows=" in plan for plan in plans), verb
        removed = re.findall(r"Rows Removed by Join Filter: (\d+)", "\n".join(plans))
        compared[verb] = sum(map(int, removed))
        db.execute("drop table held")
    assert {verb: rows for verb, rows in compared.items() if rows > 400 * 20} == {}
