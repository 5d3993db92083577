"""What the judge's rules look at: the state after each commit, and the histories."""

from collections import defaultdict
from collections.abc import Iterable

from soak.commits import Change, Row, Transaction
from soak.history import Entry

ENDS = {"completed", "dead", "cancelled"}
ANY_END = ("ok", "fail", "unknown")  # of a call


class Court:
    """Replays the commits, and lets each rule look."""

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries
        self.lost_hints = max(e["lost_hints"] for e in entries if e["do"] == "plan")
        self.violations: dict[str, list[str]] = defaultdict(list)
        self.facts: dict[str, float] = defaultdict(float)
        self.jobs: dict[int, Row] = {}
        self.since: dict[int, float] = {}  # when its row was written last
        self.dead: dict[int, Row] = {}
        # How each job has ended, in order.
        self.ended: dict[int, list[str]] = defaultdict(list)
        # Of the current transaction.
        self.now: Transaction = Transaction(0)
        self.runs: dict[int, list[Row]] = {}
        self.died: dict[int, Row] = {}
        self.revived: set[int] = set()

    def violated(self, invariant: str, text: str) -> None:
        self.violations[invariant].append(text)

    def called(self, *what: str, end: Iterable[str] = ("ok",)) -> list[Entry]:
        return [e for e in self.entries if e["do"] in what and e["end"] in end]

    def replay(self, transactions: Iterable[Transaction], rules: list["Rule"]) -> None:
        for now in transactions:
            self.begin(now)
            for change in now.changes:
                self.apply(change, rules)
            for rule in rules:
                rule.commit(now)
        for rule in rules:
            rule.finish()

    def begin(self, now: Transaction) -> None:
        self.now, self.runs, self.died, self.revived = now, {}, {}, set()
        for change in now.changes:
            row = change.row
            if change.table == "run" and change.what == "INSERT":
                self.runs.setdefault(row["job_id"], []).append(row)
                if row["outcome"] in ENDS:
                    self.ended[row["job_id"]].append(row["outcome"])
            elif change.table == "dead_job" and change.what == "INSERT":
                self.died[row["id"]] = row
            elif change.table == "dead_job" and change.what == "DELETE":
                self.revived.add(row["id"])

    def apply(self, change: Change, rules: list["Rule"]) -> None:
        if change.table != "job":
            for rule in rules:
                rule.other(change)
            if change.table == "dead_job" and change.what == "INSERT":
                self.dead[change.row["id"]] = change.row
            elif change.table == "dead_job" and change.what == "DELETE":
                self.dead.pop(change.row["id"], None)
            return
        id = change.row["id"]
        old = self.jobs.get(id)
        new = None if change.what == "DELETE" else change.row
        if not (old or new):
            return self.violated("I1", f"{id} is gone, and never was there")
        if new:
            new["expires_at"], new["batch_id"] = read_terms(new["terms"])
        for rule in rules:
            rule.change(id, old, new)
        if new:
            self.jobs[id] = new
            self.since[id] = self.now.at
        else:
            self.jobs.pop(id, None)


def read_terms(terms: str | None) -> tuple[str | None, int | None]:
    if terms is None:
        return None, None
    expires_at, _, batch_id, _ = terms[1:-1].split(",", 3)
    return expires_at.strip('"') or None, int(batch_id) if batch_id else None


def is_claim(old: Row | None, new: Row | None) -> bool:
    """Whether a job got a lease. (Under caps the token comes first.)"""
    return bool(
        old
        and new
        and new["token"]
        and new["claimed_at"]
        and (old["token"], old["claimed_at"]) != (new["token"], new["claimed_at"])
    )


class Rule:
    """Looks at changes of jobs, at others, at the state after each commit, and at the end."""

    def __init__(self, court: Court) -> None:
        self.court = court
        self.prepare()

    def prepare(self) -> None:
        pass

    def change(self, id: int, old: Row | None, new: Row | None) -> None:
        pass

    def other(self, change: Change) -> None:
        pass

    def commit(self, now: Transaction) -> None:
        pass

    def finish(self) -> None:
        pass
