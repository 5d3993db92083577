"""What an episode says: what happened in it, and what must not have."""

from collections import Counter

from soak.court import ANY_END, Court
from soak.judge import INVARIANTS

SHOWN = 3


def describe(court: Court) -> str:
    """The classes of Jepsen's total-queue, the faults, and what was reached."""
    facts = dict(court.facts)
    attempted = sum(facts.pop(f"enqueue {end}", 0) for end in ("fail", "unknown"))
    ok = facts.pop("enqueue ok", 0)
    faults = Counter(e["what"] for e in court.entries if e["do"] == "fault")
    lost, unexpected = (len(court.violations.get(name, [])) for name in ("I1", "I2"))
    lines = [
        f"enqueues: {attempted + ok:.0f} attempted, {ok:.0f} acknowledged, {lost} lost,"
        f" {unexpected} unexpected; {facts.pop('recovered', 0):.0f} attempts recovered",
        "faults: " + ", ".join(f"{n} {what}" for what, n in sorted(faults.items())),
        ", ".join(f"{name}: {value:g}" for name, value in sorted(facts.items())),
    ]
    return "\n".join(lines)


def complaints(court: Court) -> str:
    return "\n".join(
        f"{name} ({INVARIANTS[name]}): {len(texts)} times\n    "
        + "\n    ".join(texts[:SHOWN])
        for name, texts in court.violations.items()
    )


def tally(court: Court) -> Counter[str]:
    """What of it is counted over all episodes."""
    facts = court.facts
    found = Counter(
        {
            "episodes": 1,
            "episodes with violations": int(bool(court.violations)),
            "enqueues acknowledged": int(facts.get("enqueue ok", 0)),
            "attempts recovered": int(facts.get("recovered", 0)),
            "transactions prepared": len(court.called("prepare", end=ANY_END)),
            "of these left by sessions that were cut off": len(
                court.called("end prepared")
            ),
        }
    )
    found.update(f"fault: {e['what']}" for e in court.entries if e["do"] == "fault")
    for name, texts in court.violations.items():
        found[f"violations of {name} ({INVARIANTS[name]})"] += len(texts)
    return found


def table(found: Counter[str]) -> str:
    """For the end of a run, and for a page."""
    lines = ["| in all | |", "|---|--:|"]
    return "\n".join(
        lines + [f"| {what} | {count:,} |" for what, count in found.items()]
    )
