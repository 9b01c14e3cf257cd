"""Checksums and snapshots of weights: they see one changed bit, and only what a full update brings back."""

from __future__ import annotations

import hashlib

import pytest
import tiny
import torch
from engine_tools import make_core, prompts, request
from torch import nn

from tracklayer.engine.operations import Operations
from tracklayer.engine.weights_check import PIECE_BYTES, WeightsCheck, checksums, pieces, spoil
from tracklayer.errors import UserError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_moe")
    tiny.save("qwen3_moe", folder)
    return folder


@pytest.fixture
def operations(checkpoint):
    return Operations(make_core(checkpoint, enable_memory_saver=True))


def test_a_checksum_is_that_of_the_bytes():
    tensors = {"b": torch.arange(6.0).view(2, 3).T, "a": torch.tensor([1.0, float("nan")], dtype=torch.bfloat16)}
    found = checksums(tensors)
    assert list(found["checksums"]) == ["a", "b"]
    assert found["checksums"]["b"] == hashlib.sha256(tensors["b"].contiguous().numpy().tobytes()).hexdigest()
    assert found["checksums"]["a"] == hashlib.sha256(tensors["a"].view(torch.int16).numpy().tobytes()).hexdigest()
    assert found["per_gpu_checksum"] != checksums({"a": tensors["b"], "b": tensors["a"]})["per_gpu_checksum"]


def test_large_tensors_come_in_pieces():
    tensor = torch.arange(PIECE_BYTES // 4 + 5, dtype=torch.int32)
    found = list(pieces(tensor))
    assert [len(piece) for piece in found] == [PIECE_BYTES, 20]
    whole = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
    assert checksums({"x": tensor})["checksums"]["x"] == whole


def test_one_bit_is_seen_by_checksum_and_compare(operations):
    before = operations.check_weights("checksum")
    operations.check_weights("snapshot")
    assert operations.check_weights("compare") == {"different": []}
    name, tensor = list(operations.core.model.decoder.named_parameters())[3]
    tensor.data.view(-1).view(torch.int32)[-1] ^= 1
    after = operations.check_weights("checksum")
    assert after["per_gpu_checksum"] != before["per_gpu_checksum"]
    assert {n for n in before["checksums"] if before["checksums"][n] != after["checksums"][n]} == {name}
    assert operations.check_weights("compare") == {"different": [name]}
    assert operations.check_weights("compare", [name[:-1]]) == {"different": []}


def test_a_reset_spoils_everything_and_a_full_update_mends_it(operations, checkpoint):
    operations.check_weights("snapshot")
    names = [name for name, _ in operations.core.model.decoder.named_parameters()]
    operations.check_weights("reset_tensors")
    assert operations.check_weights("compare")["different"] == names, "a tensor was left as it was"
    for _ in operations.update_weights_from_disk(str(checkpoint)):
        pass
    assert operations.check_weights("compare") == {"different": []}
    operations.check_weights("reset_tensors", ["norm"])
    left = [name for name in names if "norm" in name]
    assert left and not set(left) & set(operations.check_weights("compare")["different"])


def test_weights_that_went_and_came_back_are_bit_equal(operations):
    operations.check_weights("snapshot")
    before = operations.check_weights("checksum")
    operations.release_memory()
    with pytest.raises(UserError, match="released"):
        operations.check_weights("checksum")
    operations.resume_memory()
    assert operations.check_weights("checksum") == before and operations.check_weights("compare")["different"] == []


def test_wrong_questions_are_user_errors(operations):
    check = WeightsCheck(nn.Linear(2, 2))
    for action, skip, said in (
        ("dance", None, "checksum, snapshot"),
        ("compare", None, "no snapshot"),
        ("checksum", "norm", "skip_tensor_list"),
        ("checksum", [1], "skip_tensor_list"),
    ):
        with pytest.raises(UserError, match=said):
            check.run(action, skip)
    core = operations.core
    core.add(request("a", prompts(1)[0], tokens=40))
    for _ in range(4):
        core.step()
    with pytest.raises(UserError, match="running"):
        operations.check_weights("reset_tensors")


def test_small_types_are_spoiled_too():
    tensors = {"x": torch.ones(5, 3, dtype=torch.float8_e4m3fn), "i": torch.ones(4, dtype=torch.int32)}
    spoil(tensors)
    assert len(tensors["x"].float().unique()) > 3 and (tensors["i"] == 0).all()
