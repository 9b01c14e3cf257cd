"""Time to encode and decode one sample's routes, over a plain base64 or copy of the same bytes, in one run.

    python benchmarks/codec.py [--tokens 32768] [--layers 48] [--top-k 8] [--experts 128] [--rounds 15]

Forms: sglang (int32, base64 text), packed (narrow, base64 text), packed binary, npy. Plain: what anyone would write for
the same bytes, `base64.b64encode(bytes).decode()` and `base64.b64decode(text)`, or copying the bytes in and out. The
two alternate and the medians of their times are compared. Reading checks every row (ids in range and distinct); that is
timed alone, and left out (check=False) where the plain way is a copy, which no check can be as quick as. The last line
is one JSON object.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tracklayer.routes.codec import decode, decode_packed, encode, encode_packed, encode_sglang
from tracklayer.routes.forms import RouteShape
from tracklayer.routes.record import Routes

Work = Callable[[], Any]


def random_routes(tokens: int, layers: int, top_k: int, experts: int) -> Routes:
    rng = np.random.default_rng(0)
    block = np.argsort(rng.random((256, layers, experts)), -1)[..., :top_k].astype(np.int32)
    return Routes(np.tile(block, (-(-tokens // 256), 1, 1))[:tokens], range(layers), experts)


def seconds(work: Work) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def compare(rounds: int, *works: Work) -> list[float]:
    """Median seconds of each, taken in turns so that a busy moment meets all of them."""
    for work in works:
        work()
    times = [[seconds(work) for work in works] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def cases(routes: Routes) -> dict[str, tuple[Work, Work, Work, Work, int]]:
    """Form -> encode, plain encode, decode, plain decode, bytes of ids on the wire."""
    shape = RouteShape.of(routes)
    wide, narrow = routes.to(np.int32), np.array(routes.experts_TLK)
    sglang, packed = encode_sglang(routes), encode_packed(routes)
    binary, npy = encode_packed(routes, binary=True), encode(routes, "npy")
    wide_text, narrow_text = base64.b64encode(wide).decode(), base64.b64encode(narrow).decode()
    blob = narrow.tobytes()

    def plain_npy() -> bytes:
        file = io.BytesIO()
        np.save(file, narrow)
        return file.getvalue()

    return {
        "sglang": (
            lambda: encode_sglang(routes),
            lambda: base64.b64encode(wide).decode(),
            lambda: decode(sglang, "sglang_moe", shape),
            lambda: base64.b64decode(wide_text),
            wide.nbytes,
        ),
        "packed": (
            lambda: encode_packed(routes),
            lambda: base64.b64encode(narrow).decode(),
            lambda: decode_packed(packed),
            lambda: base64.b64decode(narrow_text),
            narrow.nbytes,
        ),
        "packed binary": (
            lambda: encode_packed(routes, binary=True),
            lambda: narrow.tobytes(),
            lambda: decode_packed(binary, check=False),
            lambda: np.frombuffer(blob, np.uint8).copy(),
            narrow.nbytes,
        ),
        "npy": (
            lambda: encode(routes, "npy"),
            plain_npy,
            lambda: decode(npy, "npy", shape, check=False),
            lambda: np.load(io.BytesIO(npy)),
            narrow.nbytes,
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 32768), ("layers", 48), ("top-k", 8), ("experts", 128), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    routes = random_routes(args.tokens, args.layers, args.top_k, args.experts)
    (check,) = compare(args.rounds, lambda: Routes(routes.experts_TLK, routes.layer_ids, routes.num_experts))
    print(f"{routes!r}\nchecks alone {check * 1e3:.1f} ms\n")
    print(f"{'form':<14}{'MB':>7}{'encode':>10}{'plain':>9}{'decode':>10}{'plain':>9}{'both over plain':>17}   (ms)")
    report: dict[str, Any] = {"tokens": args.tokens, "layers": args.layers, "top_k": args.top_k}
    for name, (write, plain_write, read, plain_read, size_bytes) in cases(routes).items():
        ours, plain, ours_back, plain_back = compare(args.rounds, write, plain_write, read, plain_read)
        ratio = (ours + ours_back) / (plain + plain_back)
        times = f"{ours * 1e3:>10.1f}{plain * 1e3:>9.1f}{ours_back * 1e3:>10.1f}{plain_back * 1e3:>9.1f}"
        print(f"{name:<14}{size_bytes / 1e6:>7.1f}{times}{ratio:>17.2f}")
        report[name.replace(" ", "_")] = round(ratio, 3)
    print(
        json.dumps(
            {**report, "checks_ms": round(check * 1e3, 2), "machine": platform.processor() or platform.machine()}
        )
    )


if __name__ == "__main__":
    main()
