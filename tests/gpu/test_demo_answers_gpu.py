"""bfloat16 on the GPU answers as float32 on the CPU: a model of the demonstration's making, and itself if built."""

from __future__ import annotations

import pytest
import reciter
import torch
from engine_tools import make_core, request, run

from tracklayer.demo import check, job, model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("config", [{}, {"disable_cuda_graph": True}, {"chunked_prefill_size": 8}], ids=str)
def test_recited_answers(tmp_path, config):
    referee = reciter.save(tmp_path)
    prompts = {q: reciter.question(q) for q in reciter.FACTS}
    requests = [request(q, p, tokens=60, stop_token_ids=frozenset([reciter.END])) for q, p in prompts.items()]
    core = make_core(tmp_path, device="cuda", dtype="bfloat16", max_total_tokens=2000, **config)
    for text, result in run(core, requests).items():
        assert bytes(result.tokens[:-1]).decode() == reciter.FACTS[text]
        assert check.answer(referee, prompts[text], result.tokens).differing == 0


def test_the_demonstration_itself(tmp_path):
    if not model.is_built(model.default_dir(), model.Recipe()):
        pytest.skip("the demonstration model is not built here (tracklayer demo-model)")
    facts = job.run(model.default_dir(), tmp_path, ["--random-seed", "0"])
    print(facts, torch.cuda.get_device_name())
    assert facts["gpu"] and job.passed(facts)
