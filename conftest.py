"""Gives the fixtures to the Python tests and the pgTAP files alike."""

pytest_plugins = ["tests.fixtures", "tests.ticks"]
