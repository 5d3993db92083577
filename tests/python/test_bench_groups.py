"""The benchmark counts what goes wrong in a group, or with a rate, or it would prove nothing."""

from bench.groups import Load, most, overtook, together

LOAD = Load(busy=2, groups=3)


def in_order():
    return {n: float(n) for n in range(LOAD.jobs)}


def test_jobs_at_the_same_time_are_counted():
    assert together([(0, 1.0, 2.0), (1, 2.0, 3.0)]) == 0
    assert together([(0, 1.0, 9.0), (1, 2.0, 3.0), (2, 4.0, 5.0)]) == 2


def test_jobs_that_overtake_one_of_their_group_are_counted():
    assert overtook(in_order(), LOAD) == 0
    assert overtook({**in_order(), 5: 2.5, 3: 2.6}, LOAD) == 0  # of two groups
    assert overtook({**in_order(), 5: 1.5}, LOAD) == 1  # before 2, of its group


def test_a_job_that_never_began_was_overtaken():
    began = in_order()
    del began[0]
    assert overtook(began, LOAD) == 1


def test_the_most_that_begin_in_a_stretch_are_counted():
    assert most([], 1) == 0
    assert most([0.0, 0.5, 1.1, 1.2, 1.6, 3.0], 1) == 3
    assert most([0.0, 1.0, 2.0], 1) == 2
