"""The queues of an episode, their settings, and what they promise."""

# Of jobs without a group, whose handlers write an effect; claimed by workers of all kinds. Nothing is set for it,
# so that claims take their shortest path.
WORK = "work"
# Groups with limits, of which "one" is strict; caps of the queue and of a kind.
LIMITED = "limited"
RATED = "rated"
# Two groups in order, of which "one" is strict, and which no cap and no slow worker holds up.
LINES = "lines"
# Groups of a moment, of one job each at a time, so that sessions create their permits at once.
FRESH = "fresh"
# What an operator may purge, and pause.
SIDE = "side"
# Batches, and jobs that wait for others.
FLOW, FLOW_SIDE, CALLBACK = "q", "p", "callback"
# Jobs that save steps and wait for events. Nothing is set for it either.
LONG = "long"
TICKS = "ticks"
ALL = [WORK, LIMITED, LINES, FRESH, RATED, SIDE, TICKS, FLOW, FLOW_SIDE, CALLBACK]

SETTINGS = f"""
create table effect (job_id bigint not null);
create table step_effect (job_id bigint not null, name text not null);
select pgqueue.configure(q, retry_base => '1 ms', retry_cap => '50 ms')
    from unnest('{{{LIMITED},{LINES},{FRESH},{RATED},{SIDE},{FLOW},{FLOW_SIDE},{CALLBACK}}}'::text[]) as q;
select pgqueue.configure('{LIMITED}', group_limit => 2, max_running => 8, max_attempts => 1000);
select pgqueue.configure('{LIMITED}', group_key => 'one', group_limit => 1, group_on_retry => 'block');
select pgqueue.configure('{LIMITED}', group_key => 'two', group_limit => 1);
select pgqueue.configure('{LIMITED}', kind => 'k', max_running => 3);
select pgqueue.configure('{RATED}', rate_limit => 10, rate_period => '300 ms', max_attempts => 1000);
select pgqueue.configure('{RATED}', kind => 'k', rate_limit => 4, rate_period => '200 ms');
select pgqueue.configure('{RATED}', group_key => 'a', rate_limit => 2, rate_period => '300 ms');
select pgqueue.configure('{LINES}', group_limit => 1, max_attempts => 1000);
select pgqueue.configure('{LINES}', group_key => 'one', group_on_retry => 'block');
select pgqueue.configure('{FRESH}', group_limit => 1, max_attempts => 1000);
select pgqueue.configure('{FLOW}', group_limit => 2);
select pgqueue.schedule('tick', '{TICKS}', every => '1 second', catch_up => 'all');
select pgqueue.schedule('tock', '{TICKS}', every => '1 second', catch_up => 'all', jitter => '1 second');
"""

# How many jobs run at once at most: of a queue, a kind of it, a group of it. The judge knows these;
# changes that the operator makes are in its history.
Scope = tuple[str, str, str]  # queue, kind, group, of which "*" is each other group
LIMITS: dict[Scope, int] = {
    (LIMITED, "", ""): 8,
    (LIMITED, "k", ""): 3,
    (LIMITED, "", "*"): 2,
    (LIMITED, "", "one"): 1,
    (LIMITED, "", "two"): 1,
    (LINES, "", "*"): 1,
    (FRESH, "", "*"): 1,
    (FLOW, "", "*"): 2,
}
# How many begin in so many seconds at most.
RATES: dict[Scope, tuple[int, float]] = {
    (RATED, "", ""): (10, 0.3),
    (RATED, "k", ""): (4, 0.2),
    (RATED, "", "a"): (2, 0.3),
}
# Groups whose jobs run in order, and whether one that waits for its retry blocks the others.
ORDERED = {
    (LIMITED, "one"): True,
    (LIMITED, "two"): False,
    (LINES, "one"): True,
    (LINES, "two"): False,
}
# Limits that are lower now and then: the lower, the usual, and how to set either.
CHANGES: list[tuple[Scope, int, int, str]] = [
    (
        (LIMITED, "", "*"),
        1,
        2,
        f"select pgqueue.configure('{LIMITED}', group_limit => %s)",
    ),
    (
        (LIMITED, "k", ""),
        1,
        3,
        f"select pgqueue.configure('{LIMITED}', kind => 'k', max_running => %s)",
    ),
]
WINDOW = 2  # seconds of unique_for
GROUPS = [*"abcdefgh", "one", "one", "two", None]
TICK = 0.1  # seconds between two groups of FRESH
