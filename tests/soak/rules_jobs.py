"""What holds for each job: its attempts, its leases, its one end, its effect, its key."""

from collections import Counter, defaultdict
from datetime import datetime

from soak import scene
from soak.commits import Change, Row, Transaction
from soak.court import Rule, is_claim


class Attempts(Rule):
    """I3: attempts are 1, 2, 3 …, at most max_attempts, and no token comes again. I4: no lease is given or
    taken while another holds the job. I2: nothing begins before it is due, or after it has expired."""

    # A claim looks at the clock when it picks, and then perhaps waits for who locks the whole table.
    LATE = 0.5

    def prepare(self) -> None:
        self.tokens: dict[int, Transaction] = {}
        self.counted: Counter[int] = Counter()

    def change(self, id: int, old: Row | None, new: Row | None) -> None:
        if is_claim(old, new):
            self.claim(id, old, new)
        # A claim under caps that takes nothing after all has set the token, and no more.
        elif old and new and old["token"] and old["claimed_at"] and not new["token"]:
            self.give_back(id, old, new)

    def claim(self, id: int, old: Row, new: Row) -> None:
        court, token = self.court, new["token"]
        court.facts["claims"] += 1
        if new["attempt"] != old["attempt"] + 1:
            court.violated(
                "I3", f"{id}: attempt {old['attempt']}, then {new['attempt']}"
            )
        if new["attempt"] > new["max_attempts"]:
            court.violated(
                "I3", f"{id}: attempt {new['attempt']} of {new['max_attempts']}"
            )
        if self.tokens.setdefault(token, court.now) is not court.now:
            court.violated("I3", f"{id}: token {token} was given twice")
        # Under caps its row has the new token already.
        if old["token"] not in (None, token):
            court.violated("I4", f"{id}: claimed while it was leased")
        if old["run_at"] > new["claimed_at"]:
            court.violated("I2", f"{id}: began before it was due")
        if at := new["expires_at"]:
            late = new["claimed_at"] - datetime.fromisoformat(at).timestamp()
            court.facts["began after expiry at most"] = max(
                court.facts["began after expiry at most"], late
            )
            if late > self.LATE:
                court.violated("I2", f"{id}: began {late:.1f} s after it had expired")

    def give_back(self, id: int, old: Row, new: Row) -> None:
        court = self.court
        if new["attempt"] == old["attempt"]:
            self.counted[id] += 1
            self.expire(id, old)
        elif new["attempt"] != old["attempt"] - 1:
            court.violated(
                "I3",
                f"{id}: attempt {old['attempt']} was given back as {new['attempt']}",
            )
        if new["attempt"] >= new["max_attempts"]:
            court.violated(
                "I6", f"{id}: waits after its last attempt, {new['attempt']}"
            )

    def commit(self, now: Transaction) -> None:
        """An attempt counts if, and only if, it is in the log."""
        counted, self.counted = self.counted, Counter()
        for id, runs in self.court.runs.items():
            logged = [run for run in runs if run["outcome"] in ("retry", "expired")]
            if len(logged) != counted.pop(id, 0):
                self.court.violated(
                    "I3",
                    f"{id}: {len(logged)} attempts are logged, and not so many count",
                )
        for id in counted:
            self.court.violated("I3", f"{id}: an attempt counts, and is not logged")

    def expire(self, id: int, old: Row) -> None:
        expired = [
            run
            for run in self.court.runs.get(id, [])
            if run["outcome"] == "expired" and run["attempt"] == old["attempt"]
        ]
        self.court.facts["recovered"] += len(expired)
        if expired and old["lease_expires_at"] > self.court.now.at:
            self.court.violated("I4", f"{id}: its lease was taken before its end")


class Ends(Rule):
    """I1: a job ends, once, and says how. I5: an attempt has one end. I6: it is dead if, and only if, its attempts
    are used up or it was rejected."""

    def prepare(self) -> None:
        self.lives: Counter[int] = Counter()
        self.attempts: set[tuple[int, int, int]] = set()
        self.known: set[int] = set()

    def change(self, id: int, old: Row | None, new: Row | None) -> None:
        court = self.court
        if not old and new:
            self.begin(id, new)
        elif old and not new:
            runs = {run["outcome"] for run in court.runs.get(id, [])}
            is_purged = (
                old["queue"] in (scene.SIDE, scene.FLOW_SIDE) and not old["token"]
            )
            # By the enqueue that added it: another began the window of unique_for first.
            is_undone = id not in self.known
            if not (
                runs & {"completed", "cancelled"}
                or id in court.died
                or is_purged
                or is_undone
            ):
                court.violated("I1", f"{id} is gone, and nothing says how: {runs}")
            elif not runs and is_purged:
                court.ended[id].append("purged")

    def begin(self, id: int, new: Row) -> None:
        if id in self.court.revived:
            self.lives[id] += 1
        elif id in self.known:
            self.court.violated("I1", f"{id} came back")

    def commit(self, now: Transaction) -> None:
        court = self.court
        for id, runs in court.runs.items():
            for run in runs:
                self.end(id, run)
        for id, row in court.died.items():
            is_used_up = row["attempt"] >= row["max_attempts"]
            if not is_used_up and not row["error"].startswith("rejected"):
                court.violated(
                    "I6", f"{id} died at attempt {row['attempt']}: {row['error']}"
                )
        for change in now.changes:
            if change.table == "job" and change.what == "INSERT":
                self.known.add(change.row["id"])

    def end(self, id: int, run: Row) -> None:
        court = self.court
        key = (id, self.lives[id], run["attempt"])
        if run["attempt"] and run["outcome"] != "cancelled":
            if key in self.attempts:
                court.violated(
                    "I5",
                    f"{id}: attempt {run['attempt']} ended twice, now {run['outcome']}",
                )
            self.attempts.add(key)
        if run["outcome"] == "completed":
            court.facts["completed"] += 1
            if court.ended[id].count("completed") > 1:
                court.violated("I5", f"{id} was completed twice")
        if run["outcome"] in ("completed", "cancelled") and id in court.jobs:
            court.violated("I5", f"{id} is {run['outcome']}, and still there")
        if run["outcome"] == "dead" and id not in court.died:
            court.violated("I6", f"{id} died, and is nowhere")

    def finish(self) -> None:
        left = Counter(row["queue"] for row in self.court.jobs.values())
        for queue, count in left.items():
            self.court.violated("I1", f"{count} jobs of {queue} have not ended")


class Effects(Rule):
    """I7: an effect that is written in the transaction that completes a job is there once, and only then."""

    def prepare(self) -> None:
        self.effects: Counter[int] = Counter()
        self.owed: dict[int, str] = {}

    def other(self, change: Change) -> None:
        if change.table == "effect":
            id = change.row["job_id"]
            self.effects[id] += 1
            if not any(
                r["outcome"] == "completed" for r in self.court.runs.get(id, [])
            ):
                self.court.violated(
                    "I7", f"{id} has an effect, and was not completed with it"
                )

    def commit(self, now: Transaction) -> None:
        for id, runs in self.court.runs.items():
            for run in runs:
                if run["outcome"] == "completed" and run["queue"] == scene.WORK:
                    self.owed[id] = run["worker"]

    def finish(self) -> None:
        for id, count in self.effects.items():
            if count > 1:
                self.court.violated("I7", f"{id} has {count} effects")
        for id in self.owed.keys() - self.effects.keys():
            self.court.violated(
                "I7", f"{id}, which {self.owed[id]} completed, has no effect"
            )


class Keys(Rule):
    """I8: at most one job with a key waits or runs; within a window of unique_for, none is added."""

    def prepare(self) -> None:
        self.live: dict[tuple[str, str], set[int]] = defaultdict(set)
        self.added: dict[str, list[tuple[float, int]]] = defaultdict(list)
        self.windows = {
            e["window"] for e in self.court.called("enqueue") if "window" in e
        }

    def change(self, id: int, old: Row | None, new: Row | None) -> None:
        if old and not new and old["unique_key"]:
            self.live[old["queue"], old["unique_key"]].discard(id)
        elif new and not old and new["unique_key"]:
            self.live[new["queue"], new["unique_key"]].add(id)

    def commit(self, now: Transaction) -> None:
        for change in now.changes:
            row = change.row
            if (
                change.table != "job"
                or change.what != "INSERT"
                or not row["unique_key"]
            ):
                continue
            if len(self.live[row["queue"], row["unique_key"]]) > 1:
                self.court.violated("I8", f"two jobs with key {row['unique_key']}")
            is_new = (
                row["id"] in self.court.jobs and row["id"] not in self.court.revived
            )
            if row["unique_key"] in self.windows and is_new:
                self.add(row)

    def add(self, row: Row) -> None:
        earlier = self.added[row["unique_key"]]
        # It may have waited for the other, after it had looked at the clock.
        if earlier and self.court.now.at < earlier[-1][0] + scene.WINDOW:
            text = f"{row['id']} with key {row['unique_key']} was added in the window of {earlier[-1][1]}"
            self.court.violated("I8", text)
        earlier.append((row["enqueued_at"], row["id"]))
