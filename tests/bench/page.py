"""results.md: what was measured, a section for each workload; also printed as it comes."""

import os
import platform
import re
from pathlib import Path

from bench import summary
from bench.server import number, session
from bench.systems import System


class Results:
    """The sections of this run, by heading, as they come."""

    def __init__(self, measured: list[System]) -> None:
        self.sections: dict[str, list[str]] = {}
        self.machine = machine()
        self.systems = {
            system.name: f"- **{f'{system.name} {system.version}'.strip()}**: {system.settings}"
            for system in measured
        }
        top = [self.machine, "", *self.systems.values()]
        print("\n".join(["", *top]), flush=True)

    def add(self, heading: str, lines: list[str]) -> None:
        self.sections[heading] = lines
        print("\n".join(["", f"## {heading}", "", *lines]), flush=True)

    def write(self) -> None:
        """Put sections and systems into results.md, where others stay, and make the page anew."""
        old = summary.RESULTS.read_text()
        sections = dict(re.findall(r"^## (.+)\n\n((?:(?!## |<!-- ).*\n)*)", old, re.M))
        for heading, lines in self.sections.items():
            sections[heading] = "\n".join([*lines, "", ""])
        text = "".join(
            f"## {heading}\n\n{lines}"
            for heading, lines in sorted(sections.items(), key=place)
        )
        systems = dict(re.findall(r"^(?=- \*\*([\w-]+))(.+(?:\n  .+)*)$", old, re.M))
        # Where others were measured stays, too.
        was = summary.parts(old, "results")[1].partition("\n")[0]
        where = self.machine if self.systems.keys() >= systems.keys() else was
        systems |= self.systems
        top = "\n".join([where, "", *systems.values(), "", ""])
        summary.RESULTS.write_text(summary.replaced(old, "results", top + text))
        summary.write()


def place(section: tuple[str, str]) -> tuple[float, str]:
    """Sections that begin with a number come first, in its order."""
    numbered = re.match(r"(\d+)(\w?)", section[0])
    return (int(numbered[1]), numbered[2]) if numbered else (float("inf"), section[0])


def machine() -> str:
    with session() as conn:
        version = number(conn, "show server_version_num")
        fsync = conn.execute("show fsync").fetchone()
    assert fsync
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
        f"fsync {fsync[0]}, on the same machine as the clients."
    )
