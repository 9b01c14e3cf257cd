"""Streams written by the callback that brings news: order, clients that do not read, that break, that go; errors."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tracklayer.engine.frontend import Running
from tracklayer.engine.wire import Wire, news_of, outputs_of
from tracklayer.errors import UserError
from tracklayer.server.push import RAW_SEND, EventStream
from tracklayer.types import FinishReason, RequestOutput, TokenLogprobs


@dataclass
class Growing:
    """What a stream needs of a Sample."""

    index: int = 0
    output_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None


class Frontend:
    def __init__(self) -> None:
        self.left: list[Running] = []

    def leave(self, running: Running) -> None:
        self.left.append(running)


class Client:
    """The other end: `paused`, its sends wait for `read_on`; `broken`, they fail."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.paused = self.broken = False
        self.gone = asyncio.Event()
        self.reads = asyncio.Event()

    async def send(self, message: dict[str, Any]) -> None:
        if self.broken:
            raise OSError("broken pipe")
        if self.paused:
            await self.reads.wait()
        self.got.append(message)

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    def read_on(self) -> None:
        self.paused = False
        self.reads.set()

    @property
    def bodies(self) -> list[bytes]:
        return [m["body"] for m in self.got if m["type"] == "http.response.body"]


class Told:
    def __init__(self, make) -> None:
        self.news = make

    def closing(self) -> bytes:
        return b"end"


class Stream:
    """An EventStream of `count` samples, and what stands around it."""

    def __init__(self, count: int = 1, make=None) -> None:
        self.frontend, self.client = Frontend(), Client()
        self.samples = [Growing(i) for i in range(count)]
        self.running = Running(self.samples, interval=1)
        make = make or (lambda s: b"%d:%d" % (s.index, len(s.output_ids)))
        response = EventStream(self.frontend, self.running, Told(make), "/generate")
        scope = {"type": "http", RAW_SEND: self.client.send}
        self.task = asyncio.ensure_future(response(scope, self.client.receive, self.client.send))

    def grow(self, index: int = 0, *, end: bool = False) -> None:
        sample = self.samples[index]
        sample.output_ids.append(1)
        sample.finish = FinishReason("length", length=1) if end else None
        self.running.progressed(sample)

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


async def test_chunks_are_written_before_the_news_callback_returns():
    stream = Stream(2)
    await stream.settle()
    stream.grow(0)
    stream.grow(1)
    stream.grow(0)
    assert stream.client.bodies == [b"0:1", b"1:1", b"0:2"]
    stream.grow(1, end=True)
    stream.grow(0, end=True)
    await stream.task
    assert stream.client.bodies == [b"0:1", b"1:1", b"0:2", b"1:2", b"0:3", b"enddata: [DONE]\n\n"]
    assert [m.get("more_body") for m in stream.client.got] == [None, True, True, True, True, True, False]
    assert stream.frontend.left == [stream.running]


async def test_a_client_that_does_not_read_gets_one_chunk_of_what_came_meanwhile():
    slow, fast = Stream(2), Stream()
    await slow.settle()
    slow.client.paused = True
    for _ in range(4):
        slow.grow(0)
        slow.grow(1)
        fast.grow()
    assert fast.client.bodies == [b"0:1", b"0:2", b"0:3", b"0:4"] and slow.client.bodies == []
    slow.grow(0, end=True)
    slow.client.read_on()
    await slow.settle()
    # The chunk that waited was made when it was sent; then each sample once, as it is now.
    assert slow.client.bodies == [b"0:1", b"1:4", b"0:5"]
    slow.grow(1, end=True)
    await slow.task
    assert slow.client.bodies[3:] == [b"1:5", b"enddata: [DONE]\n\n"]
    fast.client.gone.set()
    await fast.task


async def test_the_last_message_may_wait_too():
    stream = Stream()
    await stream.settle()
    stream.client.paused = True
    stream.grow(end=True)
    await stream.settle()
    assert not stream.task.done()
    stream.client.read_on()
    await asyncio.wait_for(stream.task, 5)
    assert stream.client.bodies == [b"0:1", b"enddata: [DONE]\n\n"]


@pytest.mark.parametrize("paused", [False, True])
async def test_a_client_that_goes_ends_the_call(paused):
    stream = Stream()
    await stream.settle()
    stream.client.paused = paused
    stream.grow()
    stream.client.gone.set()
    await asyncio.wait_for(stream.task, 5)
    assert stream.frontend.left == [stream.running]
    stream.grow()
    stream.client.read_on()
    await stream.settle()
    assert stream.client.bodies == ([] if paused else [b"0:1"]), "nobody listens any more"


@pytest.mark.parametrize("paused", [False, True])
async def test_a_connection_that_breaks_under_a_send_ends_the_call(paused):
    stream = Stream()
    await stream.settle()
    stream.grow()
    stream.client.paused, stream.client.broken = paused, not paused
    stream.grow()
    if paused:
        stream.client.broken = True
        stream.client.read_on()
        stream.grow()
    await asyncio.wait_for(stream.task, 5)
    assert stream.frontend.left == [stream.running]


async def test_an_error_is_an_event_and_the_end():
    def make(sample):
        if len(sample.output_ids) == 2:
            raise UserError("no such form")
        return b"ok"

    stream = Stream(2, make)
    await stream.settle()
    for _ in range(3):
        stream.grow(0)
        stream.grow(1)
    await asyncio.wait_for(stream.task, 5)
    first, second, last = stream.client.bodies
    assert (first, second) == (b"ok", b"ok")
    assert last.startswith(b"data: ") and b"no such form" in last and last.endswith(b"data: [DONE]\n\n")


async def test_a_fault_of_ours_ends_the_stream_and_is_told():
    stream = Stream(make=lambda sample: 1 / 0)
    await stream.settle()
    with pytest.raises(ZeroDivisionError):
        stream.grow()
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(stream.task, 5)
    assert stream.frontend.left == [stream.running]


def test_news_come_back_as_they_were():
    finish = FinishReason("length", length=3)
    logprobs = TokenLogprobs(np.array([4], np.int32), np.array([-1.0], np.float32))
    outputs = [
        RequestOutput("a", [1, 2], 5, 0, queue_s=0.5),
        RequestOutput("b", [3], 7, 2, output_logprobs=logprobs),
        RequestOutput("c", [], 9, 1, finish=finish, routes=np.zeros((2, 3, 4), np.uint8), weight_spans=[("v", 0, 1)]),
        RequestOutput("d", [4], 1, 1, weight_spans=[("v", 0, 1)], num_retractions=2),
        RequestOutput("a", [6], 5, 0, finish=finish),
    ]
    rows, whole = news_of(outputs)
    assert [row[0] for row in rows] == ["a", "d"] and [output.rid for output in whole] == ["b", "c", "a"]
    wire = Wire(None)
    again = outputs_of(*wire.unpack(wire.pack((rows, whole))))
    assert [output.rid for output in again] == ["a", "d", "b", "c", "a"]
    by = {(o.rid, o.finish is None): o for o in again}
    for output in outputs:
        got = by[output.rid, output.finish is None]
        for name in ("new_token_ids", "prompt_tokens", "cached_tokens", "num_retractions", "queue_s", "finish"):
            assert getattr(got, name) == getattr(output, name), name
        assert [tuple(span) for span in got.weight_spans] == output.weight_spans
        assert type(got.new_token_ids) is list and (got.routes is None) == (output.routes is None)
