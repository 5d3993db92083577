"""Limits, caps, rates, pauses, and order in groups of one: at every commit."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from soak import scene
from soak.commits import Row, Transaction
from soak.court import ANY_END, Rule, is_claim
from soak.scene import Scope


def scopes(row: Row) -> Iterator[Scope]:
    """Those that a job belongs to."""
    yield row["queue"], "", ""
    yield row["queue"], row["kind"], ""
    if row["group_key"]:
        yield row["queue"], "", row["group_key"]


class Limits(Rule):
    """L: no job begins beside more than its limits allow, in no committed state. A claim that began while a limit
    was being changed may go by either, and the change does not see it: what such a claim took is not counted. One
    that was open before is."""

    def prepare(self) -> None:
        self.running: dict[Scope, set[int]] = defaultdict(set)
        self.began: dict[int, Row] = {}
        self.excused: set[int] = set()
        self.reached: Counter[str] = Counter()
        changes = self.court.called("configure", end=("ok", "unknown"))
        # Who was cut off may have committed a little later.
        self.windows = [
            (e["start"] - 0.1, e["end_at"] + 0.1 + (e["end"] == "unknown") * 2)
            for e in changes
        ]
        self.changes = [
            (tuple(entry["scope"]), entry["most"], end, entry["end"] == "ok")
            for entry, (_, end) in zip(changes, self.windows, strict=True)
        ]

    def change(self, id: int, old: Row | None, new: Row | None) -> None:
        if old and (not new or not new["token"]):
            for scope in scopes(old):
                self.running[scope].discard(id)
            self.began.pop(id, None)
        elif new and is_claim(old, new):
            self.began[id] = new
            self.excused.discard(id)
            for scope in scopes(new):
                self.running[scope].add(id)

    def commit(self, now: Transaction) -> None:
        began, self.began = self.began, {}
        for id, row in began.items():
            if row["queue"] in (scene.LIMITED, scene.FLOW) and any(
                start <= row["claimed_at"] <= end for start, end in self.windows
            ):
                self.excused.add(id)
        for id, row in began.items():
            for scope in scopes(row):
                if id not in self.excused:
                    self.check(id, row, scope)

    def check(self, id: int, row: Row, scope: Scope) -> None:
        limit = (
            scope if scope in scene.LIMITS else (scope[0], "", "*" if scope[2] else "-")
        )
        if limit not in scene.LIMITS:
            return
        count = len(self.running[scope] - self.excused)
        self.reached["/".join(limit)] = max(self.reached["/".join(limit)], count)
        most = self.most(limit, row["claimed_at"])
        if count > most:
            self.court.violated(
                "L", f"{count} of {scope} run at once with {id}, not {most}"
            )

    def most(self, limit: Scope, at: float) -> int:
        """The limit since the last change that had ended by then. One that overlaps has excused the claim."""
        most = scene.LIMITS[limit]
        for scope, value, end, is_certain in self.changes:
            if scope == limit and end < at:
                most = value if is_certain else max(most, value)
        return most

    def finish(self) -> None:
        for limit, most in scene.LIMITS.items():
            name = "/".join(limit)
            self.court.facts[f"reached {name} of {most}"] = self.reached[name]
            if most <= 3 and self.reached[name] < most and self.court.lost_hints < 1:
                self.court.violated(
                    "R",
                    f"at most {self.reached[name]} of {name} ran at once, of {most}",
                )


class Rates(Rule):
    """L: no more jobs begin in any period than a rate allows."""

    def prepare(self) -> None:
        self.begun: dict[Scope, list[float]] = defaultdict(list)

    def change(self, id: int, old: Row | None, new: Row | None) -> None:
        if new and new["queue"] == scene.RATED and is_claim(old, new):
            for scope in scopes(new):
                self.begun[scope].append(new["claimed_at"])

    def finish(self) -> None:
        for scope, (most, period) in scene.RATES.items():
            times = sorted(self.begun[scope])
            self.court.facts[f"begun under {'/'.join(scope)}"] = len(times)
            for first, next in zip(times, times[most:], strict=False):
                if next - first < period - 1e-5:
                    text = (
                        f"more than {most} of {scope} began within {next - first:.6f} s"
                    )
                    self.court.violated("L", text)


class Pauses(Rule):
    """P: no job of a queue begins while it is paused."""

    def prepare(self) -> None:
        pauses = self.court.called("pause")
        resumes = self.court.called("resume", end=ANY_END)
        self.paused = [
            (
                e["end_at"],
                min(
                    (r["start"] for r in resumes if r["start"] > e["start"]),
                    default=float("inf"),
                ),
            )
            for e in pauses
        ]
        self.began = {
            row[1]: entry["start"]
            for entry in self.court.called("claim")
            if scene.SIDE in (entry.get("queues") or [])
            for row in entry["rows"]
        }

    def change(self, id: int, old: Row | None, new: Row | None) -> None:
        if new and new["queue"] == scene.SIDE and is_claim(old, new):
            # A claim that began before goes on, long before on a busy machine.
            if any(
                start + 0.05 < new["claimed_at"] < end
                and start < self.began.get(new["token"], end)
                for start, end in self.paused
            ):
                self.court.violated("P", f"{id} began while its queue was paused")


class Order(Rule):
    """O: in a group of one, no job overtakes another, nor, if it is strict, one that waits for its retry."""

    # A claim may have looked at a job before another transaction changed it.
    MARGIN = 0.3

    def prepare(self) -> None:
        self.members: dict[tuple[str, str], set[int]] = defaultdict(set)
        self.failed: set[int] = set()
        self.first: set[int] = set()
        self.began: dict[int, Row] = {}
        self.touched: dict[int, float] = {}
        # While walks are long: the snapshot is held for 5 s, and that is remembered for 10.
        self.slow = [
            (fault["start"], fault["start"] + 16)
            for fault in self.court.called("fault", end=("ok", "unknown"))
            if fault["what"] == "hold_snapshot"
        ]

    def margin(self, at: float) -> float:
        """How long the order of the group may be another, as the reference says."""
        if not any(start < at < end for start, end in self.slow):
            return self.MARGIN
        # Who enqueues then takes a group whose ticket is lost for an empty one.
        return 1.5 if not self.court.lost_hints else float("inf")

    def change(self, id: int, old: Row | None, new: Row | None) -> None:
        row = new or old
        group = row["queue"], row["group_key"]
        if group not in scene.ORDERED:
            return
        if new:
            self.members[group].add(id)
            if not old or any(
                old[n] != new[n] for n in ("run_at", "priority", "token")
            ):
                self.touched[id] = self.court.now.at
        else:
            self.members[group].discard(id)
            self.failed.discard(id)
        if is_claim(old, new):
            self.began[id] = new
            # In a strict group the one that failed comes first.
            if id in self.failed:
                self.first.add(id)
            self.failed.discard(id)
        elif not new or not new["token"]:
            self.began.pop(id, None)
        if old and new and old["token"] and not new["token"]:
            # One transaction may end its attempt, claim it again, and release it.
            runs = self.court.runs.get(id, [])
            ends = {run["outcome"] for run in runs if run["attempt"] == old["attempt"]}
            if ends & {"retry", "expired"}:
                self.failed.add(id)

    def commit(self, now: Transaction) -> None:
        began, self.began = self.began, {}
        first, self.first = self.first, set()
        for id, row in began.items():
            group = row["queue"], row["group_key"]
            if id in first and scene.ORDERED[group]:
                continue
            for other in self.members[group] & self.court.jobs.keys() - {id}:
                self.compare(id, row, other, scene.ORDERED[group])

    def compare(self, id: int, row: Row, other: int, is_strict: bool) -> None:
        waiting = self.court.jobs[other]
        at = row["claimed_at"]
        late = at - max(self.touched[other], waiting["run_at"])
        # An expired one is in nobody's way.
        if waiting["token"] or waiting["expires_at"] or late < self.margin(at):
            return
        self.court.facts["compared in order"] += 1
        place = (-waiting["priority"], waiting["run_at"], other)
        if place < (-row["priority"], row["run_at"], id):
            text = f"{id} overtook {other} of {row['group_key']}, which was first for {late:.1f} s: {self.told(row)}, {self.told(waiting)}"
            self.court.violated("O", text)
        if is_strict and other in self.failed:
            self.court.violated("O", f"{id} began while {other} waits for its retry")

    def told(self, row: Row) -> str:
        names = ("kind", "priority", "run_at", "attempt", "claimed_at", "token")
        return str([row[name] for name in names])
