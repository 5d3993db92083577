"""The layers of sql/: a function calls its own file and those before it in the Makefile's list.

And of the Python package: no circle between its modules, and none of client and worker too long to read.

What is read is text: every name is qualified (pgqueue.name), and a body stands between two lines
that hold $$. Comments and quoted texts are no code.
"""

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]

# Where a lower layer has news for a higher one: one function for each kind, and what it may call there.
ANNOUNCEMENTS = {
    # A job has ended.
    "_after_end": {"_count_ends", "_cut_ties", "_look_at_batches"},
    # A new job waits for others.
    "enqueue": {"_wait_for"},
    # Attempts end, some of them to wait.
    "_finish_each": {"_suspend"},
    # A worker claims or rests: schedules may be due, and loose ends.
    "_look_around": {"_fire_due", "_tie_loose_ends"},
}

LIST = re.compile(r"^(?:TABLES|FUNCTIONS) +=((?:.*\\\n)*.*)", re.M)
ITEM = re.compile(
    r"^create (?:or replace )?(?:(?:function|procedure) pgqueue\.(\w+)(\(.*?^\$\$;$)|view pgqueue\.(\w+)(.*?;$))",
    re.M | re.S,
)
NO_CODE = re.compile(r"--[^\n]*|'(?:[^']|'')*'")
NAME = re.compile(r"\bpgqueue\.(\w+)(?=(\()?)")


def files() -> list[str]:
    """The files of sql/ in the Makefile's order, as layer/file."""
    lists = LIST.findall((REPO / "Makefile").read_text())
    return re.findall(r"sql/(\w+/\w+)\.sql", " ".join(lists))


def sources() -> dict[str, str]:
    return {name: (REPO / f"sql/{name}.sql").read_text() for name in files()}


def calls(texts: Mapping[str, str]) -> Iterator[tuple[str, str, str, str]]:
    """Who calls whom: a function or view and its file, then the one it calls and that one's file."""
    items = {}
    for file, text in texts.items():
        for function, body, view, query in ITEM.findall(text):
            items[function or view] = file, bool(view), NO_CODE.sub("''", body or query)
    for name, (file, _, code) in items.items():
        for found in NAME.finditer(code):
            other, is_call = found.groups()
            # A view is named without parentheses; a call of what is not there is found elsewhere.
            if other in items and other != name and bool(is_call) != items[other][1]:
                yield name, file, other, items[other][0]


def upward(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """The calls that go to a later file."""
    place = {file: nth for nth, file in enumerate(texts)}
    found: dict[str, set[str]] = {}
    for name, file, other, its_file in calls(texts):
        if place[its_file] > place[file]:
            found.setdefault(name, set()).add(other)
    return found


def test_the_makefile_lists_every_file_layer_by_layer():
    there = {
        str(path.relative_to(REPO / "sql").with_suffix(""))
        for path in REPO.glob("sql/*/*.sql")
        if path.parent.name not in ("ops", "upgrade")
    }
    assert sorted(files()) == sorted(there)
    modules = {file.split("/")[1] for file in there}
    assert len(modules) == len(there)
    layers = [file.split("/")[0] for file in files()]
    assert layers == sorted(layers, key=layers.index)


def test_the_calls_are_found():
    found = {(name, other) for name, _, other, _ in calls(sources())}
    assert len(found) > 300
    assert {
        ("complete", "_after_end"),
        ("status", "jobs"),
        ("queues", "_count_jobs"),
    } <= found


def test_no_function_calls_a_later_file_but_to_announce_something():
    assert upward(sources()) == ANNOUNCEMENTS


@pytest.mark.parametrize(
    ("file", "name", "other"),
    [
        ("base/wake", "_wake", "claim"),
        ("limits/permit", "_make_permits", "_pick_groups"),
        ("core/enqueue", "enqueue", "_cut_ties"),
        ("observe/measure", "_count_jobs", "status"),
    ],
)
def test_a_call_upward_is_found(file, name, other):
    texts = sources()
    head, body = texts[file].split(f"create or replace function pgqueue.{name}(", 1)
    body = body.replace("\nbegin\n", f"\nbegin\n    perform pgqueue.{other}(1);\n", 1)
    # Named in a comment or a text it is none.
    body = body.replace(
        "\nbegin\n",
        "\nbegin\n    -- pgqueue.health()\n    note := 'pgqueue.health()';\n",
        1,
    )
    texts[file] = f"{head}create or replace function pgqueue.{name}({body}"
    expected = {**ANNOUNCEMENTS, name: ANNOUNCEMENTS.get(name, set()) | {other}}
    assert upward(texts) == expected


def test_a_view_that_is_read_further_down_is_found():
    texts = sources()
    texts["flow/cron"] += (
        "\ncreate or replace function pgqueue._new()\n    returns void\n    language plpgsql\n"
        "as $$\nbegin\n    perform from pgqueue.queues;\nend;\n$$;\n"
    )
    assert upward(texts) == {**ANNOUNCEMENTS, "_new": {"queues"}}


def test_every_private_function_says_what_it_does():
    """In a comment right above it; those of public ones are in the catalog."""
    silent = [
        name
        for text in sources().values()
        for before, name in re.findall(
            r"(^.*)\ncreate or replace function pgqueue\.(_\w+)", text, re.M
        )
        if not before.startswith("-- ")
    ]
    assert silent == []


def test_every_module_has_a_file_of_sql_tests():
    modules = {file.split("/")[1] for file in files()}
    tests = {path.stem for path in (REPO / "tests/sql").glob("*.sql")}
    assert tests == modules | {"conventions"}


# The Python package: client and worker, without what is optional and the command lines.

PACKAGE = REPO / "python/pgqueue"
APART = ("testing", "django", "dashboard", "tracing", "__main__", "terminal")


def modules() -> dict[str, Path]:
    """All modules by their names."""
    paths = [path.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("*.py")]
    names = {".".join(path.with_suffix("").parts): path for path in paths}
    return {
        name.removesuffix(".__init__"): PACKAGE.parent / path
        for name, path in names.items()
    }


def imports(path: Path, known: Collection[str]) -> set[str]:
    """The modules of ours that one imports, wherever it does: also for a type checker."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            both = {f"{node.module}.{each.name}" for each in node.names}
            found |= both & set(known) or {node.module}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return found & set(known)


def test_no_module_of_the_package_imports_itself_through_others() -> None:
    paths = modules()
    order = TopologicalSorter({m: imports(path, paths) for m, path in paths.items()})
    order.prepare()  # raises CycleError
    assert {"pgqueue.worker.dispatcher", "pgqueue.client"} <= set(paths)


def test_no_module_of_client_and_worker_is_longer_than_250_lines() -> None:
    lines = {
        name: len(path.read_text().splitlines())
        for name, path in modules().items()
        if not set(name.split(".")) & set(APART)
    }
    assert len(lines) > 30
    assert {name: n for name, n in lines.items() if n > 250} == {}
