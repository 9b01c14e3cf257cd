"""The Python blocks of the pages on routes and replay run, in order, as written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize(
    ("page", "needs"), [("reading_routes", ()), ("replay_megatron", ()), ("replay_hf", ("torch", "transformers"))]
)
def test_blocks_run(page: str, needs: tuple[str, ...]) -> None:
    for module in needs:
        pytest.importorskip(module)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"{page}.md block {number}", "exec"), names)


def test_the_table_of_forms_is_whole() -> None:
    from tracklayer.routes.forms import FORMS

    page = (DOCS / "reading_routes.md").read_text()
    assert [name for name in FORMS if f"`{name}`" not in page] == []
