-- Module shard: numbers that no other shard gives out, and where a key belongs.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(51);

-- Other tests have used the sequences.
alter sequence pgqueue.job_id_seq restart;
alter sequence pgqueue.token_seq restart;

create function pg_temp.refusal(query text)
    returns text
    language plpgsql
as $$
declare
    detail text;
begin
    execute query;
    return null;
exception
    when sqlstate '22023' or sqlstate '55000' or sqlstate 'PQ001' or sqlstate 'PQ002' then
        get stacked diagnostics detail = pg_exception_detail;
        return sqlstate || ': ' || sqlerrm || '. ' || detail;
end;
$$;

-- The numbers.
select is((select shard from pgqueue.jobs limit 1), null, 'a database is no shard unless told so');
select is(pg_temp.refusal(format('select pgqueue.shard(%s)', c.numbers)), c.refusal, 'shard refuses ' || c.numbers)
from (
    values
        ('0, 8', '22023: number must be between 1 and of, and of at most 65536. They are 0 and 8.'),
        ('9, 8', '22023: number must be between 1 and of, and of at most 65536. They are 9 and 8.'),
        ('null', '22023: number must be between 1 and of, and of at most 65536. They are null and 1024.'),
        ('1, null', '22023: number must be between 1 and of, and of at most 65536. They are 1 and null.'),
        ('1, 65537', '22023: number must be between 1 and of, and of at most 65536. They are 1 and 65537.'),
        ('1, 8, -1', '22023: above must be between 0 and 2^62. It is -1.')
) as c (numbers, refusal);

select lives_ok('select pgqueue.shard(8, 8)', 'the last shard has the number of them all');
select lives_ok('select pgqueue.shard(3, 8)', 'as long as there is no job, the number may change');
select is((select h.status from pgqueue.health() as h where h.check = 'sequences'), 'ok', 'it has given out no number of others');
select is(
    array(select pgqueue.enqueue_many('s', array_fill('1'::jsonb, array[2]))) || pgqueue.enqueue('s')
        || pgqueue.create_batch('s'),
    array[3, 11, 19, 27]::bigint[], 'ids of jobs and batches begin at number and step by of'
);
select results_eq(
    $$ select c.id, c.token from pgqueue.claim('s', 'w') as c union all select c.id, c.token from pgqueue.claim('s', 'w') as c $$,
    'values (3::bigint, 3::bigint), (11, 11)', 'and so do tokens'
);
select is(
    array(select (c).token from (select pgqueue.claim_from(array['s', 't'], 'w')) as c (c)), array[19::bigint],
    'also those of claims from several queues'
);
select pgqueue.enqueue('g', group_key => 'a');
select is((select c.token from pgqueue.claim('g', 'w') as c), 27::bigint, 'and of jobs in groups');
select is((select distinct j.shard from pgqueue.jobs as j), 3, 'the view jobs says which shard it is');
select is(
    pg_temp.refusal('select pgqueue.shard(4, 8)'),
    '55000: this is shard 3 of 8. Its ids and tokens are in use, up to 35.', 'a shard with jobs keeps its number'
);
select is(
    pg_temp.refusal('select pgqueue.shard(3, 8, 1000)'),
    '55000: this is shard 3 of 8. Its ids and tokens are in use, up to 35.', 'and begins nowhere else'
);
select lives_ok('select pgqueue.shard(3, 8)', 'to say the same again does nothing');
select is(pgqueue.enqueue('s'), 43::bigint, 'not even to the numbers');

-- Ids of others.
select is(
    pg_temp.refusal('select pgqueue.status(12)'),
    'PQ001: job 12 not found. No job has this id. It is an id of shard 4 of 8, and this is shard 3.',
    'an id of another shard is not found, and the error says whose it is'
);
select is(
    pg_temp.refusal('select pgqueue.complete(16, 16)'),
    'PQ002: the lease on job 16 is lost. It is not held under token 16. It is an id of shard 8 of 8, and this is shard 3.',
    'a lease of another shard is lost, and the error says whose it is'
);
select is(
    pg_temp.refusal('select pgqueue.status(51)'), 'PQ001: job 51 not found. No job has this id.',
    'an unknown id of this shard is nobody else''s'
);
select is(
    pg_temp.refusal($$select pgqueue.enqueue('s', after => array[12])$$),
    'PQ001: job 12 not found. No job has this id. It is an id of shard 4 of 8, and this is shard 3.',
    'a job cannot wait for one of another shard, which would look as if it had completed'
);
insert into pgqueue.job overriding system value
select (jsonb_populate_record(j, '{"id": 100004}')).* from pgqueue.job as j where j.id = 43;
select lives_ok(
    $$select pgqueue.enqueue('s', after => array[100004])$$, 'but for one that was moved here, though it is ahead of all'
);
select is(
    (select h.detail from pgqueue.health() as h where h.check = 'sequences'),
    'sequences are ahead of what they have handed out', 'nor is that one of numbers that this shard gives out'
);

-- Numbers that were changed by hand, or left out by a restore.
select setval('pgqueue.job_id_seq', 2);
select is(
    (select concat(h.status, ': ', h.detail) from pgqueue.health() as h where h.check = 'sequences'),
    'critical: sequence job_id_seq is at 2, and 51 is in use: enqueues will fail', 'a sequence that was set back fails first'
);
select h.hint from pgqueue.health() as h where h.check = 'sequences' \gexec
select is(
    (select h.status from pgqueue.health() as h where h.check = 'sequences'), 'ok', 'setting it forward leaves it to this shard'
);
select setval('pgqueue.job_id_seq', 51);
alter sequence pgqueue.job_id_seq increment by 1;
select is(
    (select concat(h.status, ': ', h.detail) from pgqueue.health() as h where h.check = 'sequences'),
    'critical: sequence job_id_seq is at 51 and steps by 1, and this is shard 3 of 8: others give out the same',
    'health says that a shard gives out the numbers of others'
);
select is(
    (select h.hint from pgqueue.health() as h where h.check = 'sequences'), 'update pgqueue.shard set number = number',
    'and what to do'
);
update pgqueue.shard set number = number;
select is(pgqueue.enqueue('s'), 59::bigint, 'which is enough');
select setval('pgqueue.token_seq', 1000);
update pgqueue.shard set number = number;
select is(nextval('pgqueue.token_seq'), 1003::bigint, 'also for a sequence that was set to the number of another');
select is(
    pg_temp.refusal('select pgqueue.status(36)'), 'PQ001: job 36 not found. No job has this id.',
    'below which any number may be of any shard'
);

-- A database with jobs becomes the first of several.
delete from pgqueue.shard;
alter sequence pgqueue.job_id_seq increment by 1;
alter sequence pgqueue.token_seq increment by 1;
select is(
    pg_temp.refusal('select pgqueue.shard(1)'),
    '55000: only an empty install can become a shard. It has jobs, or had some. Ids and tokens up to 1003 are in use.',
    'a database with jobs is made no shard by mistake'
);
select is(
    pg_temp.refusal('select pgqueue.shard(1, above => 1002)'),
    '22023: above must be at least 1003. It is 1002, and ids and tokens up to that are in use.',
    'nor below what it has given out'
);
select lives_ok('select pgqueue.shard(2, 4, above => 2000)', 'but with above it is');
select is((select h.status from pgqueue.health() as h where h.check = 'sequences'), 'ok', 'health finds nothing wrong with that');
select is(
    pg_temp.refusal('select pgqueue.shard(2, 4, above => 1000)'),
    '55000: this is shard 2 of 4. Its ids and tokens are in use, up to 1998.',
    'what was given out before is not forgotten'
);
select is(pgqueue.enqueue('s'), 2002::bigint, 'and goes on above it');
select is(
    pg_temp.refusal('select pgqueue.status(57)'), 'PQ001: job 57 not found. No job has this id.',
    'an id below above may be of this shard'
);

-- Where a key belongs.
select is(
    array(select pgqueue.shard_of(v.key, 1000) from (values ('ada'), (''), ('42'), ('zoë'), ('鍵')) as v (key)),
    array[381, 610, 628, 614, 846], 'shard_of is the first four bytes of SHA-256, as everywhere'
);
select is_empty(
    $$ select from generate_series(1, 2000) as k
       where pgqueue.shard_of(k::text, 8) not in (pgqueue.shard_of(k::text, 4), pgqueue.shard_of(k::text, 4) + 4) $$,
    'with twice as many shards a key stays, or moves to one new shard'
);
select ok(
    (select min(n) > 180 and max(n) < 320 and count(*) = 8
     from (select count(*) as n from generate_series(1, 2000) as k group by pgqueue.shard_of(k::text, 8)) as s),
    'keys are spread evenly'
);
select is(pg_temp.refusal(format('select pgqueue.shard_of(%s)', c.arguments)), c.refusal, 'shard_of refuses ' || c.arguments)
from (
    values
        ('null, 2', '22023: key must not be null, and shards must be at least 1. They are null and 2.'),
        ($$'k', 0$$, $$22023: key must not be null, and shards must be at least 1. They are 'k' and 0.$$),
        ($$'k', null$$, $$22023: key must not be null, and shards must be at least 1. They are 'k' and null.$$)
) as c (arguments, refusal);

-- After a failover. Other tests have emptied all cells.
select setval('pgqueue._cell_timeline', pgqueue._timeline());
select is(pgqueue.after_failover(), false, 'numbers are skipped only after a failover');
select is(pgqueue.after_failover(always => true), true, 'or where it is said');
select cmp_ok(nextval('pgqueue.job_id_seq'), '>', 4000000::bigint, 'for each shard a million');
select is(nextval('pgqueue.token_seq') % 4, 2::bigint, 'and they stay its own');
select setval('pgqueue._cell_timeline', 7);
select is(pgqueue.after_failover(), true, 'another timeline means a failover');
select is(pgqueue.after_failover(), false, 'after which they are skipped once');

select * from finish();
rollback;
