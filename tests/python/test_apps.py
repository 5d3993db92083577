"""The handlers of one or several apps in a worker, its queues, and what is refused."""

import asyncio
import contextlib
import functools
import itertools
from collections.abc import Callable
from datetime import datetime

import pgqueue
import pytest
from conftest import column, one
from worker_harness import outcomes

pytest_plugins = ["worker_harness", "command_line"]


def work(app: pgqueue.App, dsn: str, *queues: dict) -> None:
    pgqueue.Worker(app, *queues, dsn=dsn, burst=True, concurrency=1).run()


def noting(notes: list[str], word: str) -> Callable:
    @contextlib.contextmanager
    def around(job: pgqueue.Job):
        notes.append(word)
        yield

    return around


def test_an_app_that_includes_others_runs_their_handlers_as_they_would(db, dsn) -> None:
    notes: list[str] = []
    outer, inner = noting(notes, "outer"), noting(notes, "inner")
    shop, billing = pgqueue.App(middleware=inner), pgqueue.App(timeout=0.05)
    for app, word in (shop, "shop"), (billing, "billing"):
        app.on_startup(lambda word=word: notes.append(f"{word} starts"))
        app.on_shutdown(lambda word=word: notes.append(f"{word} ends"))
    ship = shop.job("ship", queue="orders")(lambda: notes.append("ship"))
    shop.job("recur", queue="orders", every=3600)(lambda: None)
    late = billing.job("late", max_attempts=1)(asyncio.Event().wait)
    app = pgqueue.App(middleware=outer)
    app.include(shop, billing)
    app.include(shop)
    ship.enqueue(db)
    late.enqueue(db)
    work(app, dsn)
    assert outcomes(db) == {"completed": 1, "dead": 1}
    at = notes.index("ship")
    assert notes[at - 2 : at] == ["outer", "inner"]
    assert notes.count("inner") == 1
    for word in "shop", "billing":
        assert notes.count(f"{word} starts") == notes.count(f"{word} ends") == 1
    assert column(db, "select name from pgqueue.schedules") == ["recur"]


def test_an_app_with_the_same_middleware_enters_it_once(db, dsn) -> None:
    notes: list[str] = []
    around = noting(notes, "around")
    part, app = pgqueue.App(middleware=around), pgqueue.App(middleware=around)
    part.job("part")(lambda: None).enqueue(db)
    app.include(part)
    work(app, dsn)
    assert (outcomes(db), notes) == ({"completed": 1}, ["around"])


def test_two_that_share_a_middleware_enter_it_once_whatever_is_between(db, dsn) -> None:
    notes: list[str] = []
    around, inner = noting(notes, "around"), noting(notes, "inner")
    apps = [pgqueue.App(middleware=m) for m in (inner, around, None, around, None)]
    apps[0].job("part")(lambda: None).enqueue(db)
    for app, outer in itertools.pairwise(apps):
        outer.include(app)
    work(apps[-1], dsn)
    assert (outcomes(db), notes) == ({"completed": 1}, ["around", "inner"])


def test_an_app_that_includes_another_counts_wherever_both_are_named(db, dsn) -> None:
    notes: list[str] = []
    base = pgqueue.App()
    billing = pgqueue.App(middleware=noting(notes, "billing"))
    shop = pgqueue.App(timeout=0.05, middleware=noting(notes, "shop"))
    late = base.job("late", max_attempts=1)(asyncio.Event().wait)
    billing.include(base)
    shop.include(billing)
    base.job("later")(lambda: None).enqueue(db)  # than they were included
    for others in (base, shop, billing), (base, shop), (billing, base, shop):
        app = pgqueue.App()
        app.include(*others)
        late.enqueue(db)
        work(app, dsn)
    assert outcomes(db) == {"dead": 3, "completed": 1}
    assert notes == ["shop", "billing"] * 3


def test_apps_that_include_each_other_are_taken_over(db, dsn) -> None:
    one, other = pgqueue.App(), pgqueue.App()
    one.job("k")(lambda: None).enqueue(db)
    one.include(other)
    other.include(one)
    app = pgqueue.App()
    app.include(one, other)
    work(app, dsn)
    assert outcomes(db) == {"completed": 1}


def test_a_middleware_of_an_included_app_may_swallow_and_replace(db, dsn) -> None:
    @contextlib.contextmanager
    def swallows(job: pgqueue.Job):
        with contextlib.suppress(ZeroDivisionError):
            yield

    part, app = pgqueue.App(middleware=swallows), pgqueue.App(middleware=noting([], ""))
    part.job("divide")(lambda: 1 / 0).enqueue(db)
    app.include(part)
    work(app, dsn)
    assert outcomes(db) == {"completed": 1}


def test_two_handlers_of_one_kind_are_refused_with_the_place_of_the_first() -> None:
    first, second = pgqueue.App(), pgqueue.App()
    first.job("k")(noting)
    second.job("k")(lambda: None)
    with pytest.raises(ValueError, match=r"'k' already has .* test_apps\.noting"):
        first.include(second)
    with pytest.raises(ValueError, match=r"'k' already has .* test_apps\.noting"):
        first.job("k")(noting)


MODULE = """
import pgqueue
app = pgqueue.App()
app.job("{0}", queue="{0} queue")(lambda: None)
"""


@pytest.fixture
def modules(tmp_path) -> list[str]:
    names = ["shop", "billing", "mails"]
    for name in names:
        (tmp_path / f"{name}.py").write_text(MODULE.format(name))
    return names


@pytest.mark.parametrize("how", ["flags", "commas", "variable"])
def test_a_worker_takes_several_apps_and_works_on_the_queues_of_all(
    run, db, modules, how
) -> None:
    for name in modules:
        pgqueue.enqueue(db, f"{name} queue", kind=name)
    args = [word for name in modules for word in ("--app", name)]
    env = {}
    if how == "commas":
        args = ["--app", ",".join(modules)]
    elif how == "variable":
        args, env = [], {"PGQUEUE_APP": ", ".join(modules)}
    done = run("pgqueue.worker", *args, "--burst", **env)
    assert done.returncode == 0, done.stderr
    assert outcomes(db) == {"completed": 3}
    queues = ", ".join(f"{name} queue" for name in modules)
    assert f" works on {queues} (those of its handlers), " in done.stderr.split("\n")[0]


INCLUDES = """
import contextlib
import pgqueue
from shop import app as shop

@contextlib.contextmanager
def around(job):
    print("around", job.kind)
    yield

app = pgqueue.App(middleware=around)
app.include(shop)
"""


def test_a_worker_that_is_given_an_app_and_what_it_includes_runs_it_as_the_app_says(
    run, db, modules, tmp_path
) -> None:
    (tmp_path / "outer.py").write_text(INCLUDES)
    pgqueue.enqueue(db, "shop queue", kind="shop")
    done = run("pgqueue.worker", "--app", "shop,outer", "--burst")
    assert outcomes(db) == {"completed": 1}
    assert done.stdout == "around shop\n"


def test_several_apps_that_share_a_kind_are_refused(run, tmp_path) -> None:
    for name in "one", "two":
        (tmp_path / f"{name}.py").write_text(MODULE.format("same"))
    done = run("pgqueue.worker", "--app", "one,two", "--burst")
    assert done.returncode == 2
    assert "the kind 'same' already has a handler: one.<lambda>" in done.stderr


def test_queues_that_are_given_replace_those_of_the_handlers(run, db, modules) -> None:
    pgqueue.enqueue(db, "shop queue", kind="shop")
    worker = ("pgqueue.worker", "--app", "shop", "--burst", "--queue", "other")
    done = run(*worker)
    assert " works on other, " in done.stderr
    assert one(db, "select count(*) from pgqueue.job") == 1


def test_an_embedded_worker_works_on_the_queues_of_its_handlers(db, dsn) -> None:
    app = pgqueue.App()
    for queue in "a", "b":
        app.job(queue, queue=queue)(lambda: None).enqueue(db)
    work(app, dsn)
    assert outcomes(db) == {"completed": 2}
    with pytest.raises(ValueError, match="needs a queue"):
        work(app, dsn, {})


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"timeout": -1}, ValueError, "a timeout must be positive, not -1"),
        ({"timeout": 0}, ValueError, "a timeout must be positive, not 0"),
        ({"max_attempts": 0}, ValueError, "max_attempts must be at least 1"),
        ({"retry_base": -1}, ValueError, "retry_base"),
        ({"retry_cap": -1}, ValueError, "retry_cap"),
        ({"give_up_on": "ValueError"}, TypeError, "neither an exception nor a tuple"),
        ({"retry_for": [OSError]}, TypeError, "neither an exception nor a tuple"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(options, error, said) -> None:
    with pytest.raises(error, match=said):
        pgqueue.App().job("k", **options)


@pytest.mark.parametrize(
    "name",
    ["lease", "timeout", "poll_interval", "call_timeout", "concurrency", "max_jobs"],
)
def test_an_embedded_worker_refuses_what_the_command_line_does(name) -> None:
    with pytest.raises(ValueError, match=f"{name} must be positive, not -1"):
        pgqueue.Worker(pgqueue.App(), {"q": 1}, **{name: -1})
    for share in {"weight": 0}, {"limit": 0}, {"weight": 1.5}, {"limit": 2.0}:
        with pytest.raises(
            ValueError, match="weight and limit must be whole numbers, at least 1"
        ):
            pgqueue.Share(**share)
    for queues in "emails", ["emails", "reports"]:
        with pytest.raises(TypeError, match="queues takes a weight for each"):
            pgqueue.Worker(pgqueue.App(), queues)


@pytest.mark.parametrize("name", ["concurrency", "batch", "max_jobs"])
def test_an_embedded_worker_refuses_what_is_no_whole_number(name) -> None:
    """As of os.cpu_count() / 2; the server would have no function for it."""
    with pytest.raises(ValueError, match=f"{name} must be a whole number, not 2.0"):
        pgqueue.Worker(pgqueue.App(), {"q": 1}, **{name: 2.0})


def test_what_is_no_handler_is_refused_where_it_is_defined() -> None:
    class Callable:
        def __call__(self) -> None: ...

    app = pgqueue.App()
    for handler in Callable(), Callable, functools.partial(print, 1):
        with pytest.raises(TypeError, match="a handler is a function; put "):
            app.job("k")(handler)
    with pytest.raises(TypeError, match=r"the kind is missing: @app.job\('welcome'\)"):
        app.job(lambda: None)


def test_a_single_exception_is_given_up_on_and_one_retried(db, dsn) -> None:
    app = pgqueue.App()

    def fails(error: str) -> None:
        raise {"value": ValueError, "os": OSError}[error]

    app.job("gives up", give_up_on=ValueError)(fails)
    app.job("retries", retry_for=OSError)(fails)
    for kind in "gives up", "retries":
        for error in "value", "os":
            pgqueue.enqueue(db, "default", {"error": error}, kind=kind)
    pgqueue.Worker(app, dsn=dsn, burst=True).run()
    dead = "select kind, payload ->> 'error' from pgqueue.dead_job order by kind"
    assert db.execute(dead).fetchall() == [("gives up", "value"), ("retries", "value")]
    assert one(db, "select count(*) from pgqueue.job") == 2


def test_a_delay_where_a_moment_or_an_id_belongs_is_refused(db) -> None:
    with pytest.raises(ValueError, match="run_at must have a time zone"):
        pgqueue.enqueue(db, "q", run_at=datetime(2030, 1, 1))
    with pytest.raises(TypeError, match="run_at must be a datetime or a timedelta"):
        pgqueue.enqueue(db, "q", run_at=60)
    with pytest.raises(TypeError, match="after takes the ids of jobs; for a delay"):
        pgqueue.enqueue(db, "q", after=30)
