"""Many samples in one file: equal after a round trip, read one by one, opened at once, refused when damaged."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from tracklayer.errors import UserError
from tracklayer.routes.forms import RouteShape
from tracklayer.routes.record import Routes
from tracklayer.routes.store import RouteFile, RouteWriter, save_routes

LAYERS = (1, 2, 5)


def random_routes(tokens: int, start: int = 0, experts: int = 60, seed: int = 0) -> Routes:
    rng = np.random.default_rng(seed + tokens)
    return Routes(np.argsort(rng.random((tokens, 3, experts)), -1)[..., :4], LAYERS, experts, start)


@pytest.mark.parametrize("experts", [60, 256, 300, 40_000])
@pytest.mark.parametrize("with_tokens", [False, True])
def test_round_trip(tmp_path: Path, experts: int, with_tokens: bool) -> None:
    lengths = [(5, 0), (0, 0), (3, 7), (1, 2)]
    samples = [
        random_routes(n, start, experts) if experts < 1000 else _sparse(n, start, experts) for n, start in lengths
    ]
    tokens = [np.arange(n + start + 1) * 3 for n, start in lengths] if with_tokens else None
    path = tmp_path / "routes.safetensors"
    save_routes(path, samples, token_ids=tokens, num_hidden_layers=6, metadata={"weight_version": "step 7"})
    file = RouteFile(path)
    assert list(file) == samples and len(file) == 4 and file[-1] == samples[3] and file[1:3] == samples[1:3]
    assert file.shape == RouteShape(layer_ids=LAYERS, top_k=4, num_experts=experts, num_hidden_layers=6)
    assert file.metadata == {"weight_version": "step 7"} and file.has_tokens == with_tokens
    if with_tokens:
        assert all(np.array_equal(file.token_ids(i), tokens[i]) for i in range(4))
    else:
        with pytest.raises(UserError, match="holds no token ids"):
            file.token_ids(0)
    assert [p.name for p in tmp_path.iterdir()] == ["routes.safetensors"]


def _sparse(tokens: int, start: int, experts: int) -> Routes:
    base = np.random.default_rng(tokens).integers(0, experts - 4, (tokens, 3, 1))
    return Routes(base + np.arange(4), LAYERS, experts, start)


@pytest.mark.parametrize("experts", [60, 256])
def test_layers_that_choose_different_numbers(tmp_path: Path, experts: int) -> None:
    ids = np.array([[[3, 1], [experts - 1, -1]], [[0, 5], [7, -1]]])
    routes = Routes(ids, (1, 2), experts, layer_top_k=(2, 1))
    save_routes(tmp_path / "r", [routes, routes.tokens(1)])
    file = RouteFile(tmp_path / "r")
    assert list(file) == [routes, routes.tokens(1)] and file.shape.layer_top_k == (2, 1) and file.metadata == {}
    with pytest.raises(UserError, match="another model"), RouteWriter(tmp_path / "s", file.shape) as writer:
        writer.add(Routes(ids[:, :, :1], (1, 2), experts))


def test_missing_rows_stay_missing(tmp_path: Path) -> None:
    ids = random_routes(5).to(np.int32)
    ids[2, 1] = -1
    save_routes(tmp_path / "r", Routes(ids, LAYERS, 60))
    assert np.argwhere(RouteFile(tmp_path / "r")[0].missing_TL).tolist() == [[2, 1]]


def test_other_readers_can_open_it(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    samples = [random_routes(5), random_routes(3)]
    save_routes(tmp_path / "r", samples, token_ids=[range(6), range(4)])
    tensors = safetensors.load_file(tmp_path / "r")
    assert np.array_equal(tensors["experts"][5:], samples[1].experts_TLK)
    assert tensors["row_offsets"].tolist() == [0, 5, 8] and tensors["token_offsets"].tolist() == [0, 6, 10]


def test_a_large_file_opens_in_milliseconds_and_reads_one_sample_alone(tmp_path: Path) -> None:
    """10 GB that are holes on the disk: only what is read costs anything."""
    rows_each, samples = 26_000, 1024
    shape = RouteShape(layer_ids=tuple(range(48)), top_k=8, num_experts=128)
    one = Routes(np.tile(np.arange(8, dtype=np.uint8), (rows_each, 48, 1)), shape.layer_ids, 128)
    path = tmp_path / "large"
    writer = RouteWriter(path, shape)
    for i in range(samples):
        if i in (0, 700):
            writer.add(one)
            continue
        writer._file.seek(rows_each * 48 * 8, 1)  # what add() does, without writing the rows
        writer._row_offsets.append(writer._row_offsets[-1] + rows_each)
        writer._starts.append(0)
    writer.close()
    assert path.stat().st_size > 10e9
    best = min(_timed(lambda: RouteFile(path)) for _ in range(5))
    assert best < 0.05, f"opening took {best * 1e3:.1f} ms"
    file = RouteFile(path)
    assert file[700] == one
    with pytest.raises(UserError, match="the 8 experts must differ"):  # holes read as zeros, and zeros are no routes
        file[3]


def _timed(call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def test_an_interrupted_writer_leaves_no_file(tmp_path: Path) -> None:
    shape = RouteShape.of(random_routes(1))
    with pytest.raises(KeyError), RouteWriter(tmp_path / "r", shape) as writer:
        writer.add(random_routes(4))
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    with RouteWriter(tmp_path / "r", shape):
        pass
    assert len(RouteFile(tmp_path / "r")) == 0


def test_samples_that_do_not_belong(tmp_path: Path) -> None:
    shape = RouteShape.of(random_routes(1))
    with RouteWriter(tmp_path / "r", shape) as writer:
        writer.add(random_routes(2))
        with pytest.raises(UserError, match="sample 1 is of another model"):
            writer.add(random_routes(2, experts=61))
        with pytest.raises(UserError, match="token ids are given for all samples"):
            writer.add(random_routes(2), [1, 2, 3])
    with RouteWriter(tmp_path / "t", shape, with_tokens=True) as writer:
        with pytest.raises(UserError, match="token ids are given for all samples"):
            writer.add(random_routes(2))
        with pytest.raises(UserError, match="sample 0: 2 token ids, but rows up to position 3"):
            writer.add(random_routes(3), [1, 2])
    with pytest.raises(UserError, match="no routes to write"):
        save_routes(tmp_path / "n", [])
    with pytest.raises(UserError, match="1 samples but 2 token sequences"):
        save_routes(tmp_path / "n", [random_routes(1)], token_ids=[[1, 2], [3]])
    with pytest.raises(UserError, match="metadata 'top_k'"):
        save_routes(tmp_path / "n", random_routes(1), metadata={"top_k": "3"})
    with pytest.raises(UserError, match="must be text"):
        save_routes(tmp_path / "n", random_routes(1), metadata={"step": 3})  # type: ignore[dict-item]


def _rewritten(path: Path, change) -> Path:
    """The file with another header."""
    blob = path.read_bytes()
    length = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + blob[8 + length :])
    return path


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.unlink(), "can not be read"),
        (lambda p: p.write_bytes(b""), "not a whole route file"),
        (lambda p: p.write_bytes(b"\xff" * 64), "a header of .* bytes can not be"),
        (lambda p: p.write_bytes((10).to_bytes(8, "little") + b"not json!!"), "header is not JSON"),
        (lambda p: p.write_bytes((2).to_bytes(8, "little") + b"[]"), "header is not an object"),
        (lambda p: p.write_bytes((2).to_bytes(8, "little") + b"{}"), "its format is None"),
        (lambda p: p.write_bytes(p.read_bytes()[:-9]), "should lie at bytes"),
        (lambda p: _rewritten(p, lambda h: h.pop("starts")), "lacks or garbles 'starts'"),
        (lambda p: _rewritten(p, lambda h: h["__metadata__"].pop("top_k")), "lacks or garbles 'top_k'"),
        (lambda p: _rewritten(p, lambda h: h["__metadata__"].update(layer_ids="[1")), "lacks or garbles"),
        (lambda p: _rewritten(p, lambda h: h["experts"].update(shape=[9, 3, 4])), "experts should lie at"),
        (lambda p: _rewritten(p, lambda h: h["experts"].update(dtype="F32")), "lacks or garbles 'F32'"),
        (lambda p: _rewritten(p, lambda h: h["starts"].update(shape=[1], data_offsets=[116, 124])), "do not fit"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, damage, message: str) -> None:
    path = tmp_path / "routes"
    save_routes(path, [random_routes(5), random_routes(3)])
    damage(path)
    with pytest.raises(UserError, match=message) as caught:
        RouteFile(path)
    assert str(path) in str(caught.value)


def test_index_errors(tmp_path: Path) -> None:
    save_routes(tmp_path / "r", random_routes(5))
    file = RouteFile(tmp_path / "r")
    for index in (1, -2):
        with pytest.raises(IndexError):
            file[index]
