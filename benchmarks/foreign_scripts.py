"""How many of other people's training scripts start here: `swift ... --dry_run true` for each shell script of a folder.

    python benchmarks/foreign_scripts.py /path/to/ms-swift/examples --root /path/to/ms-swift --out counted.json

Flags are those of the script. Models become tiny ones of the same kind (text, experts, images), datasets small ones
with the rows of the method, and paths that are not below `--root` temporary folders; `--root` is the working folder, so
plugin files and DeepSpeed configurations of the project are its own. A script that names its model by a path of its
author's counts as one of texts.

Placeholders such as `<num-labels>` are numbers or addresses, and datasets have the columns that reward functions of
the script's plugins ask for. Packages that `--pretend` names seem installed. Per script: `ok`, `here` (refused for what
this machine lacks: a package, an accelerator, a server), `refused`, or `bad` (a traceback, or no answer in time), with
the lines that the user sees.
"""

from __future__ import annotations

import argparse
import ast
import collections
import io
import json
import multiprocessing
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from swift.arguments.imports import ms_swift, shell
from swift.arguments.values import show
from swift.errors import ConfigError
from swift.flags import typed

MODELS = ("model", "model_id_or_path", "ref_model", "reward_model", "teacher_model", "sft_model", "base_model")
DATASETS = ("dataset", "val_dataset", "cached_dataset", "cached_val_dataset")
PLUGINS = ("external_plugins", "custom_register_path", "plugin")
FOLDERS = ("output_dir", "logging_dir")
DROPPED = ("load_args", "model_type", "template", "use_hf", "hub_token")
"""Flags about the files that are exchanged."""
EXPERTS = re.compile(r"moe|-a\d+(\.\d+)?b|mixtral|gpt-oss|\d+b-\d+e\b|deepseek-v[23]", re.IGNORECASE)
TOOLS = """{% if tools %}<|im_start|>system
<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools><|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == "assistant" %}{% generation %}{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>{% endgeneration %}
{% else %}{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template that writes tools as those of Qwen do."""
HERE = re.compile(
    r"not installed|seem to be installed|no accelerator|needs? (a|an NVIDIA|\d+) GPU|cannot be reached|pip install|"
    r"Failed to connect",
    re.IGNORECASE,
)
SECONDS = 180
ROWS = 256
PLATFORM = {"WORLD_SIZE": "3", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
"""Variables of a platform that starts one process per node, for scripts that read them."""
USER, ANSWER = {"role": "user", "content": "How much is 2 + 3?"}, {"role": "assistant", "content": "5"}


@dataclass(frozen=True)
class Result:
    """What became of a script."""

    script: str
    kind: str
    verdict: str
    lines: list[str]


def main() -> None:
    """Tries every script, prints a table of reasons, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--root", type=Path, help="working folder of the scripts; default: the folder")
    parser.add_argument("--only", default="", help="scripts whose path has this text")
    parser.add_argument("--skip", nargs="*", default=["megatron", "ascend"], help="names of folders that are left out")
    parser.add_argument("--pretend", nargs="*", default=["flash_attn", "swanlab", "wandb"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder, results = options.folder.resolve(), []
    with tempfile.TemporaryDirectory() as temporary:
        parts = Parts(Path(temporary))
        os.chdir(options.root or folder)
        sys.path.append(str(seeming(options.pretend, Path(temporary) / "packages")))
        import swift.cli.dry_run
        import swift.models.policy
        import swift.trainers.grpo.prepare  # noqa: F401  (read once, for all children)

        if "flash_attn" in options.pretend:
            seem_on_a_gpu()
        for path in sorted(folder.rglob("*.sh")):
            name = str(path.relative_to(folder))
            if options.only not in name or {*path.parts} & {*options.skip}:
                continue
            for result in tried(name, path, parts):
                results.append(result)
                print(f"{result.verdict:8} {result.kind:6} {name}", *result.lines, sep="\n    ", flush=True)
                if options.out:
                    options.out.write_text(json.dumps([asdict(one) for one in results], indent=1))
    table = collections.Counter((result.kind, result.verdict) for result in results)
    for (kind, verdict), number in sorted(table.items()):
        print(f"{kind:8} {verdict:8} {number}")


class Parts:
    """Tiny models and datasets in a temporary folder, each made when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def model(self, name: str) -> Path:
        """A model of the same kind as the one of this name."""
        from swift.models.tiny import SIZES, build_tiny

        arch = ("qwen3_vl" if ms_swift.SEES.search(name) else "qwen3") + ("_moe" if EXPERTS.search(name) else "")
        arch = "qwen2_5_omni" if "omni" in name.lower() else arch
        path = self.folder / arch
        if not path.exists():
            SIZES["script"] = (64, 2, 8, 2, 128, 1024)  # 8 heads: --sequence_parallel_size divides them
            build_tiny(path, size="script", arch=arch)
            if arch == "qwen3":
                (path / "chat_template.jinja").write_text(TOOLS)
                self.widen(path)
            self.lengthen(path)
        return path

    @staticmethod
    def widen(model: Path) -> None:
        """More rows than tokens, as Qwen's models have."""
        from transformers import AutoModelForCausalLM

        wider = AutoModelForCausalLM.from_pretrained(model)
        wider.resize_token_embeddings(512, mean_resizing=False)
        wider.save_pretrained(model)

    @staticmethod
    def lengthen(model: Path) -> None:
        """Lengths are those of the script."""
        for file in model.glob("*config.json"):
            text = re.sub(r'("(max_position_embeddings|model_max_length)": )\d+', r"\g<1>262144", file.read_text())
            file.write_text(text)

    def dataset(
        self, method: str, sees: bool, labels: int | None, columns: dict[str, str], more: Sequence[str]
    ) -> Path:
        """`ROWS` rows of a method; `columns` are renamed by the script, so they have their old names.

        more: further columns.
        """
        path = self.folder / f"{method}-{sees}-{labels}-{'-'.join([*columns, *more])}.jsonl"
        if not path.exists():
            rows = [row(method, sees, labels, at) for at in range(ROWS)]
            for one in rows:
                one |= {name: "5" for name in more if name not in one}
                one |= {old: one.pop(new, "5") for old, new in columns.items()}
            path.write_text("".join(json.dumps(one) + "\n" for one in rows))
        return path


def seeming(names: Sequence[str], folder: Path) -> Path:
    """A folder with an empty package of each name."""
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").touch()
    return folder


def seem_on_a_gpu() -> None:
    """Let transformers choose flash-attn, which has no kernels for a CPU; a dry run computes nothing."""
    from transformers import PreTrainedModel

    usual = PreTrainedModel._check_and_adjust_attn_implementation

    def chosen(self: Any, name: str | None, *arguments: Any, **named: Any) -> Any:
        usable = name == "flash_attention_2" and self._supports_flash_attn
        return name if usable else usual(self, name, *arguments, **named)

    PreTrainedModel._check_and_adjust_attn_implementation = chosen


def row(method: str, sees: bool, labels: int | None, at: int) -> dict[str, Any]:
    """One row that the method can read."""
    import base64

    from PIL import Image

    user = dict(USER, content=f"{'<image>' if sees else ''}How much is {at} + 3?")
    answer = dict(ANSWER, content=str(at + 3))
    images = {}
    if sees:
        file = io.BytesIO()
        Image.new("RGB", (64, 64), (at, 0, 0)).save(file, "PNG")
        images = {"images": [f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"]}
    if labels is not None:
        return {"messages": [user], "label": at % max(labels, 2), **images}
    if method == "pt":
        return {"messages": [answer]}
    if method == "rlhf":
        return {"messages": [user], "solution": answer["content"], **images}
    more = {"kto": {"label": at % 2 == 0}, "rm": {"rejected_response": "no"}}.get(method, {})
    if method in ("dpo", "orpo", "cpo", "simpo", "ipo"):
        more = {"rejected_response": "no"}
    return {"messages": [user, answer], **more, **images}


def tried(name: str, path: Path, parts: Parts) -> Iterator[Result]:
    """The dry run of the one command of a script that trains; nothing if none does."""
    text = filled(path.read_text(encoding="utf-8", errors="replace"))
    if not re.search(r"swift\s+(sft|pt|rlhf)\b|swift/cli/(sft|pt|rlhf)\.py", text):
        return
    model = re.search(r"--model(?:_id_or_path)?[ =]+(\S+)", text)
    kind = "images" if model and (ms_swift.SEES.search(model[1]) or ms_swift.HEARS.search(model[1])) else "text"
    try:
        script = shell.read_script(str(path), text)
        words = [script.command, *words_of(script, parts, kind == "images"), "--dry_run", "true"]
    except ConfigError as error:
        yield Result(name, kind, "refused", error.problems)
        return
    platform = PLATFORM if "$WORLD_SIZE" in text else {}
    yield Result(name, kind, *answered(words, {**platform, **script.environment}))


def filled(text: str) -> str:
    """A script with an address or a number for each of its placeholders."""
    names = list(dict.fromkeys(re.findall(r"<([a-z][\w-]*)>", text)))
    for number, name in enumerate(names, start=8):
        text = text.replace(f"<{name}>", f"127.0.0.{number}" if name.endswith("ip") else str(number))
    return text


def asked_for(plugins: Sequence[str]) -> list[str]:
    """The columns that the reward functions in these files name as parameters."""
    trees = [ast.parse(Path(file).read_text()) for file in plugins if Path(file).is_file()]
    calls = [one for tree in trees for one in ast.walk(tree) if getattr(one, "name", "") == "__call__"]
    names = [[parameter.arg for parameter in call.args.args] for call in calls]
    return sorted({name for one in names if "completions" in one for name in one} - {"self", "completions"})


def words_of(script: shell.Script, parts: Parts, sees: bool) -> Iterator[str]:
    """The flags of a script, with our models, datasets and folders."""
    files = [why.partition(": a file of settings")[0] for name, why in script.lost if name == "config"]
    settings = [pair for file in files for pair in yaml.safe_load(Path(file).read_text()).items()]
    settings += [(item.spelling, item.raw) for item in script.given]
    given = {name: show(raw) for name, raw in settings}
    columns = json.loads(given.get("columns", "{}"))
    plugins = [word for name, raw in settings if name in PLUGINS for word in show(raw).split()]
    more = asked_for(plugins) if script.mode == "rlhf" else []
    labels = 2 if given.get("task_type") in ("seq_cls", "reranker") else None
    if "torch_dtype" not in given:
        yield from ("--torch_dtype", "bfloat16")  # what it is on their machines
    for name, raw in settings:
        values = [typed(value) for value in raw] if isinstance(raw, list) else [typed(raw)]
        if name in DROPPED:
            continue
        if name in MODELS:
            values = [str(parts.model(value)) for value in values]
        elif name in DATASETS:
            values = [f"{parts.dataset(script.mode, sees, labels, columns, more)}{count(value)}" for value in values]
        elif name in FOLDERS:
            values = [str(parts.folder / "output")]
        yield f"--{name}"
        yield from values


def count(dataset: str) -> str:
    """`#500` of a dataset, with at most `ROWS`."""
    found = re.search(r"#(\d+)$", dataset)
    return f"#{min(int(found[1]), ROWS)}" if found else ""


def answered(words: Sequence[str], environment: dict[str, str]) -> tuple[str, list[str]]:
    """The verdict about a command, tried in a process of its own, and the lines of its refusal."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run, args=(list(words), environment, sender))
    process.start()
    sender.close()
    code, text = receiver.recv() if receiver.poll(SECONDS) else (None, f"no answer in {SECONDS} s")
    process.kill()
    process.join()
    lines = [line for line in text.splitlines() if line.strip()]
    if code == 0:
        return "ok", []
    if code is None or "Traceback" in text:
        return "bad", lines[-30:]
    problems = [line for line in lines if line.startswith("swift: error: ")]
    return ("here" if all(map(HERE.search, problems)) else "refused"), problems


def run(words: list[str], environment: dict[str, str], sender: Any) -> None:
    """The command in this process; sends its code, and what it wrote to stderr."""
    from swift.cli.main import main as swift

    os.environ.update({name: value for name, value in environment.items() if name != "CUDA_VISIBLE_DEVICES"})
    errors = io.StringIO()
    code: int | None = None
    with redirect_stderr(errors), redirect_stdout(io.StringIO()):
        try:
            code = swift(words)
        except BaseException:
            errors.write(traceback.format_exc())
    sender.send((code, errors.getvalue()))
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
