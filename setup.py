"""Package definition of `swift`; the dependency ranges live in requirements/*.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def requirements(name: str) -> list[str]:
    """The requirement lines of requirements/<name>.txt, without comments and includes."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith(("#", "-"))]


version = re.search(r'__version__ = "([^"]+)"', (ROOT / "swift" / "__init__.py").read_text(encoding="utf-8"))
if version is None:
    raise RuntimeError("swift/__init__.py does not define __version__")

setup(
    name="swift-rl",
    version=version.group(1),
    description="RL post-training of language models from one command line",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["swift", "swift.*"]),
    package_data={"swift": ["py.typed", "data/shipped/**/*"]},
    install_requires=requirements("base"),
    extras_require={name: requirements(name) for name in ("hub", "loggers", "guided", "optim", "ray", "dev")},
    entry_points={"console_scripts": ["swift = swift.cli.main:main"]},
)
