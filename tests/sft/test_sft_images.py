"""Supervised tuning of models that see: plain forward passes are the measure."""

import re
import shutil
from collections import Counter
from dataclasses import replace

import pytest
import torch
import vlms
from image_rows import Plain, assert_same_gradients, data_url, turn
from safetensors.torch import load_file
from tokenizers.processors import TemplateProcessing
from trl_runs import argv_of, assert_resumes_exactly, in_two, logged, trained, trainer_of, weights, written

from swift.arguments import parse
from swift.cli.main import main
from swift.data import image_store
from swift.data.loading import load_rows
from swift.errors import ConfigError
from swift.models.attention.interface import transformers_model
from swift.models.multimodal import parts_of_parameters
from swift.models.policy import load_policy
from swift.models.rates import Rates
from swift.models.tokenizer import load_chat
from swift.models.vision import placeholder_ids
from swift.trainers.checkpoint import list_checkpoints
from swift.trainers.rows import TOO_LONG
from swift.trainers.sft_data import ChatEncoder
from swift.trainers.trl.run import run

ASKED, ANSWER = turn("user", "<image>What?"), turn("assistant", "a b")
ROWS = [
    {"messages": [ASKED, ANSWER], "images": [data_url(0)]},
    {"messages": [ASKED, ANSWER, turn("user", "or <image>?"), ANSWER], "images": [data_url(1), data_url(2)]},
    {"messages": [turn("user", "Nothing"), turn("assistant", "yes")], "images": []},
]
TOWERS = "--freeze_vit false --freeze_aligner false"


@pytest.fixture
def settings(vlm_folders, tmp_path):
    """Resolved settings of a small run, as a function of the flags that differ."""

    def resolved(*flags, family="qwen3_vl", rows=ROWS, mode="sft"):
        own = {
            "--model": vlm_folders(family), "--dataset": written(tmp_path / "rows.jsonl", rows),
            "--output_dir": tmp_path / "out", "--per_device_train_batch_size": 3, "--max_steps": 2,
        }  # fmt: skip
        return parse(mode, argv_of(own, *flags), {})

    return resolved


def answers_in(plain, ids):
    """Whether each token is one of an answer or ends one."""
    start, (end,) = plain.ids("<|im_start|>assistant\n"), plain.ids("<|im_end|>")
    found, inside = [], False
    for place, token in enumerate(ids):
        found.append(inside)
        inside = token != end if inside else ids[: place + 1][-len(start) :] == start
    return torch.tensor(found)


def plain_answers(plain, row):
    """The ids of a row, and the log-probs of the tokens of its answers, by transformers alone."""
    ids, logprobs = plain.logprobs(plain.text(row["messages"]), row["images"])
    return ids, logprobs[answers_in(plain, ids)[1:]]


def plain_loss(plain):
    """The mean over the tokens of answers."""
    return -torch.cat([plain_answers(plain, row)[1] for row in ROWS]).mean()


STREAMS = ("--padding_free true", "--packing true --max_length 512")
LONG = pytest.mark.long
WAYS = [(family, way) for family in vlms.FAMILIES for way in ("", *STREAMS)]


@pytest.mark.parametrize(
    ("family", "way"),
    [
        pytest.param(family, way, marks=() if way != STREAMS[0] or family in ("qwen3_vl", "qwen3_5") else LONG)
        for family, way in WAYS
    ],
)
def test_loss_and_gradients_are_those_of_plain_rows(family, way, settings, vlm_folders, tmp_path):
    trainer = trainer_of(settings(TOWERS, way.split(), family=family), tmp_path / "run")
    batch = trainer.data_collator(list(trainer.train_dataset))
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    if way:
        tokens = batch["input_ids"].numel()
        assert batch["input_ids"].shape == (1, tokens) and trainer._metrics["train"]["num_tokens"] == [tokens]
    plain = Plain(vlm_folders(family))
    expected = plain_loss(plain)
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert_same_gradients(trainer.model, plain.model, most=1e-6)


DOCUMENTS = [
    {"text": "a <image>b c <image>", "images": [data_url(0), data_url(1)]},
    {"text": "<image> d e", "images": [data_url(2)]},
    {"text": "Nothing to see.", "images": []},
]


def document_loss(plain):
    """The mean over the tokens of documents that stand for no image, by transformers alone."""
    mark = plain.text([turn("user", "x<image>y")]).partition("x")[2].partition("y")[0]
    learnt = []
    for row in DOCUMENTS:
        text = row["text"].replace("<image>", mark) + plain.tokenizer.eos_token
        ids, logprobs = plain.logprobs(text, row["images"])
        texts = torch.tensor([token not in placeholder_ids(plain.model.config) for token in ids[1:]])
        learnt.append(logprobs[texts])
    return -torch.cat(learnt).mean()


@pytest.mark.parametrize(
    ("family", "way"),
    [
        pytest.param(family, way, marks=() if family in ("qwen3_vl", "idefics3") or not way else pytest.mark.long)
        for family, way in WAYS
    ],
)
@pytest.mark.parametrize("mode", ["pt", pytest.param("sft", marks=pytest.mark.long)])
def test_documents_are_those_of_plain_rows(mode, family, way, settings, vlm_folders, tmp_path):
    trainer = trainer_of(settings(TOWERS, way.split(), family=family, rows=DOCUMENTS, mode=mode), tmp_path / "run")
    batch = trainer.data_collator(list(trainer.train_dataset))
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    plain = Plain(vlm_folders(family))
    expected = document_loss(plain)
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert_same_gradients(trainer.model, plain.model, most=1e-6)


def test_a_document_begins_as_the_tokenizer_begins_texts_and_its_images_are_never_cut(settings):
    args = settings(rows=DOCUMENTS, mode="pt").args
    template = load_chat(args, plain=True)
    tokenizer = template.tokenizer
    (start,) = tokenizer("Z", add_special_tokens=False)["input_ids"]
    opened = TemplateProcessing(single="Z $A", special_tokens=[("Z", start)])
    tokenizer.backend_tokenizer.post_processor = opened
    (row, *_) = load_rows(args, "train", purpose="text", images=True).examples
    content = row.messages[0]["content"]
    ids = template.encode_document(content)
    assert ids[:2] == [start, *tokenizer("a", add_special_tokens=False)["input_ids"]]
    assert ids[-1] == tokenizer.eos_token_id and ids.count(start) == 1
    for cut in ("delete", "left", "split"):
        (found,) = ChatEncoder(template, len(ids) - 1, "all", cut).rows(row.messages)
        assert found["problem"] == TOO_LONG
    assert template.vision.visible(ids).count(template.vision.placeholder) == sum(token < 0 for token in ids) > 0


def test_a_model_without_a_chat_template_shows_images_by_its_processor_alone(settings, vlm_folders, tmp_path):
    folder = shutil.copytree(vlm_folders("idefics3"), tmp_path / "base")
    (folder / "chat_template.jinja").unlink()
    args = settings(rows=DOCUMENTS, mode="pt").args
    shown = load_chat(replace(args, model=str(vlm_folders("idefics3"))), plain=True).vision.mark
    assert load_chat(replace(args, model=str(folder)), plain=True).vision.mark == shown == "<image>"


@pytest.mark.parametrize("family", vlms.FAMILIES)
def test_a_batch_of_texts_needs_no_pixels(family, settings, tmp_path):
    trainer = trainer_of(settings(TOWERS, family=family, rows=ROWS[2:]), tmp_path / "run")
    batch = trainer.data_collator(list(trainer.train_dataset))
    assert batch.keys() == {"input_ids", "attention_mask", "labels"}
    trainer.compute_loss(trainer.model, batch).backward()


@pytest.mark.parametrize("strategy", ["bfd_split", "wrapped"])
def test_images_are_not_cut(strategy, settings):
    with pytest.raises(ConfigError, match=f"--packing_strategy: {strategy}: cuts rows, and images are not cut"):
        run(settings(f"--packing true --packing_strategy {strategy}"))


def test_a_batch_is_not_computed_in_parts_without_its_pixels(settings, tmp_path):
    assert trainer_of(settings(), tmp_path / "run").parting == ""


def test_loss_scale_all_leaves_out_the_tokens_of_images(settings, tmp_path):
    trainer = trainer_of(settings("--loss_scale all"), tmp_path / "run")
    for row in trainer.train_dataset:
        learnt = [label for label in row["labels"] if label != -100]
        assert learnt == [token for token in row["input_ids"] if token >= 0]


OTHERS = [f"--tuner_type {name}" for name in ("vera", "boft", "miss")]
OTHERS.append("--tuner_type ia3 --target_modules q_proj linear_fc1 linear_fc2")


@pytest.mark.slow
@pytest.mark.parametrize("flags", [pytest.param(flags, marks=pytest.mark.long) for flags in OTHERS])
def test_adapters_of_other_kinds_are_merged_into_what_they_have_learnt(flags, settings, vlm_folders, tmp_path):
    trainer = trainer_of(settings(TOWERS, flags, "--learning_rate 1e-2 --max_steps 5"), tmp_path / "run")
    start = {name: one.detach().clone() for name, one in trainer.model.named_parameters() if one.requires_grad}
    trainer.train()
    moved = {name for name, one in trainer.model.named_parameters() if name in start and not one.equal(start[name])}
    assert any("visual.blocks" in name for name in moved) and any("merger" in name for name in moved)
    batch = trainer.data_collator(list(trainer.train_dataset))
    learnt = float(trainer.compute_loss(trainer.model.eval(), batch))
    merged, last = tmp_path / "merged", list_checkpoints(tmp_path / "run")[-1]
    assert main(["merge-lora", "--adapters", str(last), "--output_dir", str(merged)]) == 0
    assert float(plain_loss(Plain(merged))) == pytest.approx(learnt, rel=1e-5)
    assert float(plain_loss(Plain(vlm_folders("qwen3_vl")))) > learnt + 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--tuner_type lora",
        "--packing true --max_length 128",
        "--streaming true --shuffle_buffer_size 2",
        pytest.param("--tuner_type lora_llm --vit_lr 1e-3", marks=pytest.mark.long),
        *(pytest.param(f"{TOWERS} {flags}", marks=pytest.mark.long) for flags in OTHERS),
        f"--tuner_type full {TOWERS} --vit_lr 1e-3 --aligner_lr 1e-4 --vit_gradient_checkpointing true",
    ],
)
def test_a_run_resumes_to_the_last_bit(flags, settings, tmp_path):
    more = [flags, "--max_steps 4 --per_device_train_batch_size 1"]
    run = assert_resumes_exactly(lambda *saving: settings(*more, *saving))
    checkpoint = list_checkpoints(run)[-1]
    assert (checkpoint / "preprocessor_config.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("trained_parts", ["language model", pytest.param("all", marks=pytest.mark.long)])
def test_full_tuning_keeps_every_tensor(trained_parts, settings, vlm_folders):
    run = trained(settings("--learning_rate 1e-2", TOWERS if trained_parts == "all" else []))
    before, after = load_file(vlm_folders("qwen3_vl") / "model.safetensors"), weights(list_checkpoints(run)[-1])
    assert before.keys() == after.keys()
    moved = {name for name in after if not before[name].equal(after[name])}
    assert any("language_model" in name for name in moved)
    assert any("visual" in name for name in moved) == (trained_parts == "all")


@pytest.mark.slow
@pytest.mark.parametrize(
    "sharing",
    [
        "",
        "--deepspeed zero3",
        *(pytest.param(way, marks=pytest.mark.long) for way in ("--fsdp full_shard", "--deepspeed zero2")),
    ],
)
@pytest.mark.parametrize(
    "parts",
    [
        TOWERS,
        pytest.param("", marks=pytest.mark.long),
        pytest.param(f"{TOWERS} --tuner_type lora --lora_dropout 0 --full_towers true", marks=pytest.mark.long),
    ],
)
def test_two_processes_take_the_steps_of_one(settings, tmp_path, parts, sharing):
    """One of them gets a row without images."""
    flags = [parts.split(), "--per_device_train_batch_size 1 --dataset_shuffle false --max_steps 3"]
    flags += ["--optim sgd --weight_decay 0 --learning_rate 0.1 --max_grad_norm 10"]
    rows = [ROWS[0], ROWS[2], ROWS[1], ROWS[2], ROWS[2], ROWS[2]]
    own = ["--gradient_accumulation_steps 2", "--output_dir", str(tmp_path / "one")]
    one = trained(settings(*flags, *own, rows=rows))
    two = in_two(settings(*flags, sharing.split(), "--output_dir", str(tmp_path / "two"), rows=rows))
    for name in ("loss", "grad_norm"):
        assert logged(one, name) == pytest.approx(logged(two, name), rel=1e-5)
    ours, theirs = (weights(list_checkpoints(run)[-1]) for run in (two, one))
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) < 1e-6


LORA = "--tuner_type lora --init_weights gaussian --lora_dropout 0"
PACKED = "--packing true --max_length 512"
SHARED = [
    ("qwen3_vl", TOWERS),
    ("idefics3", LORA),
    ("qwen3_vl", f"{TOWERS} {PACKED}"),
    ("qwen3_vl", f"{TOWERS} {LORA} --gradient_checkpointing true"),
    ("qwen3_vl", "--streaming true"),
    ("qwen3_vl", f"{TOWERS} --fsdp full_shard"),
    ("qwen3_vl", f"{TOWERS} --deepspeed zero3"),
    ("qwen2_5_omni", f"{TOWERS} --deepspeed zero3"),
    *((family, TOWERS) for family in vlms.SHARED if family != "qwen3_vl"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "flags"), [SHARED[0], *(pytest.param(*one, marks=pytest.mark.long) for one in SHARED[1:])]
)
def test_processes_that_share_rows_take_the_steps_of_one(family, flags, settings, vlm_folders, tmp_path):
    """The last row has no image: of two steps, one has none at all."""
    steps = "--dataset_shuffle false --per_device_train_batch_size 2 --max_steps 2 --optim sgd --learning_rate 1"
    given = [flags, steps, "--weight_decay 0 --max_grad_norm 0 --lr_scheduler_type constant"]
    rows = [*ROWS[:2], ROWS[2], ROWS[2]] * 4
    whole = re.sub(" --(fsdp|deepspeed) [^ ]+", "", flags)
    one = trained(settings(whole, given[1:], "--output_dir", str(tmp_path / "one"), family=family, rows=rows))
    sharing = ["--sequence_parallel_size 2", "--output_dir", str(tmp_path / "two")]
    two = in_two(settings(*given, *sharing, family=family, rows=rows))
    for name in ("loss", "grad_norm"):
        assert logged(two, name) == pytest.approx(logged(one, name), rel=1e-5)
    ours, theirs = (weights(list_checkpoints(run)[-1]) for run in (two, one))
    start = {} if LORA in flags else load_file(vlm_folders(family) / "model.safetensors")
    assert ours.keys() == theirs.keys()
    moved = sum(float((theirs[name] - start.get(name, 0)).square().sum()) for name in theirs) ** 0.5
    gap = sum(float((theirs[name] - ours[name]).square().sum()) for name in theirs) ** 0.5
    assert moved > 0.1 and gap < 1e-5 * moved, (gap, moved)


def test_cached_rows_have_their_images_and_depend_on_the_processor(settings, tmp_path, monkeypatch):
    def rows_of(*flags):
        monkeypatch.setattr(image_store._store.get(), "prompts", {})
        trainer = trainer_of(settings("--dataset_num_proc 2", *flags), tmp_path / "run")
        return trainer.train_dataset["input_ids"], trainer.data_collator(list(trainer.train_dataset))

    (ids, batch), (again, cached) = rows_of(), rows_of()
    assert ids == again and batch["pixel_values"].equal(cached["pixel_values"])
    small, _ = rows_of("--max_pixels 2048")
    assert [len(row) for row in small] < [len(row) for row in ids]


def test_rows_with_images_are_split_off_for_evaluation(settings, tmp_path):
    trainer = trainer_of(settings("--split_dataset_ratio 0.3 --eval_steps 1"), tmp_path / "run")
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (2, 1)
    assert trainer.evaluate()["eval_loss"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", pytest.param("--dataloader_num_workers 2", marks=pytest.mark.long)])
def test_a_stream_takes_the_steps_of_a_table(flags, settings, tmp_path):
    flags = [TOWERS, flags.split(), "--dataset_shuffle false --per_device_train_batch_size 1 --max_steps 4"]
    table = trained(settings(*flags, "--output_dir", str(tmp_path / "table")))
    stream = trained(settings(*flags, "--streaming true", "--output_dir", str(tmp_path / "stream")))
    for name in ("loss", "grad_norm"):
        assert logged(stream, name) == logged(table, name)


def test_a_packed_stream_has_the_loss_of_plain_rows(settings, vlm_folders, tmp_path):
    flags = "--streaming true --packing true --max_length 512 --dataset_shuffle false"
    trainer = trainer_of(settings(flags), tmp_path / "run")
    packed = next(row for row in trainer.train_dataset if len(row["seq_lengths"]) > 1)
    loss = trainer.compute_loss(trainer.model, trainer.data_collator([packed])).detach()
    plain = Plain(vlm_folders("qwen3_vl"))
    with torch.no_grad():
        learnt = [plain_answers(plain, row) for row in ROWS]
    sizes = {len(ids): logprobs for ids, logprobs in learnt}
    expected = -torch.cat([sizes[length] for length in packed["seq_lengths"]]).mean()
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)


OWN = "--learning_rate 10 --vit_lr 2 --aligner_lr 5"
PLAIN_STEP = "--optim sgd --weight_decay 0 --lr_scheduler_type constant --max_grad_norm 0 --max_steps 1"
RATES = {"llm": 10, "vit": 2, "aligner": 5}


@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("idefics3", marks=pytest.mark.long)])
def test_each_part_moves_by_its_rate(family, settings, vlm_folders, tmp_path):
    trainer = trainer_of(settings(TOWERS, OWN, PLAIN_STEP, family=family), tmp_path / "run")
    trainer.train()
    plain = Plain(vlm_folders(family))
    plain_loss(plain).backward()
    parts, moved = parts_of_parameters(plain.model), dict(trainer.model.named_parameters())
    gaps = Counter()
    norms = Counter()
    for name, parameter in plain.model.named_parameters():
        if parameter.grad is not None:
            step, expected = moved[name].detach() - parameter.detach(), -RATES[parts[name]] * parameter.grad
            gaps[parts[name]] += float((step - expected).square().sum())
            norms[parts[name]] += float(expected.square().sum())
    assert set(norms) == set(RATES)
    assert all(gaps[part] < 1e-10 * norms[part] for part in RATES)
    assert trainer.state.log_history[0]["learning_rate"] == RATES["llm"]


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_cpu"])
def test_groups_keep_the_settings_of_the_optimizer(optim, settings, tmp_path):
    flags = f"--vit_lr 1e-3 --learning_rate 1e-2 --weight_decay 0.3 --optim {optim}"
    trainer = trainer_of(settings(TOWERS, flags), tmp_path / "run")
    parts = parts_of_parameters(trainer.model)
    named = {parameter: name for name, parameter in trainer.model.named_parameters()}
    found = [
        (group["lr"], group["weight_decay"], {parts[named[one]] for one in group["params"]})
        for group in trainer.create_optimizer().param_groups
    ]
    others, tower = {"llm", "aligner"}, {"vit"}
    assert found == [(1e-2, 0.3, others), (1e-2, 0.0, others), (1e-3, 0.3, tower), (1e-3, 0.0, tower)]


def test_an_adapter_has_groups_too(settings):
    args = settings(TOWERS, OWN, "--tuner_type lora").args
    policy = load_policy(args)
    (line,) = Rates.of(args).lines(policy, args)
    parts = parts_of_parameters(transformers_model(policy))
    sizes = Counter()
    for name, one in transformers_model(policy).named_parameters():
        sizes[parts[name]] += one.numel() * one.requires_grad
    assert line == "learning rates: " + ", ".join(
        f"{part} {rate:g} ({sizes[part]} parameters)" for part, rate in RATES.items()
    )


def test_the_rate_of_a_part_that_is_frozen_is_refused(settings):
    args = settings("--freeze_vit false --aligner_lr 1e-3").args
    with pytest.raises(
        ConfigError, match=r"--aligner_lr: 0\.001: nothing is trained there; use --freeze_aligner false"
    ):
        Rates.of(args).lines(load_policy(args), args)


def computed(trainer):
    """How often a block of the tower and one of the language model are computed in a step."""
    calls = Counter()
    for name, module in trainer.model.named_modules():
        if name.endswith(("visual.blocks.0.mlp", "layers.0.mlp")):
            module.register_forward_pre_hook(lambda *_, name=name: calls.update([name.split(".")[1]]))
    trainer.train()
    return dict(calls)


@pytest.mark.parametrize(("model", "tower"), [(True, False), (False, True), (True, None)])
def test_a_tower_is_computed_again_by_itself(model, tower, settings, tmp_path):
    given = "" if tower is None else f"--vit_gradient_checkpointing {str(tower).lower()}"
    flags = [TOWERS, PLAIN_STEP, "--gradient_checkpointing", str(model).lower(), given.split()]
    trainer = trainer_of(settings(*flags), tmp_path / "run")
    assert computed(trainer) == {"visual": 1 + (model if tower is None else tower), "language_model": 1 + model}
    usual = trainer_of(settings(TOWERS, PLAIN_STEP), tmp_path / "usual")
    usual.train()
    assert all(
        one.equal(other) for one, other in zip(trainer.model.parameters(), usual.model.parameters(), strict=True)
    )
    assert trainer.model.is_gradient_checkpointing == model


def plain_name(name):
    """Of a parameter that is trained in full beside an adapter, without the adapter."""
    return name.removeprefix("base_model.model.").replace("modules_to_save.default.", "")


@pytest.mark.parametrize(
    "family", [one if one == "qwen3_vl" else pytest.param(one, marks=pytest.mark.long) for one in vlms.FAMILIES]
)
def test_towers_are_trained_in_full_beside_an_adapter(family, settings, vlm_folders, tmp_path, capsys):
    """Their gradients are those of plain rows, as the adapter changes nothing yet; a merge keeps what they learn."""
    resolved = settings("--tuner_type lora_llm --lora_dropout 0 --vit_lr 1e-2 --aligner_lr 1e-2", family=family)
    assert (resolved.args.tuner_type, resolved.args.freeze_vit, resolved.args.freeze_aligner) == ("lora", False, False)
    trainer = trainer_of(resolved, tmp_path / "run")
    trainer.compute_loss(trainer.model, trainer.data_collator(list(trainer.train_dataset))).backward()
    plain = Plain(vlm_folders(family))
    plain_loss(plain).backward()
    parts = parts_of_parameters(plain.model)
    expected = {
        name: one.grad
        for name, one in plain.model.named_parameters()
        if one.grad is not None and parts[name] != "llm" and not name.endswith("image_newline")
    }
    found = {
        plain_name(name): one.grad
        for name, one in trainer.model.named_parameters()
        if one.grad is not None and "lora_" not in name
    }
    assert found.keys() == expected.keys()
    gap = sum(float((found[name] - grad).square().sum()) for name, grad in expected.items()) ** 0.5
    assert gap < 1e-5 * sum(float(grad.square().sum()) for grad in expected.values()) ** 0.5
    trainer.train()
    merged, last = tmp_path / "merged", list_checkpoints(tmp_path / "run")[-1]
    assert main(["merge-lora", "--adapters", str(last), "--output_dir", str(merged)]) == 0
    after, own = dict(Plain(merged).model.named_parameters()), dict(trainer.model.named_parameters())
    assert all(after[plain_name(name)].equal(one) for name, one in own.items() if plain_name(name) in found)
    assert {parts[name] for name, one in plain.model.named_parameters() if not one.equal(after[name])} == set(RATES)
