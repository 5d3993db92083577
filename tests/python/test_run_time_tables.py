"""The tables of docs/reference/worker.md against the code: both ways."""

import ast
import configparser
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pgqueue
import psycopg
import pytest
from conftest import one
from pgqueue import __main__ as commands
from pgqueue.worker import __main__ as worker
from pgqueue.worker import options
from worker_harness import QUEUE, wait_until

pytest_plugins = ["worker_harness", "command_line"]

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "pgqueue"
SECTION = (ROOT / "docs/reference/worker.md").read_text()


def table(head: str) -> list[list[str]]:
    """Find the table whose first heading this is, and return its rows."""
    start = SECTION.index(f"\n| {head} |")
    lines = SECTION[start:].lstrip().split("\n\n")[0].splitlines()
    assert re.fullmatch(r"[|-]+", lines[1])
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines[2:]]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def sources() -> Iterator[ast.AST]:
    for file in PACKAGE.rglob("*.py"):
        if file.name != "testing.py":
            yield from ast.walk(ast.parse(file.read_text()))


# Options and variables


@pytest.fixture
def bare(monkeypatch) -> None:
    for name in list(os.environ):
        if name.startswith("PGQUEUE_"):
            monkeypatch.delenv(name)


def test_the_option_table_has_every_worker_option_with_variable_and_default(
    bare,
) -> None:
    want = []
    for action in options.make_parser()._actions:
        if "--help" in action.option_strings:
            continue
        variable = re.findall(r"PGQUEUE_\w+", action.help or "")
        default = action.default
        if action.dest in ("check", "version") or not variable:
            default = ""
        elif isinstance(default, bool):
            default = "off"
        default = "" if default is None else str(default)
        want.append((action.option_strings, variable, default))
    found = [
        (quoted(names), quoted(variable), default.strip("`"))
        for names, variable, default, _ in table("option")
    ]
    assert found == want


def test_the_variable_tables_have_every_variable_that_the_code_reads() -> None:
    names = re.compile(r"PG[A-Z_]+|DATABASE_URL|NOTIFY_SOCKET")
    read = {
        node.value
        for node in sources()
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and names.fullmatch(node.value)
    } - {"PGQUEUE_"}  # the prefix of every option's variable
    told = {name for row in table("other variables") for name in quoted(row[0])}
    assert told | {"PGQUEUE_DSN"} == read


def test_the_command_table_has_every_command_with_its_arguments() -> None:
    (subparsers,) = (a for a in commands.make_parser()._actions if a.dest == "command")
    want = set()
    for name, command in subparsers.choices.items():
        takes = [a for a in command._actions if not a.option_strings]
        words = [
            f"[{a.dest.upper()}]" if a.nargs == "?" else a.dest.upper() for a in takes
        ]
        want.add(" ".join([name, *words]))
    found = [usage for row in table("command") for usage in quoted(row[0])]
    assert len(found) == len(want)
    assert set(found) == want


# Exit codes and signals

WORKER = ("pgqueue.worker", "--app", "worker_app")
NOWHERE, EMPTY = ("--dsn", "host=/nowhere"), ("--dsn", "dbname=template1")
CAUSES = [
    (0, [*WORKER, "--burst"]),
    (0, [*WORKER, "--burst", "--processes", "2"]),
    (0, ["pgqueue.worker", "--check"]),
    (0, ["pgqueue.worker", "--version"]),
    (0, ["pgqueue", "status"]),
    (1, [*WORKER, "--queue", "q" * 201]),
    (1, ["pgqueue.worker", "--check", *NOWHERE]),
    (1, ["pgqueue", *NOWHERE, "status"]),
    (1, ["pgqueue", "cancel", "1"]),
    (2, ["pgqueue.worker"]),
    (2, ["pgqueue.worker", "--app", "no_such_module"]),
    (2, ["pgqueue.worker", "--app", "no_such_module", "--processes", "2"]),
    (2, ["pgqueue", "--dsn", "nonsense", "status"]),
    (2, ["pgqueue", "no such command"]),
    (3, [*WORKER, *EMPTY]),
    (3, [*WORKER, *EMPTY, "--processes", "2"]),
    (3, ["pgqueue.worker", "--check", *EMPTY]),
    (3, ["pgqueue", *EMPTY, "status"]),
    (3, ["pgqueue", *EMPTY, "enqueue", "q"]),
]


@pytest.mark.sample(8)
@pytest.mark.parametrize(("code", "command"), CAUSES)
def test_each_cause_in_the_exit_code_table_exits_with_its_code(
    run, code, command
) -> None:
    done = run(*command)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout or done.stderr


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize(
    ("first", "second"),
    [(signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)],
)
def test_the_exit_code_after_two_signals_is_that_of_the_second(
    db, workers, processes, first, second
) -> None:
    pgqueue.enqueue_many(db, QUEUE, [None] * 2, kind="hold")
    args = ("--processes", processes, "--concurrency", "2" if processes == "1" else "1")
    process = workers.start(*args)
    workers.began(2)
    process.send_signal(first)
    wait_until(lambda: workers.log().count("is stopping") == int(processes))
    process.send_signal(second)
    assert process.wait(20) == 128 + second


def test_ctrl_c_ends_a_command_with_130(run, db, dsn, tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(30)
        host, port = silent.getsockname()
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pgqueue",
                "--dsn",
                f"host={host} port={port}",
                "top",
            ],
            env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
            cwd=tmp_path,
        )
        accepted, _ = silent.accept()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        accepted.close()


@pytest.mark.parametrize(
    "command",
    [["pgqueue", "status"], ["pgqueue", "health"], ["pgqueue.worker", "--check"]],
)
def test_a_command_that_waits_for_a_lock_ends_at_ctrl_c_with_130_and_no_word(
    db, dsn, tmp_path, command
) -> None:
    db.execute("begin; lock table pgqueue.job, pg_proc")
    waits = "select count(*) from pg_locks where not granted"
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent), "PGQUEUE_DSN": dsn},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    wait_until(lambda: one(db, waits) or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == (b"", b"")
    assert process.returncode == 130
    db.execute("rollback")


def test_every_exit_code_of_the_table_is_caused_by_a_test() -> None:
    told = {int(code) for row in table("exit code") for code in row[0].split(",")}
    by_signal = {128 + number for number in worker.BOTH}
    assert told == {code for code, _ in CAUSES} | by_signal


def test_the_signal_table_has_the_signals_that_are_handled() -> None:
    assert table("signal")[0][0].split(", ") == [s.name for s in worker.BOTH]


# Health, and who looks at it


def test_systemd_and_a_probe_see_the_signals_of_the_health_table(
    db, workers, tmp_path
) -> None:
    file = tmp_path / "alive"
    told = {quoted(row[0])[0] for row in table("sign")[1:]}
    heard = set()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(30)
        env = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        process = workers.start("--health-file", str(file), env=env)
        while "READY=1" not in heard:
            heard |= set(systemd.recv(1000).decode().splitlines())
        (probe,) = re.findall(r"`(test -n .*)`", SECTION)
        probe = probe.replace("HEALTH_FILE", shlex.quote(str(file)))
        assert subprocess.run(["sh", "-c", probe]).returncode == 0
        assert workers.finish(process) == 0
        while "STOPPING=1" not in heard:
            heard |= set(systemd.recv(1000).decode().splitlines())
    assert heard == told
    long_ago = time.time() - 120
    os.utime(file, (long_ago, long_ago))
    assert subprocess.run(["sh", "-c", probe]).returncode == 1


def unit() -> tuple[str, configparser.SectionProxy]:
    (text,) = re.findall(r"^```ini\n(.*?)^```", SECTION, re.M | re.S)
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read_string(text)
    return text, parser["Service"]


def test_the_systemd_unit_fits_the_options_and_exit_codes_of_the_worker(bare) -> None:
    _, service = unit()
    _, *args = shlex.split(service["ExecStart"])
    assert args[:2] == ["-m", "pgqueue.worker"]
    parsed = options.parse(args[2:])
    assert parsed.processes > 1
    assert (service["Type"], service["NotifyAccess"]) == ("notify", "all")
    assert int(service["TimeoutStopSec"]) >= parsed.shutdown_timeout + 5
    assert int(service["WatchdogSec"]) >= 10
    codes = {int(code) for code in service["RestartPreventExitStatus"].split()}
    assert codes == {2, 3}  # wrong usage, no schema: a restart does not help


def test_systemd_accepts_the_unit(tmp_path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze")
    text, service = unit()
    here = text.replace(shlex.split(service["ExecStart"])[0], sys.executable)
    file = tmp_path / "pgqueue-worker.service"
    file.write_text(here.replace(service["WorkingDirectory"], str(tmp_path)))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(file)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert file.name not in done.stderr, done.stderr


def test_the_dsn_in_the_systemd_unit_is_valid(bare) -> None:
    _, service = unit()
    name, _, dsn = service["Environment"].partition("=")
    assert name == "PGQUEUE_DSN"
    assert psycopg.conninfo.conninfo_to_dict(dsn)
