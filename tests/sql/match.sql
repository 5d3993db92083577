-- Matches: that the planner puts them in line, and finds each index by its hash.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(7);

set local enable_seqscan = off;
set local enable_bitmapscan = off;
create function pg_temp.plan_of(query text) returns text language plpgsql as $$
declare
    line text;
    lines text := '';
begin
    for line in execute 'explain (verbose, costs off) ' || query loop
        lines := lines || line || E'\n';
    end loop;
    return lines;
end;
$$;
create function pg_temp.uses(query text, index text) returns text language sql as $$
    select alike(
        pg_temp.plan_of(query), format('%%Index Scan using %s%%Index Cond: (%%hashtext%%', index), format('%s is found by its hash', index)
    )
$$;

select pg_temp.uses('select from pgqueue.job as j where pgqueue._is_in_lane(j, ''q'', 3)', 'job_lane_idx');
select pg_temp.uses('select from pgqueue.job as j where pgqueue._is_in_group(j, ''q'', ''g'')', 'job_group_idx');
select pg_temp.uses('select from pgqueue.ticket as t where pgqueue._is_ticket_in(t, ''q'', 0)', 'ticket_lane_idx');
select pg_temp.uses('select from pgqueue.ticket as t where pgqueue._is_ticket_of(t, ''q'', ''g'')', 'ticket_group_idx');
select pg_temp.uses('select from pgqueue.permit as p where pgqueue._is_permit_of(p, ''q'', '''', ''g'')', 'permit_scope_idx');
select doesnt_match(
    pg_temp.plan_of($$
        select from pgqueue.job as j
        join pgqueue.permit as p on pgqueue._is_permit_of(p, j.queue, '', j.group_key) and pgqueue._is_free(p, false, 1, now())
        join pgqueue.ticket as t on pgqueue._is_ticket_of(t, j.queue, j.group_key) and pgqueue._start_of(t, now()) < now()
        where pgqueue._is_in_group(j, 'q', 'g') and pgqueue._is_ready(j, '-infinity', now(), false)
            and pgqueue._is_wanted(j.kind, j.group_key, '{a}', '{}')
    $$),
    'pgqueue[.]_[a-z_]+[(]', 'no function is left to be called'
);

-- Whom a claim wants
select results_eq(
    $$ select pgqueue._is_wanted(w.kind, w.key, w.kinds, w.paused)
       from (values
           ('a', null, null::text[], null::jsonb), ('a', null, '{b}', null), ('a', null, '{b,a}', null),
           ('a', null, null, '{"": {"": true}}'), ('a', null, null, '{"": {"": true, "a": false}}'),
           ('a', 'g', null, '{"": {"": false}, "g": {"": true}}'), ('a', 'h', null, '{"": {"": false}, "g": {"": true}}'),
           ('a', 'g', null, '{"": {"": true}, "g": {"a": false}}')
       ) as w (kind, key, kinds, paused) $$,
    'values (true), (false), (true), (false), (true), (false), (true), (true)',
    'a claim wants jobs of its kinds, unless they are paused; what is said of a group comes before what is said of a kind'
);

select * from finish();
rollback;
