-- Jobs that wait for the end of others: those that were enqueued with "after".
--
-- Each wait is a row in dependency. No counter is written by all: whoever ends a job cuts its ties, and then
-- looks whether another job holds up who waited for it.
--   - One that nobody has touched since it was written (xmax): it ends later, and its end will look.
--   - None: the wait is over.
--   - Only such as others are just deleting, or writing: perhaps those have looked before, and have seen
--     ours. Then nobody would notice, so it leaves a loose end, and the next claim, rest or maintain looks.
-- So of all ends the one that looks last either ends the wait or leaves a loose end.
--
-- An end does not see a job that is just being enqueued after it. So that leaves a loose end as well, which
-- is seen when it commits. An end with an old snapshot (REPEATABLE READ) leaves one for each of its jobs.
-- Nobody waits for anybody here: what somebody else has locked becomes a loose end.
--
-- Who claims a job locks it first, and leaves the new version with an xmax that equals its xmin.

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

create or replace function pgqueue._leave_loose_ends(ids bigint[], what text, look_at timestamptz default now())
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    insert into pgqueue.loose_end (id, what) select i.id, _leave_loose_ends.what from unnest(ids) as i (id);
    perform setval('pgqueue._cell_due', least(
        pg_sequence_last_value('pgqueue._cell_due'), pgqueue._since_2020(look_at)
    ));
end;
$$;

comment on function pgqueue._leave_loose_ends(bigint[], text, timestamptz) is
'Has somebody look again, when this has committed, at jobs that wait (waiter), at
jobs that have ended (completed, dead, cancelled), or at batches (batch).';

create or replace function pgqueue._is_left_alone(job_id bigint)
    returns boolean
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_indexscan = on
as $$
begin
    -- For key share it would wait for who just updates it, in spite of skip locked.
    perform from pgqueue.job as j where j.id = _is_left_alone.job_id for update skip locked;
    if found then
        -- Gives the lock back.
        raise sqlstate 'PQ000';
    end if;
    return false;
exception when sqlstate 'PQ000' then
    return true;
end;
$$;

comment on function pgqueue._is_left_alone(bigint) is
'Whether a job waits or runs, and nobody is just writing or ending it. Its row
alone does not tell: who wrote there may have rolled back.';

create or replace function pgqueue._held_up(waiter_ids bigint[])
    returns table (waiter_id bigint, is_held_up boolean, touched bigint)
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_sort = off
    set enable_indexscan = on
    set enable_bitmapscan = off
    set enable_nestloop = on
    set enable_hashjoin = off
    set enable_mergejoin = off
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
            join pgqueue.job as j on j.id = d.job_id
            where d.waiter_id = w.id and hashint8(d.job_id) >= start and j.xmax in ('0'::xid, j.xmin)
            limit 1
        ),
        (
            select true
            from pgqueue.dependency as d
            join pgqueue.job as j on j.id = d.job_id
            where d.waiter_id = w.id and hashint8(d.job_id) < start and j.xmax in ('0'::xid, j.xmin)
            limit 1
        ),
        false
    ), (
        select j.id
        from pgqueue.dependency as d
        join pgqueue.job as j on j.id = d.job_id
        where d.waiter_id = w.id
        limit 1
    )
    -- "exists" would make a hash of all.
    from unnest(waiter_ids) as w (id);
end;
$$;

comment on function pgqueue._held_up(bigint[]) is
'Whether jobs that wait have one left to wait for that nobody is just writing or
deleting, and else one that somebody is.';

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
        perform pgqueue._leave_loose_ends(array_agg(j.id), 'waiter')
        from pgqueue.job as j
        where j.id = any (array(select unnest(job_ids) except select unnest(freed.ids))) and j.run_at = 'infinity'
        having count(*) > 0;
    end if;
end;
$$;

comment on function pgqueue._free(bigint[]) is
'Lets jobs run whose wait is over, from their run_at on.';

create or replace function pgqueue._cancel_waiters(job_ids bigint[], reasons text[], causes bigint[])
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
    missed bigint[];
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
    if cardinality(doomed.picks) is distinct from cardinality(job_ids) then
        missed := array(
            select j.id
            from pgqueue.job as j
            where j.id = any (array(select unnest(job_ids) except select unnest(doomed.ids)))
                and j.run_at = 'infinity'
        );
    end if;
    if missed <> '{}' then
        -- They keep that tie, to a job that never was, or they might run meanwhile.
        insert into pgqueue.dependency (job_id, waiter_id, runs_if_dead)
        select distinct -abs(u.cause), u.id, false
        from unnest(job_ids, causes) as u (id, cause)
        where u.id = any (missed);
        perform pgqueue._leave_loose_ends(missed, 'waiter');
    end if;
    if doomed.picks is null then
        return '{}'::bigint[];
    end if;
    perform pgqueue._log(doomed.picks, doomed.outcomes, doomed.reasons, moment);
    delete from pgqueue.job as j where j.ctid = any (doomed.picks);
    perform pgqueue._tell_end(doomed.ids, doomed.queues);
    perform pgqueue._leave_batches(doomed.batches, doomed.outcomes);
    return doomed.ids;
end;
$$;

comment on function pgqueue._cancel_waiters(bigint[], text[], bigint[]) is
'Cancels jobs that wait for one that did not complete (causes), and returns the
ids of those that it could lock. The others stay blocked, and somebody looks at
them again.';

create or replace function pgqueue._outcomes_of(job_ids bigint[])
    returns table (id bigint, outcome text)
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_indexscan = on
    set enable_nestloop = off
as $$
declare
    ended bigint[] := array(
        select distinct u.id
        from unnest(job_ids) as u (id)
        where not exists (select from pgqueue.job as j where j.id = u.id offset 0)
    );
begin
    if ended = '{}' then
        return;
    end if;
    return query
    select
        e.id,
        coalesce(
            case when e.id < 0 then 'cancelled' end,
            (select 'dead'::text from pgqueue.dead_job as d where d.id = e.id), last.outcome, 'completed'
        )
    from unnest(ended) as e (id)
    left join (
        select distinct on (r.job_id) r.job_id, r.outcome
        from pgqueue.run as r
        where r.job_id = any (ended) and r.outcome in ('completed', 'dead', 'cancelled')
        order by r.job_id, r.finished_at desc
    ) as last on last.job_id = e.id;
end;
$$;

comment on function pgqueue._outcomes_of(bigint[]) is
'How those of some jobs have ended that do not wait or run: completed, dead or
cancelled. One of which nothing is known any more counts as completed; a number
below zero stands for one that did not complete.';

create or replace function pgqueue._cut_ties(job_ids bigint[], outcomes text[])
    returns void
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
    is_current boolean := current_setting('transaction_isolation') = 'read committed';
    ended bigint[] := job_ids;
    ends text[] := outcomes;
    tied record;
begin
    -- In rounds: who waits for a job that is cancelled here, is cancelled in the next.
    loop
        if not is_current then
            perform pgqueue._leave_loose_ends(array_agg(e.id), e.outcome)
            from unnest(ended, ends) as e (id, outcome)
            group by e.outcome;
        end if;
        with cut as (
            delete from pgqueue.dependency as d
            where d.ctid = any (array(
                select p.ctid from pgqueue.dependency as p where p.job_id = any (ended) for update skip locked
            ))
            returning d.job_id, d.waiter_id, d.runs_if_dead, true as is_cut
        ), found as (
            select f.job_id, f.waiter_id, f.runs_if_dead, coalesce(c.is_cut, false) as is_cut
            from (select d.* from pgqueue.dependency as d where d.job_id = any (ended)) as f
            left join cut as c on c.job_id = f.job_id and c.waiter_id = f.waiter_id
        )
        select
            array_agg(f.waiter_id) filter (where f.is_cut and not f.is_doomed) as waiters,
            array_agg(f.waiter_id) filter (where not f.is_cut) as locked,
            array_agg(f.waiter_id) filter (where f.is_doomed) as doomed,
            array_agg(f.job_id) filter (where f.is_doomed) as causes,
            array_agg(
                format(
                    'job %s, which it waited for, %s', abs(f.job_id),
                    case f.outcome when 'dead' then 'is dead' else 'was cancelled' end
                )
            ) filter (where f.is_doomed) as reasons
        into tied
        from (
            select f.*, e.outcome, f.is_cut and e.outcome <> 'completed' and not f.runs_if_dead as is_doomed
            from found as f
            join (
                select distinct on (u.id) u.* from unnest(ended, ends) as u (id, outcome)
            ) as e on e.id = f.job_id
        ) as f;

        if tied.locked is not null then
            perform pgqueue._leave_loose_ends(tied.locked, 'waiter');
        end if;
        ended := '{}';
        if tied.doomed is not null then
            ended := pgqueue._cancel_waiters(tied.doomed, tied.reasons, tied.causes);
            ends := array_fill('cancelled'::text, array[cardinality(ended)]);
        end if;
        if tied.waiters is not null then
            perform pgqueue._end_waits(array(select unnest(tied.waiters) except select unnest(tied.doomed)));
        end if;
        exit when ended = '{}';
    end loop;
end;
$$;

comment on function pgqueue._cut_ties(bigint[], text[]) is
'For jobs that have ended (completed, dead, cancelled): ends the waits for them
that are over, and cancels who will not run without them.';

create or replace function pgqueue._end_waits(waiter_ids bigint[])
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_seqscan = off
    set enable_indexscan = on
as $$
declare
    is_current boolean := current_setting('transaction_isolation') = 'read committed';
    looked record;
    cut bigint[];
begin
    select
        array_agg(h.waiter_id) filter (where h.touched is null and is_current) as free,
        array_agg(h.waiter_id) filter (where case
            when not is_current then true
            when h.touched is not null then not pgqueue._is_left_alone(h.touched)
        end) as unsure
    into looked
    from pgqueue._held_up(waiter_ids) as h
    where not h.is_held_up;
    if looked.unsure is not null then
        perform pgqueue._leave_loose_ends(looked.unsure, 'waiter');
    end if;
    if looked.free is not null then
        -- Ends that did not see who waited: first what they mean.
        cut := array(select distinct d.job_id from pgqueue.dependency as d where d.waiter_id = any (looked.free));
        if cut <> '{}' then
            perform pgqueue._cut_ties(array_agg(o.id), array_agg(o.outcome)) from pgqueue._outcomes_of(cut) as o;
        end if;
        perform pgqueue._free(array(
            select unnest(looked.free)
            except
            select d.waiter_id from pgqueue.dependency as d where d.waiter_id = any (looked.free)
        ));
    end if;
end;
$$;

comment on function pgqueue._end_waits(bigint[]) is
'Looks at jobs that wait, and lets those run whose waits are over.';

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
begin
    perform pgqueue._use('after');
    insert into pgqueue.dependency (job_id, waiter_id, runs_if_dead)
    select distinct a.id, _wait_for.job_id, coalesce(if_dead = 'run', false)
    from unnest(after) as a (id);
    -- An old snapshot does not say what has ended.
    if current_setting('transaction_isolation') = 'read committed' then
        perform pgqueue._cut_ties(array_agg(o.id), array_agg(o.outcome))
        from pgqueue._outcomes_of(after) as o
        having count(*) > 0;
    end if;
    if exists (select from pgqueue.dependency as d where d.waiter_id = _wait_for.job_id) then
        -- Hardly ever anything was missed, so it is not urgent.
        perform pgqueue._leave_loose_ends(array[job_id], 'waiter', clock_timestamp() + interval '1 second');
    end if;
end;
$$;

comment on function pgqueue._wait_for(bigint, bigint[], text) is
'Lets a new job wait for others. One that has ended already counts as it ended.';

create or replace function pgqueue._tie_loose_ends(most int)
    returns bigint
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_indexscan = on
    set enable_tidscan = on
    set enable_seqscan = off
    set enable_nestloop = on
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
declare
    picked record;
    missed bigint[];
    touched bigint[];
begin
    if pg_relation_size('pgqueue.loose_end') = 0 then
        return 0;
    end if;
    with dropped as (
        delete from pgqueue.loose_end as l
        where l.ctid = any (array(select p.ctid from pgqueue.loose_end as p limit most for update skip locked))
        returning l.id, l.what
    )
    select
        array_agg(distinct d.id) filter (where d.what = 'waiter') as waiters,
        array_agg(distinct d.id) filter (where d.what = 'batch') as batches,
        array_agg(d.id) filter (where d.what in ('completed', 'dead', 'cancelled')) as ended,
        array_agg(d.what) filter (where d.what in ('completed', 'dead', 'cancelled')) as outcomes,
        count(*) as ends
    into picked
    from dropped as d;
    if picked.ended is not null then
        perform pgqueue._cut_ties(array_agg(e.id), array_agg(e.outcome))
        from unnest(picked.ended, picked.outcomes) as e (id, outcome)
        where not exists (select from pgqueue.job as j where j.id = e.id offset 0)
        having count(*) > 0;
    end if;
    if picked.waiters is not null then
        -- Ends that did not see who waited, and such as perhaps just do not.
        select
            array_agg(distinct d.job_id) filter (where j.id is null),
            array_agg(distinct d.job_id) filter (where j.xmax not in ('0'::xid, j.xmin))
        into missed, touched
        from pgqueue.dependency as d
        left join pgqueue.job as j on j.id = d.job_id
        where d.waiter_id = any (picked.waiters);
        if touched is not null then
            perform pgqueue._leave_loose_ends(array_agg(distinct d.waiter_id), 'waiter')
            from pgqueue.dependency as d
            where d.waiter_id = any (picked.waiters) and d.job_id = any (array(
                select t.id from unnest(touched) as t (id) where not pgqueue._is_left_alone(t.id)
            ))
            having count(*) > 0;
        end if;
        if missed is not null then
            perform pgqueue._cut_ties(array_agg(o.id), array_agg(o.outcome)) from pgqueue._outcomes_of(missed) as o;
        end if;
        perform pgqueue._end_waits(picked.waiters);
    end if;
    if picked.batches is not null then
        perform pgqueue._look_at_batches(picked.batches);
    end if;
    return picked.ends;
end;
$$;

comment on function pgqueue._tie_loose_ends(int) is
'Looks again at up to so many loose ends, and returns at how many.';
