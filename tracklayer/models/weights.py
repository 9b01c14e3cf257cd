"""Checkpoint tensors into a decoder: streamed, renamed, stacked; nothing missing, nothing left over.

A family's name table maps checkpoint names to our part names (layers/parts.py); a part is a view of a parameter, so
copying into it stacks experts and fuses projections. What arrives is counted: a parameter that is not whole, a
tensor that nobody wants, or one of the wrong shape is an error that names it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from tracklayer.config import load_model_config
from tracklayer.errors import CheckpointError
from tracklayer.models.decoder import Decoder
from tracklayer.models.dequant import dequantised
from tracklayer.models.spec import Family, Split

INDEX = "model.safetensors.index.json"
ALWAYS_IGNORED = (r".*rotary_emb\.inv_freq",)


def checkpoint_tensors(path: str) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of everything in a directory's safetensors files, one tensor in memory at a time.

    Raises CheckpointError when there is no safetensors file or an index names one that is not there.
    """
    folder = Path(path)
    index = folder / INDEX
    files = _indexed(index) if index.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path!r} holds no *.safetensors file; convert the checkpoint, or use load_format=dummy")
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{index} names {file.name}, which is not there: the download is incomplete")
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 (a safetensors handle, not a dict)
                    yield name, handle.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{file} is not a whole safetensors file: {error}") from error


def _indexed(index: Path) -> list[Path]:
    """The files that an index names, in its folder. Raises CheckpointError for an index of another form."""
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        return sorted(index.parent / name for name in names)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index of safetensors files: {error!r}") from error


class NameTable:
    """The two directions of a family's name table: checkpoint name -> part name, and back for messages."""

    def __init__(self, names: dict[str, str], splits: dict[str, Split]) -> None:
        self.rules = [(_pattern(theirs), ours) for theirs, ours in names.items()]
        self.inverse = [(_pattern(ours), theirs) for theirs, ours in names.items()]
        for theirs, split in splits.items():
            self.inverse += [(_pattern(ours), theirs) for ours in split.targets]

    def ours(self, theirs: str) -> str | None:
        return _rewrite(self.rules, theirs)

    def theirs(self, ours: str) -> str | None:
        return _rewrite(self.inverse, ours)


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.escape(template).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{j\}", r"(?P<j>\d+)"))


def _rewrite(rules: list[tuple[re.Pattern[str], str]], name: str) -> str | None:
    for pattern, target in rules:
        if match := pattern.fullmatch(name):
            return target.format(**match.groupdict())
    return None


class Loader:
    """Copies checkpoint tensors into a decoder's parts and keeps account of what has arrived.

    Also the way of weight updates: tensors may come in any order and any number of calls to `load`; `finish` checks
    that every parameter is whole. `dry` checks names and shapes and copies nothing.
    """

    def __init__(self, model: Decoder, family: Family, *, dry: bool = False) -> None:
        self.family = family
        self.dry = dry
        self.spec = model.spec
        self.names = NameTable(family.names, family.splits)
        self.splits = [(_pattern(theirs), split) for theirs, split in family.splits.items()]
        self.transforms = [(_pattern(ours), function) for ours, function in family.transforms.items()]
        if model.spec.normed_head:
            self.transforms.append((_pattern("head.weight"), lambda head_VD, _: head_VD / (head_VD.norm(dim=0) + 1e-7)))
        ignored = (*ALWAYS_IGNORED, *family.ignored)
        if model.spec.tie_embeddings:
            ignored = (*ignored, *(re.escape(t) for t, ours in family.names.items() if ours == "head.weight"))
        self.ignored = re.compile("|".join(f"(?:{pattern})" for pattern in ignored))
        self.parts: dict[str, tuple[Tensor, nn.Parameter]] = {n: (view, owner) for n, view, owner in model.parts()}
        self.num_layers = len(model.spec.layers)
        self.arrived: dict[str, int] = {}

    def _past_end(self, theirs: str) -> bool:
        layer = re.search(r"\.layers\.(\d+)\.", theirs)
        return self.family.mtp_past_end and layer is not None and int(layer[1]) >= self.num_layers

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy each tensor into its part. Raises CheckpointError for an unknown name, a wrong shape or no experts."""
        for theirs, ours, tensor in self._targets(tensors):
            if ours is None or ours not in self.parts:
                if self.ignored.fullmatch(theirs) or self._past_end(theirs):
                    continue
                raise CheckpointError(f"surplus tensor {theirs!r}: the {self.family.name} model has no place for it")
            view = self.parts[ours][0]
            for pattern, function in self.transforms:
                if pattern.fullmatch(ours):
                    tensor = function(tensor, view.shape)
            if tensor.shape != view.shape:
                raise CheckpointError(
                    f"tensor {theirs!r} has shape {list(tensor.shape)}, the model needs {list(view.shape)}"
                )
            if not view.is_floating_point():
                self._check_table(theirs, tensor)
            if not self.dry:
                view.copy_(tensor)
            self.arrived[ours] = view.numel()

    def _check_table(self, theirs: str, ids: Tensor) -> None:
        """A table of experts by token id: nothing after this looks whether there are such experts."""
        experts, (least, most) = self.spec.routers[0].num_experts, ids.aminmax()
        if ids.is_floating_point() or least < 0 or most >= experts:
            raise CheckpointError(
                f"tensor {theirs!r} must name experts, whole numbers from 0 to {experts - 1}; it holds {ids.dtype} "
                f"from {least.item()} to {most.item()}"
            )

    def _targets(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, str | None, Tensor]]:
        """Each tensor with our name for it, or, if it is several of our parts in one, each of these."""
        for theirs, tensor in tensors:
            for pattern, split in self.splits:
                if match := pattern.fullmatch(theirs):
                    try:
                        pieces = split.cut(tensor, self.spec)
                    except RuntimeError as error:
                        raise CheckpointError(
                            f"tensor {theirs!r} of shape {list(tensor.shape)} can not be cut into {len(split.targets)} "
                            f"parts of the {self.family.name} model: {error}"
                        ) from error
                    for ours, piece in zip(split.targets, pieces, strict=True):
                        yield theirs, ours.format(**match.groupdict()), piece
                    break
            else:
                yield theirs, self.names.ours(theirs), tensor

    def read(self, theirs: str) -> Tensor:
        """The weights of a checkpoint tensor as they are now. Raises CheckpointError for a name that is not loaded."""
        ours = self.names.ours(theirs)
        if any(pattern.fullmatch(theirs) for pattern, _ in self.splits):
            raise CheckpointError(
                f"weight {theirs!r} is kept as several parts and can not be read back as it was loaded"
            )
        if ours is None or ours not in self.parts:
            raise CheckpointError(f"there is no weight {theirs!r} in the {self.family.name} model")
        return self.parts[ours][0]

    def finish(self) -> None:
        """Raises CheckpointError naming the checkpoint tensors that never came."""
        whole: dict[int, int] = {}
        for ours, count in self.arrived.items():
            owner = self.parts[ours][1]
            whole[id(owner)] = whole.get(id(owner), 0) + count
        missing = []
        for ours, (_, owner) in self.parts.items():
            if whole.get(id(owner), 0) < owner.numel() and ours not in self.arrived:
                theirs = self.names.theirs(ours)
                if theirs is not None:
                    missing.append(theirs)
                elif not any(o is owner and self.names.theirs(n) for n, (_, o) in self.parts.items()):
                    raise CheckpointError(f"the {self.family.name} name table has no name for part {ours!r}")
        if missing:
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            raise CheckpointError(f"missing tensors: {', '.join(missing[:8])}{more}")


def plain_tensors(path: str) -> Iterator[tuple[str, Tensor]]:
    """`checkpoint_tensors`, quantised weights made plain on the way."""
    config = load_model_config(path)
    settings = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    return iter(dequantised(checkpoint_tensors(path), settings))


def load_weights(model: Decoder, family: Family, path: str) -> None:
    """Fill `model` from the checkpoint directory `path`."""
    loader = Loader(model, family)
    loader.load(plain_tensors(path))
    loader.finish()


def dummy_weights(model: Decoder, seed: int) -> None:
    """Seeded random weights: matrices of spread 1/sqrt(inputs), norms near one, vectors small."""
    device = model.embed_VD.device
    generator = torch.Generator(device).manual_seed(seed)
    done: set[int] = set()
    for name, _, owner in model.parts():
        if id(owner) in done:
            continue
        done.add(id(owner))
        data = owner.data
        if not data.is_floating_point():
            high = model.spec.routers[0].num_experts
            first = torch.randint(high, (len(data), 1), generator=generator, device=device)  # of K neighbours, mixed
            data.copy_((first + torch.rand(data.shape, generator=generator, device=device).argsort(-1)) % high)
        elif data.dim() == 1:
            centre = 1.0 if name.endswith(("norm.weight", "stream_scale", "expert_scale")) else 0.0
            data.copy_(centre + 0.05 * torch.randn(data.shape, generator=generator, device=device))
        else:
            for chunk in data.flatten(0, -2).split(1 << 16):
                chunk.normal_(0.0, data.shape[-1] ** -0.5, generator=generator)
