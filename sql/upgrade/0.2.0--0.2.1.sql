-- The last deaths are found by an index: `redrive` and `discard_many` by a time of death in any queue, the
-- command `dead`, and the dashboard's list of dead jobs take milliseconds among millions of dead jobs.

create index dead_job_died_idx on pgqueue.dead_job (died_at, id);
comment on index pgqueue.dead_job_died_idx is 'Which jobs died in some time? Which last?';
