"""pg_upgrade takes pgqueue along to a newer Postgres, where it goes on and can be upgraded.

Needs two servers with their programs: `make .venv/pg-upgrade` gets them.
"""

import os
import shutil
import subprocess
from pathlib import Path

import psycopg
import pytest
from cluster import Cluster, _server_user
from conftest import column, one
from test_package import RELEASED, REPO
from test_upgrade import compare, plain_script
from worker_harness import where

OLDER, NEWER = (REPO / f".venv/pg-upgrade/{major}/bin" for major in (15, 18))
if not (NEWER / "pg_upgrade").exists():
    pytest.skip(
        f"PG_UPGRADE IS NOT TESTED: no {NEWER}/pg_upgrade (make .venv/pg-upgrade)",
        allow_module_level=True,
    )


# By what the oldest version has.
FILL = """
select pgqueue.configure('mails', lease => '3 minutes', group_limit => 2);
select pgqueue.enqueue('mails', to_jsonb(n), group_key => 'g' || n % 3, priority => n % 2, unique_key => 'k' || n)
    from generate_series(1, 40) as n;
select pgqueue.fail(c.id, c.token, 'boom', permanent => true) from pgqueue.claim('mails', 'w', 2) as c;
select pgqueue.complete(c.id, c.token, '{"ok": 1}') from pgqueue.claim('mails', 'w', 2) as c;
select pgqueue.claim('mails', 'w', 1);
select pgqueue.enqueue('later', after => array[j.id], run_at => now() + interval '1 day') from pgqueue.job as j limit 1;
select pgqueue.schedule('nightly', 'mails', '0 3 * * *');
select pgqueue.close_batch(pgqueue.create_batch('done'));
select pgqueue.grant_access('worker', 'worker')
"""


# Of this version: the ids and tokens of a shard.
SHARDS = {
    "shard": lambda: "create extension pgqueue",
    "plain_shard": plain_script,
}
USE_SHARD = "select pgqueue.enqueue('q') from generate_series(1, 2)"
CLAIM_ON_SHARD = "select (pgqueue.claim('q', 'w')).token from generate_series(1, 2)"


def contents(conn: psycopg.Connection) -> dict[str, list]:
    tables = (
        "select c.relname from pg_class as c where c.relnamespace = 'pgqueue'::regnamespace"
        " and c.relkind in ('r', 'p') and not c.relispartition"
    )
    return {
        table: conn.execute(
            f"select t::text from pgqueue.{table} as t order by 1"
        ).fetchall()
        for table in column(conn, tables)
    }


class Server(Cluster):
    """A cluster with all programs beside the server's, for pg_upgrade runs them."""

    def create(self) -> None:
        super().create()
        for program in self.bindir.iterdir():
            if not (there := self.programs / program.name).exists():
                shutil.copy(program, there)

    @property
    def programs(self) -> Path:
        return self._mirror(self.bindir)

    def run(self, program: str, *args: str) -> str:
        user = _server_user()
        done = subprocess.run(
            [str(self.programs / program), *args],
            cwd=self.home,
            env={"PATH": os.defpath},
            user=user.pw_uid if user else None,
            group=user.pw_gid if user else None,
            extra_groups=() if user else None,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        logs = self.data.glob("pg_upgrade_output.d/**/*_dump_*.log")
        tails = [log.read_text()[-2000:] for log in logs]
        assert done.returncode == 0, "\n".join([done.stdout, *tails])
        return done.stdout


def test_pg_upgrade_keeps_every_row_and_the_extension_can_then_be_upgraded():
    older, newer = Server(OLDER, fast=True), Server(NEWER, fast=True)
    try:
        older.create()
        older.start()
        with psycopg.connect(where(older), autocommit=True) as admin:
            admin.execute("create database plain")
            admin.execute(f"create extension pgqueue version '{RELEASED[0]}'")
            admin.execute("create role worker")
            for statement in FILL.split(";\n"):
                admin.execute(statement)
            assert one(admin, "select count(*) from pgqueue.run") > 3
            before = contents(admin)
            last = one(admin, "select last_value from pgqueue.token_seq")
        with psycopg.connect(where(older), dbname="plain", autocommit=True) as conn:
            frozen = REPO / f"sql/upgrade/pgqueue--{RELEASED[0]}.sql"
            conn.execute("begin;" + frozen.read_text().partition("\n")[2] + "commit;")
            conn.execute("select pgqueue.enqueue('q')")
        with psycopg.connect(where(older), autocommit=True) as admin:
            for install in SHARDS:
                admin.execute(f"create database {install}")
        for install, script in SHARDS.items():
            with psycopg.connect(
                where(older), dbname=install, autocommit=True
            ) as shard:
                shard.execute(script())
                shard.execute("select pgqueue.shard(3, 8)")
                assert column(shard, USE_SHARD) == [3, 11]
                assert column(shard, CLAIM_ON_SHARD) == [3, 11]
        older.stop()
        newer.create()
        version = newer.run("postgres", "--version")
        if "--no-data-checksums" in newer.run("initdb", "--help"):
            newer.run("pg_checksums", "--disable", "--pgdata", str(newer.data))
        newer.run(
            *("pg_upgrade", "--username", "postgres", "--socketdir", str(newer.home)),
            *("--old-bindir", str(older.programs), "--new-bindir", str(newer.programs)),
            *("--old-datadir", str(older.data), "--new-datadir", str(newer.data)),
        )
        newer.start()
        with psycopg.connect(where(newer), autocommit=True) as conn:
            assert f"{conn.info.server_version // 10000}." in version
            assert contents(conn) == before
            for dbname in "fresh", "plain_fresh":
                conn.execute(f"create database {dbname}")
            with psycopg.connect(
                where(newer), dbname="fresh", autocommit=True
            ) as fresh:
                fresh.execute("create extension pgqueue")
                conn.execute("alter extension pgqueue update")
                right = "has_function_privilege('worker', 'pgqueue.claim'::regproc, 'execute')"
                assert one(conn, f"select {right}")
                conn.execute("select pgqueue.revoke_access('worker', 'worker')")
                compare(conn, fresh)
            assert one(conn, "select pgqueue.enqueue('new')")
            id, token = conn.execute(
                "select id, token from pgqueue.claim('new', 'w')"
            ).fetchone()
            assert token > last
            conn.execute("select pgqueue.complete(%s, %s)", (id, token))
            assert column(conn, "select count(*) from pgqueue.claim('mails', 'w', 100)")
            assert column(conn, "select task from pgqueue.maintain()")
        with (
            psycopg.connect(where(newer), dbname="plain", autocommit=True) as conn,
            psycopg.connect(
                where(newer), dbname="plain_fresh", autocommit=True
            ) as fresh,
        ):
            fresh.execute(plain_script())
            conn.execute(plain_script(RELEASED[0]))
            compare(conn, fresh)
            assert column(conn, "select id from pgqueue.claim('q', 'w')") == [1]
        for install in SHARDS:
            with psycopg.connect(
                where(newer), dbname=install, autocommit=True
            ) as shard:
                assert column(shard, USE_SHARD) == [19, 27]
                assert column(shard, CLAIM_ON_SHARD) == [19, 27]
                assert one(shard, "select distinct shard from pgqueue.jobs") == 3
                fine = (
                    "select status from pgqueue.health() where \"check\" = 'sequences'"
                )
                assert one(shard, fine) == "ok"
    finally:
        older.remove()
        newer.remove()
