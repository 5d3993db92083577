"""Workers as processes: of Python, with handlers of both kinds, and one that is nothing but psql."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from soak import scene
from soak.client import Phase
from soak.history import Entry, History

TESTS = Path(__file__).resolve().parent.parent
STEPS = 20
STEP = rf"""
\unset id
select id, token from pgqueue.claim('{scene.WORK}', 'psql', 1, '2 s') \gset
\if :{{?id}}
\echo claim :id :token
begin;
insert into effect values (:id);
select pgqueue.complete(:id, :token) \g /dev/null
\if :ERROR
rollback;
\echo refused :id :token
\else
commit;
\if :ERROR
\else
\echo complete :id :token
\endif
\endif
\endif
select pg_sleep(0.03) \g /dev/null
"""


class Psql:
    """Runs psql again and again, and writes down what it says."""

    def __init__(self, dsn: str, history: History, phase: Phase, env: dict) -> None:
        self.dsn, self.history, self.phase, self.env = dsn, history, phase, env

    def run(self) -> None:
        while not self.phase.is_over.is_set():
            start = time.time()
            said = subprocess.run(
                ["psql", "-qXAtw", "-d", self.dsn],
                input=STEP * STEPS,
                text=True,
                capture_output=True,
                env=self.env,
            ).stdout
            for line in said.splitlines():
                match line.split():
                    case ["claim" | "complete" | "refused" as what, id, token]:
                        self.write(what, [int(id), int(token), scene.WORK], start)
            if "complete" not in said:
                time.sleep(0.1)

    def write(self, what: str, lease: list, start: float) -> None:
        how = "fail" if what == "refused" else "ok"
        entry = {"do": what, "start": start, "end_at": time.time(), "end": how}
        # A claim of nothing is not written, so none of these is in vain.
        claimed = {"rows": [lease], "queues": [scene.WORK], "kinds": None}
        ended = {"do": "complete", "rows": [[lease[0]]], "leases": [lease]}
        self.history.write([entry | (claimed if what == "claim" else ended)])


class Processes:
    """The Python workers, which the nemesis kills and stops."""

    def __init__(self, dsn: str, folder: Path) -> None:
        self.dsn, self.folder = dsn, folder
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        path = os.pathsep.join((str(TESTS), str(TESTS.parent / "python")))
        ours = {
            "PGQUEUE_DSN": self.dsn,
            "PYTHONPATH": path,
            "SOAK_NOTES": str(self.folder / "handlers.history"),
        }
        options = "--app soak.app -q work -c 4 --lease 2 --poll-interval 1".split()
        with (self.folder / "workers.log").open("ab") as log:
            self.running.append(
                subprocess.Popen(
                    [sys.executable, "-m", "pgqueue.worker", *options],
                    env={**os.environ, **ours},
                    stdout=log,
                    stderr=log,
                )
            )

    def signal(self, process: subprocess.Popen[bytes], number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)

    def living(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self.running if process.poll() is None]

    def end(self) -> Entry:
        """Ask all to stop; how each has ended."""
        for process in self.living():
            self.signal(process, signal.SIGCONT)
            self.signal(process, signal.SIGTERM)
        codes: list[int | str] = []
        for process in self.running:
            try:
                codes.append(process.wait(40))
            except subprocess.TimeoutExpired:
                codes.append("hung")
                process.kill()
                process.wait(20)
        return {"do": "exit", "start": time.time(), "end": "ok", "codes": codes}
