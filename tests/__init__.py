"""Tests of pydispatch, and what they stand on."""
