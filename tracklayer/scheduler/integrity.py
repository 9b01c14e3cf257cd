"""What must hold between any two calls of the scheduler, asserted in tests and soak runs."""

from __future__ import annotations

from collections.abc import Collection

from tracklayer.scheduler.sequence import Sequence, SequenceState, by_rank


def check(
    running: list[Sequence], waiting: list[Sequence], spare_rows: list[int], num_rows: int, known: Collection[Sequence]
) -> None:
    """Assert that rows are used once, queues in order, every sequence in one of them, and its samples accounted for."""
    rows = [seq.row for seq in running] + spare_rows
    assert sorted(row for row in rows if row is not None) == list(range(num_rows)), f"rows {rows}"
    for queue, state in ((running, SequenceState.RUNNING), (waiting, SequenceState.WAITING)):
        assert queue == sorted(queue, key=by_rank), "queue out of order"
        assert all(seq.state is state for seq in queue), f"a sequence in the queue is not {state}"
    assert len(known) == len(running) + len(waiting)
    for seq in known:
        assert seq.to_sample == seq.max_new - len(seq.output_ids) - (seq.in_flight if seq.max_new else 0)
