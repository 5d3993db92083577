-- Limits: how many jobs of a group run at once.
--
-- A group with a limit has as many slots, rows that persist. A claim takes a job of the group only
-- together with a free slot, which it locks first, and asks only then whether it is free: so it sees
-- what others did with it before. A slot is free when its job does not hold it any more (job.slot), so
-- nothing must be given back, whoever ends an attempt and how. What others have locked is passed
-- over: no claim waits. Two sessions that do not see each other may make a slot twice; who takes one
-- has all its copies locked, and finds no new one after that.
--
-- The job that a claim meets in the round is a ticket: the first job of its group, by priority, run_at
-- and id, gets the slot. What becomes of the tickets of a full group is in room park.

create or replace function pgqueue._has_limits(queue text)
    returns boolean
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
as $$
begin
    return pg_relation_size('pgqueue.queue') > 0 and exists (
        select from pgqueue.queue as q
        where q.name in (_has_limits.queue, '') and q.group_limit is not null
    );
end;
$$;

comment on function pgqueue._has_limits(text) is 'Whether any group of a queue has a limit.';

create or replace function pgqueue._has_slots(queue text, group_key text, group_limit int)
    returns boolean
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
as $$
begin
    return exists (
        select
        from pgqueue.slot as s
        where hashtext(s.queue) = hashtext(_has_slots.queue)
            and hashtext(s.group_key) = hashtext(_has_slots.group_key)
            and s.queue = _has_slots.queue and s.group_key = _has_slots.group_key
            and s.place = _has_slots.group_limit
    );
end;
$$;

comment on function pgqueue._has_slots(text, text, int) is 'Whether a group has all the slots of its limit.';

create or replace function pgqueue._make_slots(queue text, group_keys text[])
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
    insert into pgqueue.slot (place, queue, group_key)
    select p.place, _make_slots.queue, g.key
    from (select distinct u.key from unnest(group_keys) as u (key) where u.key is not null) as g
    cross join lateral pgqueue._in_force(_make_slots.queue, '', g.key) as settings
    cross join lateral (
        select coalesce(max(s.place), -1) as places
        from pgqueue.slot as s
        where hashtext(s.queue) = hashtext(_make_slots.queue)
            and hashtext(s.group_key) = hashtext(g.key)
            and s.queue = _make_slots.queue and s.group_key = g.key
    ) as made
    cross join lateral generate_series(made.places + 1, settings.group_limit) as p (place);
end;
$$;

comment on function pgqueue._make_slots(text, text[]) is
'Makes the slots that those of some groups lack that have a limit. Other
sessions see them from the commit on.';

create or replace function pgqueue._apply_limit(queue text, group_key text)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set jit = off
    set enable_indexscan = on
    set enable_seqscan = on
    set enable_hashagg = on
    set enable_sort = on
as $$
declare
    known record;
    group_limit int;
    places int;
    queues text[];
    lanes int[];
begin
    for known in
        select distinct j.queue, j.group_key
        from pgqueue.job as j
        where j.group_key is not null
            and (_apply_limit.queue is null or j.queue = _apply_limit.queue)
            and (_apply_limit.group_key is null or j.group_key = _apply_limit.group_key)
    loop
        group_limit := (pgqueue._in_force(known.queue, '', known.group_key)).group_limit;
        if group_limit is null then
            with back as (
                update pgqueue.job as j
                set turn = null
                where hashtext(j.queue) = hashtext(known.queue)
                    and j.turn is not null and not isfinite(j.turn)
                    and hashtext(j.group_key) = hashtext(known.group_key)
                    and j.queue = known.queue and j.group_key = known.group_key
                returning j.queue, j.priority
            )
            select array_agg(b.queue), array_agg(b.priority) into queues, lanes from back as b;
            perform pgqueue._reopened(queues, lanes);
            continue;
        end if;
        select coalesce(max(s.place), 0) into places
        from pgqueue.slot as s
        where hashtext(s.queue) = hashtext(known.queue) and hashtext(s.group_key) = hashtext(known.group_key)
            and s.queue = known.queue and s.group_key = known.group_key;
        perform pgqueue._count_running(known.queue, known.group_key, places);
        perform pgqueue._make_slots(known.queue, array[known.group_key]);
        insert into pgqueue.recall (queue, group_key)
        select j.queue, j.group_key
        from pgqueue.job as j
        where hashtext(j.queue) = hashtext(known.queue) and hashtext(j.group_key) = hashtext(known.group_key)
            and j.queue = known.queue and j.group_key = known.group_key and j.lease_expires_at is null
        limit group_limit;
        perform pgqueue._wake(known.queue);
    end loop;
end;
$$;

comment on function pgqueue._apply_limit(text, text) is
'After a change of limits: gives groups the slots that they lack, and lets
claims look at what is parked.';

create or replace function pgqueue._count_running(queue text, group_key text, places int)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set enable_indexscan = on
as $$
begin
    with running as (
        select j.id, places + row_number() over (order by j.id) as place
        from (
            select j.id
            from pgqueue.job as j
            where hashtext(j.queue) = hashtext(_count_running.queue)
                and hashtext(j.group_key) = hashtext(_count_running.group_key)
                and j.queue = _count_running.queue and j.group_key = _count_running.group_key
                and j.lease_expires_at is not null and j.slot is null
            order by j.id
            for update
        ) as j
    ), counted as (
        update pgqueue.job as j set slot = r.place from running as r where j.id = r.id
    )
    insert into pgqueue.slot (place, job_id, queue, group_key)
    select 0, null, _count_running.queue, _count_running.group_key where places = 0
    union all
    select r.place, r.id, _count_running.queue, _count_running.group_key from running as r;
end;
$$;

comment on function pgqueue._count_running(text, text, int) is
'Gives slots, behind those that there are, to the jobs of a group that run from
a time when it had no limit, also beyond the limit.';

create or replace function pgqueue._slots(queue text, group_key text)
    returns table (place int, slot tid, holder bigint, holder_run_at timestamptz, is_running boolean)
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_indexscan = on
    set enable_nestloop = on
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
begin
    return query
    select
        s.place, min(s.ctid), max(j.id), max(j.run_at),
        coalesce(bool_or(j.lease_expires_at is not null), false)
    from pgqueue.slot as s
    left join pgqueue.job as j on j.id = s.job_id and j.slot = s.place
    where hashtext(s.queue) = hashtext(_slots.queue)
        and hashtext(s.group_key) = hashtext(_slots.group_key)
        and s.queue = _slots.queue and s.group_key = _slots.group_key and s.place > 0
    group by s.place;
end;
$$;

comment on function pgqueue._slots(text, text) is
'The slots of a group, one copy of each, and which job holds it.';

create or replace function pgqueue._lock_slot(queue text, group_key text, place int)
    returns boolean
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_indexscan = on
as $$
declare
    seen bigint;
    locked bigint;
begin
    select count(*) into locked
    from (
        select
        from pgqueue.slot as s
        where hashtext(s.queue) = hashtext(_lock_slot.queue)
            and hashtext(s.group_key) = hashtext(_lock_slot.group_key)
            and s.queue = _lock_slot.queue and s.group_key = _lock_slot.group_key
            and s.place = _lock_slot.place
        for update skip locked
    ) as l;
    select count(*) into seen
    from pgqueue.slot as s
    where hashtext(s.queue) = hashtext(_lock_slot.queue)
        and hashtext(s.group_key) = hashtext(_lock_slot.group_key)
        and s.queue = _lock_slot.queue and s.group_key = _lock_slot.group_key
        and s.place = _lock_slot.place;
    return case when seen > 0 then locked = seen end;
end;
$$;

comment on function pgqueue._lock_slot(text, text, int) is
'Locks a slot, all copies of it; false where somebody else has one of them, null
where there is none.';

create or replace function pgqueue._end_late(queue text, group_key text, moment timestamptz)
    returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_sort = off
    set enable_indexscan = on
    set enable_tidscan = on
as $$
declare
    near tid[] := array(
        select j.ctid
        from pgqueue.job as j
        where hashtext(j.queue) = hashtext(_end_late.queue)
            and hashtext(j.group_key) = hashtext(_end_late.group_key)
            and j.queue = _end_late.queue and j.group_key = _end_late.group_key
            and j.lease_expires_at is null
        order by j.priority desc, j.run_at, j.id
        limit 1000
    );
begin
    perform pgqueue._expire(
        array(
            select j.ctid
            from pgqueue.job as j
            where j.ctid = any (near)
                and j.lease_expires_at is null and (j.terms).expires_at <= _end_late.moment
            for update skip locked
        ),
        moment
    );
end;
$$;

comment on function pgqueue._end_late(text, text, timestamptz) is
'Cancels those among the first thousand jobs of a group that may not begin any
more: they may be parked, where _pick does not meet them.';

create or replace function pgqueue._first_job(
    queue text, group_key text, moment timestamptz, is_strict boolean
)
    returns pgqueue.job
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_sort = off
    set enable_indexscan = on
as $$
declare
    first bigint;
    job pgqueue.job;
    lowest int := 2147483647;
    has_ended boolean := false;
begin
    loop
        if is_strict then
            select j.id into first
            from pgqueue.job as j
            where hashtext(j.queue) = hashtext(_first_job.queue)
                and hashtext(j.group_key) = hashtext(_first_job.group_key)
                and j.priority < lowest
                and j.queue = _first_job.queue and j.group_key = _first_job.group_key
                and j.lease_expires_at is null and j.slot is null
                and (not has_ended or ((j.terms).expires_at <= moment) is not true)
            order by j.priority desc, j.run_at, j.id
            limit 1;
        end if;
        select j.* into job
        from pgqueue.job as j
        where hashtext(j.queue) = hashtext(_first_job.queue)
            and hashtext(j.group_key) = hashtext(_first_job.group_key)
            and j.priority < lowest
            and j.queue = _first_job.queue and j.group_key = _first_job.group_key
            and j.lease_expires_at is null and j.slot is null
            and (not has_ended or ((j.terms).expires_at <= moment) is not true)
        order by j.priority desc, j.run_at, j.id
        limit 1
        for update skip locked;
        if job.id <> first then
            return null;
        end if;
        if (job.terms).expires_at <= moment then
            perform pgqueue._end_late(queue, group_key, moment);
            has_ended := true;
            continue;
        end if;
        exit when (job.run_at > moment) is not true;
        -- All of this priority are for later.
        lowest := job.priority;
    end loop;
    return job;
end;
$$;

comment on function pgqueue._first_job(text, text, timestamptz, boolean) is
'Locks the first due job of a group that waits, by priority, run_at and id; if
strict, none while somebody else has that one locked.';

create or replace function pgqueue._job_to_run(
    queue text, group_key text, group_limit int, moment timestamptz,
    out place int, out slot tid, out job_id bigint, out kind text
)
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_indexscan = on
as $$
declare
    free record;
    job pgqueue.job;
begin
    for free in
        select s.place, s.holder, s.beyond
        from (
            select
                u.*,
                sum((u.is_running or (u.holder_run_at > moment) is true)::int) over () as held,
                array_agg(u.holder) filter (
                    where u.place > group_limit and u.holder_run_at <= moment and not u.is_running
                ) over () as beyond
            from pgqueue._slots(queue, group_key) as u
        ) as s
        where s.held < group_limit and s.place <= group_limit
            and not s.is_running and (s.holder_run_at > moment) is not true
        order by s.holder is null, s.place
    loop
        continue when pgqueue._lock_slot(queue, group_key, free.place) is not true;
        -- Now that nobody else can take it.
        select s.place, s.slot, s.holder into place, slot, free.holder
        from pgqueue._slots(queue, group_key) as s
        where s.place = free.place and not s.is_running and (s.holder_run_at > moment) is not true;
        continue when not found;
        -- What waited for its retry comes first: it kept this slot, or one beyond a limit that was
        -- lowered since.
        select j.* into job
        from pgqueue.job as j
        where j.id = any (case when free.holder is null then free.beyond else array[free.holder] end)
            and j.lease_expires_at is null and j.slot is not null
        order by j.priority desc, j.run_at, j.id
        limit 1
        for update skip locked;
        if (job.terms).expires_at <= moment then
            perform pgqueue._expire(array(select j.ctid from pgqueue.job as j where j.id = job.id), moment);
            job := null;
            free.holder := null;
        end if;
        if job.id is null and free.holder is null then
            job := pgqueue._first_job(queue, group_key, moment, group_limit = 1);
        end if;
        job_id := job.id;
        kind := job.kind;
        return;
    end loop;
    place := null;
end;
$$;

comment on function pgqueue._job_to_run(text, text, int, timestamptz) is
'Locks a free slot of a group, if there is one, and the job that is to run in it.';

create or replace function pgqueue._limits(queue text, group_keys text[])
    returns int[]
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_indexscan = on
as $$
declare
    shared int := (pgqueue._in_force(queue)).group_limit;
begin
    return array(
        select case
            when exists (
                select from pgqueue.queue as q where q.name in (_limits.queue, '') and q.group_key = g.key
            )
                then (pgqueue._in_force(queue, '', g.key)).group_limit
            else shared
        end
        from unnest(group_keys) with ordinality as g (key, nth)
        order by g.nth
    );
end;
$$;

comment on function pgqueue._limits(text, text[]) is 'The limit of each of some groups; null for none.';

create or replace function pgqueue._hold(
    slots tid[], ids bigint[], places int[], turns timestamptz[],
    priorities int[] default null, run_ats timestamptz[] default null, untils timestamptz[] default null
)
    returns tid[]
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_tidscan = on
    set enable_indexscan = on
    set enable_nestloop = on
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
declare
    held tid[];
begin
    update pgqueue.slot as s
    set job_id = h.id, head_priority = h.priority, head_run_at = h.run_at, valid_until = h.until
    from unnest(slots, ids, priorities, run_ats, untils) as h (slot, id, priority, run_at, until)
    where s.ctid = h.slot and s.job_id is distinct from h.id;
    with leased as (
        update pgqueue.job as j
        -- Until claim() gives it its lease.
        set lease_expires_at = 'infinity',
            slot = h.place,
            turn = case when j.turn = 'infinity' then h.turn else j.turn end
        from unnest(ids, places, turns) as h (id, place, turn)
        where j.id = h.id and j.lease_expires_at is null
        returning j.ctid as tid
    )
    select array_agg(l.tid) into held from leased as l;
    return coalesce(held, '{}');
end;
$$;

comment on function pgqueue._hold(
    tid[], bigint[], int[], timestamptz[], int[], timestamptz[], timestamptz[]
) is
'Marks locked jobs as those that a claim takes, in their slots, which may
remember until when their groups need be looked at only from there on; returns
where they are now.';

create or replace function pgqueue._admit_each(
    queue text, kinds text[], paused jsonb, ids bigint[], limits jsonb, wanted int,
    moment timestamptz, inout barred text[], out jobs tid[]
)
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_indexscan = on
    set enable_nestloop = on
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
declare
    met record;
    next record;
begin
    jobs := '{}';
    for met in
        select
            j.group_key, (limits ->> j.group_key)::int as most, min(j.priority) as priority,
            min(j.turn) as turn, array_agg(j.id) as ids
        from pgqueue.job as j
        where j.id = any (_admit_each.ids)
        group by j.group_key
    loop
        for ticket in 1 .. cardinality(met.ids) loop
            exit when cardinality(jobs) = wanted;
            next := pgqueue._job_to_run(queue, met.group_key, met.most, moment);
            exit when next.place is null;
            if next.job_id is null or next.kind <> all (kinds) or coalesce(
                paused -> met.group_key -> next.kind, paused -> '' -> next.kind
            ) = 'true' then
                barred := barred || met.group_key;
                exit;
            end if;
            jobs := jobs || pgqueue._hold(
                array[next.slot], array[next.job_id], array[next.place], array[met.turn]
            );
            -- The copies are locked here, all of them.
            delete from pgqueue.slot as s
            where hashtext(s.queue) = hashtext(_admit_each.queue)
                and hashtext(s.group_key) = hashtext(met.group_key)
                and s.queue = _admit_each.queue and s.group_key = met.group_key
                and s.place = next.place and s.job_id is distinct from next.job_id;
        end loop;
        exit when cardinality(jobs) = wanted;
        if next.place is null
            and not pgqueue._park_jobs(queue, met.group_key, met.most, met.priority, met.ids)
        then
            perform pgqueue._make_slots(queue, array[met.group_key]);
            barred := barred || met.group_key;
        end if;
    end loop;
end;
$$;

comment on function pgqueue._admit_each(
    text, text[], jsonb, bigint[], jsonb, int, timestamptz, text[]
) is
'_admit for groups that are full, or nearly: one after the other.';

create or replace function pgqueue._heads(
    queue text, kinds text[], paused jsonb, keys text[], limits int[], moment timestamptz,
    inout turns timestamptz[], inout slots tid[], out places int[], out ids bigint[],
    out priorities int[], out run_ats timestamptz[], out untils timestamptz[]
)
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_sort = off
    set enable_indexscan = on
    set enable_tidscan = on
    set enable_nestloop = on
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
declare
    began timestamptz := clock_timestamp();
    walked bigint := pg_stat_get_xact_tuples_returned('pgqueue.job_group_idx'::regclass);
    valid_until timestamptz;
begin
    select
        array_agg(f.slot), array_agg(s.place), array_agg(n.id), array_agg(f.turn),
        array_agg(n.priority), array_agg(n.run_at), array_agg(case when known.is_valid then s.valid_until end)
    into slots, places, ids, turns, priorities, run_ats, untils
    from unnest(keys, limits, turns, slots) as f (key, most, turn, slot)
    join pgqueue.slot as s on s.ctid = f.slot
    cross join lateral (
        -- A time of another clock is none.
        select coalesce(s.valid_until between moment and moment + interval '1 minute', false)
        offset 0
    ) as known (is_valid)
    cross join lateral (
        -- While somebody else has the first locked, _admit_each decides.
        select j.id, j.priority, j.run_at, j.kind, (j.terms).expires_at
        from pgqueue.job as j
        where j.ctid = coalesce(
                (
                    select o.ctid
                    from pgqueue.job as o
                    where known.is_valid
                        and hashtext(o.queue) = hashtext(_heads.queue) and hashtext(o.group_key) = hashtext(f.key)
                        and o.priority = s.head_priority and o.run_at >= s.head_run_at
                        and o.queue = _heads.queue and o.group_key = f.key
                        and o.lease_expires_at is null and o.slot is null
                    order by o.priority desc, o.run_at, o.id
                    limit 1
                ),
                (
                    select o.ctid
                    from pgqueue.job as o
                    where hashtext(o.queue) = hashtext(_heads.queue) and hashtext(o.group_key) = hashtext(f.key)
                        and o.queue = _heads.queue and o.group_key = f.key
                        and o.lease_expires_at is null and o.slot is null
                    order by o.priority desc, o.run_at, o.id
                    limit 1
                )
            )
            and j.lease_expires_at is null and j.slot is null
        for update skip locked
    ) as n
    where n.run_at <= moment and (n.expires_at <= moment) is not true
        and (kinds is null or n.kind = any (kinds))
        and coalesce(paused -> f.key -> n.kind, paused -> '' -> n.kind, 'false') = 'false'
        and not exists (select from pgqueue.job as h where h.id = s.job_id and h.slot = s.place)
        and not exists (
            select
            from pgqueue.slot as o
            where hashtext(o.queue) = hashtext(_heads.queue) and hashtext(o.group_key) = hashtext(f.key)
                and o.queue = _heads.queue and o.group_key = f.key
                and (
                    o.place = s.place and o.ctid <> s.ctid
                    -- Those that run beyond a limit that was lowered end first.
                    or o.place > f.most
                        and exists (select from pgqueue.job as h where h.id = o.job_id and h.slot = o.place)
                )
        );
    if pg_stat_get_xact_tuples_returned('pgqueue.job_group_idx'::regclass) - walked
        > 200 * cardinality(keys)
    then
        -- Groups may be many, and each is walked once in this time.
        valid_until := pgqueue._believed_until(began, '1 second');
        untils := array(
            select coalesce(u.until, valid_until) from unnest(untils) with ordinality as u (until, place)
            order by u.place
        );
    end if;
end;
$$;

comment on function pgqueue._heads(
    text, text[], jsonb, text[], int[], timestamptz, timestamptz[], tid[]
) is
'Locks the first jobs of some groups whose slots are locked; returns those that
may run now, with their slots and places, the turns that were given with the
slots, and what the slots are to remember of them.';

create or replace function pgqueue._admit(
    queue text, kinds text[], paused jsonb, picks tid[], moment timestamptz,
    inout barred text[], out jobs tid[]
)
    language plpgsql
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set jit = off
    set enable_seqscan = off
    set enable_indexscan = on
    set enable_tidscan = on
    set enable_nestloop = on
    set enable_hashjoin = off
    set enable_mergejoin = off
as $$
declare
    met record;
    limits int[];
    by_key jsonb;
    free record;
    heads record;
    rest record;
    more record;
begin
    select array_agg(g.key) as keys, array_agg(g.turn) as turns
    into met
    from (
        select j.group_key as key, min(j.turn) as turn
        from pgqueue.job as j
        where j.ctid = any (picks)
        group by j.group_key
    ) as g;
    limits := pgqueue._limits(queue, met.keys);
    -- A slot for each group, locked, and then, when nobody else can take it any more, the job that is
    -- to have it. What is not plain is left to _admit_each.
    select array_agg(g.key) as keys, array_agg(g.most) as limits, array_agg(g.turn) as turns,
        array_agg(s.tid) as slots
    into free
    from unnest(met.keys, met.turns, limits) as g (key, turn, most)
    cross join lateral (
        select s.ctid as tid
        from pgqueue.slot as s
        where hashtext(s.queue) = hashtext(_admit.queue) and hashtext(s.group_key) = hashtext(g.key)
            and s.queue = _admit.queue and s.group_key = g.key and s.place between 1 and g.most
            and not exists (select from pgqueue.job as h where h.id = s.job_id and h.slot = s.place)
        limit 1
        for update skip locked
    ) as s;
    heads := pgqueue._heads(
        queue, kinds, paused, free.keys, free.limits, moment, free.turns, free.slots
    );
    jobs := pgqueue._hold(
        heads.slots, heads.ids, heads.places, heads.turns, heads.priorities, heads.run_ats, heads.untils
    );

    -- By a look into an object, because a join of two arrays is planned as if they were short.
    by_key := jsonb_object(met.keys, limits::text[]);
    select
        array_agg(j.id) filter (where by_key ->> j.group_key is null) as unlimited,
        array_agg(j.id) filter (where by_key ->> j.group_key is not null) as limited
    into rest
    from unnest(picks) as p (tid)
    join pgqueue.job as j on j.ctid = p.tid and j.lease_expires_at is null;
    if rest.unlimited is not null then
        jobs := jobs || pgqueue._hold(null, rest.unlimited, null, null);
    end if;
    if rest.limited is not null then
        more := pgqueue._admit_each(
            queue, kinds, paused, rest.limited, by_key,
            cardinality(picks) - cardinality(jobs), moment, barred
        );
        jobs := jobs || more.jobs;
        barred := more.barred;
    end if;
end;
$$;

comment on function pgqueue._admit(text, text[], jsonb, tid[], timestamptz, text[]) is
'Of the jobs that were picked, each in the name of its group: those that may
run, with their slots. Parks where a group is full, and returns, as barred, the
groups that this claim can serve no more.';

create or replace function pgqueue._pick_round(
    queue text, kinds text[], paused jsonb, lane int, wanted int, moment timestamptz, is_whole boolean,
    taken tid[]
)
    returns tid[]
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
declare
    picks tid[];
    next record;
    barred text[];
    jobs tid[] := '{}'::tid[];
begin
    if not pgqueue._has_limits(queue) then
        -- The round may have been picked from before, for newcomers.
        return pgqueue._pick(queue, kinds, paused, lane, wanted, moment, is_whole, taken);
    end if;
    perform pgqueue._heed_recalls(queue);
    loop
        picks := pgqueue._pick(
            queue, kinds, paused, lane, wanted - cardinality(jobs), moment, is_whole, null, barred
        );
        exit when picks = '{}';
        next := pgqueue._admit(queue, kinds, paused, picks, moment, barred);
        barred := next.barred;
        jobs := jobs || next.jobs;
        exit when cardinality(jobs) = wanted;
    end loop;
    return jobs;
end;
$$;

comment on function pgqueue._pick_round(text, text[], jsonb, int, int, timestamptz, boolean, tid[]) is
'_pick in the round of a lane, for as many jobs as the limits of their groups
allow.';
