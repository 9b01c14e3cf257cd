"""Grouped-query attention over the paged cache. T tokens, N query heads, H key heads, D head width, E value width."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tracklayer.kernels.attention import paged_attention
from tracklayer.kernels.attention_rule import Rule
from tracklayer.kernels.norm import AddNorm, rms_norm
from tracklayer.kernels.qk_rope import Heads, qk_rope_store
from tracklayer.layers.batch import Batch
from tracklayer.layers.linear import Linear
from tracklayer.layers.parts import Part, parameter
from tracklayer.layers.spec import AttentionSpec


class Attention(nn.Module):
    """Project, rotate, store, attend, project. `cache` is the index of its caches in Batch.kv."""

    def __init__(self, spec: AttentionSpec, hidden_size: int, cos_sin_PD: Tensor | None, cache: int) -> None:
        super().__init__()
        self.spec = spec
        self.cache = cache
        self.cos_sin_PD = cos_sin_PD
        width_q, width_k = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        outputs = {"q": width_q, "k": width_k, "v": spec.num_kv_heads * spec.value_dim}
        if spec.v_from_key:
            del outputs["v"]
        self.qkv = Linear(hidden_size, outputs, bias=spec.qkv_bias, fused="qkv")
        self.o = Linear(spec.num_heads * spec.value_dim, {"o": hidden_size}, bias=spec.out_bias)
        gates = {"channel": spec.num_heads * spec.value_dim, "head": spec.num_heads, None: 0}[spec.out_gate]
        self.gate = Linear(hidden_size, {"gate": gates}) if spec.out_gate else None
        self.q_norm = self.k_norm = None
        if spec.qk_norm:
            widths = (spec.head_dim, spec.head_dim) if spec.qk_norm == "head" else (width_q, width_k)
            make = parameter if spec.qk_norm_weight else torch.ones
            self.q_norm, self.k_norm = make(widths[0]), make(widths[1])
        normed_before = spec.clip_qkv is not None  # norms come before the clip, which comes before the rotation
        self.heads = Heads(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            value_dim=spec.value_dim,
            rope_dim=spec.rope.dim if spec.rope else 0,
            interleaved=bool(spec.rope and spec.rope.interleaved),
            q_norm_D=None if normed_before else self.q_norm,
            k_norm_D=None if normed_before else self.k_norm,
            norm_eps=spec.norm.eps,
            norm_offset=spec.norm.offset,
            norm_whole=spec.qk_norm == "whole",
            norm_after_rope=spec.qk_norm_after_rope,
        )
        self.sinks = parameter(spec.num_heads) if spec.sinks else None
        self.rule = Rule(
            scale=spec.scale if spec.scale is not None else spec.head_dim**-0.5,
            window=spec.window,
            chunk=spec.chunk,
            block=spec.block,
            softcap=spec.softcap,
            sinks_N=self.sinks,
        )

    def forward(self, x: Tensor | AddNorm, batch: Batch) -> Tensor:
        spec = self.spec
        k_SHD, v_SHE = batch.kv[self.cache]
        slots_T, slot_table_RC = batch.places(spec.sight is not None)
        qkv_TX = self._project(x)
        q_TND = qk_rope_store(
            qkv_TX,
            self.cos_sin_PD,
            batch.positions_T,
            slots_T,
            k_SHD,
            v_SHE,
            self.heads,
        )
        _, k_TX, v_TX = qkv_TX.split(self.heads.widths, -1)  # k is finished in place
        if spec.q_temperature is not None:
            growth, step = spec.q_temperature
            factor_T = 1 + growth * torch.log1p(torch.floor((batch.positions_T + 1) / step))
            q_TND = (q_TND * factor_T[:, None, None]).to(q_TND.dtype)
        out_TNE = paged_attention(
            q_TND,
            k_SHD,
            v_SHE,
            self.rule,
            slot_table_RC=slot_table_RC,
            rows_B=batch.rows_B,
            starts_B1=batch.starts_B1,
            lens_B=batch.lens_B,
            max_query=batch.max_query,
            max_len=batch.max_len,
            num_decodes=batch.num_decodes,
            step_kv=tuple(x.unflatten(1, (spec.num_kv_heads, -1)) for x in (k_TX, v_TX)),
            fresh=batch.fresh,
        )
        if spec.v_scale != 1.0:  # attention is linear in the values
            out_TNE = out_TNE * spec.v_scale
        if self.gate is not None:
            out_TNE = out_TNE * torch.sigmoid(self.gate(x)).view(len(out_TNE), spec.num_heads, -1)
        return self.o(out_TNE.flatten(1))

    def _project(self, x: Tensor | AddNorm) -> Tensor:
        """q, k and v side by side, with what happens to them before the rotation (norms of q and k per head apart)."""
        spec = self.spec
        qkv_TX = self.qkv(x)
        if spec.clip_qkv is not None:
            qkv_TX = self._clip(qkv_TX)
        width_v = spec.num_kv_heads * spec.value_dim
        if spec.v_from_key:
            qkv_TX = torch.cat([qkv_TX, qkv_TX[:, -width_v:]], -1)
        if spec.v_norm:
            v_THE = qkv_TX[:, -width_v:].unflatten(-1, (spec.num_kv_heads, spec.value_dim))
            v_THE.copy_(nn.functional.rms_norm(v_THE.float(), v_THE.shape[-1:], eps=spec.norm.eps))
        return qkv_TX

    def _clip(self, qkv_TX: Tensor) -> Tensor:
        """Clamp q, k and v; whole-width norms, which come before, are done here too (OLMoE, DBRX)."""
        q, k, v = qkv_TX.split(list(self.qkv.outputs.values()), -1)
        if self.q_norm is not None and self.k_norm is not None:
            norm = self.spec.norm
            q = rms_norm(q.contiguous(), self.q_norm, norm.eps, norm.offset)
            k = rms_norm(k.contiguous(), self.k_norm, norm.eps, norm.offset)
        return torch.cat([q, k, v], -1).clamp(-self.spec.clip_qkv, self.spec.clip_qkv)

    def parts(self) -> Iterator[Part]:
        yield from self.qkv.parts()
        yield from self.o.parts()
        if self.gate is not None:
            yield from self.gate.parts()
        for name, owner in (("q_norm.weight", self.q_norm), ("k_norm.weight", self.k_norm), ("sinks", self.sinks)):
            if isinstance(owner, nn.Parameter):
                yield name, owner.data, owner
