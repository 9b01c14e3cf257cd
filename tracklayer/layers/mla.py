"""Multi-head latent attention over a cache of latents.

T tokens, N heads, C latent width, P dims of a head without position and R with, E value width of a head.

Absorbed form over the cache: a head's key and value of a token are linear in its latent, so the query is taken into
latent space (q_nope W_k) and the attention's result out of it (W_v). Then all heads attend to one key, the latent and
the turned dims beside it, and its first C columns are the value. Prompts that begin in a step have all their latents
at hand: their keys and values are made in full, P + R and E wide, a third of the work in attention.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tracklayer.kernels.attention import paged_attention, prompt_attention
from tracklayer.kernels.norm import rms_norm
from tracklayer.kernels.rope import rotate
from tracklayer.layers.batch import Batch
from tracklayer.layers.indexer import Indexer, selected_attention
from tracklayer.layers.linear import Linear
from tracklayer.layers.parts import Part, parameter, prefixed
from tracklayer.layers.spec import MLASpec


class MLA(nn.Module):
    """Project, norm, turn, store the latent, attend in latent space, project. `cache` is its place in Batch.kv.

    `q` is the query projection when there is no query latent, else `q_a`, `q_norm`, `q_b`.
    """

    def __init__(self, spec: MLASpec, hidden_size: int, cos_sin_PD: Tensor | None, cache: int) -> None:
        super().__init__()
        self.spec = spec
        self.cache = cache
        self.cos_sin_PD = cos_sin_PD
        width_q = spec.num_heads * (spec.nope_dim + spec.rope_dim)
        first = {"q_a": spec.q_lora_rank} if spec.q_lora_rank else {"q": width_q}
        self.down = Linear(hidden_size, {**first, "kv_a": spec.key_dim}, bias=spec.bias)
        self.q_b = self.q_norm = None
        if spec.q_lora_rank:
            self.q_norm = parameter(spec.q_lora_rank)
            self.q_b = Linear(spec.q_lora_rank, {"q_b": width_q})
        self.kv_norm = parameter(spec.kv_lora_rank)
        self.kv_b_XC = parameter(spec.num_heads * (spec.nope_dim + spec.v_head_dim), spec.kv_lora_rank)
        self.o = Linear(spec.num_heads * spec.v_head_dim, {"o": hidden_size}, bias=spec.out_bias)
        gates = {"channel": spec.num_heads * spec.v_head_dim, "head": spec.num_heads, None: 0}[spec.out_gate]
        self.gate = Linear(hidden_size, {"gate": gates}) if spec.out_gate else None
        self.indexer = None
        if spec.indexer is not None:
            assert cos_sin_PD is not None and spec.q_lora_rank is not None, "an indexer needs positions and q_lora_rank"
            self.indexer = Indexer(spec.indexer, hidden_size, spec.q_lora_rank, cos_sin_PD)

    def forward(self, x_TD: Tensor, batch: Batch) -> Tensor:
        spec = self.spec
        k_SHD, _ = batch.kv[self.cache]
        q_TX, kv_TX = self.down(x_TD).split(list(self.down.outputs.values()), -1)
        if self.q_b is not None and self.q_norm is not None:
            q_latent_TQ = rms_norm(q_TX.contiguous(), self.q_norm, spec.norm.eps, spec.norm.offset)
            q_TX = self.q_b(q_latent_TQ)
        if spec.q_scale != 1.0:
            q_TX = q_TX * spec.q_scale
        q_TNX = q_TX.unflatten(-1, (spec.num_heads, -1))
        latent_TC, turned_TR = kv_TX.split([spec.kv_lora_rank, spec.rope_dim], -1)
        latent_TC = rms_norm(latent_TC.contiguous(), self.kv_norm, spec.norm.eps, spec.norm.offset)
        if spec.kv_scale != 1.0:
            latent_TC = latent_TC * spec.kv_scale
        nope_TNP, rope_TNR = q_TNX.split([spec.nope_dim, spec.rope_dim], -1)
        rope_TNR, turned_TR = self._turn(rope_TNR, batch), self._turn(turned_TR[:, None], batch)[:, 0]
        kept = [latent_TC, turned_TR, *([self.indexer.keys(x_TD, batch)] if self.indexer else [])]
        k_SHD[batch.slots_T.long(), 0] = torch.cat(kept, -1).to(k_SHD.dtype)

        fresh = None if self._selects(batch) else batch.fresh
        lens_B = batch.lens_B if fresh is None else fresh[0]
        if lens_B is not None:
            queries = self.indexer.queries(x_TD, q_latent_TQ, batch) if self._selects(batch) else None
            out_TNE = self._absorbed(nope_TNP, rope_TNR, lens_B, queries, batch)
        else:
            out_TNE = nope_TNP.new_empty(len(x_TD), spec.num_heads, spec.v_head_dim)
        if fresh is not None:
            self._prompts(nope_TNP, rope_TNR, latent_TC, turned_TR, fresh[1], out_TNE, batch)
        if self.gate is not None:
            out_TNE = out_TNE * torch.sigmoid(self.gate(x_TD)).view(len(x_TD), spec.num_heads, -1)
        out_TD: Tensor = self.o(out_TNE.flatten(1))
        return out_TD

    def _selects(self, batch: Batch) -> bool:
        """Whether an indexer chooses what attention sees: not while there is no more than it may choose."""
        return self.indexer is not None and batch.max_len > self.indexer.spec.top_k

    def _absorbed(
        self,
        nope_TNP: Tensor,
        rope_TNR: Tensor,
        lens_B: Tensor,
        queries: tuple[Tensor, Tensor] | None,
        batch: Batch,
    ) -> Tensor:
        """Attention over the cached latents: [T, N, E], meaningless in sequences whose lens_B is -1."""
        spec = self.spec
        k_SHD, v_SHE = batch.kv[self.cache]
        to_key_NPC, to_value_NEC = self.kv_b_XC.unflatten(0, (spec.num_heads, -1)).split(
            [spec.nope_dim, spec.v_head_dim], 1
        )
        nope_TNC = torch.bmm(nope_TNP.transpose(0, 1), to_key_NPC).transpose(0, 1)
        q_TND = torch.cat([nope_TNC, rope_TNR], -1)
        if queries is not None:
            assert spec.indexer is not None
            out_TNC = selected_attention(
                q_TND,
                *queries,
                k_SHD[:, 0],
                batch,
                value_dim=spec.kv_lora_rank,
                top_k=spec.indexer.top_k,
                scale=spec.scale,
            )
        else:
            out_TNC = paged_attention(
                q_TND,
                k_SHD[..., : spec.key_dim],
                v_SHE,
                slot_table_RC=batch.slot_table_RC,
                rows_B=batch.rows_B,
                starts_B1=batch.starts_B1,
                lens_B=lens_B,
                max_query=batch.max_query,
                max_len=batch.max_len,
                scale=spec.scale,
                num_decodes=batch.num_decodes,
            )
        return torch.bmm(out_TNC.transpose(0, 1), to_value_NEC.transpose(1, 2)).transpose(0, 1).contiguous()

    def _prompts(
        self,
        nope_TNP: Tensor,
        rope_TNR: Tensor,
        latent_TC: Tensor,
        turned_TR: Tensor,
        lens_B: Tensor,
        out_TNE: Tensor,
        batch: Batch,
    ) -> None:
        """Attention of prompts that begin here over their own keys and values, into their rows of out_TNE."""
        spec = self.spec
        kv_TNX = (latent_TC @ self.kv_b_XC.t()).unflatten(-1, (spec.num_heads, -1))
        key_TNP, v_TNE = kv_TNX.split([spec.nope_dim, spec.v_head_dim], -1)
        k_TND = torch.cat([key_TNP, turned_TR[:, None].expand(-1, spec.num_heads, -1)], -1)
        q_TND = torch.cat([nope_TNP, rope_TNR], -1)
        prompt_attention(
            q_TND, k_TND, v_TNE, starts_B1=batch.starts_B1, lens_B=lens_B, out_TNE=out_TNE, scale=spec.scale
        )

    def _turn(self, x_THR: Tensor, batch: Batch) -> Tensor:
        if self.cos_sin_PD is None or self.spec.rope is None:
            return x_THR
        return rotate(x_THR, self.cos_sin_PD[batch.positions_T.long()], self.spec.rope.interleaved)

    def parts(self) -> Iterator[Part]:
        yield from self.down.parts()
        if self.q_b is not None and self.q_norm is not None:
            yield "q_norm.weight", self.q_norm.data, self.q_norm
            yield from self.q_b.parts()
        yield "kv_norm.weight", self.kv_norm.data, self.kv_norm
        yield "kv_b.weight", self.kv_b_XC.data, self.kv_b_XC
        yield from self.o.parts()
        if self.gate is not None:
            yield from self.gate.parts()
        if self.indexer is not None:
            yield from prefixed("indexer", self.indexer.parts())
