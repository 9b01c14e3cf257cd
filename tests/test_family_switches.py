"""Every switch that a family turns matters: turned back, its tiny checkpoint no longer equals its reference.

This is what makes the parity of test_families.py worth something: a term that the tiny checkpoint can not see (a window
longer than the prompt, a norm of ones, a factor of one) would show here.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import tiny
import torch
from parity import Mode, Reference, compare, generate, tiny_engine

from tracklayer.layers.spec import AttentionSpec, MoESpec
from tracklayer.runner import load

# field -> what it is turned to; a callable gets the current value
SWITCHES: dict[str, Any] = {
    # router
    "renormalize": lambda flag: not flag,
    "score": lambda score: "sigmoid" if score == "softmax" else "softmax",
    "num_groups": 1,
    "group_score": "max",
    "weight_on_input": False,
    "renorm_p": lambda p: 1.0 if p != 1.0 else 3.0,
    "jitter": lambda jitter: jitter / 4,
    # attention
    "window": lambda window: window and 1000,
    "chunk": None,
    "softcap": None,
    "q_temperature": None,
    "v_norm": False,
    "v_scale": 1.0,
    "clip_qkv": None,
    "qk_norm_after_rope": lambda flag: not flag,
    "interleaved": lambda flag: not flag,
    "theta": lambda theta: theta * 2,
    "scaling": None,
    "dim": lambda dim: dim // 2,
    # experts and model
    "clamp_before": None,
    "clamp_after": None,
    "output_scale": 1.0,
    "residual_scale": 1.0,
    "parallel": False,
    "offset": 0.0,
    "embed_scale": 1.0,
    "logit_scale": 1.0,
    "logit_softcap": None,
    "normed_head": False,
}
REPEATED = ("_interval", "_plain", "_p2", "_own_values", "_unnormed", "_window")
VARIANTS = [v for v in tiny.VARIANTS if not v.endswith(REPEATED)]


def turned(value: Any, name: str, to: Any) -> Any:
    """The spec with every field `name` in it set to `to`, dataclasses and tuples walked."""
    if isinstance(value, tuple):
        return tuple(turned(item, name, to) for item in value)
    if not is_dataclass(value):
        return value
    changes = {}
    for f in fields(value):
        old = getattr(value, f.name)
        if f.name == name:
            changes[f.name] = to(old) if callable(to) else to
        else:
            changes[f.name] = turned(old, name, to)
    return replace(value, **changes)


def matters(spec: Any, name: str) -> bool:
    """Whether the switch can show: not what the family does not use, nor what cancels in exact arithmetic."""
    routers = spec.routers
    if name == "group_score":
        return any(r.num_groups > 1 for r in routers)
    if name == "renorm_p":
        return any(r.renormalize for r in routers)
    if name == "jitter":
        return any(r.score == "sparsemixer" for r in routers)
    if name == "score":
        return not any(r.score == "sparsemixer" for r in routers)
    if name == "renormalize":
        # softmax over the chosen sums to one; a norm right behind the experts cancels a token's common factor
        sums = any(r.score == "sparsemixer" or (r.after_topk and r.score == "softmax") for r in routers)
        cancels = any(s.post_norm and isinstance(s.body, MoESpec) and not s.body.shared for s in sublayers(spec))
        return not sums and not cancels
    if name == "qk_norm_after_rope":
        # a clip comes between norm and rotation; a norm without weights commutes with it
        return any(a.qk_norm and a.rope and a.clip_qkv is None and a.qk_norm_weight for a in attentions(spec))
    return True


def attentions(spec: Any) -> list[Any]:
    return [sub.body for sub in sublayers(spec) if isinstance(sub.body, AttentionSpec)]


def sublayers(spec: Any) -> list[Any]:
    return [sub for subs in spec.layers for sub in subs]


@pytest.mark.parametrize("variant", VARIANTS)
def test_turning_a_switch_back_shows(variant, tmp_path, monkeypatch):
    model = tiny.save(variant, tmp_path)
    core = tiny_engine(tmp_path, skip_route_selftest=True)
    family, spec, plain = core.model.family, core.model.spec, Reference(model)
    prompt = torch.randint(0, 97, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    answer = generate(core, {"a": prompt}, 2)
    honest = Mode()
    compare(core, plain, answer, honest, 0, None)
    assert honest.ok
    tried, unseen = 0, []
    for name, to in SWITCHES.items():
        other = turned(spec, name, to)
        if other == spec or not matters(spec, name):
            continue
        tried += 1
        monkeypatch.setattr(load, "resolve", lambda config, other=other: (family, other))
        try:
            wrong = tiny_engine(tmp_path, skip_route_selftest=True)
        except (ValueError, AssertionError):
            continue  # the switch can not even be turned alone
        mode = Mode()
        compare(wrong, plain, generate(wrong, {"a": prompt}, 2), mode, 0, None)
        if mode.ok:
            unseen.append(name)
    assert tried >= 2 and not unseen, f"{tried} switches tried; the checkpoint does not see {unseen}"
