"""`tracklayer models`: every family with its MoE layers, its router and its mixers, as a table, Markdown or JSON.

What a family does is read off the spec of a well-known checkpoint of it (examples.json: the config keys that shape the
model; layers, experts and top-k are the published ones, a few widths are assumed). checked.json says where the family's
tiny checkpoints last equalled their reference; the tests write it.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from tracklayer.kernels.topk import RouterSpec
from tracklayer.layers.recurrent_spec import RecurrentSpec
from tracklayer.layers.spec import CompressedSpec, MLASpec, MLPSpec, MoESpec
from tracklayer.models.registry import all_families
from tracklayer.models.spec import Family, ModelSpec

HERE = Path(__file__).parent


def data(name: str) -> dict[str, Any]:
    file = HERE / name
    return json.loads(file.read_text()) if file.is_file() else {}


def example_spec(family: Family) -> tuple[str, ModelSpec] | None:
    """(name, spec) of the family's well-known checkpoint; None when examples.json has none."""
    example = data("examples.json").get(family.name)
    return (example["name"], family.spec(example["config"])) if example else None


def router_words(router: RouterSpec) -> str:
    """The routing rule in the order in which it is applied."""
    score = f"top-k of the logits, then {router.score}" if router.after_topk else router.score
    words = [
        f"experts by token id, weights by {score}" if router.hash_vocab else score,
        "bias on the logits" if router.gate_bias else "",
        "bias for the choice" if router.choice_bias else "",
        f"{router.topk_groups} of {router.num_groups} groups by {router.group_score}" if router.num_groups > 1 else "",
        f"top {router.top_k} of {router.num_experts}",
        f"and {router.num_zero_experts} zero experts" if router.num_zero_experts else "",
        "renormalised" if router.renormalize else "",
        "learned factor per expert" if router.per_expert_scale else "",
        f"x{router.scale:g}" if router.scale != 1 else "",
        "weight on the input" if router.weight_on_input else "",
        "float32 gate" if router.gate_dtype == "float32" else "",
    ]
    return ", ".join(word for word in words if word)


def mixer_words(spec: Any) -> str:
    """One mixer in a few words; recurrent ones by their spec's name and what they keep of a request."""
    if isinstance(spec, RecurrentSpec):
        kept = " and ".join("x".join(map(str, state.shape)) for state in spec.kept)
        return f"{type(spec).__name__.removesuffix('Spec')}, keeps {kept}"
    if isinstance(spec, MLASpec):
        heads = f"{spec.num_heads} heads of {spec.nope_dim}+{spec.rope_dim}/{spec.v_head_dim}"
        turned = "" if spec.rope else ", no positions"
        gate = f", gate per {spec.out_gate}" if spec.out_gate else ""
        chosen = f", the {spec.indexer.top_k} positions that an indexer chooses" if spec.indexer else ""
        return f"latent attention, {heads} over {spec.kv_lora_rank}{turned}{gate}{chosen}"
    if isinstance(spec, CompressedSpec):
        made, heads = spec.compressor, f"{spec.num_heads} heads over one key and value of {spec.width}"
        chosen = f", the {made.indexer.top_k} that an indexer chooses" if made and made.indexer else ""
        entries = f" and one entry for each {made.rate} tokens{chosen}" if made else ""
        return f"{heads}, rope on {spec.rope.dim}, sinks, window {spec.window}{entries}"
    width = f"{spec.head_dim}" if spec.value_dim == spec.head_dim else f"{spec.head_dim}/{spec.value_dim}"
    rope = spec.rope
    turned = "" if rope is None or rope.dim == spec.head_dim else f" on {rope.dim}"
    kind = ((rope.scaling or {}).get("rope_type") or "", "interleaved" * rope.interleaved) if rope else ()
    words = [
        f"{spec.num_heads}/{spec.num_kv_heads} heads of {width}",
        " ".join([*filter(None, kind), f"rope{turned}"]) if rope else "no positions",
        f"q/k norm {spec.qk_norm}{' after rope' if spec.qk_norm_after_rope else ''}" if spec.qk_norm else "",
        f"window {spec.window}" if spec.window else "",
        f"chunk {spec.chunk}" if spec.chunk else "",
        f"blocks of {spec.block}" if spec.block else "",
        "sinks" if spec.sinks else "",
        f"softcap {spec.softcap:g}" if spec.softcap else "",
        f"gate per {spec.out_gate}" if spec.out_gate else "",
    ]
    return ", ".join(word for word in words if word)


def describe(family: Family) -> dict[str, Any]:
    """What the commands print of a family; the same keys as --json."""
    row: dict[str, Any] = {
        "family": family.name,
        "architectures": list(family.architectures),
        "moe_layers": family.layers_rule,
        "oracle": family.oracle,
        "checked": data("checked.json").get(family.name, {}),
        "note": family.note,
    }
    known = example_spec(family)
    if known is None:
        return row
    name, spec = known
    bodies = [sub.body for subs in spec.layers for sub in subs]
    routers = Counter(router_words(body.router) for body in bodies if isinstance(body, MoESpec))
    mixers = Counter(mixer_words(body) for body in bodies if not isinstance(body, (MoESpec, MLPSpec)))
    shared = any(isinstance(body, MoESpec) and body.shared for body in bodies)
    return row | {
        "example": name,
        "num_layers": len(spec.layers),
        "num_moe_layers": len(spec.moe_layers),
        "first_moe_layer": spec.moe_layers[0],
        "num_experts": max(router.num_logits for router in spec.routers),
        "top_k": max(router.top_k for router in spec.routers),
        "shared_experts": shared,
        "routers": [text for text, _ in routers.most_common()],
        "mixers": [f"{count} x {text}" for text, count in mixers.most_common()],
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    """One table: identity and layers; then the router and the mixers."""
    lines = [
        "| family | architectures | MoE layers | example: MoE of all layers | router | mixers | oracle | checked |",
        "|-|-|-|-|-|-|-|-|",
    ]
    for row in rows:
        count = f"{row['example']}: {row['num_moe_layers']} of {row['num_layers']}" if "example" in row else ""
        cells = [
            row["family"],
            ", ".join(row["architectures"]),
            row["moe_layers"],
            count,
            "; ".join(row.get("routers", [])) + ("; shared expert" if row.get("shared_experts") else ""),
            "; ".join(row.get("mixers", [])),
            row["oracle"],
            ", ".join(f"{device}" for device in row["checked"]) or "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    notes = [f"- {row['family']}: {row['note']}." for row in rows if row["note"]]
    return "\n".join([*lines, "", "Choices made where references disagree:", "", *notes])


def plain(rows: list[dict[str, Any]]) -> str:
    """A few lines a family, for a terminal."""
    blocks = []
    for row in rows:
        lines = [f"{row['family']}  ({', '.join(row['architectures'])})", f"    MoE layers: {row['moe_layers']}"]
        if "example" in row:
            lines[-1] += f"; {row['example']}: {row['num_moe_layers']} of {row['num_layers']}"
        lines += [f"    router: {text}" for text in row.get("routers", [])]
        lines += [f"    mixer: {text}" for text in row.get("mixers", [])]
        lines.append(f"    compared with: {row['oracle']}; on {', '.join(row['checked']) or 'nothing yet'}")
        blocks.append("\n".join([*lines, *([f"    note: {row['note']}"] if row["note"] else [])]))
    return "\n".join(blocks)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tracklayer models", description="list the model families that are served")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON array")
    form.add_argument("--markdown", action="store_true", help="the table of docs/models.md")
    options = parser.parse_args(argv)
    rows = [describe(family) for family in all_families()]
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print(markdown(rows) if options.markdown else plain(rows))
    return 0
