"""Starts `python -m …` as subprocess.Popen does, by a fork of a Python that has imported pgqueue.

The import, of psycopg above all, is most of what a command costs, and the tests run a thousand. A
process from here has the command line, folder, environment, standard streams and parent that it
would have; only /proc shows the command line and environment of what was forked. It has also
imported pydantic, which most apps of tests do, and in the short form of the tests it ends without
taking Python apart, which costs as much as all that a short command does. Anything else, such as a
shell in front, or another package in the path, is started as always. So are the children of
supervisors.
"""

import atexit
import contextlib
import ctypes
import os
import pickle
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
PACKAGE = str(HERE.parents[1] / "python")
PATH = os.pathsep.join((str(HERE), PACKAGE))
SERVE = "import forked; forked.main()"
# What Python and psycopg look at when they start. (The path can be set later.)
SHAPE = ("PYTHON", "PSYCOPG", "LC_", "LANG")
LOCK = threading.Lock()


class Popen(subprocess.Popen):
    """Its options are the streams, text, cwd, env and start_new_session."""

    def _execute_child(self, args, *more) -> None:
        if not is_usual(args, more[5]):
            return super()._execute_child(args, *more)
        cwd, env, *streams, new_session = (more[n] for n in (4, 5, 9, 12, 14, 20))
        command = [os.fsdecode(arg) for arg in args]
        shape = {k: v for k, v in env.items() if v and k.startswith(SHAPE)}
        shape.pop("PYTHONPATH", None)
        with LOCK, tempfile.TemporaryFile() as request:
            pickle.dump((command, cwd, env), request)
            request.seek(0)
            channel = server(frozenset(shape.items()))
            fds = [n if fd == -1 else fd for n, fd in enumerate(streams)]
            adopt(True)
            what = b"session" if new_session else b"process"
            socket.send_fds(channel, [what], [request.fileno(), *fds])
            self.pid = int(channel.recv(20))
            adopt(False)
        self._child_created = True
        self._close_pipe_fds(*more[9:15])


def is_usual(args: list[str | bytes], env: dict[str, str]) -> bool:
    """Whether it can be forked: a module, with our package, on Linux."""
    folders = env.get("PYTHONPATH", "").split(os.pathsep)
    return (
        sys.platform == "linux"
        and args[:2] == [sys.executable, "-m"]
        and PACKAGE in folders
        and not any(Path(folder, "sitecustomize.py").exists() for folder in folders)
    )


def adopt(orphans: bool) -> None:
    """Be the parent of descendants whose own has ended, or leave them to init."""
    set_child_subreaper = 36
    assert ctypes.CDLL(None).prctl(set_child_subreaper, orphans, 0, 0, 0) == 0


@cache
def server(shape: frozenset[tuple[str, str]]) -> socket.socket:
    """Return the way to a process that can be forked; it ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    env = {k: v for k, v in os.environ.items() if not k.startswith(SHAPE)} | dict(shape)
    env["PYTHONPATH"] = PATH
    # Not seekable and no terminal: neither are, to Python, the streams of what it starts.
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    with theirs:
        subprocess.Popen([sys.executable, "-c", SERVE], env=env, **streams)
    return ours


def main() -> None:
    """Serve, and in each process forked for it run the module that was asked for."""
    statuses: list[int] = []
    # Before logging and others do: the last to be called.
    atexit.register(leave, statuses)
    import pgqueue.worker  # noqa: F401
    from pydantic import BaseModel, Field, validate_call  # noqa: F401

    module = serve()
    try:
        runpy._run_module_as_main(module)
        statuses.append(0)
    except SystemExit as end:
        if isinstance(end.code, int | None):
            statuses.append((end.code or 0) & 255)
        raise


def leave(statuses: list[int]) -> None:
    """End as Python would with this status, if it is known, but at once."""
    if statuses and not os.environ.get("PGQUEUE_TEST_LONG"):
        with contextlib.suppress(OSError, ValueError):  # Python says it
            for file in filter(None, (sys.stdout, sys.stderr)):
                file.flush()
            os._exit(statuses[-1])


def serve() -> str:
    """Fork for each request. Return there, as a child of the client, what module to run."""
    channel, client = socket.socket(fileno=os.dup(0)), os.getppid()
    while True:
        asked, fds, _, _ = socket.recv_fds(channel, 7, 4)
        if not asked:
            sys.exit()
        if not (between := os.fork()):
            if os.fork():
                os._exit(0)
            break
        os.waitpid(between, 0)
        for fd in fds:
            os.close(fd)
    while os.getppid() != client:
        time.sleep(0.0001)
    channel.send(str(os.getpid()).encode())
    channel.close()
    if asked == b"session":
        os.setsid()
    with open(fds[0], "rb") as request:
        command, cwd, env = pickle.load(request)
    for number, fd in enumerate(fds[1:]):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(cwd or ".")
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    first = [os.getcwd(), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[: 1 + len(PATH.split(os.pathsep))] = first
    sys.orig_argv[:] = command
    sys.argv[:] = command[1:2] + command[3:]
    return command[2]


def run(command: list[str | bytes], **options) -> subprocess.CompletedProcess[str]:
    """Run it to its end, and keep the text that it writes."""
    streams = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    with Popen(command, text=True, **streams, **options) as process:
        try:
            texts = process.communicate(timeout=150)
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, *texts)
