"""Errors are told apart by their SQLSTATE, whatever way they come."""

from __future__ import annotations

import psycopg
import pytest
from procrastinate import exceptions

from pydispatch import errors

STATES = {
    "PD001": errors.UnknownPolicy,
    "PD002": errors.InvalidDefinition,
    "PD003": errors.InvalidJob,
    "PD004": errors.AlreadyEnqueued,
    "PD005": errors.PolicyNotEmpty,
    "PD006": errors.UnknownJob,
    "PD007": errors.BacklogFull,
    "PD008": errors.HandoffNotSettled,
    "PD009": errors.InvalidSetting,
    "PD010": errors.ProcrastinateMissing,
    "PD011": errors.MigrationRefused,
    "PD999": errors.DispatchError,
}


def raised(conn: psycopg.Connection, sqlstate: str) -> psycopg.Error:
    with pytest.raises(psycopg.Error) as caught:
        conn.execute(
            f"do $$begin raise exception using errcode = '{sqlstate}',"
            " message = 'what', detail = 'which', hint = 'do'; end$$".encode()
        )
    return caught.value


@pytest.mark.parametrize("sqlstate", STATES)
def test_each_state_has_its_class(conn, sqlstate):
    cause = raised(conn, sqlstate)
    with pytest.raises(errors.DispatchError) as caught, errors.translate():
        raise cause
    error = caught.value
    assert type(error) is STATES[sqlstate]
    assert (error.sqlstate, error.message, error.detail, error.hint) == (
        sqlstate,
        "what",
        "which",
        "do",
    )
    assert error.__cause__ is cause
    assert str(error) == "what\nDETAIL:  which\nHINT:  do"


def test_error_that_procrastinate_wrapped(conn):
    wrapped = exceptions.ConnectorException()
    wrapped.__cause__ = raised(conn, "PD001")
    with pytest.raises(errors.UnknownPolicy) as caught, errors.translate():
        raise wrapped
    assert caught.value.__cause__ is wrapped


def test_error_that_sqlalchemy_wrapped(conn):
    class StatementError(Exception):
        orig = raised(conn, "PD004")

    wrapped = exceptions.ConnectorException()
    wrapped.__cause__ = StatementError()
    with pytest.raises(errors.AlreadyEnqueued), errors.translate():
        raise wrapped


def test_already_enqueued_is_procrastinates_too(conn):
    with pytest.raises(exceptions.AlreadyEnqueued), errors.translate():
        raise raised(conn, "PD004")


@pytest.mark.parametrize(
    "error",
    [exceptions.ConnectorException(), psycopg.OperationalError("gone"), ValueError("PD001")],
)
def test_other_errors_pass_unchanged(error):
    with pytest.raises(type(error)) as caught, errors.translate():
        raise error
    assert caught.value is error


def test_other_states_pass_unchanged(conn):
    with pytest.raises(psycopg.errors.UniqueViolation), errors.translate():
        raise raised(conn, "23505")


def test_empty_detail_and_hint_are_none(conn):
    with pytest.raises(errors.UnknownPolicy) as caught, errors.translate():
        conn.execute(
            "do $$begin raise exception using"
            " errcode = 'PD001', message = 'what', detail = '', hint = ''; end$$"
        )
    assert (caught.value.detail, caught.value.hint) == (None, None)
