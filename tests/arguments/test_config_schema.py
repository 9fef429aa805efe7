"""The schema and the parser take the same config files."""

import contextlib
import json
import random

import pytest
import yaml
from jsonschema import Draft202012Validator

from swift.arguments import parse
from swift.arguments.layers import read_config
from swift.arguments.modes import METHODS, MODES
from swift.arguments.parse import Reader
from swift.arguments.plugins import settings_class
from swift.arguments.schema import json_schema
from swift.cli.main import main
from swift.errors import ConfigError
from swift.flags import flags_of, spellings_of

FILES = 40


def files_of(mode):
    """Methods of rlhf differ in few flags."""
    return FILES // 5 if mode in METHODS else FILES


WORDS = (
    "true", "False", "no", "Off", "YES", "t", "0", "1", "-1", "3", "17", "2.5", "-0.5", "8.0", "1e-5", "1e3", "2.5e-1",
    "1E+2", "'1e-5'", "'4'", "'0.5'", "1_000", "text", "'text'", "''", "~", "null", "none", "'None'", "a b", "1x", "[]",
    "{}", "{a: 1}", "'{\"a\": 1}'", "'{'", "[text]", "[1, 2.5]", "[1e-5, '3']", "[no]", "[[1]]", "[~]", "[{a: 1}]",
)  # fmt: skip
"""Values as they stand in a YAML file."""


def values_for(flag, rng):
    """A value that is likely to be right, or likely to be wrong."""
    own = [str(choice) for choice in (*flag.choices, *flag.details.values)]
    own += [json.dumps(flag.default)] if flag.default is not None else []
    own += [f"{bound:g}" for bound in flag.details.bounds.values()]
    word = rng.choice(own) if own and rng.random() < 0.6 else rng.choice(WORDS)
    if rng.random() < 0.1:
        word = word.upper() if word.isalpha() else word
    return f"[{word}]" if rng.random() < 0.15 and not word.startswith("[") else word


def refused_by_parser(mode, path):
    cls = settings_class(mode)
    reader = Reader(mode, cls, flags_of(cls))
    reader.take(read_config(str(path)).given)
    assert len(reader.broken) == len(reader.problems)
    return reader.broken


def canonical(mode, names):
    spellings = spellings_of(settings_class(mode))
    return {spellings[name.replace("-", "_")] for name in names}


def is_text_of_a_value(value):
    """A number or a map written as text: the schema knows neither the number's range nor the map."""
    if isinstance(value, list):
        return any(map(is_text_of_a_value, value))
    if not isinstance(value, str):
        return False
    try:
        float(value)
    except ValueError:
        return value.startswith("{")
    return True


@pytest.mark.parametrize("mode", MODES)
def test_the_schema_takes_what_the_parser_takes_and_refuses_what_it_refuses(mode, tmp_path):
    rng = random.Random(mode)
    flags, validator = flags_of(settings_class(mode)), Draft202012Validator(json_schema(mode))
    Draft202012Validator.check_schema(validator.schema)
    path = tmp_path / "settings.yaml"
    num_refused = 0
    for _ in range(files_of(mode)):
        lines = {
            rng.choice(flag.spellings).replace("_", rng.choice("_-")) if rng.random() < 0.3 else name: values_for(
                flag, rng
            )
            for name, flag in flags.items()
        }
        path.write_text("".join(f"{name}: {value}\n" for name, value in lines.items()))
        values = yaml.safe_load(path.read_text())
        parser = refused_by_parser(mode, path)
        schema = canonical(mode, (error.absolute_path[0] for error in validator.iter_errors(values)))
        assert not schema - parser, lines
        assert not parser - schema - canonical(mode, filter(lambda name: is_text_of_a_value(values[name]), values)), (
            lines
        )
        num_refused += len(parser & schema)
    most = files_of(mode) * len(flags)
    assert most * 0.1 < num_refused < most * 0.9


@pytest.mark.parametrize("mode", MODES)
def test_any_settings_are_read_or_refused(mode, tmp_path):
    rng, path, flags = random.Random(mode), tmp_path / "settings.yaml", flags_of(settings_class(mode))
    usual = {"rlhf_type": "grpo", "model": "m", "dataset": "d", "reward_funcs": "accuracy", "adapters": "a"}
    for _ in range(files_of(mode)):
        chosen = {name: rng.choice(WORDS) for name in rng.sample(list(flags), min(len(flags), 8))}
        chosen |= {name: values_for(flags[name], rng) for name in rng.sample(list(flags), min(len(flags), 8))}
        chosen |= {name: value for name, value in usual.items() if name in flags and rng.random() < 0.8}
        path.write_text("".join(f"{name}: {value}\n" for name, value in chosen.items()))
        with contextlib.suppress(ConfigError):
            parse(mode, [str(path)], {})


def test_the_schema_covers_every_spelling_and_is_json():
    properties = json.loads(json.dumps(json_schema("rlhf")))["properties"]
    names = {name.replace("-", "_") for name in properties}
    assert names == {*spellings_of(settings_class("rlhf")), "ENV", "_provenance"}
    assert properties["train_type"] == {"$ref": "#/properties/tuner_type"}


def test_the_settings_of_a_plugin_are_described(tmp_path, capsys):
    plugin = tmp_path / "clamp_plugin.py"
    plugin.write_text(
        "from dataclasses import dataclass\nfrom swift.flags import flag\nfrom swift.plugin import ORM, orms\n"
        "@dataclass(kw_only=True)\nclass P:\n    bonus: float = flag(1.0, above=0)\n    'Bonus.'\n"
        "class Mine(ORM):\n    parameters = P\n    def __call__(self, completions, **columns):\n        return [1.0]\n"
        "orms['mine'] = Mine\n"
    )
    assert main(["config-schema", "--external_plugins", str(plugin), str(plugin)]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("swift: note: --external_plugins: ")
    schema = Draft202012Validator(json.loads(out))
    assert schema.is_valid({"reward_funcs": "mine", "bonus": "1e-3"})
    assert not schema.is_valid({"bonus": 0})


@pytest.mark.parametrize("mode", MODES)
def test_every_default_is_a_value(mode):
    defaults = {name: flag.default for name, flag in flags_of(settings_class(mode)).items()}
    assert list(Draft202012Validator(json_schema(mode)).iter_errors(defaults)) == []


@pytest.mark.parametrize(
    ("line", "taken"),
    [
        ("train-type: full", True), ("ENV: {CUDA_VISIBLE_DEVICES: 0}", True), ("_provenance: {model: {}}", True),
        ("learning_rat: 1", False), ("scale_rewards: True", True), ("vllm_mode: none", True),
    ],
)  # fmt: skip
def test_lines_of_config_files(line, taken):
    assert Draft202012Validator(json_schema("rlhf")).is_valid(yaml.safe_load(line)) is taken
