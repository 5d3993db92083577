"""Empty a queue of quick jobs, do real work, and show what an operator would look at.

The real work: count the functions in the Python files of the standard library. Three more
files cannot be read, so their jobs end dead. Needs the server that PGHOST, PGPORT and
PGUSER name; `make demo` starts one.
"""

import contextlib
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pgqueue
import psycopg
from tqdm import tqdm

QUICK = 20_000
SETUP = """
create extension pgqueue;
create table source_file (path text primary key, lines int, functions int, classes int);
select pgqueue.configure('sources', max_attempts => 3, retry_base => '500 ms');
"""
TESTS = 100  # at most, of the library's own tests: some Pythons bring a thousand
# From the first claim to the last completion, by the log of runs.
DRAINED = """
select count(*), extract(epoch from max(finished_at) - min(finished_at - taken))::float8
from pgqueue.run where queue = 'quick' and outcome = 'completed'"""
REPORT = {
    "The queues (pgqueue.queues)": """
        select queue, ready, running, dead, finished_last_hour as completed,
            failed_last_hour as failed
        from pgqueue.queues order by queue""",
    "The kinds of real jobs (pgqueue.kinds)": """
        select kind, runs, failures,
            round(extract(epoch from p50_taken) * 1000) as p50_ms,
            round(extract(epoch from p99_taken) * 1000) as p99_ms
        from pgqueue.kinds where queue = 'sources' order by kind""",
    "The dead letters (pgqueue.dead_job)": """
        select id, attempt as attempts, split_part(error, ':', 1) as error,
            right(payload ->> 'path', 16) as path
        from pgqueue.dead_job order by id desc limit 3""",
    "What the jobs stored (source_file)": """
        select count(*) as files, sum(lines) as lines, sum(functions) as functions,
            sum(classes) as classes
        from source_file""",
}

Connection = psycopg.Connection[tuple[Any, ...]]


def work(conn: Connection, *options: str) -> Iterator[int]:
    """Run a worker until no job waits or runs; yield how many do, ten times a second."""
    command = [sys.executable, "-m", "pgqueue.worker", "--app", "demo.app", *options]
    # A failed attempt would be a line on stderr: the tables show it.
    worker = subprocess.Popen([*command, "--log-level", "critical"])
    left = 1
    try:
        while left:
            time.sleep(0.1)
            if worker.poll() is not None:
                sys.exit(f"the worker stopped with exit code {worker.returncode}")
            for (left,) in conn.execute("select count(*) from pgqueue.jobs"):
                yield left
    finally:
        worker.terminate()
        worker.wait()


def do_nothing(conn: Connection) -> None:
    print(f"{QUICK:,} jobs that do nothing: the cost of the queue itself", flush=True)
    began = time.monotonic()
    pgqueue.enqueue_many(conn, "quick", [{}] * QUICK, kind="ping")
    print(f"    enqueued in {time.monotonic() - began:.1f} s, in one transaction")
    for _ in work(conn, "--queue", "quick"):
        pass
    for done, seconds in conn.execute(DRAINED):
        rate = f"{done / seconds:,.0f} jobs a second"
        print(f"    completed by one worker in {seconds:.1f} s: {rate}\n")


def sources() -> tuple[list[str], list[str]]:
    """Name the standard library's files, and those of its tests."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    library: list[str] = []
    tests: list[str] = []
    for path in sorted(stdlib.rglob("*.py")):
        if "site-packages" not in path.parts:
            is_test = {"test", "tests"} & set(path.parts)
            (tests if is_test else library).append(str(path))
    # And three that cannot be read: no file, no folder, no source code.
    library += ["/no/such/file.py", "/dev/null/no.py", sys.executable]
    return library, tests[:TESTS]


def count_functions(conn: Connection) -> None:
    library, tests = sources()
    total = len(library) + len(tests)
    print(f"{total:,} real jobs: count the functions in files of the standard library")
    began = time.monotonic()
    with conn.transaction():
        for kind, paths in {"count_test": tests, "count_library": library}.items():
            payloads = [{"path": path} for path in paths]
            pgqueue.enqueue_many(conn, "sources", payloads, kind=kind)
    with tqdm(total=total, unit="job", ncols=80, file=sys.stdout, disable=None) as bar:
        for left in work(conn, "--queue", "sources", "--processes", "2"):
            bar.update(total - left - bar.n)
    seconds = time.monotonic() - began
    print(f"    done by two worker processes in {seconds:.1f} s, retries included\n")


def sum_lines(conn: Connection) -> None:
    paths = sources()[0][:-3]
    print(
        f"One long job that reports its progress: sum the lines of {len(paths)} files"
    )
    job_id = pgqueue.enqueue(conn, "sums", {"paths": paths}, kind="sum_lines")
    with tqdm(total=len(paths), ncols=80, file=sys.stdout, disable=None) as bar:
        for left in work(conn, "--queue", "sums"):
            done = pgqueue.status(conn, job_id).done if left else len(paths)
            bar.update(max(0, int(done or 0) - bar.n))
    print(f"    its result: {pgqueue.wait(conn, job_id).result}\n")


def main() -> None:
    with psycopg.connect(autocommit=True) as conn:
        conn.execute(SETUP)
        version = conn.info.server_version // 10_000
        print(f"pgqueue in a throwaway Postgres {version}\n")
        do_nothing(conn)
        count_functions(conn)
        sum_lines(conn)
    for title, query in REPORT.items():
        print(title, flush=True)
        psql = ["psql", "-Xq", "-P", "pager=off", "-P", "footer=off", "-c", query]
        subprocess.run(psql, check=True)
    if sys.stdin.isatty():
        names = ("PGHOST", "PGPORT", "PGUSER")
        where = " ".join(f"{name}={os.environ[name]}" for name in names)
        print(f"Look further while this server runs:\n    {where} psql")
        with contextlib.suppress(EOFError):
            input("Enter stops it and removes it. ")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
