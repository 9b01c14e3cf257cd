"""Memory given away and taken back: what comes back is what went, nothing runs meanwhile, and errors lose nothing."""

from __future__ import annotations

import shutil

import pytest
import tiny
import torch
from engine_tools import SMALL, make_core, prompts, request, run

import tracklayer
from tracklayer.engine.operations import Operations
from tracklayer.errors import CheckpointError, UserError
from tracklayer.runner.memory import TAGS, checked, storages_of

PROMPTS = prompts(3)
SAVER = {"enable_memory_saver": True}


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3", "qwen3_next"])
def any_checkpoint(request, tmp_path_factory):
    """Plain attention, latent attention (values inside keys), recurrent states."""
    folder = tmp_path_factory.mktemp(request.param)
    tiny.save(request.param, folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_moe")
    tiny.save("qwen3_moe", folder)
    return folder


def answers(core):
    found = run(core, [request(str(i), p) for i, p in enumerate(PROMPTS)])
    return {rid: (r.tokens, r.routes.tolist()) for rid, r in found.items()}


def held_bytes(core):
    weights = storages_of(core.model.decoder.parameters())
    caches = storages_of(core.runner.caches.tensors)
    return sum(n for _, n in weights), sum(n for _, n in caches)


@pytest.mark.parametrize("backup", [False, True])
def test_everything_goes_and_comes_back(any_checkpoint, backup):
    core = make_core(any_checkpoint, **SAVER, enable_weights_cpu_backup=backup)
    operations, before, held = Operations(core), answers(core), held_bytes(core)
    assert min(held) > 0
    operations.release_memory()
    assert held_bytes(core) == (0, 0) and operations.loads()["released_memory"] == sorted(TAGS)
    assert operations.loads()["memory_usage"]["weight"] == 0
    operations.release_memory(["weights"])  # away already
    operations.resume_memory(["weights"])
    assert held_bytes(core) == (held[0], 0)
    operations.resume_memory([])
    assert held_bytes(core) == held and not core.blocked
    operations.resume_memory()  # here already
    assert answers(core) == before


def test_requests_wait_until_all_is_back_and_health_needs_nothing(checkpoint):
    core = make_core(checkpoint, **SAVER)
    operations, before = Operations(core), answers(core)
    operations.release_memory()
    for i, prompt in enumerate(PROMPTS):
        core.add(request(str(i), prompt))
    core.add(request("gone", PROMPTS[0]))
    assert not core.has_work and core.step() == []
    core.abort("gone")
    (gone,) = [out for _ in range(3) for out in core.step()]
    assert gone.finish.message == "Abort in waiting queue" and gone.routes.shape[0] == 0
    assert operations.flush_cache() is True, "a trainer flushes while the cache is away"
    operations.pause("abort")
    operations.resume()
    for i, prompt in enumerate(PROMPTS):  # the pause has ended those that waited
        core.step()
        core.add(request(f"again {i}", prompt))
    operations.resume_memory(["kv_cache", "cuda_graph"])
    assert not core.has_work, "the weights are still away"
    operations.resume_memory(["weights"])
    found = {}
    while core.has_work:
        found |= {out.rid: out for out in core.step() if out.finish is not None}
    for i in range(len(PROMPTS)):
        assert found[f"again {i}"].routes.tolist() == before[str(i)][1]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_running_requests_keep_their_memory(checkpoint, mode):
    core = make_core(checkpoint, **SAVER)
    operations = Operations(core)
    want = run(core, [request("a", PROMPTS[1], tokens=20)])["a"]
    operations.flush_cache()

    def between(core, step):
        if step != 6:
            return
        held = held_bytes(core)
        with pytest.raises(UserError, match="1 requests are running"):
            operations.release_memory(["kv_cache"])
        operations.pause(mode)
        if mode == "in_place":
            with pytest.raises(UserError, match="running"):
                operations.release_memory()
            assert held_bytes(core) == held
        else:
            operations.release_memory()
            operations.resume_memory()
        operations.resume()

    got = run(core, [request("a", PROMPTS[1], tokens=20)], between=between)["a"]
    assert got.tokens == want.tokens and (got.routes == want.routes).all()


def test_releasing_the_cache_forgets_prefixes(checkpoint):
    core = make_core(checkpoint, **SAVER)
    operations = Operations(core)
    assert run(core, [request("a", PROMPTS[2])])["a"].cached_tokens == 0
    assert run(core, [request("b", PROMPTS[2])])["b"].cached_tokens > 0
    operations.release_memory(["weights"])
    operations.resume_memory(["weights"])
    assert run(core, [request("c", PROMPTS[2])])["c"].cached_tokens > 0
    operations.release_memory(["kv_cache"])
    operations.resume_memory(["kv_cache"])
    assert run(core, [request("d", PROMPTS[2])])["d"].cached_tokens == 0


def test_a_backup_keeps_what_no_checkpoint_holds_and_without_one_the_last_checkpoint_comes_back(checkpoint, tmp_path):
    tiny.save("qwen3_moe", tmp_path, seed=3)
    for backup in (True, False):
        core = make_core(checkpoint, **SAVER, enable_weights_cpu_backup=backup)
        operations, first = Operations(core), answers(core)
        for _ in operations.update_weights_from_disk(str(tmp_path)):
            pass
        second = answers(core)
        with torch.inference_mode():
            core.model.decoder.embed_VD.mul_(-1)
        operations.flush_cache()
        third = answers(core)
        assert first != second != third
        operations.release_memory()
        operations.resume_memory()
        assert answers(core) == (third if backup else second)


def test_random_weights_come_back_the_same(checkpoint):
    core = make_core(checkpoint, **SAVER, load_format="dummy")
    operations, before = Operations(core), answers(core)
    operations.release_memory()
    operations.resume_memory()
    assert answers(core) == before


def test_a_checkpoint_that_is_gone_leaves_the_weights_released(checkpoint, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(checkpoint, folder)
    core = make_core(folder, **SAVER)
    operations, before = Operations(core), answers(core)
    operations.release_memory()
    (folder / "model.safetensors").rename(tmp_path / "kept")
    with pytest.raises(CheckpointError, match="safetensors"):
        operations.resume_memory()
    assert core.memory.released == {"weights", "cuda_graph"} and held_bytes(core)[0] == 0
    (tmp_path / "kept").rename(folder / "model.safetensors")
    operations.resume_memory()
    assert answers(core) == before


def test_no_room_to_come_back_is_an_error_that_may_be_tried_again(checkpoint):
    core = make_core(checkpoint, **SAVER)
    operations, before = Operations(core), answers(core)
    operations.release_memory()
    kept = core.memory._storages["kv_cache"]
    core.memory._storages["kv_cache"] = [*kept[:-1], (kept[-1][0], 1 << 60)]
    with pytest.raises(UserError, match=r"kv_cache needs .* GiB"):
        operations.resume_memory()
    assert "kv_cache" in core.memory.released and held_bytes(core)[1] == 0
    core.memory._storages["kv_cache"] = kept
    operations.resume_memory()
    assert answers(core) == before


def test_what_needs_the_weights_says_that_they_are_away(checkpoint):
    core = make_core(checkpoint, **SAVER)
    operations = Operations(core)
    operations.release_memory(["weights"])
    with pytest.raises(UserError, match="resume them first"):
        next(operations.update_weights_from_disk(str(checkpoint)))
    with pytest.raises(UserError, match="resume them first"):
        operations.get_weights_by_name("model.norm.weight")


def test_wrong_tags_and_an_engine_without_the_flag():
    assert checked(None) == checked([]) == list(TAGS) and checked(["cuda_graph", "kv_cache"]) == [
        "kv_cache",
        "cuda_graph",
    ]
    for tags in (["soul"], ["weights", 3], "weights", [["weights"]], {"weights": 1}):
        with pytest.raises(UserError, match="tag"):
            checked(tags)


def test_the_python_engine_releases_and_resumes(checkpoint):
    options = {**SMALL, "skip_tokenizer_init": True}
    ask = {"input_ids": PROMPTS[1], "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    with tracklayer.Engine(str(checkpoint), **options) as engine, pytest.raises(UserError, match="enable_memory_saver"):
        engine.release_memory_occupation()
    with tracklayer.Engine(str(checkpoint), **options, enable_memory_saver=True) as engine:
        before = engine.generate(**ask)["output_ids"]
        assert engine.release_memory_occupation(["kv_cache", "weights"]) is None
        assert engine.get_server_info()["internal_states"][0]["released_memory"] == ["kv_cache", "weights"]
        with pytest.raises(UserError, match="soul"):
            engine.resume_memory_occupation(["soul"])
        assert engine.resume_memory_occupation() is None
        assert engine.generate(**ask)["output_ids"] == before


def test_memory_that_others_share_stays_and_so_does_the_rest(checkpoint):
    """numpy on a weight pins its storage on a CPU: nothing is released then, half or whole."""
    core = make_core(checkpoint, **SAVER)
    operations, before, held = Operations(core), answers(core), held_bytes(core)
    assert core.model.decoder.norm.weight.detach().numpy() is not None
    with pytest.raises(UserError, match="numpy"):
        operations.release_memory()
    assert held_bytes(core) == held and not core.blocked and answers(core) == before
