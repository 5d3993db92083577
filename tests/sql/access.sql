-- grant_access and revoke_access, for one role. What each kind of role may call is in test_access.py.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(17);

create role pgqueue_test_role;
select is(
    (select count(*) from pg_proc as p
     where p.pronamespace = 'pgqueue'::regnamespace and has_function_privilege('pgqueue_test_role', p.oid, 'execute')),
    0::bigint, 'a role without grants can call no function'
);
select ok(
    not has_schema_privilege('pgqueue_test_role', 'pgqueue', 'usage'),
    'a role without grants cannot use the schema'
);
select throws_ok(
    $$ select pgqueue.grant_access('pgqueue_test_role', 'boss') $$, '22023', null,
    'grant_access refuses an unknown kind of role'
);
select throws_ok(
    $$ select pgqueue.grant_access('pgqueue_test_role', null) $$, '22023', null,
    'grant_access refuses a null kind of role'
);
select throws_ok(
    $$ select pgqueue.grant_access('nobody; drop', 'reader') $$, '42704', null,
    'grant_access refuses a role that does not exist'
);
select throws_ok(
    $$ select pgqueue.grant_access('pgqueue_test_role', 'reader', queue => 'q') $$, '22023', null,
    'a reader cannot be limited to a queue'
);
select throws_ok(
    $$ select pgqueue.grant_access('pgqueue_test_role', 'worker', queue => '') $$, '22023', null,
    'grant_access refuses an empty name of a queue'
);

select pgqueue.grant_access('pgqueue_test_role', 'producer');
set local role pgqueue_test_role;
select lives_ok($$ select pgqueue.enqueue('q') $$, 'a producer can enqueue');
select throws_ok($$ select pgqueue.claim('q', 'w') $$, '42501', null, 'a producer cannot claim');
select throws_ok('select * from pgqueue.job', '42501', null, 'a producer cannot read a table');
select throws_ok(
    $$ select pgqueue.grant_access('pgqueue_test_role', 'operator') $$, '42501', null,
    'a producer cannot grant itself more'
);
reset role;
select pgqueue.grant_access('pgqueue_test_role', 'reader');
select pgqueue.revoke_access('pgqueue_test_role', 'producer');
set local role pgqueue_test_role;
select throws_ok(
    $$ select pgqueue.enqueue('q') $$, '42501', null, 'a role cannot call what was revoked'
);
select isnt_empty('select * from pgqueue.queues', 'a reader can read the views');
select throws_ok('select * from pgqueue.run', '42501', null, 'a reader cannot read a table');
reset role;
select pgqueue.revoke_access('pgqueue_test_role', 'reader');
select ok(
    not has_schema_privilege('pgqueue_test_role', 'pgqueue', 'usage'),
    'a role whose last kind was revoked cannot use the schema'
);

-- Results of jobs of several queues

select pgqueue.grant_access('pgqueue_test_role', 'worker', queue => 'mine');
select pgqueue.enqueue('other') as other \gset
select array_agg(pgqueue.enqueue('mine', kind => 'part')) as mine from generate_series(1, 4) \gset
select pgqueue.enqueue('mine', kind => 'sum', after => array_append(:'mine'::bigint[], :other)) as sum \gset
select pgqueue.complete(c.id, c.token) from pgqueue.claim('other', 'w') as c;
select pgqueue.complete(c.id, c.token) from pgqueue.claim('mine', 'w', 4) as c;
select c.id as job_id, c.token from pgqueue.claim('mine', 'w') as c \gset
set local role pgqueue_test_role;
select results_eq(
    format('select r.id from pgqueue.results_of(%s, %s, max_rows => 2) as r', :job_id, :token),
    format('select unnest(%L::bigint[]) limit 2', :'mine'),
    'a page has as many rows as asked for, whatever lies between them'
);
reset role;
delete from pgqueue.run where job_id = (:'mine'::bigint[])[1];
set local role pgqueue_test_role;
select results_eq(
    format('select r.id, r.outcome from pgqueue.results_of(%s, %s) as r limit 1', :job_id, :token),
    format($$ select %L::bigint, 'completed' $$, (:'mine'::bigint[])[1]),
    'a job that the log has forgotten is not gone because its queue is unknown'
);
reset role;

select * from finish();
rollback;
