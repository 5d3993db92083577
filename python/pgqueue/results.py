"""How the jobs have ended for which another one has waited."""

import copyreg
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Result:
    """How a job has ended that another one has waited for."""

    id: int
    kind: str | None
    # completed, dead, cancelled; gone if unknown; None: it waits or runs
    outcome: str | None
    result: Any  # decoded JSON, of a completed job


class Portable(Exception):
    """Can be pickled and copied, although its `__init__` takes other things than the message."""

    def __reduce__(self) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class NotCompleted(Portable):
    """Some of the jobs that this one has waited for died, or were cancelled."""

    def __init__(self, results: list[Result]) -> None:
        self.results = results
        bad = [r for r in results if r.outcome != "completed"]
        named = ", ".join(f"{r.id} ({r.outcome})" for r in bad[:5])
        more = f", and {len(bad) - 5} more" if len(bad) > 5 else ""
        super().__init__(f"jobs that did not complete: {named}{more}")
