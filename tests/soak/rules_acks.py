"""What clients were told, compared with what has committed."""

from collections import Counter, defaultdict

from soak import scene
from soak.client import CUT
from soak.commits import Row
from soak.court import ANY_END, Rule, is_claim
from soak.history import Entry


class Acknowledged(Rule):
    """I1: no acknowledged enqueue is lost. I2: nothing is there that nobody asked for, or that was rolled back, and
    what was claimed is what was asked for. I5: whoever is told that it has ended an attempt, has, and alone."""

    ENDS = ("complete", "fail", "reject", "release", "finish")

    def prepare(self) -> None:
        self.inserted: dict[int, float] = {}
        self.marks: Counter[int] = Counter()
        self.claims: set[tuple[int, int]] = set()
        self.begun: set[tuple[int, int]] = set()
        self.ended: set[tuple[int, int]] = set()  # leases
        # Under which token each was completed.
        self.completed_under: dict[int, int | None] = {}

    def change(self, id: int, old: Row | None, new: Row | None) -> None:
        if not old and new:
            self.inserted.setdefault(id, self.court.now.at)
            mark = (
                new["payload"].get("mark") if isinstance(new["payload"], dict) else None
            )
            if mark and id not in self.court.revived:
                self.marks[mark] += 1
        if is_claim(old, new):
            self.claims.add((id, new["token"]))
            self.begun.add((id, new["attempt"]))
        if old and old["token"] and not (new and new["token"]):
            self.ended.add((id, old["token"]))
        if old and not new:
            if any(
                run["outcome"] == "completed" for run in self.court.runs.get(id, [])
            ):
                self.completed_under[id] = old["token"]

    def finish(self) -> None:
        court = self.court
        entries = court.called("enqueue", end=ANY_END)
        self.check_enqueues(entries)
        asked = Counter(
            mark for e in entries if e["end"] != "fail" for mark in e.get("marks", [])
        )
        for mark, count in self.marks.items():
            if count > asked[mark]:
                court.violated(
                    "I2", f"mark {mark} is there {count} times, not {asked[mark]}"
                )
        for entry in court.called("claim"):
            for id, token, queue in entry["rows"]:
                if (id, token) not in self.claims:
                    court.violated(
                        "I5", f"{entry['who']} got {id}, and no claim has committed"
                    )
                if entry["queues"] and queue not in entry["queues"]:
                    court.violated(
                        "I2", f"{id} of {queue} was claimed from {entry['queues']}"
                    )
        for entry in court.called("began"):
            if (entry["id"], entry["attempt"]) not in self.begun:
                court.violated(
                    "I2",
                    f"attempt {entry['attempt']} of {entry['id']} was never claimed",
                )
        self.check_ends()

    def check_enqueues(self, entries: list[Entry]) -> None:
        court = self.court
        for entry in entries:
            ids = {row[0] for row in entry.get("rows", [])} - {None}
            court.facts[f"enqueue {entry['end']}"] += 1
            if entry["end"] == "ok" and (lost := ids - self.inserted.keys()):
                court.violated("I1", f"{lost} were acknowledged, and lost")
            # With a key it may be the id of another. What a crash takes back is given out again.
            found = {
                id
                for id in ids & self.inserted.keys()
                if self.inserted[id] <= entry["end_at"]
            }
            if entry["end"] == "fail" and "marks" not in entry and found:
                court.violated("I2", f"{found} were rolled back, and are there")

    def check_ends(self) -> None:
        winners: Counter[tuple[int, int]] = Counter()
        completed: Counter[int] = Counter()
        for entry in self.court.called(*self.ENDS):
            tokens = {lease[0]: lease[1] for lease in entry["leases"]}
            given = Counter(lease[0] for lease in entry["leases"])
            for place, (id, *status) in enumerate(entry["rows"]):
                # finish answers each lease in its place; complete_many does not say which of two tokens it was.
                if status == ["lost"] or (not status and given[id] > 1):
                    continue
                token = entry["leases"][place][1] if status else tokens[id]
                winners[id, token] += 1
                who = f"{entry['who']} was told that its {entry['do']} of {id} with token {token}"
                if (id, token) not in self.ended:
                    self.court.violated("I5", f"{who} ended it, and it did not")
                if entry["do"] == "complete":
                    completed[id] += 1
                    if self.completed_under.get(id) != token:
                        other = self.completed_under.get(id)
                        self.court.violated("I5", f"{who} counts, and not {other}")
        for (id, token), count in winners.items():
            if count > 1:
                self.court.violated("I5", f"{count} ended {id} under token {token}")
        for id, count in completed.items():
            if count > 1:
                self.court.violated("I5", f"{count} completed {id}")


class Answers(Rule):
    """E: no call fails in a way that is not documented for what others may do meanwhile, and no worker ends
    before it is killed, or told to."""

    def finish(self) -> None:
        for entry in self.court.called("exit"):
            if codes := set(entry["codes"]) - {0, -9}:
                self.court.violated("E", f"workers ended with {codes}")
        for entry in self.court.called("refused", end=("fail",)):
            if entry["error"] not in CUT:
                self.court.violated(
                    "E", f"{entry['who']}: {entry['error']} {entry['text'][:300]}"
                )


class Waiting(Rule):
    """W: a claim waits for nobody who has locked jobs (but for who locks the whole table)."""

    def finish(self) -> None:
        locks = [
            (e["start"], e["end_at"] + 1)
            for e in self.court.called("fault", end=("ok", "unknown"))
            if e["what"] in ("lock_table", "vacuum", "analyze")
        ]
        for entry in self.court.called("claim", end=("fail",)):
            if entry.get("error") == "55P03":
                if not any(
                    start < entry["end_at"] and entry["start"] < end
                    for start, end in locks
                ):
                    self.court.violated(
                        "W", f"{entry['who']} waited for a lock in {entry['queues']}"
                    )


class Views(Rule):
    """I9: the views count what is there."""

    def finish(self) -> None:
        for entry in self.court.called("look"):
            for queue, is_estimate, shown, there, running, least, most in entry["rows"]:
                self.court.facts["looks"] += 1
                if not is_estimate and (shown != there or not least <= running <= most):
                    text = f"{queue}: {shown} and {running} run, not {there} and {least} to {most}"
                    self.court.violated("I9", text)


class Kept(Rule):
    """I10: nothing that is due and free is kept from a worker that finds nothing: not for three seconds while
    all goes on, and all that waits comes to rest once the faults stop."""

    PATIENCE = 3.0
    AT_ONCE = 1.0  # until claims know that a job is due, or that its queue was resumed
    PLAIN = (scene.WORK, scene.SIDE)

    def prepare(self) -> None:
        locks = [
            (e["start"], e["end_at"] + 1)
            for e in self.court.called("fault", end=("ok", "unknown"))
            if e["what"] == "lock_rows"
        ]
        resumes = [e["end_at"] for e in self.court.called("resume")]
        pauses = [
            (
                e["start"],
                min(
                    (end + self.AT_ONCE for end in resumes if end > e["start"]),
                    default=float("inf"),
                ),
            )
            for e in self.court.called("pause", end=("ok", "unknown"))
        ]
        self.excuses = {scene.WORK: locks, scene.SIDE: locks + pauses}
        # When a transaction had the job locked, if only to be rolled back. Who was cut off may have had it prepared.
        self.taken: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for e in self.court.called("claim", "enqueue", end=ANY_END):
            until = e["end_at"] + (e["end"] == "unknown") * 2
            for row in e.get("rows", ()):
                self.taken[row[0]].append((e["start"], until))
        self.ready: dict[int, tuple[float, str]] = {}
        self.spans: list[tuple[float, float, int, str]] = []

    def change(self, id: int, old: Row | None, new: Row | None) -> None:
        if id in self.ready:
            start, queue = self.ready.pop(id)
            if self.court.now.at - start > self.PATIENCE:
                self.spans.append((start, self.court.now.at, id, queue))
        if new and new["token"] is None and new["run_at"] < float("inf"):
            # What has expired is cancelled where it stands.
            is_plain = not new["group_key"] and not new["expires_at"]
            if new["queue"] in self.PLAIN and is_plain:
                self.ready[id] = (max(self.court.now.at, new["run_at"]), new["queue"])

    def finish(self) -> None:
        court = self.court
        end = court.now.at
        for id, (start, queue) in self.ready.items():
            self.spans.append((start, end, id, queue))
        vain = [
            e for e in court.called("claim") if not e["rows"] and not e.get("kinds")
        ]
        for start, end, id, queue in self.spans:
            excuses = self.excuses[queue] + self.taken[id]
            idle = Counter(
                e["who"]
                for e in vain
                if queue in e["queues"]
                and start + self.AT_ONCE < e["start"]
                and e["end_at"] < end
                and not self.is_excused(e, excuses)
            )
            if idle and max(idle.values()) > 1:
                text = f"{id} of {queue} was free for {end - start:.1f} s, and claims found nothing: {dict(idle)}"
                court.violated("I10", text)
        self.finish_calm()

    def is_excused(self, claim: Entry, excuses: list[tuple[float, float]]) -> bool:
        """Perhaps the job was locked, or its queue was paused."""
        return any(
            start < claim["end_at"] and claim["start"] < end for start, end in excuses
        )

    def finish_calm(self) -> None:
        court = self.court
        for entry in court.called("rest"):
            court.facts["came to rest after"] = max(
                court.facts["came to rest after"], entry["seconds"]
            )
            if entry["left"]:
                court.violated(
                    "I10",
                    f"left after {entry['seconds']:.0f} s of calm: {entry['left']}",
                )
