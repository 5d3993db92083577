"""Upgrades: what comes of them is like a fresh install, and nobody who uses it is disturbed."""

import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import documents
import psycopg
import pytest
from catalog import catalog
from conftest import column, one
from pgqueue import install
from pgqueue.install import number
from psycopg import errors
from test_package import (
    POPULATE,
    RELEASED,
    REPO,
    client,
    contents,
    make,
    version,
    version_of,
)
from worker_harness import wait_until, workers_on

pytest_plugins = ["worker_harness"]
Make = Callable[..., psycopg.Connection]


@pytest.fixture
def make_database() -> Iterator[Make]:
    """Make databases with a version of pgqueue, by the extension or by the script."""
    names: list[str] = []
    make("all", "plain")

    def database(old: str | None = None, plain: bool = False) -> psycopg.Connection:
        names.append(f"pgqueue_upgrade_{len(names)}")
        admin.execute(f"drop database if exists {names[-1]} with (force)")
        admin.execute(f"create database {names[-1]}")
        opened.append(psycopg.connect(dbname=names[-1], autocommit=True))
        conn = opened[-1]
        if old is not None and plain:
            frozen = REPO / f"sql/upgrade/pgqueue--{old}.sql"
            conn.execute("begin;" + frozen.read_text().partition("\n")[2] + "commit;")
        elif old is not None:
            conn.execute(f"create extension pgqueue version '{old}'")
        return conn

    opened: list[psycopg.Connection] = []
    with psycopg.connect(dbname="postgres", autocommit=True) as admin:
        yield database
        for conn in opened:
            conn.close()
        for name in names:
            admin.execute(f"drop database {name} with (force)")


def plain_script(old: str = "", new: str = "") -> str:
    steps = "--".join(filter(None, ("pgqueue", old, new or version())))
    return (REPO / f"sql/{steps}.plain.sql").read_text()


def upgrade(conn: psycopg.Connection, old: str, plain: bool = False) -> None:
    conn.execute(plain_script(old) if plain else "alter extension pgqueue update")


@pytest.fixture
def blocked_in() -> Iterator[Callable[[psycopg.Connection], None]]:
    """Wait until a session waits for a lock, wherever."""
    with psycopg.connect(dbname="postgres", autocommit=True) as watcher:

        def wait(conn: psycopg.Connection) -> None:
            waits = f"select cardinality(pg_blocking_pids({conn.info.backend_pid})) > 0"
            wait_until(lambda: one(watcher, waits))

        yield wait


BY = pytest.mark.parametrize("plain", [False, True], ids=["extension", "plain"])
NEW_FOR_WORKERS = "pgqueue.suspend(bigint, bigint, text, timestamptz, bigint[], text)"


@BY
@pytest.mark.parametrize("old", RELEASED)
def test_what_was_upgraded_is_like_what_is_freshly_installed(make_database, old, plain):
    """If this fails: what differs has to be in the newest file of sql/upgrade/, see tests/README.md."""
    fresh, upgraded = make_database(), make_database(old, plain)
    fresh.execute(plain_script() if plain else "create extension pgqueue")
    upgrade(upgraded, old, plain)
    compare(upgraded, fresh)


def compare(upgraded: psycopg.Connection, fresh: psycopg.Connection) -> None:
    """Fail with a line for each thing that differs."""
    found, wanted = catalog(upgraded), catalog(fresh)
    assert len(wanted) > 1500
    lines = [f"the upgrade lacks: {line}" for line in sorted(wanted - found)]
    lines += [f"only the upgrade has: {line}" for line in sorted(found - wanted)]
    if lines:
        pytest.fail("\n".join(lines), pytrace=False)


# A next version with all kinds of changes: built in a copy of the sources, as OLD and then as NEW.

OLD, NEW = "98.0.0", "99.0.0"
OLD_ROUTINES = """
create or replace function pgqueue._obsolete(a int) returns int language sql immutable return a;

create or replace view pgqueue.obsolete as select pgqueue._obsolete(1) as a;

create or replace function pgqueue._changed(a int) returns int language sql immutable as 'select a';

create or replace function pgqueue.reshaped() returns table (a int) language sql immutable as 'select 1';
"""
NEW_ROUTINES = """
create or replace function pgqueue._changed(a int, b int default 2) returns int language sql immutable as 'select a';

create or replace function pgqueue.reshaped() returns table (a int, b int) language sql immutable as 'select 1, 2';
comment on function pgqueue.reshaped() is 'Has got a second column.';

create or replace function pgqueue.invented() returns int language sql immutable as 'select 1';

create or replace view pgqueue.invention as select t.a from pgqueue.thing as t;
"""
NEW_TABLE = """
create table pgqueue.thing (a int not null, constraint thing_pkey primary key (a));
comment on table pgqueue.thing is 'New.';
"""
NEW_INDEX = "create index dead_job_new_idx on pgqueue.dead_job (new);"
DELTA = f"""-- Things.
{NEW_TABLE}
alter table pgqueue.dead_job add new int;
{NEW_INDEX}
drop function pgqueue.reshaped();
"""
# Where, and what there becomes what.
GRANTED = "\n    ) as g (kinds, is_function, objects)"
SETTINGS = "\n) as s (name, type, fallback, range, not_for, meaning)"
WINDOWS = "-- The windows of unique_for."
AS_OLD = {
    "sql/roles/access.sql": [
        ("-- An upgrade updates", f"{OLD_ROUTINES}\n-- An upgrade updates"),
        (GRANTED, f",\n('{{operator,reader}}', true, '{{reshaped}}'){GRANTED}"),
    ]
}
AS_NEW = {
    "sql/roles/access.sql": [
        (OLD_ROUTINES, NEW_ROUTINES),
        (GRANTED, f",\n('{{worker}}', true, '{{invented}}'){GRANTED}"),
    ],
    "sql/tables/schema.sql": [
        (
            "create type pgqueue._ended as",
            f"{NEW_TABLE}\ncreate type pgqueue._ended as",
        ),
        ("    constraint dead_job_pkey", "    new int,\n    constraint dead_job_pkey"),
        (WINDOWS, f"{NEW_INDEX}\n{WINDOWS}"),
        (
            SETTINGS,
            ",\n('keep_things', 'interval', '30 days', '{1 day,1 year}', '{a kind}', 'How long a thing is kept')"
            + SETTINGS,
        ),
    ],
}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> Path:
    """Build both, copy what the extension needs to the server, and return the folder."""
    copy = tmp_path_factory.mktemp("next")
    shutil.copytree(REPO / "sql", copy / "sql")
    for path in copy.glob("sql/**/*--*.sql"):
        path.unlink()
    shutil.copy(REPO / "Makefile", copy)

    def build(number: str, edits: dict[str, list[tuple[str, str]]]) -> None:
        for name, changes in edits.items():
            text = (copy / name).read_text()
            for old, new in changes:
                assert text.count(old) == 1, old
                text = text.replace(old, new)
            (copy / name).write_text(text)
        control = (REPO / "pgqueue.control").read_text()
        text = control.replace(f"'{version()}'", f"'{number}'")
        (copy / "pgqueue.control").write_text(text)
        make("-C", str(copy), "all", "plain")

    build(OLD, AS_OLD)
    make("-C", str(copy), "freeze")
    (copy / f"sql/upgrade/{OLD}--{NEW}.sql").write_text(DELTA)
    build(NEW, AS_NEW)
    with psycopg.connect(dbname="postgres") as conn:
        share = one(conn, "select setting from pg_config where name = 'SHAREDIR'")
    for path in copy.glob("sql/pgqueue--*.sql"):
        if ".plain." not in path.name:
            shutil.copy(path, Path(share) / "extension")
    return copy / "sql"


def create(conn: psycopg.Connection, scripts: Path, number: str, plain: bool) -> None:
    script = scripts / f"pgqueue--{number}.plain.sql"
    how = f"create extension pgqueue version '{number}'"
    conn.execute(script.read_text() if plain else how)


def change(conn: psycopg.Connection, scripts: Path, plain: bool) -> None:
    script = scripts / f"pgqueue--{OLD}--{NEW}.plain.sql"
    how = f"alter extension pgqueue update to '{NEW}'"
    conn.execute(script.read_text() if plain else how)


@BY
def test_any_change_of_a_version_comes_with_its_upgrade(make_database, scripts, plain):
    fresh, upgraded = make_database(), make_database()
    create(fresh, scripts, NEW, plain)
    create(upgraded, scripts, OLD, plain)
    # With rows in the tables whose columns follow from the settings.
    upgraded.execute("select pgqueue.configure('q', lease => '1 minute')")
    change(upgraded, scripts, plain)
    assert any("keep_things" in line for line in catalog(fresh))
    compare(upgraded, fresh)
    (kept,) = column(upgraded, "select keep_things::text from pgqueue.queue_in_force")
    assert kept == "30 days"


# Rights

RIGHTS = """
    select format('%s may %s %s', a.grantee::regrole, lower(a.privilege_type), o.name)
    from (
        select p.oid::regproc::text, p.proacl from pg_proc as p where p.pronamespace = 'pgqueue'::regnamespace
        union all
        select c.oid::regclass::text, c.relacl from pg_class as c where c.relnamespace = 'pgqueue'::regnamespace
        union all
        select n.nspname, n.nspacl from pg_namespace as n where n.nspname = 'pgqueue'
    ) as o (name, acl), aclexplode(o.acl) as a
    where a.grantee <> (select r.oid from pg_roles as r where r.rolname = current_user)
"""


@pytest.fixture
def roles() -> Iterator[list[str]]:
    names = [
        f"pgqueue_{name}" for name in ("worker", "reader", "revoked", "hand", "name")
    ]
    with psycopg.connect(dbname="postgres", autocommit=True) as admin:
        for name in names:
            admin.execute(f"drop role if exists {name}")
            admin.execute(f"create role {name}")
    yield names
    with psycopg.connect(dbname="postgres", autocommit=True) as admin:
        for name in names:
            admin.execute(f"drop role {name}")


def dump(
    conn: psycopg.Connection, to: psycopg.Connection, folder: Path, new: str
) -> None:
    """Dump a database and restore it, on a server where that version is the newest."""
    if version_of("pg_dump") < conn.info.server_version // 10000:
        pytest.skip("pg_dump is older than the server")
    file = folder / "dump.sql"
    dumped = client("pg_dump", "-f", str(file), conn.info.dbname)
    assert (dumped.returncode, dumped.stderr) == (0, "")
    create = "CREATE EXTENSION IF NOT EXISTS pgqueue WITH SCHEMA pg_catalog"
    text = file.read_text().replace(create, f"{create} VERSION '{new}'")
    file.write_text(text)
    done = client(
        "psql", "-Xq", "-v", "ON_ERROR_STOP=1", "-f", str(file), to.info.dbname
    )
    assert (done.returncode, done.stderr) == (0, "")


@BY
def test_roles_keep_their_rights_and_get_what_is_new_also_after_a_restore(
    roles, make_database, scripts, plain, tmp_path
):
    worker, reader, revoked, hand, name = roles
    conn = make_database()
    create(conn, scripts, OLD, plain)
    conn.execute(f"select pgqueue.grant_access('{worker}', 'worker', 'q')")
    conn.execute(f"select pgqueue.grant_access('{worker}', 'worker', 'p')")
    conn.execute(f"select pgqueue.grant_access('{reader}', 'reader')")
    conn.execute(f"select pgqueue.grant_access('{revoked}', 'operator')")
    conn.execute(f"revoke all on function pgqueue.purge from {revoked}")
    conn.execute(f"grant usage on schema pgqueue to {hand}")
    conn.execute(f"grant execute on function pgqueue.why to {hand}")
    conn.execute("grant select on pgqueue.queues to public")
    # That of a role that had this name.
    conn.execute(f"insert into pgqueue.access values ('{name}', 'operator', '')")
    before = set(column(conn, RIGHTS))
    said: list[str] = []
    conn.add_notice_handler(lambda notice: said.append(str(notice.message_primary)))
    change(conn, scripts, plain)
    assert said == [
        f"role {revoked} lacks some rights of the kind operator, and does not get those that are new"
    ]
    after = set(column(conn, RIGHTS))
    assert after - before == {f"{worker} may execute pgqueue.invented"}
    assert before - after == {f"{revoked} may execute pgqueue.reshaped"}
    assert f"{reader} may execute pgqueue.reshaped" in after
    assert "- may select pgqueue.queues" in after
    restored = make_database()
    dump(conn, restored, tmp_path, NEW)
    assert set(column(restored, RIGHTS)) == after
    for each in conn, restored:
        each.execute(f"drop owned by {', '.join(roles)}")


@BY
def test_whoever_upgrades_it_all_belongs_to_its_owner(
    roles, make_database, scripts, plain
):
    owner = roles[0]
    fresh, upgraded = make_database(), make_database()
    for conn, of in (fresh, NEW), (upgraded, OLD):
        conn.execute(f"grant create on database {conn.info.dbname} to {owner}")
        conn.execute(f"set role {owner}")
        create(conn, scripts, of, plain)
        conn.execute("reset role")
    change(upgraded, scripts, plain)
    assert one(upgraded, "select current_user <> %s", [owner])
    compare(upgraded, fresh)
    for conn in fresh, upgraded:
        conn.execute(f"drop owned by {owner} cascade")


def test_a_dump_of_an_older_version_is_restored_by_a_newer(
    make_database, scripts, tmp_path
):
    conn, restored = make_database(), make_database()
    create(conn, scripts, OLD, plain=False)
    for statement in POPULATE.strip().split(";\n"):
        conn.execute(statement)
    before = contents(conn)
    dump(conn, restored, tmp_path, NEW)
    assert one(restored, "select pgqueue.version()") == NEW
    # A new column of a table is the last.
    found = {
        name: [row[:-2] for (row,) in rows] for name, rows in contents(restored).items()
    }
    assert found.keys() == before.keys()
    for name, rows in before.items():
        assert len(rows) == len(found[name])
        for (row,), restored_row in zip(rows, found[name], strict=True):
            assert restored_row.startswith(row[:-2])
    kept = column(restored, "select keep_things::text from pgqueue.queue_in_force")
    assert kept and set(kept) == {"30 days"}
    assert column(restored, "select id from pgqueue.claim('mails', 'w', 100)")


@pytest.mark.parametrize("old", RELEASED)
def test_a_dump_of_a_released_version_is_restored_into_that_and_then_upgraded(
    make_database, tmp_path, old
):
    """As docs/upgrading.md says: a newer version might not take all rows."""
    conn, restored = make_database(old), make_database(old)
    conn.execute("""
        select pgqueue.enqueue('q', expires_at => now() + interval '1 day', batch_id => pgqueue.create_batch('b'));
        select pgqueue.fail(id, token, 'e', permanent => true) from pgqueue.claim('q', 'w');
        select pgqueue.enqueue('q', after => array[pgqueue.enqueue('q', priority => 1)]);
    """)
    dump(conn, restored, tmp_path, old)
    upgrade(restored, old)
    assert one(restored, "select pgqueue.version()") == version()
    assert column(restored, "select priority from pgqueue.claim('q', 'w', 9)") == [1]
    assert one(restored, "select count(*) from pgqueue.dead_job") == 1
    assert one(restored, "select count(*) from pgqueue.job") == 2


@BY
@pytest.mark.parametrize("old", RELEASED)
def test_what_follows_an_upgrade_in_its_transaction_is_done_as_before(
    roles, make_database, old, plain
):
    owner, member, worker = roles[:3]
    conn = make_database()
    conn.execute(f"grant create on database {conn.info.dbname} to {owner}")
    conn.execute(f"grant {owner} to {member}")
    with conn.transaction():
        conn.execute(f"set local role {owner}")
        if plain:
            frozen = REPO / f"sql/upgrade/pgqueue--{old}.sql"
            conn.execute(frozen.read_text().partition("\n")[2])
        else:
            conn.execute(f"create extension pgqueue version '{old}'")
        conn.execute(f"select pgqueue.grant_access('{worker}', 'worker')")
    conn.execute(f"create table own (n int); grant all on own to {member}")
    if plain:
        conn.execute(f"set role {member}")  # else only the owner of the extension may
    conn.execute("set search_path = public, pg_catalog")
    with conn.transaction():
        before = conn.execute("select current_user, current_schemas(true)").fetchall()
        assert "upgraded" in install.upgrade(conn)
        conn.execute("insert into own values (1)")
        after = conn.execute("select current_user, current_schemas(true)").fetchall()
        assert before == after
    conn.execute("reset role")
    assert one(
        conn,
        f"select has_function_privilege('{worker}', '{NEW_FOR_WORKERS}', 'execute')",
    )
    conn.execute(f"drop owned by {', '.join(roles)} cascade")


# What users have made of it

VIEW = "create view public.mine as select q.queue, q.ready from pgqueue.queues as q"
TRIGGER = (
    "create trigger t after insert on orders for each row"
    " execute function pgqueue.enqueue_row('queue=q')"
)


@BY
def test_what_users_have_made_stays_or_is_named_and_nothing_has_changed(
    make_database, scripts, plain
):
    conn = make_database()
    create(conn, scripts, OLD, plain)
    conn.execute("create table orders (id int)")
    conn.execute(VIEW)
    conn.execute(TRIGGER)
    conn.execute("create function pgqueue.mine() returns int language sql return 1")
    for theirs, ours in [
        ("view public.theirs", "function pgqueue.reshaped()"),
        ("view public.theirs", "view pgqueue.obsolete"),
    ]:
        before = catalog(conn)
        name = ours.split()[1]
        conn.execute(f"create {theirs} as select * from {name}")
        with pytest.raises(errors.DependentObjectsStillExist) as refused:
            change(conn, scripts, plain)
        diag = refused.value.diag
        what = diag.message_detail.replace("view theirs", theirs)
        assert ours in f"{diag.message_primary} {what}" and theirs in what
        conn.rollback()
        assert catalog(conn) == before
        conn.execute(f"drop {theirs}")
    change(conn, scripts, plain)
    conn.execute("insert into orders values (1)")
    assert conn.execute("select * from mine").fetchall() == [("q", 1)]
    assert one(conn, "select pgqueue.mine()") == 1


# Locks

LOCKED = """
    select c.relname, trim(upper(regexp_replace(replace(l.mode, 'Lock', ''), '([A-Z])', ' \\1', 'g')))
    from pg_locks as l join pg_class as c on c.oid = l.relation
    where l.pid = pg_backend_pid() and c.oid = any (%s::oid[])
        and l.mode not in ('AccessShareLock', 'RowShareLock', 'RowExclusiveLock')
"""


def test_the_page_on_upgrades_says_what_each_locks(make_database):
    """Views are not listed: no worker reads them."""
    page = (REPO / "docs/upgrading.md").read_text()
    rows = re.findall(r"^\| (any|to [\d.]+) \| (`.+?`) \|", page, re.M)
    tables = (
        "select oid from pg_class"
        " where relnamespace = 'pgqueue'::regnamespace and relkind in ('r', 'p')"
    )
    for old in RELEASED:
        conn = make_database(old)
        there = column(conn, tables)
        with conn.transaction(force_rollback=True):
            upgrade(conn, old)
            found = set(conn.execute(LOCKED, (there,)))
        assert found == {
            pair
            for new, said in rows
            if new == "any" or number(new.split()[1]) > number(old)
            for pair in re.findall(r"`(\w+)`: `([A-Z ]+)`", said)
        }


@BY
@pytest.mark.parametrize(
    "busy",
    ["insert into pgqueue.access values ('a', 'worker', '')", "table pgqueue.queues"],
)
def test_with_a_lock_timeout_it_fails_cleanly_and_can_be_repeated(
    make_database, scripts, plain, busy
):
    conn = make_database()
    create(conn, scripts, OLD, plain)
    other = psycopg.connect(dbname=conn.info.dbname)
    before = catalog(conn)
    conn.execute("set lock_timeout = '200ms'")
    if busy.startswith("insert"):
        other.execute("lock table pgqueue.dead_job in row exclusive mode")
    other.execute(busy)
    with pytest.raises(errors.LockNotAvailable):
        change(conn, scripts, plain)
    conn.rollback()
    assert catalog(conn) == before
    assert one(conn, "select pgqueue.version()") == OLD
    other.close()
    change(conn, scripts, plain)
    assert one(conn, "select pgqueue.version()") == NEW


def test_who_reads_a_view_is_waited_for_without_holding_up_a_worker(
    make_database, scripts, blocked_in
):
    conn = make_database()
    create(conn, scripts, OLD, plain=False)
    with (
        psycopg.connect(dbname=conn.info.dbname) as reader,
        psycopg.connect(dbname=conn.info.dbname, autocommit=True) as worker,
        ThreadPoolExecutor(1) as pool,
    ):
        reader.execute("table pgqueue.queues")
        upgraded = pool.submit(change, conn, scripts, False)
        blocked_in(conn)
        worker.execute("set lock_timeout = '5s'")
        # Through each end of a job.
        for end in "complete(id, token)", "fail(id, token, 'e', permanent => true)":
            worker.execute("select pgqueue.enqueue('q')")
            ended = f"select pgqueue.{end} from pgqueue.claim('q', 'w')"
            assert worker.execute(ended).rowcount == 1
        assert not upgraded.done()
        reader.rollback()
        upgraded.result(30)


def test_the_examples_of_the_page_on_upgrades_upgrade(make_database):
    blocks = documents.blocks((REPO / "docs/upgrading.md").read_text())
    assert [block.language for block in blocks] == ["sql", "sh"]
    by_sql, by_shell = make_database(RELEASED[0]), make_database(RELEASED[0], True)
    env = os.environ | {"PGDATABASE": by_shell.info.dbname}
    shell = ("sh", "-c", blocks[1].text)
    for conn in by_sql, by_shell:
        with psycopg.connect(dbname=conn.info.dbname) as reader:
            reader.execute("select from pgqueue.jobs")
            if conn is by_sql:
                with pytest.raises(errors.LockNotAvailable):
                    conn.execute(blocks[0].text)
                conn.rollback()
            else:
                assert "due to lock timeout" in client(*shell, cwd=REPO, env=env).stderr
    by_sql.execute(blocks[0].text)
    assert one(by_sql, "show lock_timeout") == "0"  # a pooler may lend the session
    done = client(*shell, cwd=REPO, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for conn in by_sql, by_shell:
        assert one(conn, "select pgqueue.version()") == version()


# With jobs and workers

FILL = """
create function many(n int) returns jsonb[] language sql return array_fill('{}'::jsonb, array[n]);
create function fail(queue text, delay interval) returns bigint language sql
begin atomic
    select count(*)
    from (
        select array_agg(c.id) as ids, array_agg(c.token) as tokens, array_agg('fail'::text) as outcomes,
            array_agg(delay) as delays
        from pgqueue.claim(queue, 'w', 10000) as c
    ) as h, pgqueue.finish(h.ids, h.tokens, h.outcomes, null, h.delays);
end;
select pgqueue.configure('limited', group_limit => 2);
select count(*) from pgqueue.enqueue_many('many', many(80000), kind => 'noop');
select count(*) from pgqueue.enqueue_many('limited', many(5000),
    group_keys => array(select 'g' || n % 50 from generate_series(1, 5000) as n));
select count(*) from pgqueue.enqueue_many('later', many(5000), run_at => now() + interval '1 hour');
select count(*) from pgqueue.enqueue_many('dead', many(3000), max_attempts => 1);
select fail('dead', null);
select count(*) from pgqueue.enqueue_many('retried', many(2000));
select fail('retried', '1 hour');
select count(*) from pgqueue.enqueue_many('held', many(2000));
select count(*) from pgqueue.claim('held', 'gone', 1000, '1 hour');
select count(*) from pgqueue.claim('held', 'gone', 1000, '1 microsecond');
select count(pgqueue.enqueue('after', after => array[j.id], kind => 'noop'))
    from pgqueue.job as j where j.queue = 'limited' and j.id % 5 = 0;
select pgqueue.create_batch('batched', kind => 'noop');
select count(pgqueue.enqueue('many', kind => 'noop', batch_id => b.id)) from pgqueue.batch as b, generate_series(1, 500);
select pgqueue.close_batch(id) from pgqueue.batch;
select count(*) from pgqueue.enqueue_many('paused', many(1000));
select pgqueue.pause('paused');
"""


@pytest.fixture
def old_package(tmp_path) -> dict[str, str]:
    """The environment of a process that runs the package that came with the last release."""
    script = f"sql/upgrade/pgqueue--{RELEASED[-1]}.sql"
    log = client("git", "log", "-1", "--format=%H", "--", script, cwd=REPO)
    if log.returncode or not log.stdout:
        pytest.skip("no clone: only git has what was released")
    archive = str(tmp_path / "old.tar")
    of = (log.stdout.strip(), "python/pgqueue")
    done = client("git", "archive", "-o", archive, *of, cwd=REPO)
    assert done.returncode == 0, done.stderr
    shutil.unpack_archive(archive, tmp_path)
    return {"PYTHONPATH": f"{REPO / 'tests/python'}{os.pathsep}{tmp_path / 'python'}"}


class Client(threading.Thread):
    """Calls in one session until told to stop."""

    def __init__(self, conn: psycopg.Connection, query: str) -> None:
        super().__init__()
        self.dbname, self.query = conn.info.dbname, query
        self.ids: list[int] = []
        self.over = threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with psycopg.connect(dbname=self.dbname, autocommit=True) as conn:
                while not self.over.is_set():
                    found = column(conn, self.query)
                    self.ids += found
                    time.sleep(0.001 if found else 0.01)
        except psycopg.Error as error:
            self.error = error


MANY = (
    "select pgqueue.complete_many(h.ids, h.tokens) from ("
    "select array_agg(c.id) as ids, array_agg(c.token) as tokens"
    " from pgqueue.claim('many', 'one', 300) as c) as h where h.ids is not null"
)
FROM = (
    "select f.job_id from (select array_agg(c.id) as ids, array_agg(c.token) as tokens,"
    " array_agg('complete'::text) as outcomes"
    " from pgqueue.claim_from('{many,limited,after,batched}', 'two', 100) as c) as h,"
    " pgqueue.finish(h.ids, h.tokens, h.outcomes) as f"
    " where h.ids is not null and f.status = 'completed'"
)
PRODUCE = "select pgqueue.enqueue('many', kind => 'noop')"
WORKED = "('many', 'limited', 'after', 'batched')"
OTHERS = f"""
    select j.queue, j.state, count(*) from pgqueue.jobs as j where j.queue not in {WORKED} group by 1, 2
    union all
    select d.queue, 'dead', count(*) from pgqueue.dead_job as d group by 1
"""


def test_workers_of_both_versions_go_on_while_a_hundred_thousand_jobs_of_every_state_are_upgraded(
    make_database, old_package
):
    conn = make_database(RELEASED[-1])
    for statement in re.split(r";\n(?! |end)", FILL.strip()):
        conn.execute(statement)
    jobs = "select count(*) from pgqueue.job"
    assert one(conn, jobs) + one(conn, "select count(*) from pgqueue.dead_job") > 99_000
    others = set(conn.execute(OTHERS))
    assert {state for _, state, _ in others} == {
        "ready",
        "scheduled",
        "running",
        "expired",
        "dead",
    }
    to_do = set(column(conn, f"select id from pgqueue.job where queue in {WORKED}"))
    clients = [Client(conn, query) for query in (MANY, FROM, PRODUCE)]
    ran = "select count(*) from pgqueue.run where queue in ('many', 'after')"
    args = ("--queue", "many,after", "--log-level", "INFO")
    with workers_on(f"dbname={conn.info.dbname}") as workers:
        workers.start(*args)
        workers.start(*args, env=old_package)
        for client in clients:
            client.start()
        wait_until(lambda: all(len(client.ids) > 100 for client in clients))
        wait_until(lambda: one(conn, f"{ran} and worker not in ('one', 'two')"))
        began = time.monotonic()
        upgrade(conn, RELEASED[-1])
        assert time.monotonic() - began < 5
        seen = [len(client.ids) for client in clients]
        workers.start(*args)
        workers.start(*args, env=old_package)
        wait_until(
            lambda: all(
                c.error or len(c.ids) > n for c, n in zip(clients, seen, strict=True)
            )
        )
        assert [c.error for c in clients] == [None] * 3
        clients[2].over.set()
        clients[2].join(30)
        to_do |= set(clients[2].ids)
        wait_until(lambda: not one(conn, f"{jobs} where queue in {WORKED}"))
        # The batch has enqueued it.
        unfinished = "select count(*) from pgqueue.batch where callback_id is null"
        wait_until(lambda: not one(conn, unfinished))
        wait_until(lambda: not one(conn, f"{jobs} where queue in {WORKED}"))
        for client in clients:
            client.over.set()
            client.join(30)
            assert client.error is None
        # One that has not begun yet would be ended by its signal.
        wait_until(lambda: workers.log().count(" works on ") == 4)
        assert [workers.finish(process) for process in workers.processes] == [0] * 4
        # The new one that came first.
        told = re.findall(r" (?:WARNING|ERROR) .*", workers.log())
        assert all(" WARNING update pgqueue: the database has" in line for line in told)
    batched = column(conn, "select callback_id from pgqueue.batch")
    ended = column(conn, "select job_id from pgqueue.run where outcome = 'completed'")
    assert len(ended) == len(set(ended))
    assert set(ended) == to_do | set(batched)
    found = set(conn.execute(OTHERS))
    recovered = {("held", "expired", 1000), ("held", "ready", 1000)}
    assert found - recovered == others - recovered


# The package and the SQL of different versions


def as_version(conn: psycopg.Connection, number: str) -> None:
    conn.execute(
        "create or replace function pgqueue.version() returns text language sql stable"
        f" set search_path = pg_catalog, pg_temp as $$ select '{number}' $$"
    )


def test_a_worker_goes_on_with_older_sql_says_so_once_and_needs_no_restart(
    make_database,
):
    conn = make_database(RELEASED[0])
    with workers_on(f"dbname={conn.info.dbname}") as workers:
        done = workers.start("--check")
        assert done.wait(30) == 0
        assert f"ok: pgqueue {RELEASED[0]}, notified; the database has" in workers.log()
        worker = workers.start("--log-level", "DEBUG")
        conn.execute("select pgqueue.enqueue('work', kind => 'noop')")
        ran = "select count(*) from pgqueue.run"
        wait_until(lambda: one(conn, ran) == 1)
        # Its session has ended, and it connects again.
        ended = "select pg_terminate_backend(pid) from pg_stat_activity where application_name ~ '^pgqueue '"
        conn.execute(ended)
        conn.execute("select pgqueue.enqueue('work', kind => 'noop')")
        wait_until(lambda: one(conn, ran) == 2)
        upgrade(conn, RELEASED[0])
        conn.execute("select pgqueue.enqueue('work', kind => 'noop')")
        wait_until(lambda: one(conn, ran) == 3)
        assert worker.poll() is None
        assert workers.log().count("WARNING update pgqueue: ") == 1


@pytest.mark.parametrize(
    ("sql", "code", "said"),
    [
        ("0.1.0", 3, "ERROR * has failed: install or update pgqueue: the database has"),
        ("99.0.0", 0, ""),
    ],
)
def test_a_worker_refuses_sql_that_is_too_old_and_takes_newer(
    dsn, db, workers, sql, code, said
):
    as_version(db, sql)
    assert workers.start("--burst").wait(30) == code
    assert workers.start("--check").wait(30) == code
    log = workers.log()
    assert re.search(said.replace("*", ".*"), log)
    assert ("update" in log) == (code > 0)


def test_a_function_that_an_upgrade_replaces_ends_no_worker_unless_it_stays_away(
    db, workers
):
    """As a call sees it that was running meanwhile."""
    worker = workers.start("--poll-interval", "0.1", "--no-listen")
    db.execute("select pgqueue.enqueue('work', kind => 'noop')")
    ran = "select count(*) from pgqueue.run"
    wait_until(lambda: one(db, ran) == 1)
    db.execute("alter function pgqueue.rest rename to rest_away")
    wait_until(lambda: "waits for the server: function pgqueue.rest" in workers.log())
    db.execute("alter function pgqueue.rest_away rename to rest")
    db.execute("select pgqueue.enqueue('work', kind => 'noop')")
    wait_until(lambda: one(db, ran) == 2)
    assert worker.poll() is None
    db.execute("alter function pgqueue.rest rename to rest_away")
    assert worker.wait(30) == 3


# Scripts and commands that do not fit


def test_a_script_says_which_one_fits_and_changes_nothing(make_database):
    old, new = RELEASED[-1], version()
    empty, plain, extension = (
        make_database(),
        make_database(old, True),
        make_database(old),
    )
    install, update = plain_script(), plain_script(old)
    newer = make_database(old, True)
    as_version(newer, "99.0.0")
    older = make_database(old, True)
    as_version(older, "0.1.9")
    back = "There is no way back to an older version but a backup."
    for conn, script, said in [
        (
            empty,
            update,
            f"pgqueue is not in this database; To install it, run pgqueue--{new}.plain.sql.",
        ),
        (
            plain,
            install,
            f"pgqueue {old} already exists in this database; To upgrade it, run pgqueue--{old}--{new}.plain.sql.",
        ),
        (newer, install, f"pgqueue 99.0.0 already exists in this database; {back}"),
        (newer, update, f"pgqueue 99.0.0 already exists in this database; {back}"),
        (
            older,
            update,
            f"pgqueue 0.1.9 already exists in this database; To upgrade it, run pgqueue--0.1.9--{new}.plain.sql.",
        ),
        (
            extension,
            install,
            "pgqueue already exists in this database, as an extension; To upgrade it: alter extension pgqueue update",
        ),
        (
            extension,
            update,
            "pgqueue already exists in this database, as an extension; To upgrade it: alter extension pgqueue update",
        ),
    ]:
        before = catalog(conn)
        with pytest.raises(errors.ObjectNotInPrerequisiteState) as refused:
            conn.execute(script)
        diag = refused.value.diag
        assert f"{diag.message_primary}; {diag.message_hint}" == said
        conn.rollback()
        assert catalog(conn) == before
    plain.execute(update)
    with pytest.raises(errors.ObjectNotInPrerequisiteState) as refused:
        plain.execute(update)
    assert refused.value.diag.message_hint == "There is nothing to do."


def test_an_extension_is_not_taken_back_to_an_older_version(make_database):
    conn = make_database(version())
    with pytest.raises(errors.InvalidParameterValue, match="has no update path from"):
        conn.execute(f"alter extension pgqueue update to '{RELEASED[-1]}'")


def command(conn: psycopg.Connection, *args: str) -> tuple[int, str]:
    dsn = ("--dsn", f"dbname={conn.info.dbname}")
    done = client(sys.executable, "-m", "pgqueue", *dsn, *args)
    return done.returncode, done.stdout + done.stderr


@BY
def test_the_commands_upgrade_what_is_older_and_refuse_to_go_back(make_database, plain):
    old, new = RELEASED[-1], version()
    conn = make_database(old, plain)
    ready = f"pgqueue {old} is already installed: python -m pgqueue upgrade makes it {new}\n"
    assert command(conn, "install") == (0, ready)
    assert command(conn, "upgrade") == (0, f"upgraded pgqueue from {old} to {new}\n")
    assert one(conn, "select pgqueue.version()") == new
    done = f"pgqueue {new} is already installed\n"
    assert command(conn, "upgrade") == command(conn, "install") == (0, done)
    as_version(conn, "99.0.0")
    back = (
        f"pgqueue 99.0.0 is already installed, newer than {new}: there is no way back\n"
    )
    assert command(conn, "install") == (0, back)
    assert command(conn, "upgrade") == (1, f"pgqueue: {back}")


def test_the_command_tries_again_while_others_hold_locks(make_database):
    conn = make_database(RELEASED[-1])
    with (
        psycopg.connect(dbname=conn.info.dbname) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        other.execute("lock table pgqueue.dead_job in row exclusive mode")
        upgraded = pool.submit(command, conn, "upgrade")
        waits = (
            "select xact_start from pg_stat_activity"
            " where wait_event_type = 'Lock' and datname = current_database()"
        )
        tries: set[datetime] = set()
        wait_until(lambda: tries.update(column(conn, waits)) or len(tries) > 1)
        other.rollback()
        assert upgraded.result(30)[0] == 0
    assert one(conn, "select pgqueue.version()") == version()


def test_the_commands_say_what_to_do_about_sql_that_is_older(make_database):
    conn = make_database(RELEASED[-1])
    assert command(conn, "enqueue", "q") == (0, "1\n")
    conn.execute("alter function pgqueue.health rename to health_away")
    code, said = command(conn, "health")
    assert code == 3
    assert (
        f"the database has pgqueue {RELEASED[-1]}, this package is of {version()}"
        in said
    )
    empty = make_database()
    code, said = command(empty, "upgrade")
    assert (code, said) == (
        1,
        "pgqueue: pgqueue is not installed: python -m pgqueue install\n",
    )
