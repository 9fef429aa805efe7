"""The documentation tells the truth where a program can check it: links, paths, commands, quoted messages."""

import ast
import functools
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import supported
import yaml

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "benchmarks").glob("*.md"))]
TROUBLE = ROOT / "docs" / "troubleshooting.md"
SHORTEST_PIECE = 4


def page_id(path):
    return path.name


def anchor(heading):
    """The anchor that a heading gets: GitHub's rule."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower().replace("`", "")).replace(" ", "-")


def anchors(path):
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        file, _, fragment = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), target
        assert not fragment or fragment in anchors(path), target


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_named_files_exist(page):
    for name in re.findall(r"`((?:swift|tests|examples|docs|benchmarks)/[\w/.*-]+)`", page.read_text(encoding="utf-8")):
        assert any(ROOT.glob(name.rstrip("/"))), name


def test_the_readme_leads_to_the_index_and_that_names_every_page():
    assert "(docs/index.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"({page.name})" not in index] == ["index.md"]


def test_the_site_is_built_with_every_page_and_what_they_link(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    for page in (ROOT / "docs").glob("*.md"):
        assert (tmp_path / page.with_suffix(".html").name).is_file()
    linked = (tmp_path / "files/examples/train/grpo/vision/lora.sh.html").read_text()
    assert "swift rlhf" in re.sub(r"<[^>]*>", "", linked).replace("\n", " ")
    for page in tmp_path.rglob("*.html"):
        for target in re.findall(r'href="([^"#:]+)(?:#[^"]*)?"', page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists() or page.name == "404.html", f"{page.name}: {target}"


def blocks(language):
    """Blocks of code with the page of each."""
    found = [
        pytest.param(block, id=page.name)
        for page in PAGES
        for block in re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    ]
    assert found, language
    return found


@pytest.mark.parametrize("block", blocks("yaml"))
def test_config_blocks_are_yaml(block):
    assert isinstance(yaml.safe_load(block), dict)


@pytest.mark.parametrize("block", blocks("json"))
def test_rows_are_json(block):
    assert all(isinstance(json.loads(line), dict) for line in block.splitlines())


@pytest.mark.parametrize("block", blocks("python"))
def test_python_has_the_names_that_it_imports(block):
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
        elif isinstance(node, ast.Import):
            assert [importlib.import_module(alias.name) for alias in node.names]


@functools.cache
def texts_of_the_program():
    """Every constant text of swift/, with the fixed pieces of f-strings."""
    found = []
    for path in (ROOT / "swift").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(" ".join(node.value.split()))
    return "\n".join(found)


def messages():
    """The quoted messages: code in the first column of the tables of the troubleshooting page."""
    for line in TROUBLE.read_text(encoding="utf-8").splitlines():
        if re.match(r"\| ?`", line):
            yield from re.findall(r"`([^`]+)`", line.split("|")[1])


@pytest.mark.parametrize("message", list(messages()))
def test_a_quoted_message_is_one_that_the_program_prints(message):
    program = texts_of_the_program()
    pieces = [piece.strip(" ();,:") for piece in message.split("...")]
    pieces = [piece for piece in pieces if len(piece) >= SHORTEST_PIECE]
    assert pieces
    for piece in pieces:
        assert piece in program, piece


def test_the_page_of_what_is_supported_is_that_of_the_tests():
    assert supported.PAGE.read_text(encoding="utf-8") == supported.page(), "python tests/support/supported.py --write"
