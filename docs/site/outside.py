"""Puts files of the repository that pages link to, and that lie outside of docs/, into the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"\]\(((?:\.\./)+)([\w./-]+)((?:#[\w-]+)?)\)")


def _place(link: re.Match[str], page: str) -> str | None:
    """Where a link leads, from the repository's root; None for a place in docs/."""
    found = (ROOT / "docs" / page).parent.joinpath(link[1] + link[2]).resolve().relative_to(ROOT)
    return None if found.parts[0] == "docs" else str(found)


def _shown(place: str) -> str:
    """The file of the site that shows it: pages are pages, other files and lists of folders are texts."""
    return f"outside/{place.strip('/')}" + ("" if place.endswith(".md") else ".txt")


def on_files(files: Any, config: Any) -> Any:
    """Adds them."""
    for page in [file for file in files if file.src_uri.endswith(".md")]:
        for link in _LINK.finditer(page.content_string):
            place = _place(link, page.src_uri)
            if place is None or _shown(place) in files.src_uris:
                continue
            source = ROOT / place
            text = "\n".join(sorted(str(one.relative_to(ROOT)) for one in source.rglob("*") if one.is_file())) \
                if source.is_dir() else source.read_text()
            if place.endswith(".md"):
                # Their own links lead to places of the repository, which the site does not have.
                text = re.sub(r"\[([^\]\n]+)\]\((?!\w+://)[^)\n]+\)", r"\1", re.sub(r"^!\[.*$", "", text, flags=re.M))
            files.append(File.generated(config, _shown(place), content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_more: Any) -> str:
    """Has links lead to them."""
    uri = page.file.src_uri
    if uri.startswith("outside/"):
        return markdown

    def lead(link: re.Match[str]) -> str:
        place = _place(link, uri)
        return link[0] if place is None else f"]({'../' * uri.count('/')}{_shown(place)}{link[3]})"

    return _LINK.sub(lead, markdown)
