"""Runs the two command lines as a shell does. PYTEST_DONT_REWRITE, as for worker_harness."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import forked
import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(dsn: str, tmp_path: Path) -> Run:
    """Run a module, in an empty folder, on the test's database; keywords are variables."""

    def run(
        module: str, *args: str | bytes, **env: str
    ) -> subprocess.CompletedProcess[str]:
        ours = {"PYTHONPATH": f"{tmp_path}:{forked.PATH}", "PGQUEUE_DSN": dsn}
        command = [sys.executable, "-m", module, *args]
        return forked.run(command, env={**os.environ, **ours, **env}, cwd=tmp_path)

    return run
