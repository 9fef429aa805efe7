"""docs/supported.md, out of the tables that tests are parametrised with: `python tests/support/supported.py --write`.

A table is read from the test file without importing it, so the page says what tests run and nothing else.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "supported.md"

HEAD = """# Supported models, tuners and methods

This page is generated from the parameters of tests: `python tests/support/supported.py --write`. Each line names what a
test runs, on models of a few thousand parameters on CPUs. Other decoders of transformers usually work as well: a model
that cannot be packed trains on padded rows, and the [parity check](parity_check.md) compares engine and trainer first.
"""

SECTIONS = {
    "Models": [
        ("Loaded, packed, sampled, trained", "tests/conftest.py::nano_folder"),
        ("Packed with sliding windows, soft caps or sinks", "tests/models/test_forward.py::WINDOWED"),
        ("Sampled with packed attention", "tests/rollout/test_transformers_engine.py"
         "::test_windows_soft_caps_and_sinks_are_sampled_in_the_packed_way"),
        ("Not packed: own attention, padded rows", "tests/rollout/test_transformers_engine.py"
         "::test_models_that_cannot_be_packed_are_sampled_with_their_own_attention"),
        ("Weight sync of fused experts", "tests/rollout/test_transformers_copy.py::FUSED"),
        ("Adapters merged into files", "tests/models/test_shard_merge.py"
         "::test_architectures_whose_files_have_other_names_than_their_modules"),
        ("Adapters on fused experts, sent and merged into files", "tests/support/experts.py::EXPERTS"),
    ],
    "Tuners": [
        ("Started, trained, sent, saved, merged, loaded", "tests/models/test_tuners.py::TUNERS"),
        ("Whole runs of `grpo` and `sft`, resumed bit for bit", "tests/end_to_end/test_tuner_runs.py::TUNERS"),
        ("On quantised bases", "tests/models/quantised_worker.py::CASES"),
        ("Scores of `swift infer`: reward model", "tests/cli/test_infer_scores.py"
         "::test_a_row_has_the_score_of_its_chat"),
        ("Scores of `swift infer`: process reward model", "tests/cli/test_infer_scores.py"
         "::test_a_process_reward_model_scores_each_step_of_chats_and_of_its_own_rows"),
    ],
    "Methods": [
        ("Losses of `grpo`, equal to TRL's", "tests/rl/test_trl_options.py::SURROGATES+SHAPES"),
        ("Advantage estimators", "tests/rl/test_advantages.py"
         "::test_the_only_scored_sample_of_a_group_learns_nothing"),
        ("First step equal to TRL's", "tests/preferences/test_against_trl.py::TRL"),
        ("Learns held-out preferences", "tests/preferences/test_preference_learning.py::STEPS"),
        ("Presets of `grpo`", "tests/preferences/test_steps_and_teachers.py"
         "::test_gdpo_and_rloo_are_presets_of_grpo"),
    ],
    "Data": [
        ("Formats of preferences", "tests/data/test_preference_rows.py::FORMATS"),
    ],
    "Engines and sharding": [
        ("Conformance suite of engines (lmdeploy needs a GPU)", "tests/engines/conformance_parts.py::BACKENDS"),
        ("Sharded on two processes, equal to one", "tests/trainers/test_sharded_training.py::RUNS"),
    ],
}  # fmt: skip
"""Heading -> (what holds, file::table). A table is a name of the file, or the first parameters of a function in it."""


def first(node: ast.expr) -> str | None:
    """The text that stands for an entry: itself, or the first one in a tuple or call."""
    while isinstance(node, ast.Tuple | ast.List | ast.Call):
        inner = node.args if isinstance(node, ast.Call) else node.elts
        if not inner:
            return None
        node = inner[0]
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def entries(source: str) -> list[str]:
    """The entries of `file::table+table`. Raises ValueError: one is not there, or no literal table of names."""
    path, _, names = source.partition("::")
    if "+" in names:
        return [one for name in names.split("+") for one in entries(f"{path}::{name}")]
    name = names
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    for node in tree.body:
        table: ast.expr | None = None
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            table = node.value
        elif isinstance(node, ast.FunctionDef) and node.name == name:
            table = parameters(node.decorator_list)
        if isinstance(table, ast.Dict):
            table = ast.List([key for key in table.keys if key is not None])
        if isinstance(table, ast.Tuple | ast.List | ast.Set):
            found = [first(one) for one in table.elts]
            if found and None not in found:
                return [one for one in found if one is not None]
    raise ValueError(f"{source}: no table of names")


def parameters(decorators: list[ast.expr]) -> ast.expr | None:
    """The values of a `parametrize` or `fixture(params=...)`: the lowest one that names something."""
    for one in reversed(decorators):
        if isinstance(one, ast.Call):
            values = [*one.args[1:2], *(word.value for word in one.keywords if word.arg == "params")]
            if values and isinstance(values[0], ast.List) and first(values[0]) is not None:
                return values[0]
    return None


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for heading, rows in SECTIONS.items():
        lines = [f"\n## {heading}\n", "| tested | with | test |", "|---|---|---|"]
        for what, source in rows:
            names = ", ".join(dict.fromkeys(entries(source)))
            lines.append(f"| {what} | {names} | `{source.partition('::')[0]}` |")
        parts.append("\n".join(lines) + "\n")
    return "".join(parts)


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page())
