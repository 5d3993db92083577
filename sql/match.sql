-- Matches: conditions that find rows by an index.
--
-- Indexes begin with a hash, because names may be long; the names are compared as well, because hashes
-- may be equal. These functions check both. The planner inlines them, so they cost nothing and find the
-- index (test_plans): they must stay one expression each, without `set`, that uses columns as they are.

create or replace function pgqueue._is_in_lane(job pgqueue.job, queue text, lane int)
    returns boolean
    language sql
    immutable
return hashtext((job).queue) = hashtext(_is_in_lane.queue) and (job).queue = _is_in_lane.queue
    and ((job).priority + 1000 * num_nonnulls((job).group_key)) = lane;

comment on function pgqueue._is_in_lane(pgqueue.job, text, int) is
'Whether a job is in this lane of a queue: its priority, or 1000 more with a
group.';

create or replace function pgqueue._is_in_group(job pgqueue.job, queue text, group_key text)
    returns boolean
    language sql
    immutable
return hashtextextended((job).group_key, hashtext((job).queue))
        = hashtextextended(_is_in_group.group_key, hashtext(_is_in_group.queue))
    and (job).queue = _is_in_group.queue and (job).group_key = _is_in_group.group_key;

comment on function pgqueue._is_in_group(pgqueue.job, text, text) is
'Whether a job belongs to this group.';

create or replace function pgqueue._is_wanted(kind text, group_key text, kinds text[], paused jsonb)
    returns boolean
    language sql
    immutable
return (kinds is null or kind = any (kinds)) and (
    paused is null or coalesce(
        paused -> group_key -> kind, paused -> group_key -> '', paused -> '' -> kind, paused -> '' -> ''
    ) = 'false'
);

comment on function pgqueue._is_wanted(text, text, text[], jsonb) is
'Whether a claim of these kinds, with these pauses, may take a job.';

create or replace function pgqueue._is_ticket_in(ticket pgqueue.ticket, queue text, priority int)
    returns boolean
    language sql
    immutable
return hashtext((ticket).queue) = hashtext(_is_ticket_in.queue) and (ticket).priority = _is_ticket_in.priority
    and (ticket).queue = _is_ticket_in.queue;

comment on function pgqueue._is_ticket_in(pgqueue.ticket, text, int) is
'Whether a ticket is in the lane of groups of this priority.';

create or replace function pgqueue._is_ticket_of(ticket pgqueue.ticket, queue text, group_key text)
    returns boolean
    language sql
    immutable
return hashtextextended((ticket).group_key, hashtext((ticket).queue))
        = hashtextextended(_is_ticket_of.group_key, hashtext(_is_ticket_of.queue))
    and (ticket).queue = _is_ticket_of.queue and (ticket).group_key = _is_ticket_of.group_key;

comment on function pgqueue._is_ticket_of(pgqueue.ticket, text, text) is
'Whether a ticket belongs to this group.';

create or replace function pgqueue._is_permit_of(permit pgqueue.permit, queue text, kind text, group_key text)
    returns boolean
    language sql
    immutable
return hashtextextended((permit).group_key, hashtextextended((permit).kind, hashtext((permit).queue)))
        = hashtextextended(
            _is_permit_of.group_key, hashtextextended(_is_permit_of.kind, hashtext(_is_permit_of.queue))
        )
    and (permit).queue = _is_permit_of.queue and (permit).kind = _is_permit_of.kind
    and (permit).group_key = _is_permit_of.group_key;

comment on function pgqueue._is_permit_of(pgqueue.permit, text, text, text) is
'Whether a permit belongs to this kind, or group, of a queue; empty: to all.';
