"""Block diffusion on the device: the tokens that a pass gives to masked positions."""

from __future__ import annotations

import torch
from torch import Tensor

from tracklayer.kernels.sample import logprobs_of
from tracklayer.models.decoder import Decoder
from tracklayer.runner.sampling import NEG_INF, Sampler
from tracklayer.types import Share, StepPlan


def fill_masks(
    plan: StepPlan, hidden_TD: Tensor, decoder: Decoder, sampler: Sampler, mask_id: int
) -> dict[int, dict[str, Tensor]]:
    """By index of each share that ends with a masked block: {"token_ids": int32 [m], "logprobs": float32 [m]}.

    m masked positions in order; the logits of position q are of token q itself. The mask's own id is never sampled, but
    has its share in the probabilities, as in the published code.
    """
    places: list[int] = []
    alone: list[Share] = []
    counts: dict[int, int] = {}
    offset = 0
    for index, share in enumerate(plan.shares):
        request = sampler.request(share)
        end = share.start + share.num_tokens
        if request.masked_from is not None and end == len(request.input_ids):
            masked = [q for q in range(request.masked_from, end) if request.input_ids[q] == mask_id]
            counts[index] = len(masked)
            places += [offset + q - share.start for q in masked]
            # As if token q were sampled after a share that ends at q - 1: the same noise whatever the pass.
            alone += [Share(share.rid, share.row, q - 1, 1, share.slots[:0], q, None, True) for q in masked]
        offset += share.num_tokens
    if not alone:
        return {}
    device = hidden_TD.device
    logits_MV = decoder.logits(hidden_TD[torch.tensor(places, device=device)])
    barred_MV = logits_MV.clone()
    barred_MV[:, mask_id] = NEG_INF
    rows_M = torch.tensor([share.row for share in alone], dtype=torch.int32, device=device)
    ids_M = sampler(barred_MV, alone, rows_M).ids_N
    temperature_M = torch.from_numpy(sampler.rows.sampling["temperature"][[share.row for share in alone]]).to(device)
    logprobs_M, _, _ = logprobs_of(logits_MV, temperature_M, ids_M, 0)
    pieces = zip(ids_M.split(list(counts.values())), logprobs_M.split(list(counts.values())), strict=True)
    return {index: {"token_ids": ids, "logprobs": found} for index, (ids, found) in zip(counts, pieces, strict=True)}
