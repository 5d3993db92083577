-- Jobs that wait for others to end: those that were enqueued with "after".
--
-- Each wait is a row in dependency, called a tie. Only ties count: a job is blocked as long as it
-- has one, and a tie to a job that has ended is work left to do. Where a job is now shows how it ended: it is
-- in dead_job or in gone, or else it completed.
--
-- The end of a job cuts its ties, up to a few hundred. There is no counter that every end would have to update:
-- for each waiting job, the end checks whether another job still holds it up.
--   - One that nobody has touched since it was written (xmax): it will end later, and its end will check. So
--     this tie is cut.
--   - None: the wait is over. The first session to lock the waiting job frees it, and cuts its last ties.
--   - Only ones that other sessions are deleting or writing right now: they may have checked before us, and
--     seen our job. So this tie stays.
-- A tie also stays if there are too many for one call, if another session has locked the waiting job, if the
-- end has an old snapshot (REPEATABLE READ), or if it did not see a job that was being enqueued after it. Nothing
-- here waits for a lock; such ties are found later.
--
-- Claims, rests and maintain look for them, a bounded number at a time. A row in loose_end says where to look
-- first. It is a hint and may be lost: the sweep goes through all ties and batches in the order of their ids, from
-- where it last stopped. The check at the end of a job is a hint, too: it only saves waiting for the sweep.
-- (See pgqueue.lose_hints in module ticket.)
--
-- An xmax equal to xmin also means untouched: a claim locks a job first, and that leaves it in the new version.

-- Once this has committed, makes other sessions look soon at the ties of jobs (null: none) that have ended (what:
-- ended), or that may have ended while another was enqueued after them (new, less urgent), or at batches (batch).
-- These are hints: the sweep gets there as well. The others are not: an event, by its hash (event), and jobs that
-- wait for one (wait), see module event.
create or replace function pgqueue._leave_loose_ends(ids bigint[], what text, delay interval default '0')
    returns void
    language plpgsql
as $$
declare
    moment timestamptz := clock_timestamp() + delay;
    look_at bigint := pgqueue._since_2020(moment);
begin
    if ids is null or what not in ('event', 'wait') and pgqueue._is_lost() then
        return;
    end if;
    insert into pgqueue.loose_end (look_at, id, what)
    select moment, i.id, _leave_loose_ends.what from unnest(ids) as i (id);
    -- Makes claims look around then, unless they do so earlier.
    if (pg_sequence_last_value('pgqueue._cell_due') <= look_at) is not true then
        perform setval('pgqueue._cell_due', look_at);
    end if;
end;
$$;

-- Whether each waiting job has another job left to wait for that no session is writing or deleting; null if it has
-- only ones that a session is. Jobs in ended do not count, even if they have come back since.
create or replace function pgqueue._held_up(waiter_ids bigint[], ended bigint[])
    returns table (waiter_id bigint, is_held_up boolean)
    language plpgsql
    set enable_sort = off
as $$
declare
    -- Start at a random place: at one end of the index there may be only dead entries.
    start int := ((random() - 0.5) * 4294967294)::int;
begin
    return query
    select w.id, case
        when (
            select true
            from (values (start, 2147483647), (-2147483648, start - 1)) as half (low, high)
            cross join lateral (
                select d.job_id
                from pgqueue.dependency as d
                where d.waiter_id = w.id and hashint8(d.job_id) between half.low and half.high
                    and d.job_id <> all (ended)
                -- In this order, so that the index that begins with waiter_id is used.
                order by hashint8(d.job_id)
                limit 100
            ) as d
            where exists (
                select from pgqueue.job as j where j.id = d.job_id and j.xmax in ('0'::xid, j.xmin) offset 0
            )
            limit 1
        ) then true
        when l.id is null then false
        when pgqueue._is_left_alone(l.id) then true
    end
    -- Not "exists", which would hash all jobs and ties.
    from unnest(waiter_ids) as w (id)
    left join lateral (
        select d.job_id as id
        from (
            select d.job_id
            from pgqueue.dependency as d
            where d.waiter_id = w.id and d.job_id <> all (ended)
            order by hashint8(d.job_id)
            limit 100
        ) as d
        where exists (select from pgqueue.job as j where j.id = d.job_id offset 0)
        limit 1
    ) as l on true;
end;
$$;

-- Whether a job still waits for others. A suspended one may do so although it also has a run_at.
create or replace function pgqueue._is_blocked(job pgqueue.job)
    returns boolean
    language plpgsql
as $$
begin
    return job.run_at = 'infinity'
        or job.token is null and exists (select from pgqueue.wait as w where w.job_id = job.id);
end;
$$;

-- Frees locked jobs whose wait is over: they may run as soon as they are due.
create or replace function pgqueue._free(job_ids bigint[])
    returns void
    language plpgsql
as $$
declare
    moment timestamptz := clock_timestamp();
    freed record;
begin
    perform pgqueue._end_waits(job_ids);
    with back as (
        update pgqueue.job as j
        set run_at = least(j.run_at, coalesce(
                (j.terms).run_at,
                moment - (cardinality(job_ids) - array_position(job_ids, j.id)) * interval '1 microsecond'
            )),
            terms = row((j.terms).expires_at, null, (j.terms).batch_id, (j.terms).after)
        where j.id = any (job_ids)
        returning j.queue, j.priority, j.group_key, j.run_at
    )
    select
        array_agg(b.queue) as queues, array_agg(b.priority) as priorities, array_agg(b.group_key) as keys,
        array_agg(b.run_at) as run_ats
    into freed
    from back as b;
    -- Enqueues make none for what is blocked.
    perform pgqueue._make_group_permits(u.queue, array_agg(u.group_key), pgqueue._in_force(u.queue))
    from unnest(freed.queues, freed.keys) as u (queue, group_key)
    where u.group_key is not null
    group by u.queue;
    perform pgqueue._reopened(freed.queues, freed.priorities, freed.keys, freed.run_ats);
end;
$$;

-- How jobs have ended: completed, dead or cancelled (also if purged or discarded); null for one that waits or
-- runs. A job of which nothing is known has completed.
create or replace function pgqueue._outcomes_of(job_ids bigint[])
    returns table (id bigint, outcome text)
    language plpgsql
as $$
begin
    -- In one statement, or a job that is redriven meanwhile would not be found anywhere.
    return query
    select p.id, case
        when (select true from pgqueue.job as j where j.id = p.id) then null
        when (select true from pgqueue.dead_job as d where d.id = p.id) then 'dead'
        when (
            select true
            from pgqueue.gone as g
            where g.part = p.part and g.ids >> p.place & 1 = 1
            limit 1
        ) then 'cancelled'
        else 'completed'
    end
    from pgqueue._parts(job_ids) as p;
end;
$$;

-- Cancels the jobs for which one of these ties leads to a job that did not complete, except those that another
-- session has locked. Returns their ids.
create or replace function pgqueue._doom(hand pgqueue._tie[], is_all boolean, ended bigint[], outcomes text[])
    returns bigint[]
    language plpgsql
    -- An index scan locks them in the order of their ids.
    set enable_sort = off
as $$
declare
    doomed bigint[] := array(select distinct h.waiter_id from unnest(hand) as h where h.is_doomed);
    locked bigint[];
    given record;
begin
    if doomed = '{}' then
        return doomed;
    end if;
    locked := array(
        select j.id
        from pgqueue.job as j
        where j.id = any (doomed) and j.run_at = 'infinity'
        order by j.id
        for update skip locked
    );
    is_all := is_all and cardinality(locked) = cardinality(doomed);
    select
        array_agg(j.id) as ids, array_agg(j.ctid) as picks, array_agg(w.reason) as reasons,
        array_agg('cancelled'::text) as outcomes
    into given
    from (
        select h.waiter_id, min(format(
            'job %s, which it waited for, %s', h.job_id,
            case e.outcome when 'dead' then 'is dead' else 'was cancelled or removed' end
        )) as reason
        from unnest(hand) as h
        left join unnest(ended, outcomes) as e (id, outcome) on e.id = h.job_id
        -- Further down the chain only if all were locked: otherwise the job above may not be cancelled.
        where h.is_doomed and h.waiter_id = any (locked) and (is_all or h.is_first)
        group by h.waiter_id
    ) as w
    cross join lateral (select j.id, j.ctid from pgqueue.job as j where j.id = w.waiter_id offset 0) as j;
    if given.picks is null then
        return '{}'::bigint[];
    end if;
    perform pgqueue._end(given.picks, given.outcomes, given.reasons, null, clock_timestamp(), true);
    return given.ids;
end;
$$;

-- Ties to jobs that have ended, at most this many, and the ties to jobs that will be cancelled because of these: a
-- whole chain at once. is_choosy leaves out jobs that other sessions may have locked. Relies on the planner
-- settings of _cut_ties.
create or replace function pgqueue._find_ties(ended bigint[], outcomes text[], most int, is_choosy boolean)
    returns pgqueue._tie[]
    language plpgsql
as $$
begin
    return array(
        with recursive chain (job_id, waiter_id, is_doomed, is_first) as (
            select d.job_id, d.waiter_id, e.outcome <> 'completed' and not d.runs_if_dead, true
            from unnest(ended, outcomes) as e (id, outcome)
            cross join lateral (select d.* from pgqueue.dependency as d where d.job_id = e.id offset 0) as d
            where not is_choosy or (
                select j.xmax in ('0'::xid, j.xmin) from pgqueue.job as j where j.id = d.waiter_id
            ) is not false
            union
            select d.job_id, d.waiter_id, not d.runs_if_dead, false
            from chain as t
            cross join lateral (select d.* from pgqueue.dependency as d where d.job_id = t.waiter_id offset 0) as d
            where t.is_doomed
        )
        select row(null, t.*)::pgqueue._tie from chain as t limit most
    );
end;
$$;

-- Frees those of these jobs that have no ties but these. still_held: jobs that keep another tie, on which we got a
-- lock, so these ties may be cut; others: the jobs to which those ties lead, to look at again. Relies on the
-- planner settings of _cut_ties.
create or replace function pgqueue._free_alone(
    waiter_ids bigint[], ties tid[], out still_held bigint[], out others bigint[]
)
    language plpgsql
as $$
declare
    alone bigint[] := array(
        select j.id
        from pgqueue.job as j
        where j.id = any (waiter_ids) and pgqueue._is_blocked(j)
        order by j.id
        for update skip locked
    );
begin
    select
        array_agg(w.id order by w.id) filter (where w.is_free),
        array_agg(w.id) filter (where w.other is not null),
        array_agg(w.other) filter (where w.other is not null)
    into alone, still_held, others
    from (
        select u.id, n.other, (
            select true from pgqueue.dependency as d where d.waiter_id = u.id and d.ctid <> all (ties) limit 1
        ) is not true as is_free
        from unnest(alone) as u (id)
        left join lateral (
            select d.job_id as other
            from pgqueue.dependency as d
            where d.waiter_id = u.id and d.ctid <> all (ties)
            limit 1
            for update skip locked
        ) as n on true
    ) as w;
    if alone is not null then
        perform pgqueue._free(alone);
    end if;
end;
$$;

-- Cuts at most this many ties to jobs that have ended: frees the jobs whose wait is over, and cancels those
-- that need a job which did not complete, a whole chain at once. Returns how many ties. is_choosy leaves out jobs
-- that other sessions may have locked. The end of a job gives no number: then 200, and the call is only a hint.
create or replace function pgqueue._cut_ties(job_ids bigint[], most int default null, is_choosy boolean default false)
    returns int
    language plpgsql
    set jit = off
    set enable_bitmapscan = off
as $$
declare
    tied bigint[];
    ended bigint[];
    outcomes text[];
    ties pgqueue._tie[];
    hand pgqueue._tie[];
    doomed bigint[];
    cancelled bigint[];
    held bigint[];
    alone bigint[];
    others bigint[];
    left_over bigint[];
    cut int;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        -- An old snapshot may not show which jobs wait.
        perform pgqueue._leave_loose_ends(job_ids, 'ended');
        return 0;
    end if;
    tied := array(
        select distinct u.id
        from unnest(job_ids) as u (id)
        where (select true from pgqueue.dependency as d where d.job_id = u.id limit 1)
    );
    if tied = '{}' or most is null and pgqueue._is_lost() then
        return 0;
    end if;
    most := coalesce(most, 200);
    select array_agg(o.id), array_agg(o.outcome)
    into ended, outcomes
    from pgqueue._outcomes_of(tied[:most]) as o
    where o.outcome is not null;
    if cardinality(tied) > most then
        perform pgqueue._leave_loose_ends(tied[most + 1 :], 'ended');
    end if;
    if ended is null then
        return 0;
    end if;

    ties := pgqueue._find_ties(ended, outcomes, most, is_choosy);
    hand := array(
        select row(d.place, f.job_id, f.waiter_id, f.is_doomed, f.is_first)::pgqueue._tie
        from unnest(ties) as f
        cross join lateral (
            select d.ctid as place
            from pgqueue.dependency as d
            where d.job_id = f.job_id and d.waiter_id = f.waiter_id
            for update skip locked
        ) as d
    );
    doomed := array(select h.waiter_id from unnest(hand) as h where h.is_doomed);
    cancelled := pgqueue._doom(hand, cardinality(hand) = cardinality(ties), ended, outcomes);
    hand := array(select h from unnest(hand) as h where h.is_first or h.job_id = any (cancelled));

    select array_agg(w.waiter_id) filter (where w.is_held_up), array_agg(w.waiter_id) filter (where not w.is_held_up)
    into held, alone
    from pgqueue._held_up(array(
        select distinct h.waiter_id from unnest(hand) as h where h.waiter_id <> all (doomed)
    ), ended) as w;
    if alone is not null then
        select held || f.still_held, f.others into held, others
        from pgqueue._free_alone(alone, array(select h.place from unnest(hand) as h)) as f;
    end if;

    delete from pgqueue.dependency as d
    where d.ctid = any (array(
        select h.place
        from unnest(hand) as h
        where h.waiter_id = any (held)
            or (select pgqueue._is_blocked(j) from pgqueue.job as j where j.id = h.waiter_id) is not true
    ));
    get diagnostics cut = row_count;
    if cancelled <> '{}' then
        -- Those that they had to other jobs, too.
        perform pgqueue._drop_ties(cancelled);
    end if;
    -- Another session has locked most of these: look for others.
    if cardinality(ties) = most and cut < most / 2 and not is_choosy then
        return cut + pgqueue._cut_ties(ended, most, true);
    end if;
    left_over := array(
        select distinct u.id
        from unnest(ended || cancelled || others) as u (id)
        where (select true from pgqueue.dependency as d where d.job_id = u.id limit 1)
    );
    if left_over <> '{}' then
        perform pgqueue._leave_loose_ends(left_over, 'ended', case
            when cut > 0 and cardinality(ties) = most or others is not null then interval '0'
            else interval '200 milliseconds'
        end);
        -- Perhaps nobody claims before the last of them has ended.
        perform pgqueue._wake(w.queue)
        from (
            select j.queue
            from unnest(left_over) as u (id)
            cross join lateral (select d.waiter_id from pgqueue.dependency as d where d.job_id = u.id limit 1) as d
            cross join lateral (select j.queue from pgqueue.job as j where j.id = d.waiter_id offset 0) as j
            limit 1
        ) as w;
    end if;
    return cut;
end;
$$;

-- Makes a new job, or one that is being suspended, wait for others. One that has already ended counts with the
-- outcome that it had.
create or replace function pgqueue._wait_for(job_id bigint, after bigint[], if_dead text)
    returns void
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_indexscan = on
as $$
declare
    is_current boolean := current_setting('transaction_isolation') = 'read committed';
    living bigint[];
    reason text;
begin
    perform pgqueue._look_from_now_on();
    -- An old snapshot may not show which jobs have ended.
    select
        array_agg(distinct o.id) filter (where o.outcome is null or not is_current),
        min(format(
            'job %s, which it waited for, %s', o.id,
            case o.outcome when 'dead' then 'is dead' else 'was cancelled or removed' end
        )) filter (where o.outcome <> 'completed' and is_current)
    into living, reason
    from pgqueue._outcomes_of(after) as o;
    if reason is not null and if_dead is distinct from 'run' then
        perform pgqueue._end(
            array(select j.ctid from pgqueue.job as j where j.id = job_id), array['cancelled'], array[reason], null,
            clock_timestamp()
        );
    elsif living is null then
        perform pgqueue._free(array[job_id]);
    else
        -- A job that is not visible may be in any queue.
        perform pgqueue._mark(bit_or(coalesce((
            select pgqueue._settings_bits(j.queue) from pgqueue.job as j where j.id = l.id
        ), pgqueue._settings_bits(''))), 'pgqueue.awaited_seq')
        from unnest(living) as l (id);
        -- A tie that already exists is being cut, or could not be when the job was suspended before: see
        -- _drop_ties. If the cut is rolled back the tie is there again; if not, there is nothing to wait for.
        insert into pgqueue.dependency (job_id, waiter_id, runs_if_dead)
        select l.id, _wait_for.job_id, coalesce(if_dead = 'run', false)
        from unnest(living) as l (id)
        where not exists (
            select from pgqueue.dependency as d where d.job_id = l.id and d.waiter_id = _wait_for.job_id offset 0
        )
        on conflict do nothing;
        if not found then
            -- The job must not be left without any tie: this waits for the session that is cutting them.
            insert into pgqueue.dependency (job_id, waiter_id, runs_if_dead)
            select l.id, _wait_for.job_id, coalesce(if_dead = 'run', false)
            from unnest(living) as l (id)
            order by l.id
            on conflict do nothing;
        end if;
        -- If one of them ends meanwhile, its end does not see the tie. Those that this transaction wrote cannot end.
        perform pgqueue._leave_loose_ends(array_agg(l.id), 'new', interval '1 second')
        from unnest(living) as l (id)
        where (select j.xmin = pg_current_xact_id()::xid from pgqueue.job as j where j.id = l.id) is not true;
    end if;
end;
$$;
