"""What a client called, when, and what came of it: one line of JSON for each call.

do      what was called, with its arguments and what it returned
end     ok (it has committed), fail (it has not), or unknown (the session ended meanwhile)
start   seconds since 1970, before the call and, in end_at, after its commit
"""

import json
import threading
from pathlib import Path
from typing import Any

Entry = dict[str, Any]


class History:
    def __init__(self, folder: Path, who: str) -> None:
        self.who = who
        self.file = (folder / f"{who}.history").open("a", buffering=1)
        self.lock = threading.Lock()

    def write(self, entries: list[Entry]) -> None:
        with self.lock:
            for entry in entries:
                self.file.write(json.dumps({"who": self.who, **entry}) + "\n")


def read(folder: Path) -> list[Entry]:
    """All histories, in the order of their times."""
    entries = [
        json.loads(line)
        for path in folder.glob("*.history")
        for line in path.read_text().splitlines()
        # A killed process leaves half a line.
        if line.endswith("}")
    ]
    return sorted(entries, key=lambda entry: entry["start"])
