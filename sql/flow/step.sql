-- Steps: what a job has already done, so that a retry need not do it again.
--
-- They are rows of their own, so that no claim has to copy them. They are deleted with the job, but stay with a
-- dead job. save_step first writes the step, then locks the job, with a lock that lets heartbeats through:
--   - If two sessions save the same step at once, the second waits for the first, and holds no lock meanwhile.
--   - Until a step is committed nobody can recover the job and give it to another worker, which would not see
--     that the step was done.

create or replace function pgqueue.save_step(job_id bigint, token bigint, name text, value jsonb default 'null')
    returns jsonb
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
as $$
declare
    saved_place int;
    fold int;
    job record;
    problem text[];
    refused boolean;
begin
    -- Few statements, variables and operators, because a step should not cost more than an enqueue: each operator
    -- takes a thousand instructions.
    if current_setting('transaction_isolation') <> 'read committed'
        or (octet_length(save_step.name) <@ int4range '[1,200]') is not true or save_step.job_id is null
    then
        refused := pgqueue._refuse(coalesce(pgqueue._check_isolation(), case
            when (octet_length(save_step.name) between 1 and 200) is not true
                then pgqueue._bad_name('the name of a step', save_step.name)
            else pgqueue._lost(save_step.job_id, save_step.token)
        end));
    end if;
    insert into pgqueue.step as s (job_id, saved_at, place, name, value)
    values (
        save_step.job_id, clock_timestamp(),
        coalesce((
            select l.place from pgqueue.step as l where l.job_id = save_step.job_id order by l.place desc limit 1
        ), 0) + 1,
        save_step.name, coalesce(save_step.value, 'null')
    )
    on conflict do nothing
    returning s.place into saved_place;

    select (hashtext(j.queue) & 255) % 63 into fold
    from pgqueue.job as j
    where j.id = save_step.job_id and j.token = save_step.token
    for key share;
    -- A later step needs no check: the first has marked the queue, and used_seq shows that nothing is set for the
    -- queue and no access is limited.
    if saved_place between 2 and 10000 and save_step.value is not null
        and pg_sequence_last_value('pgqueue.used_seq') >> fold & 1 = 0
    then
        return save_step.value;
    end if;
    select j.queue, j.kind, j.group_key into job
    from pgqueue.job as j
    where j.id = save_step.job_id and j.token = save_step.token;
    if not found or not pgqueue._is_own(job.queue, pgqueue._own_queues('worker')) then
        problem := pgqueue._lost(save_step.job_id, save_step.token);
    elsif saved_place > 10000 then
        problem := array[
            'a job has at most 10000 steps',
            format('Job %s has %s.', save_step.job_id, saved_place - 1),
            'Save larger steps, or let the job enqueue others.',
            '54000'
        ];
    else
        -- From now on the ends of this queue's jobs look for steps.
        perform pgqueue._mark(pgqueue._settings_bits(job.queue), 'pgqueue.awaited_seq');
        if saved_place is not null then
            problem := pgqueue._check_payload(
                coalesce(save_step.value, 'null'),
                (pgqueue._in_force(job.queue, job.kind, job.group_key)).max_payload_bytes
            );
            if problem is not null then
                problem[1] := 'the value of the step is too large for this queue';
                problem[3] := 'Save only where it is, or return less from the jobs that it has waited for, '
                    'or configure max_payload_bytes.';
            end if;
        end if;
    end if;
    refused := pgqueue._refuse(problem);
    return (
        select s.value
        from pgqueue.step as s
        where s.job_id = save_step.job_id and s.name = save_step.name collate "default"
    );
end;
$$;

comment on function pgqueue.save_step(bigint, bigint, text, jsonb) is
'Saves the value of a step of a running job under a name, for the next attempt,
and returns it; if that step was saved before, returns the value from then: the
first wins. Called in the transaction of the step''s own writes, it commits with
them, and until then nobody else can get the job. At most 10,000 steps a job,
each value at most max_payload_bytes. Steps are deleted when the job ends, but
kept with a dead job. If two sessions save the same step, the second waits.
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
attempt need not do again. Returns none for a job that has completed, was
cancelled or is unknown, or is in a queue that is not the caller''s.';
