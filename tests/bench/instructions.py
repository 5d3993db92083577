"""Count the instructions of a call, with callgrind in a single-user server.

    python tests/bench/instructions.py [CHECKOUT]

Instructions do not depend on the hour, nor on who else uses the machine. Each figure is the
difference between a run with few and one with more calls, so that neither the start of the
server nor the first call, which makes the plans, is in it. Of this checkout, or of another one.
"""

import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent.parent
PAYLOAD = '{"user": 4711, "template": "welcome", "to": "ada@example.org"}'
MANY = f"array(select '{PAYLOAD}'::jsonb from generate_series(1, 100))"
# One transaction for each; a batch is taken and finished in one. What is counted, jobs in a call.
CALLS = {
    "enqueue": (f"select pgqueue.enqueue('q', '{PAYLOAD}')", 1),
    "claim and complete one": (
        "select pgqueue.complete(c.id, c.token) from pgqueue.claim('q', 'w') as c",
        1,
    ),
    "claim and complete 50": (
        "select count(*) from ("
        "select array_agg(id) as ids, array_agg(token) as tokens from pgqueue.claim('q', 'w', 50)"
        ") as c, pgqueue.complete_many(c.ids, c.tokens)",
        50,
    ),
    "bulk enqueue of 100": (
        f"select count(*) from pgqueue.enqueue_many('q', {MANY})",
        100,
    ),
}
FILL = f"select pgqueue.enqueue_many('q', {MANY}) from generate_series(1, 30)"
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


def main() -> None:
    checkout = Path(sys.argv[1]).resolve() if sys.argv[1:] else HERE
    spec = importlib.util.spec_from_file_location(
        "cluster", checkout / "tests/cluster.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, (call, jobs) in CALLS.items():
        with module.Cluster(fast=True) as cluster:
            cluster.stop()
            server = cluster._mirror(cluster.bindir) / "postgres"
            fill = f"create extension pgqueue;\n\n{FILL};\n\nvacuum analyze;\n\n"
            instructions(server, cluster.data, fill)
            few, more = (
                instructions(
                    server,
                    cluster.data,
                    f"prepare p as {call};\n\n" + "execute p;\n\n" * count,
                )
                for count in (WARM, WARM + MORE)
            )
        print(
            f"| {name}, for each job | {(more - few) / MORE / jobs:,.0f} |", flush=True
        )


if __name__ == "__main__":
    main()
