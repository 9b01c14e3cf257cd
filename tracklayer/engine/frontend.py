"""The text front end: calls in, cumulative Samples out, over any EngineClient. asyncio; one event loop.

The engine's thread only hands its news to the loop. Text work is done on the loop (long prompts are tokenised on a
worker thread), never on the engine's thread. Readers see the newest state: a slow one skips chunks, stalls nobody,
and holds no backlog; nor does a loop that is behind the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from tracklayer.engine.client import EngineClient
from tracklayer.engine.intake import GenerateCall, Intake, Prompt
from tracklayer.engine.news import NewsBox
from tracklayer.engine.sample import Sample
from tracklayer.engine.tokenizer import TextTokenizer
from tracklayer.errors import CapacityError, TracklayerError, UserError
from tracklayer.types import RequestOutput

INLINE_CHARACTERS = 8192  # prompts longer than this together are tokenised off the event loop


class Observer:
    """What metrics may watch. Called on the event loop; does nothing by default."""

    def submitted(self, sample: Sample) -> None: ...

    def progressed(self, sample: Sample, new_tokens: int) -> None: ...

    def finished(self, sample: Sample) -> None: ...

    def close(self) -> None: ...


class Running:
    """The samples of one call while it runs, and who waits for them."""

    def __init__(self, samples: list[Sample], interval: int) -> None:
        self.samples = samples
        self.interval = interval
        self.left = len(samples)
        self.changed: dict[int, Sample] = {}
        self._reader: asyncio.Future[None] | None = None
        self._listener: Callable[[], None] | None = None
        self._shown = [0] * len(samples)

    def progressed(self, sample: Sample) -> None:
        """Wake readers when the sample ended, began, or grew by a stream interval."""
        count, i = len(sample.output_ids), sample.index
        if sample.finish is None and self._shown[i] and count - self._shown[i] < self.interval:
            return
        if sample.finish is None and count == self._shown[i]:
            return
        self._shown[i] = count
        self.changed[i] = sample
        self.left -= sample.finish is not None
        if self._listener is not None:
            self._listener()
        elif self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Call this, on the loop, when there is something in `changed`; in place of `changes`."""
        self._listener = listener

    async def changes(self) -> list[Sample]:
        """The samples that changed since the last call, once there are any. For one reader."""
        if not self.changed:  # a bare future: an asyncio.Event costs twice as much a token
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        changed, self.changed = self.changed, {}
        return list(changed.values())


class TextFrontend:
    """Turns calls into EngineRequests and the engine's news into Samples.

    `bind` must be called on the event loop before the first call. `weight_version` is the version that the next
    request will run with.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: TextTokenizer | None,
        *,
        intake: Intake | None = None,
        weight_version: str = "default",
        observer: Observer | None = None,
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.intake = intake or Intake(client.info, tokenizer)
        self.weight_version = weight_version
        self.observer = observer or Observer()
        self._samples: dict[str, tuple[Sample, Running]] = {}
        self._news = NewsBox()
        self._workers = ThreadPoolExecutor(2, thread_name_prefix="tokenize")
        self._loop: asyncio.AbstractEventLoop | None = None

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Receive the engine's news on this loop from now on."""
        self._loop = loop
        self.client.listen(self._from_engine)

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)
        self.observer.close()

    # news from the engine

    def _from_engine(self, outputs: list[RequestOutput]) -> None:
        """On the engine's thread: hand over and return."""
        loop = self._loop
        if self._news.put(outputs) and loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._take_in(self._news.take())

    def _take_in(self, outputs: list[RequestOutput]) -> None:
        assert self._loop is not None
        for i, output in enumerate(outputs):
            known = self._samples.get(output.rid)
            if known is not None:
                try:
                    self._feed(output, *known)
                except BaseException:  # must not keep others from their news
                    self._loop.call_soon(self._take_in, outputs[i + 1 :])
                    raise

    def _feed(self, output: RequestOutput, sample: Sample, running: Running) -> None:
        if sample.finish is not None:
            if output.finish is not None:
                self._samples.pop(sample.rid, None)
            return
        before = len(sample.output_ids)
        try:
            ask = sample.feed(output)
        except TracklayerError as error:
            self._fail(sample, running, error, ended=output.finish is not None)
            return
        except Exception as error:
            wrapped = TracklayerError(f"internal error: {type(error).__name__}: {error}")
            self._fail(sample, running, wrapped, ended=output.finish is not None)
            raise
        if ask is not None:
            self.client.finish(sample.rid, *ask)
        self.observer.progressed(sample, len(sample.output_ids) - before)
        if sample.finish is not None:
            self._ended(sample)
        running.progressed(sample)

    def _fail(self, sample: Sample, running: Running, error: TracklayerError, *, ended: bool) -> None:
        sample.fail(error)
        if ended:
            self._ended(sample)
        else:  # its rid stays taken until the engine has let go of it
            self.client.abort(sample.rid)
            self.observer.finished(sample)
        running.progressed(sample)

    def _ended(self, sample: Sample) -> None:
        self._samples.pop(sample.rid, None)
        self.observer.finished(sample)

    def fail_all(self, message: str) -> None:
        """End every running sample with an error: the engine is gone."""
        for sample, running in list(self._samples.values()):
            if sample.finish is None:
                sample.fail(TracklayerError(message))
                self._ended(sample)
                running.progressed(sample)

    # calls

    async def start(self, call: GenerateCall) -> Running:
        """Check the call and give its requests to the engine. Raises UserError, CapacityError. `leave` must follow."""
        if not self.client.alive():
            raise CapacityError("the engine is not running")
        prompts = self.intake.split(call)
        await self._encode(prompts)
        for prompt in prompts:
            self.intake.check_length(prompt, call)
        requests = [request for prompt in prompts for request in self.intake.requests(prompt, call)]
        for request in requests:
            if request.rid in self._samples:
                raise UserError(f"Duplicate request ID: {request.rid} is still running")
        samples = [
            Sample(
                i,
                request,
                self.client.info,
                self.tokenizer,
                text_in_logprobs=call.return_text_in_logprobs,
            )
            for i, request in enumerate(requests)
        ]
        running = Running(samples, requests[0].sampling.stream_interval or self.intake.stream_interval)
        for sample in samples:
            self._samples[sample.rid] = (sample, running)
            self.observer.submitted(sample)
        try:
            self.client.submit(requests)
        except BaseException:  # nothing will ever be heard of them: their ids must not stay taken
            for sample in samples:
                self._ended(sample)
            raise
        return running

    async def _encode(self, prompts: list[Prompt]) -> None:
        if sum(len(p.text or "") for p in prompts) <= INLINE_CHARACTERS:
            for prompt in prompts:
                self.intake.encode(prompt)
            return
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(self._workers, self.intake.encode, p) for p in prompts))

    @contextmanager
    def _aborting(self, running: Running) -> Iterator[None]:
        """Whatever ends the reader (its client is gone, a sample failed) ends what still runs of the call."""
        try:
            yield
        finally:
            self.leave(running)

    def leave(self, running: Running) -> None:
        """Nobody waits for the call any more: end what still runs of it."""
        for sample in running.samples:
            if sample.finish is None:
                self.client.abort(sample.rid)

    async def generate(self, call: GenerateCall, ended: Callable[[Sample], None] | None = None) -> list[Sample]:
        """Run a call to its end: its samples by prompt, then by sample. Raises the first failed sample's error.

        `ended` is called on the loop with each sample that ended.
        """
        running = await self.start(call)
        with self._aborting(running):
            while running.left or running.changed:
                for sample in await running.changes():
                    if sample.error is not None:
                        raise sample.error
                    if ended is not None and sample.finish is not None:
                        ended(sample)
        return running.samples

    async def stream(self, call: GenerateCall) -> AsyncGenerator[Sample, None]:
        """Yield samples as they grow (cumulative; each ended one exactly once). Failed ones end with type abort."""
        running = await self.start(call)
        reported: set[int] = set()
        with self._aborting(running):
            while len(reported) < len(running.samples):
                for sample in await running.changes():
                    if sample.index in reported:
                        continue
                    if sample.finish is not None:
                        reported.add(sample.index)
                    yield sample

    def abort(self, rid: str = "", *, everything: bool = False) -> None:
        """End all requests whose rid begins with `rid` (or all there are); they answer with what they have."""
        for known in list(self._samples):
            if everything or (rid and known.startswith(rid)):
                self.client.abort(known)

    @property
    def num_running(self) -> int:
        return len(self._samples)

    async def control(self, name: str, /, **arguments: Any) -> Any:
        """One control operation of the engine (see EngineClient.control)."""
        return await asyncio.wrap_future(self.client.control(name, **arguments))
