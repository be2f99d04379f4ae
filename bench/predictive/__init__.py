"""Predictive serving beside other servers: ``python -m bench.predictive``."""
