"""The ground that the other tests stand on."""

from __future__ import annotations

import threading
from datetime import datetime, timezone

import psycopg
import pytest

from pydispatch.embedded import (
    EmbeddedPostgresError,
    embedded_binaries,
    find_binaries,
    server_version,
)
from tests.support import wait_for


def test_the_environment_chooses_a_version_of_the_embedded_server(monkeypatch):
    monkeypatch.delenv("PG_BIN", raising=False)
    newest = max(embedded_binaries())
    for version in embedded_binaries():
        monkeypatch.setenv("PG_VERSION", str(version))
        assert server_version(find_binaries()) == version
        assert server_version(find_binaries(version=newest)) == newest
    for other in ("", "16.4-1.pgdg120+1"):
        monkeypatch.setenv("PG_VERSION", other)
        assert server_version(find_binaries()) == newest
    monkeypatch.setenv("PG_VERSION", "9")
    with pytest.raises(EmbeddedPostgresError, match="no embedded PostgreSQL 9: choose one of"):
        find_binaries()


def test_each_test_has_a_database_of_its_own(conn):
    conn.execute("create table litter ()")
    assert conn.execute("select count(*) from procrastinate_jobs").fetchone() == (0,)


def test_nothing_is_left_of_another_test(conn):
    assert conn.execute("select to_regclass('litter')").fetchone() == (None,)


def test_server_is_independent_of_the_machines_settings(conn):
    row = conn.execute(
        "select current_setting('TimeZone'), current_setting('server_encoding'), datcollate"
        " from pg_database where datname = current_database()"
    ).fetchone()
    assert row == ("UTC", "UTF8", "C")


def test_clock_is_seen_by_open_and_by_later_sessions(conn, connect, clock):
    clock.advance(90)
    shown = [
        session.execute("select current_setting('dispatch.fake_now')").fetchone()
        for session in (conn, connect())
    ]
    assert shown == [(datetime(2026, 1, 1, 0, 1, 30, tzinfo=timezone.utc).isoformat(),)] * 2


def test_blocked_session_is_seen(conn, connect, is_blocked, wait_blocked):
    conn.execute("create table t (i int)")
    holder, waiter = connect(autocommit=False), connect()
    holder.execute("lock table t")
    assert not is_blocked(holder.info.backend_pid)
    thread = threading.Thread(target=waiter.execute, args=["insert into t values (1)"])
    thread.start()
    wait_blocked(waiter.info.backend_pid)
    holder.commit()
    thread.join(10)
    assert not is_blocked(waiter.info.backend_pid)


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_committed_rows_survive_a_restart(own_server, mode):
    dsn = own_server.dsn("dispatch")
    with psycopg.connect(dsn, autocommit=True) as conn, psycopg.connect(dsn) as open_one:
        conn.execute("create table t (i int)")
        conn.execute("insert into t values (1)")
        open_one.execute("insert into t values (2)")
        own_server.restart(mode)
        with pytest.raises(psycopg.OperationalError):
            open_one.execute("select 1")
    with psycopg.connect(dsn) as conn:
        assert conn.execute("select i from t").fetchall() == [(1,)]


def test_wait_for_fails_in_the_end():
    with pytest.raises(AssertionError, match="not within"):
        wait_for(lambda: False, timeout=0)


def test_plpgsql_check_finds_a_fault(plpgsql_check, conn):
    conn.execute(
        "create function faulty() returns int language plpgsql as"
        " 'begin return (select no_such_column from procrastinate_jobs); end'"
    )
    rows = conn.execute("select lint.plpgsql_check_function('faulty()')").fetchall()
    assert "no_such_column" in rows[0][0]
