"""One tenant's burst and a real worker: whose jobs start when?"""

from __future__ import annotations

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.concurrency.app import LOG, Application, stage_work
from tests.concurrency.support import column, define, value
from tests.ticks import Tick

LOUD = 20_000
QUIET = 99
BOUND = 100


# case: one account's burst of 10,000 delays everybody else's single job until the burst is through
@pytest.mark.timeout(180)
async def test_quiet_tenants_wait_for_no_more_of_the_burst_than_is_queued(
    dsn: str, conn: psycopg.Connection, tick: Tick
):
    application = Application(dsn)
    conn.execute(LOG)
    define(conn, "work", max_queued=BOUND, partition_batch_size=QUIET + 1)
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
    assert first["jobs_admitted"] == BOUND, "alone, the loud tenant has the whole queue"
    (full,) = tick(conn, "work")
    assert (full["jobs_admitted"], full["denied_reasons"]) == (0, {"queue_full": 1})

    stage_work(conn, [{"k": f"quiet {n}", "cap": 1, "n": -n} for n in range(1, QUIET + 1)])
    (waiting,) = tick(conn, "work")
    assert (waiting["jobs_admitted"], waiting["partitions_denied"]) == (0, QUIET)

    # A worker empties the queue, one job after the other, and all have a part in the room.
    options = {"concurrency": 1, "wait": False, "install_signal_handlers": False}
    await application.run_worker(**options)
    (second,) = tick(conn, "work")
    assert (second["jobs_admitted"], second["partitions_admitted"]) == (BOUND, QUIET + 1)
    still_staged = column(conn, "select distinct partition_key from dispatch_staged_jobs")
    assert still_staged == ["loud"], "no quiet job waits for another tick"
    await application.run_worker(**options)

    started = column(conn, "select k from run_log where event = 'start' order by id")
    assert len(started) == 2 * BOUND
    loud = [place for place, key in enumerate(started) if key == "loud"]
    quiet = [place for place, key in enumerate(started) if key != "loud"]
    assert len(set(started)) == QUIET + 1
    assert sum(place < max(quiet) for place in loud) <= BOUND + 1, "and not all that wait"
