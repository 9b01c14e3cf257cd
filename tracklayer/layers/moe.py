"""The MoE block: router, routed experts, shared expert. The only place that builds a router."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tracklayer.kernels.combine import WeightedSum
from tracklayer.kernels.norm import AddNorm, as_tensor
from tracklayer.layers.batch import Batch
from tracklayer.layers.experts import Experts
from tracklayer.layers.linear import Linear
from tracklayer.layers.mlp import MLP
from tracklayer.layers.norm import Norm
from tracklayer.layers.parts import Part, parameter, prefixed
from tracklayer.layers.router import HashTopK, TopK
from tracklayer.layers.spec import MoESpec

INNER_NORMS = ("router_norm", "experts_norm", "experts_post_norm", "shared_norm", "shared_post_norm")


class MoE(nn.Module):
    """shared(x) + sum over the chosen experts of weight * expert(x); norms inside only with spec.inner_norm."""

    def __init__(self, spec: MoESpec, hidden_size: int, *, layer_id: int) -> None:
        super().__init__()
        router = spec.router
        kind = HashTopK if router.hash_vocab else TopK
        self.router = kind(router, layer_id=layer_id)
        self.gate_ED = parameter(router.num_logits, hidden_size)
        self.gate_bias_E = parameter(router.num_logits) if router.gate_bias else None
        self.experts = Experts(spec, spec.latent or hidden_size)
        self.latent_in = Linear(hidden_size, {"latent_in": spec.latent}) if spec.latent else None
        self.latent_out = Linear(spec.latent, {"latent_out": hidden_size}) if spec.latent else None
        self.shared = MLP(spec.shared, hidden_size) if spec.shared else None
        self.shared_gate_1D = parameter(1, hidden_size) if spec.shared_gate else None

        self.output_scale = spec.output_scale
        self.norms = nn.ModuleDict()
        for name in INNER_NORMS if spec.inner_norm else ():
            # The router's weight is a product (Gemma 4: scale / sqrt(D)): rounded, it would move near ties.
            exact = torch.float32 if name == "router_norm" else None
            self.norms[name] = Norm(spec.inner_norm, hidden_size, exact)

    def forward(self, x: Tensor | AddNorm, batch: Batch) -> Tensor | WeightedSum:
        read = self._norm("router_norm", as_tensor(x)) if self.norms else x
        routing = self.router(read, self.gate_ED, self.gate_bias_E, batch)
        x_TD = as_tensor(x)
        shared_TD = self._shared(x_TD, batch)
        if self.norms:
            done = self.experts(self._norm("experts_norm", x_TD), routing)
            experts_TD = self._norm("experts_post_norm", as_tensor(done))
            y_TD = experts_TD if shared_TD is None else experts_TD + shared_TD
        elif self.latent_in is not None and self.latent_out is not None:
            y_TD = self.latent_out(as_tensor(self.experts(self.latent_in(x_TD), routing)))
            y_TD = y_TD if shared_TD is None else y_TD + shared_TD
        else:
            y_TD = self.experts(x_TD, routing, shared_TD)
        return y_TD if self.output_scale == 1.0 else as_tensor(y_TD) * self.output_scale

    def _shared(self, x_TD: Tensor, batch: Batch) -> Tensor | None:
        if self.shared is None:
            return None
        shared_TD = self._norm("shared_post_norm", self.shared(self._norm("shared_norm", x_TD), batch))
        if self.shared_gate_1D is not None:
            shared_TD = shared_TD * torch.sigmoid(nn.functional.linear(x_TD, self.shared_gate_1D))
        return shared_TD

    def _norm(self, name: str, x_TD: Tensor) -> Tensor:
        return self.norms[name](x_TD) if name in self.norms else x_TD

    def parts(self) -> Iterator[Part]:
        yield "router.weight", self.gate_ED.data, self.gate_ED
        if self.gate_bias_E is not None:
            yield "router.bias", self.gate_bias_E.data, self.gate_bias_E
        yield from prefixed("router", self.router.parts())
        yield from prefixed("experts", self.experts.parts())
        for linear in (self.latent_in, self.latent_out):
            if linear is not None:
                yield from linear.parts()
        if self.shared is not None:
            yield from prefixed("shared", self.shared.parts())
        if self.shared_gate_1D is not None:
            yield "shared_gate.weight", self.shared_gate_1D.data, self.shared_gate_1D
        for name, norm in self.norms.items():
            yield from prefixed(name, norm.parts())
