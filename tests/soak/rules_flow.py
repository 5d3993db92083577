"""Batches, jobs that wait for others, and schedules."""

import re
from collections import Counter, defaultdict
from datetime import datetime, timedelta

from soak.commits import Change, Row, Transaction
from soak.court import Rule, is_claim


class Batches(Rule):
    """B: a batch finishes once, when all its jobs have ended, with the right counts, and has one callback."""

    def prepare(self) -> None:
        self.live: dict[int, set[int]] = defaultdict(set)
        self.members: dict[int, set[int]] = defaultdict(set)
        self.finished: dict[int, Row] = {}
        self.open: dict[int, Row] = {}
        self.callbacks: Counter[int] = Counter()
        self.new: list[int] = []

    def change(self, id: int, old: Row | None, new: Row | None) -> None:
        row = new or old
        if batch := row["batch_id"]:
            if new and not old:
                self.join(id, batch)
            if not new:
                self.live[batch].discard(id)
        if (
            new
            and not old
            and isinstance(new["payload"], dict)
            and "batch" in new["payload"]
        ):
            if id not in self.court.revived:
                self.callbacks[new["payload"]["batch"]["id"]] += 1

    def join(self, id: int, batch: int) -> None:
        self.live[batch].add(id)
        self.members[batch].add(id)
        # A job redriven after that is part of it no more.
        if batch in self.finished and id not in self.court.revived:
            self.court.violated(
                "B", f"{id} was added to batch {batch}, which had finished"
            )

    def other(self, change: Change) -> None:
        if change.table == "batch" and change.what != "DELETE":
            row = change.row
            self.open[row["id"]] = row
            if row["finished_at"] and row["id"] not in self.finished:
                self.finished[row["id"]] = row
                self.court.facts["batches"] += 1
                self.new.append(row["id"])

    def commit(self, now: Transaction) -> None:
        new, self.new = self.new, []
        for batch in new:
            self.settle(batch, self.finished[batch])

    def settle(self, batch: int, row: Row) -> None:
        if live := self.live[batch]:
            self.court.violated("B", f"batch {batch} finished before {live}")
        if not row["closed_at"]:
            self.court.violated("B", f"batch {batch} finished, and was not closed")
        ends = Counter(
            (self.court.ended[id] or ["nothing"])[-1].replace("purged", "cancelled")
            for id in self.members[batch] - live
        )
        counted = {name: row[name] for name in ("completed", "dead", "cancelled")}
        if any(counted[name] != ends[name] for name in counted):
            self.court.violated(
                "B", f"batch {batch} counts {counted}, and not {dict(ends)}"
            )

    def finish(self) -> None:
        for batch, row in self.open.items():
            if not row["finished_at"]:
                self.court.violated("B", f"batch {batch} never finished")
            if self.callbacks[batch] != 1:
                self.court.violated(
                    "B", f"batch {batch} has {self.callbacks[batch]} callbacks"
                )


class Waits(Rule):
    """T: a job begins only once those that it waits for have ended as it wants, and is cancelled only for the
    sake of one that it waits for and that did not complete."""

    BLAMED = re.compile(r"job (\d+), which it waited for")

    def prepare(self) -> None:
        self.after: dict[int, tuple[list[int], str]] = {}
        self.told_at: dict[int, float] = {}
        for entry in self.court.called("enqueue", end=("ok", "unknown")):
            if entry.get("after") and entry.get("rows"):
                id = entry["rows"][0][0]
                self.after[id] = (entry["after"], entry["if_dead"])
                self.told_at[id] = entry["end_at"]

    def change(self, id: int, old: Row | None, new: Row | None) -> None:
        if id in self.after and new and new["enqueued_at"] > self.told_at[id]:
            # A crash took that job back, and its id was given to this one.
            del self.after[id]
        if id not in self.after or not is_claim(old, new):
            return
        after, if_dead = self.after[id]
        for other in after:
            ends = self.court.ended[other]
            good = (
                {"completed"}
                if if_dead == "cancel"
                else {"completed", "dead", "cancelled", "purged"}
            )
            if not good & set(ends):
                self.court.violated(
                    "T",
                    f"{id} began before {other}, whose ends are {ends} (if_dead {if_dead})",
                )
            self.court.facts["waits"] += 1

    def commit(self, now: Transaction) -> None:
        for id, runs in self.court.runs.items():
            for run in runs:
                if run["outcome"] == "cancelled" and (
                    said := self.BLAMED.search(str(run["result"]))
                ):
                    self.blame(id, int(said[1]))

    def blame(self, id: int, other: int) -> None:
        after, if_dead = self.after.get(id, ([], "cancel"))
        ends = set(self.court.ended[other])
        if id in self.after and other not in after:
            self.court.violated(
                "T", f"{id} was cancelled for {other}, for which it did not wait"
            )
        # One that died may be back by now.
        if if_dead == "run" or not ends - {"completed"}:
            self.court.violated(
                "T", f"{id} (if_dead {if_dead}) was cancelled for {other}: {ends}"
            )


class Steps(Rule):
    """K: a step is saved by who holds the job, once, with its effect, and kept as long as the job is there."""

    def prepare(self) -> None:
        self.effects: Counter[tuple[int, str]] = Counter()
        self.ever: set[tuple[int, str]] = set()
        self.kept: set[tuple[int, str]] = set()
        self.new: list[Row] = []
        self.gone: list[tuple[int, str]] = []
        # The tokens that a transaction has found or left.
        self.held: dict[int, set[int]] = defaultdict(set)

    def change(self, id: int, old: Row | None, new: Row | None) -> None:
        self.held[id] |= {row["token"] for row in (old, new) if row and row["token"]}

    def other(self, change: Change) -> None:
        if change.table not in ("step", "step_effect"):
            return
        row = change.row
        step = (row["job_id"], row["name"])
        if change.table == "step_effect":
            self.effects[step] += 1
        elif change.what == "DELETE":
            self.gone.append(step)
            self.kept.discard(step)
        else:
            self.new.append(row)
            self.kept.add(step)
            if step in self.ever:
                self.court.violated("K", f"{step} was saved again")
            self.ever.add(step)

    def commit(self, now: Transaction) -> None:
        court, new, gone = self.court, self.new, self.gone
        self.new, self.gone = [], []
        for row in new:
            court.facts["steps"] += 1
            # The same transaction may have begun or ended the attempt.
            holder = court.jobs.get(row["job_id"], {}).get("token")
            held = self.held[row["job_id"]] | {holder}
            if row["value"]["token"] not in held:
                text = f"{row['name']} of {row['job_id']} is of {row['value']}, and {held} held it"
                court.violated("K", text)
        self.held.clear()
        for id, name in gone:
            if id in court.jobs or id in court.dead:
                court.violated("K", f"{name} of {id} is gone, and {id} is not")

    def finish(self) -> None:
        for step, count in self.effects.items():
            if count != 1 or step not in self.ever:
                self.court.violated("K", f"{step} was done {count} times")
        for step in self.ever - self.effects.keys():
            self.court.violated("K", f"{step} was saved, and not done")
        for id, name in self.kept:
            if id not in self.court.jobs and id not in self.court.dead:
                self.court.violated("K", f"{name} of {id} is left, and {id} is gone")


class Slots(Rule):
    """S: each slot of a schedule makes one job, and none is left out."""

    LATE = 6  # seconds: its jitter, a restart, and the time until a rest or claim looks

    def prepare(self) -> None:
        self.slots: dict[str, Counter[str]] = defaultdict(Counter)

    def change(self, id: int, old: Row | None, new: Row | None) -> None:
        if (
            new
            and not old
            and new["headers"]
            and "slot" in new["headers"]
            and id not in self.court.revived
        ):
            self.slots[new["headers"]["schedule"]][new["headers"]["slot"]] += 1

    def finish(self) -> None:
        for name, slots in self.slots.items():
            self.court.facts["slots"] += len(slots)
            for slot, count in slots.items():
                if count > 1:
                    self.court.violated("S", f"slot {slot} of {name} made {count} jobs")
            times = sorted(datetime.fromisoformat(slot) for slot in slots)
            wanted = int((times[-1] - times[0]) / timedelta(seconds=1)) + 1
            if len(times) != wanted:
                self.court.violated("S", f"{name} has {len(times)} of {wanted} slots")
            for entry in self.court.called("calm"):
                if times[-1].timestamp() < entry["start"] - self.LATE:
                    self.court.violated("S", f"{name} stopped at {times[-1]}")
        if len(self.slots) < 2:
            self.court.violated("S", f"only {list(self.slots)} made jobs")
