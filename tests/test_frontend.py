"""TextFrontend over a fake engine: cuts, batches, ids, errors, aborts, streams."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_fakes import FakeEngine, byte_level_tokenizer, fixed_script, info, logprob, route_rows

from tracklayer.engine.frontend import TextFrontend
from tracklayer.engine.intake import GenerateCall, Intake, sample_seed
from tracklayer.engine.limits import NO_LIMITS, Limits
from tracklayer.engine.reply import Shown, reply
from tracklayer.engine.sampling import SamplingFieldError
from tracklayer.errors import CapacityError, IncompleteRoutes, TracklayerError, UserError
from tracklayer.types import FinishReason

TOKENIZER = byte_level_tokenizer()
VOCAB = 400


@contextlib.asynccontextmanager
async def front(script=None, *, tokenizer=TOKENIZER, facts=None, limits=NO_LIMITS, **engine_options):
    engine = FakeEngine(facts or info(VOCAB), *([script] if script else []), **engine_options)
    frontend = TextFrontend(engine, tokenizer, intake=Intake(engine.info, tokenizer, limits=limits))
    frontend.bind(asyncio.get_running_loop())
    try:
        yield frontend, engine
    finally:
        engine.shutdown()
        frontend.close()


def ask(prompt="The quick", **fields):
    fields.setdefault("sampling_params", {"temperature": 0, "max_new_tokens": 8})
    return GenerateCall(text=prompt, **fields) if isinstance(prompt, str) else GenerateCall(input_ids=prompt, **fields)


def script_of(text):
    return fixed_script(TOKENIZER.encode(text))


async def test_text_ids_logprobs_and_routes_agree_in_length_and_value():
    async with front() as (frontend, _):
        call = ask(
            return_logprob=True, logprob_start_len=1, top_logprobs_num=3, token_ids_logprob=[5, 7],
            return_routed_experts=True, return_prompt_token_ids=True,
        )  # fmt: skip
        (sample,) = await frontend.generate(call)
    prompt, out = sample.request.input_ids, sample.output_ids
    assert len(out) == 8 and TOKENIZER.decode([*prompt, *out]) == TOKENIZER.decode(prompt) + sample.text
    answer = reply(sample, "default", prompt_ids=True)
    meta = answer["meta_info"]
    assert answer["prompt_token_ids"] == prompt and answer["output_ids"] == out
    want = [[logprob(t, len(prompt) + i), t, None] for i, t in enumerate(out)]
    np.testing.assert_allclose([w[0] for w in want], [w[0] for w in meta["output_token_logprobs"]], rtol=1e-6)
    assert [t[1:] for t in meta["output_token_logprobs"]] == [w[1:] for w in want]
    assert meta["input_token_logprobs"][0] == [None, prompt[1], None]
    assert len(meta["input_token_logprobs"]) == len(prompt) - 1 == len(meta["input_top_logprobs"])
    assert meta["input_top_logprobs"][0] is None and meta["input_token_ids_logprobs"][0] is None
    assert [t[1] for t in meta["output_top_logprobs"][0]] == [0, 1, 2]
    assert meta["output_token_ids_logprobs"][7] == [[-5.0, 5, None], [-7.0, 7, None]]
    np.testing.assert_array_equal(meta["routed_experts"].experts_TLK, route_rows([*prompt, *out[:-1]]))
    assert meta["finish_reason"] == {"type": "length", "length": 8} and meta["completion_tokens"] == 8
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 8}]


@pytest.mark.parametrize("surplus", [0, 3])
@pytest.mark.parametrize("per_step", [1, 5])
@given(
    text=st.text(alphabet="Paris. fox", min_size=1, max_size=24),
    stops=st.lists(st.text(alphabet="Paris. fox", min_size=1, max_size=5), min_size=1, max_size=3),
    trim=st.booleans(),
    low=st.integers(0, 4),
)
@settings(max_examples=12, deadline=None)
def test_stop_strings_cut_at_the_token_that_completes_them(surplus, per_step, text, stops, trim, low):
    """Against a naive search over whole decoded prefixes; ids, log-probabilities and routes end there too."""
    tokens = TOKENIZER.encode(text + " end")
    params = {"max_new_tokens": len(tokens), "stop": stops, "no_stop_trim": not trim, "min_new_tokens": low}

    async def run():
        async with front(fixed_script(tokens), surplus=surplus, tokens_per_step=per_step) as (frontend, engine):
            call = ask([1, 2, 3], sampling_params=params, return_logprob=True, return_routed_experts=True)
            return (await frontend.generate(call))[0], engine

    if low > len(tokens):
        return
    sample, engine = asyncio.run(run())
    expect, whole, seen = len(tokens), TOKENIZER.decode(tokens), 0
    reason = FinishReason("length", length=len(tokens))
    for count in range(1, len(tokens) + 1):
        so_far = TOKENIZER.decode(tokens[:count])
        fresh = [(so_far.find(s, max(0, seen - len(s) + 1)), s) for s in stops]
        hits = [(at, s) for at, s in fresh if at >= 0]
        seen = len(so_far)
        if hits and count >= low:
            expect, at = count, min(hits, key=lambda h: h[0])
            reason, whole = FinishReason("stop", matched=at[1]), so_far[: at[0]] if trim else so_far
            break
    assert (sample.output_ids, sample.text) == (tokens[:expect], whole)
    assert sample.finish.type == reason.type and (reason.matched is None or sample.finish.matched in stops)
    assert len(sample.output_logprobs) == expect and len(sample.routes) == 3 + expect - 1
    assert sample.weight_spans == [("default", 0, expect)]
    if engine.finished:
        assert engine.finished == [(sample.rid, expect)]


async def test_stop_token_is_hidden_from_text_but_not_from_ids():
    end = TOKENIZER.special_tokens["<|im_end|>"]
    tokens = [*TOKENIZER.encode("Paris."), end]
    for keep, text in ((False, "Paris."), (True, "Paris.<|im_end|>")):
        params = {"no_stop_trim": keep, "skip_special_tokens": False}
        async with front(fixed_script(tokens)) as (frontend, _):
            (sample,) = await frontend.generate(ask(sampling_params=params))
        assert sample.output_ids == tokens and sample.text == text and sample.finish.matched == end


async def test_ignore_eos_runs_on_and_a_special_token_as_stop_string_is_found_by_id():
    end, start = TOKENIZER.special_tokens["<|im_end|>"], TOKENIZER.special_tokens["<|im_start|>"]
    tokens = [70, end, 71, start, 72]
    async with front(fixed_script(tokens)) as (frontend, _):
        params = {"ignore_eos": True, "stop": ["<|im_start|>"], "stop_token_ids": [70], "max_new_tokens": 9}
        (sample,) = await frontend.generate(ask(sampling_params=params))
    assert sample.output_ids == tokens[:4] and sample.finish.matched == "<|im_start|>"
    assert sample.text == TOKENIZER.decode([70, 71])


async def test_stop_regex_wins_over_length_and_is_named():
    async with front(script_of("the answer is 42 and more")) as (frontend, _):
        (sample,) = await frontend.generate(ask(sampling_params={"stop_regex": r"\d+", "max_new_tokens": 40}))
    assert sample.text == "the answer is " and sample.finish.matched == r"\d+"


async def test_streams_are_cumulative_never_show_a_stop_and_end_once():
    async with front(script_of("Paris.\n\nUser: x"), step_s=0.002) as (frontend, _):
        texts, ends = [], 0
        call = ask(sampling_params={"stop": ["\n\nUser:"], "max_new_tokens": 60}, stream=True)
        async for sample in frontend.stream(call):
            texts.append(sample.text)
            ends += sample.finish is not None
    assert texts[-1] == "Paris." and ends == 1 and len(texts) > 3
    assert all(b.startswith(a) for a, b in itertools.pairwise(texts))


async def test_incremental_deltas_join_to_the_whole():
    async with front(step_s=0.001) as (frontend, _):
        shown, ids, text, logprobs = Shown(), [], "", []
        async for sample in frontend.stream(ask(return_logprob=True, stream=True)):
            chunk = reply(sample, "default", shown=shown)
            ids += chunk["output_ids"]
            text += chunk["text"]
            logprobs += chunk["meta_info"]["output_token_logprobs"]
    assert ids == sample.output_ids and text == sample.text and len(logprobs) == 8


async def test_stream_interval_thins_chunks_but_not_the_last():
    async with front(step_s=0.001) as (frontend, _):
        params = {"max_new_tokens": 20, "stream_interval": 8}
        counts = [len(s.output_ids) async for s in frontend.stream(ask(sampling_params=params, stream=True))]
    assert counts[-1] == 20 and len(counts) <= 4


async def test_slow_reader_skips_chunks_and_misses_nothing():
    async with front() as (frontend, _):
        counts = []
        async for sample in frontend.stream(ask(sampling_params={"max_new_tokens": 300}, stream=True)):
            counts.append(len(sample.output_ids))
            await asyncio.sleep(0.02)
    assert counts[-1] == 300 and len(counts) < 100


async def test_batch_order_rids_and_samples():
    async with front() as (frontend, engine):
        params = {"n": 2, "max_new_tokens": 3, "sampling_seed": 5}
        call = GenerateCall(text=["a b", "c"], sampling_params=params, rid="r")
        samples = await frontend.generate(call)
    assert [s.rid for s in samples] == ["r_0-0", "r_0-1", "r_1-0", "r_1-1"]
    assert [s.index for s in samples] == [0, 1, 2, 3]
    seeds = {r.rid: r.seed for r in engine.seen}
    assert seeds["r_0-0"] == 5 and seeds["r_0-1"] == seeds["r_1-1"] != 5
    assert samples[0].output_ids != samples[1].output_ids


def test_sample_seeds_are_distinct_and_fit_int64():
    seeds = {sample_seed(base, k) for base in (-1 << 63, -1, 0, 1, (1 << 63) - 1) for k in range(64)}
    assert len(seeds) > 5 * 62 and all(-(1 << 63) <= s < 1 << 63 for s in seeds)


BAD = [
    (dict(), "Either text"),
    (dict(text="a", input_ids=[1]), "Either text"),
    (dict(input_ids=[]), "empty"),
    (dict(text=""), "empty"),
    (dict(text=[]), "empty"),
    (dict(input_ids=[[1], []]), "empty"),
    (dict(input_ids=[1, -1]), "token id -1"),
    (dict(input_ids=[1, VOCAB]), f"token id {VOCAB}"),
    (dict(input_ids=[1 << 70]), "outside the vocabulary"),
    (dict(input_ids=[1] * 512), "context length"),
    (dict(input_ids=[1] * 500, sampling_params={"max_new_tokens": 13}), "= 513"),
    (dict(input_ids=[1], sampling_params={"stop_token_ids": [VOCAB]}), "stop_token_ids"),
    (dict(input_ids=[1], sampling_params={"logit_bias": {"9999": 1.0}}), "logit_bias"),
    (dict(input_ids=[1], sampling_params={"temperature": float("nan")}), "temperature"),
    (dict(input_ids=[1], sampling_params={"temperature": -1}), "temperature"),
    (dict(input_ids=[1], sampling_params={"top_k": 0}), "top_k"),
    (dict(input_ids=[1], sampling_params={"stop": [""]}), "empty string"),
    (dict(input_ids=[1], sampling_params={"stop": ["x"] * 33}), "32"),
    (dict(input_ids=[1], sampling_params={"stop_regex": "("}), "regular expression"),
    (dict(input_ids=[1], sampling_params={"json_schema": "[" * 101}), "json_schema nests 101"),
    (dict(input_ids=[1], sampling_params={"beam_width": 2}), "beam_width"),
    (dict(input_ids=[1], sampling_params=[{}, {}]), "2 entries for 1"),
    (dict(input_ids=[[1], [1]], sampling_params=[{"n": 1}, {"n": 2}]), "share n"),
    (dict(input_ids=[1], sampling_params={"n": 9}), r"\(n\) .* at most 8"),
    (dict(input_ids=[1], logprob_start_len=2), "logprob_start_len"),
    (dict(input_ids=[1], logprob_start_len=-2), "logprob_start_len"),
    (dict(input_ids=[1], top_logprobs_num=-1), "top_logprobs_num"),
    (dict(input_ids=[1], token_ids_logprob=[VOCAB]), "token_ids_logprob"),
    (dict(input_ids=[1], return_routed_experts=True, routed_experts_start_len=2), "is higher than the number of input"),
    (dict(input_ids=[1], return_routed_experts=True, routed_experts_start_len=-1), "routed_experts_start_len"),
    (dict(input_ids=[[1], [1]], rid=["a"]), "1 entries for 2"),
    (dict(input_ids=[[1], [1]], rid=["a", "a"]), "Duplicate request ID"),
    (dict(input_ids=[[1], [1]], return_logprob=[True, False], sampling_params={"n": 2}), "not a list"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=lambda v: str(v)[:40])
async def test_what_can_never_succeed_is_refused_before_the_engine(fields, message):
    async with front(limits=Limits(max_samples=8)) as (frontend, engine):
        with pytest.raises(UserError, match=message):
            await frontend.generate(GenerateCall(**fields))
        assert not engine.seen and frontend.num_running == 0


@pytest.mark.parametrize("params", [{"temp": 1}, {"stop": 5}, {"n": "2"}, {"top_p": True}, {"logit_bias": {"x": 1}}, 7])
async def test_wrong_names_and_types_in_sampling_params_have_their_own_error(params):
    async with front() as (frontend, _):
        with pytest.raises(SamplingFieldError):
            await frontend.generate(ask(sampling_params=params))


async def test_null_means_default_and_open_length_runs_to_the_end_of_the_context():
    async with front() as (frontend, engine):
        params = {"temperature": None, "stop": None, "stop_token_ids": None, "top_k": None, "max_new_tokens": None}
        (sample,) = await frontend.generate(ask([9] * 500, sampling_params=params))
        (default,) = await frontend.generate(ask([9], sampling_params=None))
    assert len(sample.output_ids) == 12 and len(default.output_ids) == 128
    assert engine.seen[0].sampling.temperature == 1.0


async def test_recording_off_names_the_flag():
    async with front(facts=info(VOCAB, recording=False)) as (frontend, _):
        with pytest.raises(UserError, match="--enable-return-routed-experts"):
            await frontend.generate(ask(return_routed_experts=True))


async def test_without_tokenizer_ids_work_and_text_does_not():
    async with front(tokenizer=None) as (frontend, _):
        (sample,) = await frontend.generate(ask([1, 2]))
        assert sample.text is None and "text" not in reply(sample, "default")
        for bad in (ask("hi"), ask([1], sampling_params={"stop": "x"})):
            with pytest.raises(UserError, match="tokenizer"):
                await frontend.generate(bad)


async def test_routes_start_anywhere_up_to_the_prompts_end():
    async with front() as (frontend, _):
        for start in (0, 2, 4):
            call = ask([5, 6, 7, 8], return_routed_experts=True, routed_experts_start_len=start)
            (sample,) = await frontend.generate(call)
            fed = [5, 6, 7, 8, *sample.output_ids[:-1]]
            np.testing.assert_array_equal(sample.routes.experts_TLK, route_rows(fed)[start:])
            assert sample.routes.start == start
        for last in (False, True):
            params = {"max_new_tokens": 0}
            call = ask([5, 6, 7], sampling_params=params, return_routed_experts=True, include_last=last)
            (sample,) = await frontend.generate(call)
            assert len(sample.routes) == 2 + last and sample.output_ids == []


async def test_missing_rows_are_an_error_not_data(monkeypatch):
    """Too few rows are refused here; rows that were never written are refused where they are gathered (the engine)."""
    async with front() as (frontend, engine):
        whole = engine._output
        monkeypatch.setattr(engine, "_output", lambda live, f: _spoil(whole(live, f), lambda rows: rows[:-1]))
        with pytest.raises(IncompleteRoutes):
            await frontend.generate(ask([5, 6, 7], return_routed_experts=True))
        assert frontend.num_running == 0


def _spoil(output, change):
    if output.routes is not None:
        output.routes = change(output.routes)
    return output


async def test_abort_by_prefix_gives_partial_output_and_everything_asked():
    async with front(step_s=0.002) as (frontend, _):
        calls = [ask([1, 2], rid=f"job-{i}", sampling_params={"max_new_tokens": 400}, return_logprob=True,
                     return_routed_experts=True) for i in range(3)]  # fmt: skip
        tasks = [asyncio.create_task(frontend.generate(c)) for c in calls]
        await asyncio.sleep(0.05)
        frontend.abort("")
        frontend.abort("nobody")
        assert frontend.num_running == 3
        frontend.abort("job-")
        for task in tasks:
            (sample,) = await asyncio.wait_for(task, 5)
            count = len(sample.output_ids)
            assert sample.finish.type == "abort" and 0 < count < 400
            assert len(sample.output_logprobs) == count and len(sample.routes) == 2 + count - 1


async def test_cancelled_reader_aborts_its_requests():
    async with front(step_s=0.002) as (frontend, engine):
        call = GenerateCall(input_ids=[[1], [2]], sampling_params={"max_new_tokens": 400})
        task = asyncio.create_task(frontend.generate(call))
        await asyncio.sleep(0.03)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stream = frontend.stream(call)
        await anext(stream)
        await stream.aclose()
        for _ in range(100):
            if frontend.num_running == 0:
                break
            await asyncio.sleep(0.01)
        assert frontend.num_running == 0 and len(engine.aborted) == 4 and not engine.live


async def test_running_rid_is_refused_and_free_again_afterwards():
    async with front(step_s=0.002) as (frontend, _):
        task = asyncio.create_task(frontend.generate(ask(rid="x", sampling_params={"max_new_tokens": 20})))
        await asyncio.sleep(0.01)
        with pytest.raises(UserError, match="Duplicate request ID"):
            await frontend.generate(ask(rid="x"))
        await task
        await frontend.generate(ask(rid="x"))


@pytest.mark.parametrize(("status", "kind"), [(400, UserError), (503, CapacityError), (500, TracklayerError)])
async def test_refusal_by_the_scheduler_fails_the_batch_or_ends_the_stream(status, kind):
    async with front(step_s=0.002) as (frontend, engine):
        engine.refuse["b"] = FinishReason("abort", message="no room", status=status)
        call = GenerateCall(input_ids=[[1], [2]], rid=["a", "b"], sampling_params={"max_new_tokens": 200})
        with pytest.raises(kind, match="no room") as caught:
            await frontend.generate(call)
        assert caught.value.status == status
        (sample,) = [s async for s in frontend.stream(GenerateCall(input_ids=[1], rid="b1", stream=True))]
        assert reply(sample, "v")["meta_info"]["finish_reason"]["status_code"] == status


async def test_fault_in_one_sample_is_an_error_for_it_alone(monkeypatch):
    reported = []
    async with front(step_s=0.002) as (frontend, engine):
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
        good = asyncio.create_task(frontend.generate(ask([1])))
        bad = asyncio.create_task(frontend.generate(ask([2], rid="bad")))
        await asyncio.sleep(0.005)
        monkeypatch.setattr(frontend._samples["bad"][0], "_add_tokens", lambda *a: 1 / 0)
        with pytest.raises(TracklayerError, match="ZeroDivisionError"):
            await bad
        assert (await good)[0].finish.type == "length" and reported
        assert engine.aborted == ["bad"]


async def test_dead_engine_refuses_and_fails_what_runs():
    async with front(step_s=0.01) as (frontend, engine):
        task = asyncio.create_task(frontend.generate(ask(sampling_params={"max_new_tokens": 400})))
        await asyncio.sleep(0.03)
        engine.die()
        frontend.fail_all("the engine stopped")
        with pytest.raises(TracklayerError, match="engine stopped"):
            await task
        with pytest.raises(CapacityError):
            await frontend.generate(ask())
        assert frontend.num_running == 0


async def test_long_prompts_are_tokenised_off_the_loop():
    facts = info(VOCAB, context_length=1 << 20, max_request_tokens=1 << 20)
    async with front(facts=facts) as (frontend, _):
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.002)
                ticks += 1

        ticker = asyncio.create_task(tick())
        (sample,) = await frontend.generate(ask("The quick brown fox. " * 20000))
        ticker.cancel()
    assert sample.prompt_tokens > 50000 and ticks > 5
