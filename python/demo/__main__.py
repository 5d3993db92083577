"""Run real jobs and show what an operator would look at.

Each Python source file of the standard library is one job, and a few that must fail
end dead. Needs the server that PGHOST, PGPORT ... name; `make demo` brings one.
"""

import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import psycopg
from psycopg.types.json import Jsonb
from tqdm import tqdm

QUEUE = "sources"
SETUP = f"""
create extension pgqueue;
create table source_file (path text primary key, lines int, functions int, classes int);
select pgqueue.configure('{QUEUE}', max_attempts => 3, retry_base => '500 ms');
"""
REPORT = {
    "The queue": "select queue, ready, running, dead, finished_last_hour as finished, "
    "failed_last_hour as failed from pgqueue.queues",
    "The kinds, slowest first": "select kind, runs, failures, p50_taken, p99_taken "
    "from pgqueue.kinds order by p99_taken desc",
    "The dead letters": "select id, attempt, payload ->> 'path' as path, "
    "substring(error from '[^\\n]+\\n*$') as error from pgqueue.dead_job order by id",
    "What the jobs stored": "select count(*) as files, sum(lines) as lines, "
    "sum(functions) as functions, sum(classes) as classes from source_file",
}


def sources() -> list[str]:
    """Name the standard library's files, and three that are no Python source."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    found = (p for p in stdlib.rglob("*.py") if "site-packages" not in p.parts)
    files = sorted(str(p) for p in found if "test" not in p.parts)
    return [*files, "/no/such/file.py", sys.executable, os.devnull + "/nothing.py"]


def work(conn: psycopg.Connection, total: int) -> float:
    """Let a worker run until no job waits or runs; return the seconds it took."""
    worker = subprocess.Popen(
        [sys.executable, "-m", "pgqueue.worker", "--app", "demo.app", "--queue", QUEUE]
        + ["--concurrency", "4", "--log-level", "error"]
    )
    began = time.monotonic()
    try:
        with tqdm(total=total, unit="job", ncols=80, file=sys.stdout) as bar:
            while (
                left := conn.execute("select count(*) from pgqueue.jobs").fetchone()[0]
            ) > 0:
                bar.update(total - left - bar.n)
                if worker.poll() is not None:
                    sys.exit(f"the worker stopped with exit code {worker.returncode}")
                time.sleep(0.1)
            bar.update(total - bar.n)
        return time.monotonic() - began
    finally:
        worker.terminate()
        worker.wait()


def main() -> None:
    with psycopg.connect(autocommit=True) as conn:
        conn.execute(SETUP)
        jobs = [Jsonb({"path": path}) for path in sources()]
        conn.execute(
            "select pgqueue.enqueue_many(%s, %s, kind => 'count_source')", (QUEUE, jobs)
        )
        print(
            f"{len(jobs)} jobs: count the functions in each file of the standard library"
        )
        seconds = work(conn, len(jobs))
        done = conn.execute("select count(*) from source_file").fetchone()[0]
    print(f"{done} jobs completed in {seconds:.1f} s: {done / seconds:.0f} a second\n")
    for title, query in REPORT.items():
        print(f"{title}: {query.split(' from ')[1].split(' ')[0]}", flush=True)
        subprocess.run(["psql", "-Xq", "-P", "footer=off", "-c", query], check=True)

    where = " ".join(
        f"{name}={os.environ[name]}" for name in ("PGHOST", "PGPORT", "PGUSER")
    )
    print(f"Look further while this server lives:\n    {where} psql")
    if sys.stdin.isatty():
        input("Enter stops it and removes it. ")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
