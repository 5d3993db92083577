-- Matches: conditions that find rows by an index.
--
-- Indexes begin with a hash, because names may be long; the names are compared as well, because different names
-- may have equal hashes. The planner inlines these functions, so they cost nothing and find the
-- index (test_plans). For that each must stay one expression, without `set`, that uses columns as they are.

-- Whether a job is in this lane of a queue: the lane is its priority, plus 1000 if it has a group.
create or replace function pgqueue._is_in_lane(job pgqueue.job, queue text, lane int)
    returns boolean
    language sql
    immutable
as $$
    select hashtext((job).queue) = hashtext(_is_in_lane.queue collate "default") and (job).queue = _is_in_lane.queue
        and ((job).priority + 1000 * num_nonnulls((job).group_key)) = lane
$$;

-- Whether a job belongs to this group.
create or replace function pgqueue._is_in_group(job pgqueue.job, queue text, group_key text)
    returns boolean
    language sql
    immutable
as $$
    select hashtextextended((job).group_key, hashtext((job).queue))
            = hashtextextended(_is_in_group.group_key collate "default", hashtext(_is_in_group.queue collate "default"))
        and (job).queue = _is_in_group.queue and (job).group_key = _is_in_group.group_key
$$;

-- What the settings say of a kind in a group, where paused leaves out the groups because there are many (_paused):
-- true for paused; null if they say nothing. Without a kind: whether all jobs of the group are paused. A kind at its
-- cap stays what _without has made of it, the null of JSON.
create or replace function pgqueue._pause_of(paused jsonb, group_key text, kind text default null)
    returns jsonb
    language plpgsql
    stable
as $$
begin
    if paused -> '' -> kind = 'null' then
        return jsonb 'null';
    end if;
    return (
        select to_jsonb(q.paused and (_pause_of.kind is not null or q.kind = ''))
        from pgqueue.queue as q
        where q.group_key = _pause_of.group_key and q.name in ('', _pause_of.paused ->> '*')
            and q.kind in ('', coalesce(_pause_of.kind, q.kind)) and q.paused is not null
        order by q.kind <> '' desc, q.name <> '' desc
        limit 1
    );
end;
$$;

-- Whether a claim of these kinds, with these pauses, may take a job.
create or replace function pgqueue._is_wanted(kind text, group_key text, kinds text[], paused jsonb)
    returns boolean
    language sql
    stable
as $$
    select (kinds is null or kind = any (kinds)) and (
        paused is null or coalesce(
            paused -> group_key -> kind, paused -> group_key -> '',
            case when group_key is not null and paused ? '*' then pgqueue._pause_of(paused, group_key, kind) end,
            paused -> '' -> kind, paused -> '' -> ''
        ) = 'false'
    )
$$;

-- Whether a group is paused as a whole, whatever the kinds of its jobs.
create or replace function pgqueue._is_group_paused(group_key text, paused jsonb)
    returns boolean
    language sql
    stable
as $$
    select coalesce(
        case when paused ? '*' then pgqueue._pause_of(paused, group_key) = 'true' else paused -> group_key = '{"": true}' end,
        false
    )
$$;

-- Whether a job is due, not before start, and not running, or its lease has expired. has_recovered: what had
-- expired has been ended, so leave out what has expired since.
create or replace function pgqueue._is_ready(
    job pgqueue.job, start timestamptz, moment timestamptz, has_recovered boolean
)
    returns boolean
    language sql
    immutable
as $$
    select (job).run_at between start and moment and case
        when has_recovered then (job).lease_expires_at is null and (((job).terms).expires_at <= moment) is not true
        else ((job).lease_expires_at <= moment) is not false
    end
$$;

-- Whether a ticket is in the lane of groups of this priority.
create or replace function pgqueue._is_ticket_in(ticket pgqueue.ticket, queue text, priority int)
    returns boolean
    language sql
    immutable
as $$
    select hashtext((ticket).queue) = hashtext(_is_ticket_in.queue collate "default")
        and (ticket).priority = _is_ticket_in.priority and (ticket).queue = _is_ticket_in.queue
$$;

-- From which run_at on a claim reads the jobs of a ticket. A time from another clock is ignored.
create or replace function pgqueue._start_of(ticket pgqueue.ticket, moment timestamptz)
    returns timestamptz
    language sql
    stable
as $$
    select coalesce(
        case when (ticket).start_until between moment and moment + interval '1 minute' then (ticket).start_at end,
        '-infinity'
    )
$$;

-- Whether a ticket belongs to this group. Callers that compare its priority write priority + 0; otherwise reading
-- the whole index of the lanes might look as cheap.
create or replace function pgqueue._is_ticket_of(ticket pgqueue.ticket, queue text, group_key text)
    returns boolean
    language sql
    immutable
as $$
    select hashtextextended((ticket).group_key, hashtext((ticket).queue))
            = hashtextextended(
                _is_ticket_of.group_key collate "default", hashtext(_is_ticket_of.queue collate "default")
            )
        and (ticket).queue = _is_ticket_of.queue and (ticket).group_key = _is_ticket_of.group_key
$$;

-- Whether a permit belongs to this kind or group of a queue; both empty: to the queue itself.
create or replace function pgqueue._is_permit_of(permit pgqueue.permit, queue text, kind text, group_key text)
    returns boolean
    language sql
    immutable
as $$
    select hashtextextended((permit).group_key, hashtextextended((permit).kind, hashtext((permit).queue)))
            = hashtextextended(
                _is_permit_of.group_key collate "default",
                hashtextextended(_is_permit_of.kind collate "default", hashtext(_is_permit_of.queue collate "default"))
            )
        and (permit).queue = _is_permit_of.queue and (permit).kind = _is_permit_of.kind
        and (permit).group_key = _is_permit_of.group_key
$$;

-- Whether a permit of a cap looks free and was not created by this transaction, which nobody else can see yet.
create or replace function pgqueue._is_free(permit pgqueue.permit, is_rate boolean, most int, moment timestamptz)
    returns boolean
    language sql
    stable
as $$
    select (permit).is_rate = _is_free.is_rate and (permit).place <= most
        -- Only a rate goes by the clock.
        and (permit).free_at <= case when _is_free.is_rate then moment else 'infinity' end
        and (permit).free_at < 'infinity' and (
            (permit).taken_at is not null
            or (permit).token is distinct from -coalesce(pg_current_xact_id_if_assigned()::text::bigint, 0)
        )
$$;

-- Whether a permit of a group is kept for a job's retry, and that retry is due.
create or replace function pgqueue._is_kept(permit pgqueue.permit, job pgqueue.job, moment timestamptz)
    returns boolean
    language sql
    immutable
as $$
    select not (permit).is_rate and (permit).free_at = 'infinity' and (permit).token <> -1
        and (job).token is null and (job).permits is not null and (job).run_at <= moment
$$;
