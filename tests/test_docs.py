"""docs/architecture.md against the code: the files it names, the record it lays out."""

from __future__ import annotations

import re
from pathlib import Path

from seqmoe_weights.layout import RecordLayout

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "architecture.md").read_text("utf-8")


def test_every_file_that_is_named_exists() -> None:
    names = set(re.findall(r"`([\w./]+(?:\.py|\.md|/))`", TEXT)) - {"kernels/", "weights/"}
    made_up = {name for name in names if "acme_moe" in name}
    assert len(made_up) == 2
    places = (ROOT, ROOT / "seqmoe_cli")
    missing = {name for name in names - made_up if not any((p / name).exists() for p in places)}
    assert not missing
    assert all((ROOT / name).parent.is_dir() for name in made_up)


def test_every_package_has_a_line() -> None:
    folders = {path.parent for path in ROOT.glob("*/*/__init__.py")} - {ROOT / "tools"}
    product = {f.relative_to(ROOT).as_posix() for f in folders if f.parts[-2] != "tools"}
    product = {name for name in product if "seqmoe" in name}
    assert len(product) >= 8
    assert not {name for name in product if f"| `{name}/` |" not in TEXT}


def test_the_record_that_is_laid_out_is_the_real_one() -> None:
    layout = RecordLayout.for_experts(2048, 768, "F8_E4M3")
    rows = re.findall(r"\| `(\w+)` \| (\w+) \| (?:.*= )?([\dx ]+) \| (\d+) \| (\d+) \|", TEXT)
    assert rows == [
        (
            part.name,
            part.dtype,
            " x ".join(map(str, part.shape)),
            str(part.offset),
            str(part.num_bytes),
        )
        for part in layout.parts
    ]
    assert f"| record | | | | {layout.record_bytes} |" in TEXT
