"""One replica from several processes: each has a share of the weights and of the KV cache (``engine.model.share``).

Rank 0 is the worker: it schedules, samples and sends the plan of each step (``lead``). The other ranks decide nothing:
they receive a plan and compute their part of it (``rank``). What they add up goes through ``peers``.
"""
