"""What `tracklayer tune` is asked and answers before it measures; the search itself runs in tests/interpret."""

from __future__ import annotations

import time

import pytest
import torch

pytest.importorskip("triton")

from tracklayer.bench import tune
from tracklayer.bench.precompile import compile_ahead
from tracklayer.bench.shapes import SHAPES, write_shape
from tracklayer.bench.tiles import MAX_UNROLLED, forms
from tracklayer.errors import UserError
from tracklayer.kernels.tuning import sorted_config


def asked(*argv):
    return tune.shapes_of(tune.parser().parse_args(list(argv)))


def test_shapes_by_name_by_numbers_and_by_model_each_once(tmp_path):
    write_shape("mixtral-8x7b", tmp_path)
    found = asked("--shape", "gpt-oss-20b", "128,8,2048,768", "qwen3-30b-a3b", "--model", str(tmp_path))
    assert [s.key for s in found] == ["32,2880,2880", "128,2048,768", "8,4096,14336"]
    oss = found[0]
    assert oss.spec.activation == "swiglu_oai" and oss.bias and oss.top_k == 4
    assert found[2].expert_bytes == 2 * 3 * 4096 * 14336


@pytest.mark.parametrize(
    "argv, said",
    [
        ([], "nothing to tune"),
        (["--shape", "no-such"], "no-such"),
        (["--shape", "8,9,64,64"], "E,K,H,W"),
        (["--shape", "8,2,0,64"], "8,2,0,64"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_bad_shapes_are_named(argv, said):
    with pytest.raises(Exception, match=said) as caught:
        asked(*argv)
    assert caught.type.__module__ == "tracklayer.errors"


@pytest.mark.parametrize("text", ["", "1,x", "0", "-4", "1,,2"])
def test_bad_batches_are_named(text):
    with pytest.raises(UserError, match="--batches"):
        tune.batches_of(text)


def test_without_a_gpu_it_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(UserError, match="CUDA GPU"):
        tune.main(["--shape", "tiny", "--time-limit", "1"])


@pytest.mark.parametrize("name", SHAPES)
def test_every_batch_has_a_form_and_no_tile_unrolls_for_minutes(name, tmp_path):
    for shape in tune.model_shapes(name, str(write_shape(name, tmp_path))):
        for num_tokens in tune.BATCHES:
            found = list(forms(num_tokens, shape.experts, shape.top_k, shape.inner))
            assert found, (name, num_tokens)
            for form in found:
                assert {t for pair in form.pairs() for t in map(repr, pair)} == set(map(repr, form.ups + form.downs))
                for tile in form.downs if form.name == "small" else ():
                    assert tile["stages"] or shape.top_k * -(-shape.inner // tile["b"]) <= MAX_UNROLLED


def test_compiles_for_a_gpu_that_is_not_there(tmp_path, monkeypatch):
    """A real job compiles for compute capability 9; one that raises is reported as not compiled; the rest goes on."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shape = tune.ExpertShape("tiny", 4, 2, 64, 32)
    tile = {"n": 16, "b": 32, "stages": 2, "warps": 4}
    good = tune.compile_job(shape, 5, sorted_config("weights", 16, tile, tile))

    def bad():
        raise RuntimeError("no such schedule")

    modules = [tune.combine, tune.experts_small, tune.grouped_gemm, tune.route_sort]
    deadline = time.monotonic() + 100
    assert compile_ahead([bad, good], modules, capability=90, deadline=deadline, processes=1) == [False, True]
    assert list(tmp_path.rglob("*.cubin"))


def test_compiling_stops_at_the_deadline():
    began = time.monotonic()
    done = compile_ahead([lambda: time.sleep(60)], [], capability=90, deadline=time.monotonic() + 1.0, processes=1)
    assert done == [False] and time.monotonic() - began < 20
