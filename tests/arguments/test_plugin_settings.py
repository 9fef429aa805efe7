"""Settings that an entry of a registry declares are flags like all others."""

from dataclasses import dataclass

import pytest
from command_lines import refused, rlhf

from swift.arguments.help import render, render_flag
from swift.arguments.plugins import settings_class
from swift.arguments.presets import PaperValue, Preset
from swift.arguments.schema import json_schema
from swift.errors import ConfigError
from swift.flags import flag, flags_of
from swift.plugin import registry
from swift.rl.declared import parameters_of
from swift.rl.losses import TOKEN_MEAN, Loss, Objective


@dataclass(kw_only=True)
class ClampParameters:
    """Those of the losses below."""

    clamp_at: float = flag(2.0, above=0, aliases=("clamp_limit",))
    """Largest ratio."""

    clamp_words: list[str] = flag([])
    """Words of it."""

    def problems(self):
        """What is wrong with these settings, one line each."""
        if self.clamp_at == 13:
            yield "--clamp_at: 13: brings bad luck; use another number"


def entry(name, parameters=None):
    return Loss(name, "no paper", lambda inputs, config: Objective(-inputs.ratio_T), TOKEN_MEAN, parameters=parameters)


@pytest.fixture
def losses():
    own = {name: entry(name, ClampParameters) for name in ("clamp", "clamp2")} | {"bare": entry("bare")}
    for name, loss in own.items():
        registry.losses[name] = loss
    yield registry.losses
    for name in {*own, "clash", "late"} & {*registry.losses}:
        del registry.losses[name]


@pytest.mark.usefixtures("losses")
def test_an_entry_is_a_choice_and_its_parameters_are_flags():
    resolved = rlhf("--loss_type", "clamp", "--clamp-limit", "3", "--tuner_type", "full", "--clamp_words", "a", "b")
    assert (resolved.args.loss_type, resolved.args.clamp_at, resolved.args.clamp_words) == ("clamp", 3.0, ["a", "b"])
    assert parameters_of(registry.losses["clamp"], resolved.args) == ClampParameters(
        clamp_at=3.0, clamp_words=["a", "b"]
    )
    dumped = resolved.to_json()
    assert dumped["clamp_at"] == 3.0
    assert dumped["_provenance"]["clamp_at"] == {"source": "command line", "given_as": "--clamp-limit", "rule": None}
    assert resolved.notes == []


@pytest.mark.usefixtures("losses")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--loss_type clamp --clamp_at 0", "--clamp_at: 0: out of range; valid: above 0"),
        ("--loss_type clamp --clamp_at 13", "--clamp_at: 13: brings bad luck"),
        ("--loss_type clamq", "--loss_type: clamq: not a choice; nearest: clamp"),
    ],
)
def test_parameters_are_checked_like_other_settings(words, said):
    (line,) = refused(*words.split())
    assert line.startswith(said)


@pytest.mark.usefixtures("losses")
def test_a_parameter_of_an_entry_that_is_not_chosen_has_no_effect():
    assert rlhf("--clamp_at", "3", "--tuner_type", "full").notes == [
        "--clamp_at: 3: no effect without --loss_type clamp or clamp2"
    ]
    assert rlhf("--loss_type", "clamp2", "--clamp_at", "3", "--tuner_type", "full").notes == []


@pytest.mark.parametrize(
    ("registry_name", "choice", "name"),
    [
        ("orms", "reward_funcs", "short"),
        ("rollout_functions", "rollout_func", "short"),
        ("backends", "infer_backend", "mine"),
    ],
)
def test_entries_of_every_registry_may_have_parameters(registry_name, choice, name):
    def component():
        """Whatever it does."""

    component.parameters = ClampParameters
    registry.REGISTRIES[registry_name][name] = component
    try:
        words = ["accuracy", name] if choice == "reward_funcs" else [name]
        resolved = rlhf(f"--{choice}", *words, "--clamp_at", "3")
        assert resolved.args.clamp_at == 3
        assert not [note for note in resolved.notes if "clamp_at" in note]
        noted = f"--clamp_at: 3: no effect without --{choice} {name}" in rlhf("--clamp_at", "3").notes
        assert noted == (choice != "reward_funcs"), "another reward function may read any setting"
    finally:
        del registry.REGISTRIES[registry_name][name]


def test_a_preset_can_be_registered():
    registry.presets["ours"] = Preset("Ours", "arXiv:0000.00000", {"beta": PaperValue(0.5, "section 1")})
    try:
        assert rlhf("--preset", "ours").args.beta == 0.5
    finally:
        del registry.presets["ours"]


@pytest.mark.usefixtures("losses")
def test_help_and_schema_describe_parameters():
    assert "Plugins\n  --clamp_at FLOAT" in render("rlhf")
    text = render_flag("rlhf", "clamp_limit")
    assert "Largest ratio." in text and "--loss_type clamp or clamp2" in text
    properties = json_schema("rlhf")["properties"]
    assert properties["clamp_at"]["anyOf"][0]["exclusiveMinimum"] == 0
    assert "clamp" in properties["loss_type"]["anyOf"][0]["enum"]
    assert "clamp_at" not in flags_of(settings_class("sft"))


def test_a_parameter_may_not_take_the_name_of_another_setting(losses):
    @dataclass(kw_only=True)
    class Clash:
        beta: float = flag(1.0)
        """The same name again."""

    losses["clash"] = entry("clash", Clash)
    with pytest.raises(ConfigError, match="--loss_type: clash: its parameter beta is the name of another setting"):
        rlhf()


def test_plugins_are_loaded_where_a_flag_or_a_choice_is_not_built_in(losses, tmp_path, monkeypatch):
    file = tmp_path / "late.py"
    file.write_text(
        "from dataclasses import dataclass\nfrom swift.flags import flag\nfrom swift.plugin import registry\n"
        "from swift.rl.losses import TOKEN_MEAN, Loss, Objective\n\n"
        "@dataclass(kw_only=True)\nclass Late:\n    late: int = flag(1)\n    '''A number.'''\n\n"
        "def objective(inputs, config):\n    return Objective(-inputs.ratio_T)\n\n"
        "registry.losses['late'] = Loss('late', 'no paper', objective, TOKEN_MEAN, parameters=Late)\n"
    )
    words = ["--external_plugins", str(file)]
    assert not hasattr(rlhf(*words).args, "late")
    assert rlhf(*words, "--loss_type", "late", "--late", "7").args.late == 7
    assert "A number." in render_flag("rlhf", "late")


def test_a_plugin_that_cannot_be_loaded_is_one_of_the_problems():
    lines = refused("--external_plugins", "gone.py", "--mine", "1", "--beta", "-1")
    subjects = [line.split(":")[0] for line in lines]
    assert sorted(subjects) == ["--beta", "--external_plugins", "--mine"]


def test_the_shipped_plugin_is_found_from_every_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = "examples/train/grpo/plugin/plugin.py"
    resolved = rlhf("--external_plugins", path, "own.py")
    found, own = resolved.args.external_plugins
    assert found.endswith(path) and own == "own.py"
    assert any(note.startswith(f"--external_plugins: {path}: not in this folder") for note in resolved.notes)
