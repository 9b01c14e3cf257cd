"""What the pool holds is the reference router's choice on the hidden states that entered the router, in every mode."""

from __future__ import annotations

from dataclasses import dataclass, field

import moe_checks
import numpy as np
import pytest
import tiny
import torch
from engine_tools import SMALL, prompts, request, run

from tracklayer.config import EngineConfig
from tracklayer.engine.engine import EngineCore
from tracklayer.kernels.norm import as_tensor
from tracklayer.kernels.topk import select_experts_ref
from tracklayer.layers.router import TopK
from tracklayer.runner.load import load_model

pytestmark = pytest.mark.gpu

WIDE = {"hidden_size": 128}
VARIANTS = ["mixtral", "qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss"]
PROMPTS = prompts(9, (5, 23, 70))


@dataclass
class Watch:
    """Clones of what entered each router, with the slots that its ids went to; made inside graphs too.

    A graph runs no Python: what it clones is found under its size (`captured`), and is that of its last replay.
    """

    live: list[tuple[TopK, torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    captured: dict[object, list[tuple[TopK, torch.Tensor, torch.Tensor, torch.Tensor]]] = field(default_factory=dict)
    rows: int = 0
    close: int = 0

    def see(self, router: TopK, args: tuple, routing: object) -> None:
        x, gate_ED, gate_bias_E, batch = args
        logits_TE = as_tensor(x).double() @ gate_ED.double().t()
        if gate_bias_E is not None:
            logits_TE = logits_TE + gate_bias_E.double()
        padded = batch.num_tokens_1 if batch.num_tokens_1 is not None else torch.tensor([len(logits_TE)])
        self.live.append((router, logits_TE.clone(), batch.slots_T, padded))

    def keep(self, key: object) -> None:
        """What was seen since the last call belongs to the graph `key`."""
        self.captured[key] = self.live[-len(self.live) // 2 :]  # a size runs once eagerly before it is captured
        self.live = []

    def check(self, core: EngineCore, seen: list) -> None:
        torch.cuda.synchronize()
        pool_SLK = core.runner.caches.pool.tensor_SLK
        for router, logits_TE, slots_T, count in seen:
            n = int(count[0])
            rest = {"bias_E": router.bias_E, "expert_scale_E": router.scale_E}
            dtype = core.model.dtype if router.spec.gate_dtype == "model" else torch.float32
            near = 1e-4 if dtype == torch.float32 else 4e-2  # a sum in another order, or a step of the gate's dtype
            rounded_TE = logits_TE[:n].to(dtype)
            want_TK = select_experts_ref(rounded_TE.float(), router.spec, **rest).ids_TK.sort(-1).values
            got_TK = pool_SLK[slots_T[:n].long(), router.column].int().sort(-1).values
            same_T = (want_TK == got_TK).all(-1)
            close_T = ~moe_checks.steady(logits_TE[:n], near, router.spec, **rest)
            real_T = slots_T[:n] >= core.config.page_size  # page 0 takes what padding writes
            assert (same_T | close_T | ~real_T).all(), f"layer {router.layer_id}: {(~same_T & ~close_T).nonzero()}"
            self.rows += int(real_T.sum())
            self.close += int((~same_T & real_T).sum())


def watched(folder, dtype: str, **options) -> tuple[EngineCore, Watch]:
    config = EngineConfig(model_path=str(folder), **{**SMALL, "device": "cuda", "dtype": dtype, **options})
    model, watch = load_model(config, 0), Watch()
    for module in model.decoder.modules():
        if isinstance(module, TopK):
            module.register_forward_hook(watch.see)
    core = EngineCore(config, model=model)
    runner = core.runner
    watch.live = []
    for graphs in (runner.graphs, runner.mixed):
        if graphs is None:
            continue
        for size in reversed(graphs.sizes):  # capture again, one size at a time, to know what belongs to which
            sizes, graphs.sizes, known = graphs.sizes, [size], graphs.graphs
            with torch.inference_mode():
                graphs.capture()
            graphs.sizes, graphs.graphs = sizes, {**known, **graphs.graphs}
            watch.keep((type(graphs), size))
        whole = graphs.run

        def replay(first, size, graphs=graphs, whole=whole):
            found = whole(first, size)
            watch.live = list(watch.captured[type(graphs), size])
            return found

        graphs.run = replay
    launch = runner.launch

    def checked(plan, *rest):
        watch.live = []
        pending = launch(plan, *rest)
        watch.check(core, watch.live)
        return pending

    runner.launch = checked
    return core, watch


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_recorded_ids_are_the_choice_on_the_same_hidden_states(variant, dtype, tmp_path):
    tiny.save(variant, tmp_path, **WIDE)
    for options in ({}, {"disable_cuda_graph": True}, {"chunked_prefill_size": 16}, {"disable_overlap_schedule": True}):
        core, watch = watched(tmp_path, dtype, **options)
        found = run(core, [request(str(i), p, tokens=10) for i, p in enumerate(PROMPTS)])
        assert all(len(r.routes) == len(PROMPTS[int(rid)]) + 9 for rid, r in found.items())
        layers = len(core.info.layer_ids)
        assert watch.rows >= layers * sum(len(p) + 9 for p in PROMPTS[:3]), (
            f"{options}: only {watch.rows} rows were seen"
        )
        print(f"{variant} {dtype} {options}: {watch.rows} rows, {watch.close} at near ties differ")
        assert watch.close <= (0.002 if dtype == "float32" else 0.1) * watch.rows, f"{options}: {watch.close} differ"


@pytest.mark.parametrize("variant", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_poison_in_unused_slots_reaches_nobody(variant, tmp_path):
    """NaN in every slot of the caches that no token was written to, page 0 of padding included."""
    tiny.save(variant, tmp_path, **WIDE)
    asked = [request(str(i), p, tokens=16) for i, p in enumerate(PROMPTS[:7])]
    results = []
    for poison in (False, True):
        config = EngineConfig(model_path=str(tmp_path), **{**SMALL, "device": "cuda", "dtype": "float32"})
        core = EngineCore(config)
        if poison:
            for caches in core.runner.caches.kv:
                for cache in caches:
                    cache.fill_(torch.nan)
        results.append(run(core, asked))
    clean, poisoned = results
    for rid, one in clean.items():
        assert poisoned[rid].tokens == one.tokens, rid
        np.testing.assert_array_equal(poisoned[rid].routes, one.routes, err_msg=rid)
