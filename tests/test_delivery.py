"""Rows come home in pieces of a bounded size, in order, and a missing row is its own request's error only."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_tools import request

from tracklayer.engine import delivery
from tracklayer.engine.counters import Counters
from tracklayer.engine.record import Record
from tracklayer.routes.forms import RouteShape
from tracklayer.routes.pool import RoutePool
from tracklayer.scheduler.sequence import Sequence
from tracklayer.types import FinishReason


class Bench:
    """A pool whose slot s holds expert s % 200 (and the next), two running requests, and the gathers seen."""

    def __init__(self) -> None:
        self.pool = RoutePool(100, RouteShape(layer_ids=(0, 3), top_k=2, num_experts=256), torch.device("cpu"))
        ids_S = torch.arange(100, dtype=torch.uint8)
        self.pool.tensor_SLK[:] = torch.stack([ids_S, ids_S + 1], -1)[:, None, :]
        self.gathers: list[list[int]] = []
        self.counters = Counters()
        self.deliveries = delivery.Deliveries(self.gather, self.counters)

    def gather(self, slots, starts):
        self.gathers.append([len(s) for s in slots])
        return self.pool.gather(slots, starts)

    def record(self, rid: str, slots: range, prompt: int, start: int = 0) -> Record:
        asked = request(rid, [1] * prompt, tokens=20, routed_experts_start_len=start)
        sequence = Sequence(asked, (0, 0), prompt, 20, np.ones(prompt, np.int32), 0, None)
        sequence.slots = np.array(slots, np.int32)
        return Record(asked, sequence, limit=prompt + 20)

    def close(self, *records: Record) -> None:
        outputs = [record.output(FinishReason("length", length=0)) for record in records]
        for record, output in zip(records, outputs, strict=True):
            record.closed, output.routes_start = True, record.request.routed_experts_start_len
        self.deliveries.close(list(records), [record.sequence.slots for record in records], outputs)


@pytest.fixture
def bench(monkeypatch) -> Bench:
    monkeypatch.setattr(delivery, "PIECE_ROWS", 4)
    monkeypatch.setattr(delivery, "STEP_ROWS", 6)
    return Bench()


def test_pieces_are_bounded_and_whole_in_the_end(bench):
    first, second = bench.record("a", range(10, 40), prompt=9, start=2), bench.record("b", range(50, 80), prompt=9)
    for record in (first, second):
        record.num_output = 3
        bench.deliveries.offer(record)
        bench.deliveries.offer(record)
    for _ in range(4):
        bench.deliveries.fetch()
        bench.deliveries.arrived(wait=True)
    assert bench.gathers == [[6], [6], [5]], "a: 3 left wait for more; b: 5 are worth a piece"
    assert not bench.deliveries, "nothing is under way"
    bench.close(first, second)
    outputs = bench.deliveries.arrived(wait=True)
    assert bench.gathers[3:] == [[3, 0]]
    assert outputs[0].routes[:, 1, 0].tolist() == list(range(12, 21))
    assert outputs[1].routes[:, 0, 1].tolist() == list(range(51, 62))
    assert (bench.counters.route_rows, bench.counters.incomplete_rows) == (20, 0)


def test_what_a_preemption_saved_is_not_asked_for_again(bench):
    record = bench.record("a", range(10, 40), prompt=9)
    record.num_output = 1
    bench.deliveries.save([(record, np.arange(10, 20, dtype=np.int32))])
    bench.pool.tensor_SLK[10:20] = 7  # given away
    record.sequence.slots = np.arange(60, 90, dtype=np.int32)
    record.num_output = 6
    bench.close(record)
    (output,) = [o for _ in range(2) for o in bench.deliveries.arrived(wait=True)]
    assert output.routes[:, 0, 0].tolist() == [*range(10, 20), *range(70, 74)]


def test_a_row_that_is_missing_fails_its_request_alone(bench):
    bad, good = bench.record("a", range(10, 40), prompt=5), bench.record("b", range(50, 80), prompt=5)
    bench.pool.tensor_SLK[11, 1] = 255
    for record in (bad, good):
        record.num_output = 1
        bench.deliveries.offer(record)
    bench.deliveries.fetch()
    bench.close(bad, good)
    outputs = [o for _ in range(2) for o in bench.deliveries.arrived(wait=True)]
    assert outputs[0].routes is None and outputs[0].finish.status == 500 and "token 1 layer 3" in outputs[0].error
    assert len(outputs[1].routes) == 5 and bench.counters.incomplete_rows == 1


def test_surplus_rows_of_a_cut_request_are_dropped(bench):
    record = bench.record("a", range(10, 40), prompt=5)
    record.num_output = 10
    bench.deliveries.offer(record)
    bench.deliveries.fetch()
    record.num_output = 1  # a stop string was seen late
    bench.close(record)
    (output,) = [o for _ in range(2) for o in bench.deliveries.arrived(wait=True)]
    assert output.routes[:, 0, 0].tolist() == list(range(10, 15))
