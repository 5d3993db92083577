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
    "I1": "what was enqueued ends, once, and is nowhere lost",
    "I2": "nothing runs that was not enqueued, or is not due",
    "I3": "attempts count up to their maximum, and no token comes twice",
    "I4": "no two hold a job",
    "I5": "an attempt has one end, told to one",
    "I6": "dead are those, and only those, that failed for the last time",
    "I7": "each completed job has its effect, once",
    "I8": "one job for a key, and for its window",
    "I9": "views count what is there",
    "I10": "nothing that is due is kept from an idle worker, and all comes to rest",
    "L": "no limit, cap or rate is exceeded at any commit",
    "W": "a claim waits for nobody",
    "P": "nothing begins in a paused queue",
    "O": "groups of one run in order",
    "B": "a batch finishes once, at its end, with the right counts and one callback",
    "T": "a job waits for those that it is after, and is cancelled for no other",
    "K": "a step is saved by who holds the job, once, with its effect, and kept with the job",
    "S": "each slot makes one job",
    "R": "the limits were reached, or nothing is shown",
    "E": "no call fails but in documented ways",
}


def judge(folder: Path) -> Court:
    court = Court(history.read(folder))
    court.replay(commits.parse(folder / "commits"), [rule(court) for rule in RULES])
    return court
