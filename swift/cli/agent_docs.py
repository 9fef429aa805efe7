"""`swift agent-docs [TOPIC]`: the pages of the documentation as plain text, for programs that read a terminal."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.errors import ConfigError, suggest

if TYPE_CHECKING:
    from swift.arguments import Resolved

PAGES = Path(__file__).resolve().parents[1] / "data" / "shipped" / "docs"  # in the repository a link
_IMAGE = re.compile(r"^!\[.*\]\(.*\)\n", re.MULTILINE)


def run(resolved: Resolved) -> int:
    """The mode: prints a page, or the list of them; returns 0."""
    args: Any = resolved.args
    pages = {path.stem: path for path in sorted(PAGES.glob("*.md")) if path.stem != "index"}
    if args.topic is not None and args.topic not in pages:
        raise ConfigError(f"--topic: {args.topic}: no such page; {suggest(args.topic, list(pages))}")
    titles = {name: page_text(path).partition("\n")[0].lstrip("# ") for name, path in pages.items()}
    if args.topic is not None:
        print(json.dumps({args.topic: page_text(pages[args.topic])}) if args.json else page_text(pages[args.topic]))
    elif args.json:
        print(json.dumps(titles, indent=2))
    else:
        width = max(map(len, titles))
        print("\n".join(f"{name:<{width}}  {title}" for name, title in titles.items()))
        print(
            "\nswift agent-docs TOPIC prints a page; swift <mode> --help-all and swift config-schema have every flag."
        )
    return 0


def page_text(path: Path) -> str:
    """The text of a page, without its images."""
    return _IMAGE.sub("", path.read_text(encoding="utf-8")).strip()
