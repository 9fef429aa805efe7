"""Hooks of MkDocs: files outside of docs/ that a page links are part of the site, so that no link leaves it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)(#[^)]*)?\)")
FOLDER = "files"
"""Of these files in the site."""


def place(path: str) -> str:
    """The page of a file or folder outside of docs/."""
    return f"{FOLDER}/{path.rstrip('/')}{'' if path.endswith('.md') else '.md'}"


def on_files(files: Files, *, config: Any) -> Files:
    """Adds a page for each file and folder that pages link."""
    wanted = [path for page in files.documentation_pages() for path, _ in OUTSIDE.findall(page.content_string)]
    while wanted:
        path = wanted.pop()
        if files.get_file_from_path(place(path)) is None:
            text = content(path)
            files.append(File.generated(config, place(path), content=text))
            if path.endswith(".md"):
                wanted += [linked for linked in map(inner(path), LINK.findall(text)) if linked]
    return files


LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def inner(page: str) -> Any:
    """The path, from the root, of a link of a page outside of docs/; "" if it leads elsewhere."""

    def path(link: str) -> str:
        target = (ROOT / page).parent / link
        inside = "://" not in link and target.exists() and target.resolve().is_relative_to(ROOT)
        relative = str(target.resolve().relative_to(ROOT)) if inside else ""
        return "" if relative.startswith("docs/") else relative

    return path


def content(path: str) -> str:
    """The text of the page: Markdown itself, the lines of a file, or the list of a folder."""
    source = ROOT / path
    if source.is_dir():
        names = sorted(one.name for one in source.iterdir() if not one.name.startswith("__"))
        return "\n".join([f"# {path.rstrip('/')}", "", *(f"* `{name}`" for name in names)])
    text = source.read_text(encoding="utf-8")
    language = {".py": "python", ".sh": "bash", ".json": "json", ".yaml": "yaml"}.get(source.suffix, "text")
    return text if source.suffix == ".md" else f"# {path}\n\n````{language}\n{text}````\n"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turns links that leave docs/ into links of the site."""
    source = page.file.src_uri
    if not source.startswith(f"{FOLDER}/"):
        return OUTSIDE.sub(lambda link: f"]({place(link[1])}{link[2] or ''})", markdown)
    original = source.removeprefix(f"{FOLDER}/")
    up = "../" * source.count("/")

    def turned(link: re.Match[str]) -> str:
        target = ((ROOT / original).parent / link[1]).resolve()
        if "://" in link[1] or not target.is_relative_to(ROOT):
            return link[0]
        path = str(target.relative_to(ROOT))
        found = path.removeprefix("docs/") if path.startswith("docs/") else place(path)
        return f"]({up}{found}{link[2] or ''})"

    return re.sub(r"\]\(([^)#\s]+)(#[^)]*)?\)", turned, markdown) if (ROOT / original).suffix == ".md" else markdown
