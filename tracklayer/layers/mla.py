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

from tracklayer.kernels.attention import prompt_attention
from tracklayer.kernels.attention_rule import Rule
from tracklayer.kernels.mla import absorb_queries, head_products, latent_store, turn_tails
from tracklayer.kernels.mla_attention import latent_attention
from tracklayer.kernels.norm import AddNorm, as_tensor
from tracklayer.layers.batch import Batch
from tracklayer.layers.indexer import Indexer, selected_attention
from tracklayer.layers.linear import Linear
from tracklayer.layers.parts import Part, parameter, prefixed
from tracklayer.layers.spec import MLASpec


class MLA(nn.Module):
    """Project, norm, turn, store the latent, attend in latent space, project. `cache` is its place in Batch.kv.

    `q` is the query projection when there is no query latent, else `q_a`, `q_norm`, `q_b`.
    """

    def __init__(self, spec: MLASpec, hidden_size: int, cos_sin_PR: Tensor | None, cache: int) -> None:
        super().__init__()
        self.spec = spec
        self.cache = cache
        if spec.rope is not None and spec.rope.dim != spec.rope_dim:
            raise ValueError(f"latent attention turns all {spec.rope_dim} dims with position, got {spec.rope.dim}")
        self.cos_sin_PR = cos_sin_PR if spec.rope is not None else None
        self.interleaved = spec.rope is not None and spec.rope.interleaved
        self.scale = spec.scale * spec.q_scale
        self.rule = Rule(self.scale)
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
            assert cos_sin_PR is not None and spec.q_lora_rank is not None, "an indexer needs positions and q_lora_rank"
            self.indexer = Indexer(spec.indexer, hidden_size, spec.q_lora_rank, cos_sin_PR)

    def forward(self, x: Tensor | AddNorm, batch: Batch) -> Tensor:
        spec = self.spec
        k_SHD, _ = batch.kv[self.cache]
        q_TX, latent_TC, turned_TR = latent_store(
            self.down(x),
            self.cos_sin_PR,
            batch.positions_T,
            batch.slots_T,
            k_SHD,
            kv_norm_C=self.kv_norm,
            q_norm_Q=self.q_norm,
            rope_dim=spec.rope_dim,
            eps=spec.norm.eps,
            offset=spec.norm.offset,
            kv_scale=spec.kv_scale,
            interleaved=self.interleaved,
        )
        q_latent_TQ = q_TX
        if self.q_b is not None:
            q_TX = self.q_b(q_latent_TQ)
        q_TNX = q_TX.unflatten(-1, (spec.num_heads, -1))
        selected = None
        if self.indexer is not None:
            x_TD = as_tensor(x)
            k_SHD[batch.slots_T.long(), 0, spec.key_dim :] = self.indexer.keys(x_TD, batch).to(k_SHD.dtype)
            if batch.max_len > self.indexer.spec.top_k:  # else there is no more than it may choose
                selected = self.indexer.queries(x_TD, q_latent_TQ, batch)

        out_TNE = q_TNX.new_empty(len(q_TNX), spec.num_heads, spec.v_head_dim)
        fresh = None if selected is not None else batch.fresh
        lens_B = batch.lens_B if fresh is None else fresh[0]
        if lens_B is not None:
            self._absorbed(q_TNX, lens_B, selected, out_TNE, batch)
        if fresh is not None:
            self._prompts(q_TNX, latent_TC, turned_TR, fresh[1], out_TNE, batch)
        if self.gate is not None:
            out_TNE = out_TNE * torch.sigmoid(self.gate(as_tensor(x))).view(len(out_TNE), spec.num_heads, -1)
        out_TD: Tensor = self.o(out_TNE.flatten(1))
        return out_TD

    def _absorbed(
        self,
        q_TNX: Tensor,
        lens_B: Tensor,
        selected: tuple[Tensor, Tensor] | None,
        out_TNE: Tensor,
        batch: Batch,
    ) -> None:
        """Attention over the cached latents into out_TNE, meaningless in sequences whose lens_B is -1."""
        spec = self.spec
        k_SHD, _ = batch.kv[self.cache]
        to_key_NPC, to_value_NEC = self.kv_b_XC.unflatten(0, (spec.num_heads, -1)).split(
            [spec.nope_dim, spec.v_head_dim], 1
        )
        q_TND = absorb_queries(q_TNX, to_key_NPC, self.cos_sin_PR, batch.positions_T, interleaved=self.interleaved)
        if selected is not None:
            assert spec.indexer is not None
            out_TNC = selected_attention(
                q_TND,
                *selected,
                k_SHD[:, 0],
                batch,
                value_dim=spec.kv_lora_rank,
                top_k=spec.indexer.top_k,
                scale=self.scale,
            )
        else:
            out_TNC = latent_attention(
                q_TND,
                k_SHD,
                value_dim=spec.kv_lora_rank,
                slot_table_RC=batch.slot_table_RC,
                rows_B=batch.rows_B,
                starts_B1=batch.starts_B1,
                lens_B=lens_B,
                max_query=batch.max_query,
                max_len=batch.max_len,
                scale=self.scale,
                num_decodes=batch.num_decodes,
            )
        head_products(out_TNC, to_value_NEC, out_TNE)

    def _prompts(
        self,
        q_TNX: Tensor,
        latent_TC: Tensor,
        turned_TR: Tensor,
        lens_B: Tensor,
        out_TNE: Tensor,
        batch: Batch,
    ) -> None:
        """Attention of prompts that begin here over their own keys and values, into their rows of out_TNE.

        Turns the queries in place: whoever needs them as they were comes before.
        """
        spec = self.spec
        kv_TNX = (latent_TC @ self.kv_b_XC.t()).unflatten(-1, (spec.num_heads, -1))
        key_TNP, v_TNE = kv_TNX.split([spec.nope_dim, spec.v_head_dim], -1)
        k_TND = torch.cat([key_TNP, turned_TR[:, None].expand(-1, spec.num_heads, -1)], -1)
        if self.cos_sin_PR is not None:
            rope = dict(rope_dim=spec.rope_dim, interleaved=self.interleaved)
            turn_tails(q_TNX, self.cos_sin_PR, batch.positions_T, **rope)
        prompt_attention(q_TNX, k_TND, v_TNE, self.rule, starts_B1=batch.starts_B1, lens_B=lens_B, out_TNE=out_TNE)

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
