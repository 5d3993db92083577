-- Batches: a callback job when all the jobs of a batch have ended.
--
-- A batch waits for its jobs as in room depend, and closes when nobody will add any from outside; its jobs
-- may add others while they run. Whoever adds a job has the row of the batch locked for others to read, and
-- who finishes it has it for himself, or leaves a loose end: so none is added to a batch that is finished.
--
-- How its jobs have ended is a row in tally for each call that ended some, summed up when the batch
-- finishes: one row that all completions write would have them wait for each other.

create or replace function pgqueue._count_ends(batch_ids bigint[], outcomes text[])
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
    if pg_relation_size('pgqueue.batch') > 0 then
        insert into pgqueue.tally (batch_id, completed, dead, cancelled)
        select
            e.id, count(*) filter (where e.outcome = 'completed'), count(*) filter (where e.outcome = 'dead'),
            count(*) filter (where e.outcome = 'cancelled')
        from unnest(batch_ids, outcomes) as e (id, outcome)
        where exists (select from pgqueue.batch as b where b.id = e.id offset 0)
        group by e.id;
    end if;
end;
$$;

comment on function pgqueue._count_ends(bigint[], text[]) is
'Counts the ends of jobs, one for each time that a batch is named; what is no
batch is not counted.';

create or replace function pgqueue._no_batch(batch_id bigint, is_finished boolean)
    returns text[]
    language plpgsql
    immutable
    set search_path = pg_catalog, pg_temp
as $$
begin
    return case when is_finished then array[
        format('batch %s has finished', batch_id),
        'Its callback has been enqueued.',
        'Only a job of a batch that runs, or who has not called close_batch yet, can be sure that it has not.',
        '55000'
    ] else pgqueue._not_found('batch', batch_id, 'create_batch returns its id; one that has finished is forgotten after some days.')
    end;
end;
$$;

comment on function pgqueue._no_batch(bigint, boolean) is
'What is wrong with a batch that has finished (55000), or that there is not
(PQ001).';

create or replace function pgqueue._join_batch(job_ids bigint[], batch_id bigint)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_indexscan = on
as $$
begin
    insert into pgqueue.dependency (job_id, waiter_id, runs_if_dead)
    select j.id, _join_batch.batch_id, true from unnest(job_ids) as j (id);
end;
$$;

comment on function pgqueue._join_batch(bigint[], bigint) is 'Makes new jobs part of a batch that _lock_batch has locked.';

create or replace function pgqueue._lock_batch(batch_id bigint)
    returns text[]
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_indexscan = on
as $$
declare
    batch pgqueue.batch;
begin
    select b.* into batch from pgqueue.batch as b where b.id = _lock_batch.batch_id for key share;
    return case when batch.id is null or batch.finished_at is not null
        then pgqueue._no_batch(batch_id, batch.finished_at is not null)
    end;
end;
$$;

comment on function pgqueue._lock_batch(bigint) is
'Sees to it that a batch does not finish before this transaction ends. Refuses
one that there is not (PQ001), or that has finished (55000).';

create or replace function pgqueue.create_batch(
    queue text,
    payload jsonb default '{}',
    kind text default null,
    priority int default null,
    max_attempts int default null,
    headers jsonb default null
)
    returns bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
as $$
#variable_conflict use_column
declare
    refused boolean := pgqueue._refuse(coalesce(
        pgqueue._check_job(queue, kind, priority, null, max_attempts, null, null, null, headers),
        case when jsonb_typeof(payload) <> 'object' then array[
            'the payload of a batch must be a JSON object',
            format('It is a JSON %s.', jsonb_typeof(payload)),
            'The callback gets it with the counts of the batch added, under the key batch.'
        ] end,
        pgqueue._check_payload(payload, (pgqueue._in_force(queue, coalesce(kind, queue))).max_payload_bytes)
    ));
    batch_id bigint := nextval('pgqueue.job_id_seq');
begin
    insert into pgqueue.batch as b (id, created_at, priority, max_attempts, queue, kind, payload, headers)
    values (
        batch_id, clock_timestamp(), create_batch.priority, create_batch.max_attempts,
        create_batch.queue, create_batch.kind, coalesce(create_batch.payload, '{}'), create_batch.headers
    );
    return batch_id;
end;
$$;

comment on function pgqueue.create_batch(text, jsonb, text, int, int, jsonb) is
'Makes a batch and returns its id, for enqueue(…, batch_id => …). When
close_batch has been called, and all jobs of the batch have completed, died or
been cancelled, its callback is enqueued, once: a job with this queue, payload,
kind, priority, max_attempts and headers. Its payload has one more key, batch:
{"id", "completed", "dead", "cancelled"}.
Raises 22023 (bad argument), 54000 (payload too large).';

create or replace function pgqueue.close_batch(batch_id bigint)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_seqscan = off
    set enable_indexscan = on
as $$
declare
    refused boolean;
begin
    update pgqueue.batch as b
    set closed_at = coalesce(b.closed_at, clock_timestamp())
    where b.id = close_batch.batch_id;
    if not found then
        refused := pgqueue._refuse(pgqueue._no_batch(batch_id, false));
    end if;
    perform pgqueue._end_waits(array[batch_id]);
end;
$$;

comment on function pgqueue.close_batch(bigint) is
'Says that all jobs of a batch have been enqueued, but for those that its own
jobs add: when these have ended, at once if there are none, its callback is
enqueued. Closing it again changes nothing.
Raises PQ001 (no such batch).';

create or replace function pgqueue._finish_batch(batch_id bigint)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_seqscan = off
    set enable_indexscan = on
as $$
declare
    batch pgqueue.batch;
    is_open boolean;
    is_changing boolean;
    counts record;
    callback bigint;
begin
    select b.closed_at is null, b.xmax <> '0'::xid and b.xmax <> b.xmin into is_open, is_changing
    from pgqueue.batch as b
    where b.id = _finish_batch.batch_id;
    -- Who closes it looks after that; who just does it perhaps has looked before.
    if is_open and not is_changing then
        return;
    end if;
    select b.* into batch
    from pgqueue.batch as b
    where b.id = _finish_batch.batch_id and not is_open
    for update skip locked;
    if not found then
        -- Or somebody adds a job.
        perform pgqueue._leave_loose_ends(array[batch_id], array['waiter']);
        return;
    end if;
    -- Now nobody can add one.
    if batch.finished_at is not null then
        return;
    elsif exists (select from pgqueue.dependency as d where d.waiter_id = batch.id) then
        perform pgqueue._leave_loose_ends(array[batch_id], array['waiter']);
        return;
    end if;
    select
        coalesce(sum(t.completed), 0) as completed, coalesce(sum(t.dead), 0) as dead,
        coalesce(sum(t.cancelled), 0) as cancelled
    into counts
    from pgqueue.tally as t
    where t.batch_id = batch.id;
    callback := pgqueue.enqueue(
        batch.queue,
        batch.payload || jsonb_build_object('batch', jsonb_build_object(
            'id', batch.id, 'completed', counts.completed, 'dead', counts.dead, 'cancelled', counts.cancelled
        )),
        batch.kind, batch.priority, max_attempts => batch.max_attempts, headers => batch.headers
    );
    update pgqueue.batch as b
    set finished_at = clock_timestamp(), callback_id = callback,
        completed = counts.completed, dead = counts.dead, cancelled = counts.cancelled
    where b.id = batch.id;
    delete from pgqueue.tally as t where t.batch_id = batch.id;
-- The end of a job must not fail because of it. Who looks later tries again.
exception when program_limit_exceeded then
    perform pgqueue._leave_loose_ends(array[batch_id], array['waiter']);
end;
$$;

comment on function pgqueue._finish_batch(bigint) is
'Enqueues the callback of a batch that is closed and has no job left, once.';

create or replace function pgqueue._rejoin_batches(job_ids bigint[])
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_seqscan = off
    set enable_indexscan = on
    set enable_nestloop = on
as $$
begin
    -- Now none of them finishes.
    perform from pgqueue.batch as b
    where b.id = any (array(select (j.terms).batch_id from pgqueue.job as j where j.id = any (job_ids)))
    order by b.id
    for key share;
    with back as (
        insert into pgqueue.dependency (job_id, waiter_id, runs_if_dead)
        select j.id, b.id, true
        from pgqueue.job as j
        join pgqueue.batch as b on b.id = (j.terms).batch_id
        where j.id = any (job_ids) and b.finished_at is null
        returning waiter_id
    )
    insert into pgqueue.tally (batch_id, completed, dead, cancelled)
    select b.waiter_id, 0, -count(*), 0 from back as b group by b.waiter_id;
end;
$$;

comment on function pgqueue._rejoin_batches(bigint[]) is
'Makes jobs that are redriven part of their batches again, where these have not
finished: they do not count as dead any more.';

create or replace function pgqueue._forget_batches()
    returns bigint
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_seqscan = off
    set enable_sort = off
    set enable_indexscan = on
    set enable_tidscan = on
as $$
declare
    forgotten bigint;
begin
    delete from pgqueue.batch as b
    where b.ctid = any (array(
        select f.ctid
        from pgqueue.batch as f
        where f.finished_at < clock_timestamp() - interval '14 days'
        order by f.finished_at
        limit 10000
        for update skip locked
    ));
    get diagnostics forgotten = row_count;
    return forgotten;
end;
$$;

comment on function pgqueue._forget_batches() is
'Drops up to 10,000 batches that finished more than 14 days ago; returns how
many.';
