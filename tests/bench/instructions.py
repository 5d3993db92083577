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
ONE = f"select pgqueue.complete(c.id, c.token) from ({sized(PGQUEUE.claim, 1)}) as c"
FIFTY = (
    "select count(*) from (select array_agg(id) as ids, array_agg(token) as tokens "
    f"from ({sized(PGQUEUE.claim, 50)}) as j) as c, pgqueue.complete_many(c.ids, c.tokens)"
)
PLAIN = f"{sized(PGQUEUE.bulk, 100)};\n\n" * 30
GROUPS = (
    "select count(*) from pgqueue.enqueue_many('bench', array_fill('{}'::jsonb, array[3000]), "
    "group_keys => array(select 'group ' || n % 500 from generate_series(1, 3000) as n));\n\n"
)
LIMITED = f"select pgqueue.configure('bench', group_limit => 1);\n\n{GROUPS}"
CAPPED = f"select pgqueue.configure('bench', max_running => 1000);\n\n{PLAIN}"
OWN = "select pgqueue.configure('bench', max_attempts => 3, retry_base => '1 second');\n\n"
# In a real install others use something.
ELSEWHERE = (
    """
select pgqueue.configure('other', max_attempts => 3, group_limit => 2);
select pgqueue.configure('other', kind => 'k', max_running => 2);
select pgqueue.schedule('nightly', 'other', cron => '0 3 1 1 *');
select pgqueue.enqueue('other', batch_id => pgqueue.create_batch('other'));
select pgqueue.enqueue('other', after => array[pgqueue.enqueue('other')]);
""".strip().replace(";\n", ";\n\n")
    + "\n\n"
)
TABLE = "create table changed (id bigint generated always as identity primary key, status text, note text);\n\n"
TRIGGER = (
    "create trigger enqueues after insert on changed for each row "
    "execute function pgqueue.enqueue_row('queue=bench');\n\n"
)
INSERT = "insert into changed (status, note) values ('new', 'a note')"
HELD = f"{PLAIN}select from pgqueue.claim('bench', 'w', lease => '1 day');\n\n"
STEP = """select pgqueue.save_step(1, 1, clock_timestamp()::text, '{"a": 1}')"""
WAIT = (
    "select pgqueue.suspend(c.id, c.token, e.name), pgqueue.emit(e.name) "
    f"from ({sized(PGQUEUE.claim, 1)}) as c, concat('event ', c.token) as e (name)"
)
# Jobs 1 to 1000, each held under the token that is its id.
THOUSAND = (
    f"{PLAIN}select from pgqueue.claim('bench', 'w', 1000, lease => '1 day');\n\n"
    "update pgqueue.job set token = id where token is not null;\n\ncreate sequence number;\n\n"
)
SUSPEND = (
    "select pgqueue.suspend(n, n, concat('event ', n)) from nextval('number') as n"
)
SUSPENDED = f"{THOUSAND}select pgqueue.suspend(n, n, concat('event ', n)) from generate_series(1, 1000) as n;\n\n"
EMIT = "select pgqueue.emit(concat('event ', n)) from nextval('number') as n"
SHARD = "select pgqueue.shard(3);\n\n"
# The first id is its own: 1, and on the shard 3.
BATCH = f"select pgqueue.create_batch('bench');\n\n{PLAIN}"
INTO_A_BATCH = (
    "select count(*) from pgqueue.enqueue_many('bench', array_fill('{{}}'::jsonb, array[100]), "
    "batch_id => {})"
)
PURGE = (
    "select pgqueue.purge('gone') from (select count(*) from "
    "pgqueue.enqueue_many('gone', array_fill('{}'::jsonb, array[100]))) as added"
)
ENQUEUE_INTO_A_GROUP = "select pgqueue.enqueue('bench', group_key => 'group 7')"
# One transaction for each; a batch is claimed and completed in one. What is counted, jobs in a call, and
# what is there before.
CALLS = {
    "enqueue, one transaction": (PGQUEUE.enqueue, 1, PLAIN),
    "claim and complete one job, one transaction": (ONE, 1, PLAIN),
    "claim and complete 50, for each job": (FIFTY, 50, PLAIN),
    "bulk enqueue of 100, for each job": (sized(PGQUEUE.bulk, 100), 100, PLAIN),
    "enqueue, all else used elsewhere": (PGQUEUE.enqueue, 1, ELSEWHERE + PLAIN),
    "claim and complete one, all else used elsewhere": (ONE, 1, ELSEWHERE + PLAIN),
    "claim and complete 50, all else used elsewhere": (FIFTY, 50, ELSEWHERE + PLAIN),
    "enqueue, own settings": (PGQUEUE.enqueue, 1, OWN + PLAIN),
    "claim and complete one, own settings": (ONE, 1, OWN + PLAIN),
    "claim and complete 50, own settings": (FIFTY, 50, OWN + PLAIN),
    "enqueue into one of 500 groups": (ENQUEUE_INTO_A_GROUP, 1, GROUPS),
    "claim and complete one job of 500 groups": (ONE, 1, GROUPS),
    "claim and complete 50 of 500 groups": (FIFTY, 50, GROUPS),
    "enqueue into a group with a limit": (ENQUEUE_INTO_A_GROUP, 1, LIMITED),
    "claim and complete one, group_limit 1": (ONE, 1, LIMITED),
    "claim and complete 50, group_limit 1": (FIFTY, 50, LIMITED),
    "insert of a row, no trigger": (INSERT, 1, TABLE + PLAIN),
    "insert of a row, a trigger enqueues it": (INSERT, 1, TABLE + TRIGGER + PLAIN),
    "save_step, one transaction": (STEP, 1, HELD),
    "claim one job, one transaction": (sized(PGQUEUE.claim, 1), 1, PLAIN),
    "suspend for an event, one transaction": (SUSPEND, 1, THOUSAND),
    "emit an event that a job waits for, one transaction": (EMIT, 1, SUSPENDED),
    "claim, suspend and emit, and what makes it due": (WAIT, 1, PLAIN),
    "claim and complete one, max_running 1000": (ONE, 1, CAPPED),
    "claim and complete 50, max_running 1000": (FIFTY, 50, CAPPED),
    "enqueue on a shard": (PGQUEUE.enqueue, 1, SHARD + PLAIN),
    "claim and complete one on a shard": (ONE, 1, SHARD + PLAIN),
    "claim and complete 50 on a shard": (FIFTY, 50, SHARD + PLAIN),
    "bulk enqueue of 100 into a batch": (INTO_A_BATCH.format(1), 100, BATCH),
    "bulk enqueue of 100 into a batch on a shard": (
        INTO_A_BATCH.format(3),
        100,
        SHARD + BATCH,
    ),
    "bulk enqueue and purge of 100": (PURGE, 100, PLAIN),
    "bulk enqueue and purge of 100 on a shard": (PURGE, 100, SHARD + PLAIN),
}
# What claims do some times a second, whatever they return: under valgrind that would be every one.
REST = (
    "select setval(c.oid::regclass, (extract(epoch from clock_timestamp()) * 1000000)::bigint - 1577836741000000) "
    "from pg_class as c where c.relname in ('_cell_groups_due', '_cell_due');\n\n"
    "select pgqueue._note_lanes('bench', pgqueue._due_lanes('bench', clock_timestamp()), "
    "clock_timestamp() - interval '1 minute');\n\n"
)
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


def count(cluster: Any, call: str, before: str) -> float:
    """The instructions of one call in this cluster, which is stopped."""
    server = cluster._mirror(cluster.bindir) / "postgres"
    fill = f"create extension pgqueue;\n\n{before}vacuum analyze;\n\n"
    instructions(server, cluster.data, fill)
    prepare = f"{REST}prepare p as {call};\n\n"
    # The first run finds the server's caches on disk as the fill left them.
    _, few, more = (
        instructions(server, cluster.data, prepare + "execute p;\n\n" * calls)
        for calls in (WARM, WARM, WARM + MORE)
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
    for name, (call, jobs, before) in CALLS.items():
        with module.Cluster(fast=True) as cluster:
            cluster.stop()
            found[name] = f"{count(cluster, call, before) / jobs:,.0f}"
        print(f"| {name} | {found[name]} |", flush=True)
    if options.write:
        PAGE.write_text(written(PAGE.read_text(), found))


if __name__ == "__main__":
    main()
