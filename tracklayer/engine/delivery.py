"""Route rows on their way home: in pieces while a request runs, so that little is left to wait for when it ends.

The device gathers and copies a piece behind the steps that are launched already; the host takes it in while a later
step runs. Many requests that end together would otherwise wait for all their rows at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tracklayer.engine.counters import Counters
from tracklayer.engine.record import Record
from tracklayer.routes.ids import Array
from tracklayer.routes.pool import PendingRoutes
from tracklayer.types import FinishReason, RequestOutput

PIECE_ROWS = 128  # a running request's rows are fetched when there are so many new ones
STEP_ROWS = 8192  # fetched in one step at most: copying them takes the host less than a step


@dataclass(slots=True)
class Shipment:
    """One gather on its way since `sent`; `outputs`: the final outputs of its requests, none when they go on."""

    pending: PendingRoutes
    records: list[Record]
    outputs: list[RequestOutput]
    sent: float


class Deliveries:
    """Fetches the rows of requests that asked for them, and hands out final outputs once theirs are whole.

    `gather(slots, starts)` starts bringing rows to the host (Runner.gather_routes). Shipments land in order.
    """

    def __init__(self, gather: Callable[[Sequence[Array], Sequence[int]], PendingRoutes], counters: Counters) -> None:
        self._gather = gather
        self._counters = counters
        self._due: deque[Record] = deque()
        self._shipments: deque[Shipment] = deque()

    def __bool__(self) -> bool:
        return bool(self._shipments)

    def offer(self, record: Record) -> None:
        """Note that a running request has new rows; they are fetched when there are enough."""
        if record.num_rows - record.rows_asked >= PIECE_ROWS and not record.rows_due:
            record.rows_due = True
            self._due.append(record)

    def fetch(self) -> None:
        """Start bringing home what is due, a step's worth at most."""
        records, slots, room = [], [], STEP_ROWS
        while self._due and room > 0:
            record = self._due.popleft()
            record.rows_due = False
            # None: it ended, or was preempted, and its rows were asked for then.
            found = record.sequence.slots[record.rows_asked : min(record.num_rows, record.rows_asked + room)]
            if len(found) and not record.closed:
                records.append(record)
                slots.append(found)
                room -= len(found)
        if records:
            self._ship(records, slots, [])
            for record in records:
                self.offer(record)

    def save(self, kept: Sequence[tuple[Record, Array]]) -> None:
        """Fetch what requests have, int32 slots of their positions from 0 on, before these are given away.

        Computing the same positions again writes rows that nobody asks for: each row returned belongs to the forward
        that gave the log-probability returned with it.
        """
        new = [(record, slots[record.rows_asked :]) for record, slots in kept if len(slots) > record.rows_asked]
        if new:
            self._ship([record for record, _ in new], [slots for _, slots in new], [])

    def close(self, records: list[Record], slots: list[Array], outputs: list[RequestOutput]) -> None:
        """Fetch the rest of requests that ended; their outputs come out of `arrived` with all their rows."""
        if outputs:
            rest = [s[record.rows_asked : record.num_rows] for record, s in zip(records, slots, strict=True)]
            self._ship(records, rest, outputs)

    def _ship(self, records: list[Record], slots: list[Array], outputs: list[RequestOutput]) -> None:
        began = time.perf_counter()
        pending = self._gather(slots, [record.rows_asked for record in records])
        for record, some in zip(records, slots, strict=True):
            record.rows_asked += len(some)
        self._counters.gather_s += time.perf_counter() - began
        self._shipments.append(Shipment(pending, records, outputs, began))

    def arrived(self, wait: bool) -> list[RequestOutput]:
        """Take in the rows that have come, in order; with `wait`, at least the oldest. Returns complete outputs."""
        complete = []
        while self._shipments and (wait or self._shipments[0].pending.ready()):
            wait = False
            began = time.perf_counter()
            shipment = self._shipments.popleft()
            for record, landed in zip(shipment.records, shipment.pending.land(), strict=True):
                if isinstance(landed, np.ndarray):
                    record.keep_rows(landed)
                else:
                    self._counters.incomplete_rows += len(landed.positions)
                    record.rows_error = record.rows_error or str(landed)
            for record, output in zip(shipment.records, shipment.outputs, strict=False):
                self._complete(record, output)
                complete.append(output)
            now = time.perf_counter()
            self._counters.gather_s += now - began
            self._counters.route_wait_s += (now - shipment.sent) * len(shipment.outputs)
        return complete

    def _complete(self, record: Record, output: RequestOutput) -> None:
        """A row that was never written is an error of the request that asked, never data."""
        if record.rows_error is not None:
            output.error = record.rows_error
            output.finish = FinishReason("abort", message=record.rows_error, status=500)
            return
        output.routes = rows_TLK = record.whole_rows()
        self._counters.route_rows += len(rows_TLK)
        self._counters.route_bytes += rows_TLK.nbytes
        expected = max(0, record.num_rows - output.routes_start)
        aborted = output.finish is not None and output.finish.type == "abort"
        assert len(rows_TLK) == expected or aborted, f"{output.rid}: {len(rows_TLK)} route rows, {expected} expected"
