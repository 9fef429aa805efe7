"""Whole runs of models with linear attention, state spaces and convolutions: prompts once, as good as rows."""

import pytest
from cli_runs import Cli, assert_close, assert_resumes, error_lines, log_rows, sampled
from hybrids import hybrid

from swift.models.tiny import build_tokenizer

pytestmark = pytest.mark.slow

FLAGS = {"max_steps": 2, "beta": 0.04, "num_iterations": 2, "gradient_checkpointing": "true"}
"""Two updates on one rollout batch: Adam makes roundings of gradients near 0 large, so later samples may differ."""
LORA = {"tuner_type": "lora", "target_modules": "all-linear", "learning_rate": 1e-2}
NOTE = "completions continue from the states that their prompts leave"
ROWS = """
import swift.models.attention.choice as choice

choice._forking_gap = lambda model: "planted"
"""
"""A plugin: no model passes the trial."""
KEEPS_NOTHING = """
import swift.models.attention.forked as forked

forked._Reader.recurrent_states = property(
    lambda self: {number: 0 * self._forked(states) for number, states in self.prompts.recurrent.items()}
)
"""
"""A fault: completions begin without the recurrent states of their prompts."""


@pytest.fixture
def hybrids(material, tmp_path):
    """Runs of an architecture."""
    opened = []

    def of(arch):
        base = tmp_path / arch
        hybrid(arch, vocab_size=263).save_pretrained(base)
        build_tokenizer(256).save_pretrained(base)
        opened.append(Cli(base, material[1], tmp_path))
        return opened[-1].__enter__()

    yield of
    for cli in opened:
        cli.__exit__()


def plugin(cli, text):
    (cli.folder / "plugin.py").write_text(text)
    return {"external_plugins": [cli.material / "odd_plugin.py", cli.folder / "plugin.py"]}


@pytest.mark.parametrize(
    ("arch", "flags"),
    [("qwen3_5_text", LORA), pytest.param("lfm2", {}, marks=pytest.mark.long)],
)
def test_a_run_is_that_of_rows(hybrids, arch, flags):
    cli = hybrids(arch)
    forked = cli.finish("forked", **FLAGS, **flags)
    assert NOTE in cli.printed
    rows = cli.finish("rows", **FLAGS, **flags, **plugin(cli, ROWS))
    assert "prompts are not shared" in cli.printed
    assert sampled(forked) == sampled(rows)
    assert len(log_rows(forked)) == FLAGS["max_steps"]
    assert_close(forked, rows, "loss", "grad_norm", "kl")


@pytest.mark.long
def test_a_model_that_loses_states_takes_rows(hybrids):
    cli = hybrids("qwen3_5_text")
    cli.finish("lost", **FLAGS, **plugin(cli, KEEPS_NOTHING))
    assert "forked states give other logits" in cli.printed


def test_a_resumed_run_is_the_same_to_the_last_bit(hybrids):
    cli = hybrids("qwen3_5_text")
    flags = {**FLAGS, "max_steps": 4}
    straight = cli.finish("straight", **flags)
    assert_resumes(cli, straight, 2, **flags)


@pytest.mark.parametrize(
    ("arch", "flags"),
    [
        pytest.param("qwen3_5_text", {"fsdp": "full_shard", **LORA}, marks=pytest.mark.long),
        pytest.param(
            "qwen3_5_text",
            {"deepspeed": "zero3", "ds3_gather_for_generation": "false", **LORA},
            marks=pytest.mark.long,
        ),
        pytest.param("nemotron_h", {"fsdp": "full_shard", **LORA}, marks=pytest.mark.long),
        pytest.param("lfm2", {}, marks=pytest.mark.long),
    ],
)
def test_two_processes_take_the_steps_of_one(hybrids, arch, flags):
    cli = hybrids(arch)
    one = cli.finish("one", **FLAGS, **(LORA if "tuner_type" in flags else {}))
    two = cli.finish("two", variables={"NPROC_PER_NODE": 2}, **FLAGS, **flags, gradient_accumulation_steps=1)
    assert NOTE in cli.printed
    assert sampled(two) == sampled(one)
    assert_close(two, one, "loss", "grad_norm", "kl")


@pytest.mark.long
def test_where_gradients_are_cut_full_tuning_takes_rows(hybrids):
    cli = hybrids("lfm2")
    one = cli.finish("one", **FLAGS)
    two = cli.finish("two", variables={"NPROC_PER_NODE": 2}, **FLAGS, fsdp="full_shard", gradient_accumulation_steps=1)
    assert "the gradients of all layers would be whole at a time" in cli.printed
    assert sampled(two) == sampled(one)
    assert_close(two, one, "loss", "grad_norm", "kl")


def test_processes_cannot_share_their_rows(hybrids):
    cli = hybrids("lfm2")
    run = cli.start("shared", variables={"NPROC_PER_NODE": 2}, **FLAGS, sequence_parallel_size=2, dry_run="true")
    code, _, err = run.wait()
    assert code == 2 and "layers of type conv" in error_lines(err)[0]
