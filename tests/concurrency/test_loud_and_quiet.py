"""One tenant's burst and a real worker: whose jobs start when?"""

from __future__ import annotations

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.concurrency.app import LOG, Application, stage_work
from tests.concurrency.support import column, define, value
from tests.ticks import Tick

LOUD = 100_000
QUIET = 99
BUDGET = 100


# case: one account's burst of 10,000 delays everybody else's single job until the burst is through
@pytest.mark.timeout(180)
async def test_quiet_tenants_are_admitted_by_the_next_tick_and_start_before_the_burst(
    dsn: str, conn: psycopg.Connection, tick: Tick
):
    application = Application(dsn)
    conn.execute(LOG)
    define(conn, "work", tick_admission_budget=BUDGET, partition_batch_size=BUDGET)
    conn.execute(
        """
        select count(*)
        from dispatch_stage_many('work', (
          select jsonb_agg(
            jsonb_build_object('task_name', 'work', 'args', %s || jsonb_build_object('n', n))
          )
          from generate_series(1, %s) as n
        ))
        """,
        [Jsonb({"k": "loud", "cap": 1}), LOUD],
    )
    while value(conn, "select dispatch_fold('work', dispatch_now())"):
        pass
    (first,) = tick(conn, "work")
    assert first["jobs_admitted"] == BUDGET, "alone, the loud tenant has the whole budget"

    stage_work(conn, [{"k": f"quiet {n}", "cap": 1, "n": -n} for n in range(1, QUIET + 1)])
    (second,) = tick(conn, "work")
    assert (second["jobs_admitted"], second["partitions_admitted"]) == (BUDGET, QUIET + 1)
    still_staged = column(conn, "select distinct partition_key from dispatch_staged_jobs")
    assert still_staged == ["loud"], "no quiet job waits for another tick"
    (third,) = tick(conn, "work")
    assert third["jobs_admitted"] == BUDGET

    # What procrastinate's worker starts, one after the other.
    await application.run_worker(concurrency=1, wait=False, install_signal_handlers=False)
    started = column(conn, "select k from run_log where event = 'start' order by id")
    assert len(started) == 3 * BUDGET
    loud = [place for place, key in enumerate(started) if key == "loud"]
    quiet = [place for place, key in enumerate(started) if key != "loud"]
    assert len(set(started)) == QUIET + 1
    assert max(quiet) < loud[BUDGET], "all of them before the loud tenant's second hundred"
