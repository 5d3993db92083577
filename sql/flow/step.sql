-- Steps: what a job has done, so that a retry need not do it again.
--
-- They are kept beside the job's row, so that no claim copies them, go with it, and stay with a dead job. A save
-- first writes the step, then locks the job, and with a lock that lets heartbeats through:
--   - Two that save the same step at once: the second waits for the first, and holds nothing meanwhile.
--   - As long as a step is not committed nobody can recover the job, and give it to another worker, who would
--     not see that it was done.

create or replace function pgqueue.save_step(job_id bigint, token bigint, name text, value jsonb default 'null')
    returns jsonb
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    awaited bigint := pg_sequence_last_value('pgqueue.awaited_seq');
    content jsonb := coalesce(save_step.value, 'null');
    saved_place int;
    job record;
    refused boolean;
begin
    -- Few statements and calls, because a step should not cost more than an enqueue.
    if current_setting('transaction_isolation') <> 'read committed'
        or (octet_length(save_step.name) between 1 and 200) is not true or save_step.job_id is null
    then
        refused := pgqueue._refuse(case
            when current_setting('transaction_isolation') <> 'read committed' then pgqueue._check_isolation()
            when (octet_length(save_step.name) between 1 and 200) is not true
                then pgqueue._bad_name('the name of a step', save_step.name)
            else pgqueue._lost(save_step.job_id, save_step.token)
        end);
    end if;
    insert into pgqueue.step as s (job_id, saved_at, place, name, value)
    values (
        save_step.job_id, clock_timestamp(),
        coalesce((
            select l.place from pgqueue.step as l where l.job_id = save_step.job_id order by l.place desc limit 1
        ), 0) + 1,
        save_step.name, content
    )
    on conflict do nothing
    returning s.place into saved_place;

    select j.queue, j.kind, j.group_key, hashtext(j.queue) & 255 as fold into job
    from pgqueue.job as j
    where j.id = save_step.job_id and j.token = save_step.token
    for key share;
    if not found or awaited < 0 and not pgqueue._is_own(job.queue, pgqueue._own_queues('worker')) then
        refused := pgqueue._refuse(pgqueue._lost(save_step.job_id, save_step.token));
    end if;
    if saved_place is null then
        return (
            select s.value
            from pgqueue.step as s
            where s.job_id = save_step.job_id and s.name = save_step.name collate "default"
        );
    end if;
    if saved_place > 10000 then
        refused := pgqueue._refuse(array[
            'a job has at most 10000 steps',
            format('Job %s has %s.', save_step.job_id, saved_place - 1),
            'Save larger steps, or let the job enqueue others.',
            '54000'
        ]);
    end if;
    if pg_sequence_last_value('pgqueue.used_seq') >> job.fold % 63 & 1 = 1 then
        refused := pgqueue._refuse(pgqueue._check_payload(
            content, (pgqueue._in_force(job.queue, job.kind, job.group_key)).max_payload_bytes
        ));
    end if;
    -- The end of the job looks for steps.
    if awaited >> job.fold % 63 & 1 = 0 then
        perform pgqueue._mark(pgqueue._settings_bits(job.queue), 'pgqueue.awaited_seq');
    end if;
    return content;
end;
$$;

comment on function pgqueue.save_step(bigint, bigint, text, jsonb) is
'Remembers, under a name, what a step of a running job has given, for its next
attempt, and returns it; if the step was saved before, what it gave then: the
first wins. Called in the transaction of the step''s own writes, it commits with
them, and until then nobody else can get the job. At most 10,000 steps a job,
each value at most max_payload_bytes. Steps are deleted when the job ends, but
kept with a dead job. Two that save the same step: the second waits.
Raises PQ002 when the lease is lost, 25001 outside READ COMMITTED, 22023 (bad
name), 54000 (too many, or too large).';

create or replace function pgqueue.steps(job_id bigint)
    returns table (name text, value jsonb, saved_at timestamptz)
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
as $$
declare
    own text[] := pgqueue._own_queues('worker', 'operator');
begin
    return query
    select s.name, s.value, s.saved_at
    from pgqueue.step as s
    where s.job_id = steps.job_id and (
        own is null
        or (select pgqueue._is_own(j.queue, own) from pgqueue.job as j where j.id = s.job_id)
        or (select pgqueue._is_own(d.queue, own) from pgqueue.dead_job as d where d.id = s.job_id)
    )
    order by s.place, s.saved_at, s.name;
end;
$$;

comment on function pgqueue.steps(bigint) is
'The steps that a waiting, running or dead job has saved, oldest first: what an
attempt need not do again. None of a job that has completed, was cancelled or
is unknown, or of a queue that is not the caller''s.';
