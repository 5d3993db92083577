"""make scale-demo, as far as Python does it."""

import re
import subprocess
import sys

import pytest
import scale_demo
from documents import REPO, text


@pytest.mark.long
def test_the_demo_of_shards_loses_no_job_and_stops_only_what_is_killed():
    made = subprocess.run(
        [sys.executable, REPO / "tests/scale_demo.py", "3"],
        capture_output=True,
        text=True,
    )
    if "the router needs PL/Proxy" in made.stderr:
        pytest.skip(made.stderr.strip())
    assert made.returncode == 0, made.stdout + made.stderr
    rows = [
        line.split() for line in made.stdout.splitlines() if re.match(r" +\d", line)
    ]
    assert len(rows) == scale_demo.SHARDS
    while_down = [int(row[3].replace(",", "")) for row in rows]
    # What was under way when the server was killed.
    assert min(while_down[:2]) > 20
    assert max(while_down[2:]) < min(while_down[:2])
    (numbers,) = re.findall(
        r"^([\d,]+) enqueued, ([\d,]+) completed", made.stdout, re.M
    )
    enqueued, completed = (int(number.replace(",", "")) for number in numbers)
    assert (
        enqueued <= completed <= enqueued + 4
    )  # whose answers were lost with the server


def test_the_page_shows_the_table_of_the_demo():
    shown = text("docs/shards.md").partition("<!-- scale-demo")[2]
    (head,) = (line for line in shown.splitlines() if line.startswith("shard"))
    assert re.split(r" {2,}", head) == list(scale_demo.HEAD)
