-- What the rest of the tests take for granted.
begin;
select plan(2);

select has_table('procrastinate_jobs', 'procrastinate''s tables are found by the search path');
select has_function('procrastinate_defer_jobs_v1', 'the interface of the hand-off is there');

select * from finish();
rollback;
