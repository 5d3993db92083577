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
from typing import Any

import psycopg
from psycopg.types.json import Jsonb
from tqdm import tqdm

SETUP = """
create extension pgqueue;
create table source_file (path text primary key, lines int, functions int, classes int);
select pgqueue.configure('sources', max_attempts => 3, retry_base => '500 ms');
"""
WORKER = "-m pgqueue.worker --app demo.app --queue sources --concurrency 4 --log-level critical"
REPORT = {
    "The queue": """
        select queue, ready, running, dead, finished_last_hour as finished,
            failed_last_hour as failed
        from pgqueue.queues""",
    "The kinds, slowest first": """
        select kind, runs, failures, p50_taken, p99_taken
        from pgqueue.kinds order by p99_taken desc""",
    "The dead letters": r"""
        select id, attempt, right(payload ->> 'path', 16) as path,
            left(regexp_replace(error, '^.*\n(?=.)', ''), 40) as error
        from pgqueue.dead_job order by id desc limit 10""",
    "What the jobs stored": """
        select count(*) as files, sum(lines) as lines, sum(functions) as functions,
            sum(classes) as classes
        from source_file""",
}


def sources() -> tuple[list[str], list[str]]:
    """Name the standard library's files, and those of its tests."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    files = [p for p in sorted(stdlib.rglob("*.py")) if "site-packages" not in p.parts]
    tests = [str(p) for p in files if {"test", "tests"} & set(p.parts)]
    return [str(p) for p in files if str(p) not in set(tests)], tests


def number(conn: psycopg.Connection[tuple[Any, ...]], query: str) -> int:
    row = conn.execute(query).fetchone()
    return row[0] if row else 0


def work(conn: psycopg.Connection[tuple[Any, ...]], total: int) -> float:
    """Let a worker run until no job waits or runs; return the seconds it took."""
    worker = subprocess.Popen([sys.executable, *WORKER.split()])
    began = time.monotonic()
    try:
        with tqdm(total=total, unit="job", ncols=80, file=sys.stdout) as bar:
            while left := number(conn, "select count(*) from pgqueue.jobs"):
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
    library, tests = sources()
    # Three that cannot be counted: no file, no text, no folder.
    library += ["/no/such/file.py", sys.executable, "/dev/null/no.py"]
    total = len(library) + len(tests)
    print(f"{total:,} jobs: count the functions in each file of the standard library")
    with psycopg.connect(autocommit=True) as conn:
        conn.execute(SETUP)
        for kind, paths in {"count_library": library, "count_test": tests}.items():
            conn.execute(
                "select pgqueue.enqueue_many('sources', %s, %s)",
                ([Jsonb({"path": path}) for path in paths], kind),
            )
        seconds = work(conn, total)
        done = number(conn, "select count(*) from source_file")
    print(
        f"{done:,} jobs completed in {seconds:.1f} s: {done / seconds:.0f} a second\n"
    )

    for title, query in REPORT.items():
        print(title, flush=True)
        subprocess.run(
            ["psql", "-Xq", "-P", "pager=off", "-P", "footer=off", "-c", query],
            check=True,
        )
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
