"""The interface as a table: each field, sampling parameter, endpoint, method and flag that clients of SGLang rely on.

One row is one case, so what is covered can be read from the rows. Meaning beyond "is taken, is refused, is there" has
tests of its own; contract_rows.py names them.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
from contract_rows import ROWS
from server_http import serving

from tracklayer.engine.llm import Engine
from tracklayer.errors import UserError
from tracklayer.server import control
from tracklayer.server.args import parse

TESTS = Path(__file__).parent
IDS, TEXT = {"input_ids": [5, 6, 7]}, {"text": "abc"}
ONE = {"sampling_params": {"max_new_tokens": 1}}

# field of /generate -> (what goes with it, values that are taken, values that are refused); null is always taken
GENERATE = {
    "text": ({}, ["a", ["a", "b"]], [3, [3], {}]),
    "input_ids": ({}, [[5], [[5], [6, 7]]], [[], [-1], [400], "5", [5.5], [[]]]),
    "sampling_params": (IDS, [{}, {"max_new_tokens": 1}], ["x", [{}, {}], 3]),
    "rid": (IDS, ["r1"], [5, ["a", "b"]]),
    "return_logprob": (IDS, [True, False], ["yes", 3]),
    "logprob_start_len": (IDS | {"return_logprob": True}, [-1, 0, 3], [4, "0", 1.5]),
    "top_logprobs_num": (IDS | {"return_logprob": True}, [0, 3], [-1, "3"]),
    "token_ids_logprob": (IDS | {"return_logprob": True}, [[3, 4]], [[400], [-1], "3"]),
    "return_text_in_logprobs": (IDS | {"return_logprob": True}, [True, False], ["x"]),
    "return_prompt_token_ids": (IDS, [True, False], ["x"]),
    "stream": (IDS, [True, False], ["x"]),
    "return_routed_experts": (IDS, [True, False], ["x"]),
    "routed_experts_start_len": (IDS | {"return_routed_experts": True}, [0, 2, 3], [4, -1, "0"]),
    "return_hidden_states": (IDS, [False], [True, "last"]),
    "lora_path": (IDS, [], ["adapter"]),
    "image_data": (IDS, [], [["http://a/b.png"]]),
    "video_data": (IDS, [], [["a"]]),
    "audio_data": (IDS, [], [["a"]]),
    "priority": (IDS, [0, 7, -3], ["high"]),
    "extra_key": (IDS, ["a"], [3]),
    "cache_salt": (IDS, ["a"], [3]),
    "routing_key": (IDS, ["a"], []),
    "routed_dp_rank": (IDS, [0], [1, "0"]),
    "data_parallel_rank": (IDS, [0], [1]),
    "disagg_prefill_dp_rank": (IDS, [0], []),
    "input_embeds": ({}, [], [[[0.5]]]),
    "custom_logit_processor": (IDS, [], ["x"]),
    "return_bytes": (IDS, [False], [True]),
    "anything_else": (IDS, [1, "x", {}], []),
}

# sampling parameter -> (what goes with it, values that are taken, values that are refused); null is the default
SAMPLING = {
    "max_new_tokens": ({}, [0, 1, 20], [-1, "5", 1.5, 600]),
    "temperature": ({}, [0, 1e-9, 0.7, 2], [-0.1, "1"]),
    "top_p": ({}, [0.1, 1], [0, 1.1, -1]),
    "min_p": ({}, [0, 1], [-0.1, 1.1]),
    "top_k": ({}, [-1, 1, 1 << 30], [0, -2, 1.5]),
    "frequency_penalty": ({}, [-2, 2], [-2.1, 2.1]),
    "presence_penalty": ({}, [-2, 2], [-2.1, 2.1]),
    "repetition_penalty": ({}, [0.5, 2], [0, 2.1]),
    "min_new_tokens": ({"max_new_tokens": 3}, [0, 3], [-1, 4]),
    "stop": ({}, ["a", ["a", "b"], []], [3, ["a"] * 33]),
    "stop_token_ids": ({}, [[5], []], [["a"], "5"]),
    "stop_regex": ({}, ["a+", ["a", "b"]], ["(", ["a"] * 33, "a" * 257]),
    "ignore_eos": ({}, [True, False], ["x"]),
    "no_stop_trim": ({}, [True, False], ["x"]),
    "skip_special_tokens": ({}, [True, False], ["x"]),
    "spaces_between_special_tokens": ({}, [True, False], ["x"]),
    "n": ({}, [1, 3], [0, -1, 1.5]),
    "sampling_seed": ({}, [0, 7, (1 << 63) - 1], ["x", 1.5]),
    "logit_bias": ({}, [{"5": 1.0}, {}], [{"400": 1.0}, {"a": 1.0}, [5]]),
    "json_schema": ({}, ['{"type": "object"}', ""], [5]),
    "regex": ({}, ["[ab]+", ""], [5]),
    "ebnf": ({}, ['root ::= "a"', ""], [5]),
    "custom_params": ({}, [{"a": 1}], []),
    "stream_interval": ({}, [1, 5], [0, "x"]),
    "beam_width": ({}, [], [2]),
    "choice": ({}, [], [["a"]]),
    "watermark": ({}, [], [True]),
}

# path -> (methods, body of POST); what is only there to say that it is not built answers 501
ENDPOINTS = {
    "/health": ("GET", None), "/health_generate": ("GET", None), "/ready": ("GET", None), "/ping": ("GET", None),
    "/model_info": ("GET", None), "/get_model_info": ("GET", None), "/server_info": ("GET", None),
    "/get_server_info": ("GET", None), "/flush_cache": ("GET POST", {}), "/abort_request": ("POST", {"rid": "x"}),
    "/pause_generation": ("POST", {"mode": "retract"}), "/continue_generation": ("POST", {"torch_empty_cache": True}),
    "/begin_weight_update": ("POST", {"selector": "all"}), "/end_weight_update": ("POST", {}),
    "/update_weights_from_disk": ("POST", {"model_path": "/m", "pp_rank": 0, "token_step": 0, "is_async": False}),
    "/update_weights_from_tensor": ("POST", {}), "/init_weights_update_group": ("POST", {}),
    "/update_weights_from_distributed": ("POST", {}), "/destroy_weights_update_group": ("POST", {}),
    "/get_weights_by_name": ("POST", {"name": "model.norm.weight", "truncate_size": 2}),
    "/update_weight_version": ("POST", {"new_version": "2"}), "/release_memory_occupation": ("GET POST", {}),
    "/resume_memory_occupation": ("GET POST", {"tags": ["weights"]}), "/weights_checker": ("POST", {}),
    "/start_profile": ("POST", {"num_steps": "3"}), "/stop_profile": ("POST", {}), "/v1/loads": ("GET", None),
    "/get_load": ("GET", None), "/get_weight_version": ("GET", None), "/weight_version": ("GET", None),
    "/freeze_gc": ("GET POST", {}), "/metrics": ("GET", None), "/post_process_weights": ("POST", {}),
    "/pull_weights": ("POST", {"source_dir": "/s", "local_checkpoint_dir": "/l", "target_version": 3}),
    "/parallelism_config": ("GET", None), "/update_weights_from_ipc": ("POST", {"zmq_handles": {}}),
    "/open_session": ("POST", {}), "/close_session": ("POST", {}), "/load_lora_adapter": ("POST", {}),
    "/set_internal_state": ("POST", {}), "/slow_down": ("POST", {}), "/configure_logging": ("POST", {}),
    "/v1/models": ("GET", None), "/generate": ("POST PUT", IDS), "/tokenize": ("POST", {"prompt": "a"}),
    "/detokenize": ("POST", {"tokens": [5]}), "/v1/completions": ("POST", {"prompt": "a", "max_tokens": 1}),
    "/v1/chat/completions": ("POST", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
}  # fmt: skip

METHODS = {
    "generate": ["prompt", "sampling_params", "input_ids", "image_data", "return_logprob", "logprob_start_len",
                 "top_logprobs_num", "token_ids_logprob", "return_routed_experts", "routed_experts_start_len",
                 "stream"],
    "async_generate": ["prompt", "sampling_params", "input_ids", "return_logprob", "stream"],
    "update_weights_from_disk": ["model_path", "load_format"], "get_weights_by_name": ["name", "truncate_size"],
    "begin_weight_update": ["selector"], "end_weight_update": [], "flush_cache": [],
    "release_memory_occupation": ["tags"], "resume_memory_occupation": ["tags"], "get_server_info": [],
    "get_model_info": [], "start_profile": [], "stop_profile": [], "freeze_gc": [], "shutdown": [],
    "collective_rpc": ["method"], "pause_generation": ["mode"], "continue_generation": [], "abort_request": ["rid"],
    "__enter__": [], "__exit__": [],
}  # fmt: skip

# flag -> value at which the contract's clients send it ("" for a switch); each must be understood
FLAGS = [
    "model_path=m", "tokenizer_path=m", "load_format=auto", "load_format=safetensors", "load_format=dummy",
    "dtype=auto", "quantization=none", "kv_cache_dtype=auto", "context_length=64", "trust_remote_code",
    "json_model_override_args={}", "skip_tokenizer_init", "host=127.0.0.1", "port=30000",
    "skip_server_warmup", "served_model_name=x", "weight_version=default", "api_key=x", "admin_api_key=x",
    "chat_template=none", "tool_call_parser=qwen25", "reasoning_parser=qwen3", "sampling_defaults=model",
    "allow_auto_truncate", "stream_interval=1", "incremental_streaming_output",
    "stream_response_default_include_usage", "enable_cache_report", "mem_fraction_static=0.8",
    "max_running_requests=8", "max_queued_requests=8", "max_total_tokens=99", "chunked_prefill_size=-1",
    "max_prefill_tokens=16384", "page_size=1", "schedule_policy=fcfs", "schedule_conservativeness=1.0",
    "disable_radix_cache", "disable_overlap_schedule", "enable_priority_scheduling", "tp_size=1", "tp=1",
    "tensor_parallel_size=1", "dp_size=1", "dp=1", "data_parallel_size=1", "ep_size=1", "ep=1",
    "expert_parallel_size=1", "moe_a2a_backend=none", "deepep_mode=auto", "disable_shared_experts_fusion",
    "moe_runner_backend=auto", "moe_runner_backend=triton", "attention_backend=fa3", "sampling_backend=flashinfer",
    "grammar_backend=xgrammar", "disable_cuda_graph", "cuda_graph_max_bs=8", "cuda_graph_bs=1",
    "cuda_graph_max_bs_decode=8", "cuda_graph_bs_decode=1", "disable_custom_all_reduce", "nnodes=1", "node_rank=0",
    "dist_init_addr=127.0.0.1:5", "nccl_init_addr=127.0.0.1:5", "nccl_port=5", "dist_timeout=5", "base_gpu_id=0",
    "gpu_id_step=1", "random_seed=1", "enable_fp32_lm_head", "enable_return_routed_experts", "enable_memory_saver",
    "enable_weights_cpu_backup", "enable_draft_weights_cpu_backup", "enable_metrics", "decode_log_interval=40",
    "log_level=info", "log_level_http=warning", "log_requests", "log_requests_level=2", "watchdog_timeout=300",
    "enable_deterministic_inference", "revision=main", "enable_mixed_chunk", "enable_torch_compile",
]  # fmt: skip
# parsers that the contract names, each taken by its flag
TOOL_PARSERS = [
    "qwen",
    "qwen25",
    "qwen3_coder",
    "deepseekv3",
    "deepseekv31",
    "deepseekv32",
    "deepseekv4",
    "glm45",
    "glm47",
    "kimi_k2",
    "kimi_k3",
    "gpt-oss",
    "minimax-m2",
    "minimax-m3",
    "step3",
    "step3p5",
    "mimo",
    "hunyuan",
    "ling3",
    "hermes",
    "auto",
    "llama3",
    "mistral",
]
REASONING_PARSERS = [
    "deepseek-r1",
    "deepseek-v3",
    "glm45",
    "gpt-oss",
    "kimi",
    "kimi_k2",
    "kimi_k3",
    "qwen3",
    "qwen3-thinking",
    "minimax",
    "minimax-append-think",
    "minimax-m3",
    "step3",
    "mistral",
    "nemotron_3",
    "mimo",
    "interns1",
    "gemma4",
]
FLAGS += [f"tool_call_parser={name}" for name in TOOL_PARSERS]
FLAGS += [f"reasoning_parser={name}" for name in REASONING_PARSERS]
# these change results and are refused by name: refused is understood
REFUSED_FLAGS = ["quantization=fp8", "kv_cache_dtype=fp8_e4m3", "tp_size=2", "dp_size=2", "enable_dp_attention",
                 "nnodes=2"]  # fmt: skip


async def replies_are(bodies):
    """Each (body, status) gets its status; a refusal comes before the engine hears of it."""
    async with serving() as (client, fake, _):
        for body, status in bodies:
            seen = len(fake.seen)
            reply = await client.post("/generate", json=body)
            assert reply.status_code == status, (body, reply.text)
            assert status == 200 or len(fake.seen) == seen, body


@pytest.mark.parametrize("name", GENERATE)
async def test_a_field_of_generate(name):
    beside, good, bad = GENERATE[name]
    null = ONE | (TEXT if name == "input_ids" else IDS) | beside | {name: None}
    taken, refused = ([ONE | beside | {name: value} for value in values] for values in (good, bad))
    await replies_are([(null, 200), *((body, 200) for body in taken), *((body, 400) for body in refused)])


@pytest.mark.parametrize("name", SAMPLING)
async def test_a_sampling_parameter(name):
    beside, good, bad = SAMPLING[name]
    given = [(value, 200) for value in (None, *good)] + [(value, 400) for value in bad]
    params = [({"max_new_tokens": 4, **beside, name: value}, status) for value, status in given]
    await replies_are([(TEXT | {"sampling_params": p}, status) for p, status in params])


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_an_endpoint(path):
    methods, body = ENDPOINTS[path]
    want = 501 if path in control.NOT_BUILT else 200
    for method in methods.split():
        async with serving(enable_metrics=True) as (client, _, _):
            sent = {"json": body} if body is not None and method != "GET" else {}
            assert (await client.request(method, path, **sent)).status_code == want, method


@pytest.mark.parametrize("name", METHODS)
def test_a_method_of_the_engine(name):
    parameters = inspect.signature(getattr(Engine, name)).parameters
    lacking = set(METHODS[name]) - set(parameters)
    assert not lacking or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag(flag):
    name, _, value = flag.partition("=")
    argv = ["--" + name.replace("_", "-"), *([value] if value else [])]
    if value == "none" and name == "chat_template":
        argv = []  # there is no word for null on a command line: leaving it out is the default
    parse([*([] if name == "model_path" else ["m"]), *argv])


@pytest.mark.parametrize("flag", REFUSED_FLAGS)
def test_a_flag_that_would_change_results_is_refused_by_name(flag):
    name, _, value = flag.partition("=")
    with pytest.raises(UserError, match=name.replace("_", "[-_]")):
        parse(["m", "--" + name.replace("_", "-"), *([value] if value else [])])


def test_the_tests_that_the_rows_name_are_there():
    found = set()
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
                found.add(f"{path.relative_to(TESTS).with_suffix('')}::{node.name}".removeprefix("test_"))
    assert all(tests for section in ROWS.values() for tests in section.values())
    named = {test for section in ROWS.values() for tests in section.values() for test in tests}
    assert not named - found, f"named, not there: {sorted(named - found)}"
