"""Plain models of families that transformers has no class for, against the engine and against one another.

Those that parity.py knows are compared there with all ways of running; here is what it does not reach.
"""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import tiny
import torch
from engine_tools import make_core, request, run
from parity import MODES, check_variant
from reference_models import checkpoints
from reference_models.blocks import ByBlocks, denoise, shares
from reference_models.models import BailingV2, slopes
from reference_models.pieces import by_blocks, rotated
from safetensors.torch import save_file


def test_ling_2_equals_its_plain_model(tmp_path, monkeypatch):
    """Its other reference is made of another family's class in transformers; this one is made from its own code."""
    save = tiny.save

    def plain(variant, folder, **overrides):
        save(variant, folder, **overrides)
        return BailingV2(json.loads((folder / "config.json").read_text()), tiny.tensors_of(folder))

    monkeypatch.setattr(tiny, "save", plain)
    modes, _ = check_variant("bailing_moe_v2", tmp_path)
    assert set(modes) == set(MODES)
    for name, mode in modes.items():
        assert mode.ok, f"{name}: {mode}; {mode.wrong[:4]}"


def test_no_variant_is_without_its_plain_model():
    for variant, build in checkpoints.MODELS.items():
        model = build(0)
        model(input_ids=torch.tensor([[5, 3, 8]]))
        assert model.routes and all(ids.shape[0] == 3 for ids in model.routes.values()), variant


def test_a_tensor_that_is_never_read_is_seen():
    """Each tensor of a plain checkpoint matters: without it the model gives other logits, or none."""
    tokens = torch.tensor([list(range(12))])
    for variant, build in {**checkpoints.MODELS, **checkpoints.BLOCK_MODELS}.items():
        model = build(0)
        read: set[str] = set()

        class Noting(dict):
            def __getitem__(self, name, read=read):
                read.add(name)
                return super().__getitem__(name)

        model.tensors = Noting(model.tensors)
        model(input_ids=tokens)
        left = {name for name in set(model.tensors) - read if ".experts." not in name}
        assert not left, (variant, left)


@pytest.mark.parametrize("threshold", [0.0, 0.02, 1.0])
@pytest.mark.parametrize("variant", checkpoints.BLOCK_MODELS)
def test_block_families_equal_their_plain_models(variant, threshold, tmp_path):
    """Tokens of the denoising loop and the experts of the last pass, of several requests at once, and after a hit."""
    model = checkpoints.BLOCK_MODELS[variant](0)
    model.block, mask_id = 4, 96
    save_file({name: tensor.contiguous() for name, tensor in model.tensors.items()}, tmp_path / "model.safetensors")
    config = {**tiny.SPECIAL, **model.config, "block_length": model.block, "mask_token_id": mask_id}
    (tmp_path / "config.json").write_text(json.dumps(config))
    core = make_core(tmp_path, chunked_prefill_size=16, block_confidence=threshold)
    prompts = {str(n): np.random.default_rng(n).integers(0, mask_id, n).tolist() for n in (1, 4, 7, 18, 40)}
    for _ in ("fresh", "from the cache"):
        found = run(core, [request(rid, prompt, tokens=11) for rid, prompt in prompts.items()])
        for rid, prompt in prompts.items():
            tokens, routes = denoise(model, prompt, 11, mask_id, threshold=threshold)
            assert mask_id not in tokens and found[rid].tokens == tokens[len(prompt) :][:11]
            want_TLK = torch.stack([routes[layer] for layer in sorted(routes)], 1).sort(-1).values
            np.testing.assert_array_equal(np.sort(found[rid].routes, -1), want_TLK[: len(prompt) + 10])


def test_slopes_of_powers_of_two_and_between():
    assert slopes(4) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]
    assert slopes(6) == [*slopes(4), 2.0**-1, 2.0**-3]


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    x = torch.randn(1, 1, 8, generator=torch.Generator().manual_seed(0)).expand(6, 1, 8)
    for pairs in (False, True):
        turned = rotated(x, 4, 100.0, pairs)
        torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
        products = torch.einsum("thd,shd->ts", turned, turned)
        torch.testing.assert_close(products[1, 3], products[2, 4])
        assert (turned[0] == x[0]).all() and (turned[..., 4:] == x[..., 4:]).all()
        assert not torch.allclose(products[0, 1], products[0, 2])


def test_masks_of_blocks():
    assert by_blocks(5, 2).int().tolist() == [
        [1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1],
    ]
    assert shares(8, 3) == [3, 3, 2] and sum(shares(32, 32)) == 32


@pytest.fixture(params=list(checkpoints.BLOCK_MODELS))
def block_model(request) -> ByBlocks:
    model = checkpoints.BLOCK_MODELS[request.param](0)
    model.block = 4
    return model


def test_a_block_sees_itself_and_nothing_later(block_model):
    """A later token of the same block changes what a position gives; one of a later block does not."""
    tokens = torch.tensor([[7, 2, 9, 4, 11, 30, 8, 1]])
    whole = block_model(input_ids=tokens).logits[0]
    for place, touched in ((3, slice(0, 8)), (7, slice(4, 8))):
        other = tokens.clone()
        other[0, place] = 50
        changed = ((block_model(input_ids=other).logits[0] - whole).abs() > 1e-6).any(-1)
        expected = torch.zeros(8, dtype=torch.bool)
        expected[touched] = True
        assert changed.tolist() == expected.tolist()


@pytest.mark.parametrize("threshold", [0.0, 0.2, 1.1])
@pytest.mark.parametrize("steps", [None, 3])
def test_denoising(block_model, threshold, steps):
    """No mask is left, the prompt stays, and the routes are those of the finished sequence."""
    prompt, mask_id = [5, 9, 2, 14, 3, 40], 96
    tokens, routes = denoise(block_model, prompt, 5, mask_id, steps=steps, threshold=threshold)
    assert tokens[:6] == prompt and len(tokens) == 12
    block_model(input_ids=torch.tensor([tokens]))
    assert routes.keys() == block_model.routes.keys() and len(routes) > 0
    for layer, ids in routes.items():
        assert torch.equal(ids, block_model.routes[layer]) and len(ids) == 12


def test_denoising_fills_the_surest_first(block_model):
    """With a threshold that nothing reaches, one step at a time fills the surest position and keeps the others."""
    seen = []
    call = type(block_model).__call__

    class Watching(type(block_model)):
        def __call__(self, input_ids, **given):
            out = call(self, input_ids, **given)
            seen.append((input_ids[0].tolist(), out.logits[0].softmax(-1)))
            return out

    block_model.__class__ = Watching
    tokens, _ = denoise(block_model, [5, 9, 2, 14], 4, 96, threshold=1.1)
    assert len(seen) == 5 and seen[-1][0] == tokens
    for (before, probability), (after, _) in pairwise(seen):
        filled = [t for t in range(8) if before[t] != after[t]]
        masked = [t for t in range(4, 8) if before[t] == 96]
        surest = max(masked, key=lambda t: float(probability[t].max()))
        assert filled in ([surest], []) and after[surest] == int(probability[surest].argmax())
