"""Stopping a session in the middle of what it does.

Triggers stand at the points below. A session that has set ``stops.at`` to one of them stops there
while the ``Stops`` hold, wherever it runs: a tick in a thread of the test, or a driver in a process
of its own. All others pass.

The stopped session polls instead of waiting for a lock, so that no lock timeout moves it on.
"""

from __future__ import annotations

import psycopg

from tests.support import wait_for

POINTS = {
    "fold": "the notes are folded, nothing is claimed",
    "create": "the row of a new partition is about to be written",
    "gates": "the partitions are claimed and counted, no job is taken (see LIMIT)",
    "hand-off": "the jobs are taken and about to be given to procrastinate",
    "settle": "procrastinate has the jobs, the slots are about to be written",
    "commit": "the transaction is about to commit",
}

LIMIT = {"sql": "stops.one", "default": None}
"""A gate's number, 1, at which a session stops for ``gates``."""

SETUP = """
create schema stops;

create function stops.here(p_point text)
returns void
language plpgsql
as $$
begin
  if current_setting('stops.at', true) is distinct from p_point then
    return;
  end if;
  perform pg_advisory_lock(1, pg_backend_pid());
  while not pg_try_advisory_lock_shared(2, 0) loop
    perform pg_sleep(0.005);
  end loop;
  perform pg_advisory_unlock_shared(2, 0);
  perform pg_advisory_unlock(1, pg_backend_pid());
end;
$$;

create function stops.row()
returns trigger
language plpgsql
as $$
begin
  perform stops.here(tg_argv[0]);
  return new;
end;
$$;

create function stops.one(partition_key text, context jsonb)
returns numeric
language plpgsql
as $$
begin
  perform stops.here('gates');
  return 1;
end;
$$;

create trigger aa_stop after delete on dispatch_inbox
  for each statement execute function stops.row('fold');
create trigger aa_stop before insert on dispatch_partitions
  for each row execute function stops.row('create');
create trigger aa_stop before insert on procrastinate_jobs
  for each row execute function stops.row('hand-off');
create trigger aa_stop before insert on dispatch_inflight_jobs
  for each row execute function stops.row('settle');
create constraint trigger aa_stop after insert on dispatch_tick_samples
  deferrable initially deferred
  for each row execute function stops.row('commit');
"""


class Stops:
    """Stops sessions at the points in the database of ``conn``; holds from the beginning."""

    def __init__(self, conn: psycopg.Connection) -> None:
        self._conn = conn
        conn.execute(SETUP)
        self._held = False
        self.hold()

    @staticmethod
    def options(point: str | None) -> str:
        """Return the libpq options of a session that stops at a point."""
        return f"-c stops.at={point}" if point else ""

    def hold(self) -> None:
        """Stop whoever comes to its point from now on."""
        if not self._held:
            self._conn.execute("select pg_advisory_lock(2, 0)")
            self._held = True

    def release(self) -> None:
        """Let all go on, and stop nobody any more."""
        if self._held and not self._conn.closed:
            self._conn.execute("select pg_advisory_unlock(2, 0)")
        self._held = False

    def stopped(self) -> set[int]:
        """Return the process ids of the sessions that stand at their points."""
        rows = self._conn.execute(
            "select objid::integer from pg_locks where locktype = 'advisory' and classid = 1"
            " and database = (select oid from pg_database where datname = current_database())"
        )
        return {row[0] for row in rows}

    def wait(self, pid: int | None = None, timeout: float = 10.0) -> int:
        """Return once the session with this process id (None: any) has stopped, and who it is."""
        stopped = wait_for(
            lambda: self.stopped() if pid is None else self.stopped() & {pid}, timeout
        )
        return min(stopped)
