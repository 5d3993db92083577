"""Groups of one queue have their shares, counted in jobs and compared with an ideal round-robin.

A group takes part in a window if it has something due all the time. Of the n jobs
that those who take part get in the window, the ideal share of a group is n times its weight by the
sum of their weights; bound() says how many fewer it may get. A window is a number of whole claims,
because the jobs of one claim come in the order in which to run them, not in that of the round.
"""

import math
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import psycopg
import pytest
from conftest import column, one, soon

SMALL = [f"small {n}" for n in range(10)]
WINDOW = 5  # rounds


def enqueue(
    db: psycopg.Connection,
    group: str,
    jobs: int,
    kind: str = "x",
    run_at: str | None = None,
) -> list[int]:
    return column(
        db,
        "select * from pgqueue.enqueue_many('q', array_fill('1'::jsonb, array[%(jobs)s::int]),"
        " kind => %(kind)s, group_keys => array_fill(%(group)s::text, array[%(jobs)s::int]),"
        " run_at => %(run_at)s)",
        {"jobs": jobs, "group": group, "kind": kind, "run_at": run_at},
    )


class Claim(list[str]):
    """The groups of what a claim got, and how many claims others made meanwhile."""

    meanwhile = 0


def claim(
    conn: psycopg.Connection, size: int, end: str = "complete", kind: str | None = None
) -> Claim:
    """Claim, end the attempts, if at all, and return the groups in their order."""
    rows = conn.execute(
        "select id, token, group_key, attempt"
        " from pgqueue.claim('q', 'w', %s, kinds => %s::text[])",
        (size, kind and [kind]),
    ).fetchall()
    ends = [
        "complete" if end == "fail once" and attempt > 1 else end.split()[0]
        for *_, attempt in rows
    ]
    if end != "none":
        conn.execute(
            "select count(*) from pgqueue.finish(%s::bigint[], %s::bigint[], %s::text[],"
            " delays => array_fill('0'::interval, array[%s]))",
            ([row[0] for row in rows], [row[1] for row in rows], ends, len(rows)),
        )
    return Claim(row[2] for row in rows)


def serve(
    sessions: list[psycopg.Connection],
    size: int,
    jobs: int,
    claim: Callable[[psycopg.Connection, int], Claim] = claim,
) -> list[Claim]:
    """Let all sessions claim at once until this many jobs were served, or none is left."""
    served: list[Claim] = []

    def work(conn: psycopg.Connection) -> None:
        while sum(map(len, served)) < jobs:
            before = len(served)
            if not (got := claim(conn, size)):
                return
            got.meanwhile = len(served) - before
            served.append(got)

    with ThreadPoolExecutor(len(sessions)) as pool:
        list(pool.map(work, sessions))
    return served


def count(served: list[Claim]) -> Counter[str]:
    return Counter(group for claim in served for group in claim)


def visit(weights: dict[str, int], size: int) -> int:
    """How many jobs a claim takes of a group of weight 1 in its turn.

    A claim of up to 10 takes one; a larger one some of each of at least 10 groups.
    """
    return math.ceil(size / min(sum(weights.values()), max(10, math.sqrt(size)), size))


def check_shares(
    served: list[Claim],
    weights: dict[str, int],
    backlog: dict[str, int],
    size: int,
    sessions: int = 1,
    bounds: Callable[[dict[str, int]], dict[str, float]] | None = None,
) -> None:
    """In no window does a group that has something due all the time fall behind its share.

    A claim that the machine holds up while the others make more than twenty keeps its groups from
    them meanwhile: what overlaps with it does not count.
    """
    each = visit(weights, size)
    window = WINDOW * each * sum(weights.values())
    bounds = bounds or partial(bound, size=size, sessions=sessions)
    behind = bounds(weights)
    held_up = [
        range(n - claim.meanwhile, n + 1)
        for n, claim in enumerate(served)
        if claim.meanwhile > 20
    ]
    windows = 0
    for start in range(len(served)):
        end = start
        while end < len(served) and sum(map(len, served[start:end])) < window:
            end += 1
        before, got = count(served[:start]), count(served[start:end])
        # What is left may be under way in the claims of the other sessions.
        there = [
            group
            for group in backlog
            if backlog[group] - before[group] - got[group]
            > behind[group] - 2 * each * weights[group]
        ]
        if got.total() < window:
            break
        if any(late.start < end and start < late.stop for late in held_up):
            continue
        windows += 1
        total = sum(got[group] for group in there)
        # Where few are left, each claim takes more of each.
        allowed = bounds({group: weights[group] for group in there}) if there else {}
        for group in there:
            ideal = total * weights[group] / sum(weights[other] for other in there)
            assert got[group] >= ideal - allowed[group], (
                f"{group} got {got[group]} of {total}, and {ideal:.1f} would be its share,"
                f" in the claims {start} to {end}: {got}"
            )
    assert windows > 0


def bound(weights: dict[str, int], size: int, sessions: int) -> dict[str, float]:
    """How many jobs fewer than its share a group may get in a window.

    Two visits: at each end of the window a round is cut in two, and the visit of the group may be
    in the part outside. A claim that takes several jobs of each group and comes round takes fewer
    of each in its last round: one more. Each further session may have one claim under way that took the group's
    share and is counted outside the window, and pass over one visit because it meets the ticket
    of the group locked.
    """
    total, each = sum(weights.values()), visit(weights, size)
    return {
        group: (2 + (each > 1)) * each * weight
        + (sessions - 1) * weight * (each + size / total)
        for group, weight in weights.items()
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize("sessions", [1, 4])
@pytest.mark.parametrize("size", [1, 10, 50])
def test_a_large_backlog_takes_no_more_than_its_share(db, connect, size, sessions):
    backlog = {"large": 5000} | dict.fromkeys(SMALL, 80)
    for group, jobs in backlog.items():
        enqueue(db, group, jobs)
    weights = dict.fromkeys(backlog, 1)
    conns = [connect() for _ in range(sessions)]
    served = serve(conns, size, 1000)
    check_shares(served, weights, backlog, size, sessions)
    assert all(count(served)[group] == 80 for group in SMALL)


@pytest.mark.sample(2)
@pytest.mark.parametrize("sessions", [1, 4])
@pytest.mark.parametrize("size", [1, 10, 50])
def test_a_newcomer_has_its_share_from_its_first_round_on(db, connect, size, sessions):
    enqueue(db, "large", 5000)
    for group in SMALL[:5]:
        enqueue(db, group, 180)
    conns = [connect() for _ in range(sessions)]
    serve(conns, size, 300)
    for group in SMALL[5:]:
        enqueue(db, group, 60)
    waiting = dict(
        db.execute(
            "select group_key, count(*) from pgqueue.jobs where queue = 'q' group by 1"
        ).fetchall()
    )
    weights = dict.fromkeys(waiting, 1)
    served = serve(conns, size, 11 * 54)
    check_shares(served, weights, waiting, size, sessions)


@pytest.mark.sample(2)
@pytest.mark.parametrize("sessions", [1, 4])
@pytest.mark.parametrize("size", [1, 10, 50])
def test_shares_are_by_weight(db, connect, size, sessions):
    weights = {"one": 1, "two": 2, "three": 3}
    for group, weight in weights.items():
        db.execute(
            "select pgqueue.configure('q', group_key => %s, weight => %s)",
            (group, weight),
        )
        enqueue(db, group, 5000 if group == "one" else 600)
    conns = [connect() for _ in range(sessions)]
    served = serve(conns, size, 900)
    backlog = {"one": 5000, "two": 600, "three": 600}
    check_shares(served, weights, backlog, size, sessions)


@pytest.mark.parametrize("size", [1, 10, 50])
def test_a_group_whose_first_job_is_locked_holds_up_no_other(db, connect, size):
    backlog = {"locked": 100} | dict.fromkeys(SMALL, 20)
    first, *_ = [enqueue(db, group, jobs)[0] for group, jobs in backlog.items()]
    with (other := connect()).transaction():
        other.execute("select pgqueue.reprioritize(%s, 0)", (first,))
        got = count(serve([connect()], size, 200))
        # Were it not locked, each group would have 18 of 200.
        each = visit(backlog, size)
        assert all(got[group] >= 17 - each for group in SMALL), got
    serve([db], 50, 300)
    assert one(db, "select count(*) from pgqueue.jobs where queue = 'q'") == 0


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("size", [1, 10, 50])
def test_full_groups_with_long_attempts_hold_up_no_other(db, connect, size, is_open):
    """Five groups run one job each and do not end it; the others go on, one job at a time."""
    db.execute("select pgqueue.configure('q', group_limit => 1)")
    slow = [f"slow {n}" for n in range(5)]
    for group in slow:
        enqueue(db, group, 100)
    other = connect()
    with other.transaction():
        assert sorted(claim(other, 5, end="none")) == slow
        if not is_open:
            other.execute("commit")
        for group in SMALL:
            enqueue(db, group, 20)
        backlog, weights = dict.fromkeys(SMALL, 20), dict.fromkeys(SMALL, 1)
        served = serve([db], size, 200)
        assert count(served) == backlog
        # One at a time, whatever the size of a claim.
        check_shares(served, weights, backlog, size=1, sessions=1)


# Where jobs are left out


@pytest.fixture
def two_kinds(db):
    """What waits in each group: its jobs are of two kinds, in blocks."""
    db.execute("select pgqueue.configure('q', group_key => 'large', weight => 2)")
    blocks = dict.fromkeys(SMALL, 60) | {"large": 1200}
    for kind in "xyx":
        for group, jobs in blocks.items():
            enqueue(db, group, jobs, kind)
    return {group: 3 * jobs for group, jobs in blocks.items()}


@pytest.mark.parametrize("size", [1, 10, 50])
def test_shares_are_by_weight_where_each_worker_asks_for_another_kind(
    db, two_kinds, size
):
    """Whichever of them a group gives its jobs to; each passes over what is the other's."""
    weights = dict.fromkeys(SMALL, 1) | {"large": 2}
    served = [claim(db, size, kind="xy"[n % 2]) for n in range(1440 // size)]
    check_shares(served, weights, two_kinds, size, sessions=2)


@pytest.mark.parametrize("size", [10, 50])
def test_shares_are_by_weight_where_workers_of_two_kinds_claim_at_once(
    connect, two_kinds, size
):
    weights = dict.fromkeys(SMALL, 1) | {"large": 2}
    served: list[Claim] = []

    def work(kind: str) -> None:
        conn = connect()
        while sum(map(len, served)) < 1440 and (got := claim(conn, size, kind=kind)):
            served.append(got)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, "xy"))
    # A claim that meets all tickets but one locked serves the others beside their turns.
    check_shares(
        served,
        weights,
        two_kinds,
        size,
        bounds=lambda groups: dict.fromkeys(groups, 2.0 * size),
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize("why", ["paused", "at its cap", "beyond its rate"])
@pytest.mark.parametrize("sessions", [1, 4])
@pytest.mark.parametrize("size", [1, 10, 50])
def test_shares_are_by_weight_where_a_kind_may_not_begin(
    db, connect, size, sessions, why
):
    """Its jobs are the first of the large group and of half of the small ones, and the last of all."""
    weights = dict.fromkeys(SMALL, 1) | {"large": 2}
    db.execute("select pgqueue.configure('q', group_key => 'large', weight => 2)")
    enqueue(db, "first", 1, "held")
    if why == "at its cap":
        db.execute("select pgqueue.configure('q', kind => 'held', max_running => 1)")
    elif why == "beyond its rate":
        db.execute(
            "select pgqueue.configure('q', kind => 'held', rate_limit => 1, rate_period => '1 hour')"
        )
    assert claim(db, 1, end="none") == ["first"]
    if why == "paused":
        db.execute("select pgqueue.pause('q', kind => 'held')")
    for group in ["large", *SMALL[:5]]:
        enqueue(db, group, 100, "held")
    backlog = dict.fromkeys(SMALL, 60) | {"large": 1200}
    for group, jobs in backlog.items():
        enqueue(db, group, jobs)
        enqueue(db, group, 20, "held")
    served = serve([connect() for _ in range(sessions)], size, 60 * 12)
    check_shares(served, weights, backlog, size, sessions)
    assert all(count(served)[group] <= 60 for group in SMALL)


# What comes back, and what comes due


@pytest.mark.sample(2)
@pytest.mark.parametrize("sessions", [1, 4])
@pytest.mark.parametrize("size", [1, 10, 50])
def test_retries_count_in_the_share_of_their_group(db, connect, size, sessions):
    """Each job of the small groups fails once, and is due again at once; the large one has new jobs."""
    backlog = {"large": 5000} | dict.fromkeys(SMALL, 40)
    for group, jobs in backlog.items():
        enqueue(db, group, jobs)
    weights = dict.fromkeys(backlog, 1)
    served = serve(
        [connect() for _ in range(sessions)],
        size,
        70 * 11,
        lambda conn, size: claim(conn, size, end="fail once"),
    )
    attempts = {group: 2 * jobs for group, jobs in backlog.items()}
    check_shares(served, weights, attempts, size, sessions)


@pytest.mark.sample(3)
@pytest.mark.parametrize("what", ["scheduled jobs", "retries"])
@pytest.mark.parametrize("sessions", [1, 4])
@pytest.mark.parametrize("size", [1, 10, 50])
def test_what_comes_due_at_one_moment_is_shared_by_weight(
    db, connect, size, sessions, what
):
    """A large backlog is served meanwhile, and goes on beside it."""
    weights = dict.fromkeys(SMALL, 1) | {"large": 2, "late": 2}
    for group in ("large", "late"):
        db.execute(
            "select pgqueue.configure('q', group_key => %s, weight => 2)", (group,)
        )
    backlog = dict.fromkeys(SMALL, 60) | {"large": 5000, "late": 1000}
    due = one(db, "select (now() + interval '1 hour')::text")
    for group in ["late", *SMALL]:
        enqueue(db, group, backlog[group], run_at=due if what[0] == "s" else None)
    if what == "retries":
        db.execute(
            "select count(*) from (select array_agg(id) as ids, array_agg(token) as tokens"
            " from pgqueue.claim('q', 'w', 2000)) as c, pgqueue.finish("
            "c.ids, c.tokens, array_fill('fail'::text, array[1600]),"
            " delays => array_fill('1 hour'::interval, array[1600]))"
        )
    enqueue(db, "large", 5000)
    conns = [connect() for _ in range(sessions)]
    assert count(serve(conns, size, 60)).keys() == {"large"}
    let_an_hour_pass(db)
    served = serve(conns, size, 45 * 14)
    check_shares(served, weights, backlog, size, sessions)


def let_an_hour_pass(db: psycopg.Connection) -> None:
    """For the jobs that are due in an hour, and the tickets that say so."""
    for table, moment in (("job", "run_at"), ("ticket", "at")):
        db.execute(
            f"update pgqueue.{table} set {moment} = {moment} - interval '1 hour'"
            f" where {moment} > clock_timestamp() + interval '1 minute'"
        )
    # What claims remember is over as well.
    remembered = "select min(run_at) + interval '200 ms' < now() from pgqueue.job where group_key = 'late'"
    soon(lambda: one(db, remembered))
