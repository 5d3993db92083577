-- An upgrade, last: what the version before had and this one has not goes, unless something of a user depends on it;
-- and roles get what is new to their kind of access.
do $$
declare
    -- By which transaction everything has just been written anew.
    ours constant xid := (select p.xmin from pg_proc as p where p.oid = 'pgqueue.version()'::regprocedure);
    views text;
    routines text;
begin
    select string_agg(c.oid::regclass::text, ', ') into views
    from pg_class as c
    join pg_rewrite as r on r.ev_class = c.oid
    where c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'v' and r.xmin <> ours
        and c.relname = any ('{@BEFORE@}');
    if views <> '' then
        execute 'drop view ' || views;
    end if;
    select string_agg(p.oid::regprocedure::text, ', ') into routines
    from pg_proc as p
    where p.pronamespace = 'pgqueue'::regnamespace and p.xmin <> ours and p.proname = any ('{@BEFORE@}');
    if routines <> '' then
        execute 'drop routine ' || routines;
    end if;
    update pgqueue.access as a
    set role = a.role
    where format('%I %s', a.role, a.kind) = any (current_setting('pgqueue.entitled')::text[])
        and a.queue = (select min(o.queue) from pgqueue.access as o where (o.role, o.kind) = (a.role, a.kind));
    perform set_config('role', current_setting('pgqueue.upgraded_by'), true);
end;
$$;
