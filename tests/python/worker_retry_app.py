"""Handlers with a retry policy; each raises what its payload names."""

import time

import pgqueue

app = pgqueue.App()
ERRORS = {
    error.__name__: error
    for error in (KeyError, ValueError, LookupError, TimeoutError, pgqueue.Reject)
}
ERRORS["Retry"] = lambda: pgqueue.Retry(after=77)
ERRORS["Backoff"] = pgqueue.Retry


def fail(error: str) -> None:
    raise ERRORS[error]()


async def afail(error: str) -> None:
    raise ERRORS[error]()


POLICIES = {
    "plain": {},
    "few": {"max_attempts": 3},
    "one": {"max_attempts": 1},
    "slowly": {"retry_base": 40, "retry_cap": 100},
    "only": {"retry_for": (LookupError, OSError)},
    "not": {"give_up_on": (LookupError, TimeoutError)},
    "bare": {"retry_for": Exception, "give_up_on": LookupError},
    "both": {"retry_for": (LookupError,), "give_up_on": (KeyError,)},
}
for name, policy in POLICIES.items():
    app.job(name, **policy)(fail)
    app.job(f"a{name}", **policy)(afail)


def late() -> None:
    time.sleep(60)


for name in ("few", "one", "slowly", "only", "not"):
    app.job(f"late_{name}", timeout=0.2, **POLICIES[name])(late)
