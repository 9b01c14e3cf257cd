"""What the interface promises beyond its tables (test_contract_table.py): promise -> the tests that hold it.

Tests are named file::function, both without the leading `test_` of the file.
"""

from __future__ import annotations

NATIVE, ENGINE, CONTROL = "server_native::test_", "server_engine::test_", "server_control::test_"
OPENAI, LIVE, FRONT = "server_openai::test_", "server_live::test_", "frontend::test_"

ROWS: dict[str, dict[str, list[str]]] = {
    "rules": {
        "streams of /generate are cumulative": [NATIVE + "streams_are_cumulative_with_every_key_in_each_chunk"],
        "unknown top-level keys are ignored, unknown sampling parameters a 400": [
            "contract_table::test_a_field_of_generate",
            FRONT + "wrong_names_and_types_in_sampling_params_have_their_own_error",
        ],
        "an abort is a 200 with what there is": [
            FRONT + "abort_by_prefix_gives_partial_output_and_everything_asked",
            NATIVE + "abort_answers_200_with_what_there_is",
        ],
        "as many ids as log-probabilities as completion_tokens, stop token included": [
            NATIVE + "reply_has_the_contracts_keys_and_lengths",
            FRONT + "text_ids_logprobs_and_routes_agree_in_length_and_value",
        ],
        "P + C - 1 - start rows, prefix hits included": [
            ENGINE + "start_length_cache_key_and_prefix_hits",
            ENGINE + "stop_string_ends_routes_with_the_tokens",
        ],
        "log-probabilities after temperature": [ENGINE + "logprobs_line_up_with_the_tokens_and_across_forms"],
        "release and resume answer null": [CONTROL + "memory_answers_null_by_get_and_post_and_names_a_wrong_tag"],
        "a paused server accepts and holds": [CONTROL + "paused_server_accepts_and_holds_then_answers"],
        "updates need no bracket and may have one": [CONTROL + "weight_update_from_disk_and_versions"],
        "a usage chunk only on request": [
            OPENAI + "completion_stream_deltas_usage_only_on_request",
            OPENAI + "routes_that_nobody_asked_for_do_not_make_chunks_without_choices",
        ],
    },
    "/generate": {
        "the shapes of a 400": [NATIVE + "the_three_shapes_of_a_400"],
        "overload is a 503 with Retry-After": [
            NATIVE + "overload_is_503_with_retry_after",
            ENGINE + "a_full_queue_is_503_and_what_was_accepted_is_answered",
        ],
        "401 without a key, 403 with a wrong one": ["server_document::test_refused_keys_are_as_declared"],
        "a fault is a 500 without its text": [CONTROL + "fault_of_ours_is_a_500_without_its_text"],
        "a refusal by the scheduler": [FRONT + "refusal_by_the_scheduler_fails_the_batch_or_ends_the_stream"],
        "batches, rids, n > 1": [
            NATIVE + "batches_are_lists_and_streamed_ones_carry_an_index",
            FRONT + "batch_order_rids_and_samples",
            ENGINE + "samples_share_a_prompt_and_the_first_equals_n_1",
        ],
        "a running rid is refused": [FRONT + "running_rid_is_refused_and_free_again_afterwards"],
        "namespaces of the prefix cache": [ENGINE + "start_length_cache_key_and_prefix_hits"],
        "finish reasons, stop strings, trimming": [
            FRONT + "stop_strings_cut_at_the_token_that_completes_them",
            FRONT + "stop_token_is_hidden_from_text_but_not_from_ids",
            NATIVE + "stop_regex_and_matched_stop_in_the_reply",
        ],
        "weight versions": [ENGINE + "weight_update_in_a_pause_splits_the_versions_and_a_bad_one_changes_nothing"],
        "no NaN in JSON": [NATIVE + "no_nan_reaches_the_wire"],
        "log-probability layouts": [
            ENGINE + "logprobs_line_up_with_the_tokens_and_across_forms",
            "given_logprobs::test_named_tokens_of_prompt_and_output",
        ],
        "routes only for who asks, in the last chunk": [
            NATIVE + "only_those_who_ask_get_routes_and_all_who_ask_do",
            NATIVE + "streams_are_cumulative_with_every_key_in_each_chunk",
        ],
        "routes that were not recorded are an error": [
            FRONT + "missing_rows_are_an_error_not_data",
            NATIVE + "recording_off_is_a_400_that_names_the_flag",
        ],
        "forms of routes": [NATIVE + "each_route_format_in_json_and_msgpack_holds_the_same_rows"],
        "incremental streams": [NATIVE + "incremental_streams_send_deltas"],
        "a client that leaves aborts": [LIVE + "a_client_that_goes_away_frees_its_request"],
        "an abort before the first token has every key": [NATIVE + "abort_before_the_first_token_still_has_every_key"],
        "what RL clients send": [NATIVE + "what_rl_clients_send_is_taken_as_it_is"],
        "lengths that do not fit": [FRONT + "what_can_never_succeed_is_refused_before_the_engine"],
    },
    "OpenAI": {
        "completions: shape, usage, routes": [OPENAI + "completion_shape_usage_and_routes"],
        "completions: echo and logprobs": [OPENAI + "completion_echo_with_logprobs_serves_likelihood_scoring"],
        "chat: shape, meta_info": [OPENAI + "chat_shape_and_meta_info"],
        "chat: order of a stream": [OPENAI + "chat_stream_order"],
        "session servers": [OPENAI + "session_servers_send_ids_and_get_meta_info"],
        "chat defaults of the checkpoint": [OPENAI + "chat_defaults_come_from_the_checkpoint_and_length_is_open"],
        "grammars": [
            "grammar::test_each_kind_of_grammar",
            "grammar::test_bad_grammars_are_refused_by_name_and_hurt_nobody",
        ],
        "tools and reasoning": [
            "tool_pieces::test_two_calls_in_every_form_and_every_cut",
            "server_structured::test_reasoning_and_calls_whole_and_streamed",
            "tool_nested::test_values_come_back_whole_and_streamed",
            "reply_parsers::test_reasoning_whole_and_cut",
            "tool_pieces::test_the_name_comes_before_the_arguments_are_whole",
        ],
        "the openai client": [OPENAI + "the_openai_client_works_unchanged"],
        "vLLM's interface": [OPENAI + "vllm_interface_returns_npy_routes_with_every_choice"],
        "errors": [OPENAI + "errors_are_flat_400s_also_for_streams"],
    },
    "control": {
        "health is quick while paused": [CONTROL + "health_is_quick_while_paused"],
        "what clients read of the information endpoints": [
            CONTROL + "health_models_and_info_have_the_keys_that_clients_read"
        ],
        "pausing": [
            "engine_thread::test_pause_abort_ends_everything",
            ENGINE + "pause_in_place_freezes_and_continue_finishes",
            "engine_thread::test_pause_keeps_what_was_made",
        ],
        "memory on loan": ["server_memory::test_the_colocated_step"],
        "updates roll back": ["engine_control::test_a_broken_checkpoint_is_refused_and_the_weights_stay"],
        "metrics": [CONTROL + "metrics_count_requests_tokens_and_routes"],
        "keys of control": [CONTROL + "every_control_path_is_behind_the_admin_key"],
        "what is not built says so": [CONTROL + "what_is_not_built_says_so"],
    },
    "Engine": {
        "replies as over HTTP": ["llm::test_one_prompt_gives_a_dict_and_lists_give_lists"],
        "async and streams": ["llm::test_async_generate_and_stream_on_the_callers_loop"],
        "every flag, unknown ones a TypeError": [
            "llm::test_an_engine_takes_every_flag_of_the_server",
            "llm::test_unknown_arguments_are_type_errors",
        ],
        "methods by name": ["llm::test_collective_rpc_calls_control_methods_alone"],
        "shutdown": ["engine_thread::test_shutdown_ends_open_requests_and_can_be_repeated"],
    },
}
