"""Where results go: the terminal; and, when asked, the page README.md and its plots."""

import os
import platform
import re
from pathlib import Path

from bench import plot
from bench.client import DEEP, SHALLOW
from bench.report import Rounds, rates
from bench.server import number, session
from bench.systems import System

PAGE = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- results -->\n", "<!-- end of results -->"


class Result:
    """The sections of results, by heading, as they come."""

    def __init__(self, machine: str, measured: list[System]) -> None:
        self.sections: dict[str, list[str]] = {}
        self.plots: dict[str, str] = {}
        self.top = [machine, ""]
        for system in measured:
            told = f"{system.name} {system.version}".strip()
            self.top.append(f"- **{told}**: {system.configuration}")
        print("\n".join(["", *self.top]), flush=True)

    def add(self, heading: str, lines: list[str]) -> None:
        self.sections[heading] = lines
        print("\n".join(["", f"### {heading}", "", *lines]), flush=True)

    def plot(self, name: str, rounds: Rounds) -> None:
        if name == "held":
            found = {n: list(values.values()) for n, values in rates(rounds).items()}
            title = "Jobs a second in each round, while a snapshot is held"
            self.plots["held.svg"] = plot.lines(title, found)
        if name == "deep":
            shares = {
                n: 100 * values[DEEP] / values[SHALLOW]
                for n, values in rates(rounds).items()
            }
            title = "Rate before a deep queue, in % of that before a shallow one"
            self.plots["deep.svg"] = plot.bars(title, shares)

    def write(self) -> None:
        """Put what there is between the two marks of the page; other sections stay."""
        before, begin, rest = PAGE.read_text().partition(BEGIN)
        old, end, after = rest.partition(END)
        assert begin and end, "README.md has lost its marks"
        found = dict(re.findall(r"^### (.+)\n\n((?:(?!### ).*\n)*)", old, re.MULTILINE))
        new = {
            heading: "\n".join([*lines, "", ""])
            for heading, lines in self.sections.items()
        }
        text = "".join(
            f"### {heading}\n\n{lines}"
            for heading, lines in sorted((found | new).items(), key=place)
        )
        top = "\n".join([*self.top, "", ""])
        PAGE.write_text(before + begin + top + text + end + after)
        for name, drawing in self.plots.items():
            PAGE.with_name(name).write_text(drawing)


def place(section: tuple[str, str]) -> tuple[float, str]:
    """Sections that begin with a number come first, in its order."""
    numbered = re.match(r"(\d+)(\w?)", section[0])
    return (int(numbered[1]), numbered[2]) if numbered else (float("inf"), section[0])


def machine() -> str:
    with session() as conn:
        version = number(conn, "show server_version_num")
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return (
        f"{os.cpu_count()} × {model}; Postgres {version // 10000}.{version % 10000}, "
        "fsync on, on the same machine as the clients."
    )
