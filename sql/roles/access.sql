-- Which role may do what. PUBLIC may do nothing. Only the owner touches tables: the
-- functions are security definer, so a role only needs the right to call them. Roles
-- belong to the cluster, so the extension creates none; it grants to yours. A row in access says for which
-- queues; every function that is about a queue or a job checks that with _own_queues.

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
            ('{producer}', true, '{status,result,await,emit,after_failover,shard_of,version}'),
            ('{worker}', true, '{claim,claim_from,extend,progress,complete,complete_many,fail,release,finish}'),
            ('{worker}', true, '{save_step,steps,suspend,emit,results_of,reap,maintain,rest,after_failover,next_slots,shard_of,version}'),
            -- work, and what it calls with the rights of its caller.
            ('{worker}', true, '{work,_handled,_hold}'),
            ('{worker,operator}', false, '{events}'),
            ('{producer,worker,scheduler,operator,reader}', false, '{shard}'),
            ('{scheduler}', true, '{schedule,next_slots,shard_of,version}'),
            ('{operator}', true, '{cancel,cancel_many,redrive,redrive_job,discard,discard_many,purge,pause,resume}'),
            ('{operator}', true, '{rerun,run_now,reprioritize,configure,shard,after_failover,reap,maintain,status,result,await,steps,emit}'),
            ('{operator}', true, '{schedule,unschedule,pause_schedule,resume_schedule,run_schedule}'),
            ('{operator,reader}', true, '{next_slots,why,health,metrics,shard_of,version}'),
            -- The views call these with the rights of their reader.
            ('{operator,reader}', true, '{_count_jobs,_count_dead,_dead_kinds,_leased,_recent_runs}'),
            ('{operator,reader}', true, '{_dead_errors,_error_like,_last_state}'),
            ('{operator,reader}', false, '{jobs,queues,running,workers,kinds,throughput,failures,dead,stuck}'),
            ('{operator,reader}', false, '{settings,schedules,batches,batch_jobs,dependencies,hours,retention,checks,counter}'),
            ('{scheduler,operator}', false, '{schedule}'),
            ('{operator}', false, '{queue,job,dead_job,run}')
    ) as g (kinds, is_function, objects)
    where _grants.kind = any (g.kinds::text[])
$$;

-- Grants or revokes what _grants lists, with dynamic SQL, because GRANT takes no parameters.
create or replace function pgqueue._change_access(role text, kind text, is_granted boolean)
    returns void
    language plpgsql
as $$
declare
    change record;
begin
    if is_granted then
        -- PUBLIC may call them all once a plain install was restored without its rights.
        if exists (select from pg_proc as p where p.pronamespace = 'pgqueue'::regnamespace and p.proacl is null) then
            revoke all on all routines in schema pgqueue from public;
        end if;
        execute format('grant usage on schema pgqueue to %I', role);
    end if;
    for change in
        select g.is_function, g.object from pgqueue._grants(kind) as g
        except
        -- What the role also has by another kind of access stays.
        select o.is_function, o.object
        from pgqueue.access as a
        cross join lateral pgqueue._grants(a.kind) as o
        where not is_granted and a.role = _change_access.role and a.kind <> _change_access.kind
    loop
        execute case
            when is_granted and change.is_function
                then format('grant execute on routine pgqueue.%I to %I', change.object, role)
            when is_granted then format('grant select on pgqueue.%I to %I', change.object, role)
            when change.is_function then format('revoke execute on routine pgqueue.%I from %I', change.object, role)
            else format('revoke select on pgqueue.%I from %I', change.object, role)
        end;
    end loop;
    -- A role that may no longer do anything need not see the schema either.
    if not is_granted and pgqueue._rights(role) = '{}' then
        execute format('revoke usage on schema pgqueue from %I', role);
    end if;
end;
$$;

-- Which functions, tables and views have been granted to a role directly.
create or replace function pgqueue._rights(role text)
    returns name[]
    language plpgsql
    stable
as $$
begin
    return array(
        select o.name
        from (
            select p.proname, p.proacl from pg_proc as p where p.pronamespace = 'pgqueue'::regnamespace
            union all
            select c.relname, c.relacl from pg_class as c where c.relnamespace = 'pgqueue'::regnamespace
        ) as o (name, acl)
        cross join lateral aclexplode(pgqueue._in_memory(o.acl)) as a
        where a.grantee = (select r.oid from pg_roles as r where r.rolname = _rights.role)
    );
end;
$$;

-- After a change of access: works out again whether the access of any role is limited to queues.
create or replace function pgqueue._resolve_access()
    returns void
    language plpgsql
as $$
begin
    if exists (select from pgqueue.access as a where a.queue <> '') then
        perform pgqueue._mark(-1, 'pgqueue.awaited_seq');
    end if;
    perform pgqueue._resolve('');
end;
$$;

-- After a change for a single queue, which changes nothing for a role that may use all.
create or replace function pgqueue._tell_if_unlimited(role text, kind text)
    returns void
    language plpgsql
as $$
begin
    if exists (
        select from pgqueue.access as a
        where a.role = _tell_if_unlimited.role and a.kind = _tell_if_unlimited.kind and a.queue = ''
    ) then
        raise notice using
            message = format('role %I is still a %s of all queues', role, kind),
            hint = 'To limit it, revoke_access without a queue, then grant_access with one.';
    end if;
end;
$$;

create or replace function pgqueue.grant_access(role text, kind text, queue text default null)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    -- Two sessions must not change the rights on the same function at once: Postgres fails the second.
    refused boolean := pgqueue._refuse(coalesce(
        pgqueue._check_grant(role, kind, queue, false), pgqueue._lock_settings()
    ));
    kinds text[];
begin
    -- Rows left by a dropped role of the same name.
    kinds := array(
        select k.kind
        from pgqueue._rights(grant_access.role) as r (objects)
        cross join (select distinct a.kind from pgqueue.access as a where a.role = grant_access.role) as k
        where (select g.object from pgqueue._grants(k.kind) as g limit 1) <> all (r.objects)
    );
    delete from pgqueue.access as a where a.role = grant_access.role and a.kind = any (kinds);
    insert into pgqueue.access (role, kind, queue)
    values (grant_access.role, grant_access.kind, coalesce(grant_access.queue, ''))
    on conflict do nothing;
    perform pgqueue._change_access(role, kind, true);
    if queue is not null then
        perform pgqueue._tell_if_unlimited(role, kind), pgqueue._resolve_access();
    end if;
end;
$$;

comment on function pgqueue.grant_access(text, text, text) is
'Lets a role be a producer (enqueue, and ask status and result),
worker (claim and end attempts), scheduler (own recurring jobs), operator
(manage, and read all) or reader (why, health, metrics and the views, which
hold no payload). No kind includes another.
queue limits the access of a producer, worker or scheduler to that queue and
others granted in the same way. Without it, the access is to all queues, and a
later call with queue does not limit it: only revoke_access does.
Raises 22023 (unknown kind, or one that is not limited), 42704 (no such role),
40001 (settings or access have changed since the snapshot).';

create or replace function pgqueue.revoke_access(role text, kind text, queue text default null)
    returns void
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    refused boolean := pgqueue._refuse(coalesce(
        pgqueue._check_grant(role, kind, queue, true), pgqueue._lock_settings()
    ));
begin
    delete from pgqueue.access as a
    where a.role = revoke_access.role and a.kind = revoke_access.kind
        and a.queue = coalesce(revoke_access.queue, a.queue);
    if queue is not null then
        perform pgqueue._tell_if_unlimited(role, kind);
    end if;
    if not exists (
        select from pgqueue.access as a where a.role = revoke_access.role and a.kind = revoke_access.kind
    ) and exists (select from pg_roles as r where r.rolname = role) then
        perform pgqueue._change_access(role, kind, false);
    end if;
    perform pgqueue._resolve_access();
end;
$$;

comment on function pgqueue.revoke_access(text, text, text) is
'Undoes grant_access: for a queue, or for all of them. What the role may do by
another kind of access stays. The role may have been dropped.
Raises 22023 (unknown kind, or one that is not limited), 42704 (no such role),
40001 (settings or access have changed since the snapshot).';

-- An upgrade updates the rows of roles that had all that their kind of access includes: this grants them what is
-- new. It does so when the transaction ends, because rights that the script of an extension grants become part of
-- the extension, and pg_dump would leave them out. Nothing else updates access, not even a restore.
create or replace function pgqueue._grant_again()
    returns trigger
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    perform pgqueue._change_access(new.role, new.kind, true);
    return null;
end;
$$;

-- New objects are for the owner alone; those that an upgrade creates again keep their rights. Only new ones are
-- revoked, because in the script of an extension a REVOKE makes all rights on an object part of it, like a GRANT.
do $$
declare
    -- In an upgrade: the objects that were there before, see module begin.
    kept text[] := coalesce(nullif(current_setting('pgqueue.kept', true), ''), '{}');
    object text;
begin
    for object in
        select format('schema %s', n.nspname) from pg_namespace as n where n.nspname = 'pgqueue' and kept = '{}'
        union all
        select format('%s %s', case c.relkind when 'S' then 'sequence' else 'table' end, c.oid::regclass)
        from pg_class as c
        where c.relnamespace = 'pgqueue'::regnamespace and c.relkind in ('r', 'p', 'v', 'S')
            -- Without an ACL only the owner has rights.
            and c.relacl is not null and 'relation ' || c.oid <> all (kept)
        union all
        select format('routine %s', p.oid::regprocedure)
        from pg_proc as p
        where p.pronamespace = 'pgqueue'::regnamespace and 'routine ' || p.oid <> all (kept)
    loop
        execute format('revoke all on %s from public', object);
    end loop;
    if kept = '{}' then
        create constraint trigger access_grant_again after update on pgqueue.access
        deferrable initially deferred for each row execute function pgqueue._grant_again();
    end if;
end;
$$;
