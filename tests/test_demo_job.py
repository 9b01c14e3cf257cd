"""The demonstration's client, table, picture and last line, against a server made here."""

from __future__ import annotations

import asyncio
import json
import sys

import httpx
import numpy as np
import pytest

from tracklayer.demo import check, client, job, show
from tracklayer.demo.prompts import GUIDE, PROMPTS, Prompt
from tracklayer.errors import TracklayerError
from tracklayer.routes.codec import encode
from tracklayer.routes.forms import RouteShape
from tracklayer.routes.record import Routes
from tracklayer.routes.store import RouteFile

SHAPE = RouteShape(layer_ids=(0, 1), top_k=2, num_experts=4, num_hidden_layers=2)


class Words:
    """A tokenizer that gives one id a word."""

    def apply_chat_template(self, messages, **_):
        return [hash(word) % 50 for m in messages for word in m["content"].split()]


def some_routes(rows: int, seed: int = 0) -> Routes:
    draw = np.random.default_rng(seed)
    ids = np.stack([draw.permutation(4)[:2] for _ in range(rows * 2)]).reshape(rows, 2, 2)
    return Routes(ids, (0, 1), 4)


def reply(input_ids: list[int], routes: Routes | None, **changes) -> dict:
    meta = {"cached_tokens": 3, "finish_reason": {"type": "stop", "matched": 2}}
    if routes is not None:
        meta["routed_experts"] = encode(routes, "sglang", SHAPE)
    return {"text": " Paris.\n", "output_ids": [5, 6, 2], "meta_info": meta, **changes}


def ask(prompt: Prompt, handler) -> list[client.Sample]:
    async def go():
        transport = httpx.MockTransport(handler)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return await client._ask(http, prompt, Words(), SHAPE)

    return asyncio.run(go())


def test_prompts_are_what_the_job_promises():
    assert len(PROMPTS) >= 8 and len({p.question for p in PROMPTS}) == len(PROMPTS)
    assert sum(p.system == GUIDE for p in PROMPTS) >= 3
    assert [p.n for p in PROMPTS].count(4) == 1 and sum(p.stream for p in PROMPTS) == 1


def test_one_answer():
    def handler(request):
        body = json.loads(request.content)
        assert body["return_routed_experts"] is True and body["sampling_params"]["temperature"] == 0.0
        return httpx.Response(200, json=reply(body["input_ids"], some_routes(len(body["input_ids"]) + 2)))

    (sample,) = ask(PROMPTS[0], handler)
    assert sample.text == "Paris." and sample.output_ids == [5, 6, 2] and sample.complete
    assert len(sample.routes) == len(sample.input_ids) + 2 and sample.routes == some_routes(len(sample.routes))


def test_missing_rows_are_seen():
    def handler(request):
        ids = json.loads(request.content)["input_ids"]
        return httpx.Response(200, json=reply(ids, some_routes(len(ids) + 1)))

    (sample,) = ask(PROMPTS[0], handler)
    assert not sample.complete


def test_a_stream_keeps_its_last_chunk():
    def handler(request):
        ids = json.loads(request.content)["input_ids"]
        first = reply(ids, None, text="Pa", output_ids=[5])
        last = reply(ids, some_routes(len(ids) + 2))
        events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in (first, last)) + "data: [DONE]\n\n"
        return httpx.Response(200, text=events)

    (sample,) = ask(PROMPTS[-1], handler)
    assert sample.chunks == 2 and sample.complete and sample.text == "Paris."


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (httpx.Response(400, json={"error": {"message": "no such thing"}}), "answered 400.*no such thing"),
        (httpx.Response(200, json=reply([1], None)), "holds no routes"),
        (httpx.Response(200, json=[reply([1], None)] * 3), "1 samples were asked for, 3 came"),
    ],
)
def test_a_bad_answer_is_an_error(response, message):
    with pytest.raises(TracklayerError, match=message):
        ask(PROMPTS[0], lambda request: response)


def test_a_broken_stream_is_an_error():
    text = 'data: {"error": {"message": "engine fault"}}\n\ndata: [DONE]\n\n'
    with pytest.raises(TracklayerError, match="engine fault"):
        ask(PROMPTS[-1], lambda request: httpx.Response(200, text=text))
    with pytest.raises(TracklayerError, match="no chunk"):
        ask(PROMPTS[-1], lambda request: httpx.Response(200, text="data: [DONE]\n\n"))


def test_a_server_that_dies_at_start_shows_its_log(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('no such model')\n")
    script.chmod(0o755)
    monkeypatch.setattr(client.sys, "executable", str(script))
    with (
        pytest.raises(TracklayerError, match=r"(?s)status 1.*no such model"),
        client.server(tmp_path, tmp_path / "log", []),
    ):
        pass


def sample(rows: int, index: int = 0, n: int = 1, cut: int = 0) -> client.Sample:
    return client.Sample(
        prompt=Prompt(question=f"Why {rows}?", n=n),
        index=index,
        input_ids=list(range(rows - 2)),
        output_ids=[7, 8, 9],
        text="Because\nof " + "very " * 40,
        cached_tokens=1,
        finish="stop",
        routes=some_routes(rows - cut, seed=rows),
    )


def test_the_last_line_counts_everything():
    verdict = check.Verdict(sets=20, differing=1, ties=1, wrong=0, worst_gap=1e-7)
    facts = job.summary([sample(10), sample(12), sample(12, index=1, cut=1)], [verdict] * 3)
    assert facts["requests"] == 2 and facts["samples"] == 3 and facts["tokens"] == 9
    assert facts["rows"] == 10 + 12 + 11 and facts["complete"] == pytest.approx(2 / 3)
    assert facts["agreement"] == pytest.approx(57 / 60) and facts["ties"] == 3 and facts["wrong"] == 0


def test_load_is_each_layers_share_of_tokens():
    load_LE = show.load([sample(10), sample(30)])
    assert load_LE.shape == (2, 4) and load_LE.sum(1) == pytest.approx([2.0, 2.0])
    ids = np.concatenate([sample(10).routes.experts_TLK, sample(30).routes.experts_TLK])
    assert load_LE[1, 3] == pytest.approx((ids[:, 1] == 3).any(-1).mean())


def test_table_picture_and_route_file(tmp_path):
    from rich.console import Console

    samples = [sample(10), sample(12, n=4), sample(14, cut=2)]
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(show.table(samples, [check.Verdict(sets=20, differing=2, ties=0, wrong=2, worst_gap=0.1)] * 3))
    text = console.export_text()
    assert "12 of 14" in text and "NO" in text and "sample 1 of 4" in text and "18 of 20" in text
    show.picture(samples, tmp_path / "load.png")
    assert (tmp_path / "load.png").read_bytes()[:4] == b"\x89PNG"
    config = {"num_hidden_layers": 2, "num_experts_per_tok": 2, "num_experts": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    job.write_routes(samples, tmp_path / "routes.safetensors", tmp_path)
    stored = RouteFile(tmp_path / "routes.safetensors")
    assert [routes == s.routes for routes, s in zip(stored, samples, strict=True)] == [True] * 3


def test_the_device_follows_the_servers_flags(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert job.uses_gpu([]) and job.uses_gpu(["--device", "cuda", "--page-size", "4"])
    assert not job.uses_gpu(["--device", "cpu"]) and not job.uses_gpu(["--page-size", "4", "--device=cpu"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not job.uses_gpu([])


@pytest.mark.parametrize(
    "change, ok",
    [
        ({}, True),
        ({"complete": 0.99}, False),
        ({"wrong": 1}, False),
        ({"greedy_gap": 0.6}, False),
        ({"bfloat16_greedy_gap": 0.6}, False),
        ({"bfloat16_greedy_gap": 0.1}, True),
    ],
)
def test_passed(change, ok):
    assert job.passed({"complete": 1.0, "wrong": 0, "greedy_gap": 0.0, **change}) is ok


def test_greedy_looks_at_greedy_answers_alone(monkeypatch):
    answer = check.Answer(tokens=3, differing=1, worst_gap=0.2)
    monkeypatch.setattr(check, "answer", lambda referee, input_ids, output_ids: answer)
    found = job.greedy(None, [sample(10), sample(12, n=4), sample(14)])
    assert found == {"greedy_tokens": 6, "greedy_same": 4, "greedy_gap": 0.2}
