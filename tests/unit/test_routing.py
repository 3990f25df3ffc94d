"""Which jobs are staged where: decided in Python, before any statement."""

from __future__ import annotations

import asyncio
import contextvars
import threading

import pytest
from procrastinate import App, Blueprint, jobs
from procrastinate.manager import JobManager
from procrastinate.testing import InMemoryConnector

from pydispatch import Concurrency, Dispatch, Policy
from pydispatch.errors import InvalidJob
from pydispatch.manager import DispatchJobManager, Route


@pytest.fixture
def app():
    return App(connector=InMemoryConnector())


@pytest.fixture
def dispatch(app):
    return Dispatch(app)


def job(task_name: str, **task_kwargs) -> jobs.Job:
    return jobs.Job(
        queue="default",
        lock=None,
        queueing_lock=None,
        task_name=task_name,
        task_kwargs=task_kwargs,
    )


def test_a_task_with_a_policy_is_staged_and_another_is_not(app, dispatch):
    @dispatch.policy("endpoints", partition_by="endpoint_id")
    @app.task(name="fetch")
    def fetch(endpoint_id): ...

    @app.task(name="plain")
    def plain(): ...

    assert dispatch.route(job("fetch", endpoint_id=7)) == Route("endpoints", None)
    assert dispatch.route(job("plain")) is None
    assert dispatch.route(job("never heard of")) is None


def test_the_decorator_returns_the_task_itself(app, dispatch):
    @app.task(name="fetch")
    def fetch(): ...

    assert dispatch.policy("endpoints")(fetch) is fetch


def test_every_name_of_a_task_follows_its_policy(app, dispatch):
    @dispatch.policy("endpoints")
    @app.task(name="fetch", aliases=["old_fetch"])
    def fetch(): ...

    app.add_task_alias(fetch, "older_fetch")
    for name in ("fetch", "old_fetch", "older_fetch"):
        assert dispatch.route(job(name)) == Route("endpoints")


def test_a_task_of_a_blueprint_follows_its_policy_under_its_later_names(app, dispatch):
    blueprint = Blueprint()

    @dispatch.policy("endpoints")
    @blueprint.task(name="fetch", aliases=["old"])
    def fetch(): ...

    app.add_tasks_from(blueprint, namespace="ns")
    assert dispatch.route(job("ns:fetch")) == Route("endpoints")
    assert dispatch.route(job("ns:old")) == Route("endpoints")
    assert dispatch.route(job("fetch")) is None


def test_a_task_of_another_program_is_named(app, dispatch):
    dispatch.policy("endpoints", context=lambda **given: {"n": len(given)})("elsewhere.fetch")
    assert dispatch.route(job("elsewhere.fetch", a=1)) == Route("endpoints", {"n": 1})
    assert dispatch.knows("elsewhere.fetch")
    assert not dispatch.knows("elsewhere.other")


def test_the_order_of_dispatch_and_task_does_not_matter():
    app = App(connector=InMemoryConnector())

    @app.task(name="fetch")
    def fetch(): ...

    dispatch = Dispatch(app)
    dispatch.policy("endpoints")(fetch)
    assert dispatch.route(job("fetch")) == Route("endpoints")


def test_the_context_is_called_with_the_jobs_arguments(app, dispatch):
    @dispatch.policy("p", context=lambda endpoint_id, **_: {"key": endpoint_id * 2})
    @app.task(name="fetch")
    def fetch(endpoint_id, url): ...

    assert dispatch.route(job("fetch", endpoint_id=7, url="u")) == Route("p", {"key": 14})


def test_tasks_that_share_a_policy_share_its_context_unless_they_bring_their_own(app, dispatch):
    dispatch.policy("p", partition_by="key", context=lambda **_: {"key": "shared"})

    @dispatch.policy("p")
    @app.task(name="first")
    def first(): ...

    @dispatch.policy("p", context=lambda **_: {"key": "own"})
    @app.task(name="second")
    def second(): ...

    assert dispatch.route(job("first")) == Route("p", {"key": "shared"})
    assert dispatch.route(job("second")) == Route("p", {"key": "own"})


def test_a_context_that_raises_makes_the_job_invalid(app, dispatch):
    @dispatch.policy("p", context=lambda endpoint_id: {"limit": {}[endpoint_id]})
    @app.task(name="fetch")
    def fetch(endpoint_id): ...

    with pytest.raises(
        InvalidJob, match=r"policy 'p' .* task 'fetch' raised KeyError: 7"
    ) as caught:
        dispatch.route(job("fetch", endpoint_id=7))
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(InvalidJob, match="raised TypeError"):
        dispatch.route(job("fetch", other=7))


async def _context(**_):
    return {}


@pytest.mark.parametrize(
    ("context", "found"),
    [(lambda: None, "NoneType"), (lambda: [1], "list"), (_context, "coroutine")],
)
def test_a_context_that_is_no_dict_makes_the_job_invalid(app, dispatch, context, found):
    dispatch.policy("p", context=context)("fetch")
    with pytest.raises(InvalidJob, match=f"is not a dict but {found}"):
        dispatch.route(job("fetch"))


def test_bypass_holds_inside_its_block_alone(dispatch):
    dispatch.policy("p")("fetch")
    with dispatch.bypass():
        assert dispatch.route(job("fetch")) is None
        with dispatch.bypass():
            assert dispatch.route(job("fetch")) is None
        assert dispatch.route(job("fetch")) is None
    assert dispatch.route(job("fetch")) == Route("p")
    with pytest.raises(ZeroDivisionError), dispatch.bypass():
        raise ZeroDivisionError
    assert dispatch.route(job("fetch")) == Route("p")


def test_bypass_of_one_application_is_no_others(dispatch):
    other = Dispatch(App(connector=InMemoryConnector()))
    for each in (dispatch, other):
        each.policy("p")("fetch")
    with dispatch.bypass():
        assert dispatch.route(job("fetch")) is None
        assert other.route(job("fetch")) == Route("p")


def test_bypass_holds_for_its_thread_alone(dispatch):
    dispatch.policy("p")("fetch")
    routes = []
    with dispatch.bypass():
        thread = threading.Thread(
            target=contextvars.Context().run,
            args=[lambda: routes.append(dispatch.route(job("fetch")))],
        )
        thread.start()
        thread.join()
    assert routes == [Route("p")]


async def test_bypass_holds_for_its_asyncio_task_alone(dispatch):
    dispatch.policy("p")("fetch")
    inside, outside = asyncio.Event(), asyncio.Event()

    async def bypassing():
        with dispatch.bypass():
            inside.set()
            await outside.wait()
            return dispatch.route(job("fetch"))

    async def beside():
        await inside.wait()
        route = dispatch.route(job("fetch"))
        outside.set()
        return route

    assert list(await asyncio.gather(bypassing(), beside())) == [None, Route("p")]


def test_a_policy_is_declared_once_or_twice_alike(dispatch):
    for _ in range(2):
        dispatch.policy("p", gates=[Concurrency(max=5)])
    dispatch.policy(Policy("p", gates=[Concurrency(max=5)]))
    with pytest.raises(ValueError, match="policy 'p' is declared twice"):
        dispatch.policy("p", gates=[Concurrency(max=6)])
    with pytest.raises(ValueError, match="policy 'p' is declared twice"):
        dispatch.policy(Policy("p"))


def test_a_policy_object_takes_no_further_options(dispatch):
    with pytest.raises(TypeError, match="partition_by"):
        dispatch.policy(Policy("p"), partition_by="key")


def test_a_task_follows_one_policy(app, dispatch):
    @dispatch.policy("p")
    @app.task(name="fetch")
    def fetch(): ...

    dispatch.policy("p")(fetch)
    with pytest.raises(ValueError, match="task 'fetch' follows the policy 'p' already"):
        dispatch.policy("q")(fetch)


def test_the_decorator_below_the_tasks_is_refused(app, dispatch):
    with pytest.raises(TypeError, match=r"a policy goes above @app\.task"):

        @app.task(name="fetch")
        @dispatch.policy("p")
        def fetch(): ...


def test_an_application_has_one_dispatch(app, dispatch):
    assert Dispatch.of(app) is dispatch
    assert isinstance(app.job_manager, DispatchJobManager)
    with pytest.raises(ValueError, match=r"Dispatch\.of"):
        Dispatch(app)
    with pytest.raises(LookupError, match="no Dispatch"):
        Dispatch.of(App(connector=InMemoryConnector()))


def test_a_job_manager_of_another_class_is_not_thrown_away(app):
    class Other(JobManager):
        pass

    app.job_manager = Other(app.connector)
    with pytest.raises(ValueError, match="Other"):
        Dispatch(app)


def test_without_a_database_jobs_go_straight_to_the_queue(app, dispatch):
    @dispatch.policy("p", context=lambda **_: 1 / 0)
    @app.task(name="fetch", pass_context=False)
    def fetch(n): ...

    first = fetch.defer(n=1)
    assert app.connector.jobs[first]["task_name"] == "fetch"
    assert app.job_manager.get_job_status(first) == jobs.Status.TODO
    assert app.job_manager.cancel_job_by_id(first)
    assert app.job_manager.get_job_status(first) == jobs.Status.CANCELLED
    assert fetch.batch_defer({"n": 2}, {"n": 3}) == [first + 1, first + 2]


async def test_in_memory_there_is_nothing_to_sync(app, dispatch):
    dispatch.policy(Policy("p"))("fetch")
    dispatch.sync()
    await dispatch.sync_async()
    assert app.connector.queries == []


def test_a_connector_that_is_replaced_for_a_while_decides(app, dispatch):
    dispatch.policy("p")("fetch")
    real = app.connector
    with app.replace_connector(InMemoryConnector()) as replaced:
        job_id = app.configure_task("fetch").defer()
        assert replaced.connector.jobs[job_id]["task_name"] == "fetch"
    assert app.job_manager.connector is real


@pytest.mark.parametrize("spelt", ["m.tsak", "m.tasks", "task"])
def test_a_name_that_is_nearly_that_of_a_task_here_is_warned_of(app, dispatch, caplog, spelt):
    app.task(name="m.task")(lambda: None)
    dispatch.policy("p")(spelt)
    list(dispatch.sync_steps())
    (record,) = caplog.records
    assert (record.action, record.task, record.similar) == ("task_unknown", spelt, "m.task")
    assert "m.task is meant" in record.getMessage()


@pytest.mark.parametrize("name", ["m.task", "billing.send", "worker.tasks.fetch_endpoint"])
def test_a_task_that_lives_elsewhere_is_not_warned_of(app, dispatch, caplog, name):
    app.task(name="m.task")(lambda: None)
    dispatch.policy("p")(app.task(name="m.tusk")(lambda: None))
    dispatch.policy("p")(name)
    list(dispatch.sync_steps())
    assert caplog.records == []
