"""A place to write wrong files, and what every command with a wrong input must do."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from swift.cli.main import main

ROWS = [{"query": f"What is {n} + 1?", "solution": str(n + 1)} for n in range(20)]

IMPORT = "from swift.plugin import ORM, orms\n"


@dataclass
class Desk:
    """A place to write wrong files, and command lines that are right but for one thing."""

    folder: Path
    model: Path

    @property
    def output(self):
        return self.folder / "output"

    def file(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return str(path)

    def rows(self, rows, name="rows.jsonl"):
        return self.file(name, "".join(json.dumps(row) + "\n" for row in rows))

    def plugin(self, text, name="my_plugin.py"):
        return self.file(name, text)

    def reward(self, body, name="mine"):
        """Flags of a plugin with one reward function."""
        return self.entry(f"def {name}(completions, **kwargs):\n    {body}\n", name)

    def entry(self, source, name):
        """Flags of a plugin that registers what it defines under this name."""
        text = f"{IMPORT}\n{source}\norms[{name!r}] = {name}\n"
        return "--external_plugins", self.plugin(text, f"plugin_{name}.py"), "--reward_funcs", name

    def copy_model(self, name="copy"):
        return Path(shutil.copytree(self.model, self.folder / name))

    def train(self, mode, flags, words, without):
        defaults = {
            "--model": self.model,
            "--dataset": None,
            "--output_dir": self.output,
            "--max_steps": 1,
            "--report_to": "none",
            **flags,
        }
        if "--dataset" in words or "--dataset" in without:
            defaults.pop("--dataset")
        else:
            defaults["--dataset"] = self.rows(ROWS)
        kept = [str(word) for item in defaults.items() if item[0] not in without for word in item]
        return [mode, *kept, *map(str, words)]

    def rlhf(self, *words, without=()):
        """A word that begins with dashes may hold several."""
        words = [one for word in words for one in (word.split() if str(word).startswith("--") else [word])]
        flags = {
            "--rlhf_type": "grpo",
            "--reward_funcs": "accuracy",
            "--per_device_train_batch_size": 8,
            "--max_completion_length": 8,
        }
        if "--reward_funcs" in words or "--reward_model" in words:
            flags.pop("--reward_funcs")
        return self.train("rlhf", flags, words, without)

    def sft(self, *words, without=()):
        return self.train("sft", {}, [one for word in words for one in str(word).split(" ")], without)


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def contents(folder):
    """Files of a folder, but for what Python keeps of a plugin that it imported."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def refused(words, fragments, capfd, code=2):
    """Run a command that must fail with its code, and with error lines that hold the fragments."""
    assert main(list(map(str, words))) == code
    captured = capfd.readouterr()
    errors = [line for line in captured.err.splitlines() if line.startswith("swift: error: ")]
    assert errors, captured.err
    assert "Traceback" not in captured.err + captured.out
    missing = [fragment for fragment in fragments.split(" | ") if fragment not in "\n".join(errors)]
    assert not missing, errors


def refused_without_a_trace(desk, row, capfd):
    """A row of wrong inputs: flags of `swift rlhf`, or what makes a command; fragments; the exit code, if not 2."""
    typed, fragments, code = (*row, 2)[:3]
    words = desk.rlhf(typed) if isinstance(typed, str) else typed(desk)
    before = contents(desk.folder)
    refused(words, fragments, capfd, code)
    assert contents(desk.folder) == before
