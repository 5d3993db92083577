"""Install, dump and restore, versions, and what the linters say of the built scripts."""

import asyncio
import contextlib
import email
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import psycopg
import psycopg2
import pytest
from conftest import column, database, one
from pgqueue.install import install
from psycopg import errors
from psycopg.rows import dict_row

REPO = Path(__file__).parents[2]
RELEASED = sorted(
    path.stem.removeprefix("pgqueue--") for path in REPO.glob("sql/upgrade/pgqueue--*")
)


def version() -> str:
    found = re.search(
        r"default_version = '(.+)'", (REPO / "pgqueue.control").read_text()
    )
    assert found
    return found[1]


def make(*arguments: str) -> str:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    command = ["make", "-s", *arguments]
    return subprocess.run(
        command, cwd=REPO, env=inherited, check=True, text=True, stdout=subprocess.PIPE
    ).stdout


def script(kind: str = "") -> Path:
    make("all", "plain")
    return REPO / "sql" / f"pgqueue--{version()}{kind}.sql"


def client(*command: str, **options) -> subprocess.CompletedProcess[str]:
    """Run one of Postgres's own programs."""
    return subprocess.run(command, text=True, capture_output=True, **options)


@pytest.fixture
def empty(request):
    """An empty database."""
    name = "pgqueue_empty"
    with psycopg.connect(dbname="postgres", autocommit=True) as admin:
        admin.execute(f"drop database if exists {name} with (force)")
        admin.execute(f"create database {name}")
        yield name
        admin.execute(f"drop database {name} with (force)")


@pytest.fixture
def plain_db():
    """A database into which the plain script has been run."""
    name = "pgqueue_plain"
    with psycopg.connect(dbname="postgres", autocommit=True) as admin:
        admin.execute(f"drop database if exists {name} with (force)")
        admin.execute(f"create database {name}")
        with psycopg.connect(dbname=name, autocommit=True) as conn:
            conn.execute(script(".plain").read_text())
            yield conn
        admin.execute(f"drop database {name} with (force)")


def test_every_place_says_the_same_version(db):
    project = tomllib.loads((REPO / "python/pyproject.toml").read_text())["project"]
    meta = json.loads((REPO / "META.json").read_text())
    assert {
        project["version"],
        meta["version"],
        meta["provides"]["pgqueue"]["version"],
        one(db, "select pgqueue.version()"),
        one(db, "select extversion from pg_extension where extname = 'pgqueue'"),
    } == {version()}
    assert project["name"] == "pgqueue-postgres"


def test_the_extension_has_a_fixed_schema_and_needs_no_superuser():
    control = (REPO / "pgqueue.control").read_text()
    for fact in ("schema = pg_catalog", "relocatable = false", "superuser = false"):
        assert fact in control
    body = script().read_text().lower()
    for macro in (
        "@extschema@",
        "@extowner@",
        "@version@",
        "create schema if not exists",
    ):
        assert macro not in body


def test_make_install_and_uninstall_work_below_destdir(tmp_path):
    pg_config = os.environ.get("PG_CONFIG", "pg_config")
    pgxs = client(pg_config, "--pgxs")
    if pgxs.returncode or not Path(pgxs.stdout.strip()).exists():
        pytest.skip("no PGXS here")
    make("install", f"DESTDIR={tmp_path}")
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    upgrades = {f"pgqueue--{old}--{version()}.sql" for old in RELEASED}
    ops = {path.name for path in (REPO / "sql/ops").iterdir()}
    assert names == {
        "pgqueue.control",
        f"pgqueue--{version()}.sql",
        *upgrades,
        *ops,
    }
    sharedir = client(pg_config, "--sharedir").stdout.strip()
    for name in ops:  # where the README says that they are
        assert (tmp_path / sharedir.lstrip("/") / "pgqueue" / name).exists()
    make("uninstall", f"DESTDIR={tmp_path}")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_script_refuses_to_be_sourced_by_psql(empty):
    before = client("psql", "-XAtc", "select count(*) from pg_proc", empty).stdout
    sourced = client("psql", "-X", "-f", str(script()), empty)
    assert 'Use "CREATE EXTENSION pgqueue"' in sourced.stdout
    assert (
        client("psql", "-XAtc", "select count(*) from pg_proc", empty).stdout == before
    )


def test_a_role_with_create_on_the_database_can_install_use_and_drop_the_extension(
    empty,
):
    with psycopg.connect(dbname=empty, autocommit=True) as conn:
        conn.execute("drop role if exists pgqueue_installer")
        conn.execute("create role pgqueue_installer")
        conn.execute(f"grant create on database {empty} to pgqueue_installer")
        conn.execute("set role pgqueue_installer")
        conn.execute("create extension pgqueue")
        owners = column(
            conn,
            "select distinct relowner::regrole::text from pg_class where relnamespace = 'pgqueue'::regnamespace",
        )
        assert owners == ["pgqueue_installer"]
        conn.execute("select pgqueue.enqueue('q')")
        id, token = conn.execute(
            "select id, token from pgqueue.claim('q', 'w')"
        ).fetchone()
        conn.execute("select pgqueue.complete(%s, %s)", (id, token))
        assert one(conn, "select count(*) from pgqueue.maintain()") == 11
        conn.execute("drop extension pgqueue")
        assert (
            one(conn, "select count(*) from pg_namespace where nspname = 'pgqueue'")
            == 0
        )
        conn.execute("reset role")
        conn.execute(f"revoke all on database {empty} from pgqueue_installer")
        conn.execute("drop role pgqueue_installer")


def test_an_empty_install_is_small_and_takes_few_locks():
    added = []
    # Busy neighbours make the catalogs up to 50 kB larger, never smaller: a session that has fallen behind
    # their invalidations forgets which pages it was filling.
    for _ in range(3):
        with database("template1") as conninfo, psycopg.connect(conninfo) as conn:
            before = one(conn, "select pg_database_size(current_database())")
            conn.execute("create extension pgqueue")
            # Each takes one of the places that max_locks_per_transaction is about, in whatever modes.
            locked = one(
                conn,
                "select count(distinct (locktype, relation, classid, objid)) from pg_locks"
                " where pid = pg_backend_pid()",
            )
            assert 200 < locked <= 500
            after = one(conn, "select pg_database_size(current_database())")
            added.append(after - before)
    assert 1_000_000 < min(added) <= 4 << 20


def test_an_existing_schema_pgqueue_stops_the_install(empty):
    with psycopg.connect(dbname=empty, autocommit=True) as conn:
        conn.execute("create schema pgqueue")
        with pytest.raises(errors.DuplicateSchema):
            conn.execute("create extension pgqueue")
        with pytest.raises(errors.Error):
            conn.execute("create extension pgqueue schema public")


CATALOG = """
select 'function', p.oid::regprocedure::text, p.prosrc, p.proconfig::text, p.prosecdef::text,
    p.proacl::text, obj_description(p.oid, 'pg_proc')
from pg_proc as p where p.pronamespace = 'pgqueue'::regnamespace
union all
select c.relkind::text, c.relname, a.attname, a.attnum::text, format_type(a.atttypid, a.atttypmod),
    coalesce(c.relacl, acldefault((case c.relkind when 'S' then 's' else 'r' end)::"char", c.relowner))::text
        || coalesce(c.reloptions::text, ''),
    coalesce(col_description(c.oid, a.attnum), obj_description(c.oid, 'pg_class'))
from pg_class as c join pg_attribute as a on a.attrelid = c.oid
where c.relnamespace = 'pgqueue'::regnamespace and a.attnum > 0
union all
select 'constraint', k.conrelid::regclass::text, k.conname, pg_get_constraintdef(k.oid), '', '', ''
from pg_constraint as k where k.connamespace = 'pgqueue'::regnamespace
order by 1, 2, 3, 4
"""


@pytest.mark.parametrize("encoding", ["EUC_JP", "LATIN1", "SQL_ASCII"])
@pytest.mark.parametrize("plain", [True, False])
def test_a_database_of_any_encoding_takes_it(encoding, plain):
    # A byte outside ASCII in the script would be read as one of the database's encoding.
    name = "pgqueue_encoded"
    with psycopg.connect(dbname="postgres", autocommit=True) as admin:
        admin.execute(f"drop database if exists {name} with (force)")
        admin.execute(
            f"create database {name} encoding '{encoding}' locale 'C' template template0"
        )
        with psycopg.connect(dbname=name, client_encoding="utf8") as conn:
            install(conn, plain)
            first = one(conn, "select pgqueue.enqueue('q', '{}')")
            assert one(conn, "select id from pgqueue.claim('q', 'w')") == first
        admin.execute(f"drop database {name} with (force)")


def run_by_psql(plain: Path, dbname: str) -> str:
    done = client("psql", "-Xq", "-v", "ON_ERROR_STOP=1", "-f", str(plain), dbname)
    assert (done.returncode != 0) == bool(done.stderr)
    return done.stdout + done.stderr


def run_by_a_driver(plain: Path, dbname: str, autocommit: bool = True) -> str:
    with psycopg.connect(dbname=dbname, autocommit=autocommit) as conn:
        try:
            conn.execute(plain.read_text())
        except psycopg.Error as error:
            conn.rollback()
            return str(error)
    return ""


def run_in_a_transaction(plain: Path, dbname: str) -> str:
    return run_by_a_driver(plain, dbname, autocommit=False)


@pytest.mark.parametrize("run", [run_by_psql, run_by_a_driver, run_in_a_transaction])
def test_the_plain_file_makes_the_same_objects_and_runs_only_once(db, empty, run):
    plain = script(".plain")
    assert run(plain, empty) == ""
    with psycopg.connect(dbname=empty, autocommit=True) as conn:
        assert conn.execute(CATALOG).fetchall() == db.execute(CATALOG).fetchall()
        id = one(conn, "select pgqueue.enqueue('q')")
        assert "already exists" in run(plain, empty)
        assert column(conn, "select id from pgqueue.claim('q', 'w')") == [id]


def test_the_plain_file_makes_the_same_objects_whatever_is_set(db, empty):
    """Also if plpgsql checks all it can, as its documentation recommends for development."""
    said = []
    with psycopg.connect(dbname=empty, autocommit=True) as conn:
        conn.add_notice_handler(lambda notice: said.append(notice.message_primary))
        for setting in (
            "plpgsql.extra_warnings = 'all'", "plpgsql.extra_errors = 'all'", "extra_float_digits = -15",
            "standard_conforming_strings = off", "escape_string_warning = off", "transform_null_equals = on",
            "array_nulls = off", "intervalstyle = 'sql_standard'", "datestyle = 'SQL, DMY'", "timezone = 'Pacific/Apia'",
            "search_path = ''", "default_transaction_isolation = 'serializable'", "bytea_output = 'escape'",
        ):  # fmt: skip
            conn.execute(f"set {setting}")
        conn.execute(script(".plain").read_text())
        assert said == []
        conn.execute("reset all")
        for query in CATALOG, "table pgqueue.checks", "table pgqueue.settings":
            assert conn.execute(query).fetchall() == db.execute(query).fetchall()


def test_nothing_in_the_plain_file_is_for_psql_alone():
    script(".plain")
    plain = list((REPO / "sql").glob(f"*--{version()}.plain.sql"))
    assert len(plain) == 1 + len(RELEASED)
    for path in plain:
        lines = path.read_text().splitlines()
        assert not [line for line in lines if line.lstrip().startswith("\\")]
        assert path.read_text().isascii()


def test_the_plain_install_is_removed_with_its_schema(plain_db):
    plain_db.execute("create table orders (id int)")
    plain_db.execute(
        "create trigger t after insert on orders for each row"
        " execute function pgqueue.enqueue_row('queue=q')"
    )
    with pytest.raises(psycopg.errors.UndefinedObject):
        plain_db.execute("drop extension pgqueue")
    plain_db.execute("drop schema pgqueue cascade")
    assert one(plain_db, "select to_regnamespace('pgqueue') is null")
    plain_db.execute("insert into orders values (1)")
    plain_db.execute(script(".plain").read_text())
    assert one(plain_db, "select pgqueue.enqueue('q')") == 1


# Dump and restore

TABLES = {
    "job": "id",
    "dead_job": "id",
    "queue": "name",
    "run": "job_id, attempt",
    "recent_key": "queue, unique_key",
    "dependency": "job_id, waiter_id",
    "step": "job_id, place",
    "wait": "job_id",
    "event": "name",
    "loose_end": "id",
    "batch": "id",
    "tally": "batch_id, part",
    "schedule": "name",
    "access": "role, kind, queue",
}
POPULATE = """
select pgqueue.configure('mails', lease => '3 minutes', keep_runs => 14);
select pgqueue.pause('halted');
select pgqueue.enqueue('mails', jsonb_build_object('n', n), unique_key => 'k' || n, group_key => 'g',
    headers => '{"a": 1}', priority => n % 3) from generate_series(1, 40) as n;
select pgqueue.enqueue('mails', run_at => now() + interval '1 day', expires_at => now() + interval '2 days'),
    pgqueue.enqueue('halted');
select pgqueue.fail(c.id, c.token, 'boom', '1 hour') from pgqueue.claim('mails', 'w', 5) as c;
select pgqueue.fail(c.id, c.token, 'boom', permanent => true) from pgqueue.claim('mails', 'w', 5) as c;
select pgqueue.complete(c.id, c.token, '{"ok": 1}') from pgqueue.claim('mails', 'w', 5) as c;
select count(*) from pgqueue.claim('mails', 'w', 5);
update pgqueue.job set lease_expires_at = now() - interval '1 hour'
    where id = (select max(id) from pgqueue.job where token is not null);
select pgqueue.cancel((select min(id) from pgqueue.job where token is not null), 'why');
select pgqueue.cancel(pgqueue.enqueue('once', unique_key => 'k', unique_for => '1 hour'));
select pgqueue.schedule('nightly', 'mails', '0 3 * * *', timezone => 'Europe/Berlin');
select pgqueue.grant_access(current_user, 'producer', 'mails');
select pgqueue.create_batch('done');
select pgqueue.enqueue('work', batch_id => b.id) from pgqueue.batch as b;
select pgqueue.enqueue('work', batch_id => b.id, after => array[j.id])
from pgqueue.batch as b, pgqueue.job as j where j.queue = 'work';
select pgqueue.close_batch(id) from pgqueue.batch;
select pgqueue.enqueue_many('days', array_fill('{}'::jsonb, array[3]));
select pgqueue.save_step(id, token, 'charge', '{"paid": 7}'), pgqueue.suspend(id, token, 'shipped', after => array[(select min(id) from pgqueue.job where queue = 'halted')])
from pgqueue.claim('days', 'w', 2);
select pgqueue.suspend(id, token, 'paid') from pgqueue.claim('days', 'w');
select pgqueue.emit('paid', '{"by": "card"}');
"""


def contents(conn: psycopg.Connection) -> dict[str, list]:
    return {
        table: conn.execute(
            f"select t::text from pgqueue.{table} as t order by {key}"
        ).fetchall()
        for table, key in TABLES.items()
    }


def dump_plain(source: str, target: str, folder: Path, *options: str) -> list:
    file = folder / "dump.sql"
    return [
        client("pg_dump", "-f", str(file), *options, source),
        client("psql", "-Xq", "-v", "ON_ERROR_STOP=1", "-f", str(file), target),
    ]


def dump_custom(source: str, target: str, folder: Path) -> list:
    file = folder / "dump"
    return [
        client("pg_dump", "-Fc", "-f", str(file), source),
        client("pg_restore", "-j2", "--exit-on-error", "-d", target, str(file)),
    ]


def dump_queue_only(source: str, target: str, folder: Path) -> list:
    return dump_plain(source, target, folder, "-e", "pgqueue", "-n", "pgqueue")


def dump_schema_only(source: str, target: str, folder: Path) -> list:
    return dump_plain(source, target, folder, "-n", "pgqueue")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("source", "dump"),
    [
        ("db", dump_plain),
        ("db", dump_custom),
        ("db", dump_queue_only),
        ("plain_db", dump_plain),
        ("plain_db", dump_custom),
        ("plain_db", dump_schema_only),
    ],
)
def test_a_restored_queue_has_every_row_and_reuses_no_id_or_token(
    request, empty, tmp_path, source, dump
):
    db = request.getfixturevalue(source)
    if version_of("pg_dump") < db.info.server_version // 10000:
        pytest.skip("pg_dump is older than the server")
    db.execute(POPULATE)
    before = contents(db)
    assert all(before.values()), "there is something in every table"
    last_id, last_token = (
        one(
            db,
            "select max(id) from (select id from pgqueue.job union select id from pgqueue.dead_job) as j",
        ),
        one(db, "select last_value from pgqueue.token_seq"),
    )
    for step in dump(db.info.dbname, empty, tmp_path):
        assert (step.returncode, step.stderr) == (0, ""), step.stderr
    with psycopg.connect(dbname=empty, autocommit=True) as restored:
        assert contents(restored) == before
        assert one(restored, "select pgqueue.enqueue('new')") > last_id
        id, token = restored.execute(
            "select id, token from pgqueue.claim('new', 'w')"
        ).fetchone()
        assert token > last_token
        restored.execute("select pgqueue.complete(%s, %s)", (id, token))
        assert column(restored, "select pgqueue.claim('halted', 'w')") == []
        once = "select pgqueue.enqueue('once', unique_key => 'k', unique_for => '1 s')"
        assert one(restored, once) == one(db, "select job_id from pgqueue.recent_key")
        assert (
            one(restored, "select count(*) from pgqueue.claim('mails', 'w', 100)") == 21
        )
        # What was still to be looked at, and what happens now.
        restored.execute("select pgqueue.maintain()")
        days = "select id from pgqueue.claim('days', 'w', 100)"
        assert len(column(restored, days)) == 1
        assert one(restored, "select pgqueue.emit('shipped')") is True
        (woken, _) = column(restored, days)
        steps = "select value from pgqueue.steps(%s)"
        assert column(restored, steps, woken) == [{"paid": 7}]
        for _ in range(2):
            restored.execute(
                "select pgqueue.complete(id, token) from pgqueue.claim('work', 'w', 9)"
            )
        counts = "select payload #> '{batch,completed}' from pgqueue.claim('done', 'w')"
        assert one(restored, counts) == 2
        restored.execute("select pgqueue.maintain()")
        assert one(restored, "select count(*) from pgqueue.loose_end") == 0
        assert restored.execute(CATALOG).fetchall() == db.execute(CATALOG).fetchall()


MAY_CALL = """
select p.oid::regprocedure::text from pg_proc as p
where p.pronamespace = 'pgqueue'::regnamespace and has_function_privilege(%s, p.oid, 'execute')
order by 1
"""


@pytest.fixture
def reader():
    """A role that is dropped after the databases in which it has rights."""
    name = "pgqueue_reader"
    with psycopg.connect(dbname="postgres", autocommit=True) as admin:
        admin.execute(f"drop role if exists {name}")
        admin.execute(f"create role {name}")
        yield name
        admin.execute(f"drop role {name}")


def test_a_plain_install_restored_without_rights_lets_nobody_do_more(
    reader, plain_db, empty, tmp_path
):
    """As by pg_restore --no-acl, which many providers ask for: functions belong to PUBLIC then."""
    grant = f"select pgqueue.grant_access('{reader}', 'reader')"
    plain_db.execute(grant)
    for step in dump_plain(plain_db.info.dbname, empty, tmp_path, "--no-acl"):
        assert (step.returncode, step.stderr) == (0, ""), step.stderr
    with psycopg.connect(dbname=empty, autocommit=True) as restored:
        restored.execute(grant)
        allowed = column(restored, MAY_CALL, reader)
        assert allowed == column(plain_db, MAY_CALL, reader)


SET_UP = """
select pgqueue.enqueue('days', '{}'), pgqueue.enqueue('urgent', priority => 5);
select pgqueue.save_step(id, token, 'charge', '1'), pgqueue.suspend(id, token, 'paid') from pgqueue.claim('days', 'w');
select pgqueue.pause('halted'), pgqueue.configure('capped', max_running => 1);
select pgqueue.enqueue_many(q, array_fill('{}'::jsonb, array[2])) from unnest(array['halted', 'capped']) as q
"""


@pytest.mark.parametrize("has_rows", [False, True])
def test_a_plain_install_restored_without_the_values_of_sequences_keeps_to_what_is_set(
    plain_db, empty, tmp_path, has_rows
):
    """As it is made for a copy without the data, or for logical replication."""
    if has_rows:
        plain_db.execute(SET_UP)
    left_out = "--exclude-table-data=pgqueue.*_seq" if has_rows else "--schema-only"
    for step in dump_plain(plain_db.info.dbname, empty, tmp_path, left_out):
        assert (step.returncode, step.stderr) == (0, ""), step.stderr
    with psycopg.connect(dbname=empty, autocommit=True) as restored:
        restored.execute("select pgqueue.maintain()" if has_rows else SET_UP)
        assert one(restored, "select pgqueue.emit('paid')") is True
        claim = "select queue from pgqueue.claim(%s, 'w', 9)"
        assert column(restored, claim, "halted") == []
        for queue in "capped", "urgent", "days":
            assert column(restored, claim, queue) == [queue]


def copy_of_database(source: str, target: str, folder: Path) -> list:
    return [client("dropdb", target), client("createdb", "-T", source, target)]


def dump_data_only(source: str, target: str, folder: Path) -> list:
    create = ("psql", "-Xq", "-c", "create extension pgqueue", target)
    return [client(*create), *dump_plain(source, target, folder, "--data-only")]


@pytest.mark.sample(4)
@pytest.mark.parametrize("is_used", [True, False])
@pytest.mark.parametrize(
    ("source", "dump"),
    [
        ("db", dump_plain),
        ("db", dump_custom),
        ("db", dump_data_only),
        ("db", copy_of_database),
        ("plain_db", dump_plain),
        ("plain_db", dump_custom),
    ],
)
def test_a_restored_shard_goes_on_with_its_own_numbers(
    request, empty, tmp_path, source, dump, is_used
):
    db = request.getfixturevalue(source)
    if version_of("pg_dump") < db.info.server_version // 10000:
        pytest.skip("pg_dump is older than the server")
    db.execute("select pgqueue.shard(3, 8)")
    if is_used:
        db.execute("select pgqueue.enqueue('q'), pgqueue.enqueue('q')")
        db.execute("select pgqueue.claim('q', 'w')")
    name = db.info.dbname
    db.close()
    for step in dump(name, empty, tmp_path):
        assert (step.returncode, step.stderr) == (0, ""), step.stderr
    with psycopg.connect(dbname=empty, autocommit=True) as restored:
        first = 19 if is_used else 3
        assert one(restored, "select pgqueue.enqueue('new')") == first
        assert one(restored, "select pgqueue.enqueue('new')") == first + 8
        token = one(restored, "select token from pgqueue.claim('new', 'w')")
        assert token == (11 if is_used else 3)
        fine = "select status from pgqueue.health() as h where h.check = 'sequences'"
        assert one(restored, fine) == "ok"


def test_a_subscription_makes_a_shard_of_its_database(db, empty):
    """Sequences are not replicated: what they have handed out is set when it takes over."""
    db.execute("select pgqueue.shard(3, 8)")
    with psycopg.connect(dbname=empty, autocommit=True) as replica:
        replica.execute("create extension pgqueue")
        replica.execute("set session_replication_role = replica")
        replica.execute("insert into pgqueue.shard values (3, 8)")
        assert one(replica, "select pgqueue.enqueue('q')") == 3
        assert one(replica, "select pgqueue.enqueue('q')") == 11


def version_of(program: str) -> int:
    found = re.search(r" (\d+)", client(program, "--version").stdout)
    assert found
    return int(found[1])


# The Python package


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A copy of the sources of the package, because a build leaves files behind."""
    folder = tmp_path_factory.mktemp("clone")
    make("all", "plain")
    for name in ("Makefile", "pgqueue.control", "LICENSE", "META.json"):
        shutil.copy(REPO / name, folder)
    unwanted = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    for name in ("sql", "python"):
        shutil.copytree(REPO / name, folder / name, symlinks=True, ignore=unwanted)
    return folder


def pip(*arguments: str) -> None:
    command = (sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments)
    done = client(*command)
    assert done.returncode == 0, done.stdout + done.stderr


def wheel_of(source: Path, folder: Path) -> Path:
    options = ("--no-deps", "--no-build-isolation", "--no-index")
    pip("wheel", "-q", *options, "-w", str(folder), str(source))
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(clone, tmp_path_factory) -> Path:
    return wheel_of(clone / "python", tmp_path_factory.mktemp("wheel"))


def test_nothing_optional_is_imported_by_who_does_not_use_it() -> None:
    code = """
import sys, pgqueue.__main__, pgqueue.worker.__main__
app = pgqueue.App()
app.job("plain")(lambda path: None)
optional = "pydantic opentelemetry django starlette".split()
optional += [f"pgqueue.{name}" for name in ("dashboard", "django", "testing", "tracing")]
print(*[name for name in optional if name in sys.modules])
"""
    assert client(sys.executable, "-c", code, check=True).stdout == "\n"


def test_a_wheel_holds_every_module_the_sql_and_the_license(wheel):
    source = REPO / "python"
    modules = {str(p.relative_to(source)) for p in source.glob("pgqueue/**/*.py")}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert archive.read("pgqueue/pgqueue.sql") == script(".plain").read_bytes()
        for old in RELEASED:
            plain = REPO / f"sql/pgqueue--{old}--{version()}.plain.sql"
            assert archive.read(f"pgqueue/upgrades/{old}.sql") == plain.read_bytes()
        for path in (REPO / "sql/ops").iterdir():
            assert archive.read(f"pgqueue/ops/{path.name}") == path.read_bytes()
        (license,) = (n for n in names if n.endswith("/LICENSE"))
        assert archive.read(license) == (REPO / "LICENSE").read_bytes()
    assert {n for n in names if n.endswith(".py")} == modules
    assert "pgqueue/py.typed" in names
    parts = source.glob("pgqueue/dashboard/[st]*/*")
    assert {str(part.relative_to(source)) for part in parts} <= names


def test_the_wheel_has_the_metadata_that_the_package_index_shows(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("/METADATA"))
        told = email.message_from_bytes(archive.read(name))
    assert told["Name"] == "pgqueue-postgres"
    assert told["Version"] == version()
    assert told["License-Expression"] == "PostgreSQL"
    assert told["Requires-Python"] == ">=3.11"
    assert told["Description-Content-Type"] == "text/markdown"
    page = told.get_payload(decode=True).decode()
    assert page == (REPO / "python/README.md").read_text()
    # On the package index a relative link leads nowhere.
    assert re.findall(r"\]\((?!https?:)(.*?)\)", page) == []
    needed = [n for n in told.get_all("Requires-Dist") if "extra" not in n]
    assert needed == ["psycopg>=3.2"]
    found = " ".join(told.get_all("Classifier"))
    for word in ("Django", "FastAPI", "Typed", "3.11"):
        assert word in found


def test_a_wheel_built_from_a_source_distribution_has_the_sql(clone, tmp_path):
    code = "from setuptools.build_meta import build_sdist as b; print(b({!r}))"
    command = (sys.executable, "-c", code.format(str(tmp_path)))
    built = client(*command, cwd=clone / "python")
    assert built.returncode == 0, built.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path)
    (source,) = (path for path in tmp_path.iterdir() if path.is_dir())
    with zipfile.ZipFile(wheel_of(source, tmp_path)) as found:
        assert found.read("pgqueue/pgqueue.sql") == script(".plain").read_bytes()
        assert "pgqueue/ops/top.sql" in found.namelist()
        upgrades = {f"pgqueue/upgrades/{old}.sql" for old in RELEASED}
        assert upgrades <= set(found.namelist())


def test_the_installed_command_installs_the_sql(wheel, empty, tmp_path):
    pip("install", "-q", "--no-deps", "--no-index", "-t", str(tmp_path), str(wheel))
    command = str(tmp_path / "bin" / "pgqueue")
    env = {k: v for k, v in os.environ.items() if "PGQUEUE" not in k}
    env |= {"PGDATABASE": empty, "PYTHONPATH": str(tmp_path)}
    for said in ("ran the plain script", "already installed"):
        done = client(command, "install", "--plain", env=env, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert said in done.stdout
    added = client(command, "enqueue", "emails", env=env)
    assert added.stdout == "1\n"


def test_install_rolls_back_with_its_transaction_and_works_with_any_row_factory(empty):
    with psycopg.connect(dbname=empty, row_factory=dict_row) as conn:
        for plain, said in ((True, "ran the plain script"), (False, "created the ext")):
            did = install(conn, plain)
            assert said in did
            assert "has no extension" not in did
            assert "already installed" in install(conn, plain)
            # A migration goes on as before.
            path = conn.execute("show search_path").fetchone()
            assert path == {"search_path": '"$user", public'}
            conn.rollback()
        found = conn.execute("select to_regnamespace('pgqueue') as there").fetchone()
        assert found == {"there": None}


def test_install_takes_connections_on_psycopg_3_and_names_others(empty):
    for wrong in psycopg2.connect(dbname=empty), sqlite3.connect(":memory:"):
        kind = type(wrong).__module__
        with contextlib.closing(wrong), pytest.raises(TypeError, match=rf": {kind}\."):
            install(wrong)

    async def install_in_async():
        async with await psycopg.AsyncConnection.connect(dbname=empty) as conn:
            assert "ran the plain script" in install(conn, True)

    asyncio.run(install_in_async())
    with psycopg.connect(dbname=empty) as conn:
        assert "already installed" in install(conn)


# Linters


def test_pgspot_finds_nothing_in_the_built_scripts():
    found = make("pgspot", f"VENV={Path(sys.executable).parent}")
    scripts = 2 * (1 + len(RELEASED))
    assert found.count("Errors: 0 Warnings: 0 Unknown: 0") == scripts, found


def test_plpgsql_check_finds_nothing_in_any_function(db):
    try:
        db.execute("create extension plpgsql_check")
    except errors.Error as missing:
        pytest.skip(f"plpgsql_check: {missing.diag.message_primary}")
    db.execute("create table changed (id int)")
    found = db.execute(
        "select p.proname, c.* from pg_proc as p join pg_language as l on l.oid = p.prolang "
        "left join (values ('enqueue_row', 'changed'::regclass, 'old_rows'::name, 'new_rows'::name), "
        "('_step_sequences', 'pgqueue.shard', null, null), "
        "('_grant_again', 'pgqueue.access', null, null)) as t (name, id, old, new) on p.proname = t.name, "
        "plpgsql_check_function(p.oid, coalesce(t.id, 0), security_warnings => true, "
        "extra_warnings => true, oldtable => t.old, newtable => t.new) as c "
        "where p.pronamespace = 'pgqueue'::regnamespace and l.lanname = 'plpgsql' "
        # Module check: _refuse() is called in an assignment, and raises or does nothing.
        "and c not like '%never read variable \"refused\"' "
        # Module trigger: an assignment is cheaper than PERFORM.
        "and c not like '%never read variable \"enqueued\"' "
        # Which is no fault where a function has other outputs beside it.
        "and c not like '%composite OUT variable%is not single argument'"
        # The call that _hold() has written, by format and %I.
        "and not (p.proname = 'work' and c ~ 'held[.]call|:EXECUTE:|injection|Hint: Use quote_ident|--     ')"
        # The name of a column of health(), and never a variable.
        "and not (p.proname = 'health' and c like '%reserved keyword%')"
    ).fetchall()
    assert not found
