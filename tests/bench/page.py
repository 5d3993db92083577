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
        self.top = [machine(), ""]
        for system in measured:
            name = f"{system.name} {system.version}".strip()
            self.top.append(f"- **{name}**: {system.settings}")
        print("\n".join(["", *self.top]), flush=True)

    def add(self, heading: str, lines: list[str]) -> None:
        self.sections[heading] = lines
        print("\n".join(["", f"## {heading}", "", *lines]), flush=True)

    def write(self) -> None:
        """Put the sections into results.md, where others stay, and make the page anew."""
        old = summary.RESULTS.read_text()
        sections = dict(re.findall(r"^## (.+)\n\n((?:(?!## |<!-- ).*\n)*)", old, re.M))
        for heading, lines in self.sections.items():
            sections[heading] = "\n".join([*lines, "", ""])
        text = "".join(
            f"## {heading}\n\n{lines}"
            for heading, lines in sorted(sections.items(), key=place)
        )
        top = "\n".join([*self.top, "", ""])
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
