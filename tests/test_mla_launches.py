"""What one layer of latent attention launches at decode: kernels do nothing but count, torch is listened to."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tracklayer.kernels import linear, mla, mla_attention, norm
from tracklayer.kernels.norm import AddNorm
from tracklayer.kernels.rope import rope_table
from tracklayer.layers.batch import Batch
from tracklayer.layers.mla import MLA
from tracklayer.layers.spec import MLASpec, RopeSpec

jit = pytest.importorskip("triton.runtime.jit")
LAUNCHES = {"mm", "bmm", "addmm", "copy_", "clone", "cat", "index", "index_put_", "mul", "add", "_to_copy", "sigmoid"}
SILENT = {"view", "split", "split_with_sizes", "slice", "select", "transpose", "t", "unsqueeze", "expand", "detach"}


class Heard(TorchDispatchMode):
    """Counts torch's operations that are kernels on a GPU; a synchronisation or an op not known here fails."""

    def __init__(self, counts: Counter) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.split("::")[1]
        if name in LAUNCHES:
            self.counts[name] += 1
        else:
            assert name in SILENT or name.startswith(("_unsafe_view", "empty", "new_empty")), name
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("tokens", "q_latent", "expected"),
    [
        (1, 24, 8),  # the residual sum and norm lie in the first product
        (1, None, 7),  # queries straight from the input
        (16, 24, 9),  # the norm in front apart
        (300, 24, 10),  # products per head by the BLAS library, the turn of the queries apart
    ],
)
def test_launches_of_a_layer(tokens, q_latent, expected, monkeypatch):
    counts: Counter = Counter()
    monkeypatch.setattr(jit.JITFunction, "run", lambda self, *a, **k: counts.update([self.fn.__name__]))
    for module in (linear, mla, mla_attention, norm):
        monkeypatch.setattr(module, "use_triton", lambda x: True)
    monkeypatch.setattr(mla_attention, "num_sms", lambda device: 132)
    spec = MLASpec(
        num_heads=8, kv_lora_rank=16, nope_dim=8, rope_dim=4, v_head_dim=8, q_lora_rank=q_latent, scale=0.3,
        rope=RopeSpec(dim=4),
    )  # fmt: skip
    module = MLA(spec, 32, rope_table(4, 1e4, None, 64), cache=0)
    some = torch.zeros(tokens, dtype=torch.int32)
    cache_SHD = torch.zeros(64, 1, 20)
    batch = Batch(
        token_ids_T=some, positions_T=some, slots_T=some, rows_B=some, starts_B1=torch.zeros(tokens + 1).int(),
        lens_B=some, slot_table_RC=torch.zeros(tokens, 64, dtype=torch.int32), max_query=1, max_len=4096,
        num_decodes=tokens, kv=[(cache_SHD, cache_SHD[..., :16])],
    )  # fmt: skip
    x = AddNorm(torch.zeros(tokens, 32), torch.zeros(tokens, 32), torch.zeros(32), 1e-6)
    with torch.no_grad(), Heard(counts):
        module(x, batch)
    assert sum(counts.values()) == expected, counts
