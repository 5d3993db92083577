"""The benchmark's page says what its results say and nothing else."""

import re
from types import SimpleNamespace

from bench import instructions, shards, summary
from bench.page import Results

FOLDER = summary.HERE

RESULTS = """
<!-- results -->
A machine.

## 1. Some work, at once

| workload | system | jobs/s | × best rival | CPU µs/job | WAL B/job |
|---|---|--:|--:|--:|--:|
| drain, 1 worker process | bare-sql | 9,000 | 3.00 | 1 | 2 |
| drain, 1 worker process | pgmq | 3,000 | 1.00 | 3 | 4 |
| drain, 1 worker process | pgqueue | 2,000 | **0.67** | 5 | 6 |
| drain, 1 worker process | pg-boss | 900 | 0.30 | 7 | 8 |

## 2. While a snapshot is held

| system | 9 | 10 | last / first | × best rival | CPU µs/job | WAL B/job |
|---|--:|--:|--:|--:|--:|--:|
| pgqueue | 10 (7.6) | 1,200 (1.0) | **12000 %** | **1.20** | 11 | 12 |
| pgmq | 4,000 (2.0) T | 1,000 (9.9) T | 25 % | 1.00 | 13 | 14 |

## 3. Pickup

| workload | system | p50 ms | p50 × best rival |
|---|---|--:|--:|
| one round trip | select 1 | 0.05 |  |
| pickup, from commit to handler | pgmq | 1.00 | 1.00 |
| pickup, from commit to handler | pgqueue | 1.50 | **1.50** |
| pickup, from commit to handler | chancy | 9.00 | 9.00 |

## Growth

| jobs ready | claim |
|--:|--:|
| 1,000 | 7.1 |

<!-- end of results -->
"""
PAGE = (
    "<!-- summary -->\n<!-- end of summary -->\n<!-- ahead -->\n<!-- end of ahead -->"
    "\n<!-- why -->\n<!-- end of why -->"
)


def test_the_page_and_the_plots_are_made_of_the_results():
    results, page = summary.RESULTS.read_text(), summary.PAGE.read_text()
    how = "make them anew: PYTHONPATH=tests python -m bench.summary"
    assert summary.page(page, results) == page, how
    for name, drawing in summary.plots(results).items():
        assert (FOLDER / name).read_text() == drawing, how


def test_to_measure_one_system_leaves_the_others_in_the_list(tmp_path, monkeypatch):
    old = summary.RESULTS.read_text()
    copy = tmp_path / "results.md"
    copy.write_text(old)
    monkeypatch.setattr(summary, "RESULTS", copy)
    monkeypatch.setattr(summary, "write", lambda: None)
    monkeypatch.setattr("bench.page.machine", lambda: "Another machine.")
    pgmq = SimpleNamespace(name="pgmq", version="99", settings="other settings")
    Results([pgmq]).write()
    listed = re.compile(r"^- \*\*.+(?:\n  .+)*$", re.M)
    before, after = listed.findall(old), listed.findall(copy.read_text())
    assert len(before) > 10
    assert after == [
        "- **pgmq 99**: other settings" if line.startswith("- **pgmq ") else line
        for line in before
    ]


def test_it_is_said_why_pgqueue_is_behind_wherever_it_is():
    assert summary.UNEXPLAINED not in summary.PAGE.read_text()
    lines = summary.reasons(
        {
            title: summary.Measured(
                "",
                {"pgqueue": summary.Figure("1", ""), "pgmq": summary.Figure(rate, "")},
            )
            for title, rate in (("drain a deep queue", "2"), ("x", "2"), ("y", "0.5"))
        }
    )
    assert lines == [
        f"- drain a deep queue: {summary.WHY['drain a ']}",
        f"- x: {summary.UNEXPLAINED}",
    ]


def test_the_guide_to_shards_follows_from_the_results():
    results, guide = summary.RESULTS.read_text(), shards.GUIDE.read_text()
    assert summary.parts(guide, "costs")[1]
    assert shards.page(guide, results) == guide


def test_machines_carry_what_the_price_of_a_job_leaves():
    row = "| {} | {} | 20 | 1,000 | 60 | 1,000 | 40 |"
    table = [
        f"| shards | call | {shards.CPU} | {shards.WAL} | {shards.ROUTED}"
        f" | routed, {shards.WAL} | {shards.OWN} |",
        "|--:|---|--:|--:|--:|--:|--:|",
        *(
            row.format(count, call)
            for count in shards.COUNTS
            for call in (*shards.CALLS, shards.DRAIN)
        ),
    ]
    results = "\n".join([f"## {shards.HEADING}", "", *table, ""])
    page = shards.page("<!-- costs -->\n<!-- end of costs -->", results)
    assert "| 8 shards | 20 / 60 + 40 |" in page
    # Half of eight cores: 4 s of CPU a second, of which a job takes 40 µs, or 80 through the router.
    assert "| 1 | 100,000 | 50,000 | 2.0 | 200 |" in page
    assert "| 8 | 800,000 | 400,000 | 16.0 | 200 |" in page


def test_a_round_on_a_busy_machine_is_compared_with_itself():
    """All costs of the second are three times those of the first, but the ratios are the same."""
    found = {
        (call, count, is_routed): [
            shards.Cost(busy * 10 * count, busy * 20 * is_routed, 1000)
            for busy in (1, 3, 1)
        ]
        for call in (*shards.CALLS, shards.DRAIN)
        for count in shards.COUNTS
        for is_routed in (False, True)
    }
    found[shards.KEYED, 8, False][0] = shards.Cost(240, 0, 1000)  # disturbed
    rows = shards.table(found, 3)
    assert f"| 8 | {shards.KEYED} | 80 | 1,000 | 80 | 1,000 | 20 |" in rows
    nothing = [shards.Cost(0, 0, 1000)]
    assert shards.middle(nothing, nothing) == nothing[0]


def test_each_row_of_the_summary_is_a_workload_of_the_results():
    assert set(summary.ROWS) <= set(summary.measured(summary.RESULTS.read_text()))


def test_the_summary_puts_pgqueue_beside_the_best_rival_and_says_who_is_ahead():
    lines = summary.page(PAGE, RESULTS).splitlines()
    assert lines[1] == "A machine."
    assert lines[5:8] == [
        "| [drain, 1 worker process](results.md#1-some-work-at-once)"
        " | 2,000 | pgmq 3,000 | 0.67 | 5 / 3 | 6 / 4 |",
        "| [pickup, from commit to handler](results.md#3-pickup)"
        " | 1.50 ms | pgmq 1.00 ms | 1.50 | – / – | – / – |",
        "| [drain while a snapshot is held, the last round]"
        "(results.md#2-while-a-snapshot-is-held)"
        " | 1,200 | pgmq 1,000 | 1.20 | 11 / 13 | 12 / 14 |",
    ]
    (ahead,) = (line for line in lines if line.startswith("- **"))
    assert ahead == (
        "- **pgmq**: drain, 1 worker process, 3,000 (2,000);"
        " pickup, from commit to handler, 1.00 ms (1.50 ms)"
    )
    assert lines[-3] == f"- pickup, from commit to handler: {summary.WHY['pickup']}"


def test_links_between_the_pages_of_the_benchmark_resolve():
    for page in FOLDER.glob("*.md"):
        links = re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text())
        assert links or page == summary.RESULTS, f"no link in {page.name}"
        for file, anchor in links:
            target = FOLDER / file if file else page
            assert target.exists(), f"{page.name}: {file}"
            if anchor:
                headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
                assert anchor in map(summary.anchor, headings), f"{page.name}: {anchor}"


def test_instructions_go_into_the_column_of_today():
    page = instructions.PAGE.read_text()
    found = {name: f"{place},000" for place, name in enumerate(instructions.CALLS, 1)}
    rows = instructions.written(page, found).splitlines()
    for name, figure in found.items():
        (row,) = [row.split(" | ") for row in rows if row.startswith(f"| {name} |")]
        (old,) = [
            r.split(" | ") for r in page.splitlines() if r.startswith(f"| {name} |")
        ]
        assert row == [old[0], old[1], figure, old[3]]
