"""A streaming standby, made and promoted by repmgr while producers and a worker are busy.

repmgr and not Patroni: it promotes with one command and no third party, and what matters here is
what the queue does after that.
"""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import psycopg
import pytest
from cluster import Cluster, _server_user
from conftest import column, one
from worker_harness import Workers, wait_until, where, workers_on

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
        followed = "select count(*) from pg_stat_replication where state = 'streaming'"
        with psycopg.connect(where(self.primary), autocommit=True) as conn:
            wait_until(lambda: one(conn, followed) == 1)
        self.repmgr(self.standby, "standby", "register")

    def call(self, node: Cluster, call: str) -> None:
        with psycopg.connect(where(node), autocommit=True) as conn:
            conn.execute(f"select pgqueue.{call}")

    def catch_up(self) -> None:
        """Wait until the standby has received all that is committed now."""
        with psycopg.connect(where(self.primary), autocommit=True) as conn:
            end = one(conn, "select pg_current_wal_lsn()::text")
        has_it = "select pg_last_wal_receive_lsn() >= %s::pg_lsn"
        with psycopg.connect(where(self.standby), autocommit=True) as conn:
            wait_until(lambda: one(conn, has_it, end))

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
        self.promote()

    def promote(self) -> None:
        self.repmgr(self.standby, "standby", "promote")


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Cluster(fast=True) as primary, Cluster(fast=True) as standby:
        if not (primary.bindir / "repmgr").exists():
            pytest.skip("repmgr is not installed (Debian: postgresql-NN-repmgr)")
        with psycopg.connect(where(primary), autocommit=True) as conn:
            conn.execute("create extension pgqueue; create table effect (mark bigint)")
        pair = Pair(primary, standby)
        pair.follow()
        yield pair


class Producers:
    """Enqueue marks until told to stop, and note the id of each that was acknowledged."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.acknowledged: dict[int, int] = {}
        self._marks = itertools.count(1)
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
        query = "select pgqueue.enqueue('work', jsonb_build_object('mark', %s::int), 'told')"
        while not self._is_over.is_set():
            with (
                contextlib.suppress(psycopg.OperationalError),
                psycopg.connect(self.dsn, autocommit=True, connect_timeout=5) as conn,
            ):
                while not self._is_over.is_set():
                    mark = next(self._marks)
                    self.acknowledged[mark] = one(conn, query, mark)
                    # As fast as they can, they would keep the cores from all else.
                    self._is_over.wait(0.01)
            time.sleep(0.05)


@dataclass
class Standby:
    """What the standby had received when it was promoted, and what had run by then."""

    waiting: set[int]
    completed: set[int]
    ran: set[int]


@dataclass
class Run:
    mark: int
    id: int
    token: int
    server: int


@dataclass
class Verdict:
    """What a failover has done to jobs, from what was seen outside."""

    lost: set[int]
    """Acknowledged, and in the end neither done nor waiting."""
    twice: set[int]
    """Run twice, since the first run was forgotten, or cut off."""
    reused_ids: set[int]
    """Ids of two jobs, a lost one and a later one."""
    reused_tokens: set[int]
    """Given out by both servers."""

    def __str__(self) -> str:
        return "\n".join(
            f"{name.replace('_', ' ')}: {len(found)}: {sorted(found)}"
            for name, found in vars(self).items()
        )


def judge(acknowledged: dict[int, int], runs: list[Run], effects: set[int]) -> Verdict:
    """Say which marks were lost or run twice, and which ids and tokens were given out twice."""
    marks = Counter(run.mark for run in runs)
    # Of a job that has run, the id may not have been acknowledged.
    ids = Counter(
        id for _, id in {*acknowledged.items(), *((r.mark, r.id) for r in runs)}
    )
    tokens = Counter(token for token, _ in {(run.token, run.server) for run in runs})
    return Verdict(
        lost=set(acknowledged) - effects,
        twice={mark for mark, times in marks.items() if times > 1},
        reused_ids={id for id, times in ids.items() if times > 1},
        reused_tokens={token for token, times in tokens.items() if times > 1},
    )


def runs_of(workers: Workers) -> list[Run]:
    lines = workers.ran.read_text().splitlines()
    return [Run(*map(int, line.split())) for line in lines]


def received(pair: Pair, workers: Workers) -> Standby:
    """Read the standby once it has replayed all it has, and before it is promoted."""
    with psycopg.connect(where(pair.standby), autocommit=True) as conn:
        replayed = "select pg_last_wal_replay_lsn()"

        def is_done() -> bool:
            before = one(conn, replayed)
            time.sleep(0.5)
            return one(conn, replayed) == before

        wait_until(is_done)
        waiting = column(conn, "select (payload ->> 'mark')::int from pgqueue.job")
        completed = column(conn, "select mark from effect")
    ran = {run.mark for run in runs_of(workers)}
    return Standby(set(waiting), set(completed), ran)


def go_through_it(pair: Pair, stalls: bool) -> Verdict:
    """Fail over under load, and judge.

    What the judge finds from outside must be what the standby did not have, no more and no less.
    """
    with workers_on(pair.dsn) as workers, Producers(pair.dsn) as producers:
        acknowledged = producers.acknowledged
        workers.start("--lease", "3")
        wait_until(lambda: len(acknowledged) > 200 and len(runs_of(workers)) > 50)
        receiver = None
        if stalls:
            count = len(acknowledged)
            # Jobs that are waiting when the standby stalls, and run after that.
            pair.call(pair.primary, "pause('work')")
            wait_until(lambda: len(acknowledged) > count + 20)
        received_early = set(acknowledged)
        pair.catch_up()
        if stalls:
            receiver = pair.stall()
            pair.call(pair.primary, "resume('work')")
        count, ran = len(acknowledged), len(runs_of(workers))
        wait_until(lambda: len(acknowledged) > count + 200)
        wait_until(lambda: len(runs_of(workers)) > ran + 50)
        if receiver:
            pair.lose(receiver)
        else:
            pair.primary.kill()
        standby = received(pair, workers)
        early = dict(acknowledged)
        pair.promote()
        if stalls:
            pair.call(pair.standby, "resume('work')")
        wait_until(lambda: len(acknowledged) > len(early) + 200, 60)
        producers.__exit__()
        with psycopg.connect(where(pair.standby), autocommit=True) as conn:
            wait_until(lambda: not one(conn, "select count(*) from pgqueue.job"), 60)
            assert not one(conn, "select count(*) from pgqueue.dead_job")
            effects = column(conn, "select mark from effect")
            assert len(set(effects)) == len(effects), "what is done twice, is undone"
            fine = (
                "select status from pgqueue.health() as h where h.check = 'sequences'"
            )
            assert one(conn, fine) == "ok"
        verdict = judge(acknowledged, runs_of(workers), set(effects))
    print(verdict)
    assert verdict.lost == set(early) - standby.waiting - standby.completed
    assert verdict.twice == standby.ran & standby.waiting
    assert verdict.reused_ids <= {early[mark] for mark in verdict.lost}
    assert not verdict.reused_tokens
    assert not verdict.lost & received_early
    return verdict


def test_a_synchronous_standby_loses_nothing_that_was_acknowledged(pair):
    with psycopg.connect(where(pair.primary), autocommit=True) as conn:
        conn.execute("alter system set synchronous_standby_names = '*'")
        conn.execute("select pg_reload_conf()")
        state = "select sync_state from pg_stat_replication"
        wait_until(lambda: one(conn, state) == "sync")
    verdict = go_through_it(pair, stalls=False)
    assert not verdict.lost
    assert not verdict.reused_ids


def test_an_asynchronous_standby_loses_its_last_moments_and_nothing_later(pair):
    verdict = go_through_it(pair, stalls=True)
    assert verdict.lost, "the standby had not received the last ones"
    assert verdict.twice, "nor that these had completed"


def test_the_judge_says_what_was_lost_run_twice_or_given_out_twice():
    acknowledged = {1: 11, 2: 12, 3: 13, 4: 12}
    runs = [
        (1, 11, 21, 1),
        (2, 12, 22, 1),
        (1, 11, 23, 2),
        (4, 12, 22, 2),
        (5, 15, 23, 2),
    ]
    verdict = judge(acknowledged, [Run(*run) for run in runs], effects={1, 4, 5})
    assert verdict == Verdict({2, 3}, {1}, {12}, {22})


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


def test_no_failover_gives_out_a_token_of_an_earlier_one():
    """Also to a standby that has not received what the last primary skipped before its claims."""
    with Cluster(fast=True) as cluster:
        with psycopg.connect(where(cluster), autocommit=True) as conn:
            conn.execute("create extension pgqueue")
            conn.execute("select pgqueue.enqueue('q')")
        standby = cluster.data.with_name("standby")
        tokens = []
        for _ in range(3):
            cluster.stop()
            (cluster.data / "standby.signal").touch()
            cluster.start()
            with psycopg.connect(where(cluster), autocommit=True) as conn:
                conn.execute("select pg_promote()")
            cluster.stop()
            subprocess.run(["cp", "-a", cluster.data, standby], check=True)
            cluster.start()
            with psycopg.connect(where(cluster), autocommit=True) as conn:
                assert one(conn, "select pgqueue.after_failover()") is True
                tokens.append(one(conn, "select token from pgqueue.claim('q', 'w')"))
            cluster.stop()
            shutil.rmtree(cluster.data)
            standby.rename(cluster.data)
    assert len(set(tokens)) == 3


def test_ids_of_lost_jobs_come_again_unless_the_producer_calls_it_too(pair):
    enqueue = "select pgqueue.enqueue('q')"
    producer = f"{pair.dsn} user=producer"
    with psycopg.connect(where(pair.primary), autocommit=True) as conn:
        conn.execute(
            "create role producer login; select pgqueue.grant_access('producer', 'producer')"
        )
        kept = [one(conn, enqueue) for _ in range(40)]
        synced = (
            "select pg_current_wal_flush_lsn() = replay_lsn from pg_stat_replication"
        )
        wait_until(lambda: one(conn, synced))
        receiver = pair.stall()
        lost = [one(conn, enqueue) for _ in range(100)]
    pair.lose(receiver)
    pair.fail_over()
    with psycopg.connect(producer, autocommit=True) as conn:
        # Postgres takes 32 in advance, and writes that down: the standby knows of these.
        early = [one(conn, enqueue) for _ in range(20)]
        assert early[0] > max(kept)
        assert set(early) <= set(lost[33 - len(kept) % 33 :])
        assert one(conn, "select pgqueue.after_failover()") is True
        given = [one(conn, enqueue) for _ in range(200)]
        assert min(given) > max(lost)
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute("select pgqueue.after_failover(always => true)")


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
