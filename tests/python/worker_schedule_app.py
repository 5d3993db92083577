"""A handler that recurs each second, and notes its slots in the file $RAN."""

import os

import pgqueue

app = pgqueue.App()


@app.job(
    "tick", queue="work", cron="* * * * * *", timezone="Europe/Berlin", catch_up="skip"
)
def tick(job: pgqueue.Job) -> None:
    with open(os.environ["RAN"], "a", buffering=1) as file:
        file.write(f"slot {job.headers['slot']}\n")
