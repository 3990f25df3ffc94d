"""The application of the driver process that ``bench.running`` starts."""

import os

from procrastinate import PsycopgConnector

from bench.work import program

app = program(PsycopgConnector(conninfo=os.environ["BENCH_APP_DSN"])).app
