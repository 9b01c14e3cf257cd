"""The one decoder: it reads a ModelSpec and runs it. T tokens, D model width, V vocabulary, L MoE layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tracklayer.kernels.combine import WeightedSum
from tracklayer.kernels.linear import linear
from tracklayer.kernels.norm import AddNorm, as_tensor
from tracklayer.kernels.rope import rope_table
from tracklayer.layers.attention import Attention
from tracklayer.layers.batch import Batch
from tracklayer.layers.compressed import Compressed
from tracklayer.layers.mixers import recurrent_mixer
from tracklayer.layers.mla import MLA
from tracklayer.layers.mlp import MLP
from tracklayer.layers.moe import MoE
from tracklayer.layers.norm import Norm
from tracklayer.layers.parts import Part, parameter, prefixed
from tracklayer.layers.recurrent_spec import RecurrentSpec
from tracklayer.layers.spec import AttentionSpec, CompressedSpec, KVLayout, MLASpec, MLPSpec, MoESpec, RopeSpec
from tracklayer.layers.streams import Streams
from tracklayer.models.spec import ModelSpec, Sublayer

ATTENTIONS = {AttentionSpec: Attention, MLASpec: MLA, CompressedSpec: Compressed}


class RopeTables:
    """One cos/sin table per distinct RopeSpec, shared by all layers that use it."""

    def __init__(self, max_position: int) -> None:
        self.max_position = max_position
        self.tables: list[tuple[RopeSpec, Tensor]] = []

    def get(self, spec: RopeSpec | None) -> Tensor | None:
        if spec is None:
            return None
        for known, table in self.tables:
            if known == spec:
                return table
        table = rope_table(spec.dim, spec.theta, spec.scaling, self.max_position, torch.get_default_device())
        self.tables.append((spec, table))
        return table


class Block(nn.Module):
    """One sublayer: residual += scale * post_norm(body(pre_norm(residual))), or its place among several streams."""

    def __init__(self, sub: Sublayer, spec: ModelSpec, body: nn.Module) -> None:
        super().__init__()
        self.name = sub.name
        self.residual_scale = sub.residual_scale
        self.parallel = sub.parallel
        self.deferred = sub.deferred
        self.stream_scale_1 = parameter(1) if sub.stream_scale else None
        self.pre_norm = Norm(sub.pre_norm, spec.hidden_size) if sub.pre_norm else nn.Identity()
        self.post_norm = Norm(sub.post_norm, spec.hidden_size) if sub.post_norm else nn.Identity()
        self.streams = Streams(spec.streams, spec.hidden_size) if spec.streams else None
        self.plain = not (sub.post_norm or sub.parallel or sub.deferred or sub.stream_scale or spec.streams)
        self.body = body

    def enter(self, delta_TD: Tensor | WeightedSum | None, residual_TD: Tensor, scale: float) -> Tensor | AddNorm:
        """Add what the sublayer before gave to the residual stream; returns what the body reads.

        A body whose first op can make the sum and norm itself gets them unmade (AddNorm).
        """
        if delta_TD is None:
            return self.pre_norm(residual_TD)
        if isinstance(self.pre_norm, Norm):
            x = self.pre_norm.later(delta_TD, residual_TD, scale)
            return x if isinstance(self.body, (Attention, MLA, MLP, MoE)) else as_tensor(x)
        return residual_TD.add_(as_tensor(delta_TD), alpha=scale)

    def leave(self, x: Tensor | AddNorm, batch: Batch) -> Tensor | WeightedSum:
        """The body and the norm behind it. A sum of experts that goes to the residual stream as it is stays unmade."""
        y_TD = self.body(x, batch)
        return y_TD if self.plain else self.post_norm(as_tensor(y_TD))

    def parts(self) -> Iterator[Part]:
        yield from self.body.parts()
        if self.stream_scale_1 is not None:
            yield "stream_scale", self.stream_scale_1.data, self.stream_scale_1
        for name, norm in (("norm", self.pre_norm), ("post_norm", self.post_norm)):
            if isinstance(norm, Norm):
                yield from prefixed(name, norm.parts())
        if self.streams is not None:
            yield from prefixed("streams", self.streams.parts())


class Decoder(nn.Module):
    """Token ids in, final hidden states out; `logits` is apart, for the few rows that are sampled.

    Build under `torch.device(...)` and the model's default dtype; parameters come uninitialised (see weights.py).
    """

    def __init__(self, spec: ModelSpec, max_position: int) -> None:
        super().__init__()
        self.spec = spec
        self.attentions: list[KVLayout] = []
        self.recurrents: list[RecurrentSpec] = []
        self.embed_VD = parameter(spec.vocab_size, spec.hidden_size)
        rounded = torch.tensor(spec.embed_scale, dtype=self.embed_VD.dtype, device="cpu")
        self.embed_scale = float(rounded) if spec.embed_scale_rounded else spec.embed_scale
        self.layers = nn.ModuleList()
        ropes = RopeTables(max_position)
        for layer_id, subs in enumerate(spec.layers):
            blocks = [Block(sub, spec, self._body(sub, layer_id, ropes)) for sub in subs]
            self.layers.append(nn.ModuleList(blocks))
        self.streams = Streams(spec.streams, spec.hidden_size, last=True) if spec.streams else None
        self.norm = Norm(spec.final_norm, spec.hidden_size)
        self.head_VD = self.embed_VD if spec.tie_embeddings else parameter(spec.vocab_size, spec.hidden_size)
        self.head_bias_V = parameter(spec.vocab_size) if spec.head_bias else None
        self._number_routers()

    def _body(self, sub: Sublayer, layer_id: int, ropes: RopeTables) -> nn.Module:
        match sub.body:
            case AttentionSpec() | MLASpec() | CompressedSpec():
                self.attentions.append(sub.body)
                table = ropes.get(sub.body.rope)
                kind, place = ATTENTIONS[type(sub.body)], len(self.attentions) - 1
                return kind(sub.body, self.spec.hidden_size, table, cache=place)
            case RecurrentSpec():
                self.recurrents.append(sub.body)
                table = ropes.get(sub.body.rope)
                return recurrent_mixer(sub.body, self.spec.hidden_size, table, len(self.recurrents) - 1)
            case MLPSpec():
                return MLP(sub.body, self.spec.hidden_size)
            case MoESpec():
                return MoE(sub.body, self.spec.hidden_size, layer_id=layer_id)
        raise TypeError(f"layer {layer_id}: no module for {type(sub.body).__name__}")

    def _number_routers(self) -> None:
        """Give each router its column; their layer ids must be exactly the spec's MoE layers, each once."""
        routers = [m.router for m in self.modules() if isinstance(m, MoE)]
        found = tuple(r.layer_id for r in routers)
        if found != self.spec.moe_layers:
            raise ValueError(f"routers say layers {found}, the model's MoE layers are {self.spec.moe_layers}")
        for column, router in enumerate(routers):
            router.column = column

    def forward(self, batch: Batch) -> Tensor:
        """Final normed hidden states [T, D]. Writes KV and, when recording, the routes of every token."""
        residual_TD = nn.functional.embedding(batch.token_ids_T, self.embed_VD)
        if self.embed_scale != 1.0:
            residual_TD = residual_TD * self.embed_scale
        if self.streams is not None:
            return self._streamed(self.streams, residual_TD, batch)
        x, delta_TD, scale = residual_TD, None, 1.0
        for blocks in self.layers:
            deferred_TD = None
            for block in blocks:
                if block.parallel:
                    y_TD = block.leave(x, batch)
                    delta_TD = y_TD if delta_TD is None else as_tensor(delta_TD) + y_TD
                    continue
                x = block.enter(delta_TD, residual_TD, scale)
                delta_TD, scale = block.leave(x, batch), block.residual_scale
                if isinstance(x, AddNorm):
                    residual_TD = x.residual_TD
                if block.stream_scale_1 is not None:
                    residual_TD.add_(as_tensor(delta_TD), alpha=scale).mul_(block.stream_scale_1)
                    delta_TD = None
                if block.deferred:
                    deferred_TD, delta_TD = delta_TD, None
            if deferred_TD is not None:
                delta_TD = as_tensor(delta_TD) + deferred_TD
        return self.norm(residual_TD) if delta_TD is None else self.norm.add(delta_TD, residual_TD, scale)

    def _streamed(self, last: Streams, x_TD: Tensor, batch: Batch) -> Tensor:
        """`forward` from the embeddings on, through several residual streams that begin as equals."""
        x_TND = x_TD[:, None].expand(-1, last.spec.count, -1)
        for blocks in self.layers:
            for block in blocks:
                x_TND = block.streams(x_TND, lambda y_TD, block=block: block.leave(block.pre_norm(y_TD), batch))
        return self.norm(last.collapse(x_TND))

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits [N, V] in the model's dtype, or in float32 with a float32 head."""
        if self.spec.float32_head:
            bias_V = self.head_bias_V.float() if self.head_bias_V is not None else None
            logits_NV = nn.functional.linear(hidden_ND.float(), self.head_VD.float(), bias_V)
        else:
            logits_NV = linear(hidden_ND, self.head_VD, self.head_bias_V)
        if self.spec.logit_scale != 1.0:
            logits_NV = logits_NV * self.spec.logit_scale
        if self.spec.logit_softcap is not None:
            logits_NV = self.spec.logit_softcap * torch.tanh(logits_NV / self.spec.logit_softcap)
        return logits_NV

    def parts(self) -> Iterator[Part]:
        yield "embed.weight", self.embed_VD.data, self.embed_VD
        for i, blocks in enumerate(self.layers):
            for block in blocks:
                yield from prefixed(f"layers.{i}.{block.name}", block.parts())
        yield from prefixed("norm", self.norm.parts())
        if self.streams is not None:
            yield from prefixed("streams", self.streams.parts())
        if not self.spec.tie_embeddings:
            yield "head.weight", self.head_VD.data, self.head_VD
        if self.head_bias_V is not None:
            yield "head.bias", self.head_bias_V.data, self.head_bias_V
