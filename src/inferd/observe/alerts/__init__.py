"""Prometheus' rules for the metrics of this server: recording rules, and alerts with their severity and words.

``general.py`` has the alerts that hold for every server, ``burn_rates.py`` makes those of a configuration's objectives,
and ``rules_file.py`` writes both. An expression names metrics of ``observe/metrics.py`` and no others.
"""
