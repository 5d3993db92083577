"""Run episodes until the time is over, and write a report.

python -m soak [--minutes N] [--seed SEED] [--folder FOLDER]
"""

import argparse
import random
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

from soak.episode import Plan, run
from soak.report import complaints, describe, table, tally

# How many hints get lost: in one episode none, in the next some, then all.
LOST = [0, 0.5, 0, 1]


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seconds", type=float, default=45, help="of an episode")
    parser.add_argument("--seed", default=str(random.randrange(1 << 30)))
    parser.add_argument("--folder", type=Path, default=Path(".venv/soak"))
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    deadline = time.monotonic() + 60 * options.minutes
    number, found = 0, Counter[str]()
    while number == 0 or time.monotonic() < deadline:
        plan = Plan(
            options.folder / str(number),
            f"{options.seed} {number}",
            min(options.seconds, 60 * options.minutes),
            LOST[number % len(LOST)],
            promotes=number % 3 == 1,
        )
        print(
            f"episode {number}, seed {plan.seed!r}, hints lost {plan.lost_hints}",
            flush=True,
        )
        court = run(plan)
        print(describe(court), flush=True)
        found.update(tally(court))
        if court.violations:
            print(complaints(court), flush=True)
        else:
            shutil.rmtree(plan.folder)
        number += 1
    print(f"\nseed {options.seed}, {options.minutes:g} minutes\n\n{table(found)}")
    return 1 if found["episodes with violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
