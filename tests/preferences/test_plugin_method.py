"""A method of a plugin is one file: its settings are flags, and it is checked, planned, trained and resumed as any."""

from pathlib import Path

import pytest
from trl_runs import assert_resumes_exactly, logged, trained

from swift.arguments import parse
from swift.arguments.help import load_named_plugins, render
from swift.cli.main import main
from swift.errors import ConfigError
from swift.plugin import methods

pytestmark = pytest.mark.slow

PLUGIN = (Path(__file__).parents[2] / "examples" / "train" / "preference" / "method.py").read_text(encoding="utf-8")


@pytest.fixture
def plugin(tmp_path):
    (tmp_path / "shared.py").write_text(PLUGIN)
    yield f"--external_plugins {tmp_path / 'shared.py'}"
    methods.pop("shared_dpo", None)


def test_it_trains_and_resumes(settings, plugin):
    of_dpo = trained(settings("dpo"))
    halved = assert_resumes_exactly(lambda *more: settings("shared_dpo", plugin, more))
    expected = logged(of_dpo, "loss")[1, 1] / 2
    assert logged(halved, "loss")[1, 1] == pytest.approx(expected, rel=1e-5)


def test_its_settings_are_flags(settings, plugin):
    with pytest.raises(ConfigError, match="--share: "):
        settings("shared_dpo", plugin, "--share 0")
    load_named_plugins("rlhf", plugin.split())
    text = render("shared_dpo")
    assert "swift rlhf --rlhf_type shared_dpo: a share of DPO." in text and "--share FLOAT" in text


def test_it_is_planned_in_pairs(settings, plugin, capsys):
    run = f"rlhf --rlhf_type shared_dpo {plugin} --dataset d --model {settings('dpo').args.model}"
    assert main(["plan", *run.split(), "--device", "h100-80gb", "--row_tokens", "64", "--max_steps", "2"]) == 0
    assert "; pairs of answers, each 64 tokens" in capsys.readouterr().out


def test_without_its_file_it_is_no_method():
    with pytest.raises(ConfigError, match="--rlhf_type: shared_dpo: not a choice"):
        parse("rlhf", ["--rlhf_type", "shared_dpo", "--model", "m", "--dataset", "d"], {})


def test_the_dry_run_checks_its_file_in_every_mode(settings, tmp_path, capsys):
    (tmp_path / "broken.py").write_text("import swift.nothing\n")
    words = ["--model", str(settings("dpo").args.model), "--dataset", "d", "--dry_run", "true"]
    assert main(["sft", *words, "--external_plugins", str(tmp_path / "broken.py")]) == 2
    assert "broken.py" in capsys.readouterr().err
