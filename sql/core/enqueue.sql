-- What producers call.
--
-- enqueue() is part of the caller's transaction: workers see the job when it commits,
-- and it never existed if it rolls back. Which workers to wake is in module wake.
--
-- Arguments of a function have the collation of what the caller passes, such as a column of names, but our indexes
-- have the default collation. So look-ups, hashes (which differ if a collation ignores case), and the order in which
-- keys are taken, need the default one as well: one explicit collation in a call applies to all of its arguments.

-- The job that has a unique key. Found as the first one from there on, not by "queue =", which could make the
-- planner read the whole index of lanes: it looks as cheap while the statistics know of no job.
create or replace function pgqueue._with_key(queue text, unique_key text)
    returns setof pgqueue.job
    language sql
    stable
as $$
    select f.*
    from (
        select j.*
        from pgqueue.job as j
        where (j.queue, j.unique_key)
                >= (_with_key.queue collate "default", _with_key.unique_key collate "default")
            and j.unique_key is not null
        order by j.queue, j.unique_key
        limit 1
    ) as f
    where f.queue = _with_key.queue collate "default" and f.unique_key = _with_key.unique_key collate "default"
$$;

-- Tells the caller of enqueue that the job with this key is running.
create or replace function pgqueue._tell_running(job_id bigint)
    returns void
    language plpgsql
as $$
begin
    raise notice using
        message = format('job %s with this unique_key is running and stays as it is', job_id),
        detail = 'Nothing was enqueued or replaced.',
        hint = 'To run again after it, enqueue without a unique_key, or with a different one.';
end;
$$;

-- Does what on_duplicate says for an enqueue whose key is taken. Returns the id of the job that has the key, or
-- null if the caller must look again.
create or replace function pgqueue._on_duplicate(
    queue text, unique_key text, on_duplicate text, payload jsonb, priority int, run_at timestamptz,
    expires_at timestamptz
)
    returns bigint
    language plpgsql
    set jit = off
    set enable_indexscan = on
    set enable_seqscan = off
    set enable_tidscan = on
as $$
declare
    moment timestamptz := clock_timestamp();
    present record;
    picks tid[];
    changed record;
begin
    select
        j.id, j.lease_expires_at, (j.terms).expires_at <= moment as is_late,
        on_duplicate <> 'skip' and exists (select from pgqueue.wait as w where w.job_id = j.id) as is_suspended
    into present
    from pgqueue._with_key(_on_duplicate.queue, _on_duplicate.unique_key) as j;
    if not found then
        return null;
    end if;

    if present.lease_expires_at is null and present.is_late then
        -- It will never run, and must not replace one that may.
        picks := array(select j.ctid from pgqueue.job as j where j.id = present.id for update);
        perform pgqueue._expire(picks, moment);
        return null;
    elsif present.lease_expires_at <= moment then
        -- Its worker is dead, and the job may be dead as well: end that attempt, then look again.
        picks := array(select j.ctid from pgqueue.job as j where j.id = present.id for update skip locked);
        if pgqueue._expire(picks, moment) > 0 then
            return null;
        end if;
    elsif on_duplicate = 'error' then
        return present.id;
    elsif present.lease_expires_at is null and on_duplicate <> 'skip' then
        update pgqueue.job as j
        set payload = case when on_duplicate = 'replace' then _on_duplicate.payload else j.payload end,
            priority = case when on_duplicate = 'replace' then _on_duplicate.priority else j.priority end,
            run_at = case
                when j.run_at = 'infinity' or present.is_suspended then j.run_at
                when on_duplicate = 'replace' then _on_duplicate.run_at
                else greatest(j.run_at, _on_duplicate.run_at)
            end,
            terms = case
                when j.run_at < 'infinity' and num_nonnulls((j.terms).expires_at, _on_duplicate.expires_at) = 0
                    then j.terms
                else row(
                    case
                        when on_duplicate = 'replace' then _on_duplicate.expires_at
                        else nullif(greatest(
                            coalesce((j.terms).expires_at, 'infinity'), coalesce(_on_duplicate.expires_at, 'infinity')
                        ), 'infinity')
                    end,
                    case
                        when j.run_at < 'infinity' or present.is_suspended then null
                        when on_duplicate = 'replace' then _on_duplicate.run_at
                        else greatest((j.terms).run_at, _on_duplicate.run_at)
                    end,
                    (j.terms).batch_id,
                    (j.terms).after
                )::pgqueue._terms
            end
        where j.id = present.id and j.lease_expires_at is null
        returning j.id, j.priority, j.group_key, j.run_at into changed;
        if found then
            perform pgqueue._reopened(
                array[queue], array[changed.priority], array[changed.group_key], array[changed.run_at]
            );
        end if;
        -- Null if the job was claimed, or ended, while the update waited for it.
        return changed.id;
    end if;

    -- A running job stays as its worker has read it.
    if present.lease_expires_at is not null then
        perform pgqueue._tell_running(present.id);
    end if;
    return present.id;
end;
$$;

-- The window of a key (unique_for) begins when its job is enqueued and may outlast the job. While that job waits or
-- runs, its key is taken like any other; only after its end does the table recent_key decide. Returns the job that has
-- ended although its window has not; null if there is none. If there is one and on_duplicate is error, raises 23505.
create or replace function pgqueue._recent_job(queue text, unique_key text, on_duplicate text)
    returns bigint
    language plpgsql
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_indexscan = on
    set enable_seqscan = off
as $$
declare
    job_id bigint := (
        select k.job_id
        from pgqueue.recent_key as k
        where k.queue = _recent_job.queue and k.unique_key = _recent_job.unique_key
            and k.expires_at > clock_timestamp()
            and not exists (select from pgqueue.job as j where j.id = k.job_id offset 0)
    );
begin
    if on_duplicate = 'error' and job_id is not null then
        raise exception using
            errcode = 'unique_violation',
            message = 'a job with this unique_key was enqueued within its unique_for',
            detail = format('It was job %s.', job_id),
            hint = 'Enqueue without unique_for to add another one, or with another on_duplicate to get this id.';
    end if;
    return job_id;
end;
$$;

-- Begins the window of a new job and returns the job's id. If, since we looked, another job with this key has
-- begun a window and ended, deletes the new job and returns the id of the other.
create or replace function pgqueue._begin_window(
    queue text, unique_key text, on_duplicate text, job_id bigint, expires_at timestamptz
)
    returns bigint
    language plpgsql
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_indexscan = on
    set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    recent_id bigint;
begin
    loop
        insert into pgqueue.recent_key as k (job_id, expires_at, queue, unique_key)
        values (_begin_window.job_id, _begin_window.expires_at, _begin_window.queue, _begin_window.unique_key)
        on conflict (queue, unique_key) do update
        set job_id = excluded.job_id, expires_at = excluded.expires_at
        where k.expires_at <= clock_timestamp();
        exit when found;
        recent_id := pgqueue._recent_job(queue, unique_key, on_duplicate);
        if recent_id is not null then
            delete from pgqueue.job as j where j.id = _begin_window.job_id;
            exit;
        end if;
    end loop;
    return coalesce(recent_id, job_id);
end;
$$;

-- Adds new jobs to a batch that _lock_batch has locked. Each shard uses only every n-th id, so with shards a part
-- is a wider range of ids; the first such part begins after the ids from before there were shards.
create or replace function pgqueue._join_batch(job_ids bigint[], batch_id bigint)
    returns void
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set jit = off
as $$
declare
    shard pgqueue.shard;
begin
    select s.* into shard from pgqueue.shard as s;
    if shard is null then
        insert into pgqueue.tally (batch_id, part, jobs)
        select _join_batch.batch_id, j.id >> 10, count(*) from unnest(job_ids) as j (id) group by j.id >> 10;
        return;
    end if;
    insert into pgqueue.tally (batch_id, part, parts, jobs)
    select _join_batch.batch_id, p.first, p.behind - p.first, count(*)
    from (
        select
            case when u.part > shard.above >> 10
                then greatest(u.part / shard.of * shard.of, (shard.above >> 10) + 1) else u.part
            end,
            case when u.part > shard.above >> 10 then (u.part / shard.of + 1) * shard.of else u.part + 1 end
        from (select j.id >> 10 from unnest(job_ids) as j (id)) as u (part)
    ) as p (first, behind)
    group by p.first, p.behind;
end;
$$;

create or replace function pgqueue.enqueue(
    queue text,
    payload jsonb default '{}',
    kind text default null,
    priority int default null,
    run_at timestamptz default null,
    max_attempts int default null,
    unique_key text default null,
    on_duplicate text default null,
    group_key text default null,
    headers jsonb default null,
    unique_for interval default null,
    expires_at timestamptz default null,
    batch_id bigint default null,
    after bigint[] default null,
    if_dead text default null
)
    returns bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    settings pgqueue.queue_in_force;
    -- A variable of its own, because reading a record costs time even when it is null.
    notify boolean;
    moment timestamptz := clock_timestamp();
    fold int := hashtext(enqueue.queue collate "default") & 255;
    has_options boolean;
    terms pgqueue._terms;
    new_id bigint;
    refused boolean;
    job_id bigint;
begin
    -- Four shortcuts for the plain call, which may name a kind or a group; each saves up to a tenth: options
    -- are checked and settings are read only if there are any,
    -- the INSERT has no conflicts and no defaults to handle, and _wake() is inlined.
    if num_nonnulls(
            priority, run_at, max_attempts, unique_key, on_duplicate, headers, unique_for,
            expires_at, batch_id, after, if_dead
        ) > 0
        or (octet_length(queue) <@ int4range '[1,200]') is not true
    then
        has_options := true;
        refused := pgqueue._refuse(pgqueue._check_job(
            queue, kind, priority, run_at, max_attempts, unique_key, on_duplicate, group_key, headers,
            unique_for, expires_at
        ));
        if num_nonnulls(expires_at, batch_id, after, if_dead) > 0 then
            if num_nonnulls(after, if_dead) > 0 then
                refused := pgqueue._refuse(pgqueue._check_after(after, if_dead));
            end if;
            if batch_id is not null then
                refused := pgqueue._refuse(pgqueue._lock_batch(batch_id));
            end if;
            after := nullif(after, '{}');
            terms := row(expires_at, case when after is not null then run_at end, batch_id, after);
            run_at := case when after is null then run_at else 'infinity' end;
        end if;
    elsif kind is not null then
        if octet_length(kind) not between 1 and 200 then
            refused := pgqueue._refuse(pgqueue._bad_name('kind', kind));
        end if;
    end if;
    if pg_sequence_last_value('pgqueue.used_seq'::regclass) >> fold % 63 & 1 = 1 then
        -- As one value: "select f.*" would take the row apart and put it together again.
        settings := (select f from pgqueue.queue_in_force as f where f.queue = enqueue.queue collate "default");
        if settings.queue is null then
            settings := (select f from pgqueue.queue_in_force as f where f.queue = '');
        end if;
        if settings.has_narrow or num_nonnulls(settings.caps, settings.max_payload_bytes, settings.has_access) > 0 then
            if settings.has_access then
                refused := pgqueue._refuse(pgqueue._check_access('producer', array[queue]));
            end if;
            if settings.has_narrow then
                settings := pgqueue._in_force(queue, coalesce(kind, queue), group_key);
            end if;
            if settings.max_payload_bytes is not null then
                refused := pgqueue._refuse(pgqueue._check_payload(payload, settings.max_payload_bytes));
            end if;
            if settings.caps is not null then
                perform pgqueue._make_permits_for(queue, settings.caps, array[coalesce(kind, queue)]);
            end if;
        end if;
        max_attempts := coalesce(max_attempts, settings.max_attempts);
        notify := settings.notify;
    end if;
    -- From a table it may be compressed, to an eightieth. Nested, so that the record is read only if it is large.
    if pg_column_size(payload) > 1000 then
        if settings.max_payload_bytes is null then
            refused := pgqueue._refuse(pgqueue._check_payload(payload, null));
        end if;
    end if;

    if has_options is not true then
        insert into pgqueue.job as j (run_at, enqueued_at, priority, max_attempts, queue, kind, group_key, payload)
        values (
            moment, moment, 0, coalesce(enqueue.max_attempts, 20),
            enqueue.queue, coalesce(enqueue.kind, enqueue.queue), enqueue.group_key, coalesce(enqueue.payload, '{}')
        )
        returning j.id into job_id;
    else
        if unique_for is not null then
            job_id := pgqueue._recent_job(queue collate "default", unique_key, on_duplicate);
            if job_id is not null then
                return job_id;
            end if;
        end if;
        loop
            insert into pgqueue.job as j (
                run_at, enqueued_at, priority, max_attempts, queue, kind, unique_key, group_key, terms, payload, headers
            )
            values (
                coalesce(enqueue.run_at, moment), moment, coalesce(enqueue.priority, 0),
                coalesce(enqueue.max_attempts, 20),
                enqueue.queue, coalesce(enqueue.kind, enqueue.queue),
                enqueue.unique_key, enqueue.group_key, terms,
                coalesce(enqueue.payload, '{}'), enqueue.headers
            )
            -- Waits for a transaction that is enqueuing, completing or claiming a job with this key.
            on conflict (queue, unique_key) where j.unique_key is not null do nothing
            returning j.id into job_id;
            exit when found;

            job_id := pgqueue._on_duplicate(
                queue collate "default", unique_key, coalesce(on_duplicate, 'skip'),
                coalesce(payload, '{}'), coalesce(priority, 0),
                coalesce(case when after is null then run_at else (terms).run_at end, moment), expires_at
            );
            -- Raised here, not by _refuse(): called from enqueue_many(), that would add a line of CONTEXT.
            if on_duplicate = 'error' and job_id is not null then
                raise exception using
                    errcode = 'unique_violation',
                    message = 'a job with this unique_key is already waiting or running',
                    detail = format('It is job %s.', job_id),
                    hint = 'Choose another on_duplicate to get its id instead of this error.';
            end if;
            exit when job_id is not null;
            -- It has ended the job that had the key, and with it, perhaps, the batch.
            if batch_id is not null then
                refused := pgqueue._refuse(pgqueue._lock_batch(batch_id));
            end if;
        end loop;

        if found then
            new_id := job_id;
            if unique_for is not null then
                job_id := pgqueue._begin_window(
                    queue collate "default", unique_key, on_duplicate, job_id, moment + unique_for
                );
            end if;
            if batch_id is not null and job_id = new_id then
                perform pgqueue._join_batch(array[job_id], batch_id);
            end if;
            if after is not null and job_id = new_id then
                perform pgqueue._wait_for(job_id, after, if_dead);
            end if;
        end if;
        if group_key is null then
            perform pgqueue._announce(queue, priority, run_at);
        end if;
    end if;
    if group_key is not null then
        if octet_length(group_key) not between 1 and 200 then
            refused := pgqueue._refuse(pgqueue._bad_name('group_key', group_key));
        end if;
        if (has_options is not true or new_id is not null)
            and pgqueue._insert_ticket(
                queue, group_key, coalesce(priority, 0), coalesce(run_at, moment),
                settings.has_groups or settings.group_limit is not null
            )
            and (settings.has_groups or settings.group_limit is not null)
        then
            perform pgqueue._make_group_permits(queue, array[group_key], settings);
        end if;
    end if;

    -- If the second lock can be had exclusively, nobody is parked.
    if notify is not false
        and current_setting('pgqueue.notify', true) is distinct from 'off'
        and (
            pg_try_advisory_xact_lock_shared(7366513, fold)
            and pg_try_advisory_lock(7366514, fold)
            and pg_advisory_unlock(7366514, fold)
        ) is not true
    then
        perform pgqueue._wake(queue);
    end if;
    return job_id;
end;
$$;

comment on function pgqueue.enqueue(
    text, jsonb, text, int, timestamptz, int, text, text, text, jsonb, interval, timestamptz, bigint, bigint[],
    text
) is
'Adds a job in the caller''s transaction and returns its id; for a duplicate,
the id of the job that has the unique_key. Larger priority (-100 to 100) runs
first; kind defaults to the queue''s name. An enqueue whose key is taken by an
open transaction waits for its end, then does as on_duplicate says: skip
(default), replace or postpone a job that is not running, or error; a running
job stays as it is, and a NOTICE says so. With unique_for the key is taken for
that long, up to 366 days, whatever happens to the job: at most one till then.
From expires_at on no attempt begins, and a job still waiting is cancelled.
batch_id makes the job part of a batch.
With after it is blocked until these jobs have completed. If one of them dies
or is cancelled it is cancelled, or with if_dead run no longer waits for that.
An enqueue that adds no job joins no batch and waits for nothing.
Raises 22023 (bad argument), 54000 (payload too large), 23505 (duplicate with
on_duplicate error), PQ001 (no such batch, or an unknown job in after), 55000
(the batch has finished), 42501 (the caller is a producer of other queues only).';

-- The jobs of a queue that have any of these unique keys. Relies on the planner settings of _insert_keyed.
create or replace function pgqueue._keyed_jobs(queue text, unique_keys text[])
    returns bigint[]
    language plpgsql
as $$
begin
    return array(
        select j.id
        from (select distinct u.key from unnest(unique_keys) as u (key)) as u
        cross join lateral pgqueue._with_key(_keyed_jobs.queue, u.key) as j
    );
end;
$$;

-- Adds the jobs whose keys are free. Returns an id for each of these and null for each duplicate; with skip it
-- appends the ids of the jobs that have the keys, with replace or postpone it has locked those jobs.
-- It adds nothing and returns only nulls if, with skip, the job of a taken key is gone by now or has expired, or
-- if, with error, any key is taken: adding that one after the keys behind it could deadlock. The caller then
-- enqueues all of them one by one, in the order of their keys.
create or replace function pgqueue._insert_keyed(
    queue text, payloads jsonb[], kind text, priority int, run_at timestamptz, max_attempts int[], unique_keys text[],
    on_duplicate text, group_keys text[], headers jsonb, moment timestamptz, terms pgqueue._terms
)
    returns bigint[]
    language plpgsql
    set enable_sort = on
    set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    is_locking boolean := coalesce(on_duplicate in ('replace', 'postpone'), false);
    -- Ids are drawn in the order of the input, but rows are written in the order of the keys,
    -- so that two calls with the same keys may wait for each other but cannot deadlock.
    ids bigint[] := array(select nextval('pgqueue.job_id_seq') from generate_series(1, cardinality(payloads)));
    present bigint[];
    added bigint[];
    had bigint[];
begin
    -- A session that holds several jobs may wait only in the order of their ids. So it locks the existing
    -- ones first; jobs that appear meanwhile must be locked without waiting, or it starts over.
    loop
        begin
            if is_locking then
                present := pgqueue._keyed_jobs(queue, unique_keys);
                perform from pgqueue.job as j where j.id = any (present) order by j.id for update;
            end if;

            with inserted as (
                insert into pgqueue.job as j (
                    id, run_at, enqueued_at, priority, max_attempts,
                    queue, kind, unique_key, group_key, terms, payload, headers
                )
                overriding system value
                select
                    g.id,
                    coalesce(_insert_keyed.run_at, moment + (g.place - 1) * interval '1 microsecond'),
                    moment, coalesce(_insert_keyed.priority, 0), g.max_attempts,
                    _insert_keyed.queue, coalesce(_insert_keyed.kind, _insert_keyed.queue),
                    g.unique_key, g.group_key, _insert_keyed.terms, coalesce(g.payload, '{}'),
                    _insert_keyed.headers
                from unnest(ids, payloads, unique_keys, group_keys, max_attempts) with ordinality
                    as g (id, payload, unique_key, group_key, max_attempts, place)
                order by g.unique_key, g.id
                on conflict (queue, unique_key) where j.unique_key is not null do nothing
                returning j.id
            )
            select array_agg(i.id) into added from inserted as i;
            added := array(
                select a.id
                from unnest(ids) with ordinality as i (id, place)
                left join unnest(added) as a (id) on a.id = i.id
                order by i.place
            );

            exit when not is_locking and array_position(added, null) is null;
            if not is_locking then
                had := array(
                    select case when u.id is null and on_duplicate is distinct from 'error' then (
                        select j.id
                        from pgqueue._with_key(_insert_keyed.queue, u.key) as j
                        where (coalesce(j.lease_expires_at, (j.terms).expires_at) <= clock_timestamp()) is not true
                    ) end
                    from unnest(added, unique_keys) with ordinality as u (id, key, place)
                    order by u.place
                );
                exit when not exists (select from unnest(added, had) as u (id, had) where num_nonnulls(u.id, u.had) = 0);
                raise sqlstate 'PQ003';
            end if;
            present := pgqueue._keyed_jobs(queue, unique_keys);
            exit when cardinality(present) = (
                select count(*) from (
                    select from pgqueue.job as j where j.id = any (present) for update skip locked
                ) as l
            );
            raise sqlstate 'PQ003';
        exception when sqlstate 'PQ003' then
            if not is_locking then
                return array_fill(null::bigint, array[cardinality(payloads)]);
            end if;
        end;
    end loop;
    perform pgqueue._tell_running(u.id)
    from unnest(had) as u (id)
    where (select j.lease_expires_at is not null from pgqueue.job as j where j.id = u.id);
    return added || had;
end;
$$;

-- max_attempts and max_payload_bytes for each of these jobs of one kind, by their groups.
create or replace function pgqueue._settings_of_groups(
    queue text, kind text, group_keys text[], out max_attempts int[], out max_bytes int[]
)
    language plpgsql
    stable
    set enable_hashjoin = on
    set enable_nestloop = off
as $$
begin
    with own as materialized (
        select u.group_key, s.max_attempts, s.max_payload_bytes
        from (select distinct coalesce(g.group_key, '') as group_key from unnest(group_keys) as g (group_key)) as u
        cross join lateral pgqueue._in_force(queue, kind, u.group_key) as s
    )
    select
        array_agg(o.max_attempts order by g.place), array_agg(o.max_payload_bytes order by g.place)
    into max_attempts, max_bytes
    from unnest(group_keys) with ordinality as g (group_key, place)
    join own as o on o.group_key = coalesce(g.group_key, '');
end;
$$;

-- What enqueue_many does before it adds jobs: wakes workers, and creates what claims go by: permits, tickets
-- and hints about lanes.
create or replace function pgqueue._prepare(
    settings pgqueue.queue_in_force, queue text, kind text, priority int, run_at timestamptz, group_keys text[],
    jobs int
)
    returns void
    language plpgsql
as $$
begin
    perform pgqueue._wake(queue);
    if settings.caps is not null then
        perform pgqueue._make_permits_for(queue, settings.caps, array[coalesce(kind, queue)]);
    end if;
    if num_nonnulls(variadic group_keys) > 0 then
        if settings.has_groups or settings.group_limit is not null then
            perform pgqueue._make_group_permits(queue, group_keys, settings);
        end if;
        perform pgqueue._insert_tickets(
            array_fill(queue, array[cardinality(group_keys)]), group_keys,
            array_fill(coalesce(priority, 0), array[cardinality(group_keys)]),
            array_fill(coalesce(run_at, clock_timestamp()), array[cardinality(group_keys)]),
            settings.has_groups or settings.group_limit is not null
        );
        perform pgqueue._list_lane(queue, 1000 + coalesce(priority, 0));
    end if;
    if num_nonnulls(variadic group_keys) < jobs or group_keys is null then
        perform pgqueue._announce(queue, priority, run_at);
    end if;
end;
$$;

-- Enqueues a job for pgqueue itself (of a schedule, of a batch, or one that is run again), whatever the access of
-- the caller. Refuses a payload that is too large.
create or replace function pgqueue._enqueue_again(
    queue text, payload jsonb, kind text, priority int, max_attempts int, group_key text, headers jsonb
)
    returns bigint
    language plpgsql
as $$
declare
    settings pgqueue.queue_in_force := pgqueue._in_force(queue, coalesce(kind, queue), group_key);
    refused boolean := pgqueue._refuse(pgqueue._check_payload(payload, settings.max_payload_bytes));
    moment timestamptz := clock_timestamp();
    job_id bigint;
begin
    perform pgqueue._prepare(
        settings, queue, kind, priority, null, case when group_key is not null then array[group_key] end, 1
    );
    insert into pgqueue.job as j (run_at, enqueued_at, priority, max_attempts, queue, kind, group_key, payload, headers)
    values (
        moment, moment, coalesce(_enqueue_again.priority, 0),
        coalesce(_enqueue_again.max_attempts, settings.max_attempts), _enqueue_again.queue,
        coalesce(_enqueue_again.kind, _enqueue_again.queue), _enqueue_again.group_key, _enqueue_again.payload,
        _enqueue_again.headers
    )
    returning j.id into job_id;
    return job_id;
end;
$$;

create or replace function pgqueue.enqueue_many(
    queue text,
    payloads jsonb[],
    kind text default null,
    priority int default null,
    run_at timestamptz default null,
    max_attempts int default null,
    unique_keys text[] default null,
    on_duplicate text default null,
    group_keys text[] default null,
    headers jsonb default null,
    expires_at timestamptz default null,
    batch_id bigint default null
)
    returns setof bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
declare
    settings pgqueue.queue_in_force;
    own_attempts int[];
    own_bytes int[];
    refused boolean;
    moment timestamptz := clock_timestamp();
    terms pgqueue._terms := case when num_nonnulls(expires_at, batch_id) > 0
        then row(expires_at, null, batch_id, null)
    end;
    ids bigint[];
    had bigint[];
    given record;
begin
    if pg_sequence_last_value('pgqueue.used_seq'::regclass)
        >> (hashtext(queue collate "default") & 255) % 63 & 1 = 1
    then
        settings := pgqueue._in_force(queue, coalesce(kind, queue));
        if settings.has_narrow and num_nonnulls(variadic group_keys) > 0 then
            select s.max_attempts, s.max_bytes into own_attempts, own_bytes
            from pgqueue._settings_of_groups(queue, coalesce(kind, queue), group_keys) as s;
        end if;
    end if;
    refused := pgqueue._refuse(coalesce(
        case when settings.has_access then pgqueue._check_access('producer', array[queue]) end,
        pgqueue._check_job(
            queue, kind, priority, run_at, max_attempts, null, on_duplicate, null, headers, null, expires_at
        ),
        pgqueue._check_many(payloads, unique_keys, group_keys, coalesce(
            own_bytes, case when settings.max_payload_bytes is not null
                then array_fill(settings.max_payload_bytes, array[coalesce(cardinality(payloads), 0)])
            end
        ))
    ));
    if batch_id is not null then
        refused := pgqueue._refuse(pgqueue._lock_batch(batch_id));
    end if;
    perform pgqueue._prepare(settings, queue, kind, priority, run_at, group_keys, cardinality(payloads));
    if unique_keys is null and batch_id is null then
        return query
        insert into pgqueue.job as j (
            run_at, enqueued_at, priority, max_attempts, queue, kind, group_key, terms, payload, headers
        )
        -- A microsecond apart, so that a claim's position can fall between any two jobs. It takes longer to insert one, so
        -- the last is due when this ends, and what was enqueued before comes before the first.
        select
            coalesce(enqueue_many.run_at, moment + (g.place - 1) * interval '1 microsecond'),
            moment, coalesce(enqueue_many.priority, 0),
            coalesce(enqueue_many.max_attempts, g.max_attempts, settings.max_attempts, 20),
            enqueue_many.queue, coalesce(enqueue_many.kind, enqueue_many.queue),
            g.group_key, terms, coalesce(g.payload, '{}'), enqueue_many.headers
        from unnest(payloads, group_keys, own_attempts) with ordinality as g (payload, group_key, max_attempts, place)
        returning j.id;
        return;
    end if;
    ids := pgqueue._insert_keyed(
        queue collate "default", payloads, kind, priority, run_at,
        coalesce(
            case when max_attempts is null then own_attempts end,
            array_fill(coalesce(max_attempts, settings.max_attempts, 20), array[cardinality(payloads)])
        ),
        unique_keys, on_duplicate, group_keys, headers, moment, terms
    );
    had := ids[cardinality(payloads) + 1 :];
    ids := ids[: cardinality(payloads)];
    if batch_id is not null then
        perform pgqueue._join_batch(array_remove(ids, null), batch_id);
    end if;
    for given in
        select g.*
        from unnest(ids, had, payloads, unique_keys, group_keys) with ordinality
            as g (id, had, payload, unique_key, group_key, place)
        where g.id is null
        order by g.unique_key collate "default", g.place
    loop
        ids[given.place] := coalesce(given.had, pgqueue.enqueue(
            queue, given.payload, kind, priority, run_at, max_attempts, given.unique_key, on_duplicate,
            given.group_key, headers, expires_at => expires_at, batch_id => batch_id
        ));
    end loop;
    return query select i.id from unnest(ids) with ordinality as i (id, place) order by i.place;
end;
$$;

comment on function pgqueue.enqueue_many(
    text, jsonb[], text, int, timestamptz, int, text[], text, text[], jsonb, timestamptz, bigint
) is
'Adds one job for each payload, all or none, and returns their ids in the order
of the input. unique_keys and group_keys, if given, are as long as payloads; a
null in them means none. on_duplicate treats a key that occurs twice, or is
taken, as in enqueue; expires_at and batch_id are as in enqueue.
Raises 22023 (bad argument), 54000 (payload too large), 23505 (duplicate with
on_duplicate error), PQ001 (no such batch), 55000 (the batch has finished),
42501 (the caller is a producer of other queues only).';
