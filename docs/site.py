"""Make pages of a site from files that GitHub shows, too: a hook of MkDocs."""

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
COMMIT = "{GITHUB_SERVER_URL}/{GITHUB_REPOSITORY}/blob/{GITHUB_SHA}"
REPOSITORY = COMMIT.format(**os.environ) if "GITHUB_REPOSITORY" in os.environ else ROOT.as_uri()


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the README as the first page."""
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text().replace("](docs/", "](")))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - MkDocs gives it
    """Lead links to files that are no pages to the repository; MkDocs warns about those to nothing."""

    def target(link: re.Match[str]) -> str:
        here = ROOT / ("README.md" if page.file.src_uri == "index.md" else f"docs/{page.file.src_uri}")
        file = (here.parent / link[1]).resolve()
        ours = file.exists() and not files.get_file_from_path(os.path.relpath(file, ROOT / "docs"))
        return f"]({REPOSITORY}/{file.relative_to(ROOT)}{link[2]})" if ours else link[0]

    return re.sub(r"\]\(([^)#:\s]+)(#[^)\s]*|)\)", target, markdown)
