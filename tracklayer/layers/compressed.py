"""DeepSeek-V4's attention: a window of single tokens, and compressed entries of everything before.

T tokens, N heads, D width of a key, which is also the value, R turned dims, L positions, W window, E entries, M tokens
that complete a window of the compressor, I width of the indexer's entries, S slots, X columns of the cache.

All that is kept of a sequence lies by slot: a token's vector and, beside it, what its compressor's windows are made of;
an entry lies with the last token of its window. So whatever shares a prefix shares its entries, wherever chunks and
pages end. Torch throughout, and no step of it waits for the device, so that a CUDA graph can hold it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tracklayer.kernels.norm import rms_norm
from tracklayer.kernels.rope import rotate
from tracklayer.layers.batch import Batch, rows_of_tokens
from tracklayer.layers.indexer import PIECE, index_scores
from tracklayer.layers.linear import Linear
from tracklayer.layers.parts import Part, parameter, prefixed
from tracklayer.layers.spec import CompressedSpec, IndexerSpec


def turn_last(x_THD: Tensor, cos_sin_TR: Tensor, interleaved: bool, *, back: bool = False) -> Tensor:
    """Turn the last R dims of each head; `back`: the other way."""
    if back:
        cos_TR, sin_TR = cos_sin_TR.chunk(2, -1)
        cos_sin_TR = torch.cat([cos_TR, -sin_TR], -1)
    plain, turned = x_THD.split([x_THD.shape[-1] - cos_sin_TR.shape[-1], cos_sin_TR.shape[-1]], -1)
    return torch.cat([plain, rotate(turned, cos_sin_TR, interleaved)], -1)


def completing(batch: Batch, rate: int) -> tuple[Tensor, Tensor]:
    """Tokens of the step that complete a window of `rate` positions: indices in T [M], and which of the M are any.

    M is an upper bound that the host knows: a sequence with n tokens completes at most ceil(n / rate) windows.
    """
    total = len(batch.positions_T)
    bound = min(total, total // rate + len(batch.rows_B))
    ends_T = (batch.positions_T + 1) % rate == 0
    place_T = torch.where(ends_T, ends_T.cumsum(0) - 1, bound)
    tokens_M = torch.zeros(bound + 1, dtype=torch.int64, device=ends_T.device)
    tokens_M.scatter_(0, place_T, torch.arange(total, device=ends_T.device))
    return tokens_M[:bound], torch.arange(bound, device=ends_T.device) < ends_T.sum()


class Compressor(nn.Module):
    """An entry: norm(sum_j softmax_j(gate_j + bias_j) * value_j) over its tokens j, channel by channel, then turned.

    Value and gate are projections of the token; with overlap each has two halves, of which the first serves the next
    window's entry and the second that of its own. They lie in the cache's columns from `at` on; a window's entry takes
    the place of its last token's own value, which nothing reads any more.
    Parts: kv, gate, bias, norm.
    """

    def __init__(self, whole: CompressedSpec, hidden_size: int, width: int, cos_sin_PR: Tensor, at: int) -> None:
        super().__init__()
        assert whole.compressor is not None
        self.whole, self.spec, self.width, self.cos_sin_PR = whole, whole.compressor, width, cos_sin_PR
        inputs = self.spec.series * width
        self.down = Linear(hidden_size, {"kv": inputs, "gate": inputs})
        self.bias_rX = parameter(self.spec.rate, inputs, dtype=torch.float32)
        self.norm = parameter(width)
        self.inputs = slice(at, at + 2 * inputs)
        self.entry = slice(at + inputs - width, at + inputs)

    def forward(self, x_TD: Tensor, cache_SX: Tensor, rows_T: Tensor, batch: Batch) -> None:
        """Keep what entries are made of, and make those that the step completes."""
        cache_SX[batch.slots_T.long(), self.inputs] = self.down(x_TD).to(cache_SX.dtype)
        rate, series = self.spec.rate, self.spec.series
        tokens_M, real_M = completing(batch, rate)
        last_M = batch.positions_T[tokens_M].long()
        first_M = last_M - (rate - 1)
        at_MJ = last_M[:, None] + torch.arange(1 - series * rate, 1, device=last_M.device)
        slots_MJ = batch.slot_table_RC[rows_T[tokens_M, None], at_MJ.clamp(min=0)].long()
        value_MJX, gate_MJX = cache_SX[slots_MJ, self.inputs].float().chunk(2, -1)
        gate_MJX = gate_MJX + self.bias_rX.repeat(series, 1)
        if series == 2:  # the window before serves with its first half; the first window has none before it
            value_MJX, gate_MJX = (
                torch.cat([x[:, :rate, : self.width], x[:, rate:, self.width :]], 1) for x in (value_MJX, gate_MJX)
            )
            gate_MJX = gate_MJX.masked_fill((at_MJ < 0)[..., None], float("-inf"))
        entry_MD = (value_MJX * gate_MJX.softmax(1)).sum(1).to(x_TD.dtype)
        entry_MD = rms_norm(entry_MD, self.norm, self.whole.norm.eps)
        cos_sin_MR = self.cos_sin_PR[first_M.clamp(min=0)]
        entry_MD = turn_last(entry_MD[:, None], cos_sin_MR, self.whole.rope.interleaved)[:, 0]
        kept_M = torch.where(real_M, batch.slots_T[tokens_M], 0).long()
        cache_SX[kept_M, self.entry] = entry_MD.to(cache_SX.dtype)

    def parts(self) -> Iterator[Part]:
        yield from self.down.parts()
        yield "bias", self.bias_rX.data, self.bias_rX
        yield "norm.weight", self.norm.data, self.norm


class EntryIndexer(nn.Module):
    """score(t, e) = sum_h w_h(t) relu(q_h(t) . k(e)) over entries k of the indexer's own compressor.

    Parts: q_b (from the queries' latent), weights, compressor.*.
    """

    def __init__(self, spec: IndexerSpec, compressor: Compressor, hidden_size: int, q_lora_rank: int) -> None:
        super().__init__()
        self.spec, self.compressor = spec, compressor
        self.q_b = Linear(q_lora_rank, {"q_b": spec.num_heads * spec.head_dim})
        self.weights = Linear(hidden_size, {"weights": spec.num_heads})

    def queries(self, x_TD: Tensor, latent_TQ: Tensor, cos_sin_TR: Tensor) -> tuple[Tensor, Tensor]:
        """(q [T, H, I], weights [T, H]), float32, with the scales in the weights."""
        q_THI = self.q_b(latent_TQ).unflatten(-1, (self.spec.num_heads, -1))
        q_THI = turn_last(q_THI, cos_sin_TR, self.compressor.whole.rope.interleaved)
        scale = (self.spec.num_heads * self.spec.head_dim) ** -0.5
        return q_THI.float(), self.weights(x_TD).float() * scale

    def parts(self) -> Iterator[Part]:
        yield from self.q_b.parts()
        yield from self.weights.parts()
        yield from prefixed("compressor", self.compressor.parts())


class Compressed(nn.Module):
    """Project, norm, turn, store, compress, attend, turn back, project. `cache` is its place in Batch.kv.

    Parts: q_a, q_norm, q_b; kv, kv_norm; sinks; o_a, o_b; compressor.*, indexer.*.
    """

    def __init__(self, spec: CompressedSpec, hidden_size: int, cos_sin_PR: Tensor | None, cache: int) -> None:
        super().__init__()
        assert cos_sin_PR is not None
        self.spec, self.cache, self.cos_sin_PR = spec, cache, cos_sin_PR
        self.down = Linear(hidden_size, {"q_a": spec.q_lora_rank, "kv": spec.width})
        self.q_norm, self.kv_norm = parameter(spec.q_lora_rank), parameter(spec.width)
        self.q_b = Linear(spec.q_lora_rank, {"q_b": spec.num_heads * spec.width})
        self.sinks = parameter(spec.num_heads, dtype=torch.float32)
        self.o_a = parameter(spec.groups * spec.group_rank, spec.num_heads * spec.width // spec.groups)
        self.o_b = Linear(spec.groups * spec.group_rank, {"o_b": hidden_size})
        self.compressor = self.indexer = None
        if made := spec.compressor:
            self.compressor = Compressor(spec, hidden_size, spec.width, cos_sin_PR, spec.width)
            if made.indexer:
                at = self.compressor.inputs.stop
                small = Compressor(spec, hidden_size, made.indexer.head_dim, cos_sin_PR, at)
                self.indexer = EntryIndexer(made.indexer, small, hidden_size, spec.q_lora_rank)

    def forward(self, x_TD: Tensor, batch: Batch) -> Tensor:
        spec, eps, interleaved = self.spec, self.spec.norm.eps, self.spec.rope.interleaved
        cache_SX = batch.kv[self.cache][0][:, 0]
        rows_T, cos_sin_TR = rows_of_tokens(batch), self.cos_sin_PR[batch.positions_T.long()]
        latent_TQ, kv_TD = self.down(x_TD).split(list(self.down.outputs.values()), -1)
        latent_TQ = rms_norm(latent_TQ.contiguous(), self.q_norm, eps)
        kv_TD = turn_last(rms_norm(kv_TD.contiguous(), self.kv_norm, eps)[:, None], cos_sin_TR, interleaved)[:, 0]
        cache_SX[batch.slots_T.long(), : spec.width] = kv_TD.to(cache_SX.dtype)
        q_TND = self.q_b(latent_TQ).unflatten(-1, (spec.num_heads, -1))
        q_TND = turn_last(F.rms_norm(q_TND, q_TND.shape[-1:], eps=eps), cos_sin_TR, interleaved)
        index = None
        if self.compressor is not None:
            self.compressor(x_TD, cache_SX, rows_T, batch)
        if self.indexer is not None:
            self.indexer.compressor(x_TD, cache_SX, rows_T, batch)
            index = self.indexer.queries(x_TD, latent_TQ, cos_sin_TR)
        out_TND = self._attend(q_TND, index, cache_SX, rows_T, batch)
        out_TND = turn_last(out_TND, cos_sin_TR, interleaved, back=True)
        out_GTX = out_TND.flatten(1).unflatten(-1, (spec.groups, -1)).transpose(0, 1)
        low_GTK = torch.bmm(out_GTX, self.o_a.unflatten(0, (spec.groups, -1)).transpose(1, 2))
        out_TD: Tensor = self.o_b(low_GTK.transpose(0, 1).flatten(1))
        return out_TD

    def _attend(
        self, q_TND: Tensor, index: tuple[Tensor, Tensor] | None, cache_SX: Tensor, rows_T: Tensor, batch: Batch
    ) -> Tensor:
        """Attention of each token over its window and its entries, some tokens at a time: [T, N, D]."""
        spec = self.spec
        entries = batch.max_len // spec.compressor.rate if spec.compressor else 0
        chooser = self.indexer.spec if self.indexer else None
        attended = spec.window + (min(entries, chooser.top_k) if chooser else entries)
        widest = max(attended * spec.width, entries * max(chooser.head_dim, chooser.num_heads) if chooser else 0)
        pieces = []
        for at in range(0, len(q_TND), size := max(1, PIECE // widest)):
            part = slice(at, at + size)
            rows_t, positions_t = rows_T[part], batch.positions_T[part].long()
            at_tW = positions_t[:, None] + torch.arange(1 - spec.window, 1, device=rows_t.device)
            slots_tW = batch.slot_table_RC[rows_t[:, None], at_tW.clamp(min=0)].long()
            keys_tJD, seen_tJ = cache_SX[slots_tW, : spec.width], at_tW >= 0
            if entries and self.compressor is not None:
                slots_tE, seen_tE = self._entries(rows_t, positions_t, entries, batch)
                if index is not None and self.indexer is not None:
                    slots_tE, seen_tE = self._chosen(slots_tE, seen_tE, *(x[part] for x in index), cache_SX)
                entries_tED = cache_SX[slots_tE, self.compressor.entry].masked_fill(~seen_tE[..., None], 0)
                keys_tJD = torch.cat([keys_tJD, entries_tED], 1)
                seen_tJ = torch.cat([seen_tJ, seen_tE], 1)
            keys_tJD = keys_tJD.to(q_TND.dtype)
            score_tNJ = (q_TND[part] @ keys_tJD.transpose(1, 2)).float() * spec.width**-0.5
            score_tNJ = score_tNJ.masked_fill(~seen_tJ[:, None], float("-inf"))
            sinks_tN1 = self.sinks[:, None].expand(len(score_tNJ), -1, -1)
            weights_tNJ = torch.cat([score_tNJ, sinks_tN1], -1).softmax(-1)[..., :-1]
            pieces.append(weights_tNJ.to(q_TND.dtype) @ keys_tJD)
        return torch.cat(pieces)

    def _entries(self, rows_t: Tensor, positions_t: Tensor, count: int, batch: Batch) -> tuple[Tensor, Tensor]:
        """Where the first `count` entries lie, and which of them each token sees: the complete ones. Both [t, E]."""
        assert self.spec.compressor is not None
        rate = self.spec.compressor.rate
        seen_tE = torch.arange(count, device=rows_t.device) < (positions_t[:, None] + 1) // rate
        table_RE = batch.slot_table_RC[:, rate - 1 : count * rate : rate]
        slots_tE = torch.where(seen_tE, table_RE[rows_t], 0)  # what lies past the end may be anything
        return slots_tE.long(), seen_tE

    def _chosen(
        self, slots_tE: Tensor, seen_tE: Tensor, q_tHI: Tensor, weights_tH: Tensor, cache_SX: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The entries that the indexer likes best, as `_entries`."""
        assert self.indexer is not None
        top_k = self.indexer.spec.top_k
        if slots_tE.shape[1] <= top_k:
            return slots_tE, seen_tE
        keys_tEI = cache_SX[slots_tE, self.indexer.compressor.entry].float()
        score_tE = index_scores(q_tHI, weights_tH, keys_tEI).masked_fill(~seen_tE, float("-inf"))
        best_tK = score_tE.topk(top_k, -1).indices
        return slots_tE.gather(1, best_tK), seen_tE.gather(1, best_tK)

    def parts(self) -> Iterator[Part]:
        for linear in (self.down, self.q_b, self.o_b):
            yield from linear.parts()
        named = {"q_norm.weight": self.q_norm, "kv_norm.weight": self.kv_norm}
        for name, owner in {**named, "sinks": self.sinks, "o_a.weight": self.o_a}.items():
            yield name, owner.data, owner
        for name, module in (("compressor", self.compressor), ("indexer", self.indexer)):
            if module is not None:
                yield from prefixed(name, module.parts())
