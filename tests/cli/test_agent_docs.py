"""The documentation on the terminal: every page is listed, is printed without images, and travels with the package."""

import json
from pathlib import Path

import pytest

from swift.arguments import parse
from swift.cli.agent_docs import PAGES, run
from swift.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs"


def printed(capsys, *flags):
    assert run(parse("agent-docs", flags, {})) == 0
    return capsys.readouterr().out


def test_every_page_is_listed_with_its_title(capsys):
    listed = printed(capsys).splitlines()
    pages = {path.stem for path in DOCS.glob("*.md")} - {"index"}
    assert {line.split()[0] for line in listed[: len(pages)]} == pages
    assert any(line.startswith("rewards ") and line.endswith("Rewards and plugins") for line in listed)
    assert json.loads(printed(capsys, "--json", "true")).keys() == pages


def test_a_page_is_printed_without_its_images(capsys):
    text = printed(capsys, "--topic", "architecture")
    assert text.startswith("# Architecture\n") and "![" not in text and "## Import rules" in text


def test_an_unknown_page_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match=r"--topic: reward: no such page; .*rewards"):
        run(parse("agent-docs", ["--topic", "reward"], {}))


def test_the_pages_are_those_of_the_repository():
    assert PAGES.resolve() == DOCS
