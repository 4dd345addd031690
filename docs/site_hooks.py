"""mkdocs hooks: the pages outside docs/ become part of the site, and links lead to where a page or file is there."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
    **{
        f"examples/{readme.parent.name}/README.md": f"examples/{readme.parent.name}.md"
        for readme in sorted((ROOT / "examples").glob("*/README.md"))
    },
}
WIDE = "performance.md"
"""A page whose tables need the room of the table of contents, as those of papers do."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages outside docs/, and every other file that a page links to."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    pages = [(file.src_uri, file.content_string) for file in files.documentation_pages()]
    targets = {_target(_source(uri), link) for uri, text in pages for _, _, link in LINK.findall(text)}
    for target in sorted(filter(None, targets)):
        if (ROOT / target).is_file() and not _on_site(target):
            files.append(File.generated(config, f"files/{target}", abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites the links of a page; a link to a folder becomes plain text. Wide pages have no table of contents."""
    here = page.file.src_uri
    if here == WIDE or here.startswith("reproduction/"):
        page.meta["hide"] = ["toc"]

    def rewritten(match: re.Match[str]) -> str:
        target = _target(_source(here), match[3])
        if target is None:
            return match[0]
        if (ROOT / target).is_dir():
            return match[2]
        uri = PAGES.get(target) or (target.removeprefix("docs/") if _on_site(target) else f"files/{target}")
        anchor = match[3][match[3].find("#") :] if "#" in match[3] else ""
        return f"{match[1]}[{match[2]}]({posixpath.relpath(uri, posixpath.dirname(here) or '.')}{anchor})"

    return LINK.sub(rewritten, markdown)


def _source(uri: str) -> str:
    """Returns the file of the repository that a page of the site shows."""
    return next((source for source, page in PAGES.items() if page == uri), f"docs/{uri}")


def _target(source: str, link: str) -> str | None:
    """Returns a link's file, from the repository's root; None for other sites and for anchors on the same page."""
    path = link.partition("#")[0]
    if not path or "://" in path or path.startswith("mailto:"):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), path))


def _on_site(target: str) -> bool:
    return target in PAGES or target.startswith("docs/")
