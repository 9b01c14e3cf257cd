"""News of requests on their way to a reader: what waits is put together, so that one who is behind has less to do."""

from __future__ import annotations

import threading
from dataclasses import replace

from tracklayer.engine.record import join_logprobs
from tracklayer.types import RequestOutput


class NewsBox:
    """Filled by the engine's thread, emptied by the reader's. Holds one RequestOutput a request at most."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._news: dict[str, RequestOutput] = {}

    def put(self, outputs: list[RequestOutput]) -> bool:
        """Whether the box was empty: the reader must be told."""
        with self._lock:
            empty = not self._news
            for output in outputs:
                before = self._news.get(output.rid)
                self._news[output.rid] = output if before is None else followed(before, output)
        return empty and bool(outputs)

    def take(self) -> list[RequestOutput]:
        """Everything, in the order in which each request first had news."""
        with self._lock:
            news, self._news = self._news, {}
        return list(news.values())


def followed(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two consecutive pieces of one request's news as one."""
    assert first.finish is None, f"{first.rid} has news after its end"
    made = [piece.output_logprobs for piece in (first, second) if piece.output_logprobs is not None]
    given = [piece.input_logprobs for piece in (first, second) if piece.input_logprobs is not None]
    return replace(
        second,
        new_token_ids=first.new_token_ids + second.new_token_ids,
        output_logprobs=join_logprobs(made),
        input_logprobs=join_logprobs(given),
        weight_spans=second.weight_spans or first.weight_spans,
    )
