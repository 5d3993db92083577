"""The verdict on one episode: its histories and its commits against each invariant."""

from pathlib import Path

from soak import commits, history
from soak.court import Court
from soak.rules_acks import Acknowledged, Answers, Kept, Views, Waiting
from soak.rules_flow import Batches, Slots, Steps, Waits
from soak.rules_jobs import Attempts, Effects, Ends, Keys
from soak.rules_limits import Limits, Order, Pauses, Rates

RULES = [
    *(Attempts, Ends, Effects, Keys, Limits, Rates, Pauses, Order),
    *(Batches, Waits, Steps, Slots, Acknowledged, Answers, Waiting, Views, Kept),
]
INVARIANTS = {
    "I1": "every enqueued job ends, once, and none is lost",
    "I2": "no job runs that was not enqueued or is not due",
    "I3": "attempts count up to their maximum, and no token is handed out twice",
    "I4": "no two workers hold the same job",
    "I5": "an attempt ends once, and one caller is told so",
    "I6": "the dead jobs are exactly those whose last attempt failed",
    "I7": "each completed job has its effect, once",
    "I8": "a unique key, and its window, has one job",
    "I9": "views count what is there",
    "I10": "no due job is kept from an idle worker, and everything comes to rest",
    "L": "no limit, cap or rate is exceeded at any commit",
    "W": "a claim waits for nobody",
    "P": "no job starts in a paused queue",
    "O": "groups with a limit of 1 run in order",
    "B": "a batch finishes once, when it has ended, with the right counts and one callback",
    "T": "a job waits for the jobs that it is after, and is cancelled because of no others",
    "K": "a step is saved once, with its effect, by the worker that holds the job, and kept as long as the job",
    "S": "each slot enqueues one job",
    "R": "the limits were reached; otherwise nothing is proved",
    "E": "calls fail only in documented ways",
}


def judge(folder: Path) -> Court:
    court = Court(history.read(folder))
    court.replay(commits.parse(folder / "commits"), [rule(court) for rule in RULES])
    return court
