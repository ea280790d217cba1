"""The pages against the code: the files they name, the links between them, the record laid out, the
folders that have a line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from seqmoe_weights.layout import RecordLayout

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "tools/simulator/README.md"]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text("utf-8")
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page: Path) -> set[str]:
    """The anchors that headings get on a web page of the repository."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@by_page
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text("utf-8"))
    for path, anchor in links:
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


@by_page
def test_pages_use_the_words_of_the_glossary(page: Path) -> None:
    """Not those that these replaced, nor words for people where experts and kernels are meant."""
    given_up = r"\b(courier|prospects|foresight|shadow|hints?|nobody|everybody|whoever)\b"
    assert not re.findall(given_up, page.read_text("utf-8"), re.IGNORECASE)


def test_the_glossary_has_the_words_of_the_pool() -> None:
    words = re.findall(r"^\| \*\*([^*]+)\*\* \|", GLOSSARY, re.MULTILINE)
    each = [word for entry in words for word in entry.split(", ")]
    assert len(each) == len(set(each)) > 80
    assert {"tag", "event", "flight", "lock", "handover", "ghost cache", "candidate"} <= set(each)


@by_page
def test_every_file_that_is_named_exists(page: Path) -> None:
    """By its path in the repository, in `seqmoe_cli` or beside the page; `acme_moe` is the family
    that architecture.md makes up."""
    names = set(re.findall(r"`([\w./]+/[\w.]*|[\w./]+\.py)`", page.read_text("utf-8")))
    real = {name for name in names if "acme" not in name}
    places = (ROOT, ROOT / "seqmoe_cli", page.parent)
    assert not {name for name in real if not any((p / name).exists() for p in places)}
    assert all((ROOT / name).parent.is_dir() for name in names - real if "/" in name)


def test_every_package_has_a_line() -> None:
    tops = ("seqmoe_cli", "kernels/seqmoe_kernels", "weights/seqmoe_weights")
    folders = {path.parent for top in tops for path in (ROOT / top).rglob("*/__init__.py")}
    names = {folder.relative_to(ROOT).as_posix() for folder in folders}
    assert len(names) >= 18
    assert not {name for name in names if f"| `{name}/` |" not in ARCHITECTURE}


def test_the_record_that_is_laid_out_is_the_real_one() -> None:
    layout = RecordLayout.for_experts(2048, 768, "F8_E4M3")
    row = r"\| `(\w+)` \| (\w+) \| (?:.*= )?([\dx ]+) \| (\d+) \| (\d+) \|"
    assert re.findall(row, ARCHITECTURE) == [
        (
            part.name,
            part.dtype,
            " x ".join(map(str, part.shape)),
            str(part.offset),
            str(part.num_bytes),
        )
        for part in layout.parts
    ]
    assert f"| record | | | | {layout.record_bytes} |" in ARCHITECTURE
