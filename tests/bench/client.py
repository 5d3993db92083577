"""Workloads through each system's own client and worker; see bench.rivals for the drivers."""

import sys
from statistics import quantiles

from bench.rivals import Rival
from bench.server import Sample, measure

LIMIT = 60  # seconds for one drain


def size(rival: Rival, jobs: int) -> int:
    """Fewer jobs for the slow, who would take all day."""
    return {"procrastinate": jobs // 30, "chancy": jobs // 10}.get(rival.name, jobs)


def clients(rival: Rival, jobs: int = 10_000) -> dict[str, Sample]:
    """One job a call and a commit, from 8 concurrent clients."""
    rival.run("reset")
    sample = measure(jobs, lambda: rival.run("enqueue", jobs=jobs)["seconds"])
    expect(rival, jobs)
    return {"one a call, 8 clients": sample}


def drains(rival: Rival, jobs: int = 60_000) -> dict[str, Sample]:
    """No-op jobs, enqueued in bulk: one worker process, and two."""
    jobs = size(rival, jobs)
    samples = {}
    for workers in (1, 2):
        rival.run("reset")
        bulk = measure(jobs, lambda: rival.run("bulk", jobs=jobs)["seconds"])
        samples["bulk, 5,000 a call"] = bulk
        title = f"drain, {workers} worker process{'es' * (workers - 1)}"
        samples[title] = drain(rival, jobs, workers)
    return samples


def naps(rival: Rival, jobs: int = 10_000) -> dict[str, Sample]:
    """Handlers that sleep 2 to 5 ms, at most 32 at a time: no more than 9,100 a second."""
    jobs = size(rival, jobs)
    rival.run("reset")
    rival.run("bulk", jobs=jobs)
    return {"naps of 2–5 ms, 32 at once": drain(rival, jobs, 1, nap=(0.002, 0.005))}


def drain(rival: Rival, jobs: int, workers: int, **how: object) -> Sample:
    seen: set[int] = set()
    duplicates = 0

    def run() -> float:
        nonlocal duplicates
        started = [
            rival.start("drain", jobs=jobs, limit=LIMIT, **how) for _ in range(workers)
        ]
        answers = [each.answer() for each in started]
        for answer in answers:
            ran = {n for first, last in answer["seen"] for n in range(first, last + 1)}
            duplicates += answer["duplicates"] + len(ran & seen)
            seen.update(ran)
        return max(answer["seconds"] for answer in answers)

    sample = measure(jobs, run)
    left = rival.run("depth")["jobs"]
    if duplicates or left or len(seen) != jobs:
        text = f"{rival.name}: {jobs - len(seen)} of {jobs} not run, {duplicates} twice, {left} left"
        print(text, file=sys.stderr)
        if rival.name == "pgqueue":
            sys.exit(1)
        sample.rate *= len(seen) / jobs
    return sample


def latency(rival: Rival, jobs: int = 300) -> tuple[float, float, float]:
    """One job each 20 ms to an idle worker: p50, p95 and p99, in ms from its commit."""
    rival.run("reset")
    found = rival.run("latency", jobs=jobs)["ms"]
    if len(found) != jobs:
        sys.exit(f"{rival.name}: {jobs - len(found)} of {jobs} jobs never began")
    percentiles = quantiles(found, n=100)
    return percentiles[49], percentiles[94], percentiles[98]


def expect(rival: Rival, jobs: int) -> None:
    if (found := rival.run("depth")["jobs"]) != jobs:
        sys.exit(f"{rival.name}: {found} jobs are there, {jobs} should be")
