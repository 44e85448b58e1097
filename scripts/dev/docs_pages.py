# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A hook of mkdocs: pages of the site that are files elsewhere, and links to files outside docs/.

In a checkout every link is a path to a file, so a code browser can follow it. The site has some of
those files as pages; a link to any other file is replaced by the file's name. A link to a file that
does not exist is a warning, which ``strict`` makes an error.

The page of the Python API has names; in the site their docstrings follow (mkdocstrings).
"""

from __future__ import annotations

import json
import logging
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
# Pages whose text is a file of the repository outside docs/.
ELSEWHERE = {
    "index.md": "README.md",
    "core.md": "csrc/README.md",
    "format.md": "csrc/FORMAT.md",
    "tests.md": "tests/README.md",
    "changes.md": "CHANGELOG.md",
}
PAGES = {source: page for page, source in ELSEWHERE.items()}
API = "reference/api.md"
NAME = re.compile(r"^\| `(beluga[\w.]*)` \|", re.MULTILINE)
# Members that are public for other parts of Beluga, not for programs.
INTERNAL = {
    "Pool": "using handle has_runtime_dir raise_for_status refuse_in_use refuse_removed run_near "
    "host_number before_close",
    "IndexServer": "attach_lower attach_journal fail watch reported",
    "Server": "fail watch reported",
    "Client": "session",
    "Handlers": "bind returns",
    "Run": "rest refuse_wrong",
    "Plan": "struct refuse_direction refuse_beyond",
    "View": "foreign",
    "Link": "price",
    "Indexer": "handle shared_stored shared_removed shared_count shared_names clear_shared",
    "LoadTracker": "states new_blocks",
    "Router": "candidates",
}
ROLE = re.compile(r":(?:class|exc|meth|func|attr|mod):(?=<code>)")  # of Sphinx
LINK = re.compile(r"(!?)\[([^\]]+)\]\(([^)\s#]*)(#[^)\s]*)?\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)

log = logging.getLogger("mkdocs.plugins.docs_pages")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages whose files are outside docs/."""
    from mkdocs.structure.files import File

    for page, source in ELSEWHERE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page's text with its links as the site needs them, except in code blocks."""
    name = page.file.src_uri
    source = ELSEWHERE.get(name, f"docs/{name}")
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [_relinked(markdown[end : fence.start()], source), fence[0]]
        end = fence.end()
    members = _members(markdown) if name == API else ""
    return "".join([*parts, _relinked(markdown[end:], source), members])


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page without the roles of docstrings."""
    return ROLE.sub("", html) if page.file.src_uri == API else html


def _members(markdown: str) -> str:
    """Return the directives of mkdocstrings for the names of the page."""
    blocks = ["\n\n## Members\n"]
    for path in NAME.findall(markdown):
        hidden = "|".join(INTERNAL.get(path.rpartition(".")[2], "").split())
        filters = [r"!^_[^_]", *([f"!^({hidden})$"] if hidden else [])]
        blocks.append(f"::: {path}\n    options:\n      filters: {json.dumps(filters)}\n")
    return "\n".join(blocks)


def _relinked(text: str, source: str) -> str:
    return LINK.sub(lambda found: _link(found, source), text)


def _link(found: re.Match[str], source: str) -> str:
    image, label, target, anchor = found[1], found[2], found[3], found[4] or ""
    if not target or re.match(r"[a-z]+:", target):
        return found[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if path in PAGES or path.startswith("docs/"):
        page = PAGES.get(path, path.removeprefix("docs/"))
        folder = posixpath.dirname(PAGES.get(source, source.removeprefix("docs/")))
        return f"{image}[{label}]({posixpath.relpath(page, folder or '.')}{anchor})"
    if not (ROOT / path).exists():
        log.warning("%s has a link to '%s', which does not exist", source, target)
    bare = label.strip("`")
    return f"`{path}`" if bare in (target, path) else f"{label} (`{path}`)"
