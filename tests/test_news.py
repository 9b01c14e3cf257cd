"""News put together are the same news: a reader who is behind sees what one who keeps up sees, and holds no backlog."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from server_fakes import FakeEngine, byte_level_tokenizer, info

from tracklayer.engine.frontend import TextFrontend
from tracklayer.engine.intake import GenerateCall
from tracklayer.engine.news import NewsBox
from tracklayer.engine.sample import Sample
from tracklayer.types import EngineRequest, FinishReason, RequestOutput, SamplingParams, TokenLogprobs

TOKENIZER = byte_level_tokenizer()
FACTS = info(400)


def logprobs(tokens, k):
    n = len(tokens)
    top = np.arange(n * k, dtype=np.int32).reshape(n, k)
    return TokenLogprobs(
        np.array(tokens, np.int32), -np.arange(1, n + 1, dtype=np.float32), top, -top.astype(np.float32)
    )


def outputs_of(rid, tokens, cuts, matched, k):
    """One request's news, cut as told; the last piece ends it."""
    bounds = sorted({0, *(c % (len(tokens) + 1) for c in cuts), len(tokens)})
    pieces = [tokens[a:b] for a, b in itertools.pairwise(bounds)] or [[]]
    found = []
    for i, piece in enumerate(pieces):
        last = i == len(pieces) - 1
        reason = (
            FinishReason("stop", matched=tokens[-1])
            if matched and tokens
            else FinishReason("length", length=len(tokens))
        )
        output = RequestOutput(rid, list(piece), 3, i, reason if last else None)
        output.weight_spans = [("v", 0, sum(map(len, pieces[: i + 1])))]
        if k and piece:
            output.output_logprobs = logprobs(piece, k)
        if k and i == 0:
            output.input_logprobs = logprobs([8, 9], k)
        found.append(output)
    return found


def shown(sample):
    return (
        sample.output_ids, sample.text, sample.finish, sample.weight_spans, sample.output_logprobs, sample.output_top,
        sample.input_logprobs, sample.cached_tokens,
    )  # fmt: skip


@given(
    tokens=st.lists(st.integers(3, 399), max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=8),
    takes=st.lists(st.booleans(), min_size=9, max_size=9),
    stop=st.sampled_from(["", "a", "er", "<|im_end|>"]),
    matched=st.booleans(),
    k=st.sampled_from([0, 2]),
)
@settings(max_examples=300, deadline=None)
def test_a_sample_does_not_see_how_its_news_were_put_together(tokens, cuts, takes, stop, matched, k):
    def sample():
        params = SamplingParams(max_new_tokens=64, stop=(stop,) if stop else ())
        request = EngineRequest(rid="r", input_ids=[7, 8, 9], sampling=params, return_logprob=k > 0, top_logprobs_num=k)
        request.logprob_start_len = 0 if k else -1
        return Sample(0, request, FACTS, TOKENIZER)

    news = outputs_of("r", tokens, cuts, matched, k)
    one, other, box = sample(), sample(), NewsBox()
    for output in news:
        one.feed(output)
    for output, take in zip(outputs_of("r", tokens, cuts, matched, k), takes, strict=False):
        box.put([output])
        if take:
            for item in box.take():
                other.feed(item)
    for item in box.take():
        other.feed(item)
    assert shown(one) == shown(other)


def test_a_box_tells_its_reader_once_and_keeps_order():
    box = NewsBox()
    a, b = RequestOutput("a", [1], 1, 0), RequestOutput("b", [2], 1, 0)
    assert box.put([a, b]) and not box.put([RequestOutput("a", [3], 1, 0)])
    assert [(o.rid, o.new_token_ids) for o in box.take()] == [("a", [1, 3]), ("b", [2])]
    assert box.take() == [] and box.put([]) is False and box.put([a])
    assert a.new_token_ids == [1], "the engine's own record was changed"


async def test_a_loop_that_is_behind_gets_one_piece_of_news_and_whole_answers():
    engine = FakeEngine(FACTS)
    frontend = TextFrontend(engine, TOKENIZER)
    frontend.bind(asyncio.get_running_loop())
    fed, feed = [], frontend._feed
    frontend._feed = lambda output, *more: (fed.append(len(output.new_token_ids)), feed(output, *more))
    task = asyncio.create_task(frontend.generate(GenerateCall(input_ids=[5], sampling_params={"max_new_tokens": 400})))
    while not engine.live and not engine.generated:
        await asyncio.sleep(0)
    while engine.generated < 400:
        time.sleep(0.01)  # the loop does nothing while the engine makes all of it
    (sample,) = await asyncio.wait_for(task, 10)
    assert len(sample.output_ids) == 400 == sum(fed) and len(fed) <= 5
    engine.shutdown()
    frontend.close()


def test_threads_lose_nothing():
    box, seen, told = NewsBox(), [], threading.Event()

    def fill():
        for i in range(20_000):
            if box.put([RequestOutput(str(i % 7), [i], 1, 0)]):
                told.set()

    thread = threading.Thread(target=fill)
    thread.start()
    while thread.is_alive() or told.is_set():
        if told.wait(0.01):
            told.clear()
            seen += [token for output in box.take() for token in output.new_token_ids]
    assert sorted(seen) == list(range(20_000))
