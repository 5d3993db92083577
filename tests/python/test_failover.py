"""A streaming standby, made and promoted by repmgr while producers and a worker are busy.

repmgr and not Patroni: it promotes with one command and no third party, and what matters here is
what the queue does after that.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from cluster import Cluster, _server_user
from conftest import column, one
from worker_harness import wait_until, where, workers_on

DSN = "host=127.0.0.1,127.0.0.1 port={},{} user=postgres dbname=postgres target_session_attrs=read-write"


class Pair:
    """A primary and its standby."""

    def __init__(self, primary: Cluster, standby: Cluster) -> None:
        self.primary, self.standby = primary, standby
        self.dsn = DSN.format(primary.port, standby.port)

    def repmgr(self, node: Cluster, *command: str) -> None:
        user = _server_user()
        done = subprocess.run(
            [node.bindir / "repmgr", "-f", node.home / "repmgr.conf", *command],
            capture_output=True, text=True, cwd=node.home, env={"PATH": os.defpath, "HOME": str(node.home)},
            user=user.pw_uid if user else None, group=user.pw_gid if user else None,
            extra_groups=() if user else None,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    def follow(self) -> None:
        """Make the standby a copy that follows."""
        for number, node in enumerate((self.primary, self.standby), 1):
            conf = node.home / "repmgr.conf"
            conf.write_text(
                f"node_id={number}\nnode_name=node{number}\ndata_directory='{node.data}'\n"
                f"pg_bindir='{node.bindir}'\n"
                f"conninfo='host=127.0.0.1 port={node.port} user=postgres dbname=postgres'\n"
            )
            conf.chmod(0o644)
        self.repmgr(self.primary, "primary", "register")
        self.standby.stop()
        shutil.rmtree(self.standby.data)
        source = (
            "-h",
            "127.0.0.1",
            "-p",
            str(self.primary.port),
            "-U",
            "postgres",
            "-d",
            "postgres",
        )
        self.repmgr(self.standby, *source, "standby", "clone", "--fast-checkpoint")
        with (self.standby.data / "postgresql.conf").open("a") as conf:
            conf.write(
                f"port = {self.standby.port}\nunix_socket_directories = '{self.standby.home}'\n"
            )
        self.standby.start()
        self.repmgr(self.standby, "standby", "register")

    def stall(self) -> int:
        """Have the standby receive no more, and return the process that would."""
        with psycopg.connect(where(self.standby), autocommit=True) as conn:
            pid = wait_until(lambda: one(conn, "select pid from pg_stat_wal_receiver"))
        os.kill(pid, signal.SIGSTOP)
        return pid

    def lose(self, receiver: int) -> None:
        """End the primary, and what was on its way to a receiver that has been stopped."""
        self.primary.kill()
        os.kill(receiver, signal.SIGKILL)  # its server starts anew
        time.sleep(0.5)

        def is_up() -> bool:
            with (
                contextlib.suppress(psycopg.OperationalError),
                psycopg.connect(where(self.standby)),
            ):
                return True
            return False

        wait_until(is_up)

    def fail_over(self) -> None:
        self.primary.kill()
        self.repmgr(self.standby, "standby", "promote")


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Cluster() as primary, Cluster() as standby:
        if not (primary.bindir / "repmgr").exists():
            pytest.skip("repmgr is not installed (Debian: postgresql-NN-repmgr)")
        with psycopg.connect(where(primary), autocommit=True) as conn:
            conn.execute(
                "create extension pgqueue; create table effect (job_id bigint)"
            )
        pair = Pair(primary, standby)
        pair.follow()
        yield pair


class Producers:
    """Enqueue until told to stop, and note what was acknowledged."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.acknowledged: list[int] = []
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(3)]

    def __enter__(self) -> "Producers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(30)

    def _run(self) -> None:
        while not self._is_over.is_set():
            with (
                contextlib.suppress(psycopg.OperationalError),
                psycopg.connect(self.dsn, autocommit=True, connect_timeout=5) as conn,
            ):
                while not self._is_over.is_set():
                    id = one(conn, "select pgqueue.enqueue('work', kind => 'effect')")
                    self.acknowledged.append(id)
            time.sleep(0.05)


def go_through_it(
    pair: Pair, folder: Path, stalls: bool
) -> tuple[list[int], list[int], list[int]]:
    """Fail over under load; return what was acknowledged before and after, and what had an effect."""
    with workers_on(pair.dsn) as workers, Producers(pair.dsn) as producers:
        workers.start("--lease", "3")
        wait_until(lambda: len(producers.acknowledged) > 200)
        receiver = pair.stall() if stalls else None
        before = len(producers.acknowledged)
        wait_until(lambda: len(producers.acknowledged) > before + 200)
        if receiver:
            pair.lose(receiver)
        pair.fail_over()
        after = len(producers.acknowledged)
        wait_until(lambda: len(producers.acknowledged) > after + 200, 60)
        producers.__exit__()
        with psycopg.connect(where(pair.standby), autocommit=True) as conn:
            wait_until(lambda: not one(conn, "select count(*) from pgqueue.job"), 60)
            assert not one(conn, "select count(*) from pgqueue.dead_job")
            effects = column(conn, "select job_id from effect")
            fine = (
                "select status from pgqueue.health() as h where h.check = 'sequences'"
            )
            assert one(conn, fine) == "ok"
    return producers.acknowledged[:after], producers.acknowledged[after:], effects


def test_a_synchronous_standby_loses_nothing_that_was_acknowledged(pair, tmp_path):
    with psycopg.connect(where(pair.primary), autocommit=True) as conn:
        conn.execute("alter system set synchronous_standby_names = '*'")
        conn.execute("select pg_reload_conf()")
        state = "select sync_state from pg_stat_replication"
        wait_until(lambda: one(conn, state) == "sync")
    early, late, effects = go_through_it(pair, tmp_path, stalls=False)
    assert len(set(effects)) == len(effects)
    assert {*early, *late} <= set(effects)


def test_an_asynchronous_standby_loses_its_last_moments_and_nothing_later(
    pair, tmp_path
):
    early, late, effects = go_through_it(pair, tmp_path, stalls=True)
    assert set(early) - set(effects), "the standby had not received the last ones"
    assert set(late) <= set(effects)
    assert len(set(effects)) == len(effects)


def test_the_token_of_a_lost_claim_is_not_given_out_again(pair):
    with psycopg.connect(where(pair.primary), autocommit=True) as conn:
        conn.execute("select pgqueue.enqueue('slow') from generate_series(1, 200)")
        claim = "select id, token from pgqueue.claim('slow', 'w', lease => '1 hour')"
        synced = (
            "select pg_current_wal_flush_lsn() = replay_lsn from pg_stat_replication"
        )
        wait_until(lambda: one(conn, synced))
        receiver = pair.stall()
        # A sequence is written ahead, by 32: the standby knows of the first tokens.
        lost = [conn.execute(claim).fetchone() for _ in range(100)]
    pair.lose(receiver)
    pair.fail_over()
    with psycopg.connect(pair.dsn, autocommit=True) as conn:
        assert one(conn, "select last_value from pgqueue.token_seq") < lost[-1][1]
        assert one(conn, "select pgqueue.after_failover()") is True
        assert one(conn, "select pgqueue.after_failover()") is False
        given = [conn.execute(claim).fetchone() for _ in range(100)]
        assert [id for id, _ in given] == [id for id, _ in lost]
        assert min(token for _, token in given) > max(token for _, token in lost)
        with pytest.raises(psycopg.DatabaseError, match="lease"):
            conn.execute("select pgqueue.complete(%s, %s)", lost[-1])


def test_a_worker_calls_it_before_it_claims(pair):
    """Also where the control file does not know of the new timeline yet."""
    with workers_on(pair.dsn) as workers:
        workers.start()
        with psycopg.connect(where(pair.primary), autocommit=True) as conn:
            conn.execute("select pgqueue.enqueue('work', kind => 'mark')")
            wait_until(lambda: one(conn, "select count(*) from pgqueue.run"))
        pair.fail_over()
        with psycopg.connect(pair.dsn, autocommit=True) as conn:
            conn.execute("select pgqueue.enqueue('work', kind => 'mark')")
            runs = "select count(*) from pgqueue.run"
            wait_until(lambda: one(conn, runs) == 2, 60)
            assert one(conn, "select last_value from pgqueue.token_seq") > 1_000_000
        assert "ids and tokens were skipped" in workers.log()
