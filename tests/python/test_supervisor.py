"""The worker as a process: start, health, and several processes under a supervisor."""

import contextlib
import locale
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import forked
import pgqueue
import psycopg
import pytest
from conftest import LONG, one
from pgqueue.worker.health import Health
from pgqueue.worker.supervisor import SOCKET, Link
from worker_harness import QUEUE, RESTING, Workers, is_empty, outcomes, wait_until

pytest_plugins = ["worker_harness"]

# Apps that hang when they are imported, or when a worker starts.
SLOW_IMPORT = """
import os, pathlib, time
pathlib.Path(f"waits.{os.getpid()}").touch()
for _ in range(3000):  # one sleep would not notice a signal just before it
    time.sleep(0.1)
"""
DEAF_IMPORT = """
import os, pathlib, time
pathlib.Path(f"waits.{os.getpid()}").touch()
while True:
    try:
        time.sleep(0.1)
    except SystemExit:
        pass
"""
FAILS_LATER = """
import pathlib
if pathlib.Path("broken").exists():
    raise RuntimeError("half deployed")
from worker_app import app
"""
MOVES = """
import os
from worker_app import app
os.chdir("elsewhere")
"""
SLOW_START = """
import os, pathlib, time
import pgqueue
app = pgqueue.App()

@app.on_startup
def wait():
    pathlib.Path(f"waits.{os.getpid()}").touch()
    time.sleep(300)
"""


def children(pid: int) -> list[int]:
    return [
        int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ]


def wait_for_waiting(workers: Workers, count: int) -> None:
    wait_until(lambda: len(list(workers.folder.glob("waits.*"))) == count)


def left(workers: Workers) -> list[int]:
    """Find the processes of a test's workers that still run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(workers.ran).encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


class Systemd:
    """The socket at which systemd hears of a service."""

    def __init__(self, folder: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(folder / "notify"))
        self.socket.settimeout(30)
        self.env = {"NOTIFY_SOCKET": str(folder / "notify")}

    def wait_for(self, word: str) -> list[str]:
        """Wait for a word, and return all that came until then."""
        heard: list[str] = []
        while word not in heard:
            heard += self.socket.recv(1000).decode().splitlines()
        return heard

    def rest(self) -> list[str]:
        """Return all that has come, without waiting."""
        heard = []
        self.socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                heard += self.socket.recv(1000).decode().splitlines()
        return heard


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    found = Systemd(tmp_path)
    yield found
    found.socket.close()


# Start


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_signal_before_the_app_is_imported_ends_the_worker_with_0(
    db, workers, number, processes
) -> None:
    pgqueue.enqueue(db, QUEUE, kind="mark")
    (workers.folder / "slow.py").write_text(SLOW_IMPORT)
    worker = workers.start("--app", "slow", "--processes", processes)
    wait_for_waiting(workers, int(processes))
    if processes != "1":  # as systemd does, which signals every process
        for pid in children(worker.pid):
            os.kill(pid, number)
    worker.send_signal(number)
    assert worker.wait(30) == 0
    assert left(workers) == []
    assert one(db, "select attempt from pgqueue.jobs") == 0


def test_a_worker_starts_where_its_folder_has_been_deleted(db, workers) -> None:
    """As a supervisor restarts its children after a deployment has."""
    pgqueue.enqueue(db, QUEUE, kind="mark")
    leave = ("sh", "-c", 'mkdir gone; cd gone; rmdir ../gone; exec "$@"', "sh")
    args = "--burst", "--health-file", "alive"
    assert workers.start(*args, prefix=leave).wait(30) == 0
    assert "cannot touch the health file" in workers.log()
    assert one(db, "select outcome from pgqueue.run") == "completed"


def test_a_worker_that_is_process_1_ends_at_a_signal(db, workers) -> None:
    unshare = ("unshare", "--pid", "--fork", "--kill-child")
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("no namespace for processes can be made here")
    (workers.folder / "slow.py").write_text(SLOW_IMPORT)
    for args in ["--app", "slow"], []:
        worker = workers.start(*args, prefix=unshare)
        if args:
            wait_for_waiting(workers, 1)
        else:
            wait_until(lambda: "works on" in workers.log())
        (first,) = children(worker.pid)
        os.kill(first, signal.SIGTERM)
        assert worker.wait(30) == 0


def test_a_check_ended_by_a_signal_does_not_exit_with_0(
    workers,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(30)
        host, port = silent.getsockname()
        check = workers.start("--check", "--dsn", f"host={host} port={port}")
        accepted, _ = silent.accept()
        check.terminate()
        assert check.wait(30) == -signal.SIGTERM
        accepted.close()


def test_two_thousand_slots_are_not_two_thousand_threads(db, workers) -> None:
    worker = workers.start("--concurrency", "2000")
    job = pgqueue.enqueue(db, QUEUE, kind="mark")
    wait_until(lambda: job in workers.notes())
    status = Path(f"/proc/{worker.pid}/status").read_text()
    (threads,) = (line.split()[1] for line in status.splitlines() if "Threads" in line)
    assert int(threads) < 20
    ids = pgqueue.enqueue_many(db, QUEUE, [None] * 100, kind="mark")
    wait_until(lambda: set(ids) <= set(workers.notes()))
    assert workers.finish(worker) == 0


# Health


def test_systemd_hears_that_the_worker_is_ready_when_it_has_connected(
    db, workers, systemd
) -> None:
    with psycopg.connect(dbname="postgres", autocommit=True) as other:
        name = db.info.dbname
        other.execute(f"alter database {name} allow_connections false")
        worker = workers.start(env=systemd.env)
        wait_until(lambda: "waits for the server" in workers.log())
        for _ in range(3):
            assert systemd.wait_for("WATCHDOG=1") == ["WATCHDOG=1"]
        other.execute(f"alter database {name} allow_connections true")
    assert set(systemd.wait_for("READY=1")) == {"WATCHDOG=1", "READY=1"}
    assert "READY=1" not in systemd.wait_for("WATCHDOG=1")
    assert workers.finish(worker) == 0
    assert set(systemd.rest()) - {"WATCHDOG=1"} == {"STOPPING=1"}


def test_the_health_file_is_touched_as_long_as_the_worker_runs(
    db, workers, tmp_path
) -> None:
    file = tmp_path / "alive"
    worker = workers.start("--health-file", str(file))
    wait_until(file.exists)
    for _ in range(2):
        before = file.stat().st_mtime_ns
        wait_until(lambda: file.stat().st_mtime_ns > before)  # noqa: B023
    worker.send_signal(signal.SIGSTOP)
    # It may be touching the file until it has stopped.
    wait_until(lambda: "T (stopped)" in Path(f"/proc/{worker.pid}/status").read_text())
    before = file.stat().st_mtime_ns
    other = workers.start("--burst")
    assert other.wait(30) == 0
    assert file.stat().st_mtime_ns == before
    worker.send_signal(signal.SIGCONT)
    assert workers.finish(worker) == 0


def test_the_health_file_is_touched_while_a_worker_starts(db, workers) -> None:
    (workers.folder / "hangs.py").write_text(SLOW_START)
    file = workers.folder / "alive"
    workers.start("--app", "hangs", "--health-file", str(file))
    wait_for_waiting(workers, 1)
    wait_until(file.exists)
    before = file.stat().st_mtime_ns
    wait_until(lambda: file.stat().st_mtime_ns > before)


def test_the_health_file_is_where_the_worker_was_started(db, workers) -> None:
    (workers.folder / "elsewhere").mkdir()
    (workers.folder / "moves.py").write_text(MOVES)
    worker = workers.start("--app", "moves", "--health-file", "alive")
    wait_until((workers.folder / "alive").exists)
    assert workers.finish(worker) == 0


def test_the_health_file_is_written_whatever_the_locale_is(tmp_path) -> None:
    file, before = tmp_path / "alive", locale.setlocale(locale.LC_ALL)
    locale.setlocale(locale.LC_ALL, "C")
    try:
        Health(str(file), lambda: None)(True, ["été: ok"])
    finally:
        locale.setlocale(locale.LC_ALL, before)
    assert file.read_text("utf-8") == "été: ok\n"


def test_a_health_file_that_cannot_be_touched_is_logged_once(
    db, workers, systemd
) -> None:
    file = str(workers.folder / "no such folder" / "alive")
    worker = workers.start("--health-file", file, env=systemd.env)
    for _ in range(3):
        systemd.wait_for("WATCHDOG=1")
    assert workers.log().count("cannot touch the health file") == 1
    assert workers.finish(worker) == 0


# Several processes


def test_a_killed_child_is_replaced(db, workers) -> None:
    parent = workers.start("--processes", "2", "--lease", "1")
    wait_until(lambda: workers.log().count("works on") == 2)
    before = children(parent.pid)
    os.kill(before[0], signal.SIGKILL)
    wait_until(lambda: workers.log().count("works on") == 3)
    after = children(parent.pid)
    assert (len(after), before[1] in after, before[0] in after) == (2, True, False)
    assert f"process {before[0]} ended with SIGKILL: restarting" in workers.log()
    assert workers.finish(parent) == 0
    assert left(workers) == []


SCRIPT = f"""
import os, signal, sys
from pgqueue.worker.__main__ import main
signal.alarm(120)
depth = int(os.environ.get("DEPTH", 0))
if depth > 1:
    sys.exit("a child has children")
os.environ["DEPTH"] = str(depth + 1)
sys.exit(main(["--app", "worker_app", "--queue", "{QUEUE}", "--processes", "2"]))
"""


# Children that say nothing for 5 seconds hang, not only after a minute.
IMPATIENT = """
from pgqueue.worker import supervisor
supervisor.HANG, supervisor.LOOK = 5.0, 0.5
"""


def start_script(workers: Workers, text: str, **env: str) -> subprocess.Popen[bytes]:
    (workers.folder / "script.py").write_text(text)
    ours = {"PGQUEUE_DSN": workers.dsn, "PYTHONPATH": forked.PATH, **env}
    with (workers.folder / "log").open("ab") as log:
        parent = subprocess.Popen(
            [sys.executable, "script.py"],
            cwd=workers.folder,
            env={**os.environ, **ours, "RAN": str(workers.ran)},
            stderr=log,
        )
    workers.processes.append(parent)
    wait_until(lambda: workers.log().count("works on") == 2)
    return parent


def test_a_script_that_calls_for_several_processes_has_no_more(db, workers) -> None:
    parent = start_script(workers, SCRIPT)
    assert [children(child) for child in children(parent.pid)] == [[], []]
    assert workers.finish(parent) == 0
    assert left(workers) == []


def test_a_killed_child_is_replaced_where_the_parent_ignores_the_ends_of_children(
    db, workers
) -> None:
    prefix = ("sh", "-c", "trap '' CHLD; exec \"$@\"", "sh")
    parent = workers.start("--processes", "2", prefix=prefix)
    wait_until(lambda: workers.log().count("works on") == 2)
    killed = children(parent.pid)[0]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: workers.log().count("works on") == 3)
    assert f"process {killed} ended with SIGKILL: restarting" in workers.log()
    assert workers.finish(parent) == 0


def test_an_exit_code_that_a_handler_has_made_ends_only_its_child(db, workers) -> None:
    parent = workers.start("--processes", "2", "--lease", "1")
    wait_until(lambda: workers.log().count("works on") == 2)
    for restarts, code in enumerate((0, 2, 3), 1):
        before = set(children(parent.pid))
        pgqueue.enqueue(db, QUEUE, {"code": code}, kind="exits", max_attempts=1)
        wait_until(lambda: workers.log().count("works on") == 2 + restarts)  # noqa: B023
        assert f" ended with {code}: restarting" in workers.log()
        assert len(before & set(children(parent.pid))) == 1
    pgqueue.enqueue_many(db, QUEUE, [None] * 10, kind="mark")
    wait_until(lambda: outcomes(db)["completed"] == 10)
    assert workers.finish(parent) == 0


def test_a_burst_goes_on_after_a_handler_that_exits_with_0(db, workers) -> None:
    pgqueue.enqueue(db, QUEUE, {"code": 0}, kind="exits", max_attempts=1, priority=1)
    pgqueue.enqueue_many(db, QUEUE, [None] * 10, kind="mark")
    args = "--processes", "2", "--lease", "1", "--concurrency", "1", "--burst"
    assert workers.start(*args).wait(30) == 0
    assert workers.log().count(" ended with 0: restarting") == 1
    assert outcomes(db)["completed"] == 10


def test_a_child_that_has_emptied_its_queue_is_not_restarted_beside_one_at_work(
    db, workers
) -> None:
    pgqueue.enqueue_many(db, QUEUE, [None] * 2, kind="hold")
    args = "--processes", "3", "--concurrency", "1", "--burst"
    parent = workers.start(*args)
    workers.began(2)
    wait_until(lambda: " ends: no jobs" in workers.log())
    wait_until(lambda: "restarting" in workers.log() or len(children(parent.pid)) == 2)
    assert "restarting" not in workers.log()
    workers.let_go()
    assert parent.wait(30) == 0


def test_an_app_that_can_no_more_be_imported_leaves_the_other_children_alone(
    db, workers
) -> None:
    (workers.folder / "later.py").write_text(FAILS_LATER)
    parent = workers.start("--app", "later", "--processes", "2")
    wait_until(lambda: workers.log().count("works on") == 2)
    pgqueue.enqueue(db, QUEUE, kind="mark")
    wait_until(lambda: outcomes(db) == {"completed": 1})
    killed, left_alone = children(parent.pid)
    broken = workers.folder / "broken"
    broken.touch()
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: "ended with 2: restarting" in workers.log())
    assert left_alone in children(parent.pid)
    broken.unlink()
    wait_until(lambda: workers.log().count("works on") == 3)
    assert workers.finish(parent) == 0


@pytest.mark.parametrize("processes", ["1", "2"])
def test_an_app_that_ends_python_is_wrong_usage(db, workers, processes) -> None:
    (workers.folder / "quits.py").write_text("raise SystemExit(0)")
    worker = workers.start("--app", "quits", "--processes", processes)
    assert worker.wait(30) == 2
    assert "importing quits ended Python: exit(0)" in workers.log()


def test_a_child_whose_handlers_hold_all_slots_is_replaced(db, workers) -> None:
    db.execute("select pgqueue.configure(null, retry_base => '1 hour')")
    parent = workers.start("--processes", "2", "--concurrency", "1")
    wait_until(lambda: workers.log().count("works on") == 2)
    before = set(children(parent.pid))
    pgqueue.enqueue(db, QUEUE, kind="hangs")
    wait_until(lambda: "ended with 1: restarting" in workers.log())
    wait_until(lambda: workers.log().count("works on") == 3)
    assert len(before & set(children(parent.pid))) == 1
    pgqueue.enqueue_many(db, QUEUE, [None] * 10, kind="mark")
    wait_until(lambda: outcomes(db) == {"retry": 1, "completed": 10})
    assert workers.finish(parent) == 0


def test_a_signal_while_the_supervisor_starts_its_children_is_not_lost(
    db, workers
) -> None:
    for count in range(1, 5) if LONG else (1, 3):
        parent = workers.start("--processes", "4")
        wait_until(lambda: len(children(parent.pid)) >= count)  # noqa: B023
        assert workers.finish(parent) == 0
        assert left(workers) == []


@pytest.mark.parametrize("processes", ["1", "2"])
def test_sigterm_and_sigint_at_the_same_time_count_as_one(
    db, workers, processes
) -> None:
    pgqueue.enqueue(db, QUEUE, kind="hold")
    worker = workers.start("--processes", processes)
    workers.began()
    for number in signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGCONT:
        worker.send_signal(number)
    wait_until(lambda: "is stopping" in workers.log())
    workers.let_go()
    assert worker.wait(30) == 0
    assert outcomes(db) == {"completed": 1}


def test_the_children_of_a_killed_supervisor_finish_their_jobs_and_end(
    db, workers
) -> None:
    pgqueue.enqueue_many(db, QUEUE, [None] * 2, kind="hold")
    parent = workers.start("--processes", "2", "--concurrency", "1")
    workers.began(2)
    parent.kill()
    parent.wait(20)
    wait_until(lambda: workers.log().count("is stopping") == 2)
    workers.let_go()
    wait_until(lambda: left(workers) == [])
    assert outcomes(db) == {"completed": 2}
    assert is_empty(db)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_repeated_signals_end_a_worker_whatever_it_waits_for(
    db, workers, processes
) -> None:
    (workers.folder / "hangs.py").write_text(SLOW_START)
    worker = workers.start("--app", "hangs", "--processes", processes)
    wait_for_waiting(workers, int(processes))
    wait_until(lambda: worker.send_signal(signal.SIGTERM) or worker.poll() is not None)
    assert worker.wait(20) == 128 + signal.SIGTERM
    wait_until(lambda: left(workers) == [])


def test_children_that_import_their_app_end_when_the_supervisor_is_told_to(
    db, workers
) -> None:
    (workers.folder / "slow.py").write_text(SLOW_IMPORT)
    parent = workers.start("--app", "slow", "--processes", "2")
    wait_for_waiting(workers, 2)
    assert workers.finish(parent, 15) == 0
    assert left(workers) == []


def test_a_second_signal_kills_children_that_cannot_be_told(db, workers) -> None:
    (workers.folder / "deaf.py").write_text(DEAF_IMPORT)
    parent = workers.start("--app", "deaf", "--processes", "2")
    wait_for_waiting(workers, 2)
    wait_until(lambda: parent.send_signal(signal.SIGTERM) or parent.poll() is not None)
    assert parent.wait(20) == 128 + signal.SIGTERM
    wait_until(lambda: left(workers) == [])


def test_a_third_signal_kills_children_that_do_not_react(db, workers) -> None:
    parent = workers.start("--processes", "2")
    wait_until(lambda: one(db, RESTING) == 2)
    for pid in children(parent.pid):
        os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: parent.send_signal(signal.SIGTERM) or parent.poll() is not None)
    assert parent.wait(20) == 128 + signal.SIGTERM
    assert left(workers) == []


def test_children_that_do_not_end_in_time_are_killed(db, workers) -> None:
    parent = workers.start("--processes", "2", "--shutdown-timeout", "0.5")
    wait_until(lambda: one(db, RESTING) == 2)
    for pid in children(parent.pid):
        os.kill(pid, signal.SIGSTOP)
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(20) == 0
    assert left(workers) == []
    assert workers.log().count("does not end: killed") == 2


def test_a_child_that_hangs_is_killed_and_replaced(db, workers) -> None:
    """The interpreter is held in C, so that neither signals nor its threads can do anything."""
    pgqueue.enqueue(db, QUEUE, kind="holds_interpreter")
    env = {"PGQUEUE_LEASE": "1", "PGQUEUE_SHUTDOWN_TIMEOUT": "1"}
    parent = start_script(workers, IMPATIENT + SCRIPT, **env)
    before = set(children(parent.pid))
    (hung,) = workers.began()
    wait_until(lambda: f"process {hung} hangs, for " in workers.log())
    wait_until(
        lambda: f"process {hung} ended with SIGKILL: restarting" in workers.log()
    )
    wait_until(lambda: workers.log().count("works on") >= 3)
    assert len(before & set(children(parent.pid))) <= 1


def test_a_child_that_hangs_is_left_alone_as_long_as_its_lease(db, workers) -> None:
    for scope, lease in (("", "1 second"), (", kind => 'hold'", "1 hour")):
        configure = f"select pgqueue.configure(%s{scope}, lease => %s)"
        db.execute(configure, (QUEUE, lease))
    pgqueue.enqueue(db, QUEUE, kind="hold")
    env = {"PGQUEUE_CONCURRENCY": "1", "PGQUEUE_SHUTDOWN_TIMEOUT": "1"}
    parent = start_script(workers, IMPATIENT + SCRIPT, **env)
    workers.began()
    worker = one(db, "select worker from pgqueue.running")
    pgqueue.enqueue(db, QUEUE, kind="mark")  # for the other one
    wait_until(lambda: outcomes(db) == {"completed": 1})
    both = set(children(parent.pid))
    (busy,) = [pid for pid in both if f":{pid}:" in worker]
    for pid in both:
        os.kill(pid, signal.SIGSTOP)
    (idle,) = both - {busy}
    wait_until(
        lambda: f"process {idle} ended with SIGKILL: restarting" in workers.log()
    )
    wait_until(lambda: workers.log().count("works on") == 3)
    assert f"process {busy} " not in workers.log()
    workers.let_go()
    os.kill(busy, signal.SIGCONT)
    wait_until(lambda: outcomes(db) == {"completed": 2})
    assert workers.finish(parent) == 0


def test_children_do_not_hang_if_all_processes_were_stopped(db, workers) -> None:
    """As by a container that is paused."""
    parent = start_script(workers, IMPATIENT + SCRIPT)
    both = children(parent.pid)
    for pid in parent.pid, *both:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(6)  # the time is what is tested
    for pid in parent.pid, *both:
        os.kill(pid, signal.SIGCONT)
    pgqueue.enqueue_many(db, QUEUE, [None] * 10, kind="mark")
    wait_until(lambda: outcomes(db) == {"completed": 10})
    assert sorted(children(parent.pid)) == sorted(both)
    assert workers.finish(parent) == 0
    assert "hangs" not in workers.log()


def test_a_child_waits_for_its_supervisor_whatever_the_default_timeout_is(
    monkeypatch,
) -> None:
    """As Django's settings may set one, which are read before."""
    told: SimpleQueue[str] = SimpleQueue()
    ours, theirs = socket.socketpair()
    monkeypatch.setenv(SOCKET, str(theirs.detach()))
    socket.setdefaulttimeout(0)
    try:
        Link().listen(told.put)
    finally:
        socket.setdefaulttimeout(None)
    with ours:
        ours.send(b".")
        assert told.get(timeout=10) == "told by its supervisor"
    assert told.get(timeout=10) == "without its supervisor"


def test_a_child_that_cannot_be_started_is_tried_again(db, workers) -> None:
    parent = workers.start("--processes", "2")
    wait_until(lambda: workers.log().count("works on") == 2)
    limits = resource.prlimit(parent.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(parent.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
    os.kill(children(parent.pid)[0], signal.SIGKILL)
    wait_until(lambda: "no new process: " in workers.log())
    assert len(children(parent.pid)) == 1
    resource.prlimit(parent.pid, resource.RLIMIT_NOFILE, limits)
    wait_until(lambda: len(children(parent.pid)) == 2)
    assert workers.finish(parent) == 0


def test_a_worker_waits_while_it_may_open_no_more_files(db, workers) -> None:
    worker = workers.start()
    wait_until(lambda: one(db, RESTING))
    limits = resource.prlimit(worker.pid, resource.RLIMIT_NOFILE)
    used = {int(fd) for fd in os.listdir(f"/proc/{worker.pid}/fd")}
    one_is_left = sorted(set(range(len(used) + 2)) - used)[1]  # for a socket
    resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, (one_is_left, limits[1]))
    pgqueue.enqueue(db, QUEUE, kind="noop")
    wait_until(lambda: "for the server: [Errno 24] Too many open" in workers.log())
    resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, limits)
    wait_until(lambda: outcomes(db) == {"completed": 1})
    assert workers.finish(worker) == 0


def test_systemd_learns_of_the_end_only_from_the_supervisor(
    db, workers, systemd
) -> None:
    parent = workers.start("--processes", "2", "--max-jobs", "1", env=systemd.env)
    systemd.wait_for("READY=1")
    pgqueue.enqueue_many(db, QUEUE, [None] * 2, kind="mark")
    wait_until(lambda: workers.log().count("works on") == 4)
    heard = systemd.rest()
    assert "WATCHDOG=1" in heard
    assert "STOPPING=1" not in heard
    assert workers.finish(parent) == 0
    assert systemd.rest().count("STOPPING=1") == 1
