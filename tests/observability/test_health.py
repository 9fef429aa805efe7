"""Each health rule raises its alert for a series that is wrong, at the line it should, and none for one that is not."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from swift.errors import ConfigError
from swift.observability import doctor, plots
from swift.observability.evidence import Evidence, gather
from swift.observability.findings import Finding
from swift.observability.health import REPEAT_STEPS, HealthMonitor
from swift.observability.health_rules import RULES, load_rules
from swift.observability.jsonl import JsonlWriter
from swift.observability.metric_names import ALIASES, with_aliases
from swift.plugin.registry import ORM, orms

LINES = 130


def alerts(series, rules=RULES, every=1, **limits):
    """The alerts of `LINES` lines, `every` steps apart; a metric is a value, or a function of the step."""
    monitor = HealthMonitor(rules, **{"most_tokens": 100, "stalest": 4, **limits})
    found = []
    for step in range(every, LINES * every + 1, every):
        logs = {name: value(step) if callable(value) else value for name, value in series.items()}
        found += monitor.update(step, {name: value for name, value in logs.items() if value is not None})
    return found


def after(first, wrong, before):
    """A metric that is `before` until step `first`."""
    return lambda step: wrong if step >= first else before


CASES = {
    # rule: (a series that is wrong, the step of its first alert, what the sentence says, a healthy series)
    "reward_zero": (
        {"rewards/a.b/mean": 0.0}, 20, "Reward a.b stays 0", {"rewards/a/mean": lambda s: float(s % 19 == 0)}
    ),
    "equal_rewards": (
        {"frac_reward_zero_std": 1.0}, 5, "Every group has equal rewards",
        {"frac_reward_zero_std": lambda s: 1.0 if s % 5 else 0.9},
    ),
    "reward_halved": ({"reward": after(11, 0.2, 0.5)}, 60, "Reward halved", {"reward": after(11, 0.26, 0.5)}),
    "gradient_large": ({"grad_norm": 11.0}, 5, "Gradients explode", {"grad_norm": 9.0}),
    "gradient_zero": (
        {"grad_norm": 0.0, "frac_reward_zero_std": 0.5}, 5, "Zero gradient although",
        {"grad_norm": 0.0, "frac_reward_zero_std": None},
    ),
    "entropy_low": ({"entropy": after(40, 0.005, 0.2)}, 44, "The policy collapsed", {"entropy": 0.02}),
    "entropy_high": ({"entropy": 1.2}, 55, "No convergence", {"entropy": lambda s: 3.0 - 0.01 * s}),
    "kl": ({"kl": 2.5}, 5, "The policy left the reference", {"kl": 1.9}),
    "logp_difference": (
        {"mismatch/logp_abs_diff_mean": 1.5}, 5, "Sampler and trainer disagree",
        {"mismatch/logp_abs_diff_mean": 1.5, "mismatch/biased": 1.0},
    ),
    "mismatch_kl": ({"mismatch/kl": 0.02}, 5, "Train/inference mismatch", {"mismatch/kl": -0.02}),
    "ratio_low": ({"mismatch/ratio_min": 0.001}, 5, "Samples are stale", {"mismatch/ratio_min": 0.02}),
    "ratio_off_centre": ({"mismatch/ratio_mean": 0.7}, 5, "off centre", {"mismatch/ratio_mean": 1.15}),
    "clipped_updates": ({"clip_ratio/region_mean": 0.4}, 5, "Most updates", {"clip_ratio/region_mean": 0.2}),
    "clipped_completions": ({"completions/clipped_ratio": 0.9}, 5, "Answers hit", {"completions/clipped_ratio": 0.7}),
    "length_hacking": (
        {"completions/mean_length": lambda s: min(95.0, 10.0 + s), "reward": 0.5}, 85, "likely length hacking",
        {"completions/mean_length": lambda s: min(95.0, 10.0 + s), "reward": lambda s: 0.5 + s / 1000},
    ),
    "staleness": ({"off_policy/max": after(30, 5.0, 4.0)}, 30, "please report this run", {"off_policy/max": 4.0}),
    "alignment": ({"alignment/diff_abs_mean": 0.2}, 5, "do not match the trainer", {"alignment/diff_abs_mean": 0.05}),
    "loss": ({"loss": after(7, math.nan, 0.1)}, 7, "Loss diverged (-inf)", {"loss": -9.0}),
    "rollout_bound": (
        {"time/wait_rollout": 0.7, "step_time": 1.0}, 5, "Rollout-bound (70 %)",
        {"time/wait_rollout": 0.5, "time/generate": 0.9, "step_time": 1.0},
    ),
    "trainer_bound": (
        {"time/wait_train": 1.4, "step_time": 2.0}, 5, "Trainer-bound (70 %)",
        {"time/wait_train": 0.1, "step_time": 1.0},
    ),
    "excluded": (
        {"completions/excluded_ratio": 0.25, "health/excluded/timeout/slow": 3.0, "health/excluded/no_reward": 1.0}, 5,
        "25 % of samples excluded, mostly timeout/slow", {"completions/excluded_ratio": 0.04},
    ),
    "memory": (
        {"perf/rss_gib": lambda s: 10.0 + s / 50}, 120, "grows: 2.0 GiB in 100 steps",
        {"perf/rss_gib": lambda s: 5.0 if s < 20 else 10 + s % 7 / 10},
    ),
}  # fmt: skip


def test_every_rule_has_its_series():
    assert CASES.keys() == RULES.keys()


@pytest.mark.parametrize("name", RULES)
def test_a_rule_raises_its_alert_in_time_and_seldom(name):
    wrong, first, said, healthy = CASES[name]
    found = [alert for alert in alerts(wrong) if alert.rule == name]
    steps = [alert.step for alert in found]
    assert steps == list(range(first, LINES + 1, REPEAT_STEPS))
    assert all(said in alert.sentence for alert in found)
    assert not [alert for alert in alerts(healthy) if alert.rule == name]


def test_lines_are_counted_not_steps_but_for_rules_that_cover_steps():
    assert alerts({"kl": 3.0}, every=5)[0].step == 25
    assert alerts({"rewards/a/mean": 0.0}, every=5)[0].step == 20


def test_lines_without_the_number_neither_count_nor_reset():
    assert alerts({"kl": lambda s: 3.0 if s % 2 else None})[0].step == 9
    assert not alerts({"kl": lambda s: 3.0 if s % 2 else 0.0})


def test_equal_rewards_are_no_fault_beside_a_teacher():
    assert not alerts({"frac_reward_zero_std": 1.0, "teacher_kl": 0.1})


def test_each_reward_function_has_an_alert_of_its_own():
    found = alerts({"rewards/a/mean": 0.0, "rewards/b/mean": after(10, 0.0, 1.0), "rewards/a/std": 0.0})
    assert [(alert.step, alert.sentence[:8]) for alert in found[:2]] == [(20, "Reward a"), (29, "Reward b")]


def test_the_reward_functions_say_why_rewards_are_equal():
    monitor = HealthMonitor()
    lines = [monitor.update(s, {"frac_reward_zero_std": 1.0}, diagnosis=lambda: ["f: constant 0"]) for s in range(1, 6)]
    assert lines[-1][0].sentence.endswith("dynamic_sample. (f: constant 0)")


def test_a_resumed_monitor_raises_the_same_alerts():
    def run(monitor, steps):
        logs = {name: CASES[name][0] for name in ("reward_halved", "entropy_high", "length_hacking", "memory", "kl")}
        for step in steps:
            line = {
                key: value(step) if callable(value) else value
                for series in logs.values()
                for key, value in series.items()
            }
            yield from monitor.update(step, line)

    whole, first, second = HealthMonitor(), HealthMonitor(), HealthMonitor()
    before = list(run(first, range(1, 48)))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    after_resume = list(run(second, range(48, 131)))
    expected = [one for one in run(whole, range(1, 131)) if one.rule != "memory"]
    assert before + after_resume == expected, "memory is that of another process"


def test_the_memory_of_a_resumed_run_is_compared_with_that_of_its_own_process():
    first, second = HealthMonitor(), HealthMonitor()
    for step in range(1, 61):
        first.update(step, {"perf/rss_gib": 5.0})
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    found = [second.update(step, {"perf/rss_gib": 5.0 if step < 80 else step / 10}) for step in range(61, 182)]
    assert [alert.step for line in found for alert in line] == [180]


@pytest.mark.parametrize("name", ["repetition", "soft_overlong"])
def test_a_penalty_may_stay_zero(name):
    assert not alerts({f"rewards/{name}/mean": 0.0})


def test_a_reward_of_a_plugin_says_whether_it_is_a_penalty(monkeypatch):
    monkeypatch.setitem(orms, "mine", type("Mine", (ORM,), {}))
    assert alerts({"rewards/mine/mean": 0.0})
    monkeypatch.setattr(orms["mine"], "judges", "penalty")
    assert not alerts({"rewards/mine/mean": 0.0})


def test_a_finished_run_knows_what_the_rewards_of_its_plugins_judge(tmp_path):
    row = {"attempt": 1, "reason": "done", "judges": {"form": ["mine"], "penalty": []}}
    JsonlWriter(tmp_path / "attempts.jsonl").write(row)
    found = gather(tmp_path, [], [])
    assert found.judging("form") >= {"mine", "format"} and "mine" not in found.judging("penalty")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kl: 5", None),
        ('{"kl": 1e-2, "ratio_off_centre": [0.5, 2], "loss": false}', None),
        ("kl: 1e-2", None),
        ("ratio_off_centre: [1, 2", "neither YAML nor JSON"),
        ("- kl", "must map rules to limits"),
        ("", "must map rules to limits"),
        ("kll: 5", "kll: no such rule; nearest: kl"),
        ("kl: high", "kl: high: not a limit; give a number"),
        ("kl: true", "kl: True: not a limit"),
        ("kl: [1, 2]", "kl: [1, 2]: not a limit; give a number"),
        ("ratio_off_centre: 2", "ratio_off_centre: 2: not a limit; give [low, high]"),
        ("ratio_off_centre: [1]", "ratio_off_centre: [1]: not a limit"),
        ("kl: .nan", "kl: nan: not a limit"),
    ],
)
def test_limits_by_a_file(text, said, tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    if said is None:
        limit = load_rules(str(path))["kl"].limit
        assert limit in (5.0, 0.01)
        assert bool(alerts({"kl": 3.0}, load_rules(str(path)))) == (limit < 3)
        assert ("loss" in load_rules(str(path))) == ("false" not in text)
        return
    with pytest.raises(ConfigError) as caught:
        load_rules(str(path))
    (line,) = caught.value.problems
    assert line.startswith(f"--health_rules: {path}: {said}")


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_rules(str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_rules(str(tmp_path))


def test_a_run_that_ended_before_its_first_step_has_a_cause(tmp_path, capsys):
    def write(reason):
        (tmp_path / "attempts.jsonl").write_text(json.dumps({"attempt": 1, "reason": reason}) + "\n")
        return reason

    asked = SimpleNamespace(args=SimpleNamespace(run=str(tmp_path), json=False))
    reason = write("parity: engine and trainer disagree about the log-probs of 64 tokens by 0.8")
    assert doctor.run(asked) == 0
    said = capsys.readouterr().out
    assert said.startswith("sampler_mismatch (90%)") and reason in said
    write("--model: gone")
    with pytest.raises(ConfigError, match=r"no step is logged; .*; the run ended with: --model: gone"):
        doctor.run(asked)


def test_the_doctor_lists_the_alerts_that_count(tmp_path, capsys):
    rows = [
        {"attempt": a, "step": s, "rule": "kl", "value": 3.0, "sentence": f"{a}"} for a, s in [(1, 5), (1, 9), (2, 9)]
    ]
    JsonlWriter(tmp_path / "alerts.jsonl").write(*rows)
    redone = {"attempt": 1, "step": 3, "rule": "kl", "value": 3.0, "sentence": "redone without an alert"}
    JsonlWriter(tmp_path / "alerts.jsonl").write(redone)
    steps = [(1, 3), (1, 5), (1, 9), (2, 3), (2, 9)]
    JsonlWriter(tmp_path / "logging.jsonl").write(*[{"attempt": a, "step": s} for a, s in steps])
    assert doctor.run(SimpleNamespace(args=SimpleNamespace(run=str(tmp_path), json=False))) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown == ["healthy", "step 5: kl: 1", "step 9: kl: 2", "2 alerts in 3 logged steps"]
    doctor.run(SimpleNamespace(args=SimpleNamespace(run=str(tmp_path), json=True)))
    assert json.loads(capsys.readouterr().out) == {"causes": [], "time": {}, "alerts": [rows[0], rows[2]]}


def test_the_doctor_draws_where_the_cause_is(tmp_path, capsys, monkeypatch):
    JsonlWriter(tmp_path / "logging.jsonl").write(
        *[{"attempt": 1, "step": step, "loss": None if 4 <= step <= 8 else 0.1, "kl": 0.1} for step in range(1, 13)]
    )
    JsonlWriter(tmp_path / "alerts.jsonl").write({**ALERT, "step": 4})
    marked = []
    write = plots.write_diagnosis
    monkeypatch.setattr(plots, "write_diagnosis", lambda *given: (marked.append(given[-1]), write(*given)))
    doctor.run(SimpleNamespace(args=SimpleNamespace(run=str(tmp_path), json=True)))
    (cause,) = json.loads(capsys.readouterr().out)["causes"]
    assert (cause["cause"], cause["steps"]) == ("non_finite", [4, 8])
    assert marked == [plots.Marks(tmp_path.name, [4], regions=[("non_finite", 4, 8)])]
    assert [path.name for path in (tmp_path / "images").iterdir()] == ["doctor.png"]


@pytest.mark.parametrize("command", ["rlhf", "sft", "pt"])
def test_the_doctor_gives_the_command_of_a_run_that_is_mended(tmp_path, capsys, command):
    args = {"torch_dtype": "float16"}
    JsonlWriter(tmp_path / "attempts.jsonl").write({"attempt": 1, "command": command})
    (tmp_path / "args.json").write_text(json.dumps(args))
    JsonlWriter(tmp_path / "logging.jsonl").write(*[{"attempt": 1, "step": step, "loss": None} for step in range(1, 9)])
    doctor.run(SimpleNamespace(args=SimpleNamespace(run=str(tmp_path), json=True)))
    (cause,) = json.loads(capsys.readouterr().out)["causes"]
    assert cause["command"] == f"swift {command} {tmp_path / 'args.json'} --torch_dtype bfloat16"
    doctor.run(SimpleNamespace(args=SimpleNamespace(run=str(tmp_path), json=False)))
    assert f"\n  command: {cause['command']}\n" in capsys.readouterr().out
    (tmp_path / "args.json").write_text(json.dumps(args | {"add_version": False}))
    doctor.run(SimpleNamespace(args=SimpleNamespace(run=str(tmp_path), json=False)))
    assert f"  command: {cause['command']} --output_dir {tmp_path}-mended\n" in capsys.readouterr().out
    (tmp_path / "args.json").write_text(json.dumps(args | {"resume_from_checkpoint": "last"}))
    for rank in range(2):
        path = tmp_path / "logs" / "attempt-1" / f"rank-{rank}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    doctor.run(SimpleNamespace(args=SimpleNamespace(run=str(tmp_path), json=False)))
    said = f"  command: NPROC_PER_NODE=2 {cause['command']} --resume_from_checkpoint none\n"
    assert said in capsys.readouterr().out, "not a continuation of the sick one"
    (tmp_path / "args.json").write_text(json.dumps(args | {"torch_dtype": "float32"}))
    doctor.run(SimpleNamespace(args=SimpleNamespace(run=str(tmp_path), json=False)))
    assert "command:" not in capsys.readouterr().out, "no setting helps for sure"


def test_the_command_has_the_settings_of_its_mode_only():
    run = doctor.Examined(Path("r"), Evidence([], args={"temperature": 0.5, "top_k": 1}, command="sft"), [], [], 1)
    finding = Finding("entropy_collapse", 1.0, [], "", settings="--temperature 1.0 --entropy_coef 0.01 --top_k -1")
    assert run.command(finding) == "swift sft r/args.json --temperature 1.0 --top_k -1"
    assert run.command(replace(finding, settings="--entropy_coef 0.01")) == ""


@pytest.mark.parametrize(
    ("attempt", "args", "command"), [({}, {"rlhf_type": "grpo"}, "rlhf"), ({"command": 5}, {}, "")]
)
def test_the_command_of_an_older_run_or_of_another_program(tmp_path, attempt, args, command):
    JsonlWriter(tmp_path / "attempts.jsonl").write({"attempt": 1, **attempt})
    (tmp_path / "args.json").write_text(json.dumps(args))
    assert gather(tmp_path, [], []).command == command


def test_the_context_is_that_of_the_model_unless_a_setting_has_another(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 128}}))
    for args, context in (({}, 128), ({"max_model_len": 64}, 64), ({"model": "org/model"}, 0)):
        (tmp_path / "args.json").write_text(json.dumps({"model": str(tmp_path)} | args))
        assert gather(tmp_path, [], []).context == context


def test_a_folder_that_cannot_be_written_is_diagnosed(tmp_path, capsys):
    JsonlWriter(tmp_path / "logging.jsonl").write({**LINE, "loss": 0.1})
    (tmp_path / "images").touch()
    assert doctor.run(SimpleNamespace(args=SimpleNamespace(run=str(tmp_path), json=False))) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("healthy\n") and shown.err.startswith("not drawn: disk: ")


ALERT = {"attempt": 1, "step": 1, "rule": "kl", "value": 3.0, "sentence": "\x1b[2Jhigh"}
LINE = {"attempt": 1, "step": 1}


def test_the_doctor_finds_the_newest_run_and_writes_control_characters_out(tmp_path, capsys):
    for name in ("v2-20260101-000000", "v10-20250101-000000", "v11-20260101-000000"):
        (tmp_path / name).mkdir()
    for name in ("v2-20260101-000000", "v10-20250101-000000"):
        JsonlWriter(tmp_path / name / "logging.jsonl").write(LINE)
        JsonlWriter(tmp_path / name / "alerts.jsonl").write({**ALERT, "sentence": f"\x1b[2J{name}"})
    assert doctor.run(SimpleNamespace(args=SimpleNamespace(run=str(tmp_path), json=False))) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"run: {tmp_path / 'v10-20250101-000000'}",
        "healthy",
        "step 1: kl: \\x1b[2Jv10-20250101-000000",
        "1 alert in 1 logged step",
    ]


BROKEN = {
    "cut": ("logging.jsonl", b'{"step": 1, "att', "no step is logged"),
    "empty": ("logging.jsonl", b"", "no step is logged"),
    "binary": ("logging.jsonl", bytes(range(256)) + b"\n", "logging.jsonl:1: .*not JSON"),
    "nested": ("logging.jsonl", b"[" * 10**5 + b"\n", "logging.jsonl:1: .*not JSON"),
    "other types": ("logging.jsonl", b'{"step": "1", "attempt": null}\n', "no line of swift's, which has step"),
    "no object": ("logging.jsonl", b"[1]\n", "no line of swift's"),
    "another program": ("logging.jsonl", b'{"level": "info", "msg": "\\u001b[2J"}\n', r"u001b.*no line of swift's"),
    "alerts of another": ("alerts.jsonl", b'{"step": 1, "attempt": 1}\n', "no line of swift's, which has .*sentence"),
    "huge line": ("logging.jsonl", b'{"x": "' + b"a" * 5000 + b'"}\n', "a line of over 4000 bytes"),
    "folder": ("logging.jsonl", None, "not a regular file"),
    "folder of alerts": ("alerts.jsonl", None, "not a regular file"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_the_doctor_refuses_a_log_that_is_none(tmp_path, monkeypatch, name):
    monkeypatch.setattr("swift.observability.jsonl.MAX_LINE_BYTES", 4000 if name == "huge line" else 2**20)
    file, content, says = BROKEN[name]
    JsonlWriter(tmp_path / "logging.jsonl").write(LINE)
    if content is None:
        (tmp_path / file).unlink(missing_ok=True)
        (tmp_path / file).mkdir()
    else:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(ConfigError, match=says) as refused:
        doctor.run(SimpleNamespace(args=SimpleNamespace(run=str(tmp_path), json=False)))
    assert len(refused.value.problems) == 1 and "\n" not in refused.value.problems[0]


def test_other_names_are_added_in_training_and_evaluation():
    logs = {
        "entropy": 0.3,
        "reward": 0.5,
        "eval_reward": 0.7,
        "rewards/my.module.fn/mean": 1.0,
        "rewards/format/mean": 0.0,
    }
    assert with_aliases(logs, None) == logs
    verl = with_aliases(logs, "verl")
    assert verl == logs | {"actor/entropy": 0.3, "critic/score/mean": 0.5, "eval_critic/score/mean": 0.7}
    assert with_aliases(logs, "trl") == logs | {"rewards/fn/mean": 1.0}
    assert not {alias for table in ALIASES.values() for alias in table} & {
        n for t in ALIASES.values() for n in t.values()
    }
