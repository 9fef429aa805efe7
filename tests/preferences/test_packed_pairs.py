"""`--packing` and `--padding_free` of pairs: streams without padding have the loss and gradient of padded rows."""

import json
import re
import shutil

import pytest
import torch
import vlms
from hybrids import FORKED
from hypothesis import given
from hypothesis import strategies as st
from image_rows import assert_same_gradients, data_url, turn
from trl_runs import argv_of, assert_resumes_exactly, in_two, logged, sums, trained, trainer_of, weights, written

from swift.arguments import parse
from swift.errors import ConfigError
from swift.models.attention.interface import decoder_of
from swift.models.attention.pair_stream import PairStream
from swift.trainers.checkpoint import list_checkpoints
from swift.trainers.preferences.packing import PairPacking

LORA = "--tuner_type lora --init_weights gaussian --lora_dropout 0"


def uneven(count):
    """Pairs whose prompts and answers differ in length."""
    for number, row in enumerate(sums(count)):
        row["prompt"][0]["content"] += " Think about it." * (number % 3)
        row["chosen"][0]["content"] += " That is right." * (number % 4)
        yield row


def moved(trainer):
    """Away from the reference, where losses are symmetric."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return trainer


def step_of(trainer, rows):
    """Loss of some rows, whose gradient is made, and the shape of what the first layer is given."""
    shapes = []
    layer = next(one[0] for one in decoder_of(trainer.model).modules() if isinstance(one, torch.nn.ModuleList))
    hook = layer.register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape[:2]))
    loss = trainer.compute_loss(trainer.model.train(), trainer._prepare_inputs(trainer.data_collator(rows)))
    loss.backward()
    hook.remove()
    return float(loss.detach()), shapes[0]


def assert_same_metrics(trainer, plain):
    ours, theirs = (one._metrics["train"] for one in (trainer, plain))
    assert ours.keys() == theirs.keys() and len(theirs) > 8
    for name, values in theirs.items():
        assert ours[name] == pytest.approx(values, rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize(
    ("method", "flags"),
    [
        ("dpo", ()),
        ("dpo", LORA),
        ("dpo", "--loss_type sigmoid aot --rpo_alpha 0.5 --ld_alpha 0.3"),
        ("dpo", "--gradient_checkpointing true"),
        ("ipo", ()),
    ],
)
def test_a_stream_of_pairs_has_the_loss_and_gradient_of_padded_rows(settings, tmp_path, method, flags):
    resolved = settings(method, flags, rows=list(uneven(8)))
    plain = moved(trainer_of(resolved, tmp_path / "plain"))
    resolved.args.padding_free = True
    stream = moved(trainer_of(resolved, tmp_path / "stream"))
    expected, (rows, width) = step_of(plain, list(plain.train_dataset))
    loss, (alone, tokens) = step_of(stream, list(stream.train_dataset))
    assert (rows, alone) == (16, 1) and tokens < 0.5 * rows * width
    assert loss == pytest.approx(expected, rel=1e-6)
    assert_same_gradients(stream.model, plain.model, most=1e-6)
    assert_same_metrics(stream, plain)


def test_a_packed_row_is_a_batch_of_its_pairs(settings, tmp_path):
    resolved = settings("dpo", rows=list(uneven(9)))
    plain = moved(trainer_of(resolved, tmp_path / "plain"))
    resolved.args.packing, resolved.args.packing_length = True, 150
    packed = moved(trainer_of(resolved, tmp_path / "packed"))
    found = list(packed.train_dataset)
    assert sum(len(row["prompt_ids"]) for row in found) == 9 and 1 < len(found) < 9
    for row in found:
        assert sum(len(ids) for pairs in row.values() for ids in pairs) <= 150
    pairs = [dict(zip(found[0], pair, strict=True)) for pair in zip(*found[0].values(), strict=True)]
    assert all(pair in list(plain.train_dataset) for pair in pairs)
    expected, _ = step_of(plain, pairs)
    loss, _ = step_of(packed, found[:1])
    assert loss == pytest.approx(expected, rel=1e-6)
    assert_same_gradients(packed.model, plain.model, most=1e-6)
    assert_same_metrics(packed, plain)


@given(st.lists(st.tuples(*[st.integers(1, 9)] * 3), max_size=30), st.integers(2, 30))
def test_each_pair_is_packed_once_and_rows_that_have_several_fit(sizes, length):
    rows = {
        name: [[number] * size[place] for number, size in enumerate(sizes)]
        for place, name in enumerate(("prompt_ids", "chosen_ids", "rejected_ids"))
    }
    packed = PairPacking("bfd", length).pack(rows)
    assert sorted(ids[0] for pairs in packed["prompt_ids"] for ids in pairs) == list(range(len(sizes)))
    for prompts, chosen, rejected in zip(*packed.values(), strict=True):
        assert [ids[0] for ids in prompts] == [ids[0] for ids in chosen] == [ids[0] for ids in rejected]
        assert len(prompts) == 1 or sum(map(len, [*prompts, *chosen, *rejected])) <= length


def test_answers_share_what_they_begin_with():
    rows = [[1, 2, 3, 4], [5, 6, 0, 0], [1, 2, 9, 0], [5, 6, 7, 0]]
    ids = torch.tensor(rows)
    stream = PairStream(ids, (ids > 0).long())
    assert stream.own(ids).tolist() == [[1, 2, 3, 4, 9, 5, 6, 7]]
    states = stream.own(ids)[..., None].float()
    assert stream.whole(states)[..., 0].where(ids > 0, 0).tolist() == rows
    first, second = stream.groups
    assert (first.prompt.start, first.prompt.length, second.prompt.start, second.prompt.length) == (0, 2, 5, 2)
    assert [(own.start, own.length) for own in (*first.completions, *second.completions)] == [
        (2, 2), (4, 1), (7, 0), (7, 1)
    ]  # fmt: skip


def test_pairs_without_a_common_beginning_are_rows_of_a_stream():
    ids = torch.tensor([[1, 2, 3], [4, 5, 0]])
    stream = PairStream(ids, (ids > 0).long())
    assert [(group.prompt.start, group.prompt.length, group.completions) for group in stream.groups] == [
        (0, 3, ()), (3, 2, ())
    ]  # fmt: skip


PAIRS = [
    {"messages": [turn("user", "<image>What?")], "images": [data_url(0)], "chosen": "a b", "rejected": "c"},
    {"messages": [turn("user", "Nothing")], "images": [], "chosen": "h i", "rejected": "j"},
    {
        "messages": [turn("user", "<image>or <image>?")],
        "images": [data_url(1), data_url(2)],
        "chosen": "d",
        "rejected": "e f g",
    },
]


@pytest.mark.parametrize("family", vlms.FAMILIES)
def test_pairs_with_images_have_the_loss_and_gradient_of_padded_rows(vlm_folders, tmp_path, family):
    own = {"--rlhf_type": "dpo", "--model": vlm_folders(family), "--dataset": written(tmp_path / "rows.jsonl", PAIRS)}
    flags = "--freeze_vit false --freeze_aligner false --packing_length 4000"
    resolved = parse("rlhf", argv_of({**own, "--output_dir": tmp_path / "out"}, flags), {})
    plain = moved(trainer_of(resolved, tmp_path / "plain"))
    resolved.args.packing = True
    packed = moved(trainer_of(resolved, tmp_path / "packed"))
    (row,) = packed.train_dataset
    expected, (rows, _) = step_of(
        plain, [dict(zip(row, pair, strict=True)) for pair in zip(*row.values(), strict=True)]
    )
    loss, (alone, _) = step_of(packed, [row])
    alone_of = {"qwen3_5": 3, "gemma4": 6}  # goes on from its three prompts; padded rows
    assert (rows, alone) == (6, alone_of.get(family, 1))
    assert loss == pytest.approx(expected, rel=1e-6)
    assert_same_gradients(packed.model, plain.model, most=2e-6)


@pytest.fixture
def arch(nano_folders, small_model, tmp_path):
    """A folder with a small model of another architecture."""

    def made(name, **config):
        folder = tmp_path / name
        shutil.copytree(nano_folders["qwen3"], folder)
        vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
        small_model(name, vocab_size=vocab, **config).save_pretrained(folder)
        return folder

    return made


@pytest.mark.parametrize(
    ("name", "padded", "flags"),
    [
        ("qwen3_moe", False, "--router_aux_loss_coef 0.5"),
        ("lfm2", False, "--gradient_checkpointing true"),
        ("lfm2", True, '--gradient_checkpointing_kwargs {"use_reentrant":true}'),
        ("gpt2", True, ()),
    ],
)
def test_other_architectures_have_the_loss_of_padded_rows(settings, arch, tmp_path, caplog, name, padded, flags):
    config = {**FORKED[name], "num_hidden_layers": 4} if name in FORKED else {}
    resolved = settings("dpo", flags, "--model", str(arch(name, **config)), rows=list(uneven(6)))
    plain = moved(trainer_of(resolved, tmp_path / "plain"))
    resolved.args.padding_free = True
    stream = moved(trainer_of(resolved, tmp_path / "stream"))
    expected, loss = (step_of(one, list(one.train_dataset))[0] for one in (plain, stream))
    assert ("computed as padded rows" in caplog.text) == padded
    assert loss == pytest.approx(expected, rel=1e-6)
    assert_same_gradients(stream.model, plain.model, most=1e-6)
    assert_same_metrics(stream, plain)


PACKED = "--packing true --packing_length 400 --per_device_train_batch_size 1 --dataset_shuffle false"


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--streaming true --shuffle_buffer_size 7", LORA])
def test_a_run_with_packed_pairs_resumes_to_the_last_bit(settings, flags):
    assert_resumes_exactly(lambda *more: settings("dpo", PACKED, flags, more, rows=list(uneven(40))))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "way"),
    [
        (2, ""),
        pytest.param(2, "--fsdp full_shard", marks=pytest.mark.long),
        pytest.param(4, "--sequence_parallel_size 2", marks=pytest.mark.long),
    ],
)
def test_processes_with_other_numbers_of_pairs_take_the_steps_of_one(settings, tmp_path, count, way):
    given = [PACKED, "--optim sgd --learning_rate 1 --max_grad_norm 0 --max_steps 2", LORA]
    rows = list(uneven(24))
    rows[0]["prompt"][0]["content"] += " Think about it." * 20  # a packed row with fewer pairs
    one = trained(settings("dpo", given, f"--gradient_accumulation_steps 2 --output_dir {tmp_path / 'one'}", rows=rows))
    several = settings("dpo", given, way.split(), f"--output_dir {tmp_path / 'two'}", rows=rows)
    two = in_two(several, count=count)
    for name in ("loss", "grad_norm"):
        assert logged(two, name) == pytest.approx(logged(one, name), rel=1e-5)
    ours, theirs = (weights(list_checkpoints(run)[-1]) for run in (two, one))
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) < 1e-6


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--packing true --torch_compile true", "--packing: true: each batch would be compiled anew"),
        ("--padding_free true --neftune_noise_alpha 5", "--padding_free: true: the noise of --neftune_noise_alpha 5"),
        ("--packing true --precompute_ref_log_probs true", "--precompute_ref_log_probs: true: not for packed rows"),
    ],
)
def test_what_does_not_go_with_streams_is_refused(settings, flags, problem):
    with pytest.raises(ConfigError, match=re.escape(problem)):
        settings("dpo", flags)
