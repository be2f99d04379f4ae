"""Forms that may be costly are normalised and compiled on trial first, in a process that may fail.

A form of a few bytes can take seconds of a processor and gigabytes of memory. In the worker both would be taken from
the answers that it computes. A trial has a process of its own, a low share of contended cores, and limits on processor
time and memory that the system enforces.

- ``task``: what is tried, and the work.
- ``__main__``: the process that waits for trials and forks one process for each.
- ``turns``: which trials compute at a time, beside steps.
- ``client``: the worker's side.
"""
