"""Control and information endpoints, keys, metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from server_fakes import route_rows
from server_http import GREEDY, TOKENIZER, serving

from tracklayer.server.app import ROUTERS
from tracklayer.server.control import CONTROL_PATHS, NOT_BUILT


async def test_health_models_and_info_have_the_keys_that_clients_read():
    async with serving(served_model_name="tiny") as (client, fake, service):
        for path in ("/health", "/health_generate", "/ready", "/ping"):
            reply = await client.get(path)
            assert (reply.status_code, reply.content) == (200, b"")
        (card,) = (await client.get("/v1/models")).json()["data"]
        assert card["id"] == "tiny" and card["root"] == "/models/fake" and card["max_model_len"] == 512
        assert (await client.get("/v1/models/tiny")).json()["id"] == "tiny"
        missing = await client.get("/v1/models/a/b")
        assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"
        for path in ("/model_info", "/get_model_info"):
            model = (await client.get(path)).json()
            assert model["model_path"] == "/models/fake" and model["architectures"] == ["FakeForCausalLM"]
            assert model["is_generation"] is True and model["served_model_name"] == "tiny"
        for path in ("/server_info", "/get_server_info"):
            server = (await client.get(path)).json()
            for key in ("tp_size", "pp_size", "ep_size", "moe_dp_size", "dp_size", "num_gpus", "dtype", "version",
                        "disaggregation_mode", "encoder_only", "enable_memory_saver", "launch_command",
                        "max_total_num_tokens", "max_req_input_len", "startup_time"):  # fmt: skip
                assert key in server
            assert server["enable_return_routed_experts"] is True and server["internal_states"]
        assert (await client.get("/get_weight_version")).json() == {"weight_version": "default"}
        fake.die()
        assert (await client.get("/health")).status_code == 503
        assert (await client.post("/generate", json={"text": "a"})).status_code == 503
        service.stopping = True
        assert "stopping" in (await client.post("/v1/completions", json={"prompt": "a"})).text


async def test_health_is_quick_while_paused():
    async with serving() as (client, _, _):
        for mode in ("abort", "retract", "in_place"):
            assert (await client.post("/pause_generation", json={"mode": mode})).json()["status"] == "ok"
            assert (await asyncio.wait_for(client.get("/health"), 1)).status_code == 200
        reply = await client.post("/pause_generation", json={"mode": "later"})
        assert reply.status_code == 400 and "later" in reply.text


async def test_paused_server_accepts_and_holds_then_answers():
    async with serving() as (client, _, _):
        await client.post("/pause_generation")
        task = asyncio.create_task(client.post("/generate", json={"text": "a", "sampling_params": GREEDY}))
        await asyncio.sleep(0.05)
        assert not task.done()
        loads = (await client.get("/v1/loads?include=core")).json()["loads"][0]
        assert loads["num_running_reqs"] + loads["num_waiting_reqs"] == 1
        assert (await client.get("/get_load")).json()[0]["num_reqs"] == 1
        assert (await client.get("/flush_cache")).status_code == 400
        await client.post("/continue_generation", json={"torch_empty_cache": True})
        assert (await task).status_code == 200
        for method in ("GET", "POST"):
            assert (await client.request(method, "/flush_cache?timeout=60.0")).text.startswith("Cache flushed")
        assert (await client.get("/flush_cache?timeout=nan")).status_code == 400


async def test_weight_update_from_disk_and_versions():
    async with serving() as (client, _, _):
        body = {"model_path": "/models/next", "weight_version": "3", "pp_rank": 0, "abort_all_requests": True}
        reply = await client.post("/update_weights_from_disk", json=body)
        assert reply.status_code == 200 and reply.json()["success"] is True
        assert (
            reply.json()["message"].endswith("Weight version updated to 3.") and "num_paused_requests" in reply.json()
        )
        assert (await client.get("/model_info")).json()["weight_version"] == "3"
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "/models/next"
        bad = await client.post("/update_weights_from_disk", json={"model_path": "/models/missing"})
        assert bad.status_code == 400 and bad.json()["success"] is False
        assert (await client.get("/model_info")).json()["model_path"] == "/models/next"
        reply = await client.post("/update_weight_version", json={"new_version": "4", "abort_all_requests": False})
        assert reply.json() == {"success": True, "message": "Weight version updated to 4", "new_version": "4"}
        answer = (await client.post("/generate", json={"text": "a", "sampling_params": GREEDY})).json()
        assert answer["meta_info"]["weight_version"] == "4"
        for path in ("/begin_weight_update", "/end_weight_update", "/post_process_weights"):
            assert (await client.post(path, json={"selector": "all"})).json()["success"] is True
            assert (await client.post(path)).json()["success"] is True


async def test_weight_paths_may_be_confined_or_switched_off(tmp_path):
    inside, link = tmp_path / "in" / "ckpt", tmp_path / "in" / "link"
    inside.mkdir(parents=True)
    link.symlink_to("/")
    for allowed, path, status in (
        ("none", str(inside), 400),
        (str(tmp_path / "in"), str(inside), 200),
        (str(tmp_path / "in"), str(tmp_path), 400),
        (str(tmp_path / "in"), f"{tmp_path}/in/../..", 400),
        (str(tmp_path / "in"), f"{link}/etc", 400),
    ):
        async with serving(weight_paths=allowed) as (client, _, _):
            reply = await client.post("/update_weights_from_disk", json={"model_path": path})
            assert reply.status_code == status, (allowed, path)


async def test_get_weights_by_name_both_ways():
    async with serving() as (client, _, _):
        for reply in (
            await client.get("/get_weights_by_name?name=model.norm.weight&truncate_size=2"),
            await client.post("/get_weights_by_name", json={"name": "model.norm.weight", "truncate_size": 2}),
            await client.request("GET", "/get_weights_by_name", json={"name": "model.norm.weight", "truncate_size": 2}),
        ):
            assert reply.json() == [1.0, 1.0]
        assert (await client.post("/get_weights_by_name", json={"name": "x"})).status_code == 400
        assert (await client.get("/get_weights_by_name?name=a&truncate_size=-1")).status_code == 400


def test_the_page_of_the_server_names_every_endpoint():
    page = (Path(__file__).parent.parent / "docs" / "server.md").read_text()
    paths = {route.path_format for module in ROUTERS for route in module.router.routes}
    assert not [
        path for path in paths if f"`{path.replace('{name}', 'NAME').replace('{name:path}', 'NAME')}" not in page
    ]


async def test_what_is_not_built_says_so():
    async with serving() as (client, _, _):
        for path in NOT_BUILT:
            reply = await client.post(path, json={})
            assert reply.status_code == 501 and "not available" in reply.json()["message"], path
            assert reply.json()["message"].endswith(NOT_BUILT[path])
        assert (await client.get("/parallelism_config?rank=0")).status_code == 501
    document = (Path(__file__).parent.parent / "docs" / "server.md").read_text()
    assert [path for path in NOT_BUILT if f"`{path}`" not in document] == []


async def test_weights_checker_profile_and_gc(tmp_path):
    async with serving(profile_dir=str(tmp_path)) as (client, fake, _):
        found = (await client.post("/weights_checker")).json()
        assert found["success"] and found["ranks"][0]["checksums"] == {"w": "00"}
        assert found["ranks"][0]["parallelism_info"]["tp_size"] == 1 and len(found["per_engine_checksum"]) == 64
        assert (await client.post("/weights_checker", json={"action": "snapshot"})).json()["success"] is True
        bad = await client.post("/weights_checker", json={"action": "compare", "skip_tensor_list": ["x"]})
        assert bad.status_code == 400 and bad.json()["success"] is False and "w, v" in bad.json()["message"]
        assert (await client.post("/weights_checker", json={"action": "dance"})).status_code == 400
        generation = {"model": "m", "prompt": "a", "max_tokens": 3, "stream": True, "temperature": 0.0}
        for body in (None, {}, {"num_steps": "5", "start_step": 3, "activities": ["CPU"]}, generation):
            assert (await client.post("/start_profile", json=body) if body is not None else
                    await client.post("/start_profile")).status_code == 200  # fmt: skip
        assert fake.profiles[2] == {
            "folder": str(tmp_path), "num_steps": 5, "start_step": 3, "activities": ["CPU"],
            "with_stack": False, "record_shapes": False,
        }  # fmt: skip
        for folder, status in (("mine", 200), (f"{tmp_path}/a/b", 200), ("../other", 400), ("/", 400)):
            reply = await client.post("/start_profile", json={"output_dir": folder})
            assert reply.status_code == status, folder
        for body in ({"num_steps": "many"}, {"num_steps": 0}, {"start_step": -1}, {"activities": "CPU"}):
            assert (await client.post("/start_profile", json=body)).status_code == 400, body
        assert "trace" in (await client.post("/stop_profile")).text
        for method in ("GET", "POST"):
            assert (await client.request(method, "/freeze_gc")).status_code == 200
        assert fake.frozen == 2


async def test_memory_answers_null_by_get_and_post_and_names_a_wrong_tag():
    async with serving() as (client, fake, _):
        for verb in ("release", "resume"):
            for reply in (
                await client.get(f"/{verb}_memory_occupation"),
                await client.post(f"/{verb}_memory_occupation"),
                await client.post(f"/{verb}_memory_occupation", json={"tags": ["kv_cache", "weights"], "more": 1}),
            ):
                assert (reply.status_code, reply.json()) == (200, None)
            assert fake.released == (["kv_cache", "weights"] if verb == "release" else None)
        for tags, said in ((["soul"], "soul"), ("weights", "tags"), ([1], "tags")):
            reply = await client.post("/resume_memory_occupation", json={"tags": tags})
            assert reply.status_code == 400 and said in reply.text


async def test_tokenize_and_detokenize():
    async with serving() as (client, _, _):
        one = (await client.post("/tokenize", json={"prompt": "hello"})).json()
        assert one["tokens"] == TOKENIZER.encode("hello") and one["count"] == len(one["tokens"])
        two = (await client.post("/tokenize", json={"prompt": ["a", "b"]})).json()
        assert [len(t) for t in two["tokens"]] == two["count"]
        chat = (await client.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})).json()
        assert chat["tokens"] == TOKENIZER.chat_ids([{"role": "user", "content": "hi"}])
        assert (await client.post("/detokenize", json={"tokens": one["tokens"]})).json()["text"] == "hello"
        assert (await client.post("/detokenize", json={"tokens": [[40], [41]]})).json()["prompt"] == [
            TOKENIZER.decode([40]), TOKENIZER.decode([41]),
        ]  # fmt: skip
        for path, body in (
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "a", "messages": []}),
            ("/detokenize", {"tokens": [400]}),
            ("/detokenize", {"tokens": "x"}),
        ):
            assert (await client.post(path, json=body)).status_code == 400


async def test_metrics_count_requests_tokens_and_routes():
    async with serving() as (client, _, _):
        assert (await client.get("/metrics")).status_code == 404
    async with serving(enable_metrics=True, served_model_name="m") as (client, _, _):
        body = {"input_ids": [1, 2, 3], "sampling_params": GREEDY, "return_routed_experts": True}
        await client.post("/generate", json=body)
        lines = dict(
            line.rsplit(" ", 1) for line in (await client.get("/metrics")).text.splitlines() if not line.startswith("#")
        )
    label = '{model_name="m"}'
    assert float(lines[f"sglang:generation_tokens_total{label}"]) == 6
    assert float(lines[f"sglang:prompt_tokens_total{label}"]) == 3
    assert float(lines[f"tracklayer:route_rows_returned_total{label}"]) == 8
    assert float(lines[f"sglang:time_to_first_token_seconds_count{label}"]) == 1
    assert float(lines[f"sglang:num_running_reqs{label}"]) == 0


@pytest.mark.parametrize(
    ("keys", "path", "given", "status"),
    [
        ({"api_key": "k"}, "/v1/models", None, 401),
        ({"api_key": "k"}, "/v1/models", "x", 403),
        ({"api_key": "k"}, "/v1/models", "k", 200),
        ({"api_key": "k"}, "/flush_cache", "k", 200),
        ({"api_key": "k", "admin_api_key": "a"}, "/flush_cache", "k", 403),
        ({"api_key": "k", "admin_api_key": "a"}, "/flush_cache", "a", 200),
        ({"admin_api_key": "a"}, "/flush_cache", None, 401),
        ({"admin_api_key": "a"}, "/v1/models", None, 200),
        ({"api_key": "k"}, "/health", None, 200),
        ({"api_key": "k", "enable_metrics": True}, "/metrics", None, 200),
        ({"api_key": "kää"}, "/v1/models", "k", 403),
    ],
)
async def test_keys(keys, path, given, status):
    async with serving(**keys) as (client, _, _):
        headers = {} if given is None else {"Authorization": f"Bearer {given}"}
        reply = await client.get(path, headers=headers)
        assert reply.status_code == status
        assert status == 200 or reply.json() == {"error": "Unauthorized" if status == 401 else "Forbidden"}


async def test_secrets_are_never_shown():
    async with serving(api_key="open-sesame", admin_api_key="sesame-2") as (client, _, _):
        text = (await client.get("/server_info", headers={"Authorization": "Bearer open-sesame"})).text
        assert "sesame" not in text and "api_key" not in text


def test_every_control_path_is_behind_the_admin_key():
    assert {"/flush_cache", "/abort_request", "/update_weights_from_disk", "/pause_generation"} <= CONTROL_PATHS
    assert not CONTROL_PATHS & {"/generate", "/health", "/v1/models"}


async def test_unknown_paths_and_methods_keep_the_shape():
    async with serving() as (client, _, _):
        for method, path, status in (
            ("GET", "/nothing", 404),
            ("GET", "/generate", 405),
            ("DELETE", "/v1/models", 405),
        ):
            reply = await client.request(method, path)
            assert reply.status_code == status and reply.json()["code"] == status


async def test_fault_of_ours_is_a_500_without_its_text(monkeypatch):
    async with serving() as (client, _, service):

        def broken(*args, **kwargs):
            raise RuntimeError("secret detail")

        monkeypatch.setattr(service.frontend.intake, "split", broken)
        reply = await client.post("/generate", json={"text": "a"})
        assert reply.status_code == 500 and "secret" not in reply.text and reply.json()["code"] == 500


async def test_page_needs_no_key_and_its_data_does():
    async with serving(api_key="k") as (client, _, _):
        page = await client.get("/")
        assert page.status_code == 200 and "<title>Tracklayer" in page.text
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "://" not in page.text  # nothing is fetched from elsewhere
        assert (await client.get("/expert_load")).status_code == 401


async def test_expert_load_counts_the_returned_routes():
    async with serving() as (client, _, _):
        body = {"input_ids": [4, 5, 6], "sampling_params": GREEDY, "return_routed_experts": True}
        fed = [4, 5, 6, *(await client.post("/generate", json=body)).json()["output_ids"][:-1]]
        load = (await client.get("/expert_load")).json()
    rows = route_rows(fed)
    assert load["rows"] == len(fed) and load["layer_ids"] == [1, 2, 3]
    for layer, counts in enumerate(load["counts"]):
        assert counts == [int((rows[:, layer] == e).sum()) for e in range(load["num_experts"])]


async def test_request_log_says_sizes_times_and_as_much_as_its_level(caplog):
    caplog.set_level("INFO", "tracklayer.requests")
    for level, words in ((0, []), (1, ["sampling="]), (2, ["sampling=", "text="])):
        caplog.clear()
        async with serving(log_requests=True, log_requests_level=level, enable_metrics=True) as (client, _, _):
            body = {"text": "a", "rid": "r1", "sampling_params": GREEDY, "return_routed_experts": True}
            await client.post("/generate", json=body)
        first, last = caplog.messages
        assert first.startswith("rid=r1 event=submitted prompt_tokens=") and "output_tokens=6" in last
        assert "total_s=" in last and "first_token_s=" in last and "route_rows=" in last
        for word in ("sampling=", "text="):
            assert (word in first + last) == (word in words)
