-- Suspended jobs: they have ended their attempt, uncounted, until an event, a moment or the ends of other jobs.
--
-- A suspended job has a later run_at, infinity if no moment is given, so no claim meets it before that. What it
-- was suspended for is a row in wait, which the job's next end deletes; the jobs that it waits for are ties, as in
-- module depend.
--
-- emit only inserts: the event, and a loose end for it. So an open transaction that has emitted holds up only
-- others that emit the same event. Once a loose end has been committed, a claim, a rest or maintain handles it,
-- and makes the waiting jobs due. suspend writes the wait, then looks for the event; if it sees none it leaves a
-- loose end as well. So if an emit and a suspend do not see each other, the loose end of the one that commits last
-- is handled when both can be seen. Hence these loose ends are not hints and must not be lost (see module ticket),
-- and a session that handles one from its own transaction leaves another for later.
--
-- A worker that goes to sleep after its suspend must hear of an emit that has not committed yet, and that did not
-- see which session to notify. So an emit counts as "in flight" until its transaction ends, like an enqueue, with
-- a key of its own: see module wake.

-- Suspends a job, if its lease is held; the terms have been checked. Returns suspended, or cancelled if an operator
-- had asked it to stop; null if the lease is lost. Relies on the planner settings of suspend and _finish_each.
create or replace function pgqueue._suspend(
    job_id bigint, token bigint, event text, run_at timestamptz, after bigint[], step text, moment timestamptz
)
    returns text
    language plpgsql
as $$
declare
    awaited bigint := pg_sequence_last_value('pgqueue.awaited_seq');
    picks tid[];
    outcome text;
    look_at bigint;
    -- Not a record, since reading one costs time even when it is null.
    job_queue text;
    job_priority int;
begin
    -- The plain case, for an event or a moment and without a group, a cap or an error, for a fifth of the cost.
    if after is null and awaited >= 0 then
        -- As in _end.
        update pgqueue.job as j
        set run_at = coalesce(_suspend.run_at, 'infinity'),
            attempt = j.attempt - 1,
            token = null,
            claimed_at = null,
            lease_expires_at = null,
            worker = null,
            progress = null
        where j.id = _suspend.job_id and j.token = _suspend.token
            and num_nonnulls(j.cancelled_at, j.permits, j.group_key) = 0 and j.errors = '[]'
        returning j.queue, j.priority into job_queue, job_priority;
    end if;
    if job_queue is null then
        picks := pgqueue._lock_held(array[_suspend.job_id], array[_suspend.token]);
        if picks = '{}' then
            return null;
        end if;
        outcome := (
            select e.status
            from pgqueue._end_attempts(
                picks, '{release}', null, array[coalesce(_suspend.run_at, 'infinity')], _suspend.moment
            ) as e
        );
        if outcome = 'cancelled' then
            return outcome;
        end if;
        job_queue := (select j.queue from pgqueue.job as j where j.id = _suspend.job_id);
    end if;

    insert into pgqueue.wait (job_id, since, event, step)
    values (_suspend.job_id, _suspend.moment, _suspend.event, _suspend.step)
    -- It has an older wait, and perhaps ties, if it ran because its run_at had come.
    on conflict on constraint wait_pkey do update set since = excluded.since, event = excluded.event, step = excluded.step;
    if pg_relation_size('pgqueue.dependency') > 0 then
        perform from pgqueue.dependency as d where d.waiter_id = _suspend.job_id limit 1;
        if found then
            perform pgqueue._drop_ties(array[_suspend.job_id]);
        end if;
    end if;
    -- From now on the ends of this queue's jobs look for waits, and claims look around.
    if (awaited >> (hashtext(job_queue) & 255) % 63 & 1 = 1) is not true then
        perform pgqueue._mark(pgqueue._settings_bits(job_queue), 'pgqueue.awaited_seq');
    end if;
    if (pg_sequence_last_value('pgqueue.used_seq') < 0) is not true then
        perform pgqueue._look_from_now_on();
    end if;
    if _suspend.run_at is not null and outcome is null then
        perform pgqueue._reopened(array[job_queue], array[job_priority], array[null::text], array[_suspend.run_at]);
    end if;
    if after is not null then
        update pgqueue.job as j
        set terms = row(
                (j.terms).expires_at, null, (j.terms).batch_id,
                array(select unnest((j.terms).after) union select unnest(_suspend.after) order by 1)
            )
        where j.id = _suspend.job_id;
    end if;
    if _suspend.event is not null then
        perform from pgqueue.event as e where e.name = _suspend.event collate "default";
        if found then
            perform pgqueue._free(array[_suspend.job_id]);
            return 'suspended';
        end if;
        insert into pgqueue.loose_end (look_at, id, what) values (_suspend.moment, _suspend.job_id, 'wait');
        -- As in _leave_loose_ends, but only after 200 ms: there is nothing to find unless an emit was open.
        look_at := pgqueue._since_2020(_suspend.moment) + 200000;
        if (pg_sequence_last_value('pgqueue._cell_due') <= look_at) is not true then
            perform setval('pgqueue._cell_due', look_at);
        end if;
    end if;
    if after is not null then
        perform pgqueue._wait_for(_suspend.job_id, after, 'run');
    end if;
    return 'suspended';
end;
$$;

create or replace function pgqueue.suspend(
    job_id bigint,
    token bigint,
    event text default null,
    run_at timestamptz default null,
    after bigint[] default null,
    step text default null
)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
as $$
declare
    refused boolean;
begin
    -- For an event alone most checks are left out, which saves a tenth.
    if current_setting('transaction_isolation') <> 'read committed'
        or (octet_length(event) <@ int4range '[1,200]') is not true or num_nonnulls(run_at, after, step) > 0
    then
        refused := pgqueue._refuse(coalesce(
            pgqueue._check_isolation(),
            pgqueue._check_suspension(suspend.job_id, suspend.event, suspend.run_at, after, suspend.step)
        ));
    end if;
    if pgqueue._suspend(
        suspend.job_id, suspend.token, suspend.event, suspend.run_at, after, suspend.step, clock_timestamp()
    ) is null then
        refused := pgqueue._refuse(pgqueue._lost(suspend.job_id, suspend.token));
    end if;
end;
$$;

comment on function pgqueue.suspend(bigint, bigint, text, timestamptz, bigint[], text) is
'Ends an attempt without counting it. The job waits, which costs no worker and no
claim anything, and is due again at the event, at run_at, or when these jobs
have ended (completed, died or been cancelled), whichever comes first; at once
for an event that has happened, or jobs that have all ended. The next attempt
learns from events and results_of which it was, and from steps what it need not
do again. If step is given, an operator''s run_now saves a step of that name. A
job that an operator asked to stop is cancelled instead.
Raises PQ002 when the lease is lost, 25001 outside READ COMMITTED, 22023 (bad
argument; nothing to wait for; or only a job that waits for this one in turn),
PQ001 (an unknown job in after).';

create or replace function pgqueue.emit(event text, payload jsonb default 'null')
    returns boolean
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_seqscan = off
as $$
declare
    moment timestamptz := clock_timestamp();
    used bigint := pg_sequence_last_value('pgqueue.used_seq');
    hash bigint := hashtextextended(event collate "default", 0);
    look_at bigint;
    refused boolean;
begin
    if (octet_length(event) <@ int4range '[1,200]') is not true then
        refused := pgqueue._refuse(pgqueue._bad_name('event', event));
    end if;
    if used >> (hashtext('') & 255) % 63 & 1 = 1 then
        refused := pgqueue._refuse(pgqueue._check_payload(payload, (pgqueue._in_force('')).max_payload_bytes));
    end if;
    -- See module wake.
    perform pg_try_advisory_xact_lock_shared(7366513, 256);
    insert into pgqueue.event (emitted_at, name, payload)
    values (moment, emit.event, coalesce(emit.payload, 'null'))
    on conflict do nothing;
    if not found then
        return false;
    end if;
    if (used < 0) is not true then
        perform pgqueue._look_from_now_on();
    end if;
    insert into pgqueue.loose_end (look_at, id, what) values (moment, hash, 'event');
    perform pgqueue._wake(u.queue)
    from (
        select distinct j.queue
        from (
            select w.job_id
            from pgqueue.wait as w
            where hashtextextended(w.event, 0) = hash and w.event = emit.event collate "default"
            limit 100
        ) as w
        cross join lateral (select j.queue from pgqueue.job as j where j.id = w.job_id offset 0) as j
    ) as u;
    if found then
        -- Set the cell so far back that a claim in a longer transaction looks at once.
        look_at := case when statement_timestamp() > now() then -1000000 else 0 end;
    end if;
    -- As in _leave_loose_ends.
    look_at := coalesce(look_at, 200000) + pgqueue._since_2020(moment);
    if (pg_sequence_last_value('pgqueue._cell_due') <= look_at) is not true then
        perform setval('pgqueue._cell_due', look_at);
    end if;
    return true;
end;
$$;

comment on function pgqueue.emit(text, jsonb) is
'Records, in the caller''s transaction, that an event has happened. True for the
first emit, whose payload stays in the view events; false for any other while
that is kept (keep_events). Jobs that are suspended for the event are due once
this commits: the next claim, rest or maintain of any session does that. Waits
only for an open transaction that has emitted the same event.
Raises 22023 (bad name), 54000 (the payload is larger than the max_payload_bytes
of all queues).';

-- The jobs whose event has happened, among those that wait for one of these events (by hash) and those with these ids.
create or replace function pgqueue._met(events bigint[], job_ids bigint[])
    returns table (job_id bigint)
    language sql
    stable
as $$
    select w.job_id
    from unnest(events) as u (hash)
    cross join lateral (
        select w.job_id, w.event from pgqueue.wait as w
        where hashtextextended(w.event, 0) = u.hash and w.event is not null
        offset 0
    ) as w
    where exists (select from pgqueue.event as e where e.name = w.event offset 0)
    union all
    select u.id
    from unnest(job_ids) as u (id)
    cross join lateral (select w.event from pgqueue.wait as w where w.job_id = u.id offset 0) as w
    where exists (select from pgqueue.event as e where e.name = w.event offset 0)
$$;

-- Makes the jobs due whose event has happened, as in _met, at most this many; returns how many. Passes over jobs
-- that other sessions have locked.
create or replace function pgqueue._look_at_waits(events bigint[], job_ids bigint[], most int)
    returns int
    language plpgsql
as $$
declare
    over bigint[] := array(
        select j.id
        from pgqueue._met(events, _look_at_waits.job_ids) as m
        cross join lateral (
            select j.id from pgqueue.job as j where j.id = m.job_id and j.token is null for update skip locked
        ) as j
        limit most
    );
    delay interval;
begin
    -- Check again on the locked jobs: meanwhile they may have come to wait for something else.
    over := array(select distinct m.job_id from pgqueue._met(null, over) as m order by m.job_id);
    if over <> '{}' then
        perform pgqueue._free(over);
    end if;
    -- Leave the rest for later, except running jobs, whose wait their end deletes.
    delay := case when cardinality(over) >= most then interval '0' else interval '200 milliseconds' end;
    perform pgqueue._leave_loose_ends(array_agg(u.id), u.what, delay)
    from (
        select e.hash as id, 'event' as what, array[e.hash] as events, null::bigint[] as job_ids
        from unnest(events) as e (hash)
        union all
        select w.id, 'wait', null, array[w.id] from unnest(_look_at_waits.job_ids) as w (id)
    ) as u
    where (
        select true
        from pgqueue._met(u.events, u.job_ids) as m
        where (select j.token is null from pgqueue.job as j where j.id = m.job_id)
        limit 1
    )
    group by u.what;
    return cardinality(over);
end;
$$;
