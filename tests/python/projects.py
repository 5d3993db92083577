"""Somebody's project, in a folder of its own and as real processes.

A module that tests import from: PYTEST_DONT_REWRITE, or pytest warns.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import forked
import pgqueue

PACKAGE = Path(pgqueue.__file__).parents[1]


class Project:
    """Files, and the Python programs that run among them."""

    program: tuple[str, ...] = ()  # what the arguments of all commands are for

    def __init__(self, folder: Path, **env: str) -> None:
        self.folder = folder
        self.env = {k: v for k, v in os.environ.items() if "PGQUEUE" not in k} | env
        self.processes: list[subprocess.Popen[bytes]] = []

    def write(self, name: str, *texts: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(texts))

    def try_to(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a program to its end."""
        command = [sys.executable, *self.program, *args]
        return forked.run(command, cwd=self.folder, env={**self.env, **env})

    def run(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a program that has to end well."""
        done = self.try_to(*args, **env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def start(self, *args: str, **env: str) -> subprocess.Popen[bytes]:
        """Start a program, which ends with the test."""
        command = [sys.executable, *self.program, *args]
        process = forked.Popen(
            command, cwd=self.folder, env={**self.env, **env}, start_new_session=True
        )
        self.processes.append(process)
        return process

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(20)
