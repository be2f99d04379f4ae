"""Traces: spans of requests and of loads, sent to a collector as OTLP over HTTP.

``context`` reads and writes W3C trace context and decides which traces are kept. ``spans`` makes spans from the events
of ended calls and of loads; while a request runs there are none. ``otlp`` encodes them, ``exporter`` sends them from a
thread of its own. ``conventions`` is the one table of their attributes.
"""
