"""Where the experts of a token are chosen, and recorded by the same kernel.

TopK is built in one place (layers/moe.py) with the index of its own layer; what it returns is the only thing that
expert kernels accept.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tracklayer.kernels.norm import AddNorm, as_tensor
from tracklayer.kernels.route import route
from tracklayer.kernels.topk import RouterSpec, RouteStore, Routing, select_given
from tracklayer.layers.batch import Batch
from tracklayer.layers.parts import Part, parameter


def check_layer_id(layer_id: object) -> int:
    """Refuse anything but a layer index: TypeError for None, bool and other types, ValueError for a negative one."""
    if isinstance(layer_id, bool) or not isinstance(layer_id, int):
        raise TypeError(f"layer_id must be the layer's index (an int), got {layer_id!r}")
    if layer_id < 0:
        raise ValueError(f"layer_id must be 0 or more, got {layer_id}")
    return layer_id


class TopK(nn.Module):
    """The router of one MoE layer: gate product, scores, choice, weights, and the store of the ids.

    `column` is the layer's place among the MoE layers, given by the decoder once all routers are known.
    """

    def __init__(self, spec: RouterSpec, *, layer_id: int) -> None:
        super().__init__()
        self.spec = spec
        self.layer_id = check_layer_id(layer_id)
        self.column: int | None = None
        self.bias_E = parameter(spec.num_logits, dtype=torch.float32) if spec.choice_bias else None
        self.scale_E = parameter(spec.num_logits, dtype=torch.float32) if spec.per_expert_scale else None

    def store(self, batch: Batch) -> RouteStore | None:
        if batch.pool_SLK is None:
            return None
        assert self.column is not None, f"router of layer {self.layer_id} has no column: build it through the decoder"
        return RouteStore(batch.pool_SLK, batch.slots_T, self.column)

    def forward(self, x: Tensor | AddNorm, gate_ED: Tensor, gate_bias_E: Tensor | None, batch: Batch) -> Routing:
        return route(
            x,
            gate_ED,
            self.spec,
            gate_bias_E=gate_bias_E,
            bias_E=self.bias_E,
            expert_scale_E=self.scale_E,
            store=self.store(batch),
            num_tokens_1=batch.num_tokens_1,
        )

    def parts(self) -> Iterator[Part]:
        if self.bias_E is not None:
            yield "choice_bias", self.bias_E.data, self.bias_E
        if self.scale_E is not None:
            yield "expert_scale", self.scale_E.data, self.scale_E


class HashTopK(TopK):
    """Experts as a function of the token id (DeepSeek-V4's first layers): ids = table[token], weights = live scores."""

    def __init__(self, spec: RouterSpec, *, layer_id: int) -> None:
        super().__init__(spec, layer_id=layer_id)
        if spec.hash_vocab < 1:
            raise ValueError(f"HashTopK needs spec.hash_vocab, the rows of its table; got {spec.hash_vocab}")
        self.table_VK = parameter(spec.hash_vocab, spec.top_k, dtype=torch.int32)

    def forward(self, x: Tensor | AddNorm, gate_ED: Tensor, gate_bias_E: Tensor | None, batch: Batch) -> Routing:
        ids_TK = self.table_VK[batch.token_ids_T.long()]
        logits_TE = torch.nn.functional.linear(as_tensor(x).float(), gate_ED.float(), gate_bias_E)
        return select_given(logits_TE, ids_TK, self.spec, store=self.store(batch), num_tokens_1=batch.num_tokens_1)

    def parts(self) -> Iterator[Part]:
        yield from super().parts()
        yield "table", self.table_VK.data, self.table_VK
