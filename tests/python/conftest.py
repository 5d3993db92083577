"""Fixtures: each test has a database of its own on the server of PGHOST, PGPORT ...

A module that is marked with loses_hints runs twice: as it is, and where every other hint gets
lost. There each claim comes as if the time until the next sweep had passed, and the longest
pause of a group that can give no more; one that finds nothing comes once more, and each look at
jobs and batches comes after a sweep. What no hint tells of must be found by then. Sessions that
go on by themselves until all is done are marked with waits_for_sweeps: for them the time is real.

`make test-all` sets PGQUEUE_TEST_LONG=1. Without it, the tests are in their short form: those
marked with `long` are left out, of the cases of one marked with `sample` some are run, and of
those with lost hints a part. Chance draws them; PGQUEUE_TEST_SAMPLE, which is printed, draws the
same again.
"""

import faulthandler
import itertools
import math
import os
import random
import re
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import psycopg
import pytest
from cluster import Cluster
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg.pq import TransactionStatus
from pytest_timeout import Settings

Connect = Callable[..., psycopg.Connection]
Found = TypeVar("Found")
TEMPLATE = "pgqueue_template"
NUMBERS = itertools.count()
LIMIT = pytest.StashKey[float]()  # seconds that a test may take
OWN_CLUSTER = pytest.StashKey[Cluster]()
LONG = bool(os.environ.get("PGQUEUE_TEST_LONG"))
# How many hints get lost. Which ones is by chance.
LOST = [0.5] * 4 + [1] if LONG else [0.5]
# Of the tests in which they do, in the short form; of one with a sample, of as many as that has.
LOSING = 0.25
SAMPLE = "PGQUEUE_TEST_SAMPLE"


def pytest_configure(config: pytest.Config) -> None:
    """Give each process of pytest-xdist a server of its own: tests change and stop it."""
    # The processes inherit it, and must all draw the same.
    os.environ.setdefault(SAMPLE, str(random.randrange(1 << 30)))
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") != "gw0":
        config.stash[OWN_CLUSTER] = cluster = Cluster(fast=True)
        cluster.__enter__()
        os.environ.update(cluster.env)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    test = metafunc.definition
    if (
        "lost_hints" in metafunc.fixturenames
        and marked(test, "loses_hints")
        and not marked(test, "needs_hints")
    ):
        lost = [pytest.param(lost, id=f"{lost} lost") for lost in LOST]
        plain = pytest.param(0, id=pytest.HIDDEN_PARAM)
        metafunc.parametrize("lost_hints", [plain, *lost], indirect=True)


def marked(test: pytest.Item, name: str) -> bool:
    return test.get_closest_marker(name) is not None


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    if LONG:
        for item in items:
            item.add_marker(pytest.mark.timeout(4 * 3600))
        return
    # What is named on the command line is run.
    named = any("::" in argument for argument in config.args)
    left_out = set() if named else set(unsampled(items))
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def unsampled(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Name what the short form leaves out."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    losing = []
    for item in items:
        if marked(item, "long"):
            yield item
        elif marked(item, "sample"):
            name = item.nodeid.partition("[")[0]
            cases[f"{name} losing" if loses_hints(item) else name].append(item)
        elif loses_hints(item):
            losing.append(item)
    for name, each in cases.items():
        (count,) = each[0].get_closest_marker("sample").args
        if loses_hints(each[0]):
            count = math.ceil(count * LOSING)
        yield from set(each) - set(some(each, count, name))
    yield from set(losing) - set(some(losing, round(len(losing) * LOSING), "losing"))


def loses_hints(item: pytest.Item) -> bool:
    return bool(
        getattr(item, "callspec", None) and item.callspec.params.get("lost_hints")
    )


def some(of: Iterable[Found], count: int, name: str) -> list[Found]:
    """Draw so many in the short form, in their order, and take all in the long one.

    Others for each name, and the same in all processes.
    """
    every = list(of)
    if LONG or count >= len(every):
        return every
    return [every[n] for n in sorted(chance(name).sample(range(len(every)), count))]


def chance(name: str) -> random.Random:
    """What draws for the short form."""
    return random.Random(f"{os.environ[SAMPLE]} {name}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not LONG:
        seed = os.environ[SAMPLE]
        terminalreporter.write_line(f"in the short form, drawn by {SAMPLE}={seed}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Repeat the alarm of pytest-timeout: what is cut may hang a second time."""
    item.stash[LIMIT] = limit = signal.getitimer(signal.ITIMER_REAL)[0]
    signal.setitimer(signal.ITIMER_REAL, limit, limit)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Set it anew for the ends of fixtures: a test that fails has switched it off."""
    if limit := item.stash.get(LIMIT, 0):
        settings = Settings(limit, "signal", False, False)
        item.config.hook.pytest_timeout_set_timer(item=item, settings=settings)
        signal.setitimer(signal.ITIMER_REAL, limit, limit)
    return (yield)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End also if a test has left a thread that never does; Python would wait for it."""
    faulthandler.dump_traceback_later(60, exit=True)
    if cluster := config.stash.get(OWN_CLUSTER, None):
        cluster.remove()


ADMIN: list[psycopg.Connection] = []


def admin() -> psycopg.Connection:
    """Return the session that makes and drops databases, or a new one if a test has cut it off."""
    if ADMIN and ADMIN[-1].info.transaction_status != TransactionStatus.IDLE:
        ADMIN.pop().close()
    if not ADMIN:
        ADMIN.append(psycopg.connect(dbname="postgres", autocommit=True))
    return ADMIN[-1]


@pytest.fixture(scope="session")
def template() -> Iterator[str]:
    """Name a database with the extension in it, to be copied."""
    admin().execute(f"drop database if exists {TEMPLATE}")
    admin().execute(f"create database {TEMPLATE}")
    with psycopg.connect(dbname=TEMPLATE, autocommit=True) as conn:
        conn.execute("create extension pgqueue")
    yield TEMPLATE
    admin().execute(f"drop database {TEMPLATE} with (force)")
    admin().close()


@contextmanager
def database(template: str) -> Iterator[str]:
    """Make a fresh database with the extension, and name it."""
    name = f"pgqueue_test_{next(NUMBERS)}"
    # Half as quick is what 15 and later do by themselves, which writes all pages to the log.
    how = "strategy file_copy" if admin().info.server_version >= 150000 else ""
    admin().execute(f"drop database if exists {name} with (force)")
    admin().execute(f"create database {name} template {template} {how}")
    yield make_conninfo(dbname=name)
    admin().execute(f"drop database {name} with (force)")


class Unhinted(psycopg.Connection):
    """A session of a test that loses hints, see above."""

    CLAIM = re.compile(r"pgqueue\.(claim|claim_from)\(")
    LOOK = re.compile(r"pgqueue\.(status|jobs?|batches|run|dead_job)\b")
    LET_TIME_PASS = """
        select
            setval('pgqueue._cell_groups_due', 1), setval('pgqueue._cell_due', 1),
            pgqueue._unblock_groups(null, null)
    """

    def execute(self, query, *args, **options):
        text = query if isinstance(query, str) else query.as_string(self)
        if self.CLAIM.search(text):
            super().execute(self.LET_TIME_PASS)
            cursor = super().execute(query, *args, **options)
            if cursor.rowcount > 0:
                return cursor
            # Permits that it has made, or freed, are for the next.
            super().execute(self.LET_TIME_PASS)
        elif self.LOOK.search(text) and self.is_between_transactions:
            super().execute(self.LET_TIME_PASS)
            super().execute("select pgqueue.rest('{none}', park => false)")
        return super().execute(query, *args, **options)

    @property
    def is_between_transactions(self) -> bool:
        is_idle = self.info.transaction_status == TransactionStatus.IDLE
        return self.autocommit and is_idle


@pytest.fixture
def lost_hints(request: pytest.FixtureRequest) -> float:
    """How many hints get lost, a fraction from 0 to 1."""
    return getattr(request, "param", 0)


@pytest.fixture
def dsn(template: str, lost_hints: float) -> Iterator[str]:
    with database(template) as dsn:
        if lost_hints:
            lose_hints(dsn, lost_hints)
        yield dsn


def lose_hints(dsn: str, part: float) -> None:
    """Lose this share of the hints of all sessions that begin from now on."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        name = sql.Identifier(conn.info.dbname)
        query = sql.SQL("alter database {} set pgqueue.lose_hints = {}")
        conn.execute(query.format(name, part))


@pytest.fixture
def connect(
    dsn: str, lost_hints: float, request: pytest.FixtureRequest
) -> Iterator[Connect]:
    """Open sessions on the test's database, closed at its end; autocommit unless told."""
    opened: list[psycopg.Connection] = []
    waits = not lost_hints or marked(request.node, "waits_for_sweeps")
    kind = psycopg.Connection if waits else Unhinted

    def connect(**options) -> psycopg.Connection:
        options.setdefault("autocommit", True)
        opened.append(kind.connect(dsn, **options))
        return opened[-1]

    yield connect
    for conn in opened:
        conn.close()


@pytest.fixture
def db(connect: Connect) -> psycopg.Connection:
    return connect()


@pytest.fixture
def role(db: psycopg.Connection) -> Iterator[str]:
    """Name a role that can connect and has no grants."""
    name = "pgqueue_nobody"
    db.execute(f"drop role if exists {name}")
    db.execute(f"create role {name} login")
    yield name
    db.execute(f"drop owned by {name}")
    db.execute(f"drop role {name}")


@pytest.fixture
def held_snapshot(connect: Connect) -> None:
    """Hold a snapshot until the test ends: no row deleted after it can be removed."""
    holder = connect(autocommit=False)
    holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    holder.execute("select 1")


@pytest.fixture
def blocked(connect: Connect) -> Callable[[psycopg.Connection], None]:
    """Wait until a session waits for a lock that another holds."""
    watcher = connect()

    def wait(conn: psycopg.Connection, timeout: float = 20) -> None:
        deadline = time.monotonic() + timeout
        query = sql.SQL("select cardinality(pg_blocking_pids({})) > 0").format(
            conn.info.backend_pid
        )
        while time.monotonic() < deadline:
            if one(watcher, query):
                return
        raise AssertionError("the session was never blocked")

    return wait


def soon(look: Callable[[], Found], timeout: float = 15) -> Found:
    """Look again until there is something, and return it."""
    deadline = time.monotonic() + timeout
    while not (found := look()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def persist(db: psycopg.Connection, query: str) -> list:
    """Repeat a query that a statement_timeout cancels until it finds something, 50 times at most."""
    for _ in range(50):
        with suppress(psycopg.errors.QueryCanceled):
            if found := column(db, query):
                return found
    return []


def url(db: psycopg.Connection, driver: str) -> str:
    """Return where SQLAlchemy finds the database of a test."""
    info = db.info
    where = f"host={info.host}&port={info.port}"
    return f"postgresql+{driver}://{info.user}@/{info.dbname}?{where}"


def one(conn: psycopg.Connection, query, *args):
    """The first column of the first row."""
    row = conn.execute(query, _parameters(args)).fetchone()
    return row[0] if row else None


def column(conn: psycopg.Connection, query, *args) -> list:
    """The first column of all rows."""
    return [row[0] for row in conn.execute(query, _parameters(args))]


def _parameters(args: tuple):
    return args[0] if args and isinstance(args[0], dict) else args or None
