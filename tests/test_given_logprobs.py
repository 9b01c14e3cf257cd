"""Log-probabilities of tokens that the request names, through the engine, against a plain forward."""

from __future__ import annotations

import numpy as np
import tiny
import torch
from engine_tools import make_core, prompts, request, run


def test_named_tokens_of_prompt_and_output(tmp_path):
    model = tiny.save("qwen3_moe", tmp_path)
    core, prompt = make_core(tmp_path), prompts(1)[0]
    named = (3, 96, 0, 3)
    asked = request("a", prompt, tokens=4, return_logprob=True, logprob_start_len=0, token_ids_logprob=named)
    found = run(core, [asked, request("b", prompt[:3], tokens=4)])["a"]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + found.tokens])).logits[0]
    expected = logits.log_softmax(-1)[:, list(named)].numpy()
    np.testing.assert_allclose(found.input_logprobs.given, expected[: len(prompt) - 1], atol=1e-4)
    np.testing.assert_allclose(found.output_logprobs.given, expected[len(prompt) - 1 : -1], atol=1e-4)
