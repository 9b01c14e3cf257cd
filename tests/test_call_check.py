"""Odd values in a call: refused by name before the engine hears of them, or made plain; never the engine's death."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from engine_tools import SMALL

import tracklayer
from tracklayer.errors import UserError
from tracklayer.types import SamplingParams

GREEDY = {"temperature": 0, "max_new_tokens": 3}
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_moe")
    tiny.save("qwen3_moe", folder)
    with tracklayer.Engine(str(folder), skip_tokenizer_init=True, **SMALL) as engine:
        yield engine


@pytest.mark.parametrize(
    "given",
    [(5, 6, 7), np.array([5, 6, 7]), torch.tensor([5, 6, 7]), [np.int64(5), np.int32(6), 7]],
    ids=["tuple", "array", "tensor", "numbers"],
)
def test_token_ids_of_any_plain_kind_are_the_same_prompt(engine, given):
    plain = engine.generate(input_ids=[5, 6, 7], sampling_params=GREEDY)["output_ids"]
    assert engine.generate(input_ids=given, sampling_params=GREEDY)["output_ids"] == plain
    assert engine.generate(input_ids=[given], sampling_params=GREEDY)[0]["output_ids"] == plain


@pytest.mark.parametrize(
    ("ids", "fields", "named"),
    [
        ([1.5, 2], {}, "1.5"),
        ([True, 2], {}, "True"),
        ([None], {}, "None"),
        ("abc", {}, "abc"),
        ([[1], 2], {}, "2"),
        ([[[1]]], {}, r"\[1\]"),
        ([1], {"return_logprob": True, "top_logprobs_num": 98}, "top_logprobs_num must be at most 97"),
        ([1], {"priority": "high"}, "priority"),
        ([1], {"priority": 1 << 63}, "priority"),
        ([1], {"rid": 5}, "rid"),
        ([1], {"extra_key": 5}, "extra_key"),
        ([1], {"return_routed_experts": True, "routed_experts_start_len": 0.5}, "routed_experts_start_len"),
        ([1], {"return_routed_experts": "no"}, "return_routed_experts"),
    ],
)
def test_what_is_not_of_its_kind_is_refused_by_name(engine, ids, fields, named):
    with pytest.raises(UserError, match=named):
        engine.generate(input_ids=ids, sampling_params=GREEDY, **fields)
    assert len(engine.generate(input_ids=[1], sampling_params=GREEDY)["output_ids"]) > 0, "the engine died of it"


@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e308, "1", True])
def test_a_bias_must_fit_a_logit(engine, value):
    with pytest.raises(UserError, match="logit_bias"):
        engine.generate(input_ids=[1], sampling_params=SamplingParams(logit_bias={3: value}))


def test_a_whole_number_as_bias(engine):
    params = SamplingParams(temperature=0, max_new_tokens=2, logit_bias={3: 100})
    assert engine.generate(input_ids=[5], sampling_params=params)["output_ids"] == [3, 3]


def test_sampling_parameters_take_one_value_or_several_however_they_are_made():
    params = SamplingParams(stop="end", stop_regex=["a+"], stop_token_ids=7, logit_bias={"3": 1})
    raw = {"stop": "end", "stop_regex": "a+", "stop_token_ids": [7], "logit_bias": {3: 1.0}}
    assert params == SamplingParams.from_dict(raw)
    assert params.stop == ("end",) and params.logit_bias == ((3, 1.0),)
    assert SamplingParams(stop=None, logit_bias=None) == SamplingParams()
    with pytest.raises(UserError, match="stop must hold strings"):
        SamplingParams(stop=(5,))


def test_numbers_too_large_for_the_wire_are_refused():
    for name in ("top_k", "stream_interval"):
        with pytest.raises(UserError, match=name):
            SamplingParams(**{name: 1 << 63})


def test_keys_and_salts_that_join_alike_are_apart(engine):
    ids, cut = list(range(20)), "\x1f"
    engine.generate(input_ids=ids, sampling_params=GREEDY, extra_key=f"a{cut}b")
    other = engine.generate(input_ids=ids, sampling_params=GREEDY, extra_key="a", cache_salt=f"b{cut}")
    again = engine.generate(input_ids=ids, sampling_params=GREEDY, extra_key=f"a{cut}b")
    assert other["meta_info"]["cached_tokens"] == 0 and again["meta_info"]["cached_tokens"] == len(ids) - 1


def test_ids_of_what_could_not_be_sent_are_free_again(engine, monkeypatch):
    def broken(requests):
        raise OverflowError("can not be packed")

    with monkeypatch.context() as patch:
        patch.setattr(engine._client, "submit", broken)
        with pytest.raises(OverflowError):
            engine.generate(input_ids=[1], sampling_params=GREEDY, rid="mine")
    assert engine._frontend.num_running == 0
    assert engine.generate(input_ids=[1], sampling_params=GREEDY, rid="mine")["output_ids"]
