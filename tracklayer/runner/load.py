"""From a configuration to a decoder with weights on its device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from tracklayer.config import EngineConfig, load_model_config
from tracklayer.errors import CheckpointError, UserError
from tracklayer.models.decoder import Decoder
from tracklayer.models.registry import resolve
from tracklayer.models.spec import Family, ModelSpec
from tracklayer.models.weights import Loader, dummy_weights, load_weights, plain_tensors
from tracklayer.routes.forms import RouteShape


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A decoder and what it was made from. `context_length` is the configured one, at most the checkpoint's."""

    decoder: Decoder
    family: Family
    spec: ModelSpec
    hf_config: dict[str, Any]
    device: torch.device
    dtype: torch.dtype
    context_length: int
    overrides: str = "{}"  # json_model_override_args

    @property
    def route_shape(self) -> RouteShape:
        """Of the model's routes: widest top_k and largest expert count of its routers; zeros for a dense model."""
        routers = self.spec.routers
        top_k_L = tuple(router.top_k for router in routers)
        return RouteShape(
            layer_ids=self.spec.moe_layers,
            top_k=max(top_k_L, default=0),
            layer_top_k=top_k_L if len(set(top_k_L)) > 1 else None,
            num_experts=max((r.num_logits for r in routers), default=0),
            num_hidden_layers=len(self.spec.layers),
        )

    def fill(self, path: str | None, seed: int) -> None:
        """Weights from a checkpoint directory, or random ones of `seed`. Raises CheckpointError."""
        if path is None:
            dummy_weights(self.decoder, seed)
        else:
            load_weights(self.decoder, self.family, path)

    def loader(self, *, dry: bool = False) -> Loader:
        return Loader(self.decoder, self.family, dry=dry)

    def replace_weights(self, path: str) -> None:
        """Load another checkpoint of the same architecture in place.

        Raises CheckpointError for one that does not fit; the weights are then as they were, because it is read through
        once before the first copy.
        """
        config = load_model_config(path, self.overrides)
        architectures = config.get("architectures")
        if architectures != self.hf_config["architectures"]:
            ours = self.hf_config["architectures"][0]
            raise CheckpointError(f"{path!r} is a {architectures} checkpoint, this engine runs {ours}")
        running, given = (replace(resolve(c)[1], context_length=1) for c in (self.hf_config, config))
        if given != running:
            differs = [f.name for f in fields(running) if getattr(running, f.name) != getattr(given, f.name)]
            raise CheckpointError(f"{path!r} is another model than the one that runs: its {', '.join(differs)} differ")
        for loader in (self.loader(dry=True), self.loader()):
            loader.load(plain_tensors(path))
            loader.finish()


def choose_device(name: str, gpu: int | None = None) -> torch.device:
    """auto: a GPU when there is one; `gpu`: which (None: the current one), which becomes this thread's current one.

    Raises UserError for cuda without a GPU, and for a GPU that there is not.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda was asked for, but torch sees no GPU; use --device cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if gpu is not None and gpu >= count:
        raise UserError(f"base_gpu_id {gpu} was asked for, but torch sees {count} GPUs (0..{count - 1})")
    if gpu is not None:
        torch.cuda.set_device(gpu)
    return torch.device("cuda", torch.cuda.current_device())


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def load_model(config: EngineConfig, seed: int) -> LoadedModel:
    """Read the checkpoint's config, build the decoder and fill it.

    Raises CheckpointError / UserError: not a checkpoint, unknown architecture, tensors missing or too many, a dense
    model with recording on, weights that do not fit the GPU, a context longer than the model's.
    """
    hf_config = load_model_config(config.model_path, config.json_model_override_args)
    family, spec = resolve(hf_config)
    if config.router_dtype == "float32":
        spec = spec.with_float32_routers()
    spec = replace(spec, float32_head=config.enable_fp32_lm_head)
    if config.enable_return_routed_experts and not spec.moe_layers:
        raise UserError(
            f"{family.name} with this config has no MoE layer, so there are no routes to record; "
            "start without --enable-return-routed-experts"
        )
    context_length = config.context_length or spec.context_length
    if context_length > spec.context_length:
        raise UserError(f"context_length {context_length} is more than the model's {spec.context_length}")
    device = choose_device(config.device, config.base_gpu_id)
    if config.dtype == "auto":
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    else:
        dtype = getattr(torch, config.dtype)
    try:
        with torch.device(device), default_dtype(dtype):
            decoder = Decoder(spec, context_length)
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise UserError(
            f"the weights of {family.name} do not fit: {free / 2**30:.1f} of {total / 2**30:.1f} GiB were free; "
            "use a smaller dtype or a larger GPU"
        ) from error
    model = LoadedModel(
        decoder=decoder.eval(),
        family=family,
        spec=spec,
        hf_config=hf_config,
        device=device,
        dtype=dtype,
        context_length=context_length,
        overrides=config.json_model_override_args,
    )
    model.fill(None if config.load_format == "dummy" else config.model_path, seed)
    return model
