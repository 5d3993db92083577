"""The soak in its short form, and its mutants, of which `make mutants` runs what is only read here."""

import re

import pytest
from cluster import REPO
from soak.episode import Plan, run
from soak.judge import INVARIANTS
from soak.mutants import MUTANTS, Mutant, built, mutate
from soak.report import complaints, describe, table, tally

SECONDS = 8


@pytest.mark.sample(1)
@pytest.mark.parametrize("lost", [0, 0.5], ids=["", "hints lost"])
def test_whatever_clients_and_faults_do_the_judge_finds_nothing(tmp_path, lost):
    court = run(Plan(tmp_path / "episode", "short", SECONDS, lost))
    print(describe(court))
    # Whether all limits are reached in so short a time, which is what R asks, depends on the machine.
    assert court.violations.keys() <= {"R"}, complaints(court)
    found = tally(court)
    assert found["enqueues acknowledged"] > 0 and found["episodes"] == 1
    assert sum(n for what, n in found.items() if what.startswith("fault: ")) > 0
    assert "| episodes | 2 |" in table(found + found)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_what_a_mutant_replaces_is_there(mutant: Mutant):
    assert mutate(mutant, built()) != built()
    assert {*mutant.invariants} <= INVARIANTS.keys()


def test_there_are_mutants_enough():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 25
    against = {name for mutant in MUTANTS for name in mutant.invariants}
    # R is about the soak itself.
    assert against == INVARIANTS.keys() - {"R"}


def test_each_mutant_was_caught():
    page = (REPO / "tests/soak/mutants.md").read_text()
    caught = re.findall(r"^\| ([^|]+) \| \w+/\w+\.sql \| [A-Z]", page, re.MULTILINE)
    assert caught == [mutant.name for mutant in MUTANTS]
