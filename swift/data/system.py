"""`--system`: the text itself, or the file that holds it.

A value of one line ending in .txt or .md is a file name. When it does not exist, the examples that come with
`swift` are searched, so that `--system examples/train/grpo/prompt.txt` works in any folder.
"""

from __future__ import annotations

from pathlib import Path

from swift.data.spec import beside
from swift.errors import ConfigError

_TEXT_SUFFIXES = (".txt", ".md")
_EXAMPLES = Path(__file__).resolve().parent / "shipped" / "examples"  # in the repository a link


def resolve_system(value: str | None) -> tuple[str | None, list[str]]:
    """The system prompt of `--system` (None: there is none), and a note if a shipped file was read."""
    if not value or not value.strip():
        return None, []
    name = value.strip()
    file = Path(name).expanduser()
    if not names_file(value):
        return value, []
    notes = []
    if not _is_file(file):
        shipped = shipped_example(file)
        if shipped is None:
            raise ConfigError(f"--system: {value}: no such file, nor among the shipped examples; {beside(file)}")
        notes, file = [f"system prompt: {value} is not here; read the shipped {shipped}"], shipped
    try:
        text = file.read_text(encoding="utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"--system: {value}: {file} is not UTF-8 text; save it as UTF-8") from error
    if not text:
        raise ConfigError(f"--system: {value}: {file} is empty; write the system prompt into it or drop --system")
    return text, notes


def names_file(value: str) -> bool:
    """Whether a value is the name of a file and not the text itself."""
    name = value.strip()
    return "\n" not in name and (name.lower().endswith(_TEXT_SUFFIXES) or _is_file(Path(name).expanduser()))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a prompt of many words can be too long for a file name
        return False


def shipped_example(file: Path) -> Path | None:
    """`file` among the examples: by its path from `examples/` on, or by a bare name that occurs once."""
    parts = file.parts
    if "examples" in parts:
        inside = _EXAMPLES.joinpath(*parts[len(parts) - parts[::-1].index("examples") :])
        return inside if inside.is_file() else None
    found = list(_EXAMPLES.resolve().rglob(file.name)) if len(parts) == 1 else []
    return found[0] if len(found) == 1 else None
