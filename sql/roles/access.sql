-- Which role may do what. PUBLIC may do nothing. Only the owner touches tables: the
-- functions are security definer, so a role only needs the right to call them. Roles
-- belong to the cluster, so the extension creates none; it grants to yours.

-- What a kind of role may do: one row for each grant; none for an unknown kind.
create or replace function pgqueue._grants(kind text)
    returns table (is_function boolean, object text)
    language sql
    immutable
as $$
    select g.is_function, unnest(g.objects::text[])
    from (
        values
            ('{producer}', true, '{enqueue,enqueue_many,enqueue_row,create_batch,close_batch}'),
            ('{producer}', true, '{status,result,await,version}'),
            ('{worker}', true, '{claim,claim_from,extend,progress,complete,complete_many,fail,release,finish}'),
            ('{worker}', true, '{reap,maintain,rest,schedule,next_slots,version}'),
            ('{operator}', true, '{cancel,cancel_many,redrive,redrive_job,discard,discard_many,purge,pause,resume}'),
            ('{operator}', true, '{rerun,run_now,reprioritize,configure,reap,maintain,status,result,await}'),
            ('{operator}', true, '{schedule,unschedule,pause_schedule,resume_schedule,run_schedule}'),
            ('{operator,reader}', true, '{next_slots,why,health,metrics,version}'),
            -- The views call these as their reader.
            ('{operator,reader}', true, '{_count_jobs,_count_dead,_dead_kinds,_leased,_recent_runs}'),
            ('{operator,reader}', true, '{_dead_errors,_error_like,_last_state}'),
            ('{operator,reader}', false, '{jobs,queues,running,workers,kinds,throughput,failures,dead,stuck}'),
            ('{operator,reader}', false, '{settings,schedules,batches,batch_jobs,dependencies,hours,retention,checks}'),
            ('{operator}', false, '{queue,job,dead_job,run,schedule}')
    ) as g (kinds, is_function, objects)
    where _grants.kind = any (g.kinds::text[])
$$;

-- Grants or revokes what _grants lists: the only dynamic SQL, because GRANT takes no parameters.
create or replace function pgqueue._change_access(role text, kind text, is_granted boolean)
    returns void
    language plpgsql
as $$
declare
    change record;
begin
    if is_granted then
        execute format('grant usage on schema pgqueue to %I', role);
    end if;
    for change in select g.is_function, g.object from pgqueue._grants(kind) as g loop
        execute case
            when is_granted and change.is_function
                then format('grant execute on function pgqueue.%I to %I', change.object, role)
            when is_granted then format('grant select on pgqueue.%I to %I', change.object, role)
            when change.is_function
                then format('revoke execute on function pgqueue.%I from %I', change.object, role)
            else format('revoke select on pgqueue.%I from %I', change.object, role)
        end;
    end loop;
    -- A role that may no longer do anything does not see the schema either.
    if not is_granted and not exists (
        select from (
            select p.proacl from pg_proc as p where p.pronamespace = 'pgqueue'::regnamespace
            union all
            select c.relacl from pg_class as c where c.relnamespace = 'pgqueue'::regnamespace
        ) as o (acl)
        cross join lateral aclexplode(o.acl) as a
        where a.grantee = format('%I', role)::regrole
    ) then
        execute format('revoke usage on schema pgqueue from %I', role);
    end if;
end;
$$;

create or replace function pgqueue.grant_access(role text, kind text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    refused boolean := pgqueue._refuse(pgqueue._check_grant(role, kind));
begin
    perform pgqueue._change_access(role, kind, true);
end;
$$;

comment on function pgqueue.grant_access(text, text) is
'Lets a role be a producer (enqueue), worker (claim and end attempts), operator
(manage, and read all) or reader (why, health, metrics and the views, which
hold no payload).
Kinds include no other kind.
Raises 22023 (unknown kind), 42704 (no such role).';

create or replace function pgqueue.revoke_access(role text, kind text)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    refused boolean := pgqueue._refuse(pgqueue._check_grant(role, kind));
begin
    perform pgqueue._change_access(role, kind, false);
end;
$$;

comment on function pgqueue.revoke_access(text, text) is
'Undoes grant_access; rights that the role also has through another kind must be
granted again.
Raises 22023 (unknown kind), 42704 (no such role).';

revoke all on schema pgqueue from public;
revoke all on all tables in schema pgqueue from public;
revoke all on all sequences in schema pgqueue from public;
revoke all on all routines in schema pgqueue from public;
