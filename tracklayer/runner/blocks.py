"""Block diffusion on the device: the tokens that a pass gives to masked positions. M masked positions, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tracklayer.kernels.sample import logprobs_of
from tracklayer.models.decoder import Decoder
from tracklayer.runner.batch import upload
from tracklayer.runner.sampling import NEG_INF, Sampler
from tracklayer.types import Share, StepPlan

MASKS_AT_ONCE = 512  # logits that are in memory at once; Runner.measure asks for as many


@dataclass(slots=True)
class Masks:
    """The masked positions of a step, in order of its shares.

    places: of each, its index among the step's tokens. alone: a share as if its token were sampled after a share that
    ends just before it, so that its noise is the same in every pass. counts: by index of a share, how many it has.
    """

    places: list[int] = field(default_factory=list)
    alone: list[Share] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)


def find_masks(plan: StepPlan, sampler: Sampler, mask_id: int) -> Masks:
    """Of the shares that end with a masked block."""
    found, offset = Masks(), 0
    for index, share in enumerate(plan.shares):
        request = sampler.request(share)
        end = share.start + share.num_tokens
        if request.masked_from is not None and end == len(request.input_ids):
            masked = [q for q in range(request.masked_from, end) if request.input_ids[q] == mask_id]
            found.counts[index] = len(masked)
            found.places += [offset + q - share.start for q in masked]
            found.alone += [Share(share.rid, share.row, q - 1, 1, share.slots[:0], q, None, True) for q in masked]
        offset += share.num_tokens
    return found


def fill_masks(
    plan: StepPlan, hidden_TD: Tensor, decoder: Decoder, sampler: Sampler, mask_id: int
) -> dict[int, dict[str, Tensor]]:
    """By index of each share that ends with a masked block: {"token_ids": int32 [m], "logprobs": float32 [m]}.

    m masked positions in order; the logits of position q are of token q itself. The mask's own id is never sampled, but
    has its share in the probabilities, as in the published code. Does not wait for the device.
    """
    masks = find_masks(plan, sampler, mask_id)
    if not masks.alone:
        return {}
    rows = np.array([share.row for share in masks.alone], np.int32)
    places_M, rows_M = upload([np.array(masks.places, np.int32), rows], hidden_TD.device)
    ids, logprobs = [], []
    for at in range(0, len(rows), MASKS_AT_ONCE):
        piece = slice(at, at + MASKS_AT_ONCE)
        logits_mV = decoder.logits(hidden_TD[places_M[piece].long()])
        of_mask_m = logits_mV[:, mask_id].clone()
        logits_mV[:, mask_id] = NEG_INF
        ids_m = sampler(logits_mV, masks.alone[piece], rows_M[piece]).ids_N
        logits_mV[:, mask_id] = of_mask_m
        temperature_m = torch.from_numpy(sampler.rows.sampling["temperature"][rows[piece]])
        temperature_m = temperature_m.to(hidden_TD.device, non_blocking=True)
        ids.append(ids_m)
        logprobs.append(logprobs_of(logits_mV, temperature_m, ids_m, 0)[0])
    counts = list(masks.counts.values())
    pieces = zip(torch.cat(ids).split(counts), torch.cat(logprobs).split(counts), strict=True)
    return {index: {"token_ids": i, "logprobs": p} for index, (i, p) in zip(masks.counts, pieces, strict=True)}
