"""Every row of the table, wherever its program is; run as a script it prints docs/dev/experiments.md."""

from __future__ import annotations

import sys

# Importing them enters their rows into the table.
from tests.experiments import clients, engines, lifecycle, overload, security, state, upstreams  # noqa: F401
from tests.experiments.catalogue import EXPERIMENTS, Elsewhere, Experiment

ELSEWHERE: tuple[Elsewhere, ...] = (
    Elsewhere(
        "F11",
        "a worker is killed again and again",
        "no process, descriptor, thread or task is left behind",
        ("tests/worker/test_supervisor.py::test_many_restarts_leave_no_process_descriptor_thread_or_task_behind",),
        "tests/worker/test_supervisor.py::test_the_check_for_leaks_sees_one",
    ),
    Elsewhere(
        "F16",
        "the kernel kills a worker for its memory, which is SIGKILL",
        "as F01",
        ("F01",),
        "F01",
    ),
    Elsewhere(
        "F60b",
        "a deadline passes in the engine",
        "the request ends there and its blocks are free",
        ("tests/engine/test_engine.py::test_a_deadline_ends_a_request_in_the_engine",),
        "F60",
    ),
    Elsewhere(
        "F27b",
        "the port for gRPC: cancels, deadlines, floods of every frame, messages that are too large once decompressed, windows that do not open, a server that leaves",
        "each call has its status, its request leaves queue and worker, a flooding connection is ended, work in flight finishes",
        (
            "tests/gateway/grpc/test_grpc_calls.py::test_a_request_ends_when_its_client_cancels",
            "tests/gateway/grpc/test_grpc_calls.py::test_a_request_ends_with_its_deadline",
            "tests/gateway/grpc/test_grpc_calls.py::test_a_client_that_floods_with_pings_is_sent_away",
            "tests/http/http2/test_http2_floods.py::test_a_client_that_floods_is_sent_away",
            "tests/http/http2/test_http2_floods.py::test_a_window_that_opens_by_a_byte_at_a_time_is_given_up_as_well",
            "tests/gateway/grpc/test_grpc_calls.py::test_a_request_that_is_too_large_is_refused",
            "tests/gateway/grpc/test_grpc_calls.py::test_a_server_that_leaves_finishes_what_it_began",
        ),
        "tests/gateway/grpc/test_grpc_calls.py::test_an_answer_goes_through_as_it_is",
    ),
    Elsewhere(
        "F28",
        "model files that are cut off, lie about their sizes, miss their weights",
        "the load fails with the file and the reason, nothing is read past an end, other models serve",
        (
            "tests/predict/test_artifact_attacks.py::test_a_server_with_bad_files_serves_the_good_ones",
            "tests/predict/test_artifact_attacks.py::test_a_weight_that_claims_more_than_there_is_ends_the_load_alone",
            "tests/registry/test_onnx_file.py::test_a_file_that_is_cut_off_anywhere_is_refused",
            "tests/checkpoints/test_weights.py::test_a_lying_header_is_named",
            "tests/checkpoints/test_weights.py::test_a_truncated_file_is_named",
        ),
        "tests/registry/test_onnx_file.py::test_inputs_outputs_and_weights_are_read",
    ),
    Elsewhere(
        "F29b",
        "a configuration that names a pickle, a model that is cut off, or one whose weights lie outside its folder",
        "refused before anything is loaded: what serves goes on",
        ("tests/predict/test_artifact_attacks.py::test_a_bad_file_replaces_no_model_that_serves",),
        "tests/clients/test_triton_http.py::test_a_new_version_comes_with_a_reload_and_without_a_refused_request",
    ),
    Elsewhere(
        "SEC-03",
        "pickles under every name and in every wrapping, archives and schemas that name code, headers that lie",
        "a load error; nothing of the file ran, and no loader falls back to one that trusts it",
        (
            "tests/predict/test_artifact_attacks.py::test_no_pickle_is_opened_whatever_it_is_called_and_wrapped_in",
            "tests/predict/test_artifact_attacks.py::test_no_loader_falls_back_to_opening_a_pickle",
            "tests/predict/test_artifact_attacks.py::test_permission_for_pickles_is_not_permission_for_disguises",
            "tests/predict/runtimes/test_torch_runtime.py::test_an_archive_that_is_more_than_a_graph_is_not_loaded",
        ),
        "tests/predict/test_artifact_attacks.py::test_the_canary_sings_where_the_operator_allows_pickles",
    ),
    Elsewhere(
        "SEC-04",
        "code beside a checkpoint that config.json asks for (auto_map), classes, Triton's Python models, libraries of operators",
        "never imported without allow_code, checkpoints' code never",
        (
            "tests/predict/test_artifact_attacks.py::test_code_beside_a_checkpoint_is_never_imported",
            "tests/predict/test_python_runtime.py::test_nothing_is_imported_where_code_is_not_allowed",
            "tests/predict/test_triton_python.py::test_nothing_of_the_folder_runs_unless_it_is_allowed",
            "tests/predict/runtimes/test_onnx_runtime.py::test_a_library_of_operators_is_code",
        ),
        "tests/predict/test_python_runtime.py::test_load_gets_the_options_and_close_is_called",
    ),
    Elsewhere(
        "SEC-06b",
        "predictions: parameters out of range, shapes that are negative, overflow or promise more than there is",
        "400 that names it; no memory is taken for a promise, nothing is read past the body",
        (
            "tests/gateway/kserve/test_kserve_rest.py::test_a_knob_out_of_range_is_refused_by_name",
            "tests/predict/test_v2_codec.py::test_a_lie_is_refused_by_name",
            "tests/predict/test_v2_codec.py::test_no_memory_is_taken_for_what_a_shape_promises",
            "tests/predict/test_v2_codec.py::test_no_size_and_no_shape_reads_past_the_body",
            "tests/predict/test_protobuf_codec.py::test_what_does_not_fit_is_refused_by_its_name",
        ),
        "tests/gateway/kserve/test_kserve_rest.py::test_reserved_parameters_are_the_gateway_s",
    ),
    Elsewhere(
        "SEC-12",
        "paths that leave a folder: in an ONNX model's references, in config.pbtxt, in names of models in URLs",
        "refused; nothing outside the folder is opened",
        (
            "tests/registry/test_onnx_file.py::test_weights_outside_the_models_folder_are_never_opened",
            "tests/registry/test_triton_repository.py::test_what_cannot_be_served_as_it_is_is_refused_with_the_reason",
            "tests/predict/test_artifact_attacks.py::test_a_server_with_bad_files_serves_the_good_ones",
        ),
        "tests/predict/runtimes/test_onnx_runtime.py::test_weights_beside_the_model_are_used_and_others_never_opened",
    ),
    Elsewhere(
        "SEC-13",
        "KServe v2's routes, calls and parameters for shared memory",
        "there are none: 404, UNIMPLEMENTED, and a request that names a region is refused",
        (
            "tests/gateway/kserve/test_kserve_rest.py::test_there_are_no_routes_of_shared_memory",
            "tests/gateway/grpc/test_grpc_calls.py::test_what_is_not_served_says_what_to_do_instead",
            "tests/predict/test_protobuf_codec.py::test_shared_memory_is_refused_by_its_name",
            "tests/clients/test_triton_http.py::test_shared_memory_is_not_there",
        ),
        "tests/clients/test_triton_http.py::test_tensors_go_and_come_in_every_form",
    ),
    Elsewhere(
        "SEC-14b",
        "compressed bombs to KServe v2 over REST and gRPC, images that are small as files alone",
        "opened up to max_body_bytes (pixels: max_pixels) and refused",
        (
            "tests/gateway/kserve/test_kserve_rest.py::test_a_compressed_body_that_lies_is_refused",
            "tests/gateway/grpc/test_grpc_calls.py::test_a_request_that_is_too_large_is_refused",
            "tests/predict/steps/test_image_steps.py::test_the_header_is_believed_before_any_pixel_is_made",
        ),
        "tests/gateway/kserve/test_kserve_rest.py::test_compressed_requests_are_opened_and_large_answers_compressed",
    ),
    Elsewhere(
        "SEC-15b",
        "predictions: JSON that is deep or repeats its fields, requests and messages with any bytes changed",
        "read or refused, and nothing else",
        (
            "tests/predict/test_v2_codec.py::test_what_is_no_request_is_refused",
            "tests/predict/test_row_codecs.py::test_deep_nesting_and_repeated_keys_are_refused",
            "tests/predict/test_v2_codec.py::test_a_mutated_request_is_read_or_refused_and_nothing_else",
            "tests/predict/test_protobuf_codec.py::test_a_damaged_request_is_read_as_by_the_reference_or_refused",
        ),
        "tests/predict/test_v2_codec.py::test_numbers_come_through_json_nested_or_flat_and_through_bytes",
    ),
)

FAULTS = (
    *(f"F{number:02}" for number in range(1, 32)),
    *(f"F{number}" for number in (*range(34, 43), 44, 45, 46, 47, 54, 55, *range(58, 64))),
)
SECURITY = tuple(f"SEC-{number:02}" for number in (*range(1, 8), *range(11, 26), 29, 30))
"""What the table must have. Other items belong to what this server does not have yet."""

HEAD = """\
# Experiments

These faults and attacks are applied to whole servers. Each row states what must hold, and the defect with which the
check was seen to fail. Each experiment runs twice: as it is, and with the defect. `make soak` runs all of them; those
marked *everyday* run with `make test` as well, and those marked *thorough* with `make test TIERS=all`, both without the
defect. After each one the books must balance: blocks, queues, descriptors, threads, children, outcomes, usage, golden
answers, health, and no traceback without a metric
(`tests/experiments/books.py`). [Failure modes](../failure-modes.md) shows each fault as an operator sees it, and
[security](../security.md) lists the defences.

This page is generated from `tests/experiments/`.

| | injected | must hold | the check fails with | run |
| --- | --- | --- | --- | --- |
"""


def rows() -> list[Experiment | Elsewhere]:
    """Faults first, in the order of their numbers."""
    return sorted((*EXPERIMENTS.values(), *ELSEWHERE), key=lambda row: (row.id.startswith("SEC"), row.id))


def line(row: Experiment | Elsewhere) -> str:
    if isinstance(row, Experiment):
        control = row.control
        run: str = row.tier
    else:
        control = row.control if "::" not in row.control else f"`{row.control}`"
        run = "<br>".join(test if "::" not in test else f"`{test}`" for test in row.tests)
    cells = (row.id, row.injects, row.holds, control, run)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def page() -> str:
    return HEAD + "".join(map(line, rows()))


if __name__ == "__main__":
    sys.stdout.write(page())
