"""A test that hangs, and then its fixtures, are cut; the run goes on, and ends."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
HANGS = """
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

never = threading.Event()


@pytest.fixture
def hangs_at_its_end():
    yield
    never.wait()


def test_hangs_twice(hangs_at_its_end):
    with ThreadPoolExecutor() as pool:
        pool.submit(the_pool_waits_for_this)
        never.wait()


def the_pool_waits_for_this():
    never.wait()


@pytest.mark.usefixtures("hangs_at_its_end")
def test_fails():
    raise AssertionError


def test_passes():
    never.set()
"""


def test_one_that_hangs_is_cut_with_the_stacks_of_all_threads(tmp_path) -> None:
    (tmp_path / "test_hangs.py").write_text(HANGS)
    config = HERE.parents[1] / "python" / "pyproject.toml"
    command = [sys.executable, "-m", "pytest", "-c", config, "--rootdir", tmp_path]
    done = subprocess.run(
        [*command, "-p", "conftest", "--timeout", "1", tmp_path],
        env={"PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "2 failed, 1 passed, 2 errors" in done.stdout, done.stdout + done.stderr
    assert "in the_pool_waits_for_this" in done.stdout
