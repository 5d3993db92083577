"""Small edits of the SQL, each of which the judge must catch, or it proves nothing.

    make mutants                      all of them: about 20 minutes
    make mutants ARGS='token kept'    those whose names contain one of these

Prints for each by which invariants it was caught, and how soon.
"""

import argparse
import re
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster import REPO

from soak.episode import Plan, run
from soak.judge import INVARIANTS

SECONDS = 8
# Fast enough for what gets stuck, and far from what does not.
PATIENCE = 15
TRIES = 3


class StaleMutantError(Exception):
    """The SQL no longer has, or has more than once, what a mutant replaces."""


@dataclass(frozen=True)
class Mutant:
    """One edit of a text that is once in its file."""

    name: str
    file: str  # below sql/
    old: str
    new: str
    invariants: tuple[str, ...]  # one of these catches it
    lost_hints: float = 0


MUTANTS = [
    # Attempts and leases
    Mutant(
        "a claim waits for what others have locked",
        "core/pick.sql",
        """                order by j.run_at, j.id
                limit wanted
                for update skip locked
            ) as due;
        end if;
        if may_be_over""",
        """                order by j.run_at, j.id
                limit wanted
                for update
            ) as due;
        end if;
        if may_be_over""",
        ("W",),
    ),
    Mutant(
        "complete does not check the token",
        "core/finish.sql",
        "where j.id = complete.job_id and j.token = complete.token",
        "where j.id = complete.job_id",
        ("I5", "E"),
    ),
    Mutant(
        "complete_many does not check the token",
        "core/finish.sql",
        "select h.id, h.token\n                from unnest(complete_many.job_ids, complete_many.tokens) as h (id, token)",
        "select h.id, j.token\n                from unnest(complete_many.job_ids, complete_many.tokens) as h (id, token)",
        ("I5",),
    ),
    Mutant(
        "fail and release do not check the token",
        "attempts/lease.sql",
        "select h.id, h.token from unnest(_lock_held.job_ids, _lock_held.tokens)",
        "select h.id, j.token from unnest(_lock_held.job_ids, _lock_held.tokens)",
        ("I3", "I5"),
    ),
    Mutant(
        "a lease counts as expired too early",
        "core/pick.sql",
        "and (j.lease_expires_at <= _pick.moment) is not false",
        "and (j.lease_expires_at - interval '1 second' <= _pick.moment) is not false",
        ("I4",),
    ),
    Mutant(
        "an attempt is not counted",
        "core/claim.sql",
        """            token = new_token,
            attempt = j.attempt + 1,
            worker = claim.worker,
            claimed_at = moment,
            lease_expires_at = moment + case when has_leases
                then (pgqueue._in_force(j.queue, j.kind, j.group_key)).lease
                else coalesce(claim.lease, '30 seconds')
            end
        where j.ctid = any (picks)
        returning j.*;""",
        """            token = new_token,
            attempt = greatest(j.attempt, 1),
            worker = claim.worker,
            claimed_at = moment,
            lease_expires_at = moment + case when has_leases
                then (pgqueue._in_force(j.queue, j.kind, j.group_key)).lease
                else coalesce(claim.lease, '30 seconds')
            end
        where j.ctid = any (picks)
        returning j.*;""",
        ("I3",),
    ),
    Mutant(
        "a claim gives the last token again",
        "core/claim.sql",
        "new_token := coalesce(new_token, nextval('pgqueue.token_seq'));",
        "new_token := coalesce(new_token, pg_sequence_last_value('pgqueue.token_seq'), nextval('pgqueue.token_seq'));",
        ("I3",),
    ),
    Mutant(
        "a lease that was ended keeps its token",
        "attempts/attempt.sql",
        "attempt = j.attempt - (e.outcome = 'released')::int,\n        token = null,",
        "attempt = j.attempt - (e.outcome = 'released')::int,\n        token = j.token,",
        ("I4",),
    ),
    Mutant(
        "a released attempt counts",
        "attempts/attempt.sql",
        "attempt = j.attempt - (e.outcome = 'released')::int,",
        "attempt = j.attempt,",
        ("I3",),
    ),
    Mutant(
        "an expired attempt is not logged",
        "attempts/attempt.sql",
        "where settings.keep_runs > 0 and e.outcome <> 'released';",
        "where settings.keep_runs > 0 and e.outcome not in ('released', 'expired');",
        ("I3",),
    ),
    Mutant(
        "a job runs before it is due",
        "core/pick.sql",
        """                    and j.run_at <= _pick.moment
                    and (j.run_at, j.id) > (start, start_id)""",
        """                    and j.run_at <= _pick.moment + interval '20 milliseconds'
                    and (j.run_at, j.id) > (start, start_id)""",
        ("I2",),
    ),
    Mutant(
        "a job begins after it has expired",
        "attempts/attempt.sql",
        "where j.ctid = any (_recover.picks || near)\n                and coalesce(j.lease_expires_at, (j.terms).expires_at) <= _recover.moment",
        "where j.ctid = any (_recover.picks || near)\n                and j.lease_expires_at <= _recover.moment",
        ("I2", "I10"),
    ),
    # Ends
    Mutant(
        "a job is dead one attempt too early",
        "attempts/attempt.sql",
        "when e.verb = 'reject' or j.attempt >= j.max_attempts then 'dead'",
        "when e.verb = 'reject' or j.attempt >= j.max_attempts - 1 then 'dead'",
        ("I6",),
    ),
    Mutant(
        "an expired job never dies",
        "attempts/attempt.sql",
        "when j.attempt >= j.max_attempts then 'dead'\n                else 'expired'",
        "else 'expired'",
        ("I6",),
    ),
    Mutant(
        "a dead job is not kept",
        "attempts/attempt.sql",
        "where e.outcome = 'dead';",
        "where e.outcome = 'dead' and j.attempt < j.max_attempts;",
        ("I1", "I6"),
    ),
    Mutant(
        "a completion is not logged",
        "core/finish.sql",
        "where keep_runs is distinct from 0;",
        "where keep_runs is distinct from 0 and done.attempt = 1;",
        ("I1",),
    ),
    Mutant(
        "redrive leaves the dead job where it is",
        "operate/dead.sql",
        "delete from pgqueue.dead_job as d where d.id = any (revived.ids);",
        "delete from pgqueue.dead_job as d where d.id = any (revived.ids[2:]);",
        ("I1", "E"),
    ),
    Mutant(
        "complete says nothing when the lease is lost",
        "core/finish.sql",
        "        if not found or awaited < 0 and",
        """        if not found then
            return;
        elsif awaited < 0 and""",
        ("I7",),
    ),
    # Keys
    Mutant(
        "a window of unique_for ends too early",
        "core/enqueue.sql",
        "on_duplicate, job_id, moment + unique_for",
        "on_duplicate, job_id, moment + unique_for / 4",
        ("I8",),
    ),
    # Limits
    Mutant(
        "a permit is not locked before its job",
        "limits/visit.sql",
        """                    order by p.free_at desc
                    limit least(g.give, cardinality(c.tids))
                    for update skip locked""",
        """                    order by p.free_at desc
                    limit least(g.give, cardinality(c.tids))""",
        ("L", "E"),
    ),
    Mutant(
        "a permit that was created twice is not merged",
        "limits/permit.sql",
        """    return 1 < (
        select count(*)
        from pgqueue.permit as o""",
        """    return 1 < (
        select 0 * count(*)
        from pgqueue.permit as o""",
        ("L",),
    ),
    Mutant(
        "the permits of a cap are one too many",
        "base/match.sql",
        "select (permit).is_rate = _is_free.is_rate and (permit).place <= most",
        "select (permit).is_rate = _is_free.is_rate and (permit).place <= most + 1",
        ("L",),
    ),
    Mutant(
        "a job does not need the permits of its kind",
        "limits/cap.sql",
        "select row(c.*)::pgqueue._cap from unnest(caps) as c where c.kind = '' or c.kind = any (kinds)",
        "select row(c.*)::pgqueue._cap from unnest(caps) as c where c.kind = ''",
        ("L",),
    ),
    Mutant(
        "a rate counts from the last claim but one",
        "limits/cap.sql",
        """array_agg(case when (caps[g.cap]).is_rate then moment + (caps[g.cap]).period end) as free_ats""",
        """array_agg(case when (caps[g.cap]).is_rate then moment + (caps[g.cap]).period / 2 end) as free_ats""",
        ("L",),
    ),
    Mutant(
        "an expired lease gives its permit back before it is ended",
        "limits/permit.sql",
        "where j.id = p.job_id and pgqueue._holds(j.token, j.permits, p.token, p.group_key)\n            -- A retry keeps it",
        "where j.id = p.job_id and j.lease_expires_at > _free_lost_permits.moment + interval '1 second'\n            -- A retry keeps it",
        ("L", "O"),
    ),
    Mutant(
        "the end of an attempt gives back its permit to begin",
        "attempts/attempt.sql",
        "and not k.is_rate\n                    and (keeping is null",
        "and (keeping is null",
        ("L",),
    ),
    # Order
    Mutant(
        "a group passes over its first job",
        "limits/visit.sql",
        "limit g.give + least(coalesce(g.most - 1, extra), extra)",
        "offset 1 limit g.give + least(coalesce(g.most - 1, extra), extra)",
        ("O", "I1"),
    ),
    Mutant(
        "a job overtakes one that waits for its retry",
        "attempts/attempt.sql",
        "then (pgqueue._in_force(j.queue, j.kind, j.group_key)).group_on_retry = 'block'\n            end",
        "then false\n            end",
        ("O",),
    ),
    Mutant(
        "a new ticket begins at its own job, whatever waits",
        "base/ticket.sql",
        """case when pg_sequence_last_value('pgqueue._cell_groups_slow') > pgqueue._since_2020(moment) and in_order is not true
            then moment + interval '1 second' end,""",
        "moment + interval '1 second',",
        ("O",),
    ),
    # Batches
    Mutant(
        "a batch is over though a job of it is being written",
        "flow/batch.sql",
        "return case when last.touched is null then true end;",
        "return true;",
        ("B",),
    ),
    Mutant(
        "a job joins a batch that just finishes",
        "base/check.sql",
        "_is_own(b.queue, own)\n    for key share;",
        "_is_own(b.queue, own);",
        ("B",),
    ),
    Mutant(
        "a batch does not count who was cancelled",
        "flow/batch.sql",
        "where e.outcome in ('dead', 'cancelled') and e.batch_id is not null",
        "where e.outcome = 'dead' and e.batch_id is not null",
        ("B",),
    ),
    Mutant(
        "a batch that has finished does not say so",
        "flow/batch.sql",
        "set finished_at = clock_timestamp(), callback_id = callback",
        "set finished_at = null, callback_id = callback",
        ("B",),
    ),
    Mutant(
        "nobody sweeps what no hint points to",
        "flow/sweep.sql",
        "if done < most then\n        done := done + pgqueue._sweep(most);",
        "if done < 0 then\n        done := done + pgqueue._sweep(most);",
        ("I1", "I10", "B"),
        1,
    ),
    Mutant(
        "nobody sweeps the groups",
        "limits/group.sql",
        "perform pgqueue._sweep_permits(new_token), pgqueue._sweep_groups();",
        "perform pgqueue._sweep_permits(new_token);",
        ("I1", "I10"),
        1,
    ),
    # Waits
    Mutant(
        "a tie is cut while the job still runs",
        "flow/depend.sql",
        "when (select true from pgqueue.job as j where j.id = p.id) then null",
        "when (select j.token is null from pgqueue.job as j where j.id = p.id) then null",
        ("T",),
    ),
    Mutant(
        "a job that was cancelled counts as completed",
        "flow/depend.sql",
        "then 'cancelled'\n        else 'completed'\n    end\n    from pgqueue._parts(job_ids)",
        "then 'completed'\n        else 'completed'\n    end\n    from pgqueue._parts(job_ids)",
        ("T",),
    ),
    Mutant(
        "if_dead run is cancelled as well",
        "flow/depend.sql",
        "select d.job_id, d.waiter_id, e.outcome <> 'completed' and not d.runs_if_dead, true",
        "select d.job_id, d.waiter_id, e.outcome <> 'completed', true",
        ("T",),
    ),
    # Steps and events
    Mutant(
        "a step is saved by who has lost the lease",
        "flow/step.sql",
        "where j.id = save_step.job_id and j.token = save_step.token;",
        "where j.id = save_step.job_id;",
        ("K",),
    ),
    Mutant(
        "steps stay behind when a job completes",
        "attempts/attempt.sql",
        "    if pg_relation_size('pgqueue.step') > 0 then\n        delete from pgqueue.step as s where s.job_id = any (job_ids);",
        "    if pg_relation_size('pgqueue.step') > 0 then\n        delete from pgqueue.step as s where s.job_id = any (job_ids) and s.place > 1;",
        ("K",),
    ),
    Mutant(
        "an emit leaves no loose end",
        "flow/event.sql",
        "    insert into pgqueue.loose_end (look_at, id, what) values (moment, hash, 'event');\n",
        "",
        ("I1", "I10"),
    ),
    # Schedules
    Mutant(
        "a slot is fired by all who see it due",
        "flow/schedule.sql",
        "        order by s.due_at\n        limit most\n        for update skip locked",
        "        order by s.due_at\n        limit most",
        ("S",),
    ),
    Mutant(
        "each other slot is left out",
        "flow/schedule.sql",
        "else date_bin(schedule.every, after, '1970-01-05 00:00 UTC') + schedule.every",
        "else date_bin(schedule.every, after, '1970-01-05 00:00 UTC') + 2 * schedule.every",
        ("S",),
    ),
    # Pauses and views
    Mutant(
        "a pause counts for enqueues only",
        "core/claim.sql",
        "if settings.paused and paused is null then",
        "if settings.paused and paused is null and claim.max_jobs > 5 then",
        ("P",),
    ),
    Mutant(
        "a view counts running jobs twice",
        "observe/measure.sql",
        "count(*) filter (where o.state = 'l') as running,",
        "2 * count(*) filter (where o.state = 'l') as running,",
        ("I9",),
    ),
    # Idle workers
    Mutant(
        "a claim looks only at what came due lately",
        "core/pick.sql",
        "first timestamptz := '-infinity'::timestamptz;",
        "first timestamptz := moment - interval '1 second';",
        ("I10",),
    ),
]


def built() -> str:
    control = (REPO / "pgqueue.control").read_text()
    (version,) = re.findall(r"^default_version = '(.+)'", control, re.M)
    return (REPO / f"sql/pgqueue--{version}.sql").read_text()


def mutate(mutant: Mutant, script: str) -> str:
    """The extension script with the edit, which must have one place in its file."""
    source = (REPO / "sql" / mutant.file).read_text()
    found = source.count(mutant.old)
    if found != 1 or script.count(source) != 1:
        message = f"{mutant.name}: what it replaces is {found} times in {mutant.file}"
        raise StaleMutantError(message)
    return script.replace(source, source.replace(mutant.old, mutant.new))


def hunt(mutant: Mutant, folder: Path) -> Iterator[tuple[set[str], str]]:
    """Episodes with the mutant, with one seed after another."""
    script = folder / "mutant.sql"
    for number in range(TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        script.write_text(mutate(mutant, built()))
        plan = Plan(
            folder / "episode",
            str(number),
            SECONDS,
            mutant.lost_hints,
            script=script,
            patience=PATIENCE,
        )
        court = run(plan)
        worst = {name: texts[0] for name, texts in court.violations.items()}
        yield set(worst), next(iter(worst.values()), "")


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak.mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    chosen = [
        m
        for m in MUTANTS
        if not options.names or any(n in m.name for n in options.names)
    ]
    survived = 0
    began = time.monotonic()
    print("| mutant | file | caught by | episode |\n|---|---|---|---|")
    for mutant in chosen:
        caught: set[str] = set()
        for number, (found, example) in enumerate(
            hunt(mutant, Path(".venv/mutants")), 1
        ):
            caught |= found
            print(
                f"    {number}: {sorted(found)} {example[:150]}",
                file=sys.stderr,
                flush=True,
            )
            if found & set(mutant.invariants):
                break
        is_caught = caught & set(mutant.invariants)
        survived += not is_caught
        shown = ", ".join(sorted(caught, key=list(INVARIANTS).index))
        if not is_caught:
            shown = f"**not by {' or '.join(mutant.invariants)}**, {shown or 'nothing'}"
        print(f"| {mutant.name} | {mutant.file} | {shown} | {number} |", flush=True)
    minutes = (time.monotonic() - began) / 60
    print(f"\n{len(chosen)} mutants in {minutes:.0f} minutes, {survived} survived")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
