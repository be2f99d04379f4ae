"""Wrong changes by hand that no test noticed once, or only by chance. Every one must turn one of its tests red.

A change is a text that stands once in its file, and what is put in its place. ``test_mutants`` fails where a text is not found
any more: move the change to where its mistake can be made now.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Known(NamedTuple):
    """A wrong change, and tests of which at least one fails with it."""

    what: str
    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]


KNOWN: Final = (
    Known(
        "nothing that is committed waits for the disk",
        "state/sqlite.py",
        '"PRAGMA synchronous = FULL"',
        '"PRAGMA synchronous = OFF"',
        ("tests/state/test_database.py",),
    ),
    Known(
        "a commit that was promised durable does not wait for the disk",
        "state/sqlite.py",
        "'FULL' if durable else 'NORMAL'",
        "'NORMAL' if durable else 'NORMAL'",
        ("tests/state/test_database.py", "tests/tenancy/test_durability.py"),
    ),
    Known(
        "a key that was shown is lost by a power cut",
        "tenancy/keys.py",
        "    with database.transaction() as transaction:\n        maker =",
        "    with database.transaction(durable=False) as transaction:\n        maker =",
        ("tests/tenancy/test_durability.py",),
    ),
    Known(
        "a second SIGTERM cuts a drain short",
        "app/departure.py",
        "if number == signal.SIGINT:",
        "if number in (signal.SIGINT, signal.SIGTERM):",
        ("tests/test_app.py",),
    ),
    Known(
        "a second SIGTERM begins the grace period again",
        "app/root.py",
        "    await departure.wait_unless_interrupted(site.router.drain(site.config.server.grace_s))\n",
        "    while departure.leave.is_set():\n"
        "        departure.leave.clear()\n"
        "        await departure.wait_unless_interrupted(site.router.drain(site.config.server.grace_s))\n",
        ("tests/test_app.py",),
    ),
    Known(
        "a reload does not reach keys and limits",
        "app/root.py",
        "        self.control.apply(config)\n",
        "",
        ("tests/test_reload.py",),
    ),
    Known(
        "a reload does not reach the control socket's gateway",
        "app/root.py",
        "for gateway in self.gateways:",
        "for gateway in self.gateways[:1]:",
        ("tests/test_reload.py",),
    ),
    Known(
        "a remote server's refusal is replayed for its Idempotency-Key",
        "gateway/idempotency.py",
        "if response.status == 200:",
        "if response.status < 500:",
        ("tests/remote/test_relays.py",),
    ),
    Known(
        "a refund gives two requests back",
        "tenancy/limiter.py",
        "                for bucket in taken.requests:\n                    bucket.credit(1.0, now)",
        "                for bucket in taken.requests:\n                    bucket.credit(2.0, now)",
        ("tests/tenancy/test_buckets.py",),
    ),
    Known(
        "a stop string ends an answer below min_tokens",
        "engine/generation.py",
        "self._say(text, may_stop)",
        "self._say(text, True)",
        ("tests/engine/test_engine.py",),
    ),
    Known(
        "the steps of a pipeline run as they are listed",
        "predict/pipelines/wiring.py",
        "tuple(order(needs(pipeline, names)))",
        "tuple(range(len(pipeline.steps)))",
        ("tests/predict/pipelines/test_pipelines.py",),
    ),
    Known(
        "weights are normalised over versions that cannot serve",
        "config/versions.py",
        "sum(weight for _, weight in shares)",
        "sum(weight for _, weight in there)",
        ("tests/config/test_config_versions.py",),
    ),
    Known(
        "a relayed refusal loses its Retry-After",
        "remote/openai.py",
        'headers = ((b"retry-after", self._retry_after),) if self._retry_after is not None else ()',
        "headers = ()",
        ("tests/remote/test_relays.py",),
    ),
    Known(
        "a table of headers keeps its entries when it shrinks",
        "http/http2/hpack.py",
        "                self._shrink(limit)\n                self.version += 1",
        "                self.version += 1",
        ("tests/http/http2/test_hpack.py",),
    ),
    Known(
        "a half-open breaker lets everything through",
        "router/choosing/breaker.py",
        '        if self.state == "closed":\n            return True\n        probing',
        '        if self.state != "open":\n            return True\n        probing',
        ("tests/router/choosing/test_breaker.py::test_a_half_open_breaker_lets_no_more_than_its_probes_through",),
    ),
    Known(
        "what a client did wrong opens the breaker",
        "remote/openai.py",
        "            self._forward_refusal()\n",
        "            self._listener.refused(_status_error(status), counts=True, retry=False)\n",
        ("tests/router/test_router_with_remotes.py",),
    ),
    Known(
        "a relayed refusal counts as a failure of its replica",
        "router/pool.py",
        'if end.outcome == "failed" and not is_deadline_end(end):',
        'if end.outcome in ("failed", "refused"):',
        ("tests/router/test_router_with_remotes.py",),
    ),
    Known(
        "a preempted sequence is dropped",
        "engine/scheduling/scheduler.py",
        "        step.best_preempted = min(step.best_preempted, rank[0])\n        self._waiting.push(sequence, rank)\n",
        "        step.best_preempted = min(step.best_preempted, rank[0])\n",
        ("tests/engine/scheduling/test_scheduler.py::test_a_preempted_sequence_is_recomputed_when_there_is_room",),
    ),
    Known(
        "a batcher does not take out what has expired",
        "predict/batcher.py",
        "                expired.append(found.item)\n                self.remove(request_id)",
        "                pass",
        ("tests/predict/test_batcher.py",),
    ),
    Known(
        "what has expired is computed",
        "predict/backend.py",
        "for item in self._batcher.expire(now):",
        "for item in ():",
        ("tests/predict/test_backend.py::test_a_request_that_expires_while_others_are_computed_never_runs",),
    ),
    Known(
        "requests that failed together are tried again together",
        "router/retries.py",
        " * self._random.random()",
        "",
        ("tests/router/test_retries.py",),
    ),
    Known(
        "a request that may not run twice is tried again",
        "router/retries.py",
        " or not ticket.request.idempotent",
        "",
        ("tests/router/test_router_with_remotes.py",),
    ),
    Known(
        "a tenant with many batches leaves the others none",
        "jobs/rows.py",
        "(at_work.get(row[0], 0), row[2], row[1])",
        "(row[2], row[1])",
        ("tests/jobs/test_job_runs.py",),
    ),
    Known(
        "results whose rows are not written yet are swept",
        "jobs/rows.py",
        "(batch.output_file_id, batch.error_file_id) if name is not None)",
        "())",
        ("tests/jobs/test_job_runs.py",),
    ),
    Known(
        "a batch pushes the requests of others aside",
        "jobs/pace.py",
        "load.together + max(_MARGIN, load.together // 4) - others",
        "load.together + max(_MARGIN, load.together // 4)",
        ("tests/jobs/test_pace.py",),
    ),
    Known(
        "a worker on a node reads the time of another machine's clock",
        "nodes/life.py",
        "request.arrived_at + self._link.clock_offset_s",
        "request.arrived_at",
        ("tests/nodes/test_node_lives.py",),
    ),
    Known(
        "a node that has joined cannot join again once tokens were revoked",
        "nodes/listener.py",
        "                for link in self._links.values():\n                    self._renew(link)\n",
        "                pass\n",
        ("tests/nodes/test_node_lives.py",),
    ),
    Known(
        "the rotation of a key lengthens its life",
        "tenancy/keys.py",
        "now + overlap_s if old.expires_at is None else min(old.expires_at, now + overlap_s)",
        "now + overlap_s",
        ("tests/tenancy/test_keys.py",),
    ),
    Known(
        "a server that others reach needs no key when the last one was revoked",
        "tenancy/door.py",
        "self._is_exposed or len(self._keys) > 0",
        "len(self._keys) > 0",
        ("tests/tenancy/test_keys.py",),
    ),
    Known(
        "workers that died before a rollout was started again withdraw the new version",
        "rollout/ledger.py",
        "died if run == progress.run else 0",
        "died",
        ("tests/rollout/test_rollouts.py",),
    ),
    Known(
        "a request that waits too long ends only when another one does",
        "router/waiting/availability.py",
        "return None if math.isinf(bound_s) else max(oldest_at, ready_since) + bound_s",
        "return None",
        ("tests/router/waiting/test_availability.py",),
    ),
    Known(
        "a deadline leaves time for what waits before a request, and none for the request",
        "router/waiting/availability.py",
        "surely_longer_than(left_s, ahead + 1, now)",
        "surely_longer_than(left_s, ahead, now)",
        ("tests/router/waiting/test_availability.py",),
    ),
    Known(
        "every model has the whole bound of an exchange of hints",
        "router/hints.py",
        "MAX_KEYS // len(shared)",
        "MAX_KEYS",
        ("tests/router/test_hints.py",),
    ),
    Known(
        "suspected servers that this gateway does not have are counted as received",
        "router/hints.py",
        "adopted += len(known)",
        "adopted += len(told.suspects)",
        ("tests/router/test_hints.py",),
    ),
    Known(
        "what was not reused is not counted",
        "engine/scheduling/retention.py",
        "self._left[uses - 1][-1] += 1.0",
        "pass",
        ("tests/engine/scheduling/test_retention.py",),
    ),
    Known(
        "an adapter that is loaded already is told as loaded again",
        "router/adapters.py",
        "elif old.get(adapter) != source:",
        "else:",
        ("tests/router/test_pool_adapters.py",),
    ),
    Known(
        "an adapter that left is loaded again by the next change",
        "router/adapters.py",
        "        for adapter in gone:\n            self._leaving.pop(adapter, None)\n",
        "",
        ("tests/router/test_pool_adapters.py",),
    ),
    Known(
        "more is downloaded than there is",
        "registry/hub.py",
        'progress("download", min(done, total), total)',
        'progress("download", done, total)',
        (
            "tests/registry/test_source.py::test_the_progress_of_a_download_is_the_bytes_that_are_there_and_never_more_than_all",
        ),
    ),
    Known(
        "the first part of an answer tells no cached tokens",
        "engine/generation.py",
        "            self.num_cached,\n            tuple(prepared.prompt_ids)",
        "            0,\n            tuple(prepared.prompt_ids)",
        ("tests/engine/test_engine.py::test_a_cached_prompt_is_reported_and_answers_the_same",),
    ),
    Known(
        "the best of several choices has the seed of an answer that can be continued",
        "engine/generation.py",
        "prepared.seed if prepared.sampling.width == 1 and not",
        "prepared.seed if prepared.sampling.n == 1 and not",
        ("tests/engine/test_continuation.py::test_choices_that_cannot_be_continued_report_no_seed",),
    ),
    Known(
        "the bytes of lines that a batch holds in memory have no bound",
        "jobs/run.py",
        "(self._held and self._held_bytes >= MAX_HELD_BYTES)",
        "False",
        ("tests/jobs/test_job_runs.py",),
    ),
)
