-- Moves what belongs to a key to another shard, for the command move-groups, which calls these functions as the
-- owner on both shards.
--
-- A part is a job, a dead job or a schedule. It is locked on the old shard, written into the table moving on the
-- new one, and committed there; then it is deleted on the old shard, which notes in its own moving that it is
-- gone; then it arrives. If that is interrupted, a part in moving on the new shard arrives if the old one has
-- noted that it is gone, and is forgotten if not. So nothing is lost, and nothing exists twice.

-- What is on this shard but belongs on another: groups, unique keys of jobs without a group, and schedules.
create or replace function pgqueue._misplaced(place int, shards int)
    returns table (kind text, queue text, key text, place int)
    language sql
    stable
as $$
    select m.kind, m.queue, m.key, pgqueue.shard_of(m.placed_by, shards)
    from (
        select k.kind, k.queue, k.key, k.key
        from (
            select case when j.group_key is null then 'unique' else 'group' end, j.queue, coalesce(j.group_key, j.unique_key)
            from pgqueue.job as j
            union
            select case when d.group_key is null then 'unique' else 'group' end, d.queue, coalesce(d.group_key, d.unique_key)
            from pgqueue.dead_job as d
        ) as k (kind, queue, key)
        where k.key is not null
        union all
        -- Its jobs belong to its group.
        select 'schedule', s.queue, s.name, coalesce(s.group_key, s.name) from pgqueue.schedule as s
    ) as m (kind, queue, key, placed_by)
    where pgqueue.shard_of(m.placed_by, shards) <> _misplaced.place
    order by m.kind, m.queue, m.key
$$;

-- An empty row as a text, but with JSON nulls, which jsonb_populate_record would turn into SQL nulls.
create or replace function pgqueue._empty_row(relation regclass)
    returns text
    language plpgsql
    stable
as $$
begin
    return (
        select format('(%s)', string_agg(
            case when a.attname in ('payload', 'value') then 'null' else '' end, ',' order by a.attnum
        ))
        from pg_attribute as a
        where a.attrelid = relation and a.attnum > 0 and not a.attisdropped
    );
end;
$$;

-- Locks all that belongs to a key, and returns it. state is free, or says why it cannot move: busy (a job is
-- running, or another session has one locked), kept (by a retry that keeps its place) or tied (a job waits for
-- others or for an event, or has done so; others wait for it; it has saved steps; or it is part of a batch).
create or replace function pgqueue._depart(kind text, queue text, key text, out state text, out parts jsonb)
    language plpgsql
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
as $$
declare
    found_ids bigint[] := array(
        select j.id from pgqueue.job as j
        where _depart.kind = 'group' and pgqueue._is_in_group(j, _depart.queue, _depart.key)
        union all
        select j.id from pgqueue._with_key(_depart.queue, _depart.key) as j
        where _depart.kind = 'unique' and j.group_key is null
        order by id
    );
    ids bigint[] := array(select j.id from pgqueue.job as j where j.id = any (found_ids) order by j.id for update skip locked);
    found_dead bigint[] := array(
        select d.id from pgqueue.dead_job as d
        where d.queue = _depart.queue and num_nonnulls((d.terms).batch_id, (d.terms).after) = 0 and case _depart.kind
            when 'group' then d.group_key = _depart.key
            when 'unique' then d.unique_key = _depart.key and d.group_key is null
        end
        order by d.id
    );
    dead_ids bigint[] := array(
        select d.id from pgqueue.dead_job as d where d.id = any (found_dead) order by d.id for update skip locked
    );
    recurring pgqueue.schedule[] := array(
        select s from pgqueue.schedule as s where _depart.kind = 'schedule' and s.name = _depart.key for update skip locked
    );
begin
    select
        case
            when bool_or(
                (j.terms).batch_id is not null or (j.terms).after is not null or j.run_at = 'infinity'
                or exists (select from pgqueue.dependency as d where d.job_id = j.id)
                or exists (select from pgqueue.step as s where s.job_id = j.id)
                or exists (select from pgqueue.wait as w where w.job_id = j.id)
            ) then 'tied'
            when bool_or(j.token is not null) or ids <> found_ids or dead_ids <> found_dead then 'busy'
            when recurring = '{}' and exists (
                select from pgqueue.schedule as s where _depart.kind = 'schedule' and s.name = _depart.key
            ) then 'busy'
            when bool_or(j.permits is not null) then 'kept'
            else 'free'
        end,
        coalesce(jsonb_agg(jsonb_build_object('what', 'job', 'key', j.id::text, 'content', to_jsonb(j))), '[]')
    into state, parts
    from pgqueue.job as j
    where j.id = any (ids);
    if state <> 'free' then
        return;
    end if;
    parts := parts || coalesce((
        select jsonb_agg(jsonb_build_object(
            'what', 'dead_job', 'key', d.id::text,
            'content', to_jsonb(d) || jsonb_build_object(
                'steps', array(select to_jsonb(s) from pgqueue.step as s where s.job_id = d.id)
            )
        ))
        from pgqueue.dead_job as d
        where d.id = any (dead_ids)
    ), '[]') || coalesce((
        select jsonb_agg(jsonb_build_object('what', 'schedule', 'key', s.name, 'content', to_jsonb(s)))
        from unnest(recurring) as s
    ), '[]');
end;
$$;

-- Deletes what _depart has locked, and notes that it is gone from here.
create or replace function pgqueue._departed(whats text[], keys text[])
    returns void
    language plpgsql
    set enable_seqscan = off
as $$
declare
    gone bigint[] := array(
        select p.key::bigint from unnest(whats, keys) as p (what, key) where p.what in ('job', 'dead_job')
    );
begin
    delete from pgqueue.job as j where j.id = any (gone);
    delete from pgqueue.dead_job as d where d.id = any (gone);
    perform pgqueue._forget_steps(gone);
    delete from pgqueue.schedule as s
    where s.name in (select p.key from unnest(whats, keys) as p (what, key) where p.what = 'schedule');
    insert into pgqueue.moving (what, key) select * from unnest(whats, keys);
end;
$$;

-- Writes down what is to arrive. This replaces what was written down before but never left the old shard.
create or replace function pgqueue._expect(parts jsonb)
    returns void
    language plpgsql
    set enable_seqscan = off
as $$
declare
    ids bigint[] := array(
        select p.key::bigint from jsonb_to_recordset(parts) as p (what text, key text) where p.what in ('job', 'dead_job')
    );
    present bigint := coalesce(
        (select min(j.id) from pgqueue.job as j where j.id = any (ids)),
        (select min(d.id) from pgqueue.dead_job as d where d.id = any (ids))
    );
    refused boolean := pgqueue._refuse(case when present is not null then array[
        format('job %s is on both shards', present), 'Both have handed out the same ids.',
        'Wait until one of the two has ended, or cancel it; then call move-groups again.', '55000'
    ] end);
begin
    insert into pgqueue.moving as m (what, key, content)
    select p.what, p.key, p.content from jsonb_to_recordset(parts) as p (what text, key text, content jsonb)
    on conflict (what, key) do update set content = excluded.content;
end;
$$;

-- Makes these arrive: jobs keep their ids and their places. A job whose unique_key is taken here loses the key.
create or replace function pgqueue._arrive(whats text[], keys text[])
    returns void
    language plpgsql
    set enable_seqscan = off
as $$
declare
    any_job pgqueue.job := pgqueue._empty_row('pgqueue.job')::pgqueue.job;
    any_dead pgqueue.dead_job := pgqueue._empty_row('pgqueue.dead_job')::pgqueue.dead_job;
    any_step pgqueue.step := pgqueue._empty_row('pgqueue.step')::pgqueue.step;
    any_schedule pgqueue.schedule := pgqueue._empty_row('pgqueue.schedule')::pgqueue.schedule;
    came pgqueue.job[];
    there bigint[];
begin
    with taken as (
        delete from pgqueue.moving as m
        where (m.what, m.key) in (select * from unnest(whats, keys)) and m.content is not null
        returning m.what, m.content - case when m.content -> 'payload' = 'null' then 'payload' else '' end as content
    ), dead as (
        insert into pgqueue.dead_job
        select r.* from taken as t cross join jsonb_populate_record(any_dead, t.content) as r
        where t.what = 'dead_job'
    ), remembered as (
        insert into pgqueue.step
        select r.*
        from taken as t
        cross join jsonb_array_elements(t.content -> 'steps') as s (step)
        cross join jsonb_populate_record(any_step, s.step - case when s.step -> 'value' = 'null' then 'value' else '' end) as r
    ), recurring as (
        insert into pgqueue.schedule
        select r.* from taken as t cross join jsonb_populate_record(any_schedule, t.content) as r
        where t.what = 'schedule'
        on conflict do nothing
    )
    select array_agg(jsonb_populate_record(any_job, t.content)) into came from taken as t where t.what = 'job';
    with arrived as (
        insert into pgqueue.job as j overriding system value
        select c.* from unnest(came) as c
        on conflict (queue, unique_key) where j.unique_key is not null do nothing
        returning j.id
    )
    select array_agg(a.id) into there from arrived as a;
    insert into pgqueue.job overriding system value
    select r.*
    from unnest(came) as c
    cross join jsonb_populate_record(c, '{"unique_key": null}') as r
    where c.id <> all (coalesce(there, '{}'));
    perform
        pgqueue._make_group_permits(c.queue, array_agg(c.group_key), pgqueue._in_force(c.queue)),
        pgqueue._make_permits_for(c.queue, (pgqueue._in_force(c.queue)).caps, null)
    from unnest(came) as c
    group by c.queue;
    perform pgqueue._reopened(array_agg(c.queue), array_agg(c.priority), array_agg(c.group_key), array_agg(c.run_at))
    from unnest(came) as c;
    if 'schedule' = any (whats) then
        perform pgqueue._look_from_now_on();
    end if;
    -- From now on the ends of jobs look for steps, as those of redriven jobs need to.
    if 'dead_job' = any (whats) and exists (select from pgqueue.step) then
        perform pgqueue._mark(pgqueue._settings_bits(''), 'pgqueue.awaited_seq');
    end if;
end;
$$;

-- Pauses a busy group until it has moved. Notes what was set for it before, and overrides no setting within it.
create or replace function pgqueue._pause_group(queue text, key text)
    returns void
    language plpgsql
as $$
declare
    before boolean := (
        select q.paused from pgqueue.queue as q
        where q.name = _pause_group.queue and q.group_key = _pause_group.key and q.kind = ''
    );
begin
    if before is not true then
        perform pgqueue._set(queue, null, key, '{"paused": true}', false);
        perform pgqueue._resolve(queue);
        insert into pgqueue.moving (what, key) values ('paused', jsonb_build_array(queue, key, before)::text)
        on conflict do nothing;
    end if;
end;
$$;

-- Resumes a group that _pause_group has paused, or all of them.
create or replace function pgqueue._resume_groups(queue text default null, key text default null)
    returns void
    language plpgsql
as $$
declare
    held record;
begin
    for held in
        delete from pgqueue.moving as m
        where m.what = 'paused' and (
            _resume_groups.key is null
            or m.key::jsonb ->> 0 = _resume_groups.queue and m.key::jsonb ->> 1 = _resume_groups.key
        )
        returning m.key::jsonb ->> 0 as queue, m.key::jsonb ->> 1 as key, m.key::jsonb -> 2 as before
    loop
        perform pgqueue._set(held.queue, null, held.key, jsonb_build_object('paused', held.before), false);
        perform pgqueue._resolve(held.queue), pgqueue._unblock_groups(held.queue, held.key), pgqueue._wake(held.queue);
    end loop;
end;
$$;
