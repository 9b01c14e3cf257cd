"""docs/add_a_family.md shows a family as it is in the tree."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tiny_variants import VARIANTS

ROOT = Path(__file__).resolve().parents[1]


def test_the_page_shows_the_family_and_its_row_as_they_are():
    page = (ROOT / "docs" / "add_a_family.md").read_text()
    family, row = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert family == (ROOT / "tracklayer" / "models" / "families" / "minimax_m2.py").read_text()
    assert ast.literal_eval("{" + row + "}")["minimax_m2"] == VARIANTS["minimax_m2"]
