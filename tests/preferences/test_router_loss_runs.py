"""`--router_aux_loss_coef` in preference methods: the load-balancing loss is added, and is off by default."""

from __future__ import annotations

import json

import pytest
from experts import ENGINE_SIZES

from swift.cli.main import main
from swift.models.tiny import build_tokenizer

pytestmark = pytest.mark.slow
ROWS = {
    "dpo": [{"prompt": f"{n}?", "chosen": "a" * n, "rejected": "b"} for n in range(1, 5)],
    "kto": [{"prompt": f"{n}?", "completion": "a" * n, "label": n % 2 == 0} for n in range(1, 5)],
}


@pytest.fixture(scope="module")
def mixture(small_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    small_model("qwen3_moe", **ENGINE_SIZES).save_pretrained(folder)  # its config has a coefficient of its own
    build_tokenizer(256).save_pretrained(folder)
    return folder


def first_step(mixture, folder, method, *words):
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS["kto" if method == "kto" else "dpo"]))
    command = (
        f"rlhf --rlhf_type {method} --model {mixture} --dataset {rows} --tuner_type full --max_steps 1 "
        "--per_device_train_batch_size 4 --logging_steps 1 --report_to none --add_version false "
        f"--output_dir {folder / 'run'}"
    )
    assert main([*command.split(), *words]) == 0
    return json.loads((folder / "run" / "logging.jsonl").read_text().splitlines()[0])


@pytest.mark.parametrize("method", ["dpo", "ipo", "kto"])
def test_the_loss_has_the_loss_of_the_routers_if_it_is_asked_for(mixture, tmp_path, method):
    (tmp_path / "plain").mkdir()
    (tmp_path / "balanced").mkdir()
    plain = first_step(mixture, tmp_path / "plain", method)
    balanced = first_step(mixture, tmp_path / "balanced", method, "--router_aux_loss_coef", "0.5")
    assert "aux_loss" not in plain and balanced["aux_loss"] >= 2
    assert balanced["loss"] == pytest.approx(plain["loss"] + 0.5 * balanced["aux_loss"], rel=1e-4)
