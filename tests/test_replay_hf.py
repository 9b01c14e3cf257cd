"""Replay in Hugging Face models: own routes change nothing, other routes do what a plain re-implementation does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from replay_families import (  # noqa: E402
    EXPERTS,
    FAMILIES,
    PRESENT,
    TOKENS_BS,
    WHOLE,
    attributes,
    build,
    forward,
    gradients,
    loss_of,
    other_routes,
    own_routes,
    replayed,
)
from torch import Tensor, nn  # noqa: E402

from tracklayer.replay.hf import find_routers, replay_routes, route_shape  # noqa: E402
from tracklayer.replay.packing import ReplayBatch, lay_out, packed_slots, padded_slots  # noqa: E402
from tracklayer.routes.record import Routes  # noqa: E402


@pytest.mark.parametrize("name", PRESENT)
def test_own_routes_change_nothing(name: str) -> None:
    model = build(name)
    out, grads = gradients(model, lambda: forward(model))
    routes = own_routes(model)
    assert routes[0].layer_ids == FAMILIES[name].layers
    before = attributes(model)
    again, again_grads = gradients(model, lambda: replayed(model, lay_out(routes, WHOLE)))
    assert torch.equal(out, again)
    assert grads.keys() == again_grads.keys()
    assert [key for key in grads if not torch.equal(grads[key], again_grads[key])] == []
    for router in find_routers(model):
        assert any(f"{router.path}." in key and grads[key].abs().max() > 0 for key in grads), router.path
    assert attributes(model) == before


def plain_replay(model: nn.Module, name: str, batch: ReplayBatch, tokens: Tensor = TOKENS_BS) -> Tensor:
    """The forced choice done another way: every router's output is replaced, its weights written out by hand."""
    family, hooks = FAMILIES[name], []

    def replaced(ids_NK: Tensor, module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        x_ND = (args[0] if args else kwargs["hidden_states"]).reshape(-1, model.config.hidden_size)
        weights_NK = family.rule(module, x_ND, ids_NK, model.config, args[1:])
        if name == "llama4":
            return torch.zeros_like(out[1]).scatter(1, ids_NK, weights_NK), out[1]
        if name == "dbrx":
            return out, weights_NK
        shaped = [part for part in out if part.shape == ids_NK.shape]
        if [part.is_floating_point() for part in shaped] != [True, False]:
            pytest.skip("this version's router hands its choice on in another form")
        return tuple({id(shaped[0]): weights_NK, id(shaped[1]): ids_NK}.get(id(part), part) for part in out)

    for router in find_routers(model):
        ids_NK = torch.tensor(batch.ids_NLK[:, batch.layer_ids.index(router.layer)].astype(np.int64))
        hooks.append(
            router.module.register_forward_hook(lambda *call, ids_NK=ids_NK: replaced(ids_NK, *call), with_kwargs=True)
        )
        if router.chooses_in_block:  # its router's hook hands the weights on beside the logits
            router.block.route_tokens_to_experts = lambda pair, ids_NK=ids_NK: (pair[1], ids_NK)
    try:
        return forward(model, tokens)
    finally:
        for hook in hooks:
            hook.remove()
        for router in find_routers(model):
            router.block.__dict__.pop("route_tokens_to_experts", None)


@pytest.mark.parametrize("name", PRESENT)
def test_other_routes_equal_a_plain_reimplementation(name: str) -> None:
    model = build(name)
    if name != "dbrx" and any(r.chooses_in_block for r in find_routers(model)):
        pytest.skip("this version's router hands on logits only")
    batch = lay_out(other_routes(own_routes(model)), WHOLE)
    out, grads = gradients(model, lambda: replayed(model, batch))
    want, want_grads = gradients(model, lambda: plain_replay(model, name, batch))
    assert (out - forward(model)).abs().max() > 1e-3, "other routes had no effect"
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    for router in find_routers(model):
        for key in (key for key in grads if f"{router.path}." in key and "experts" not in key):
            torch.testing.assert_close(
                grads[key], want_grads[key], rtol=1e-3, atol=1e-4 * grads[key].abs().max().item()
            )


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "gpt_oss", "granitemoe"])
def test_other_expert_kernels(name: str, experts: str) -> None:
    model, eager = build(name, experts), build(name)
    out, grads = gradients(model, lambda: forward(model))
    routes = own_routes(model)
    again, again_grads = gradients(model, lambda: replayed(model, lay_out(routes, WHOLE)))
    assert torch.equal(out, again)
    assert all(torch.equal(grads[key], again_grads[key]) for key in grads)
    batch = lay_out(other_routes(routes), WHOLE)
    torch.testing.assert_close(replayed(model, batch), replayed(eager, batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v2", "deepseek_v4", "gpt_oss", "phimoe", "gemma4"])
def test_own_routes_in_bfloat16(name: str) -> None:
    model = build(name).bfloat16()
    out, grads = gradients(model, lambda: forward(model))
    again, again_grads = gradients(model, lambda: replayed(model, lay_out(own_routes(model), WHOLE)))
    assert torch.equal(out, again)
    assert all(torch.equal(grads[key], again_grads[key]) for key in grads)


def test_router_gradient_by_finite_differences() -> None:
    model = build("dbrx").double()  # with this attention, nothing in it rounds to float32
    model.set_attn_implementation("sdpa")
    batch = lay_out(other_routes(own_routes(model)), WHOLE)
    _, grads = gradients(model, lambda: replayed(model, batch))
    rng = np.random.default_rng(0)
    for router in find_routers(model):
        weight, grad = router.module.layer.weight, grads[f"{router.path}.router.layer.weight"]
        assert grad.abs().min(1).values.max() > 0
        for _ in range(6):
            e, d = int(rng.integers(EXPERTS)), int(rng.integers(weight.shape[1]))
            sides = []
            for step in (1e-5, -2e-5):
                with torch.no_grad():
                    weight[e, d] += step
                    sides.append(loss_of(replayed(model, batch)).item())
            with torch.no_grad():
                weight[e, d] += 1e-5
            assert (sides[0] - sides[1]) / 2e-5 == pytest.approx(grad[e, d].item(), rel=1e-5, abs=1e-7)


def test_forced_expert_of_a_dropped_group_keeps_its_weight() -> None:
    """DeepSeek-V2 zeroes the scores of dropped groups; a replayed id there must have weight and gradient."""
    model = build("deepseek_v2")
    routes = own_routes(model)
    router = find_routers(model)[0]
    groups = routes[0].experts_TLK[0, 0] // 2
    dropped = sorted(set(range(4)) - set(groups.tolist()))[0]
    ids = routes[0].experts_TLK.copy()
    ids[0, 0, 2] = 2 * dropped
    seen = {}
    hook = router.module.register_forward_hook(lambda m, a, out: seen.update(weights=out[1], ids=out[2]))
    replayed(model, lay_out([Routes(ids, routes[0].layer_ids, EXPERTS), routes[1]], WHOLE))
    hook.remove()
    assert seen["ids"][0, 2] == 2 * dropped
    assert seen["weights"][0, 2] > 1e-4
    assert torch.autograd.grad(seen["weights"][0, 2], router.module.weight)[0].abs().max() > 0


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "dbrx"])
def test_gradient_checkpointing_sees_the_same_routes(name: str, reentrant: bool) -> None:
    """Two micro-batches, both forwards first, backwards after the blocks in the other order and inside one of them."""
    model = build(name)
    tokens = [TOKENS_BS, TOKENS_BS.flip(1)]
    batches = [lay_out(other_routes(own_routes(model, tokens=t), seed), WHOLE) for seed, t in enumerate(tokens)]
    for module in model.modules():  # dropout is off in all of these; training mode is what switches checkpoints on
        module.training = True
    want = [gradients(model, lambda i=i: replayed(model, batches[i], tokens[i])) for i in (0, 1)]
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    before = attributes(model)
    outs = [replayed(model, batches[i], tokens[i]) for i in (0, 1)]
    assert attributes(model) == before
    for i in (1, 0):
        model.zero_grad()
        loss_of(outs[i]).backward()
        for key, p in model.named_parameters():
            if p.grad is not None:
                assert torch.equal(p.grad, want[i][1][key]), key
    with replay_routes(model, batches[0]):
        out0 = forward(model, tokens[0])
    with replay_routes(model, batches[1]):
        out1 = forward(model, tokens[1])
        model.zero_grad()
        loss_of(out0).backward()  # of the other micro-batch, inside this one's block
        assert all(torch.equal(p.grad, want[0][1][k]) for k, p in model.named_parameters() if p.grad is not None)
        model.zero_grad()
        loss_of(out1).backward()
        assert all(torch.equal(p.grad, want[1][1][k]) for k, p in model.named_parameters() if p.grad is not None)
    assert attributes(model) == before


def test_torchs_checkpoint_wrapper_too() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    model = build("qwen3_moe")
    batch = lay_out(other_routes(own_routes(model)), WHOLE)
    _, want = gradients(model, lambda: replayed(model, batch))
    apply_activation_checkpointing(model, check_fn=lambda m: type(m).__name__.endswith("DecoderLayer"))
    before = attributes(model)
    _, grads = gradients(model, lambda: replayed(model, batch))
    assert attributes(model) == before
    assert [
        key for key in grads if not torch.equal(grads[key], want[key.replace("_checkpoint_wrapped_module.", "")])
    ] == []


def _alone(model: nn.Module, tokens: list[Tensor], routes: list[Routes]) -> list[Tensor]:
    outs = []
    for ids, r in zip(tokens, routes, strict=True):
        batch = lay_out([r], padded_slots(np.ones((1, len(ids)))))
        outs.append(replayed(model, batch, ids[None])[0])
    return outs


def _three_samples(model: nn.Module) -> tuple[list[Tensor], list[Routes], list[Tensor]]:
    tokens = [TOKENS_BS[0, :7], TOKENS_BS[1, :3], TOKENS_BS[1, 2:7]]
    shape = route_shape(model)
    empty = [
        Routes(np.tile(np.arange(shape.top_k), (len(t) - 1, len(shape.layer_ids), 1)), shape.layer_ids, EXPERTS)
        for t in tokens
    ]
    routes = other_routes(empty, 3)
    return tokens, routes, _alone(model, tokens, routes)


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding(side: str) -> None:
    model = build("qwen3_moe")
    tokens, routes, want = _three_samples(model)
    mask = np.zeros((3, 9), int)
    grid = torch.full((3, 9), 5)
    for i, ids in enumerate(tokens):
        first = {"left": 9 - len(ids), "right": 0, "both": 1}[side]
        mask[i, first : first + len(ids)] = 1
        grid[i, first : first + len(ids)] = ids
    batch = lay_out(routes, padded_slots(mask))
    position = torch.tensor(np.maximum(np.cumsum(mask, 1) - 1, 0))
    out = replayed(model, batch, grid, attention_mask=torch.tensor(mask), position_ids=position)
    for i in range(3):
        torch.testing.assert_close(out[i][torch.tensor(mask[i] == 1)], want[i], rtol=1e-4, atol=1e-5)


def test_packed() -> None:
    model = build("qwen3_moe")
    tokens, routes, want = _three_samples(model)
    slots = packed_slots([0, 7, 10, 15], 17)
    flat = torch.cat([*tokens, torch.tensor([4, 4])])[None]
    same = (slots.sample_N[:, None] == slots.sample_N[None]) & np.tri(17, dtype=bool)
    bias = torch.where(torch.tensor(same), 0.0, torch.finfo(torch.float32).min)[None, None]
    out = replayed(
        model,
        lay_out(routes, slots),
        flat,
        attention_mask=bias,
        position_ids=torch.tensor(slots.position_N)[None].long(),
    )
    torch.testing.assert_close(out[0, :15], torch.cat(want), rtol=1e-4, atol=1e-5)


def test_unreplayed_tokens_use_the_live_router() -> None:
    """Response-only replay, a sample without routes, and the last token: each keeps the experts of its own router."""
    model = build("qwen3_moe")
    routes = [r.tokens(0, 6) for r in other_routes(own_routes(model))]
    batch = lay_out([routes[0], None], WHOLE, replay=[slice(4, None), None])
    assert batch.replay_NL.sum() == 2 * 3  # positions 4 and 5 of sample 0, three layers
    first = find_routers(model)[0]
    seen: list[Tensor] = []
    hook = first.module.register_forward_hook(lambda m, a, out: seen.append(out[2]))
    with replay_routes(model, batch, observe=True) as replay:
        forward(model)
    hook.remove()
    live_NK, used_NK = replay.observed[first.layer].live_ids_NK, seen[0]
    assert torch.equal(used_NK[6:], live_NK[6:]) and torch.equal(used_NK[:4], live_NK[:4])
    assert np.array_equal(used_NK[4:6].numpy(), routes[0].experts_TLK[4:6, 0])


def test_scores_are_those_that_choose() -> None:
    """observed scores explain the live choice, with the experts of earlier layers forced."""
    model = build("deepseek_v3")
    with replay_routes(model, lay_out(other_routes(own_routes(model)), WHOLE), observe=True) as replay:
        forward(model)
    for seen in replay.observed.values():
        assert torch.equal(seen.scores_NE.topk(3, sorted=False).indices.sort().values, seen.live_ids_NK.sort().values)


def test_phimoe_in_training_draws_nothing_for_forced_tokens() -> None:
    model = build("phimoe")
    batch = lay_out(other_routes(own_routes(model)), WHOLE)
    want = replayed(model, batch)
    for module in model.modules():
        module.training = True
        for jitter in ("input_jitter_noise",):
            if hasattr(module, jitter):
                setattr(module, jitter, 0.0)
    torch.testing.assert_close(replayed(model, batch), want, rtol=1e-3, atol=1e-3)
