"""What docs/export.md shows runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "export.md"


# torch.export's own copy of a tree of arguments warns of itself (torch 2.13).
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
def test_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 1
    assert names["found"].shape == (5, 4)  # type: ignore[attr-defined]
    assert {path.name for path in (tmp_path / "linear").iterdir()} == {"program.mlirbc", "weights.safetensors", "manifest.json"}
