"""What becomes of every key of other projects' files: `python -m tests.imports.foreign FOLDER`, of their YAML files.

Prints a line for each file, and ends with code 1 if a key of one has no fate.
"""

import sys
from collections import Counter
from pathlib import Path

from swift.arguments.imports.axolotl import BLOCKS
from swift.arguments.imports.command import Imported, import_file
from swift.arguments.layers import read_config
from swift.errors import ConfigError

DATASETS = ("datasets", "test_datasets", "pretraining_dataset")
MAPS = (*BLOCKS, "fsdp_config")


def keys_of(config):
    """The keys that must have a fate: those of blocks, and of each dataset, one by one."""
    for key, raw in config.items():
        if key in MAPS and isinstance(raw, dict) and raw:
            yield from (f"{key}.{name}" for name in raw)
        elif key in DATASETS and isinstance(raw, list) and all(isinstance(one, dict) for one in raw):
            yield key
            own = (name for one in raw for name in one if name not in ("path", "name"))
            yield from (f"{key}[{index}].{name}" for index, one in enumerate(raw) for name in one if name in set(own))
        else:
            yield key


def silent(imported: Imported, config):
    """The keys without a fate."""
    told = {key for key, _, _ in imported.draft.lines}
    told |= {key.partition(":")[0] for key in told}
    parts = {key.partition(".")[0] for key in told}  # special_tokens.pad_token speaks for special_tokens
    return [key for key in keys_of(config) if key not in told and ("." in key or key not in parts)]


def fates(path: Path):
    """How an import of a file ends, in a word and its details."""
    config = {given.spelling: given.raw for given in read_config(str(path)).given}
    try:
        imported = import_file(str(path))
    except ConfigError as error:
        return "refused", error.problems
    lost = [f"{key}: {why}" for key, fate, why in imported.draft.lines if fate == "no counterpart"]
    if missing := silent(imported, config):
        return "silent", missing
    return ("stated", lost) if lost else ("whole", [])


def main(folder: str) -> int:
    """Every YAML file below the folder."""
    count: Counter[str] = Counter()
    for path in sorted(path for path in Path(folder).rglob("*.y*ml")):
        word, details = fates(path)
        count[word] += 1
        print(f"{word:8} {path.relative_to(folder)}")
        for line in details:
            print(f"           {line}")
    print(", ".join(f"{number} {word}" for word, number in count.most_common()))
    return int(bool(count["silent"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
