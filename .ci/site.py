"""Hooks of the documentation's site: pages outside docs/ join it, and links are those of the repository.

The pages link each other by paths that lead somewhere in a checkout. The site holds docs/ and the pages in
``OUTSIDE``. A link to any other file of the repository becomes its text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = {
    "ARCHITECTURE.md": "project/architecture.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changes.md",
    "bench/README.md": "project/measurements.md",
}
"""Paths in the repository, and in the site."""

_CODE = re.compile(r"(^```.*?^```$|`[^`\n]*`)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, place in OUTSIDE.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = repository_path(page.file.src_uri)
    parts = _CODE.split(markdown)
    return "".join(
        part if at % 2 else _LINK.sub(lambda link: _linked(link, source), part) for at, part in enumerate(parts)
    )


def repository_path(place: str) -> str:
    """The path in the repository of a page of the site."""
    return next((source for source, here in OUTSIDE.items() if here == place), f"docs/{place}")


def _linked(link: re.Match[str], source: str) -> str:
    text, target, fragment = link[1], link[2], link[3] or ""
    if re.match(r"[a-z]+:", target):
        return link[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    place = OUTSIDE.get(path) or ("index.md" if path == "README.md" else path.removeprefix("docs/"))
    if path not in OUTSIDE and path != "README.md" and not path.startswith("docs/"):
        return text
    here = OUTSIDE.get(source, source.removeprefix("docs/"))
    return f"[{text}]({posixpath.relpath(place, posixpath.dirname(here) or '.')}{fragment})"


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that makes a browser fetch something from elsewhere."""
    found = re.search(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"', output)
    if found is not None:
        raise PluginError(f"{page.file.src_uri} fetches {found[0]} from elsewhere: the site works without a network.")
    return output
