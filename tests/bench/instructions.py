"""Count the instructions of a call, with callgrind in a single-user server.

    make instructions                       of this checkout
    make instructions ARGS=/another/checkout
    make instructions ARGS=--write          into instructions.md, where the rest stays

Instructions do not depend on the hour, nor on who else uses the machine. Each figure is the
difference between a run with few and one with more calls, so that neither the start of the
server nor the first call, which makes the plans, is in it.
"""

import argparse
import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.statements import PGQUEUE, sized

HERE = Path(__file__).resolve().parent.parent.parent
PAGE = Path(__file__).with_name("instructions.md")
# One transaction for each; a batch is claimed and completed in one. What is counted, jobs in a call.
CALLS = {
    "enqueue, one transaction": (PGQUEUE.enqueue, 1),
    "claim and complete one job, one transaction": (
        f"select pgqueue.complete(c.id, c.token) from ({sized(PGQUEUE.claim, 1)}) as c",
        1,
    ),
    "claim and complete 50, for each job": (
        "select count(*) from (select array_agg(id) as ids, array_agg(token) as tokens "
        f"from ({sized(PGQUEUE.claim, 50)}) as j) as c, "
        "pgqueue.complete_many(c.ids, c.tokens)",
        50,
    ),
    "bulk enqueue of 100, for each job": (sized(PGQUEUE.bulk, 100), 100),
}
FILL = f"{sized(PGQUEUE.bulk, 100)};\n\n" * 30
WARM, MORE = 5, 20


def instructions(server: Path, data: Path, script: str) -> int:
    """Run a script in a single-user server; how many instructions that took."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["chmod", "777", folder], check=True)
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out"]
        command += [str(server), "--single", "-j", "-c", "fsync=off", "-D", str(data)]
        command += ["-c", "autovacuum=off", "postgres"]
        if data.owner() != "root" and Path.home() == Path("/root"):
            command = ["runuser", "-u", data.owner(), "--", *command]
        ran = subprocess.run(
            command, input=script, capture_output=True, text=True, cwd="/"
        )
        counted = re.search(r"Collected : (\d+)", ran.stderr)
        if ran.returncode or not counted or "ERROR" in ran.stderr:
            raise RuntimeError(ran.stderr)
        return int(counted[1])


def count(cluster: Any, call: str) -> float:
    """The instructions of one call in this cluster, which is stopped."""
    server = cluster._mirror(cluster.bindir) / "postgres"
    fill = f"create extension pgqueue;\n\n{FILL}vacuum analyze;\n\n"
    instructions(server, cluster.data, fill)
    prepare = f"prepare p as {call};\n\n"
    few, more = (
        instructions(server, cluster.data, prepare + "execute p;\n\n" * calls)
        for calls in (WARM, WARM + MORE)
    )
    return (more - few) / MORE


def written(page: str, found: Mapping[str, str]) -> str:
    """The page with these figures in the column "now" of its table."""
    for name, figure in found.items():
        row = rf"^(\| {re.escape(name)} \|[^|]*\|)[^|]*\|"
        page, changed = re.subn(row, rf"\1 {figure} |", page, flags=re.MULTILINE)
        assert changed == 1, f"instructions.md has lost its row of {name}"
    return page


def main() -> None:
    parser = argparse.ArgumentParser(prog="instructions", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("checkout", nargs="?", type=Path, default=HERE)
    parser.add_argument("--write", action="store_true", help="into instructions.md")
    options = parser.parse_args()
    program = options.checkout.resolve() / "tests/cluster.py"
    spec = importlib.util.spec_from_file_location("cluster", program)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = {}
    for name, (call, jobs) in CALLS.items():
        with module.Cluster(fast=True) as cluster:
            cluster.stop()
            found[name] = f"{count(cluster, call) / jobs:,.0f}"
        print(f"| {name} | {found[name]} |", flush=True)
    if options.write:
        PAGE.write_text(written(PAGE.read_text(), found))


if __name__ == "__main__":
    main()
