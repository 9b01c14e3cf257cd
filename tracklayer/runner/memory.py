"""Giving the device's memory to someone else for a while: caches, weights and CUDA graphs, each by its tag.

Tensors keep their identity: only their storage shrinks to nothing and grows again, so that nobody who holds one has to
be told. A graph holds addresses, so graphs go with whatever goes, and are captured again once everything is back.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from tracklayer.errors import TracklayerError, UserError
from tracklayer.runner.runner import Runner

log = logging.getLogger(__name__)
TAGS = ("kv_cache", "weights", "cuda_graph")
Storages = list[tuple[torch.UntypedStorage, int]]


@dataclass(slots=True)
class WeightSource:
    """Where the weights that run came from: a checkpoint directory, or None for seeded random ones.

    backup: keep a copy in host memory while they are released, instead of reading them again.
    """

    path: str | None
    seed: int
    backup: bool


class Memory:
    """Releases and resumes the memory of one runner. `released`: the tags that are away; nothing may run meanwhile.

    `capture` makes the runner's graphs anew (None: it has none). What comes back is what went: caches empty, weights
    from the host copy or from their source, which is what was last loaded.
    """

    def __init__(self, runner: Runner, source: WeightSource, capture: Callable[[], None] | None) -> None:
        self.runner = runner
        self.source = source
        self.released: set[str] = set()
        self._capture = capture
        self._host: list[torch.UntypedStorage] = []
        model = runner.model
        self._storages = {
            "kv_cache": storages_of(runner.caches.tensors),
            "weights": storages_of(model.decoder.parameters()),
            "cuda_graph": [],
        }

    @property
    def usage_bytes(self) -> dict[str, int]:
        """Bytes that each tag takes now."""
        graphs = self.runner.capture_cost.num_bytes if self.runner.capture_cost else 0
        return {tag: sum(s.nbytes() for s, _ in found) for tag, found in self._storages.items()} | {
            "cuda_graph": graphs
        }

    def release(self, tags: Iterable[str] | None = None) -> None:
        """Give the memory of these tags (None: all) back to the device; tags that are away already are fine.

        Raises UserError for an unknown tag, and, with everything as it was, when the host has no room for the weights,
        or when others hold the memory too.
        """
        gone = [tag for tag in checked(tags) if tag not in self.released]
        if not gone:
            return
        if not all(storage.resizable() for tag in gone for storage, _ in self._storages[tag]):
            raise UserError("memory that numpy or others share can not be released")
        if "weights" in gone and self.source.backup:
            self._host = self._copies()
        self.released.update(gone)
        self.runner.drop_graphs()
        for tag in gone:
            shrink(self._storages[tag])
        self._give_back()
        log.info("released %s", ", ".join(gone))

    def _copies(self) -> list[torch.UntypedStorage]:
        weights = self._storages["weights"]
        try:
            copies = [torch.UntypedStorage(size) for _, size in weights]
        except RuntimeError as error:
            total = sum(size for _, size in weights)
            raise UserError(
                f"{total / 2**30:.1f} GiB of weights do not fit into host memory; "
                "start without --enable-weights-cpu-backup to have them read again instead"
            ) from error
        for copy, (storage, _) in zip(copies, weights, strict=True):
            copy.copy_(storage)
        return copies

    def resume(self, tags: Iterable[str] | None = None) -> None:
        """Bring these tags (None: all) back; tags that are there already are fine.

        Raises UserError for an unknown tag and when the device has no room (what was to come back is then still
        away), CheckpointError when weights can not be read again.
        """
        for tag in checked(tags):
            if tag in self.released:
                self._bring_back(tag)
        if self.released or self._capture is None or self.runner.capture_cost is not None:
            return
        try:
            self._capture()
        except torch.OutOfMemoryError as error:
            self.released.add("cuda_graph")
            self.runner.drop_graphs()
            self._give_back()
            raise UserError("the device has no room for the CUDA graphs; free some and resume cuda_graph") from error

    def _bring_back(self, tag: str) -> None:
        storages = self._storages[tag]
        try:
            for storage, size in storages:
                storage.resize_(size)
            self._fill(tag)
        except (RuntimeError, TracklayerError) as error:  # torch says RuntimeError of memory that it can not get
            shrink(storages)
            self._give_back()
            if isinstance(error, TracklayerError):
                raise
            total = sum(size for _, size in storages)
            raise UserError(
                f"{tag} needs {total / 2**30:.2f} GiB, which the device can not give; free memory and resume again "
                f"({error})"
            ) from error
        self.released.discard(tag)
        log.info("resumed %s", tag)

    @torch.inference_mode()
    def _fill(self, tag: str) -> None:
        if tag == "kv_cache":
            self.runner.caches.clear()
        elif tag == "weights" and self._host:
            for (storage, _), copy in zip(self._storages[tag], self._host, strict=True):
                storage.copy_(copy)
            self._host = []
        elif tag == "weights":
            self.runner.model.fill(self.source.path, self.source.seed)

    def _give_back(self) -> None:
        gc.collect()
        if self.runner.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def checked(tags: Iterable[str] | None) -> list[str]:
    """The tags in the order in which they come back; None or none at all is all. Raises UserError."""
    if tags is not None and not (isinstance(tags, (list, tuple)) and all(isinstance(tag, str) for tag in tags)):
        raise UserError(f"tags must be a list of {', '.join(TAGS)}, got {tags!r:.80}")
    for tag in tags or ():
        if tag not in TAGS:
            raise UserError(f"unknown tag {tag!r}: it must be one of {', '.join(TAGS)}")
    return [tag for tag in TAGS if not tags or tag in tags]


def storages_of(tensors: Iterable[Tensor]) -> Storages:
    """Each storage under these tensors once, with its bytes."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = (storage, storage.nbytes())
    return list(found.values())


def shrink(storages: Storages) -> None:
    for storage, _ in storages:
        storage.resize_(0)
