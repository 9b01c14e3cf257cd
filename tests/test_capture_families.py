"""What breaks the record elsewhere and no other test of a family reaches: identity and masked experts, last slots."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from parity import Mode, Reference, compare, generate, tiny_engine

from tracklayer.layers.router import TopK


def test_identity_experts_keep_their_own_ids(tmp_path):
    """LongCat: an id from E on means the input itself. Recorded as 0, or cut at E, it would be another expert."""
    reference = Reference(tiny.save("longcat_flash", tmp_path))
    core = tiny_engine(tmp_path)
    answers = generate(core, {"a": list(range(60))}, 4)
    experts = reference.model.config.n_routed_experts
    rows_TLK = answers["a"].routes
    assert (rows_TLK >= experts).any() and (rows_TLK == 0).any()
    assert rows_TLK.max() < core.info.num_experts == experts + reference.model.config.zero_expert_num
    mode = Mode()
    compare(core, reference, answers, mode, 0, None)
    assert mode.ok, mode.wrong[:4]


def test_masked_experts_that_fill_up_are_ids_with_a_weight_of_zero(tmp_path):
    """DeepSeek-V2: groups of one leave two experts for a top-3. The third has weight 0, but its place is no gap."""
    overrides = {"n_group": 8, "topk_group": 2, "num_experts_per_tok": 3}
    reference = Reference(tiny.save("deepseek_v2", tmp_path, **overrides))
    core = tiny_engine(tmp_path)
    seen = {m.column: [] for m in core.model.decoder.modules() if isinstance(m, TopK)}
    for module in core.model.decoder.modules():
        if isinstance(module, TopK):
            module.register_forward_hook(lambda m, args, routing: seen[m.column].append(routing))
    answer = generate(core, {"a": list(range(5, 45))}, 3)["a"]
    _, expected = reference((answer.prompt + answer.tokens)[:-1])
    for column, layer in enumerate(core.info.layer_ids):
        ids_TK = torch.cat([r.ids_TK for r in seen[column]])[: len(answer.routes)]
        weights_TK = torch.cat([r.weights_TK for r in seen[column]])[: len(answer.routes)]
        np.testing.assert_array_equal(answer.routes[:, column], ids_TK)
        assert ((weights_TK == 0).sum(-1) == 1).all() and (weights_TK >= 0).all()
        assert (ids_TK.sort(-1).values.diff(dim=-1) > 0).all() and 0 <= ids_TK.min() <= ids_TK.max() < 8
        weighed = ids_TK[weights_TK > 0].view(-1, 2).tolist()
        theirs = expected[layer].tolist()
        assert all(set(own) <= set(others) for own, others in zip(weighed, theirs, strict=True))


@pytest.mark.parametrize("variant", ["jamba", "qwen3_5_moe", "gpt_oss", "lfm2_moe"])
def test_rows_of_the_last_slots(variant, tmp_path):
    """Hybrid caches: the record is as long as the highest slot, and its rows are right when the pool is full."""
    reference = Reference(tiny.save(variant, tmp_path))
    core = tiny_engine(tmp_path, max_total_tokens=152)
    random = np.random.default_rng(3)
    short, long = (random.integers(0, core.info.vocab_size, n).tolist() for n in (50, 148))
    generate(core, {"short": short}, 3)  # so that the slots of the next are not in order
    answers = generate(core, {"long": long}, 4)
    pool = core.runner.caches.pool
    written_S = (pool.tensor_SLK != pool.sentinel).all(-1).all(-1)
    # The last sampled token is never fed, so one slot of 152 may stay empty; slot 0 is nobody's.
    assert len(written_S) == 153 and written_S.nonzero().max() >= 151 and written_S[1:].sum() >= 151
    mode = Mode()
    compare(core, reference, answers, mode, 0, None)
    assert mode.ok, mode.wrong[:4]
