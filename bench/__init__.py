"""Measurements; run by name, never by the tests."""
