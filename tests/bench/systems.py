"""What is measured: pgqueue, its rivals, and bare SQL; and how each is installed and run.

A driver is a program in rivals/, NAME.mjs or NAME.py, that configures its system as the
system's documentation says is best. `driver VERB JSON` prints one line of JSON; driver.mjs
and driver.py hold what the drivers share and say what the verbs do. The database is the
one that libpq's environment variables name: each system has its own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench import statements
from bench.statements import Statements

HERE = Path(__file__).resolve().parent
NODE = "node@22.23.3"  # the Node rivals ask for 22.18 or later
PATIENCE = 900.0  # seconds after which a driver is ended, whatever it does


class DriverError(RuntimeError):
    pass


@dataclass
class System:
    """One system: what it is, how it is configured, and what drives it.

    slow divides its numbers of jobs where its worker runs: it would take all day. groups says
    what makes the jobs of a group run one after the other, if anything does.
    """

    name: str
    version: str
    kind: Literal["npm", "pip", "sql"]
    packages: tuple[str, ...]
    configuration: str
    sql: Statements
    slow: int = 1
    groups: str = ""
    purpose: str = ""  # of a second database
    driver: str = ""  # of another name
    besides: str = ""  # what else its install is used for
    only: tuple[str, ...] = ()  # workloads, if not all
    needs: str = ""  # the environment variable that names what no package has
    noop: str = ""  # the kind "noop" or "sync", once one has proved to be faster
    command: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def database(self) -> str:
        return "bench_" + self.name.replace("-", "_") + self.purpose

    @property
    def settings(self) -> str:
        """Its configuration, and what it does about groups."""
        return self.configuration + (f"; groups: {self.groups}" if self.groups else "")

    @property
    def is_rival(self) -> bool:
        return not self.is_ours and bool(self.command)

    @property
    def is_ours(self) -> bool:
        return self.name in ("pgqueue", "pgqueue-alone")

    def run(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Do one verb and return its answer."""
        return self.answer(self.start(verb, **arguments))

    def start(self, verb: str, **arguments: Any) -> "subprocess.Popen[str]":
        """Start one verb, so that several can run at once; `answer` ends it."""
        return subprocess.Popen(
            [*self.command, verb, json.dumps(arguments)],
            env={**os.environ, **self.environment, "PGDATABASE": self.database},
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self, process: "subprocess.Popen[str]") -> dict[str, Any]:
        """Wait for a started verb, and return its answer. It does not outlive this."""
        try:
            output, _ = process.communicate(timeout=PATIENCE)
        except BaseException:
            process.kill()
            process.communicate()
            raise
        if process.returncode != 0:
            raise DriverError(f"{self.name} exited with {process.returncode}")
        answer: dict[str, Any] = json.loads(output)
        return answer

    def install(self, folder: Path) -> None:
        """Install it below the folder, unless it is there, and note its command."""
        if self.needs and self.needs not in os.environ:
            raise DriverError(f"{self.needs} is not set")
        if self.kind == "npm":
            home = folder / "node"
            node = home / "node_modules" / ".bin" / "node"
            if not self._mark(home).exists():
                home.mkdir(parents=True, exist_ok=True)
                _quietly("npm", "install", "--prefix", str(home), NODE, *self.packages)
            self.command = (str(node), str(HERE / "rivals" / f"{self.name}.mjs"))
            self.environment = {"BENCH_NODE_MODULES": str(home)}
        elif self.kind == "pip":
            driver = self.driver or self.name
            home = folder / driver
            python = str(home / "bin" / "python")
            if not self._mark(home).exists():
                _quietly(sys.executable, "-m", "venv", str(home))
                _quietly(python, "-m", "pip", "install", *self.packages)
            # As a module: as a script, NAME.py would hide the package NAME from itself.
            self.command = (python, "-m", f"bench.rivals.{driver}")
            tests = HERE.parent
            paths = f"{tests}{os.pathsep}{tests.parent / 'python'}"
            self.environment = {"PYTHONPATH": paths}
        else:
            return
        self._mark(home).touch()

    def _mark(self, home: Path) -> Path:
        return home / f".{self.name}-{self.version}"


SYSTEMS = (
    System(
        "pgqueue",
        "here",
        "pip",
        ("psycopg[binary]", "uvloop"),
        "the worker as it comes (concurrency 10), uvloop; sleeps: 32 at once",
        statements.PGQUEUE,
        groups="group_limit 1, 32 at once",
        besides=statements.BESIDES,
    ),
    System(
        "pgqueue-alone",
        "here",
        "pip",
        ("psycopg[binary]", "uvloop"),
        "the same in a database in which nothing else was ever configured",
        statements.PGQUEUE,
        driver="pgqueue",
        only=("enqueue", "drains", "lifecycle"),
    ),
    System(
        "pgmq",
        "1.13.0",
        "pip",
        ("pgmq==1.1.4", "psycopg[binary]", "uvloop"),
        "read(100) + delete(bigint[]) in a loop, psycopg, prepared; sleeps: 50, 32 at once; latency: enable_notify_insert(0), LISTEN",
        statements.PGMQ,
        groups="read_grouped_head(100), 32 at once",
    ),
    System(
        "graphile-worker",
        "0.18.0",
        "npm",
        ("graphile-worker@0.18.0",),
        "concurrentJobs 24, localQueue.size 500, completeJobBatchDelay 0; sleeps: 32 and 50; latency: no localQueue, no batching",
        statements.GRAPHILE_WORKER,
        groups="named queues, concurrentJobs 32, localQueue.size 500",
    ),
    System(
        "pg-boss",
        "12.34.0",
        "npm",
        ("pg-boss@12.34.0",),
        "partitioned queue, batchSize 500, localConcurrency 3, burstWhenBatchFull; sleeps: 50 and 4, 32 at once; latency: notify queue, batchSize 1",
        statements.PG_BOSS,
        groups="policy key_strict_fifo, batchSize 500, localConcurrency 3, 32 at once",
    ),
    System(
        "pgqueuer",
        "1.6.0",
        "pip",
        ("pgqueuer==1.6.0", "asyncpg", "uvloop"),
        "asyncpg, uvloop, durable install, batch_size 100; sleeps: 50, 32 at once; latency: 10",
        statements.PGQUEUER,
        slow=2,
    ),
    System(
        "procrastinate",
        "3.10.0",
        "pip",
        ("procrastinate==3.10.0", "psycopg[binary]", "uvloop"),
        "uvloop, concurrency 30, delete_jobs=always, listen_notify; sleeps: 32 at once",
        statements.PROCRASTINATE,
        groups="lock, 32 at once",
        slow=40,
    ),
    System(
        "chancy",
        "0.26.0",
        "pip",
        ("chancy==0.26.0", "psycopg[binary]", "uvloop"),
        "AsyncExecutor, concurrency 100, eager_polling, polling_interval 1, uvloop; sleeps: 32 at once",
        statements.CHANCY,
        slow=10,
    ),
    System(
        "awa",
        "0.6.9",
        "pip",
        ("awa-pg==0.6.9", "psycopg[binary]", "uvloop"),
        "queue storage, max_workers 256, claim_batch_size 512, poll_interval_ms 50, uvloop; sleeps: max_workers 32; latency: 50, 200 ms",
        statements.AWA,
        only=(
            "enqueue",
            "bulk",
            "drains",
            "latency",
            "sleeps",
            "held",
            "deep",
            "payloads",
        ),
    ),
    System(
        "absurd",
        "0.5.1",
        "pip",
        ("absurd-sdk==0.5.1", "psycopg[binary]", "uvloop"),
        "AsyncAbsurd, concurrency 30, poll_interval 0.05",
        statements.ABSURD,
        only=("steps",),
        needs="BENCH_ABSURD_SQL",
    ),
    System(
        "dbos",
        "3.4.0",
        "pip",
        ("dbos==3.4.0", "psycopg[binary]", "uvloop"),
        "async workflows, no bound on how many run at once, polling_interval_sec 0.05",
        statements.DBOS,
        only=("steps",),
    ),
    System(
        "bare-sql",
        "",
        "sql",
        (),
        "no queue: INSERT, INSERT … SELECT, COPY, DELETE … SKIP LOCKED RETURNING",
        statements.BARE,
    ),
)


def installed(folder: Path, names: list[str]) -> Iterator[System]:
    """Install those named, or all; leave out, saying so, what cannot be had."""
    for system in SYSTEMS:
        if names and system.name not in names:
            continue
        try:
            system.install(folder)
        except (OSError, DriverError) as error:
            print(f"without {system.name} {system.version}: {error}", flush=True)
        else:
            yield system


def _quietly(*command: str) -> None:
    """Run an installing command; what it says of its failure is the error."""
    result = subprocess.run(
        command,
        check=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if result.returncode != 0:
        # The rest names caches and logs of this machine.
        told = [line for line in result.stderr.splitlines() if "o matching" in line]
        told += [f"it exited with {result.returncode}"]
        raise DriverError(f"{Path(command[0]).name}: {told[0]}")
