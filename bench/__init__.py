"""Measures the speed of pydispatch against bare procrastinate: ``python -m bench --help``.

Every number is a ratio of two things done in turns, on one server, in one run, so that a slow
or busy machine slows both. Each repetition begins in new databases.
"""
