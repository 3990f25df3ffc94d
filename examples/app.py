"""Two tenants of an API, each with limits of its own, and reports that only have to be fair.

    export PYTHONPATH=.
    pydispatch --app=app.app migrate --with-procrastinate
    pydispatch --app=app.app run &
    procrastinate --app=app.app worker &
    python app.py

It connects as libpq's variables say: PGHOST, PGDATABASE, ...
"""

from datetime import timedelta
from typing import Any

from procrastinate import App, PsycopgConnector

from pydispatch import Concurrency, Dispatch, Policy, Throttle, ctx

app = App(connector=PsycopgConnector())
dispatch = Dispatch(app)

LIMITS: dict[str, dict[str, float]] = {
    "acme": {"per_minute": 600, "at_once": 10},
    "zenith": {"per_minute": 60, "at_once": 2},
}


def limits_of(tenant: str, **_: Any) -> dict[str, Any]:
    """What the policy reads: a partition's newest context counts for all its waiting jobs."""
    return {"tenant": tenant, **LIMITS.get(tenant, {})}


calls = Policy(
    "calls",
    partition_by="tenant",
    gates=[
        Throttle(rate=ctx("per_minute", default=30), per=timedelta(minutes=1), burst=10),
        Concurrency(max=ctx("at_once", default=1)),
    ],
)

# No gates: the tenants take turns, however many jobs one of them has.
reports = Policy("reports", partition_by="tenant", tick_admission_budget=20)


@dispatch.policy(calls, context=limits_of)
@app.task(name="call", queue="http", retry=3)
def call(tenant: str, path: str) -> None:
    print(f"{tenant}: GET {path}")


@dispatch.policy(reports)
@app.task(name="report", queue="reports")
def report(tenant: str, month: str) -> None:
    print(f"{tenant}: report of {month}")


if __name__ == "__main__":
    with app.open():
        call.batch_defer(*({"tenant": "acme", "path": f"/items/{n}"} for n in range(100)))
        call.batch_defer(*({"tenant": "zenith", "path": f"/items/{n}"} for n in range(20)))
        last = report.defer(tenant="acme", month="2026-01")
        print(f"the report is job {last}, {app.job_manager.get_job_status(last).value}")
