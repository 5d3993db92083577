-- Jobs that wait for the end of others: those that were enqueued with "after".
--
-- For each pair there is a row in dependency, and the end of a job deletes its rows. No counter is written
-- by all: whoever ends a job only looks whether something else holds up the waiter.
--   - A row that nobody has touched: its job ends later, and its end will look.
--   - No row at all: the wait is over.
--   - Only rows that others are just deleting: perhaps they have looked before, and have seen ours. Then
--     nobody would notice, so it leaves a loose end, and the next claim, rest or maintain looks again.
-- So of all ends the one that looks last either ends the wait or leaves a loose end.
--
-- Who enqueues a job with "after" inserts its rows first and looks at those jobs after that; who ends a job
-- deletes it first and looks for rows after that. One of them sees the other, or the lock
-- (7366516, 257), which enqueues with "after" share until they commit: then the end leaves a loose end,
-- for as long as a transaction may be open that it could not see. Nobody waits for that lock; who enqueues
-- and cannot have it leaves the loose end himself, which is seen when he commits.

create or replace function pgqueue._check_after(after bigint[], if_dead text)
    returns text[]
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    last_id bigint := coalesce(pg_sequence_last_value('pgqueue.job_id_seq'::regclass), 0);
    unknown bigint := (select max(a.id) from unnest(after) as a (id) where a.id not between 1 and last_id);
begin
    return case
        when if_dead not in ('cancel', 'run') then array[
            'if_dead must be cancel or run',
            format('It is "%s".', if_dead),
            'Leave it out to have the job cancelled when one that it waits for dies.'
        ]
        when cardinality(after) > 10000 or num_nulls(variadic after) > 0 then array[
            'after must be up to 10000 ids of jobs',
            case when cardinality(after) > 10000
                then format('It has %s.', cardinality(after))
                else 'One of them is null.'
            end,
            'For the end of many jobs make a batch.'
        ]
        when unknown is not null
            then pgqueue._not_found('job', unknown, 'after takes ids that enqueue has returned.')
        when pg_relation_size('pgqueue.batch') > 0 and cardinality(after) > 0
            and exists (select from pgqueue.batch as b where b.id = any (after))
            then array[
                'after takes jobs, not batches',
                format('%s is a batch.', (select min(b.id) from pgqueue.batch as b where b.id = any (after))),
                'The callback of the batch can enqueue what is to come after it.'
            ]
    end;
end;
$$;

comment on function pgqueue._check_after(bigint[], text) is
'Refuses ids of jobs that never were (PQ001), batches, too many, and an unknown
if_dead; null passes.';

create or replace function pgqueue._leave_loose_ends(job_ids bigint[], outcomes text[])
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    insert into pgqueue.loose_end (job_id, outcome, horizon)
    select e.id, e.outcome, pg_snapshot_xmax(pg_current_snapshot())
    from unnest(job_ids, outcomes) as e (id, outcome);
    perform setval('pgqueue._cell_due', pgqueue._since_2020(clock_timestamp()));
end;
$$;

comment on function pgqueue._leave_loose_ends(bigint[], text[]) is
'For jobs that have ended, or perhaps just end, with these outcomes (null: look)
while jobs that wait for them are being enqueued; or for what is to be looked at
(waiter, doomed, batch). Somebody looks again.';

create or replace function pgqueue._held_up(waiter_ids bigint[])
    returns table (waiter_id bigint, is_held_up boolean)
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_sort = off
    set enable_indexscan = on
    set enable_bitmapscan = off
    set enable_nestloop = on
as $$
declare
    -- From anywhere: at one end of the index there may be only dead entries.
    start int := ((random() - 0.5) * 4294967294)::int;
begin
    return query
    select w.id, coalesce(
        (
            select true
            from pgqueue.dependency as d
            where d.waiter_id = w.id and hashint8(d.job_id) >= start and d.xmax = 0
            limit 1
        ),
        (
            select true
            from pgqueue.dependency as d
            where d.waiter_id = w.id and hashint8(d.job_id) < start and d.xmax = 0
            limit 1
        ),
        case when (select true from pgqueue.dependency as d where d.waiter_id = w.id limit 1) is null then false end
    )
    -- "exists" would make a hash of all.
    from unnest(waiter_ids) as w (id);
end;
$$;

comment on function pgqueue._held_up(bigint[]) is
'Whether jobs that wait have something left to wait for that nobody is just
ending; null if somebody is.';

create or replace function pgqueue._free(job_ids bigint[])
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_indexscan = on
    set enable_bitmapscan = off
    set enable_tidscan = on
    set enable_nestloop = on
as $$
declare
    moment timestamptz := clock_timestamp();
    picks tid[] := array(
        select j.ctid
        from pgqueue.job as j
        where j.id = any (job_ids) and j.run_at = 'infinity'
        order by j.id
        for update skip locked
    );
    freed record;
begin
    with back as (
        update pgqueue.job as j
        set run_at = coalesce(
                (j.terms).run_at, moment - (cardinality(picks) - p.place) * interval '1 microsecond'
            ),
            terms = row((j.terms).expires_at, null, (j.terms).batch_id)
        from unnest(picks) with ordinality as p (tid, place)
        where j.ctid = p.tid
        returning j.id, j.queue, j.priority
    )
    select array_agg(b.id) as ids, array_agg(b.queue) as queues, array_agg(b.priority) as lanes
    into freed
    from back as b;
    perform pgqueue._reopened(freed.queues, freed.lanes);
    if cardinality(picks) < cardinality(job_ids) then
        -- Somebody has locked them, to cancel them, say.
        perform pgqueue._leave_loose_ends(array_agg(j.id), array_agg('waiter'::text))
        from pgqueue.job as j
        where j.id = any (array(select unnest(job_ids) except select unnest(freed.ids))) and j.run_at = 'infinity'
        having count(*) > 0;
    end if;
end;
$$;

comment on function pgqueue._free(bigint[]) is
'Lets jobs run whose wait is over, from their run_at on.';

create or replace function pgqueue._cancel_waiters(job_ids bigint[], reasons text[])
    returns bigint[]
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_indexscan = on
    set enable_tidscan = on
    set enable_nestloop = off
as $$
declare
    moment timestamptz := clock_timestamp();
    doomed record;
begin
    select
        array_agg(l.tid) as picks, array_agg(l.id) as ids, array_agg(l.queue) as queues,
        array_agg(r.reason) as reasons, array_agg('cancelled'::text) as outcomes,
        array_agg(l.batch_id) as batches
    into doomed
    from (
        select j.ctid as tid, j.id, j.queue, (j.terms).batch_id
        from pgqueue.job as j
        where j.id = any (job_ids) and j.run_at = 'infinity'
        order by j.id
        for update skip locked
    ) as l
    join (
        select distinct on (u.id) u.* from unnest(job_ids, reasons) as u (id, reason)
    ) as r on r.id = l.id;
    perform pgqueue._leave_loose_ends(array_agg(j.id), array_agg('doomed'::text))
    from pgqueue.job as j
    where j.id = any (array(select unnest(job_ids) except select unnest(doomed.ids))) and j.run_at = 'infinity'
    having count(*) > 0;
    if doomed.picks is null then
        return '{}'::bigint[];
    end if;
    perform pgqueue._log(doomed.picks, doomed.outcomes, doomed.reasons, moment);
    delete from pgqueue.job as j where j.ctid = any (doomed.picks);
    perform pgqueue._tell_end(doomed.ids, doomed.queues);
    if num_nonnulls(variadic doomed.batches) > 0 then
        perform pgqueue._leave_batches(doomed.batches, doomed.outcomes);
    end if;
    return doomed.ids;
end;
$$;

comment on function pgqueue._cancel_waiters(bigint[], text[]) is
'Cancels jobs that wait for one that did not complete; the ids of those that
there still were.';

create or replace function pgqueue._cut_ties(job_ids bigint[], outcomes text[])
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_indexscan = on
    set enable_nestloop = off
as $$
declare
    ended bigint[] := job_ids;
    ends text[] := outcomes;
    tied record;
begin
    -- In rounds: who waits for a job that is cancelled here, is cancelled in the next.
    loop
        with cut as (
            delete from pgqueue.dependency as d
            where d.job_id = any (ended)
            returning d.job_id, d.waiter_id, d.runs_if_dead
        )
        select
            array_agg(c.waiter_id) as waiters,
            array_agg(c.waiter_id) filter (where e.outcome <> 'completed' and not c.runs_if_dead) as doomed,
            array_agg(
                format(
                    'job %s, which it waited for, %s', c.job_id,
                    case e.outcome when 'dead' then 'is dead' else 'was cancelled' end
                )
            ) filter (where e.outcome <> 'completed' and not c.runs_if_dead) as reasons
        into tied
        from cut as c
        join (
            select distinct on (u.id) u.* from unnest(ended, ends) as u (id, outcome)
        ) as e on e.id = c.job_id;
        exit when tied.waiters is null;

        ended := '{}';
        if tied.doomed is not null then
            ended := pgqueue._cancel_waiters(tied.doomed, tied.reasons);
            ends := array_fill('cancelled'::text, array[cardinality(ended)]);
        end if;
        perform pgqueue._end_waits(array(select unnest(tied.waiters) except select unnest(tied.doomed)));
        exit when ended = '{}';
    end loop;
end;
$$;

comment on function pgqueue._cut_ties(bigint[], text[]) is
'For jobs that have ended (completed, dead, cancelled): ends the waits for them
that are over, and cancels who will not run without them.';

create or replace function pgqueue._settle(job_ids bigint[], outcomes text[])
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    if (pg_try_advisory_lock(7366516, 257) and pg_advisory_unlock(7366516, 257)) is not true then
        perform pgqueue._leave_loose_ends(job_ids, outcomes);
    end if;
    perform pgqueue._cut_ties(job_ids, outcomes);
end;
$$;

comment on function pgqueue._settle(bigint[], text[]) is
'_cut_ties, for jobs that this transaction has just deleted: also if somebody is
just enqueueing jobs that wait for them.';

create or replace function pgqueue._end_waits(waiter_ids bigint[])
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_seqscan = off
    set enable_indexscan = on
as $$
declare
    looked record;
    is_certain boolean := current_setting('transaction_isolation') = 'read committed';
begin
    select
        array_agg(h.waiter_id) filter (where not h.is_held_up and is_certain) as free,
        array_agg(h.waiter_id) filter (where h.is_held_up is null or not h.is_held_up and not is_certain) as unsure
    into looked
    from pgqueue._held_up(waiter_ids) as h;
    if looked.unsure is not null then
        perform pgqueue._leave_loose_ends(
            looked.unsure, array_fill('waiter'::text, array[cardinality(looked.unsure)])
        );
    end if;
    if looked.free is not null then
        perform pgqueue._free(looked.free);
    end if;
end;
$$;

comment on function pgqueue._end_waits(bigint[]) is
'Looks at jobs that wait, and lets those run whose waits are over.';

create or replace function pgqueue._outcomes_of(job_ids bigint[])
    returns table (id bigint, outcome text)
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_indexscan = on
    set enable_nestloop = on
as $$
begin
    return query
    select g.id, case when d.id is not null then 'dead' when c.job_id is not null then 'cancelled' else 'completed' end
    from (select distinct u.id from unnest(job_ids) as u (id)) as g
    left join pgqueue.dead_job as d on d.id = g.id
    left join (
        select distinct r.job_id from pgqueue.run as r where r.job_id = any (job_ids) and r.outcome = 'cancelled'
    ) as c on c.job_id = g.id
    where not exists (select from pgqueue.job as j where j.id = g.id offset 0);
end;
$$;

comment on function pgqueue._outcomes_of(bigint[]) is
'How those of some jobs have ended that do not wait or run: completed, dead or
cancelled. One of which nothing is known any more counts as completed.';

create or replace function pgqueue._wait_for(job_id bigint, after bigint[], if_dead text)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_indexscan = on
    set enable_nestloop = on
as $$
declare
    looked record;
begin
    if not pg_try_advisory_xact_lock_shared(7366516, 257) then
        perform pgqueue._leave_loose_ends(after, null);
    end if;
    insert into pgqueue.dependency (job_id, waiter_id, runs_if_dead)
    select distinct a.id, _wait_for.job_id, coalesce(if_dead = 'run', false)
    from unnest(after) as a (id);
    -- Now look: whoever has not deleted yet will find the lock, or the rows.
    select array_agg(j.id) filter (where j.xmax <> '0'::xid and j.xmax <> j.xmin) as changing, count(*) as living
    into looked
    from pgqueue.job as j
    where j.id = any (after);
    if looked.changing is not null then
        perform pgqueue._leave_loose_ends(looked.changing, null);
    end if;
    if looked.living < (select count(distinct a.id) from unnest(after) as a (id)) then
        perform pgqueue._cut_ties(array_agg(o.id), array_agg(o.outcome))
        from pgqueue._outcomes_of(after) as o
        having count(*) > 0;
    end if;
end;
$$;

comment on function pgqueue._wait_for(bigint, bigint[], text) is
'Lets a new job wait for others. One that has ended already counts as it ended.';

create or replace function pgqueue._tie_loose_ends()
    returns bigint
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_indexscan = on
    set enable_tidscan = on
    set enable_nestloop = on
as $$
declare
    picked record;
begin
    if pg_relation_size('pgqueue.loose_end') = 0 then
        return 0;
    end if;
    with dropped as (
        delete from pgqueue.loose_end as l
        where l.ctid = any (array(
            select p.ctid
            from pgqueue.loose_end as p
            where case
                when p.outcome in ('waiter', 'doomed', 'batch') then true
                -- Perhaps somebody is just ending it.
                when p.outcome is null
                    then (select true from pgqueue.job as j where j.id = p.job_id and j.xmax <> '0'::xid) is null
                -- Else its transactions may still be open. A number from before a restore says nothing.
                else p.horizon <= pg_snapshot_xmin(pg_current_snapshot())
                    or p.horizon > pg_snapshot_xmax(pg_current_snapshot())
            end
            limit 1000
            for update skip locked
        ))
        returning l.job_id, l.outcome
    )
    select
        array_agg(distinct p.job_id) filter (where p.outcome = 'waiter') as waiters,
        array_agg(distinct p.job_id) filter (where p.outcome = 'doomed') as doomed,
        array_agg(distinct p.job_id) filter (where p.outcome = 'batch') as batches,
        array_agg(p.job_id) filter (where p.outcome in ('completed', 'dead', 'cancelled')) as ended,
        array_agg(p.outcome) filter (where p.outcome in ('completed', 'dead', 'cancelled')) as outcomes,
        array_agg(distinct p.job_id) filter (where p.outcome is null) as changing,
        (select count(*) from dropped) as ends
    into picked
    from (
        select d.job_id, d.outcome from dropped as d
        union all
        (
            select l.job_id, l.outcome
            from pgqueue.loose_end as l
            where exists (select from pgqueue.dependency as d where d.job_id = l.job_id offset 0)
            limit 1000
        )
    ) as p;
    if picked.ended is not null then
        perform pgqueue._cut_ties(picked.ended, picked.outcomes);
    end if;
    if picked.changing is not null then
        perform pgqueue._cut_ties(array_agg(o.id), array_agg(o.outcome))
        from pgqueue._outcomes_of(picked.changing) as o
        having count(*) > 0;
    end if;
    if picked.doomed is not null then
        picked.doomed := pgqueue._cancel_waiters(
            picked.doomed,
            array_fill('a job that it waited for did not complete'::text, array[cardinality(picked.doomed)])
        );
        perform pgqueue._settle(
            picked.doomed, array_fill('cancelled'::text, array[cardinality(picked.doomed)])
        );
    end if;
    if picked.waiters is not null then
        perform pgqueue._end_waits(picked.waiters);
    end if;
    if picked.batches is not null then
        perform pgqueue._look_at_batches(picked.batches);
    end if;
    return picked.ends;
end;
$$;

comment on function pgqueue._tie_loose_ends() is
'Looks again where an end could not see what others were just doing, at up to a
thousand places; returns how many need no further look.';
