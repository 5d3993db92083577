"""The figures of README.md and its two plots, made of nothing but what stands in results.md.

`PYTHONPATH=tests python -m bench.summary` makes them anew without measuring anything.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from bench import plot
from bench.client import DEEP, SHALLOW
from bench.systems import SYSTEMS

HERE = Path(__file__).parent
PAGE, RESULTS = HERE / "README.md", HERE / "results.md"
OURS = "pgqueue"
ORDER = [system.name for system in SYSTEMS]
RIVALS = [name for name in ORDER if name not in (OURS, f"{OURS}-alone", "bare-sql")]
HELD = "drain while a snapshot is held, the last round"

# What the page shows, a workload or two of each section.
ROWS = (
    "enqueue one a commit, 8 clients",
    "enqueue with commits of 2 ms, nobody waits",
    "enqueue 100,000 in one call",
    "drain, 1 worker process",
    "pickup, from commit to handler",
    "drain, handlers that sleep 2–5 ms, 32 at once",
    HELD,
    DEEP,
    "claim and complete by 1, 8 clients",
    "claim and complete by 50, 8 clients",
    "drain by 50 beside jobs extended each second",
    "drain by 50, 1,000 queues",
    "drain payloads of 100,000 B",
    "drain groups of 10, one job of each at a time",
    "drain groups of 10 behind a large one",
    "jobs of 10 steps",
    "jobs that wait for an event, which is emitted once all do",
)

# Why pgqueue is behind where it may be, by how the workload's title begins. A workload in which
# it is behind without a reason here fails a test.
WHY = {
    "enqueue 100,000 in one call": "besides its payload, a job has a kind, a priority, keys and attempts, and an"
    " index in the order in which jobs are claimed; a message in pgmq is a payload and two times.",
    "pickup": "the rivals' workers are in Node, whose loop starts a handler sooner than Python's; all of them wait"
    " for the same NOTIFY and for the round trip of a claim.",
    "drain, handlers that sleep": "because of Node's timers, see below.",
    "drain a ": "pgqueue is called in SQL here, 50 jobs at a time, and pg-boss and graphile-worker by their own workers,"
    " 500 at a time; pgmq has no priorities, and writes no log of runs.",
    "claim and complete by 1": "a claim and a completion are calls in PL/pgSQL that first ask for settings, limits,"
    " pauses and expired leases: most of the work for one job, and next to nothing for each of fifty. On a machine that"
    " was nearly twice as fast, pgqueue was ahead.",
    "claim and complete by 50": "for the same reason as with a deep queue.",
    "drain by 50": "for the same reason again.",
    "enqueue payloads": "the server parses the payload into jsonb and tries to compress it, which takes nearly all"
    " of the time. pgqueuer sends bytes; it and chancy were given half as many jobs.",
    "drain payloads": "a claim turns jsonb into text again, and a completion deletes the payload; graphile-worker"
    " stores text, and pg-boss deletes later.",
    "drain groups of 10": "each claim and each completion writes rows that say whose turn it is and what runs, so that"
    " limits hold in whatever order sessions commit; pgmq locks while it reads.",
}

UNEXPLAINED = "not explained yet."

Row = dict[str, str]  # of a table, by the titles of its columns


@dataclass(frozen=True)
class Figure:
    """What one system reached at one workload, each cell as results.md has it."""

    value: str
    ratio: str  # to the best rival
    cpu: str = "–"
    wal: str = "–"
    unit: str = ""

    @property
    def speed(self) -> float:
        """To compare by: jobs a second, or the inverse of a time."""
        value = float(self.value.replace(",", ""))
        return 1 / value if self.unit else value

    def __str__(self) -> str:
        return self.value + self.unit


@dataclass(frozen=True)
class Measured:
    """One workload: its figures by system, and the heading under which they stand."""

    heading: str
    figures: dict[str, Figure] = field(default_factory=dict)

    @property
    def rivals(self) -> dict[str, Figure]:
        return {name: each for name, each in self.figures.items() if name in RIVALS}

    def link(self, text: str) -> str:
        return f"[{text}](results.md#{anchor(self.heading)})"


def write() -> None:
    """Make the page and the plots anew."""
    results = RESULTS.read_text()
    PAGE.write_text(page(PAGE.read_text(), results))
    for name, drawing in plots(results).items():
        (HERE / name).write_text(drawing)


def page(text: str, results: str) -> str:
    """The page with the figures of these results."""
    found = {
        title: workload
        for title, workload in measured(results).items()
        if OURS in workload.figures and workload.rivals
    }
    machine = parts(results, "results")[1].partition("\n")[0]
    lines = [machine, "", *beside(found), ""]
    text = replaced(text, "summary", "\n".join(lines))
    text = replaced(text, "ahead", "\n".join([*ahead(found), ""]))
    return replaced(text, "why", "\n".join([*reasons(found), ""]))


def beside(found: dict[str, Measured]) -> list[str]:
    """The summary: pgqueue beside the best rival."""
    lines = [
        "| workload | pgqueue | best rival | ratio | CPU µs/job | WAL B/job |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for title in ROWS:
        if (workload := found.get(title)) is None:
            continue
        rivals = workload.rivals
        best = max(rivals, key=lambda name: rivals[name].speed)
        ours, theirs = workload.figures[OURS], rivals[best]
        cells = [workload.link(title), str(ours), f"{best} {theirs}"]
        cells += [ours.ratio]
        cells += [f"{ours.cpu} / {theirs.cpu}", f"{ours.wal} / {theirs.wal}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def ahead(found: dict[str, Measured]) -> list[str]:
    """Where a rival was ahead, however little: its figure, and ours."""
    lines = []
    for name in RIVALS:
        wins = [
            f"{title}, {rival} ({ours})"
            for title, workload in found.items()
            if (rival := workload.figures.get(name))
            and rival.speed > (ours := workload.figures[OURS]).speed
        ]
        if wins:
            lines.append(f"- **{name}**: {'; '.join(wins)}")
    return lines


def reasons(found: dict[str, Measured]) -> list[str]:
    """Why pgqueue is behind where a rival was ahead."""
    behind = [
        title
        for title, workload in found.items()
        if any(
            rival.speed > workload.figures[OURS].speed
            for rival in workload.rivals.values()
        )
    ]
    lines = []
    for begin, why in WHY.items():
        titles = [title for title in behind if title.startswith(begin)]
        if titles:
            lines.append(f"- {'; '.join(titles)}: {why}")
        behind = [title for title in behind if title not in titles]
    return lines + [f"- {title}: {UNEXPLAINED}" for title in behind]


def plots(results: str) -> dict[str, str]:
    """The two drawings, by the name of their file."""
    held = {
        row["system"]: [number(cell) for title, cell in row.items() if title.isdigit()]
        for rows in tables(results).values()
        for row in rows
        if "last / first" in row
    }
    found = measured(results)
    deep, shallow = (found[title].figures for title in (DEEP, SHALLOW))
    shares = {
        name: 100 * deep[name].speed / shallow[name].speed
        for name in ORDER
        if name in deep
    }
    title = "Jobs per second in each round, while a snapshot is held"
    drawn = {"held.svg": plot.lines(title, held)}
    title = "Rate before a deep queue, in % of that before a shallow one"
    return {**drawn, "deep.svg": plot.bars(title, shares)}


def measured(results: str) -> dict[str, Measured]:
    """All workloads, by title."""
    found: dict[str, Measured] = {}
    for heading, rows in tables(results).items():
        for row in rows:
            if system := row.get("system"):
                title = row.get("workload", HELD)
                workload = found.setdefault(title, Measured(heading))
                assert system not in workload.figures, f"{title} stands twice"
                workload.figures[system] = figure(row)
    return found


def figure(row: Row) -> Figure:
    """Jobs a second, of the last round where there are several; of pickup, a time."""
    if "p50 ms" in row:
        return Figure(row["p50 ms"], row["p50 × best rival"], unit=" ms")
    rounds = [cell for title, cell in row.items() if title.isdigit()]
    value = rounds[-1].split()[0] if rounds else row["jobs/s"]
    return Figure(value, row["× best rival"], row["CPU µs/job"], row["WAL B/job"])


def tables(results: str) -> dict[str, list[Row]]:
    """The rows of all tables of each section, by heading."""
    found: dict[str, list[Row]] = {}
    titles: list[str] = []
    for line in results.splitlines():
        cells = [cell.strip(" *") for cell in line.split("|")[1:-1]]
        if line.startswith("## "):
            rows = found[line[3:]] = []
        elif not cells:
            titles = []
        elif not titles:
            titles = cells
        elif not set(line) <= set("|-:"):
            rows.append(dict(zip(titles, cells, strict=True)))
    return found


def number(cell: str) -> float:
    """The first number of a cell, "30,496 (7.6) T"."""
    return float(cell.split()[0].replace(",", ""))


def anchor(heading: str) -> str:
    """As GitHub names a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def parts(text: str, name: str) -> tuple[str, str, str]:
    """What stands before, between and behind the two marks of this name."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, _, rest = text.partition(begin)
    inside, found, after = rest.partition(end)
    assert found, f"the marks of {name} are lost"
    return before + begin, inside, end + after


def replaced(text: str, name: str, inside: str) -> str:
    """The text with something else between its two marks of this name."""
    before, _, after = parts(text, name)
    return before + inside + after


if __name__ == "__main__":
    write()
