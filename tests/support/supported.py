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

This page is generated from the parameters of tests: `python tests/support/supported.py --write`. Tests run models of a
few thousand parameters on CPUs.

## Models

Families are named as `model_type` in transformers. Each letter is [what a test verified](#tests-of-models); an empty
cell was not tested with that family. Other decoders of transformers usually work as well: `grpo` tries whether a model
can be packed, then whether completions can continue from the states of their prompts (forked,
[how](architecture.md#the-batch)), and else trains on padded rows. The [parity check](parity_check.md) compares engine
and trainer first.
"""

GROUPS = {
    "With images": ["tests/support/vlms.py::PACKED+FORKED"],
    "Mixtures of experts": [
        "tests/support/experts.py::EXPERTS", "tests/models/test_router_loss.py::MIXTURES+FORKED",
        "tests/models/test_routing.py::MIXTURES+HYBRIDS",
    ],
    "Hybrids and others": ["tests/support/hybrids.py::FORKED+PADDED"],
}  # fmt: skip
"""Kind of families -> where they are named; the others are decoders."""

COLUMNS = ("packed", "forked", "padded rows", "full", "LoRA", "transformers engine", "vLLM")
_ENGINE, _SFT = "tests/rollout/test_transformers_engine.py", "tests/sft/test_sft_run.py"
_USABLE = f"{_SFT}::test_the_loss_falls_and_the_final_checkpoint_is_a_usable_model"
_RUNS = "test_a_run_is_that_of_rows"

EVIDENCE = [
    ("logits and gradients equal those of padded rows", [
        ("packed", "tests/conftest.py::nano_folder"),
        ("packed", "tests/models/test_forward.py::WINDOWED"),
        ("packed", "tests/support/vlms.py::PACKED"),
        ("forked", "tests/support/hybrids.py::FORKED"),
        ("forked", "tests/support/vlms.py::FORKED"),
    ]),
    ("logits equal those of padded rows", [
        ("packed", "tests/models/test_forward.py"
         "::test_other_architectures_are_packed_where_that_equals_their_own_attention"),
        ("LoRA", "tests/conftest.py::nano_folder"),
        ("LoRA", "tests/models/test_forked.py::test_adapters_and_scores"),
    ]),
    ("with the load-balancing loss: equal to padded rows", [
        ("packed", "tests/models/test_router_loss.py::MIXTURES"),
        ("forked", "tests/models/test_router_loss.py::FORKED"),
    ]),
    ("the trial at the start finds that prompts cannot be shared", [
        ("padded rows", "tests/support/hybrids.py::PADDED"),
    ]),
    ("a run of `grpo` equals one on padded rows", [
        ("full", f"tests/end_to_end/test_hybrid_runs.py::{_RUNS}?{{}}"),
        ("full", f"tests/end_to_end/test_vision_runs.py::{_RUNS}?{{}}"),
        ("LoRA", f"tests/end_to_end/test_hybrid_runs.py::{_RUNS}?LORA"),
        ("LoRA", f"tests/end_to_end/test_vision_runs.py::{_RUNS}?LORA"),
    ]),
    ("loss and gradient of a step of `grpo` equal TRL's", [
        ("full", "tests/end_to_end/test_vision_against_trl.py::test_a_step_on_images_is_trls"),
    ]),
    ("a run of `swift sft`: the loss falls, the checkpoint loads", [
        ("full", f"{_USABLE}?'full'"),
        ("LoRA", f"{_USABLE}?'lora'"),
    ]),
    ("loss and gradients of `sft`, `pt`, `dpo` and `gkd` with images equal those of plain rows", [
        ("full", "tests/support/vlms.py::PACKED+FORKED"),
    ]),
    ("adapters on experts are sent to engines, and merged into files", [("LoRA", "tests/support/experts.py::EXPERTS")]),
    ("adapters reach the parts that are not frozen", [
        ("LoRA", "tests/models/test_vision.py::test_adapters_reach_the_parts_that_are_not_frozen"),
    ]),
    ("log-probs of samples equal those of a forward pass", [
        ("transformers engine", "tests/conftest.py::nano_folder"),
        ("transformers engine", f"{_ENGINE}::test_windows_soft_caps_and_sinks_are_sampled_in_the_packed_way"),
        ("transformers engine", f"{_ENGINE}::test_models_that_cannot_be_packed_are_sampled_with_their_own_attention"),
        ("transformers engine", "tests/support/hybrids.py::FORKED"),
        ("transformers engine", "tests/end_to_end/test_vision_runs.py"
         "::test_what_rows_are_sampled_with_is_what_they_are_trained_with"),
    ]),
    ("weights arrive after every sync, fused experts too", [
        ("transformers engine", "tests/rollout/test_transformers_copy.py::FUSED"),
        ("transformers engine", "tests/engines/test_actor_weights.py::ARCHITECTURES"),
        ("vLLM", "tests/engines/test_vllm_experts.py::test_lora_on_experts_is_sampled_with_after_every_sync"),
    ]),
    ("the conformance suite of engines", [
        ("transformers engine", "tests/engines/conformance_parts.py::BACKENDS?'transformers'@3"),
        ("vLLM", "tests/engines/conformance_parts.py::BACKENDS?'vllm'@3"),
    ]),
    ("runs of `grpo`: log-probs of engine and trainer agree", [
        ("vLLM", "tests/end_to_end/test_expert_runs.py"
         "::test_lora_on_experts_is_what_vllm_samples_with_and_what_is_merged"),
        ("vLLM", "tests/end_to_end/test_vision_runs.py::test_vllm_samples_with_what_the_trainer_sees"),
    ]),
]  # fmt: skip
"""(what holds, [(column of `COLUMNS`, where the families are named, see `entries`)])."""

SECTIONS = {
    "Routers and files": [
        ("Load-balancing loss of routers", "tests/models/test_router_loss.py::MIXTURES+FORKED"),
        ("Routes recorded and replayed", "tests/models/test_routing.py::MIXTURES+HYBRIDS"),
        ("Adapters merged into files", "tests/models/test_shard_merge.py"
         "::test_architectures_whose_files_have_other_names_than_their_modules"),
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
        ("Presets of `grpo`", "tests/preferences/test_steps.py"
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


def text_of(node: ast.expr) -> str | None:
    """The text that stands for an entry: itself, or the first one in a tuple or call."""
    while isinstance(node, ast.Tuple | ast.List | ast.Call):
        inner = node.args if isinstance(node, ast.Call) else node.elts
        if not inner:
            return None
        node = inner[0]
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def entries(source: str) -> list[str]:
    """The entries of `file::table+table?WORD@N`.

    A table is a name of the file, or the first parameters of a function in it. `?WORD` keeps entries in whose code the
    word is; `@N` takes their Nth part instead of the first. Raises ValueError: none is there, or no literal table of
    names.
    """
    path, _, names = source.partition("::")
    names, _, place = names.partition("@")
    names, _, word = names.partition("?")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    found = []
    for name in names.split("+"):
        kept = [one for one in table(tree, name) if word in ast.unparse(one)]
        if place:
            kept = [(one.args if isinstance(one, ast.Call) else one.elts)[int(place)] for one in kept]
        texts = [text for one in kept if (text := text_of(one)) is not None]
        if not texts or len(texts) < len(kept):
            raise ValueError(f"{source}: no table of names")
        found += texts
    return found


def table(tree: ast.Module, name: str) -> list[ast.expr]:
    """The entries of a table, as code; none where it is no literal one."""
    for node in tree.body:
        value: ast.expr | None = None
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            value = node.value
        elif isinstance(node, ast.FunctionDef) and node.name == name:
            value = parameters(node.decorator_list)
        if isinstance(value, ast.Dict):
            return [key for key in value.keys if key is not None]
        if isinstance(value, ast.Tuple | ast.List | ast.Set):
            return value.elts
    return []


def parameters(decorators: list[ast.expr]) -> ast.expr | None:
    """The values of a `parametrize` or `fixture(params=...)`: the lowest one that names something."""
    for one in reversed(decorators):
        if isinstance(one, ast.Call):
            values = [*one.args[1:2], *(word.value for word in one.keywords if word.arg == "params")]
            if values and isinstance(values[0], ast.List) and text_of(values[0]) is not None:
                return values[0]
    return None


def letters() -> dict[str, str]:
    """What holds -> the letter that stands for it."""
    return {what: chr(ord("a") + number) for number, (what, _) in enumerate(EVIDENCE)}


def matrix() -> str:
    """Families, by kind, and what was tested with them."""
    cells: dict[str, dict[str, set[str]]] = {}
    for what, tables in EVIDENCE:
        for column, source in tables:
            for family in entries(source):
                cells.setdefault(family, {}).setdefault(column, set()).add(letters()[what])
    kinds: dict[str, list[str]] = {"Decoders": []}
    for kind, sources in reversed(GROUPS.items()):
        kinds[kind] = [family for source in sources for family in entries(source)]
    lines = []
    for kind in kinds:
        named = [family for family in cells if kind == next((k for k in GROUPS if family in kinds[k]), "Decoders")]
        lines += [f"\n### {kind}\n", f"| | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
        for family in sorted(named):
            row = (" ".join(sorted(cells[family].get(column, ()))) for column in COLUMNS)
            lines.append(f"| {family} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def tests_of_models() -> str:
    """What the letters of the matrix stand for."""
    lines = ["\n### Tests of models\n", "| | what holds | tests |", "|---|---|---|"]
    for what, tables in EVIDENCE:
        files = dict.fromkeys(f"`{source.partition('::')[0]}`" for _, source in tables)
        lines.append(f"| {letters()[what]} | {what} | {', '.join(files)} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole page."""
    parts = [HEAD, matrix(), tests_of_models()]
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
