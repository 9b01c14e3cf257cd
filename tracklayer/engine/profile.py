"""Profiles of a running engine: torch's profiler over some of its steps, written as a trace for a browser."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from tracklayer.errors import UserError

log = logging.getLogger(__name__)
ACTIVITIES = ("CPU", "GPU", "MEM")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOrder:
    """What to profile. first, last: counts of steps since the engine's start; last None: until told."""

    folder: str
    first: int
    last: int | None
    activities: tuple[str, ...]
    with_stack: bool
    record_shapes: bool


class Profiler:
    """One profile at a time. All calls come from the engine's thread: it is the one that is watched."""

    def __init__(self) -> None:
        self._order: ProfileOrder | None = None
        self._profile: profile | None = None

    def start(
        self,
        step: int,
        folder: str,
        *,
        start_step: int | None = None,
        num_steps: int | None = None,
        activities: Sequence[str] | None = None,
        with_stack: bool = False,
        record_shapes: bool = False,
    ) -> None:
        """Profile from step `start_step` on (None: now) for `num_steps` steps (None: until `stop`).

        Raises UserError while another profile is taken, for unknown activities, and for a folder that can not be
        written.
        """
        if self._order is not None:
            raise UserError("a profile is being taken already: stop it first (/stop_profile)")
        wanted = tuple(activities or ("CPU", "GPU"))
        for name in wanted:
            if name not in ACTIVITIES:
                raise UserError(f"activities must be some of {', '.join(ACTIVITIES)}, got {name!r}")
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"output_dir {folder!r} can not be made: {error.strerror}") from error
        first = max(step, start_step or 0)
        last = None if num_steps is None else first + num_steps
        self._order = ProfileOrder(
            folder=folder,
            first=first,
            last=last,
            activities=wanted,
            with_stack=with_stack,
            record_shapes=record_shapes,
        )
        if step >= first:
            self._profile = self._begin(self._order)

    def advance(self, step: int) -> None:
        """Told between steps how many there were: begins and ends what was ordered."""
        order = self._order
        if order is None:
            return
        try:
            if self._profile is None and step >= order.first:
                self._profile = self._begin(order)
            elif self._profile is not None and order.last is not None and step >= order.last:
                self.stop()
        except UserError as error:
            log.error("%s", error)  # nobody waits for an answer

    def _begin(self, order: ProfileOrder) -> profile:
        kinds = [ProfilerActivity.CPU] if set(order.activities) & {"CPU", "MEM"} else []
        if "GPU" in order.activities and torch.cuda.is_available():
            kinds.append(ProfilerActivity.CUDA)
        begun = profile(
            activities=kinds or [ProfilerActivity.CPU],
            record_shapes=order.record_shapes,
            with_stack=order.with_stack,
            profile_memory="MEM" in order.activities,
        )
        try:
            begun.start()
        except RuntimeError as error:  # one profile a process, whoever takes it
            self._order = None
            raise UserError(f"the profile can not begin: {error}") from error
        return begun

    def stop(self) -> str | None:
        """End the profile and write it; its path, None when it had not begun.

        Raises UserError when there is none, and when it can not be written.
        """
        if self._order is None:
            raise UserError("no profile is being taken: start one first (/start_profile)")
        order, taken = self._order, self._profile
        self._order = self._profile = None
        if taken is None:
            return None
        path = (
            Path(order.folder) / f"tracklayer-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9}.trace.json.gz"
        )
        try:
            taken.stop()
            taken.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            raise UserError(f"the profile can not be written to {path}: {error}") from error
        log.info("profile written to %s", path)
        return str(path)
