"""A teacher behind a server: scores of prompts over HTTP, their size, and runs that are those with a local teacher."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from server_parts import KEY, LocalServer
from transformers import AutoModelForCausalLM
from trl_runs import argv_of, chats, logged, trained, written

from swift.arguments import parse
from swift.errors import ConfigError, EngineError
from swift.models import load_chat
from swift.rollout.scores import arrays_of
from swift.trainers.gkd.teacher_server import TeacherServer

IDS = [5, 17, 40, 41, 42, 43, 99, 7, 8, 9]
VOCABULARY = 151_936


@pytest.fixture
def teacher(server):
    one = TeacherServer(server.url, top_k=5, timeout_s=5.0, api_key=KEY)
    yield one
    one.close()


@pytest.fixture
def template(nano_folders):
    return load_chat(parse("sft", ["--model", str(nano_folders["qwen2"]), "--dataset", "d"], {}).args)


def logprobs_of(folder, ids):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)


@pytest.mark.parametrize("compact", [True, False], ids=["swift", "vLLM's form"])
def test_scores_are_those_of_the_logits(teacher, template, nano_folders, compact):
    line = teacher.check(template, [IDS])
    assert "its 5 likeliest tokens" in line and teacher._is_swift
    teacher._is_swift = compact
    ids, logprobs, own = arrays_of(teacher.score_now(IDS[:4], IDS[4:]))
    expected = logprobs_of(nano_folders["qwen2"], IDS)[3:]
    top, places = expected.topk(5)
    assert np.allclose(logprobs, top, atol=1e-5) and np.array_equal(ids, places)
    assert np.allclose(own, expected[torch.arange(6), IDS[4:]], atol=1e-5)


def test_several_requests_share_passes_and_stay_apart(teacher, template, nano_folders):
    teacher.check(template, [])
    pairs = [(IDS[:first], IDS[first:]) for first in range(1, 9)] * 3
    for (prompt, _), scores in zip(pairs, teacher.score_all(pairs), strict=True):
        expected = logprobs_of(nano_folders["qwen2"], IDS)[len(prompt) - 1 :]
        assert np.allclose(arrays_of(scores)[1], expected.topk(5)[0], atol=1e-5)


@pytest.mark.parametrize(("compact", "least"), [(True, 400), (False, 50)])
def test_replies_are_at_least_50_times_smaller_than_logits(server, template, compact, least):
    """Of 16 bits and the vocabulary of Qwen2.5; 64 likeliest tokens."""
    teacher = TeacherServer(server.url, top_k=64, timeout_s=5.0, api_key=KEY)
    teacher.check(template, [])
    teacher._is_swift = compact
    teacher.score_now(IDS[:1], (IDS * 30)[1:])
    size = teacher.drain_metrics()["distillation/bytes_per_token"]
    assert 2 * VOCABULARY / size > least
    teacher.close()


def test_a_server_with_another_tokenizer_or_without_scores_is_refused(teacher, template, server, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(type(template), "encode_text", lambda self, text: [1, 2, 3])
        with pytest.raises(ConfigError, match=r"--teacher_model_server: .*serve a model with the tokenizer of --model"):
            teacher.check(template, [])
    many = TeacherServer(server.url, top_k=2000, timeout_s=5.0, api_key=KEY)
    with pytest.raises(ConfigError, match=r"prompt_logprobs.*vLLM with --max-logprobs 2000"):
        many.check(template, [])
    nobody = TeacherServer("http://127.0.0.1:9", top_k=5, timeout_s=0.1)
    with pytest.raises(EngineError, match=r"no answer within 0.1 s \(--vllm_server_timeout\)"):
        nobody.check(template, [])


def test_a_lost_server_is_asked_again_until_it_is_back(nano_folders, template):
    first = LocalServer(nano_folders["qwen2"], key=KEY)
    port = int(first.url.rpartition(":")[2])
    teacher = TeacherServer(first.url, top_k=5, timeout_s=60.0, api_key=KEY)
    teacher.check(template, [])
    before = teacher.score_now(IDS[:4], IDS[4:])
    first.stop()
    found = []
    asking = threading.Thread(target=lambda: found.append(teacher.score_now(IDS[:4], IDS[4:])))
    asking.start()
    time.sleep(0.5)
    assert not found
    second = LocalServer(nano_folders["qwen2"], key=KEY, port=port)
    asking.join(60)
    assert found == [before]
    teacher.close()
    second.stop()


@pytest.fixture
def settings(nano_folders, tmp_path):
    def resolved(*flags, method="gkd"):
        data = written(tmp_path / "chats.jsonl", chats(16))
        own = {
            "--rlhf_type": method, "--model": nano_folders["qwen3"], "--dataset": data,
            "--max_completion_length": 4, "--output_dir": tmp_path / "out", "--per_device_train_batch_size": 4,
            "--max_steps": 3, "--temperature": 1.0,
        }  # fmt: skip
        return parse("rlhf", argv_of(own, *flags), {"SWIFT_API_KEY": KEY})

    return resolved


@pytest.mark.parametrize("beta", [0, 0.5, 1])
def test_a_run_is_that_with_a_local_teacher(settings, server, nano_folders, tmp_path, monkeypatch, beta):
    monkeypatch.setenv("SWIFT_API_KEY", KEY)
    val = written(tmp_path / "val.jsonl", list(chats(20))[16:])
    flags = f"--gkd_logits_topk 8 --beta {beta} --lmbda 0.6 --val_dataset {val} --eval_steps 2"
    local = trained(settings(flags, f"--teacher_model {nano_folders['qwen2']}"))
    remote = trained(settings(flags, f"--teacher_server {server.url}"))
    names = ["loss", "eval_loss", *(["distillation/error_bound_mean"] if beta < 1 else [])]
    for name in names:
        assert logged(remote, name) == pytest.approx(logged(local, name), rel=1e-4)
        assert min(logged(local, name).values()) > 1e-4
    assert logged(remote, "distillation/bytes_per_token")[1, 1] > 0
    assert logged(remote, "distillation/error_bound_mean").keys() == ({(1, 1), (1, 2), (1, 3)} if beta < 1 else set())


def test_answers_of_the_teacher_come_from_the_server(settings, server, monkeypatch):
    monkeypatch.setenv("SWIFT_API_KEY", KEY)
    flags = "--gkd_logits_topk 8 --lmbda 0 --seq_kd true --max_steps 1"
    run_dir = trained(settings(flags, f"--teacher_model_server {server.url}"))
    assert logged(run_dir, "distillation/given_frac")[1, 1] == 1 and logged(run_dir)[1, 1] > 0


def test_advantages_of_grpo_are_those_of_a_local_teacher(settings, server, nano_folders, monkeypatch):
    monkeypatch.setenv("SWIFT_API_KEY", KEY)
    flags = "--num_generations 1 --beta 0"
    local = trained(settings(flags, f"--teacher_model {nano_folders['qwen2']}", method="grpo"))
    remote = trained(settings(flags, f"--teacher_model_server {server.url}", method="grpo"))
    assert logged(remote, "teacher_kl") == pytest.approx(logged(local, "teacher_kl"), rel=1e-4)
    assert logged(remote, "grad_norm") == pytest.approx(logged(local, "grad_norm"), rel=1e-3)


@pytest.mark.parametrize(
    ("method", "flags", "problem"),
    [
        ("gkd", "", "there only the likeliest tokens are told; give --gkd_logits_topk, e.g. 64"),
        ("gkd", "--gkd_logits_topk 8 --teacher_model m", "there is --teacher_model m; give one of the two"),
        (
            "grpo",
            "--num_generations 1 --temperature 0.9",
            "--temperature: 0.9: a teacher elsewhere gives log-probs at",
        ),
    ],
)
def test_what_a_server_cannot_do_is_refused(settings, method, flags, problem):
    with pytest.raises(ConfigError, match=problem):
        settings(f"--teacher_model_server http://t:8000 {flags}", method=method)
