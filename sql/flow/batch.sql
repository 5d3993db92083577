-- Batches: a callback job once all jobs of a batch have ended.
--
-- A job knows its batch (terms), and a row in tally says in which range of ids a batch has jobs. When a job
-- completes no row is written: its end only checks, as in module depend, whether the batch has another job that
-- nobody has touched. If it has none at all the batch is over; if only others, this end leaves a loose end. So the end
-- that checks last does one or the other. An end that sees its batch still open need not check, because close_batch
-- leaves a loose end, visible once it commits. As in module depend these are hints, and the sweep looks at every batch
-- that is closed but not finished.
--
-- A batch is closed when no more jobs will be added from outside; its own jobs may add others while they run.
-- Adding a job takes a shared lock on the batch's row. Finishing the batch takes an exclusive one, or leaves a
-- loose end if it cannot. So no job is added to a finished batch.

-- The last job of a batch below an id that no session is writing or deleting; null if there is none. touched: one
-- that a session may be, if there is any.
create or replace function pgqueue._last_job(batch_id bigint, below bigint, out id bigint, out touched bigint)
    language plpgsql
    set enable_sort = off
    set enable_bitmapscan = off
as $$
declare
    next_part bigint := (below - 1) >> 10;
    parts int;
    first_id bigint;
    last_id bigint;
begin
    loop
        select t.part, t.parts into next_part, parts
        from pgqueue.tally as t
        where t.batch_id = _last_job.batch_id and t.part <= next_part
        order by t.part desc
        limit 1;
        exit when not found;
        first_id := next_part << 10;
        last_id := least((next_part + parts << 10) - 1, below - 1);
        select j.id into id
        from pgqueue.job as j
        where j.id between first_id and last_id and (j.terms).batch_id = _last_job.batch_id
            and j.xmax in ('0'::xid, j.xmin)
        order by j.id desc
        limit 1;
        exit when found;
        touched := coalesce(touched, (
            select j.id
            from pgqueue.job as j
            where j.id between first_id and last_id and (j.terms).batch_id = _last_job.batch_id
            limit 1
        ));
        next_part := next_part - 1;
    end loop;
end;
$$;

-- Whether a batch has no waiting or running job left; null if there are only some that other sessions may be
-- ending right now.
create or replace function pgqueue._is_batch_over(batch_id bigint)
    returns boolean
    language plpgsql
as $$
declare
    cell regclass := ('pgqueue._cell_batch_' || abs(batch_id % 5))::regclass;
    found_before bigint := pg_sequence_last_value(cell);
    is_untouched boolean;
    last record;
begin
    -- The job that the last check found is usually still there.
    select j.xmax in ('0'::xid, j.xmin) into is_untouched
    from pgqueue.job as j
    where j.id = found_before and (j.terms).batch_id = _is_batch_over.batch_id;
    if is_untouched or found and pgqueue._is_left_alone(found_before) then
        return false;
    end if;
    -- Search downwards from it: above it there may be only dead index entries.
    select l.* into last from pgqueue._last_job(batch_id, found_before) as l;
    if last.id is null then
        select l.* into last from pgqueue._last_job(batch_id, 9223372036854775807) as l;
    end if;
    if last.id is null and pgqueue._is_left_alone(last.touched) then
        last.id := last.touched;
    end if;
    if last.id is not null then
        perform setval(cell, last.id);
        return false;
    end if;
    return case when last.touched is null then true end;
end;
$$;

-- Finishes those of these batches that are closed and have no job left.
create or replace function pgqueue._look_at_batches(batch_ids bigint[])
    returns void
    language plpgsql
    set jit = off
as $$
declare
    looked_at bigint[] := array(select distinct b.id from unnest(batch_ids) as b (id) order by b.id);
    batch_id bigint;
    is_over boolean;
begin
    -- An old snapshot may not show that they have been closed.
    if current_setting('transaction_isolation') <> 'read committed' then
        perform pgqueue._leave_loose_ends(looked_at, 'batch');
        return;
    end if;
    foreach batch_id in array looked_at loop
        continue when (
            select b.closed_at is null or b.finished_at is not null from pgqueue.batch as b where b.id = batch_id
        ) is not false;
        is_over := pgqueue._is_batch_over(batch_id);
        if is_over then
            is_over := pgqueue._finish_batch(batch_id);
        end if;
        if is_over is null then
            perform pgqueue._leave_loose_ends(array[batch_id], 'batch', interval '200 milliseconds');
            -- Perhaps nobody claims before it is over.
            perform pgqueue._wake((select b.queue from pgqueue.batch as b where b.id = batch_id));
        end if;
    end loop;
end;
$$;

-- Counts jobs that died or were cancelled, and that this transaction has deleted, for their batches.
-- Relies on the planner settings of _after_end.
create or replace function pgqueue._count_ends(ended pgqueue._ended[])
    returns void
    language plpgsql
as $$
begin
    insert into pgqueue.tally (batch_id, dead, cancelled)
    select
        e.batch_id, count(*) filter (where e.outcome = 'dead'), count(*) filter (where e.outcome = 'cancelled')
    from unnest(ended) as e
    where e.outcome in ('dead', 'cancelled') and e.batch_id is not null
        and (select true from pgqueue.batch as b where b.id = e.batch_id and b.finished_at is null)
    group by e.batch_id;
end;
$$;

create or replace function pgqueue.create_batch(
    queue text,
    payload jsonb default '{}',
    kind text default null,
    priority int default null,
    max_attempts int default null,
    headers jsonb default null,
    group_key text default null
)
    returns bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
declare
    refused boolean := pgqueue._refuse(coalesce(
        pgqueue._check_job(queue, kind, priority, null, max_attempts, null, null, group_key, headers),
        pgqueue._check_access('producer', array[queue]),
        case when jsonb_typeof(payload) <> 'object' then array[
            'the payload of a batch must be a JSON object', format('It is a JSON %s.', jsonb_typeof(payload)),
            'The callback gets it with the counts of the batch added, under the key batch.'
        ] end,
        -- Checked with the longest possible counts.
        pgqueue._check_payload(
            coalesce(payload, '{}') || '{"batch": {
                "id": 9223372036854775807, "completed": 9223372036854775807, "dead": 9223372036854775807,
                "cancelled": 9223372036854775807
            }}',
            (pgqueue._in_force(queue, coalesce(kind, queue), group_key)).max_payload_bytes
        )
    ));
    batch_id bigint := nextval('pgqueue.job_id_seq');
begin
    perform pgqueue._look_from_now_on();
    insert into pgqueue.batch as b (id, created_at, priority, max_attempts, queue, kind, group_key, payload, headers)
    values (
        batch_id, clock_timestamp(), create_batch.priority, create_batch.max_attempts,
        create_batch.queue, create_batch.kind, create_batch.group_key,
        coalesce(create_batch.payload, '{}'), create_batch.headers
    );
    return batch_id;
end;
$$;

comment on function pgqueue.create_batch(text, jsonb, text, int, int, jsonb, text) is
'Creates a batch and returns its id, for enqueue(..., batch_id => ...). Once
close_batch has been called, and all jobs of the batch have completed, died or
been cancelled, its callback is enqueued, once: a job with this queue, payload,
kind, priority, max_attempts, headers and group_key. Its payload has one more
key, batch:
{"id", "completed", "dead", "cancelled"}. A callback that cannot be enqueued
then becomes a dead job.
Raises 22023 (bad argument), 54000 (payload too large, with that key),
42501 (the caller is a producer of other queues only).';

create or replace function pgqueue.close_batch(batch_id bigint)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_indexscan = on
as $$
declare
    own text[] := pgqueue._own_queues('producer');
    is_alone boolean := false;
    refused boolean;
begin
    if current_setting('transaction_isolation') = 'read committed' and pgqueue._is_batch_over(batch_id) then
        -- Lock the version that all sessions see, before updating it. Otherwise a session that adds a job might
        -- wait for the new version and, if that is rolled back and written again, lock the old one.
        perform from pgqueue.batch as b where b.id = close_batch.batch_id for update skip locked;
        is_alone := found;
    end if;
    update pgqueue.batch as b
    set closed_at = coalesce(b.closed_at, clock_timestamp())
    where b.id = close_batch.batch_id and pgqueue._is_own(b.queue, own);
    refused := pgqueue._refuse(case when not found then pgqueue._not_found('batch', batch_id) end);
    perform pgqueue._leave_loose_ends(array[batch_id], 'batch');
    if is_alone and not pgqueue._is_lost() then
        perform pgqueue._finish_batch(batch_id);
    end if;
end;
$$;

comment on function pgqueue.close_batch(bigint) is
'Declares that all jobs of a batch have been enqueued, except those that its own
jobs add: once they have ended, at once if there are none, its callback is
enqueued. Closing it again changes nothing.
Raises PQ001 (no such batch).';

-- Enqueues the callback of a closed batch, once. Returns whether the batch has no jobs left; null if unsure.
create or replace function pgqueue._finish_batch(batch_id bigint)
    returns boolean
    language plpgsql
as $$
declare
    batch pgqueue.batch;
    is_over boolean;
    counts record;
    payload jsonb;
    callback bigint;
    failure text;
    error text;
    moment timestamptz := clock_timestamp();
begin
    select b.* into batch from pgqueue.batch as b where b.id = _finish_batch.batch_id for update skip locked;
    -- If it is locked a job is being added; once we have it locked none can be.
    is_over := case when batch.id is not null then pgqueue._is_batch_over(batch_id) end;
    if is_over is not true or batch.finished_at is not null then
        return is_over;
    end if;
    select
        coalesce(sum(t.jobs - t.dead - t.cancelled), 0) as completed,
        coalesce(sum(t.dead), 0) as dead, coalesce(sum(t.cancelled), 0) as cancelled
    into counts
    from pgqueue.tally as t
    where t.batch_id = batch.id;
    payload := batch.payload || jsonb_build_object('batch', jsonb_build_object(
        'id', batch.id, 'completed', counts.completed, 'dead', counts.dead, 'cancelled', counts.cancelled
    ));
    -- The end of a job must not fail because of the callback.
    begin
        callback := pgqueue._enqueue_again(
            batch.queue, payload, batch.kind, batch.priority, batch.max_attempts, batch.group_key, batch.headers
        );
    exception when program_limit_exceeded or data_exception or integrity_constraint_violation then
        get stacked diagnostics failure = message_text;
        error := 'the callback could not be enqueued: ' || failure;
        -- Keep it as a dead job.
        insert into pgqueue.dead_job as d (
            id, died_at, enqueued_at, run_at, priority, attempt, max_attempts,
            queue, kind, group_key, error, payload, headers, errors
        )
        values (
            nextval('pgqueue.job_id_seq'), moment, moment, moment, coalesce(batch.priority, 0), 0,
            coalesce(
                batch.max_attempts, (pgqueue._in_force(batch.queue, coalesce(batch.kind, batch.queue))).max_attempts
            ),
            batch.queue, coalesce(batch.kind, batch.queue), batch.group_key, error, payload, batch.headers,
            jsonb_build_array(jsonb_build_object('attempt', 0, 'at', moment, 'worker', null, 'error', error))
        )
        returning d.id into callback;
    end;
    update pgqueue.batch as b
    set finished_at = clock_timestamp(), callback_id = callback, problem = failure,
        completed = counts.completed, dead = counts.dead, cancelled = counts.cancelled
    where b.id = batch.id;
    delete from pgqueue.tally as t where t.batch_id = batch.id;
    return true;
end;
$$;

-- Puts redriven jobs back into their batches (null: none) if these have not finished: they no longer count as dead.
create or replace function pgqueue._rejoin_batches(batch_ids bigint[])
    returns void
    language plpgsql
as $$
begin
    -- So that none of the batches finishes meanwhile.
    perform from pgqueue.batch as b where b.id = any (batch_ids) order by b.id for key share;
    insert into pgqueue.tally (batch_id, dead)
    select u.id, -count(*)
    from unnest(batch_ids) as u (id)
    where (select b.finished_at is null from pgqueue.batch as b where b.id = u.id)
    group by u.id;
end;
$$;
