"""Package definition of `swift`; the dependency ranges live in requirements/*.txt."""

import hashlib
import re
from pathlib import Path

from setuptools import Extension, find_packages, setup

ROOT = Path(__file__).parent


def requirements(name: str) -> list[str]:
    """The requirement lines of requirements/<name>.txt, without comments and includes."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith(("#", "-"))]


version = re.search(r'__version__ = "([^"]+)"', (ROOT / "swift" / "__init__.py").read_text(encoding="utf-8"))
if version is None:
    raise RuntimeError("swift/__init__.py does not define __version__")

# Plain C, loaded by swift/native/__init__.py; where there is no compiler the package is installed without it.
# It knows the sources that it was made from, so that one that is older than its package is not used.
SOURCES = ["swift/native/kernels.c", "swift/native/kernels.h"]
digest = hashlib.sha256(b"".join((ROOT / source).read_bytes() for source in SOURCES)).hexdigest()
native = Extension(
    "swift.native._kernels",
    sources=SOURCES[:1],
    depends=SOURCES[1:],
    define_macros=[("SWIFT_SOURCES", f'"{digest}"')],
    extra_compile_args=["-std=gnu11", "-O3", "-ffp-contract=fast", "-Wno-psabi"],
    libraries=["m"],
    optional=True,
)

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
    ext_modules=[native],
    install_requires=requirements("base"),
    extras_require={name: requirements(name) for name in ("hub", "loggers", "guided", "optim", "ray", "dev")},
    entry_points={"console_scripts": ["swift = swift.cli.main:main"]},
)
