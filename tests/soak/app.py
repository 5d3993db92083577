"""The handlers of the soak's Python workers. They note in $SOAK_NOTES what they begin."""

import asyncio
import json
import os
import random
import time

import pgqueue

app = pgqueue.App()
OPTIONS = {"queue": "work", "transaction": True, "retry_base": 0.01, "retry_cap": 0.1}


def note(job: pgqueue.Job) -> None:
    entry = {"who": "handler", "do": "began", "start": time.time(), "end": "ok"}
    # One small append is atomic, from any number of threads and processes.
    with open(os.environ["SOAK_NOTES"], "a", buffering=1) as file:
        file.write(json.dumps({**entry, "id": job.id, "attempt": job.attempt}) + "\n")


def nap() -> float:
    """Now and then longer than the lease."""
    return random.choice([0, 0, 0.001, 0.01, 0.05] * 20 + [2.5])


def maybe_fail() -> None:
    if random.random() < 0.1:
        raise ValueError("failed")


@app.job("k", **OPTIONS)
def write(job: pgqueue.Job, mark: int) -> None:
    note(job)
    job.connection.execute("insert into effect values (%s)", (job.id,))
    time.sleep(nap())
    maybe_fail()


@app.job("l", **OPTIONS)
def write_l(job: pgqueue.Job, mark: int) -> None:
    write.function(job, mark)


@app.job("async", **OPTIONS)
async def awrite(job: pgqueue.Job, mark: int) -> None:
    note(job)
    await job.connection.execute("insert into effect values (%s)", (job.id,))
    await asyncio.sleep(nap())
    maybe_fail()
