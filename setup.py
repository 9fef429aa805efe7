"""Version and dependencies of `swift`; the ranges live in requirements/*.txt, everything else in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

EXTRAS = {
    "vllm": ["vllm"],
    "lmdeploy": ["lmdeploy"],
    "deepspeed": ["deepspeed"],
    "ray": ["ray"],
    "quant": ["optim"],
    "guided": ["guided"],
    "hub": ["hub"],
    "loggers": ["loggers"],
    "answers": ["answers"],
    "all": ["vllm", "deepspeed", "ray", "optim", "guided", "hub", "loggers", "answers"],
    "dev": ["dev"],
}
"""Files of requirements that each extra installs."""


def requirements(*names: str) -> list[str]:
    """The requirement lines of requirements/<name>.txt, without comments."""
    lines = [line for name in names for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()]
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith(("#", "-"))]


version = re.search(r'__version__ = "([^"]+)"', (ROOT / "swift" / "__init__.py").read_text(encoding="utf-8"))
if version is None:
    raise RuntimeError("swift/__init__.py does not define __version__")

setup(
    version=version.group(1),
    packages=find_packages(include=["swift", "swift.*"]),
    package_data={"swift": ["py.typed", "data/shipped/**/*", "viewing/page.html"]},
    install_requires=requirements("base"),
    extras_require={extra: requirements(*files) for extra, files in EXTRAS.items()},
)
