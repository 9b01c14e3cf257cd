"""The command line from files to exit status: replies of SGLang's and vLLM's form, a tiny model, pages and JSON."""

from __future__ import annotations

import base64
import io
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from replay_families import VOCAB, build

from tracklayer.audit.cli import main
from tracklayer.audit.load import Recorded, lay, read_recorded
from tracklayer.errors import UserError
from tracklayer.replay.hf import replay_routes
from tracklayer.routes.codec import encode_packed
from tracklayer.routes.forms import RouteShape
from tracklayer.routes.record import Routes
from tracklayer.routes.store import save_routes

S = 40  # tokens; the last one was never fed
SHAPE = RouteShape(layer_ids=(1, 2), top_k=3, num_experts=8, num_hidden_layers=3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """deepseek_v3: one dense layer, two MoE layers, 8 experts in 4 groups, top 3."""
    path = tmp_path_factory.mktemp("model")
    build("deepseek_v3").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def requests() -> list[tuple[np.ndarray, np.ndarray]]:
    """(tokens [S], routes [S-1, 2, 3]) of three requests, as an engine running in bf16 chooses."""
    model = build("deepseek_v3").to(torch.bfloat16)
    made = []
    for seed in range(3):
        tokens = np.random.default_rng(seed).integers(3, VOCAB, S)
        with torch.no_grad(), replay_routes(model, None, observe=True) as replay:
            model(input_ids=torch.tensor(tokens[None]), use_cache=False)
        ids = torch.stack([replay.observed[r.layer].live_ids_NK for r in replay.routers], 1)
        made.append((tokens, ids.numpy().astype(np.int32)[:-1]))
    return made


def all_layers(routes: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros_like(routes[:, :1]), routes], 1)


def sglang(tokens: np.ndarray, routes: np.ndarray) -> dict:
    blob = base64.b64encode(all_layers(routes).astype("<i4").tobytes()).decode()
    return {
        "input_ids": tokens[:30].tolist(),
        "output_ids": tokens[30:].tolist(),
        "meta_info": {"routed_experts": blob},
    }


def vllm(tokens: np.ndarray, routes: np.ndarray) -> dict:
    file = io.BytesIO()
    np.save(file, routes.astype(np.uint8))
    choice = {
        "prompt_token_ids": tokens[:30].tolist(),
        "token_ids": tokens[30:].tolist(),
        "routed_experts": base64.b64encode(file.getvalue()).decode(),
    }
    return {"choices": [choice]}


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main([str(a) for a in argv])
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.mark.parametrize("reply", [sglang, vllm])
def test_clean_replies(reply, checkpoint, requests, tmp_path, capsys) -> None:
    file = tmp_path / "reply.json"
    file.write_text(json.dumps([reply(*r) for r in requests]))
    status, out, _ = run(capsys, "--model", checkpoint, "--routes", file, "--json")
    report = json.loads(out)
    assert status == 0 == report["status"]
    assert [r["verdict"] for r in report["requests"]] == ["clean"] * 3
    assert all(r["sums"]["sets"] == 2 * (S - 1) and r["sums"]["equal_share"] > 0.9 for r in report["requests"])


def test_the_wrong_request_is_found(checkpoint, requests, tmp_path, capsys) -> None:
    """Request 0 was given the rows of request 2."""
    file = tmp_path / "replies.jsonl"
    spoiled = [(requests[0][0], requests[2][1]), *requests[1:]]
    file.write_text("\n".join(json.dumps(sglang(*r)) for r in spoiled))
    page = tmp_path / "audit.html"
    status, out, _ = run(capsys, "--model", checkpoint, "--routes", file, "--json", "--html", page)
    first, *rest = json.loads(out)["requests"]
    assert status == 1
    assert first["finding"]["fault"] == "another request's rows"
    assert "replies.jsonl[2]" in first["finding"]["evidence"]["request"]
    assert [r["verdict"] for r in rest] == ["clean", "clean"]
    check_page(page.read_text(), pictures=9)


def check_page(text: str, pictures: int) -> None:
    """Whole HTML, nothing loaded from elsewhere, every picture well-formed and inside its view."""

    class Tags(HTMLParser):
        open_tags: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag, attrs):
            assert tag not in ("script", "link", "img", "iframe")
            if tag != "meta":
                self.open_tags.append(tag)

        def handle_endtag(self, tag):
            assert self.open_tags.pop() == tag

    parser = Tags()
    parser.open_tags = []
    parser.feed(text)
    assert not parser.open_tags
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text
    svgs = re.findall(r"<svg.*?</svg>", text, re.S)
    assert len(svgs) == pictures
    for svg in svgs:
        root = ElementTree.fromstring(svg)
        width, height = (float(v) for v in root.attrib["viewBox"].split()[2:])
        for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
            x, y, w, h = (float(rect.attrib[k]) for k in ("x", "y", "width", "height"))
            assert x >= 0 and y >= 0 and w >= 0 and h >= 0 and x + w <= width + 0.2 and y + h <= height + 0.2


def test_table_names_the_fault(checkpoint, requests, tmp_path, capsys) -> None:
    tokens, routes = requests[0]
    late = np.concatenate([routes[:1], routes[:-1]])
    file = tmp_path / "reply.json"
    file.write_text(json.dumps(sglang(tokens, late)))
    status, out, _ = run(capsys, "--model", checkpoint, "--routes", file)
    assert status == 1 and "shifted by 1 token" in " ".join(out.split())


def test_our_own_forms(checkpoint, requests, tmp_path, capsys) -> None:
    routes = [Routes(r, (1, 2), 8) for _, r in requests]
    save_routes(tmp_path / "r.safetensors", routes, token_ids=[t for t, _ in requests], num_hidden_layers=3)
    assert run(capsys, "--model", checkpoint, "--routes", tmp_path / "r.safetensors")[0] == 0
    packed = {"token_ids": requests[0][0].tolist(), "routed_experts": encode_packed(routes[0])}
    (tmp_path / "p.json").write_text(json.dumps(packed))
    assert run(capsys, "--model", checkpoint, "--routes", tmp_path / "p.json")[0] == 0
    np.save(tmp_path / "r.npy", requests[1][1])
    np.save(tmp_path / "t.npy", requests[1][0])
    assert run(capsys, "--model", checkpoint, "--routes", tmp_path / "r.npy", "--tokens", tmp_path / "t.npy")[0] == 0


def test_other_weights_are_named(checkpoint, requests, tmp_path, capsys) -> None:
    """The reference has moved on; the routes are of the weights before."""
    newer = build("deepseek_v3")
    with torch.no_grad():
        for name, weight in newer.named_parameters():
            if "gate" in name or "embed" in name:
                weight += 0.5 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    newer.save_pretrained(tmp_path / "newer")
    file = tmp_path / "reply.json"
    file.write_text(json.dumps(sglang(*requests[0])))
    status, out, _ = run(
        capsys, "--model", tmp_path / "newer", "--routes", file, "--other-weights", checkpoint, "--json"
    )
    finding = json.loads(out)["requests"][0]["finding"]
    assert status == 1 and finding["fault"] == "wrong weight version"
    assert str(checkpoint) in finding["evidence"]["version"]


# what can not be audited: exit status 2, and the reason with the remedy


def bad_files(path: Path, tokens: np.ndarray, routes: np.ndarray) -> dict[str, tuple[list[str], str]]:
    whole = sglang(tokens, routes)
    short = sglang(tokens[:20], routes)
    texts = {
        "none.json": (json.dumps({"text": "hello"}), "holds no routes"),
        "broken.json": ("{", "neither JSON"),
        "short.json": (json.dumps({**short, "input_ids": tokens[:20].tolist(), "output_ids": [5]}), "do not fit 21"),
        "base64.json": (json.dumps({"meta_info": {"routed_experts": "a?b"}, "token_ids": [1, 2]}), "not base64"),
        "bytes.json": (json.dumps({"meta_info": {"routed_experts": "AAA="}, "token_ids": [1, 2]}), "whole number"),
        "tokens.json": (json.dumps({"meta_info": whole["meta_info"]}), "--tokens FILE"),
        "ragged.json": (json.dumps({"token_ids": [1, 2], "routed_experts": [[[1, 2]], [[1]]]}), "unequal lengths"),
        "vocabulary.json": (json.dumps({**whole, "output_ids": [VOCAB] * 10}), "vocabulary"),
        "floats.json": (json.dumps({"token_ids": [1, 2], "routed_experts": [[[0.5, 1.0]]]}), "must be integers"),
    }
    for name, (text, _) in texts.items():
        (path / name).write_text(text)
    (path / "x.npy").write_bytes(b"nothing")
    (path / "x.safetensors").write_bytes(b"nothing")
    more = {"x.npy": "not a .npy", "x.safetensors": "not a route file", "absent.json": "not a file"}
    return {**{n: says for n, (_, says) in texts.items()}, **more}


def test_bad_input_is_explained(checkpoint, requests, tmp_path, capsys) -> None:
    for name, says in bad_files(tmp_path, *requests[0]).items():
        status, out, err = run(capsys, "--model", checkpoint, "--routes", tmp_path / name)
        assert (status, out) == (2, "") and says in err, f"{name}: {err}"
    good = tmp_path / "good.json"
    good.write_text(json.dumps(sglang(*requests[0])))
    status, _, err = run(capsys, "--model", tmp_path, "--routes", good)
    assert status == 2 and "no config.json" in err
    (tmp_path / "t.json").write_text("[[1, 2], [3]]")
    status, _, err = run(capsys, "--model", checkpoint, "--routes", good, "--tokens", tmp_path / "t.json")
    assert status == 2 and "2 token sequences for 1 requests" in err
    status, _, err = run(capsys, "--model", checkpoint, "--routes", good, "--html", tmp_path / "no" / "a.html")
    assert status == 2 and "can not be written" in err
    status, _, err = run(capsys, "--model", checkpoint, "--routes", good, "--tie-sigmas", "0")
    assert status == 2 and "--tie-sigmas" in err


def test_two_readings_are_refused() -> None:
    """Six ids of a 3-token sequence: 3 rows x 2 MoE layers with a last row, or 2 rows x 3 layers without one."""
    shape = RouteShape(layer_ids=(1, 2), top_k=1, num_experts=8, num_hidden_layers=3)
    flat = np.arange(6) % 8
    both = Recorded("r", flat)
    with pytest.raises(UserError, match=r"3 rows x 2 layers \(moe\) x 1"):
        lay(both, shape, num_tokens=3)
    assert lay(both, shape, 3, layers="moe").ids_TLK.shape == (3, 2, 1)
    assert lay(both, shape, 3, layers="all").ids_TLK.tolist() == [[[1], [2]], [[4], [5]]]
    with pytest.raises(UserError, match="layers must be one of"):
        lay(both, shape, 3, layers="dense")
    with pytest.raises(UserError, match=r"layers \[0, 1\]"):
        lay(Recorded("r", np.zeros((2, 2, 1), int), layer_ids=(0, 1)), shape, 3)


def test_shared_columns_are_let_through_to_be_named() -> None:
    wide = np.zeros((5, 2, SHAPE.top_k + 2), int)
    assert lay(Recorded("r", wide), SHAPE, 6).ids_TLK.shape == (5, 2, 5)
    with pytest.raises(UserError, match="do not fit"):
        lay(Recorded("r", np.zeros((5, 2, 2), int)), SHAPE, 6)


def test_split_arrays_and_offsets_are_read(tmp_path) -> None:
    prompt, output = np.full((3, 2, 1), 1), np.full((2, 2, 1), 2)
    reply = {"prompt_routed_experts": prompt.tolist(), "choices": [{"routed_experts": output.tolist()}]}
    (tmp_path / "v.json").write_text(json.dumps(reply))
    (read,) = read_recorded(tmp_path / "v.json")
    assert read.ids[:, 0, 0].tolist() == [1, 1, 1, 2, 2] and read.token_ids is None
    meta = {"routed_experts": base64.b64encode(bytes([3, 4])).decode(), "routed_experts_dtype": "uint8"}
    (tmp_path / "s.json").write_text(json.dumps({"meta_info": {**meta, "routed_experts_start_len": 7}}))
    (read,) = read_recorded(tmp_path / "s.json")
    assert read.ids.tolist() == [3, 4] and read.start == 7


def test_parts_that_need_no_torch_load_none() -> None:
    code = (
        "import sys, tracklayer.audit.verdict, tracklayer.audit.load, tracklayer.audit.html;"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
