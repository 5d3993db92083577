-- Roles. The full matrix of kinds and functions is in test_access.py.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(13);

create role pgqueue_test_role;
select is(
    (select count(*) from pg_proc as p
     where p.pronamespace = 'pgqueue'::regnamespace and has_function_privilege('pgqueue_test_role', p.oid, 'execute')),
    0::bigint, 'a role without grants can call nothing'
);
select ok(not has_schema_privilege('pgqueue_test_role', 'pgqueue', 'usage'), 'nor see the schema');
select throws_ok($$ select pgqueue.grant_access('pgqueue_test_role', 'boss') $$, '22023', null, 'an unknown kind is refused');
select throws_ok($$ select pgqueue.grant_access('pgqueue_test_role', null) $$, '22023', null, 'a null kind too');
select throws_ok($$ select pgqueue.grant_access('nobody; drop', 'reader') $$, '42704', null, 'an unknown role is refused');

select pgqueue.grant_access('pgqueue_test_role', 'producer');
set local role pgqueue_test_role;
select lives_ok($$ select pgqueue.enqueue('q') $$, 'a producer enqueues');
select throws_ok($$ select pgqueue.claim('q', 'w') $$, '42501', null, 'and does not claim');
select throws_ok('select * from pgqueue.job', '42501', null, 'nor read the table');
select throws_ok($$ select pgqueue.grant_access('pgqueue_test_role', 'operator') $$, '42501', null, 'nor give itself more');
reset role;
select pgqueue.grant_access('pgqueue_test_role', 'reader');
select pgqueue.revoke_access('pgqueue_test_role', 'producer');
set local role pgqueue_test_role;
select throws_ok($$ select pgqueue.enqueue('q') $$, '42501', null, 'what is revoked is gone');
select isnt_empty('select * from pgqueue.queues', 'a reader reads the views');
select throws_ok('select * from pgqueue.run', '42501', null, 'and no table');
reset role;
select pgqueue.revoke_access('pgqueue_test_role', 'reader');
select ok(
    not has_schema_privilege('pgqueue_test_role', 'pgqueue', 'usage'),
    'whoever may do nothing any more does not see the schema'
);

select * from finish();
rollback;
