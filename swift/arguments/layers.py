"""Where values come from: the command line, a config file, the environment. No types and no defaults here.

The lowest layer above the defaults, a preset, is a table of typed values: `swift.arguments.presets`.

Each layer is read into `Given`s, in the order in which they were written; names are normalised (`-` is `_`)
and otherwise untouched.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from swift.arguments.values import Raw, show
from swift.errors import ConfigError, first_line, parse_json
from swift.observability.secrets import mask_text

if TYPE_CHECKING:
    import yaml

Source = Literal["preset", "file", "env", "command line"]

CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
VARIABLES = {
    "USE_HF": ("use_hf",), "SWIFT_DEBUG": ("debug",), "SWIFT_API_KEY": ("api_key", "vllm_server_api_key"),
    "MAX_PIXELS": ("max_pixels",),
}  # fmt: skip
"""Environment variable -> the setting it is, the first that a mode has."""

_FLAG = re.compile(r"--([A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)
_ONE_DASH = re.compile(r"-[A-Za-z][\w-]+")
BESIDE = ("world_size", "batch_processes")
"""Keys of the args.json of a checkpoint beside the settings."""
BLOCKS = ("ebft",)
"""Keys of a config file that hold the settings whose names begin with them, with or without that beginning."""
MOST_VALUES = 100_000
"""Of a config file, with its aliases expanded."""


@dataclass(slots=True)
class Given:
    """One value as it was written.

    spelling: the name, with underscores. given_as: for the provenance. subject: the start of an error line.
    """

    spelling: str
    raw: Raw
    source: Source
    given_as: str
    subject: str


@dataclass(slots=True)
class Layer:
    """The content of a command line or of a config file.

    config: path of the file. environment: its `ENV` block. provenance: of the values of an args.json.
    """

    config: str | None = None
    given: list[Given] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read_command_line(argv: Sequence[str]) -> Layer:
    """Flags with their values; a first word that is no flag is the config file.

    A word is a flag if two dashes and a letter begin it. Other words, negative numbers too, are values; a value
    that looks like a flag is written `--name=value`.
    """
    line = Layer()
    words = list(argv)
    if words and not words[0].startswith("-"):
        line.config = _config_path(words.pop(0), line.problems)
    values: list[Any] | None = None  # of the flag at hand
    for word in words:
        if match := _FLAG.fullmatch(word):
            name, value = match.groups()
            values = [] if value is None else [value]
            line.given.append(Given(name.replace("-", "_"), values, "command line", f"--{name}", f"--{name}"))
        elif _ONE_DASH.fullmatch(word):
            line.problems.append(f"{mask_text(word)}: one dash: flags begin with two; write -{mask_text(word)}")
            values = []
        elif values is None:
            line.problems.append(f"{mask_text(word)}: not a flag; flags begin with two dashes, like --model")
        else:
            values.append(word)
    configs = [item for item in line.given if item.spelling == "config"]
    line.given = [item for item in line.given if item.spelling != "config"]
    if configs:
        _take_config(line, configs)
    return line


def read_environment(environ: Mapping[str, str], flags: Collection[str]) -> list[Given]:
    """The settings among `flags` that environment variables set; an empty variable sets nothing."""
    found = []
    for variable, names in VARIABLES.items():
        name = next((name for name in names if name in flags), None)
        if name is not None and environ.get(variable):
            found.append(Given(name, environ[variable], "env", variable, variable))
    return found


def read_config(path: str) -> Layer:
    """The keys of a YAML or JSON file, each with its line.

    Scalars stay texts, because the flag's type decides what they mean: `1e-6` is a float where YAML sees a
    text, `eval_strategy: no` a text where YAML sees a boolean.
    """
    import yaml

    root = _compose(path)
    file = Layer(path)
    seen: dict[str, int] = {}
    for key, node in _without_blocks(root):
        line = key.start_mark.line + 1
        if key.value in seen:
            file.problems.append(
                f"{path}:{line}: {key.value}: duplicate key, first on line {seen[key.value]}; keep one"
            )
            continue
        seen[key.value] = line
        if key.value == "ENV":
            file.environment, problems = _environment(node, path)
            file.problems += problems
        elif key.value == "_provenance":
            origins = _raw(node)
            file.provenance = origins if isinstance(origins, dict) else {}
        elif not (file.provenance and key.value in BESIDE):
            spelling, subject = key.value.replace("-", "_"), f"{path}:{line}: {key.value}"
            try:
                file.given.append(Given(spelling, _raw(node), "file", f"{key.value} ({path}:{line})", subject))
            except (ValueError, RecursionError, yaml.YAMLError) as error:
                file.problems.append(f"{subject}: not a value: {first_line(error)}; put texts in quotes")
    return file


def _without_blocks(
    pairs: Sequence[tuple[yaml.ScalarNode, yaml.Node]],
) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
    """The pairs of a map; those of a block with its name before theirs."""
    import yaml

    for key, node in pairs:
        if key.value not in BLOCKS or not isinstance(node, yaml.MappingNode):
            yield key, node
            continue
        for inner, value in node.value:
            prefix = "" if str(inner.value).startswith(f"{key.value}_") else f"{key.value}_"
            inner.value = f"{prefix}{inner.value}"
            yield inner, value


def _config_path(word: str, problems: list[str]) -> str | None:
    if word.endswith(CONFIG_SUFFIXES):
        return word
    problems.append(
        f"{mask_text(word)}: neither a flag nor a config file; flags begin with --, config files end in "
        f"{', '.join(CONFIG_SUFFIXES)}"
    )
    return None


def _take_config(line: Layer, configs: Sequence[Given]) -> None:
    for item in configs:
        values = item.raw if isinstance(item.raw, list) else []
        if len(values) != 1 or not str(values[0]).endswith(CONFIG_SUFFIXES):
            line.problems.append(f"--config: {show(item.raw)}: not a config file; valid endings: .yaml, .yml, .json")
        elif line.config is not None:
            line.problems.append(f"--config: {show(item.raw)}: a second config file beside {line.config}; give one")
        else:
            line.config = str(values[0])


def _compose(path: str) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
    import yaml

    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a UTF-8 text"
        raise ConfigError(f"{path}: config file: cannot be read ({reason}); check the path") from error
    try:
        if path.endswith(".json"):
            parse_json(text)
            text = text.replace("\t", " ")  # JSON is YAML but for tabs, which its texts never contain
        root = yaml.compose(text, Loader=_loader())
        size = _size(root, {}) if root is not None else 0
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: not JSON: {error.msg}; correct the file") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else path
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{where}: not YAML: {problem}; correct the file") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: config file: nested too deeply; correct the file") from error
    if root is None:
        return []
    if size > MOST_VALUES:
        raise ConfigError(f"{path}: config file: over {MOST_VALUES} values with its aliases expanded; write them out")
    if not isinstance(root, yaml.MappingNode) or not all(isinstance(key, yaml.ScalarNode) for key, _ in root.value):
        raise ConfigError(f"{path}: config file: not a map of settings; write one `name: value` per line")
    return list(root.value)


def _size(node: Any, sizes: dict[int, float]) -> float:
    """Values in a node, or in a pair of a map, its aliases expanded; infinitely many where it contains itself."""
    if id(node) not in sizes:
        sizes[id(node)] = math.inf  # while it is counted
        inside = node if isinstance(node, tuple) else node.value if isinstance(node.value, list) else ()
        sizes[id(node)] = 1 + sum(_size(part, sizes) for part in inside)
    return sizes[id(node)]


def _raw(node: yaml.Node) -> Raw:
    """Texts and lists of texts as they were written; maps with the native values of YAML."""
    import yaml

    if isinstance(node, yaml.ScalarNode):
        # JSON writes an emoji as two surrogates, which YAML leaves apart.
        text = str(node.value).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return None if node.tag == "tag:yaml.org,2002:null" else text
    if isinstance(node, yaml.SequenceNode):
        return [_raw(item) for item in node.value]
    return dict(_loader()("").construct_document(node))


@functools.cache
def _loader() -> type[yaml.SafeLoader]:
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML with the floats of JSON, where 1e-6 needs no dot."""

    number = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789."))
    return Loader


def _environment(node: yaml.Node, path: str) -> tuple[dict[str, str], list[str]]:
    import yaml

    if not isinstance(node, yaml.MappingNode):
        return {}, [f"{path}:{node.start_mark.line + 1}: ENV: not a map; write one `NAME: value` per line"]
    variables, problems = {}, []
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode) and isinstance(value, yaml.ScalarNode):
            variables[str(key.value)] = str(value.value)
        else:
            problems.append(f"{path}:{key.start_mark.line + 1}: ENV: not a text; write one `NAME: value` per line")
    return variables, problems
