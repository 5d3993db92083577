-- metrics, as far as one session can show. A client of Prometheus reads them in test_metrics.py.
begin;
set local client_min_messages = warning;
create extension if not exists pgtap;
create extension if not exists pgqueue;
select plan(11);

select matches(
    pgqueue.metrics(),
    E'^# HELP pgqueue_info [^\n]+\n# TYPE pgqueue_info gauge\npgqueue_info{version="[0-9.]+"} 1\n# HELP pgqueue_retention',
    'metrics of an empty database begin with the version'
);

create temporary view line as
select m.line, m.place
from string_to_table(pgqueue.metrics(by_queue => true), E'\n') with ordinality as m (line, place);
create function pg_temp.of(label text)
    returns table (sample text)
    language sql
as $$ select m.line from line as m where strpos(m.line, label) > 0 and m.line not like '#%' order by m.place $$;

select pgqueue.configure('idle', weight => 2);
select pgqueue.pause('idle');
select results_eq(
    $$ select * from pg_temp.of('"idle"') $$,
    $$ select 'pgqueue_' || v.sample from (values
        ('dead_jobs{queue="idle"} 0'), ('failed_last_hour{queue="idle"} 0'), ('finished_last_hour{queue="idle"} 0'),
        ('is_estimate{queue="idle"} 0'), ('jobs{queue="idle",state="blocked"} 0'),
        ('jobs{queue="idle",state="expired"} 0'), ('jobs{queue="idle",state="ready"} 0'),
        ('jobs{queue="idle",state="running"} 0'), ('jobs{queue="idle",state="scheduled"} 0'),
        ('parked{queue="idle"} 0'), ('paused{queue="idle"} 1'), ('pauses{queue="idle"} 0'),
        ('rate_1h_per_second{queue="idle"} 0'),
        ('rate_1m_per_second{queue="idle"} 0'), ('rate_5m_per_second{queue="idle"} 0'),
        ('time_to_empty_seconds{queue="idle"} 0'), ('workers{queue="idle"} 0')
    ) as v (sample) $$,
    'what is not known has no sample: waits and failure rates of a queue without jobs'
);

select pgqueue.enqueue(E'a "b"\\n\nü,{}', run_at => clock_timestamp() - interval '100 hours');
select results_eq(
    $$ select * from pg_temp.of('state="ready"') as s where s not like '%"idle"%' $$,
    $$ values ('pgqueue_jobs{queue="a \"b\"\\n\nü,{}",state="ready"} 1') $$,
    'quotes, backslashes and ends of lines in the name of a queue are escaped'
);
select results_eq(
    $$ select count(*) from pg_temp.of('wait_seconds{') as s where s ~ ' 36\d{4}(\.\d+)?$' $$,
    'values (2::bigint)', 'waits are in seconds'
);

select pgqueue.schedule('late', 'q', every => '1 hour');
select pgqueue.schedule('spread', 'q', every => '1 hour', jitter => '1 hour');
select pgqueue.schedule('paused', 'q', every => '1 hour');
select pgqueue.pause_schedule('paused');
update pgqueue.schedule set next_slot = clock_timestamp() - interval '600 s';
select results_eq(
    $$ select regexp_replace(s, ' 60\d\.\d+$', ' 600') from pg_temp.of('schedule_late') as s $$,
    $$ values ('pgqueue_schedule_late_seconds{queue="q",schedule="late"} 600'),
        ('pgqueue_schedule_late_seconds{queue="q",schedule="spread"} 0') $$,
    'a schedule is late once its jitter is over, and not while it is paused'
);
-- Above 8 MB, which other test files may have rolled back, it is known only after that.
analyze pgqueue.job;
select results_eq(
    $$ select * from pg_temp.of('retention_rows') as s where s ~ '"(jobs|windows)"' $$,
    $$ values ('pgqueue_retention_rows{what="jobs"} 1'), ('pgqueue_retention_rows{what="windows"} 0') $$,
    'what is kept is counted'
);

select results_eq(
    $$ select m.line collate "C" from line as m where m.line !~
        '^(# HELP pgqueue_\w+ \S.*\S|# TYPE pgqueue_\w+ gauge|pgqueue_\w+\{\w+="[^\n]*"\} \d+(\.\d+)?|)$' $$,
    'select null::text collate "C" where false', 'each line is of the format, and every number at least 0'
);
select results_eq(
    $$ select split_part(m.line collate "C", ' ', 3) from line as m where m.line like '# TYPE %' order by m.place $$,
    $$ select s.name from (
           select distinct substring(m.line from '^\w+') collate "C" as name from line as m where m.line like 'pgqueue%'
       ) as s order by s.name $$,
    'each family is announced once, in the order of their names'
);
select is_empty(
    $$ select m.line from string_to_table(pgqueue.metrics(), E'\n') as m (line) where m.line ~ '[{,]queue=' $$,
    'without by_queue no gauge is by queue'
);
insert into pgqueue.counter values (E'a "b"', now(), 7, 5, 3, 0);
select results_eq(
    $$ select m.line from string_to_table(pgqueue.metrics(), E'\n') as m (line)
       where m.line ~ '^[^#].*_total|^# TYPE.*(_total|_jobs) ' order by m.line collate "C" $$,
    $$ values ('# TYPE pgqueue_completed_total counter'), ('# TYPE pgqueue_dead_jobs gauge'),
        ('# TYPE pgqueue_dead_total counter'), ('# TYPE pgqueue_enqueued_total counter'),
        ('# TYPE pgqueue_failed_total counter'), ('# TYPE pgqueue_jobs gauge'),
        ('pgqueue_completed_total{queue="a \"b\""} 5'),
        ('pgqueue_dead_total{queue="a \"b\""} 0'), ('pgqueue_enqueued_total{queue="a \"b\""} 7'),
        ('pgqueue_failed_total{queue="a \"b\""} 3') $$,
    'counters are by queue'
);
set transaction read only;
select ok(pgqueue.metrics() like '%ready%', 'metrics needs no writing');

select * from finish();
rollback;
