"""What `make install` installs is what setup.py asks for, and neither names a machine or a package host."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "requirements").glob("*.txt"))


def lines(path):
    return [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_requirement_has_a_range(path):
    for line in lines(path):
        assert Requirement(line).specifier, line


@pytest.mark.parametrize("name", ["torch-cpu", "base", "dev"])
def test_the_installed_versions_are_in_the_ranges(name):
    for line in lines(ROOT / "requirements" / f"{name}.txt"):
        requirement = Requirement(line)
        installed = version(requirement.name)
        assert requirement.specifier.contains(installed, prereleases=True), f"{line}: {installed}"


@pytest.mark.parametrize(
    "path", [*FILES, ROOT / "Makefile", ROOT / "setup.py", ROOT / ".ci" / "run"], ids=lambda path: path.name
)
def test_no_package_host_is_written_down(path):
    assert not re.search(r"https?://|file://|--(extra-)?index-url|--find-links", path.read_text())


def test_ci_runs_make_test_and_nothing_else():
    commands = (ROOT / ".ci" / "run").read_text().splitlines()
    assert commands[-1] == "exec make test"
    assert "make" not in " ".join(commands[:-1])
