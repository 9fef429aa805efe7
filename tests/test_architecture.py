"""Who may import whom (docs/architecture.md draws it), and what must not be loaded too early.

Imports that only a type checker sees are free; imports inside functions count like all others.
"""

import ast
import functools
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "swift"

MAY_IMPORT = {
    "elastic": set(),
    "errors": set(),
    "types": set(),
    "flags": set(),
    "startup": set(),
    "devices": set(),
    "signals": set(),
    "rendezvous": {"errors"},
    "observability": {"devices", "errors", "flags", "plugin", "startup", "types"},
    "rl": {"flags", "plugin"},
    "dataset": {"plugin"},
    "data": {"errors", "flags", "plugin", "types"},
    "models": {"errors", "flags", "startup", "types", "data", "rl"},
    "plugin": {"errors"},
    "utils": set(),
    "template": set(),
    "infer_engine": {"plugin", "template"},
    "rewards": {"devices", "errors", "flags", "signals", "types", "plugin", "data", "models"}
    | {"infer_engine", "template"},
    "rollout": {
        "devices",
        "errors",
        "flags",
        "rendezvous",
        "signals",
        "startup",
        "types",
        "plugin",
        "data",
        "infer_engine",
        "models",
        "rl",
    },
    "trainers": {"devices", "elastic", "errors", "flags", "rendezvous", "signals", "startup", "types", "plugin"}
    | {"observability", "rl", "data", "models", "rewards", "rollout"},
    "methods": {"devices", "errors", "flags", "plugin", "models", "trainers"},
    "arguments": {"devices", "elastic", "errors", "flags", "observability", "plugin"}
    | {"rl", "data", "models", "rewards", "rollout", "trainers"},
    "replay": {"errors", "models", "observability", "rl", "rollout", "trainers", "arguments"},
    "planning": {"errors", "flags", "models", "rollout", "trainers", "arguments"},
    "viewing": {"data", "errors", "observability", "rendezvous", "signals", "types"},
    "cli": {"devices", "elastic", "errors", "signals", "startup", "types", "observability"}
    | {"data", "models", "rewards", "rollout", "trainers", "arguments"},
    "__main__": {"cli"},
}

ONLY_HERE = {
    "vllm": ["swift/rollout/engines/"],
    "lmdeploy": ["swift/rollout/engines/"],
    "trl": [
        "swift/planning/kernels.py",
        "swift/trainers/memory/activations.py",
        "swift/trainers/sft",
        "swift/trainers/trl/",
    ],
    "deepspeed": ["swift/models/sharded.py", "swift/trainers/parallel/"],
    "peft": ["swift/models/", "swift/rewards/model_files.py"],
    "matplotlib": ["swift/observability/plots.py"],
    "rich": ["swift/observability/progress.py"],
    "reasoning_gym": ["swift/data/procedural.py", "swift/rewards/functions/gym.py"],
    "math_verify": ["swift/rewards/functions/accuracy.py"],
    "pebble": ["swift/rewards/workers.py"],
    "modelscope": ["swift/models/source.py", "swift/data/hub.py"],
}


def modules():
    return sorted(path for path in PACKAGE.rglob("*.py") if "shipped" not in path.parts)


def part_of(path):
    """The package or top-level module of a file: swift/rl/kl.py -> rl, swift/types.py -> types."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def imported(path):
    """Full names of what a file imports at run time, wherever in the file."""

    def walk(node):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import"
                yield from (f"{child.module}.{alias.name}" for alias in child.names)
            yield from walk(child)

    return set(walk(ast.parse(path.read_text(encoding="utf-8"))))


def parts_imported(path):
    names = {name.split(".")[1] for name in imported(path) if name.startswith("swift.")}
    return {name for name in names if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()}


def test_every_part_has_its_place_in_the_drawing():
    assert {part_of(path) for path in modules()} - {"__init__"} == set(MAY_IMPORT)


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_a_part_imports_only_what_lies_below_it(part):
    for path in modules():
        if part_of(path) == part:
            wrong = parts_imported(path) - MAY_IMPORT[part] - {part}
            assert not wrong, f"{path.relative_to(ROOT)} imports swift.{', swift.'.join(sorted(wrong))}"


def test_no_two_parts_import_each_other():
    assert not [(a, b) for a, below in MAY_IMPORT.items() for b in below if a in MAY_IMPORT[b]]


def test_no_files_import_each_other_in_a_circle():
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in modules()
    }
    below = {
        name: {
            one if one in names else one.rpartition(".")[0]
            for one in imported(path)
            if one in names or one.rpartition(".")[0] in names
        }
        - {name}
        for name, path in names.items()
    }
    while free := {name for name, others in below.items() if not others & set(below)}:
        below = {name: others for name, others in below.items() if name not in free}
    assert not below, {name: sorted(others & set(below)) for name, others in below.items()}


def test_settings_are_defined_without_the_code_that_they_configure():
    for path in PACKAGE.glob("*/arguments.py"):
        wrong = {
            name
            for name in imported(path)
            if name.startswith("swift.")
            and not name.startswith(("swift.flags.", "swift.types.", "swift.rl.losses."))  # which load no torch
            and ".arguments." not in name
        }
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_the_mathematics_sees_tensors_and_nothing_else():
    for path in (PACKAGE / "rl").rglob("*.py"):
        outside = {name.split(".")[0] for name in imported(path)} - set(sys.stdlib_module_names) - {"swift"}
        assert outside <= {"torch"}, f"{path.relative_to(ROOT)} imports {outside}"


@pytest.mark.parametrize("library", ONLY_HERE)
def test_a_library_is_imported_in_its_own_place_only(library):
    for path in modules():
        if library in {name.split(".")[0] for name in imported(path)}:
            where = path.relative_to(ROOT).as_posix()
            assert any(where.startswith(place) for place in ONLY_HERE[library]), where


@pytest.mark.parametrize("module", ["swift.cli.main", "swift.arguments", "swift.plugin", "swift.observability.run_dir"])
def test_the_command_line_and_plugins_load_no_heavy_library(module):
    heavy = "('torch', 'transformers', 'trl', 'peft', 'datasets', 'matplotlib', 'vllm')"
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("words", [["--version"], ["rlhf", "--help"], ["config-schema", "rlhf"]])
def test_what_only_tells_loads_no_torch(words):
    code = f"import sys; from swift.cli.main import main; main({words}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.slow
def test_a_plain_run_loads_nothing_that_it_does_not_use(nano_folders, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}?"}}\n' for n in range(8)))
    (tmp_path / "plugin.py").write_text(
        "from swift.plugin import orms\n"
        "orms['length'] = lambda completions, **kwargs: [len(text) / 10 for text in completions]\n"
    )
    words = (
        f"rlhf --rlhf_type grpo --model {nano_folders['qwen2']} --dataset rows.jsonl --external_plugins plugin.py "
        "--reward_funcs length --tuner_type full --num_generations 4 --per_device_train_batch_size 8 "
        "--max_completion_length 8 --max_steps 1 --report_to none --output_dir out --save_strategy no"
    )
    unused = ["trl", "vllm", "lmdeploy", "ray", "modelscope", "tensorboard", "uvicorn", "fastapi", "IPython"]
    code = (
        f"import sys; from swift.cli.main import main; assert main({words.split()}) == 0; "
        f"print([name for name in {unused} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_figures_of_the_architecture_page_are_drawn_from_the_code():
    spec = importlib.util.spec_from_file_location("figures", ROOT / "docs" / "figures.py")
    figures = importlib.util.module_from_spec(spec)
    sys.modules["figures"] = figures  # dataclasses look there
    spec.loader.exec_module(figures)
    for name, drawing in figures.draw_all().items():
        assert (figures.IMAGES / name).read_text(encoding="utf-8") == drawing, "python docs/figures.py draws it anew"
    tour = figures.TOURS["prompt-dedicated"]
    page = " ".join((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split())
    assert f"{tour.functions} functions in {tour.files} files" in page
    assert tour.functions <= 50 and tour.files <= 25
