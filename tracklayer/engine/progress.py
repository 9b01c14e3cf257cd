"""A progress bar over the sequences of a call."""

from __future__ import annotations

from collections.abc import Callable

from tracklayer.engine.intake import GenerateCall
from tracklayer.engine.sample import Sample


class ProgressBar:
    """A progress bar over a call's sequences; entering gives the callback that counts one ended Sample."""

    def __init__(self, call: GenerateCall) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        raw = call.sampling_params
        first = raw[0] if isinstance(raw, list) and raw else raw
        n = first.get("n") if isinstance(first, dict) else getattr(first, "n", 1)
        prompts = call.text if call.text is not None else call.input_ids
        total = (len(prompts) if call.batched and prompts is not None else 1) * (n or 1)
        columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
        self._bar = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True))
        self._task = self._bar.add_task("", total=total, rate="")
        self._tokens = 0

    def __enter__(self) -> Callable[[Sample], None]:
        self._bar.start()
        return self._ended

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def _ended(self, sample: Sample) -> None:
        self._tokens += len(sample.output_ids)
        elapsed_s = self._bar.tasks[0].elapsed or 0.0
        rate = f"{self._tokens / elapsed_s:,.0f} tok/s" if elapsed_s else ""
        self._bar.update(self._task, advance=1, rate=rate)
