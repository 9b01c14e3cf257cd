"""The page in a real browser, where one is installed: it fills with live numbers, on a wide screen and on a phone."""

from __future__ import annotations

import asyncio
import shutil

import httpx
import pytest
from server_http import listening

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom", "--virtual-time-budget=5000")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize(("size", "dark"), [("1100,800", False), ("390,800", True)])
async def test_page_shows_load_and_experts(size, dark, tmp_path):
    async with listening() as (url, runner, _, _), httpx.AsyncClient(base_url=url) as client:
        while runner.service is None:
            await asyncio.sleep(0.01)
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 5}, "return_routed_experts": True}
        await client.post("/generate", json=body)
        scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        browser = await asyncio.create_subprocess_exec(
            CHROMIUM, *FLAGS, scheme, f"--window-size={size}", f"--user-data-dir={tmp_path}", f"{url}/",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        dom = (await asyncio.wait_for(browser.communicate(), 60))[0].decode()
    assert ">up</span>" in dom and "/models/fake" in dom and dom.count('class="tile"') == 6
    assert "7 tokens, 3 MoE layers (rows) by 8 experts" in dom
