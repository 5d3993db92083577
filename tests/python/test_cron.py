"""Cron expressions, checked against cronsim: ten years of hundreds of them, and clock changes.

cronsim has the second in front and follows Debian's cron, which differs from pgqueue near a clock
change only: there a restricted hour with minutes that begin with *, and an hour that begins with *
and lists some, run by the hours that pass. So where the clocks change, its local slots (without a time
zone) are put through the rules of pgqueue here.
"""

import itertools
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import psycopg
import pytest
from conftest import column, database
from cronsim import CronSim

ZONES = [
    "UTC",
    "Europe/Berlin",
    "America/New_York",
    "Australia/Lord_Howe",  # by half an hour
    "Asia/Kathmandu",
    "America/Sao_Paulo",  # at midnight, until 2019
]
FIRST, YEARS = datetime(2015, 1, 1, tzinfo=UTC), 10
LAST = FIRST.replace(year=FIRST.year + YEARS)

PLAIN = """
* * * * *
*/10 * * * *
0 * * * *
30 * * * *
7-59/13 * * * *
*/30 2 * * *
* 2 * * *
15 */2 * * *
0 0 * * *
30 0 * * *
30 1 * * *
0 2 * * *
30 2 * * *
0 3 * * *
59 23 31 12 *
0 0 29 2 *
0 0 29 feb */7
0 0 1 * mon
0 0 13 * fri
0 0 */2 * mon
0 0 1-7 * */7
0 12 * * 7
0 12 * * 0
5 4 * * sun
0 22 * * mon-fri
0 0 31 * *
0 0 30 4,jun,9,11 *
0 0 * jan,feb-apr sat,sun
23 0-20/2 * * *
1,2,3,5-7 3/7 * * tue
30 2 31 3 *
30 2 * 3,10,11 0
""".strip().splitlines()


def field(draw: random.Random, low: int, high: int) -> str:
    # Never 5-5/2: from a range of one and a step cronsim goes on to the end.
    one, other = sorted(draw.sample(range(low, high + 1), 2))
    step = draw.randint(2, 9)
    return draw.choice(
        [
            str(one),
            f"{one},{other}",
            f"{one}-{other}",
            f"{one}-{other}/{step}",
            "*",
            f"*/{step}",
            f"{one}/{step}",
        ]
    )


def drawn(count: int) -> Iterator[str]:
    """Draw cron expressions whose days come."""
    draw = random.Random(14)
    while count:
        days = field(draw, 1, 28)
        cron = " ".join(
            [
                str(draw.randint(0, 59)) if draw.random() < 0.6 else field(draw, 0, 59),
                field(draw, 0, 23),
                days if draw.random() < 0.5 else "*",
                field(draw, 1, 12) if draw.random() < 0.3 else "*",
                field(draw, 0, 6) if draw.random() < 0.3 else "*",
            ]
        )
        yield cron
        count -= 1


CRONS = [*PLAIN, *drawn(270)]


def changes(zone: ZoneInfo) -> list[datetime]:
    """Find when the clocks of a zone change, to the second."""
    found = []
    for hours in range(0, YEARS * 366 * 24, 12):
        low = FIRST + timedelta(hours=hours)
        high = low + timedelta(hours=12)
        offset = low.astimezone(zone).utcoffset()
        if high.astimezone(zone).utcoffset() == offset:
            continue
        while high - low > timedelta(seconds=1):
            middle = low + (high - low) // 2
            middle = middle.replace(microsecond=0)
            same = middle.astimezone(zone).utcoffset() == offset
            low, high = (middle, high) if same else (low, middle)
        found.append(high)
    return found


CHANGES = {name: changes(ZoneInfo(name)) for name in ZONES}


def local_slots(cron: str, after: datetime, until: datetime) -> Iterator[datetime]:
    for slot in CronSim(cron, after):
        if slot > until:
            return
        yield slot


def expected(cron: str, name: str, after: datetime, until: datetime) -> list[datetime]:
    """What is due between two moments, in UTC, by the rules of pgqueue."""
    zone = ZoneInfo(name)
    day = timedelta(days=1)
    start = (after - day).astimezone(zone).replace(tzinfo=None)
    end = (until + day).astimezone(zone).replace(tzinfo=None)
    every_hour = cron.split()[1] == "*"
    found = set()
    for local in local_slots(cron, start, end):
        moments = [local.replace(tzinfo=zone, fold=f).astimezone(UTC) for f in (0, 1)]
        real = [m for m in moments if m.astimezone(zone).replace(tzinfo=None) == local]
        if every_hour:
            found.update(real)
        elif real:
            found.add(min(real))
        else:
            found.update(c for c in CHANGES[name] if abs(c - moments[0]) < day)
    return sorted(moment for moment in found if after < moment <= until)


def check(
    db: psycopg.Connection, cron: str, name: str, after: datetime, until: datetime
) -> None:
    """Compare the slots until a moment, and that the next one is later."""
    slots = expected(cron, name, after, until)
    found = [after]
    while missing := len(slots) + 2 - len(found):
        query = "select pgqueue.next_slots(%s, %s, %s, %s)"
        found += column(db, query, cron, name, found[-1], min(missing, 50))
    assert found[1:-1] == slots and found[-1] > until, (cron, name, after)


@pytest.fixture(scope="module")
def conn(template):
    with database(template) as dsn, psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("set timezone = 'UTC'")
        for name in ZONES:  # a zone that a schedule has is not looked up again
            conn.execute(
                "select pgqueue.schedule(%s, 'q', '@daily', timezone => %s)",
                [name, name],
            )
        yield conn


@pytest.mark.sample(3)
@pytest.mark.parametrize("part", range(10))
def test_ten_years_of_slots_are_those_of_cronsim(conn, part):
    for number, cron in list(enumerate(CRONS))[part::10]:
        name = ZONES[number % len(ZONES)]
        # As many of the ten years as hold 200 slots.
        first = list(itertools.islice(local_slots(cron, FIRST, LAST), 200))
        until = first[-1] if len(first) == 200 else LAST
        check(conn, cron, name, FIRST, until)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [name for name in ZONES if CHANGES[name]])
def test_slots_near_each_clock_change_follow_the_rules(conn, name):
    around = timedelta(hours=4)
    for number, change in enumerate(CHANGES[name][::3]):  # forwards and back in turn
        after, until = change - around, change + around
        for cron in [*PLAIN[1:], *CRONS[len(PLAIN) + number :: 30]]:
            check(conn, cron, name, after, until)


def test_names_are_read_alike_in_every_language(conn):
    """Where a capital I has no dot, that of FRI is another letter in lower case."""
    turkish = "select count(*) from pg_collation where collname = 'tr-x-icu'"
    if column(conn, turkish) == [0]:
        pytest.skip("this Postgres is built without ICU")
    query = 'select pgqueue.next_slots({} collate "tr-x-icu", after => %s)'
    for cron in ("'0 0 * JAN FRI'", "'@MIDNIGHT'"):
        assert column(conn, query.format(cron), FIRST), cron
