"""The results as Markdown: medians of the rounds, beside the best rival."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

from bench.server import Sample, Size
from bench.sql import Samples
from bench.systems import System

Rounds = list[dict[str, Samples]]  # by system, by title


@dataclass(frozen=True)
class Workload:
    """One workload: what runs it, for whom, and how its results are told.

    every says how many rounds of the others go into one of this. columns names what is
    shown of a sample's `more`, as a median; violations, what is counted there, of all rounds.
    """

    name: str
    heading: str
    run: Callable[[System, Size], Samples]
    takes: Callable[[System], bool]
    every: int = 1
    columns: Mapping[str, str] = field(default_factory=dict)
    violations: Mapping[str, str] = field(default_factory=dict)
    table: Callable[["Workload", Rounds, set[str]], list[str]] | None = None


def table(workload: Workload, rounds: Rounds, rivals: set[str]) -> list[str]:
    """Rates, the highest first, with what they cost and what went wrong."""
    more, violations = workload.columns, workload.violations
    titles = [*violations.values(), *more.values()]
    lines = [
        "| workload | system | jobs/s | min–max | × best rival | CPU µs/job | WAL B/job "
        "| jobs | lost | twice |" + "".join(f" {title} |" for title in titles),
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|" + "--:|" * len(titles),
    ]
    for title, found in by_title(rounds).items():
        rates = {name: median(s.rate for s in all_) for name, all_ in found.items()}
        best = max((rate for name, rate in rates.items() if name in rivals), default=0)
        for name, rate in sorted(rates.items(), key=lambda item: -item[1]):
            samples = found[name]
            low, high = min(s.rate for s in samples), max(s.rate for s in samples)
            cells = [title, name, f"{rate:,.0f}", f"{low:,.0f}–{high:,.0f}"]
            cells.append(in_bold(name, f"{rate / best:.2f}") if best else "")
            cells.append(f"{median(s.cpu_us for s in samples):,.0f}")
            cells.append(f"{median(s.wal_bytes for s in samples):,.0f}")
            cells += counts(samples)
            cells += [f"{sum(s.more[key] for s in samples):,.0f}" for key in violations]
            cells += [shown(samples, key) for key in more]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def latencies(workload: Workload, rounds: Rounds, rivals: set[str]) -> list[str]:
    """Percentiles in ms, the quickest first."""
    lines = [
        "| workload | system | p50 ms | p95 ms | p99 ms | p50 × best rival | lost | twice |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for title, found in by_title(rounds).items():
        middle = {n: median(s.more["p50"] for s in all_) for n, all_ in found.items()}
        best = min((ms for name, ms in middle.items() if name in rivals), default=0)
        for name, ms in sorted(middle.items(), key=lambda item: item[1]):
            told = [
                f"{median(s.more[p] for s in found[name]):.2f}"
                for p in ("p50", "p95", "p99")
            ]
            ratio = in_bold(name, f"{ms / best:.2f}") if best else ""
            is_measured = name in rivals or name == "pgqueue"
            cells = [title, name] if is_measured else ["one round trip", "select 1"]
            cells += [*told, ratio if is_measured else "", *counts(found[name])[1:]]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def by_age(workload: Workload, rounds: Rounds, rivals: set[str]) -> list[str]:
    """Jobs a second, and the p99 of a claim, by the age of the snapshot."""
    places = list(by_title(rounds))
    titles = [*places, "last / first", "× best rival", "CPU µs/job", "WAL B/job"]
    titles += ["jobs a round", "lost", "twice"]
    lines = [
        "Jobs/s in each round and, in brackets, the p99 of a claim in ms, where claims are made in SQL.",
        "",
        f"| system | {' | '.join(titles)} |",
        "|---|" + "--:|" * len(titles),
    ]
    last = rates(rounds)
    best = max((last[name][places[-1]] for name in rivals & set(last)), default=0)
    for name in rounds[0]:
        found = {place: [one[name][place] for one in rounds] for place in places}
        first, end = last[name][places[0]], last[name][places[-1]]
        everything = [s for samples in found.values() for s in samples]
        cells = [
            name,
            *(aged(samples) for samples in found.values()),
            in_bold(name, f"{100 * end / first:.0f} %"),
            in_bold(name, f"{end / best:.2f}") if best else "",
            f"{median(s.cpu_us for s in everything):,.0f}",
            f"{median(s.wal_bytes for s in everything):,.0f}",
            f"{max(s.jobs for s in everything):,}",
            *counts(everything)[1:],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def aged(samples: list[Sample]) -> str:
    """The rate of one round, the p99 of its claims, and T if it was cut short."""
    p99 = [s.more["p99"] for s in samples if "p99" in s.more]
    claims = f" ({median(p99):.1f})" if p99 else ""
    cut = " T" if any(s.cut for s in samples) else ""
    return f"{median(s.rate for s in samples):,.0f}{claims}{cut}"


def by_title(rounds: Rounds) -> dict[str, dict[str, list[Sample]]]:
    """Turn rounds of systems of titles into titles of systems of rounds."""
    found: dict[str, dict[str, list[Sample]]] = {}
    for one in rounds:
        for name, samples in one.items():
            for title, sample in samples.items():
                found.setdefault(title, {}).setdefault(name, []).append(sample)
    return found


def rates(rounds: Rounds) -> dict[str, dict[str, float]]:
    """The median rate of each system, by title."""
    found: dict[str, dict[str, float]] = {}
    for title, systems in by_title(rounds).items():
        for name, samples in systems.items():
            found.setdefault(name, {})[title] = median(s.rate for s in samples)
    return found


def counts(samples: list[Sample]) -> list[str]:
    """Jobs done, T for a run cut short; lost and twice, of all rounds."""
    done = f"{median(s.jobs for s in samples):,.0f}"
    return [
        done + (" T" if any(s.cut for s in samples) else ""),
        str(sum(s.lost for s in samples)),
        str(sum(s.twice for s in samples)),
    ]


def shown(samples: list[Sample], key: str) -> str:
    values = [s.more[key] for s in samples if key in s.more]
    return f"{median(values):,.1f}" if values else ""


def in_bold(name: str, text: str) -> str:
    return f"**{text}**" if name == "pgqueue" else text
