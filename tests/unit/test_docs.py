"""The site of docs/: its pages are in the list of contents, links lead somewhere, and it is made without a warning."""

from __future__ import annotations

import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as mkdocs and code hosts write them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    found = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.M):
        plain = unicodedata.normalize("NFKD", re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading)).encode("ascii", "ignore")
        found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain.decode()).strip().lower()))
    return found


def test_every_page_is_in_the_contents() -> None:
    listed = re.findall(r"[\w/-]+\.md", (DOCS / "site/mkdocs.yml").read_text().partition("nav:")[2])
    assert len(listed) == len(set(listed))
    assert {*listed, "README.md"} == {page.name for page in DOCS.glob("*.md")} | {"decisions/README.md"}


def test_links_lead_to_headings() -> None:
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    followed = 0
    for page in pages:
        for target, anchor in re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", page.read_text()):
            there = page.parent / target if target else page
            assert anchor in headings(there), f"{page.relative_to(ROOT)} links to {target}#{anchor}"
            followed += 1
    assert followed > 3


def test_the_site_is_made(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-f", str(DOCS / "site/mkdocs.yml"), "-d",
                           str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    made = {page.relative_to(tmp_path).with_suffix(".md") for page in tmp_path.rglob("*.html")}
    assert {page.relative_to(DOCS) for page in DOCS.rglob("*.md") if page.name != "README.md"} <= made
    # A host shows 404.html under any path, so its links begin at the root.
    (tmp_path / "404.html").unlink()
    for page in tmp_path.rglob("*.html"):
        text = page.read_text()
        for asked in re.findall(r"""<(?:script|link|img)[^>]+(?:src|href)=["']?([^"'\s>]+)""", text):
            assert "://" not in asked, f"{page.name} loads {asked}"
        for target in re.findall(r'<a [^>]*href="([^"#:]+)(?:#[^"]*)?"', text):
            assert (page.parent / target).exists(), f"{page.relative_to(tmp_path)} links to {target}"
