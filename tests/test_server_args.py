"""Flags: generated from the configurations, other engines' names understood, everything else refused by name."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from tracklayer.config import EngineConfig
from tracklayer.engine.flags import ALIASES, LACKING, WITHOUT_EFFECT
from tracklayer.errors import UserError
from tracklayer.server.args import FIELDS, parse, usage
from tracklayer.server.config import ServerConfig
from tracklayer.server.launch import main


def test_both_ways_to_name_the_model_and_types_follow_the_fields():
    for argv in (["m", "--port", "5"], ["--model-path", "m", "--port=5"], ["--model", "m", "--port", "5"]):
        launch = parse(argv)
        assert launch.engine.model_path == "m" and launch.server.port == 5 and launch.warnings == []
    launch = parse(["m", "--mem-fraction-static", "0.5", "--disable-radix-cache", "--max-total-tokens", "9"])
    assert launch.engine == EngineConfig(
        model_path="m", mem_fraction_static=0.5, disable_radix_cache=True, max_total_tokens=9
    )


def test_switches_take_an_optional_word():
    assert parse(["m", "--enable-metrics", "--port", "1"]).server.enable_metrics
    assert not parse(["m", "--enable-metrics", "false"]).server.enable_metrics
    assert not parse(["m", "--enable-metrics", "--no-enable-metrics"]).server.enable_metrics


def test_vllm_and_sglang_names():
    words = "--tensor-parallel-size 1 --gpu-memory-utilization 0.9 --max-model-len 64 --seed 3 --max-num-seqs 7"
    launch = parse(["m", *words.split(), "--enforce-eager", "--no-enable-prefix-caching"])
    want = EngineConfig(
        model_path="m", tp_size=1, mem_fraction_static=0.9, context_length=64, random_seed=3, disable_cuda_graph=True,
        disable_radix_cache=True, max_running_requests=7,
    )  # fmt: skip
    assert launch.engine == want


def test_flags_without_meaning_warn_once_each_and_swallow_their_values():
    argv = ["m", "--attention-backend", "fa3", "--cuda-graph-bs", "1", "2", "4", "--enable-mixed-chunk", "--port", "7"]
    launch = parse(argv)
    assert launch.server.port == 7
    assert [w.split()[0] for w in launch.warnings] == ["--attention-backend", "--cuda-graph-bs", "--enable-mixed-chunk"]


def test_flags_that_ask_for_what_is_so_or_can_not_be_say_which():
    launch = parse(["m", "--enable-deterministic-inference", "--revision", "main"])
    assert ["is not promised" in launch.warnings[0], "a directory" in launch.warnings[1]] == [True, True]
    assert len(launch.warnings) == 2


def test_what_we_lack_passes_only_at_its_default():
    launch = parse(["m", "--dp-size", "1", "--quantization", "none", "--kv-cache-dtype", "auto", "--nnodes", "1"])
    assert launch.warnings == []
    for argv in (["--dp-size", "2"], ["--quantization", "fp8"], ["--enable-dp-attention"], ["--node-rank", "3"]):
        with pytest.raises(UserError, match=f"{argv[0]}.*not available"):
            parse(["m", *argv])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["m", "--enable-return-routed-expert"], "did you mean --enable-return-routed-experts"),
        (["m", "--prot", "1"], "did you mean --port"),
        (["m", "--zzzzzzzz"], "--help"),
        (["m", "stray"], "stray"),
        (["m", "--port"], "--port needs a value"),
        (["m", "--port", "x"], "--port must be an integer"),
        (["m", "--port", "99999"], "port must be in"),
        (["m", "--mem-fraction-static", "7"], "mem_fraction_static"),
        (["m", "--load-format", "gguf"], "load_format"),
        (["m", "--log-level", "loud"], "log_level"),
        (["m", "--preferred-sampling-params", "["], "preferred_sampling_params"),
        (["m", "--weight-paths", "/no/such/dir"], "weight_paths"),
        ([], "which model"),
    ],
)
def test_bad_flags_are_named(argv, message):
    with pytest.raises(UserError, match=message):
        parse(argv)


def test_config_file_lies_under_the_command_line(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("model-path: m\nport: 5\nenable-metrics: true\nattention_backend: fa3\n")
    launch = parse(["--config", str(file), "--port", "6"])
    assert (launch.engine.model_path, launch.server.port, launch.server.enable_metrics) == ("m", 6, True)
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"modelpath": "m"}))
    with pytest.raises(UserError, match="did you mean --model-path"):
        parse(["--config", str(file)])
    with pytest.raises(UserError, match="not a file"):
        parse(["--config", "nowhere.yaml"])


def test_help_lists_every_flag_and_no_name_is_claimed_twice(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert text.strip() == usage().strip()
    for name in FIELDS:
        assert f"--{name.replace('_', '-')}" in text
    assert len(FIELDS) == len(fields(EngineConfig)) + len(fields(ServerConfig))


def test_wrong_flags_and_models_end_with_status_2(capsys, tmp_path):
    assert main(["m", "--prot", "1"]) == 2 and "did you mean --port" in capsys.readouterr().err
    assert main([str(tmp_path), "--port", "0"]) == 2
    assert "error: " in capsys.readouterr().err


def test_the_documentation_lists_every_flag():
    text = (Path(__file__).parent.parent / "docs" / "server.md").read_text()
    missing = [name for name in (*FIELDS, *WITHOUT_EFFECT, *LACKING, *ALIASES) if dashes(name) not in text]
    assert not missing


def dashes(name):
    return f"`--{name.replace('_', '-')}`"


@pytest.mark.parametrize(("name", "content"), [("c.yaml", b"a: ["), ("c.yaml", b"\xff\xfe"), ("c.json", b"{")])
def test_a_config_file_that_can_not_be_read_is_named(capsys, tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert main(["m", "--config", str(tmp_path / name)]) == 2
    assert name in capsys.readouterr().err


def test_a_path_that_is_no_checkpoint_is_called_so(capsys, tmp_path):
    assert main([str(tmp_path / "nowhere"), "--port", "0"]) == 2
    assert "is not a checkpoint directory" in capsys.readouterr().err


def test_dtypes_by_their_other_names():
    for given, meant in (("half", "float16"), ("float", "float32"), ("bf16", "bfloat16"), ("auto", "auto")):
        assert parse(["m", "--dtype", given]).engine.dtype == meant
    for wrong in ("int8", ["half"], None):
        with pytest.raises(UserError, match="dtype"):
            EngineConfig(model_path="m", dtype=wrong)
    assert parse(["m", "--log-requests-format", "json"]).server.log_format == "json"
