"""What the short form leaves out is drawn by a number that is printed, and the long form has it all."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
TESTS = """
import pytest


@pytest.mark.sample(3)
@pytest.mark.parametrize("n", range(50))
def test_some(n): ...


@pytest.mark.long
def test_long(): ...


@pytest.mark.parametrize("n", range(5))
def test_every(n): ...


@pytest.fixture
def dsn(lost_hints): ...


@pytest.mark.loses_hints
@pytest.mark.parametrize("n", range(8))
def test_hints(dsn, n): ...


@pytest.mark.loses_hints
@pytest.mark.sample(6)
@pytest.mark.parametrize("n", range(40))
def test_some_hints(dsn, n): ...
"""


@pytest.fixture
def run(tmp_path):
    """Run the tests above; return what each test's cases were, and the number."""
    (tmp_path / "test_it.py").write_text(TESTS)
    config = HERE.parents[1] / "python" / "pyproject.toml"
    command = [sys.executable, "-m", "pytest", "-c", config, "--rootdir", tmp_path]

    def run(
        what: str = "test_it.py", **env: str
    ) -> tuple[dict[str, list[str]], str | None]:
        done = subprocess.run(
            [*command, "-v", "-v", "-p", "conftest", tmp_path / what],
            env={"PYTHONPATH": str(HERE), **env},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        cases: dict[str, list[str]] = {}
        for name, case in re.findall(r"::test_(\w+)(\[.*\])? PASSED", done.stdout):
            cases.setdefault(name, []).append(case)
        printed = re.search(r"PGQUEUE_TEST_SAMPLE=(\d+)", done.stdout)
        return cases, printed and printed[1]

    return run


def test_of_many_cases_the_short_form_has_some_and_the_long_one_all(run) -> None:
    cases, number = run()
    counts = {name: len(found) for name, found in cases.items()}
    # Each of the last ones once as it is, and of those with lost hints a quarter: of a sample, a quarter of it.
    assert counts == {"some": 3, "every": 5, "hints": 8 + 2, "some_hints": 6 + 2}
    assert run(PGQUEUE_TEST_SAMPLE=number) == (cases, number)
    others, _ = run(PGQUEUE_TEST_SAMPLE=f"{number}0")
    assert others != cases
    long, _ = run(PGQUEUE_TEST_LONG="1")
    counts = {name: len(found) for name, found in long.items()}
    every = {"some": 50, "long": 1, "every": 5, "hints": 8 * 6, "some_hints": 40 * 6}
    assert counts == every


def test_a_test_that_is_named_runs_with_all_its_cases(run) -> None:
    cases, _ = run("test_it.py::test_some")
    assert {name: len(found) for name, found in cases.items()} == {"some": 50}
