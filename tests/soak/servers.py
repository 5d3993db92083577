"""The server of an episode, and its standby, which can take its place."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from cluster import Cluster, _free_port

from soak.commits import Reader

SETTINGS = {
    "restart_after_crash": "on",
    "wal_level": "logical",
    "max_prepared_transactions": "100",
    "deadlock_timeout": "50ms",
}


FOLLOWERS = "select 1 from pg_stat_replication where state = 'streaming'"


class Servers:
    """Clients know two addresses; nobody listens on the second before the standby is promoted."""

    def __init__(self, current: Cluster, standby: Cluster | None = None) -> None:
        self.current, self.standby = current, standby
        known = [current, standby] if standby else [current]
        self.dsn = (
            f"host={','.join(str(each.home) for each in known)}"
            f" port={','.join(str(each.port) for each in known)} user=postgres dbname=postgres"
        )

    def follow(self) -> None:
        """Make the standby a copy that follows, on a port that clients do not know."""
        standby, primary = self.standby, self.current
        assert standby
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            conn.execute("select pg_create_physical_replication_slot('standby')")
        primary.stop()
        subprocess.run(["rm", "-r", standby.data], check=True)
        subprocess.run(["cp", "-a", primary.data, standby.data], check=True)
        primary.start()
        configure(
            standby,
            port=_free_port(),
            unix_socket_directories=standby.home,
            primary_conninfo=f"host={primary.home} port={primary.port} user=postgres",
            primary_slot_name="standby",
            wal_retrieve_retry_interval="100ms",
        )
        (standby.data / "standby.signal").touch()
        standby.start()

    def promote(self, reader: Reader) -> None:
        """Stop the server, which sends what it has to the standby, and promote that.

        The log is read to the end on the old server, and from the beginning on the new one,
        both where no client finds them.
        """
        old, new = self.current, self.standby
        assert new
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            # After a crash it has to come back first.
            while not conn.execute(FOLLOWERS).fetchone():
                time.sleep(0.05)
        old.stop()
        hidden = private(old)
        old.start()
        reader.finish(hidden)
        old.stop()
        listening = psycopg.conninfo.conninfo_to_dict(private(new, keep=True))
        with psycopg.connect(**listening, autocommit=True) as conn:
            conn.execute("select pg_promote()")
            # The log of the new server begins when all transactions of the old one have ended.
            for (name,) in conn.execute("select gid from pg_prepared_xacts"):
                conn.execute(f"rollback prepared '{name}'")
        reader.begin(private(new, keep=True))
        new.stop()
        configure(new, port=new.port)
        new.start()
        self.current, self.standby = new, None


def configure(cluster: Cluster, **settings: object) -> None:
    with (cluster.data / "postgresql.conf").open("a") as conf:
        for name, value in settings.items():
            conf.write(f"{name} = '{value}'\n")


def private(cluster: Cluster, keep: bool = False) -> str:
    """Where to find it on a port that clients do not know: a new one, or that in its settings."""
    if not keep:
        configure(cluster, port=_free_port())
    lines = (cluster.data / "postgresql.conf").read_text().splitlines()
    port = [line.split("'")[1] for line in lines if line.startswith("port")][-1]
    return f"host={cluster.home} port={port} user=postgres dbname=postgres"


@contextmanager
def servers(script: Path | None, has_standby: bool) -> Iterator[Servers]:
    clusters = [Cluster(fast=True, settings=SETTINGS) for _ in range(1 + has_standby)]
    try:
        for cluster in clusters:
            cluster.create()
            for installed in cluster.home.glob("server/**/extension/pgqueue--*.sql"):
                if script:
                    installed.write_text(script.read_text())
        clusters[0].start()
        found = Servers(*clusters)
        if has_standby:
            found.follow()
        yield found
    finally:
        for cluster in clusters:
            cluster.remove()
