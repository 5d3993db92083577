"""No statement of the package runs what a stranger has created in the search path.

Here that is all that pg_catalog has: traps of the same names and types, in a schema that
comes before it in the search_path. So a name without a schema leads into one of them,
whatever it is given, unless the statement is run with a search_path of its own.
"""

import ast
import asyncio
import contextlib
import inspect
import os
import re
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import asyncpg
import pgqueue
import psycopg
import psycopg2
import pytest
from conftest import column, database, one
from documents import REPO
from pglast import parse_sql
from pglast.visitors import Visitor
from pgqueue import __main__ as command_line
from pgqueue import app, attempt, client, install, testing, waiting
from pgqueue import database as database_module
from pgqueue.dashboard import actions, job, pages, search
from pgqueue.worker import protocol
from psycopg.conninfo import conninfo_to_dict
from test_metrics import COLLECTOR, DASHBOARD
from test_package import RELEASED
from worker_harness import QUEUE, outcomes, wait_until

pytest_plugins = ["command_line", "worker_harness"]

TRAPS = r"""
create schema strange;
create sequence strange.caught;
create function strange.spring() returns boolean language plpgsql as $$
begin
    perform pg_catalog.nextval('strange.caught'::pg_catalog.regclass);
    raise exception 'caught by a trap';
end
$$;
do $$
declare
    body constant text := 'begin perform strange.spring(); return null; end';
    -- What functions in PL/pgSQL may take.
    usable constant text[] := '{anyelement,anyarray,anynonarray,anycompatible,anycompatiblearray,record}';
    f record;
begin
    set local check_function_bodies = off;
    for f in
        select p.proname, replace(pg_get_function_arguments(p.oid), '"any"', 'anyelement') as arguments
        from pg_proc as p
        left join pg_aggregate as a on a.aggfnoid = p.oid
        where p.pronamespace = 'pg_catalog'::regnamespace and p.proargmodes is null
            and coalesce(a.aggkind, 'n') = 'n' and not exists (
                select from pg_type as t
                where t.oid = any (p.proargtypes) and t.typtype = 'p' and t.typname <> all (usable || array['any'])
            )
    loop
        execute format(
            'create or replace function strange.%I(%s) returns void language plpgsql as %L',
            f.proname, f.arguments, replace(body, ' null', '')
        );
    end loop;
    for f in
        select o.oprname, nullif(o.oprleft, 0)::regtype as l, o.oprright::regtype as r, o.oprresult::regtype as result,
            'operator ' || o.oid as function
        from pg_operator as o
        where o.oprnamespace = 'pg_catalog'::regnamespace and not exists (
            select from pg_type as t
            where t.oid in (o.oprleft, o.oprright, o.oprresult) and t.typtype = 'p' and t.typname <> all (usable)
        )
    loop
        execute format(
            'create function strange.%I(%s) returns %s language plpgsql as %L',
            f.function, concat_ws(', ', f.l, f.r), f.result, body
        );
        execute format(
            'create operator strange.%s (%s rightarg = %s, function = strange.%I)',
            f.oprname, 'leftarg = ' || f.l || ',', f.r, f.function
        );
    end loop;
    for f in
        select t.typname from pg_type as t
        where t.typnamespace = 'pg_catalog'::regnamespace and t.typtype = 'b' and t.typelem = 0
    loop
        execute format('create domain strange.%I as pg_catalog.%1$I check (strange.spring())', f.typname);
    end loop;
    for f in
        select c.relname from pg_class as c
        where c.relnamespace = 'pg_catalog'::regnamespace and c.relkind in ('r', 'v')
    loop
        execute format('create view strange.%I as select strange.spring()', f.relname);
    end loop;
end
$$;
"""
FILL = """
select pgqueue.enqueue('q') from generate_series(1, 9);
select pgqueue.progress(id, token, 1, 3, 'step') from pgqueue.claim('q', 'w', 1);
select pgqueue.progress(id, token, 2) from pgqueue.claim('q', 'w', 1);
select pgqueue.fail(id, token, 'TimeoutError: slow', permanent => true) from pgqueue.claim('q', 'w', 2);
select pgqueue.fail(id, token, 'KeyError: 7') from pgqueue.claim('q', 'w', 1);
select pgqueue.complete(id, token) from pgqueue.claim('q', 'w', 1);
select pgqueue.schedule('s', 'q', every => '1 hour');
select pgqueue.save_step(id, token, 'one', '1'), pgqueue.suspend(id, token, 'e') from pgqueue.claim('q', 'w', 1);
select pgqueue.enqueue('q', batch_id => pgqueue.create_batch('q'), group_key => 'g', unique_key => 'u');
"""
HANDLERS = """
import os
import time
from datetime import UTC, datetime, timedelta

import pgqueue

app = pgqueue.App()
hour = timedelta(hours=1)


@app.job("returns")
def returns():
    return 1


@app.job("in_transaction", transaction=True)
def in_transaction(job: pgqueue.Job):
    job.connection.execute("select")


@app.job("ain_transaction", transaction=True)
async def ain_transaction(job: pgqueue.Job):
    await job.connection.execute("select")


@app.job("fails")
def fails():
    raise ValueError


@app.job("rejects")
def rejects():
    raise pgqueue.Reject("never")


@app.job("snoozes")
def snoozes():
    raise pgqueue.Snooze(hour)


@app.job("snoozes_until")
def snoozes_until():
    raise pgqueue.Snooze(datetime.now(UTC) + hour)


@app.job("extends")
def extends(job: pgqueue.Job):
    assert job.extend()


@app.job("tells")
def tells(job: pgqueue.Job):
    job.progress(1, 3, "step")
    while not os.path.exists(os.environ["RAN"] + ".go"):
        time.sleep(0.01)


@app.job("recurs", every=hour, jitter=timedelta(seconds=1))
def recurs():
    pass
"""


@pytest.fixture(scope="module")
def template(template: str) -> Iterator[str]:
    """Set the traps once, and copy them."""
    with database(template) as dsn:
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute(TRAPS)
        yield conninfo_to_dict(dsn)["dbname"]


@pytest.fixture(autouse=True)
def traps(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lead sessions from now on into the traps, and look whether one was sprung.

    Those of the test itself find them behind pg_catalog.
    """
    if "dsn" not in request.fixturenames:
        yield
        return
    db = request.getfixturevalue("db")
    db.execute(f"alter database {db.info.dbname} set search_path = strange, pg_catalog")
    yield
    is_caught = db.execute("select is_called from strange.caught").fetchone()[0]
    assert not is_caught, "a trap was sprung"


@pytest.mark.parametrize(
    "query",
    [
        "select 1 + 2",
        "select now()",
        "select array_fill('a'::text, array[2::int])",
        "select array['a'] && array['b']",
        "select 'a'::text",
        "select from pg_proc",
    ],
)
def test_the_traps_are_sprung(dsn, db, query) -> None:
    with psycopg.connect(dsn) as conn, pytest.raises(psycopg.Error, match="caught"):
        conn.execute(query)
    db.execute("select setval('strange.caught', 1, false)")


def test_a_role_that_may_only_create_in_public_runs_nothing_as_others(
    db, dsn, role, workers, run
) -> None:
    """Also where pg_catalog comes first: there are calls that nothing in it fits better."""
    db.execute(f"alter database {db.info.dbname} reset search_path")
    db.execute(f"grant create on schema public to {role}")
    db.execute("grant usage on schema strange to public")
    db.execute("grant usage on sequence strange.caught to public")
    with psycopg.connect(dsn, user=role, autocommit=True) as stranger:
        for name, arguments, result in (
            ("times", "int, numeric", "numeric"),
            ("array_fill", "text, smallint[]", "text[]"),
        ):
            stranger.execute(
                f"create function public.{name}({arguments}) returns {result}"
                " language plpgsql as 'begin perform strange.spring(); return null; end'"
            )
        stranger.execute(
            "create operator public.* (leftarg = int, rightarg = numeric, function = times)"
        )
    db.execute(FILL)
    shown = run("pgqueue", "status")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert " ######.............." in shown.stdout
    pgqueue.enqueue(db, QUEUE, kind="noop")
    assert workers.start("--burst").wait(30) == 0
    assert one(db, "select outcome from pgqueue.run where kind = 'noop'") == "completed"


COMMANDS = [
    "status",
    "metrics",
    "top --times 1",
    "health --all",
    "dead",
    "dead --queue q",
    "error LIVE",
    "error DEAD",
    "why LIVE",
    "redrive --dry-run",
    "redrive --queue q --kind q --error-like Time% --limit 1",
    "pause q",
    "resume q --kind q",
    "cancel LIVE --reason tired",
    "discard DEAD",
    "purge q",
    "move-groups --wait 0",
    "install",
    "upgrade",
    "enqueue q {} --priority -3 --run-at 2030-01-01 --unique-key k --unique-for 1d"
    " --group-key g --max-attempts 2 --on-duplicate skip --kind k",
]


@pytest.mark.sample(6)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_is_caught(db, run, command) -> None:
    db.execute(FILL)
    live = one(db, "select id from pgqueue.jobs where state = 'ready' order by id")
    dead = one(db, "select id from pgqueue.dead_job order by id")
    command = command.replace("LIVE", str(live)).replace("DEAD", str(dead))
    done = run("pgqueue", *command.split())
    assert "caught" not in done.stderr
    assert done.returncode in ((0, 1, 2) if "health" in command else (0,)), done.stderr


def test_those_are_all_commands() -> None:
    (commands,) = (
        action.choices
        for action in command_line.make_parser()._actions
        if action.dest == "command"
    )
    tried = {command.split()[0] for command in COMMANDS}
    assert tried == set(commands) - {"dashboard"}


@pytest.mark.parametrize("how", ["extension", "plain"])
def test_an_install_is_not_caught(db, run, how) -> None:
    db.execute("drop extension pgqueue")
    done = run("pgqueue", "install", *(["--plain"] if how == "plain" else []))
    assert done.returncode == 0 and how in done.stdout, done.stderr


@pytest.mark.parametrize("how", ["extension", "plain"])
def test_an_upgrade_is_not_caught(db, run, how) -> None:
    db.execute("drop extension pgqueue")
    if how == "plain":
        frozen = (REPO / f"sql/upgrade/pgqueue--{RELEASED[0]}.sql").read_text()
        db.execute("begin;" + frozen.partition("\n")[2] + "commit;")
    else:
        db.execute(f"create extension pgqueue version '{RELEASED[0]}'")
    done = run("pgqueue", "upgrade")
    assert done.returncode == 0 and "upgraded" in done.stdout, done.stderr


@pytest.mark.parametrize("command", ["install", "install --plain", "upgrade", "psql"])
def test_a_schema_that_a_stranger_has_named_pgqueue_runs_nothing(
    db, run, command
) -> None:
    db.execute("drop extension pgqueue")
    db.execute("create role pgqueue_squatter")
    try:
        db.execute(f"grant create on database {db.info.dbname} to pgqueue_squatter")
        db.execute("set role pgqueue_squatter")
        db.execute("""
            create schema pgqueue;
            create function pgqueue.version() returns text language plpgsql
                as $$ begin raise exception 'caught'; return '0.2.0'; end $$;
            grant usage on schema pgqueue to public;
        """)
        db.execute("reset role")
        if command == "psql":
            with pytest.raises(psycopg.Error) as refused:
                db.execute(install.script())
            db.rollback()
            said = str(refused.value)
        else:
            done = run("pgqueue", *command.split())
            said = done.stdout + done.stderr
        assert "caught" not in said
        if command.startswith("install"):
            assert "installed, by role pgqueue_squatter" in said
    finally:
        db.execute("reset role")
        db.execute("drop owned by pgqueue_squatter cascade")
        db.execute("drop role pgqueue_squatter")


def test_no_page_of_the_dashboard_is_caught(db, dsn) -> None:
    db.execute(FILL)
    jobs = column(
        db, "select id from pgqueue.jobs union select id from pgqueue.dead_job"
    )
    views = (pages.queues, pages.running, pages.workers, pages.dead, pages.schedules)
    asked = [(page, {}) for page in (*views, pages.batches, search.page)]
    asked += [(pages.queue, {"name": "q"}), (pages.dead, {"queue": "q"})]
    asked += [(pages.batch, {"id": str(one(db, "select id from pgqueue.batch"))})]
    asked += [(job.page, {"id": str(id), "payload": "", "log": ""}) for id in jobs]
    asked += [(search.page, {"state": state, "queue": "q"}) for state in search.STATES]
    asked += [(search.page, {"key": "u"}), (search.page, {"payload": "{}"})]
    for page, what in asked:
        assert pages.read(dsn, page, what).context
    done = one(db, "select job_id from pgqueue.run where outcome = 'completed'")
    db.execute("select pgqueue.configure('q', keep_payloads => true)")
    for name in "pause_schedule", "resume_schedule", "run_schedule":
        actions.act(dsn, name, {"name": "s"}, 1, "")
    for name in "pause", "resume":
        actions.act(dsn, name, {"queue": "q"}, 1, "")
    for name in "run_now", "retry", "cancel", "discard":
        of = {"ids": jobs[:2]}
        actions.ask(dsn, name, of, 2, "")
        actions.act(dsn, name, of, 2, "")
    with pytest.raises(psycopg.Error, match=r"payload|not kept"):
        actions.act(dsn, "rerun", {"id": done}, 1, "")
    filters = {"queue": "q", "kind": None, "error_like": None}
    for name in actions.BY_FILTER:
        actions.ask(dsn, name, filters, 1, "")
        actions.act(dsn, name, filters, 1, "")


@pytest.fixture(params=["direct", "pooled"])
def way(request: pytest.FixtureRequest, dsn: str) -> str:
    """Say by which way a worker comes: behind a pooler its sessions keep no settings."""
    if request.param == "direct":
        return dsn
    found: str = request.getfixturevalue("pooler")
    return found


def test_no_worker_is_caught(db, workers, way) -> None:
    (workers.folder / "handlers.py").write_text(HANDLERS)
    kinds = "returns in_transaction ain_transaction fails rejects snoozes snoozes_until"
    for kind in f"{kinds} extends tells".split():
        pgqueue.enqueue(db, QUEUE, kind=kind)
    args = ("--app", "handlers", "--lease", "1", "--poll-interval", "0.5")
    worker = workers.start(*args, dsn=way)
    told = "select done from pgqueue.running where kind = 'tells'"
    wait_until(lambda: one(db, told))
    workers.let_go()
    wait_until(lambda: outcomes(db)["completed"] == 5)
    assert column(db, "select kind from pgqueue.dead_job") == ["rejects"]
    released = "select count(*) from pgqueue.jobs where state = 'scheduled' and kind like 'snoozes%'"
    assert one(db, released) == 2
    wait_until(lambda: one(db, "select count(*) from pgqueue.schedules") == 1)
    assert workers.finish(worker) == 0
    assert "caught" not in workers.log()


def test_the_check_of_a_worker_is_not_caught(run, way) -> None:
    done = run("pgqueue.worker", "--check", "--dsn", way)
    assert done.returncode == 0 and done.stdout.startswith("ok: "), done


async def settled(value: object) -> object:
    return await value if inspect.isawaitable(value) else value


async def use(conn: object, moment: datetime | timedelta) -> int:
    """Call all that a producer can, with all options."""
    both = {"kind": "k", "priority": -3, "max_attempts": 2, "headers": {}}
    more = {"on_duplicate": "skip", "expires_at": timedelta(days=1), "run_at": moment}
    batch = await settled(pgqueue.create_batch(conn, "q", **both))
    first = await settled(pgqueue.enqueue(conn, "q", **both, **more, batch_id=batch))
    keys = {"unique_key": "u", "unique_for": timedelta(days=1), "group_key": "g"}
    waits = {"after": [first], "if_dead": "run"}
    await settled(pgqueue.enqueue(conn, "q", [1], **both, **keys, **waits))
    many = {"unique_keys": ["a", None], "group_keys": [None, "b"], "batch_id": batch}
    await settled(pgqueue.enqueue_many(conn, "q", [1, 2], **both, **more, **many))
    await settled(pgqueue.close_batch(conn, batch))
    assert (await settled(pgqueue.status(conn, first))).state == "scheduled"
    return first


def test_no_producer_is_caught(db, dsn, connect) -> None:
    later = datetime.now(UTC) + timedelta(days=1)
    conn = connect()
    job = asyncio.run(use(conn, later))
    db.execute("select pgqueue.cancel(%s)", (job,))
    assert pgqueue.wait(conn, job, timeout=20).state == "cancelled"
    # It writes a name of its own behind a datetime, ::timestamptz.
    with contextlib.closing(psycopg2.connect(dsn)) as conn2, conn2:
        asyncio.run(use(conn2, timedelta(hours=1)))

    async def use_asyncpg() -> None:
        info = db.info
        address = {"host": info.host, "port": info.port, "user": info.user}
        conn = await asyncpg.connect(**address, database=info.dbname)
        await use(conn, later)
        await conn.close()

    asyncio.run(use_asyncpg())


def test_no_test_of_an_application_is_caught(connect) -> None:
    app = pgqueue.App()
    app.job("plain")(lambda: 1)
    app.job("in transaction", transaction=True)(lambda: 1)
    app.job("fails")(lambda: 1 // 0)
    with connect().transaction() as transaction:
        conn = transaction.connection
        for kind in app.tasks:
            pgqueue.enqueue(conn, "q", kind=kind, run_at=timedelta(days=1))
        assert len(testing.enqueued(conn, "q", "plain")) == 1
        ran = testing.drain(conn, app, "q", raises=False, scheduled=True)
        outcomes = [attempt.outcome for attempt in ran]
        assert outcomes == ["completed", "completed", "retry"]


@pytest.mark.parametrize("script", sorted(p.name for p in REPO.glob("sql/ops/*.sql")))
def test_no_script_for_psql_is_caught(db, script) -> None:
    db.execute(FILL)
    ran = subprocess.run(
        ["psql", "-X", "-v", "queue=q", "-f", REPO / "sql/ops" / script],
        env=os.environ | {"PGDATABASE": db.info.dbname},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, ran.stderr) == (0, "")


# Without a server: the statements that are sent on sessions with somebody else's search_path.

MODULES = (app, attempt, client, database_module, install, protocol, testing, waiting)


def statements() -> Iterator[str]:
    for module in MODULES:
        nodes = list(ast.walk(ast.parse(inspect.getsource(module))))
        parts = {
            id(part) for n in nodes if isinstance(n, ast.JoinedStr) for part in n.values
        }
        texts = [
            n.value for n in nodes if isinstance(n, ast.Constant) and id(n) not in parts
        ]
        yield from (t for t in (*texts, *vars(module).values()) if isinstance(t, str))
    yield from (query["query"] for query in COLLECTOR["queries"])
    _, queues = DASHBOARD["templating"]["list"]
    asked = [target["rawSql"] for p in DASHBOARD["panels"] for target in p["targets"]]
    for query in (queues["query"], *asked):
        yield re.sub(r"\$__\w+\(\)|\$\{\w+:sqlstring\}", "''", query)


class Names(Visitor):
    """Finds what Postgres would look for in the search_path."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def note(self, is_found: bool, node: object) -> None:
        if is_found:
            self.found.append(str(node))

    def visit_FuncCall(self, ancestors, node) -> None:
        self.note(len(node.funcname) == 1, node.funcname)

    def visit_A_Expr(self, ancestors, node) -> None:
        self.note(len(node.name) == 1, node.name)

    def visit_TypeName(self, ancestors, node) -> None:
        self.note(len(node.names) == 1, node.names)

    def visit_RangeVar(self, ancestors, node) -> None:
        self.note(node.schemaname is None, node.relname)

    def visit_SubLink(self, ancestors, node) -> None:
        self.note(node.testexpr is not None, "a comparison with a subquery")

    def visit_CaseExpr(self, ancestors, node) -> None:
        self.note(node.arg is not None, "case with an operand")

    def visit_JoinExpr(self, ancestors, node) -> None:
        self.note(bool(node.isNatural or node.usingClause), "join using")


def names(statement: str) -> list[str]:
    visitor = Names()
    visitor(parse_sql(re.sub(r"%\(\w+\)s|%s", "$1", statement)))
    return visitor.found


@pytest.mark.parametrize(
    "statement",
    [
        "select 1 + 1",
        "select now()",
        "select %s::text",
        "select from job",
        "select 1 where 'a' in ('b')",
        "select 1 where 'a' in (select 'b')",
        "select 1 where 'a' like 'b'",
        "select nullif('a', 'b')",
        "select case 'a' when 'b' then 1 end",
        "select from pgqueue.job join pgqueue.run using (id)",
    ],
)
def test_a_name_without_a_schema_is_found(statement) -> None:
    assert names(statement)


def test_each_statement_names_the_schema_of_all_that_it_uses() -> None:
    found = {s for s in statements() if re.match(r"\s*(select|update)\s(?!\{\})", s)}
    assert len(found) > 30
    assert [(s, unsafe) for s in found if (unsafe := names(s))] == []


def test_none_calls_a_private_function_that_has_the_search_path_of_its_caller(db):
    files = [*(REPO / "python/pgqueue").rglob("*.py"), *(REPO / "sql/ops").iterdir()]
    files += (REPO / "sql/monitoring").iterdir()
    # All that this one executes comes behind the path, as the next test shows.
    files.remove(REPO / "python/pgqueue/move.py")
    called = {n for f in files for n in re.findall(r"pgqueue\.(_\w+)\(", f.read_text())}
    pinned = (
        "select proname from pg_catalog.pg_proc where proconfig::text ~ 'search_path'"
    )
    assert called
    assert called <= set(column(db, pinned))


def test_all_that_move_groups_executes_comes_behind_the_path():
    text = (REPO / "python/pgqueue/move.py").read_text()
    # Each transaction, to the first line that is indented no more than it.
    block = r"^( +)with (\w+)\.transaction\(\):\n((?:\1 +.*\n|\n)+)"
    transactions = re.findall(block, text, re.MULTILINE)
    assert [who for _, who, _ in transactions] == ["conn", "source"]
    for _, who, within in transactions:
        first, *_ = within.splitlines()
        assert first.strip() == f'{who}.execute(f"set local {{database.SEARCH_PATH}}")'
    elsewhere = re.sub(block, "", text, flags=re.MULTILINE)
    assert re.findall(r"(\w+)\.execute\(", elsewhere) == ["database"] * 3


def test_work_and_what_it_asks_are_not_caught(db) -> None:
    """It pins no path, because it commits."""
    db.execute(FILL)
    db.execute("""
        create function public.handle(payload pg_catalog.jsonb) returns void language plpgsql
            set search_path = pg_catalog as $$ begin if payload = '{"n": 1}' then raise 'no'; end if; end $$;
        create function public.answer(job pgqueue.job) returns pg_catalog.jsonb language plpgsql
            as $$ begin return job.payload; end $$;
    """)
    for kind, handler in (
        ("q", "public.handle(pg_catalog.jsonb)"),
        ("k", "public.answer(pgqueue.job)"),
    ):
        db.execute(
            "select pgqueue.configure('q', kind => %s, handler => %s)", (kind, handler)
        )
    db.execute("select pgqueue.enqueue('q', '{\"n\": 1}')")
    db.execute("select pgqueue.enqueue('q', kind => 'k')")
    db.execute("call pgqueue.work('q')")
    db.execute("call pgqueue.work('q', run_for => '100 ms')")
    ended = column(db, "select outcome from pgqueue.run order by job_id desc")
    assert ended[:2] == ["completed", "retry"]
    with pytest.raises(psycopg.Error, match="no handler"):
        db.execute("call pgqueue.work('none')")
    with pytest.raises(psycopg.Error, match="transaction block"), db.transaction():
        db.execute("select pgqueue.version()")
        db.execute("call pgqueue.work('q')")
    db.execute("select pgqueue.enqueue('q')")
    db.execute("set statement_timeout = '20 ms'")
    db.execute("""
        create or replace function public.handle(payload pg_catalog.jsonb) returns void language plpgsql
            set search_path = pg_catalog as $$ begin perform pg_sleep(9); end $$
    """)
    with pytest.raises(psycopg.errors.QueryCanceled):
        db.execute("call pgqueue.work('q')")
