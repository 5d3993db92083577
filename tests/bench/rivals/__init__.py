"""The rivals that are measured beside pgqueue, each through a small driver of its own.

A driver is a program here, NAME.mjs or NAME.py, that configures its rival as the rival's
documentation says is best. `driver VERB JSON` prints one line of JSON; driver.mjs and
driver.py hold what the drivers share and say what the verbs do. The database is the one
that libpq's environment variables name.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent.parent
NODE = "node@22.23.3"  # the Node rivals ask for 22.18 or later


class RivalError(RuntimeError):
    pass


@dataclass(frozen=True)
class Run:
    """A verb under way."""

    name: str
    process: "subprocess.Popen[bytes]"
    output: IO[str]

    def answer(self, timeout: float = 600) -> dict[str, Any]:
        """Wait for its end, and return its answer. It does not outlive this."""
        with self.output:
            try:
                self.process.wait(timeout)
            except BaseException:
                self.process.kill()
                self.process.wait()
                raise
            if self.process.returncode != 0:
                raise RivalError(f"{self.name} exited with {self.process.returncode}")
            self.output.seek(0)
            answer: dict[str, Any] = json.load(self.output)
            return answer


@dataclass(frozen=True)
class Rival:
    """A rival: what it is, and once installed, how to run it."""

    name: str
    version: str
    kind: Literal["npm", "pip"]
    packages: tuple[str, ...]
    configuration: str
    command: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    def run(
        self, verb: str, *, timeout: float = 600, **arguments: Any
    ) -> dict[str, Any]:
        """Do one verb and return its answer."""
        return self.start(verb, **arguments).answer(timeout)

    def start(self, verb: str, **arguments: Any) -> "Run":
        """Start one verb, so that several can run at once."""
        # A file: a pipe is full at 64 kB, and nobody reads it before the end.
        output = tempfile.TemporaryFile("w+")
        process = subprocess.Popen(
            [*self.command, verb, json.dumps(arguments)],
            env={**os.environ, **self.environment},
            stdout=output,
        )
        return Run(self.name, process, output)

    def installed(self, folder: Path) -> "Rival":
        """Install it below the folder, unless it is there, and return it with its command."""
        if self.kind == "npm":
            home = folder / "node"
            node = home / "node_modules" / ".bin" / "node"
            if not self._is_in(home):
                home.mkdir(parents=True, exist_ok=True)
                _quietly("npm", "install", "--prefix", str(home), NODE, *self.packages)
            command = (str(node), str(HERE / f"{self.name}.mjs"))
            environment = {"BENCH_NODE_MODULES": str(home)}
        else:
            home = folder / self.name
            python = str(home / "bin" / "python")
            if not self._is_in(home):
                _quietly(sys.executable, "-m", "venv", str(home))
                _quietly(python, "-m", "pip", "install", *self.packages)
            # As a module: as a script, NAME.py would hide the package NAME from itself.
            command = (python, "-m", f"bench.rivals.{self.name}")
            environment = {
                "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent / 'python'}"
            }
        self._mark(home).touch()
        return replace(self, command=command, environment=environment)

    def _mark(self, home: Path) -> Path:
        return home / f".{self.name}-{self.version}"

    def _is_in(self, home: Path) -> bool:
        return self._mark(home).exists()


RIVALS = {
    rival.name: rival
    for rival in (
        Rival(
            "pgqueue",
            "here",
            "pip",
            ("psycopg[binary]", "uvloop"),
            "its worker as it comes, async handlers; naps: 32",
        ),
        Rival(
            "pgmq",
            "1.13.0",
            "pip",
            ("pgmq==1.1.4", "psycopg[binary]", "uvloop"),
            "read(100) + delete(bigint[]) in a loop, psycopg, prepared; naps: 50, 32 at a time; latency: enable_notify_insert(0), LISTEN",
        ),
        Rival(
            "graphile-worker",
            "0.18.0",
            "npm",
            ("graphile-worker@0.18.0",),
            "concurrentJobs 24, localQueue.size 500, completeJobBatchDelay 0; naps: 32 and 50; latency: no localQueue, no batching",
        ),
        Rival(
            "pg-boss",
            "12.34.0",
            "npm",
            ("pg-boss@12.34.0",),
            "partitioned queue, batchSize 500, localConcurrency 3, burstWhenBatchFull; naps: 50 and 4, at most 32 at a time; latency: notify queue, batchSize 1",
        ),
        Rival(
            "pgqueuer",
            "1.6.0",
            "pip",
            ("pgqueuer==1.6.0", "asyncpg", "uvloop"),
            "asyncpg, uvloop, durable install, batch_size 100; naps: 50, at most 32 at a time; latency: 10",
        ),
        Rival(
            "procrastinate",
            "3.10.0",
            "pip",
            ("procrastinate==3.10.0", "psycopg[binary]", "uvloop"),
            "uvloop, concurrency 30, delete_jobs=always, listen_notify; naps: 32",
        ),
        Rival(
            "chancy",
            "0.26.0",
            "pip",
            ("chancy==0.26.0", "psycopg[binary]", "uvloop"),
            "AsyncExecutor, concurrency 100, eager_polling, polling_interval 1, uvloop; naps: 32",
        ),
    )
}


def install(folder: Path) -> list[Rival]:
    """Install all rivals below the folder; leave out, saying so, what cannot be had."""
    found = []
    for rival in RIVALS.values():
        try:
            found.append(rival.installed(folder))
        except (OSError, RivalError) as error:
            print(f"without {rival.name} {rival.version}: {error}", file=sys.stderr)
    return found


def _quietly(*command: str) -> None:
    """Run an installing command; what it says of its failure is the error."""
    result = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    if result.returncode != 0:
        # The rest names caches and logs of this machine.
        told = [line for line in result.stderr.splitlines() if "o matching" in line]
        told += [f"it exited with {result.returncode}"]
        raise RivalError(f"{Path(command[0]).name}: {told[0]}")
