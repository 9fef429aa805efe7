"""The first step is that of TRL's SFTTrainer on the same rows, packed and not; packed rows do not see each other."""

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from oracle import first_step
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer, pack_dataset
from trl_runs import trainer_of

from swift.arguments import parse
from swift.errors import ConfigError
from swift.trainers.sft_packing import Packing, as_rows, keeps_apart

BATCH = "--dataset_shuffle false --per_device_train_batch_size 4"


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """A file of texts of 3 to 40 characters."""
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    texts = ["abcdefgh"[: 3 + n % 5] * (1 + n % 4) for n in range(16)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def bare(argv, folder, **options):
    """TRL's trainer as its users make it, given the rows of the file."""
    args = dict(zip(argv[::2], argv[1::2], strict=True))
    model = AutoModelForCausalLM.from_pretrained(args["--model"], dtype=torch.float32)
    rows = Dataset.from_list([json.loads(line) for line in Path(args["--dataset"]).read_text().splitlines()])
    config = SFTConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=False,
        per_device_train_batch_size=4, train_sampling_strategy="sequential", **options,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(args["--model"])
    return SFTTrainer(model=model, args=config, train_dataset=rows, processing_class=tokenizer)


CASES = {
    "assistant turns": ("sft", (), {"assistant_only_loss": True}),
    "all tokens": ("sft", "--loss_scale all", {}),
    "dft": ("sft", "--loss_type dft", {"assistant_only_loss": True, "loss_type": "dft"}),
    "packed": (
        "sft",
        "--packing true --max_length 64",
        {"assistant_only_loss": True, "packing": True, "max_length": 64},
    ),
    "padding_free": ("sft", "--padding_free true --assistant_only_loss false", {"padding_free": True}),
    "documents": ("pt", (), {}),
    "packed documents": (
        "pt",
        "--packing true --packing_strategy bfd_split --max_length 24",
        {"packing": True, "packing_strategy": "bfd_split", "max_length": 24},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_of_the_first_step_are_trls(sft_argv, documents, tmp_path, case):
    mode, flags, options = CASES[case]
    rows = f"--dataset {documents}" if mode == "pt" else ()
    argv = sft_argv(rows, flags, BATCH)
    expected, theirs = first_step(bare(argv, tmp_path / "trl", **{"max_length": None, **options}))
    found, grads = first_step(trainer_of(parse(mode, argv, {}), tmp_path / "swift"))
    assert found == pytest.approx(expected, abs=1e-6)
    assert grads.keys() == theirs.keys()
    assert all(torch.allclose(grads[name], theirs[name], atol=1e-6) for name in grads)
    assert any(grad.abs().max() > 1e-4 for grad in grads.values())


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_what_stands_in_one_document_changes_no_loss_in_another(sft_argv, documents, tmp_path, strategy):
    argv = sft_argv(f"--dataset {documents} --max_length 60 --packing true", "--packing_strategy", strategy, BATCH)
    trainer = trainer_of(parse("pt", argv, {}), tmp_path)
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    ends = batch["cu_seq_lens_q"].tolist()
    assert len(ends) > 5, "several documents in a row"
    first = slice(ends[0], ends[1])

    def logprobs(ids):
        inputs = {**batch, "input_ids": ids}
        seen = {}
        trainer.model.register_forward_hook(lambda module, args, output: seen.update(output))
        trainer.compute_loss(trainer.model, inputs)
        return seen["log_probs"].flatten()

    changed = batch["input_ids"].clone()
    changed[0, first] = torch.randint(5, 90, (ends[1],))
    before, after = logprobs(batch["input_ids"]), logprobs(changed)
    num = after.numel() - (batch["input_ids"].shape[1] - ends[1])
    assert torch.equal(before[num:], after[num:])
    assert not torch.equal(before[:num], after[:num])


def test_wrapped_rows_are_those_of_trl_and_know_where_documents_begin():
    ids = [[n] * (n % 7 + 1) for n in range(40)]
    table = Dataset.from_dict({"input_ids": ids, "labels": ids})
    packed, theirs = Packing("wrapped", 8)(table), pack_dataset(table, 8, "wrapped")
    assert packed["input_ids"][:] == theirs["input_ids"][:]
    for row, lengths in zip(packed["input_ids"], packed["seq_lengths"], strict=True):
        assert [row.count(token) for token in dict.fromkeys(row)] == lengths


def test_a_model_that_cannot_keep_the_rows_of_a_stream_apart_gets_them_padded(small_model, caplog):
    args = parse("sft", ["--model", "m", "--dataset", "d", "--packing", "true"], {}).args
    assert not keeps_apart(small_model("gpt2"), args)
    assert "no rotary positions; each batch is computed as padded rows, with the same loss" in caplog.text
    args.sequence_parallel_size = 2
    with pytest.raises(ConfigError, match=r"--packing: true: .*no rotary positions, nor shared by processes"):
        keeps_apart(small_model("gpt2"), args)
    stream = {"input_ids": torch.tensor([[1, 2, 3, 4, 5, 0]]), "labels": torch.tensor([[-100, 2, -100, 4, 5, -100]])}
    rows = as_rows({**stream, "position_ids": stream["input_ids"]}, torch.tensor([0, 2, 5]))
    assert {name: row.tolist() for name, row in rows.items()} == {
        "input_ids": [[1, 2, 0], [3, 4, 5]], "labels": [[-100, 2, -100], [-100, 4, 5]],
        "attention_mask": [[1, 1, 0], [1, 1, 1]],
    }  # fmt: skip
