"""A teacher in a Ray actor: runs that are those with the teacher in process, and what is refused."""

from __future__ import annotations

import pytest
from trl_runs import logged, trained

from swift.cli.dry_run import dry_run_rlhf
from swift.errors import ConfigError


@pytest.mark.slow
@pytest.mark.long
def test_a_run_is_that_with_a_teacher_in_process(gkd, tmp_path):
    flags = "--gkd_logits_topk 8 --lmbda 0.5 --max_steps 3 --vllm_server_timeout 300"
    here = trained(gkd(flags, f"--output_dir {tmp_path / 'here'}"))
    there = trained(gkd(flags, f"--teacher_device cpu:0 --output_dir {tmp_path / 'there'}"))
    for name in ("loss", "distillation/error_bound_mean"):
        assert logged(there, name) == pytest.approx(logged(here, name), rel=1e-4)


@pytest.mark.parametrize(
    ("flags", "processes", "problem"),
    [
        ("", "1", "--teacher_device: cpu:0: there only the likeliest tokens are told; give --gkd_logits_topk"),
        ("--gkd_logits_topk 8", "2", "--teacher_device: cpu:0: each of 2 processes samples, and one drives the actors"),
    ],
)
def test_what_actors_cannot_do_is_refused(gkd, monkeypatch, flags, processes, problem):
    monkeypatch.setenv("NPROC_PER_NODE", processes)
    with pytest.raises(ConfigError, match=problem):
        dry_run_rlhf(gkd("--teacher_device cpu:0", flags))
