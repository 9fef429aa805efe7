"""Which vLLM is accepted, and what it is told; vLLM itself is not needed here."""

from __future__ import annotations

import os
import re
import sys
import types
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from swift.arguments import MODES
from swift.errors import ConfigError, EngineError, ResourceError
from swift.rollout.engines.expected_weights import ExpectedWeights, kv_token_bytes
from swift.rollout.engines.process import same_environment
from swift.rollout.engines.spec import EngineSpec
from swift.rollout.engines.vllm import settings, start, versions
from swift.rollout.engines.vllm.settings import CPU_KV_BYTES, CPU_KV_MINIMUM
from swift.rollout.engines.vllm.start import SharedGroups, remove_segments
from swift.rollout.engines.vllm.weights import adapter_rank
from swift.rollout.weights.base import AdapterWeights, TensorInfo


def spec(**changes):
    return EngineSpec(backend="vllm", model="m", **changes)


# --- versions -----------------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch):
    """Pretends that a version of vLLM is installed."""

    def pretend(version):
        monkeypatch.setattr(versions, "installed_version", lambda: version)

    return pretend


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0", "0.32.0+cpu", "0.32.1.dev3"])
def test_supported_versions(installed, version):
    installed(version)
    assert versions.require_version() == version


def assert_every_mode_has_the_flags_of(error):
    for mode in ("infer", "rlhf", "rollout"):
        assert set(re.findall(r"--(\w+)", str(error))) <= {one.name for one in fields(MODES[mode])}, mode


@pytest.mark.parametrize("version", ["0.25.9", "0.33.0", "1.0.0", "dev"])
def test_other_versions_are_refused_with_the_range(installed, version):
    installed(version)
    with pytest.raises(
        ResourceError, match=rf"vllm: {version} is not supported; .*.0.26 to 0.32, or --infer"
    ) as refused:
        versions.require_version()
    assert_every_mode_has_the_flags_of(refused.value)


def test_the_experts_of_tokens_come_from_a_newer_vllm_on_a_gpu():
    assert versions.no_routes("0.30.0", on_cpu=False) == versions.no_routes("0.32.1+cu130", on_cpu=False) == ""
    for version in ("0.26.0", "0.29.9", "dev"):
        assert versions.no_routes(version, on_cpu=False).startswith(f"vLLM {version} does not return the experts")
    assert versions.no_routes("0.32.0", on_cpu=True).startswith("vLLM returns no experts on a CPU")


@pytest.mark.parametrize("asked", [False, True])
def test_vllm_is_told_to_return_experts_if_they_are_replayed(asked):
    told = settings.engine_arguments(
        spec(returns_routes=asked, devices=("cuda:0",)), on_cpu=False, limit=64, kv_bytes=None, executor="uni"
    )
    assert told.get("enable_return_routed_experts", False) == asked
    config = SimpleNamespace(get_text_config=SimpleNamespace)
    old = SimpleNamespace(version="0.26.0", EngineArgs=EngineSpec)
    with pytest.raises(ConfigError, match=r"--moe_router_replay: rollout: vLLM 0\.26\.0 does not return the experts"):
        start.arguments_for(
            old,
            spec(returns_routes=True),
            config,
            "uni",
            on_cpu=False,
        )


def test_a_missing_vllm_is_said_in_one_line(installed):
    installed(None)
    with pytest.raises(ResourceError) as refused:
        versions.require_version()
    assert refused.value.exit_code == 3
    (line,) = refused.value.problems
    assert "No module named 'vllm'" in line and "--infer_backend transformers" in line


@pytest.fixture
def fake_vllm(monkeypatch, installed):
    """A package that has exactly the names in use."""
    installed("0.32.0")

    for place in versions.SYMBOLS.values():
        module, _, path = place.partition(":")
        made = sys.modules.get(module)
        if not getattr(made, "fake", False):
            made = types.ModuleType(module)
            made.fake = True
            monkeypatch.setitem(sys.modules, module, made)
        for part in path.split("."):
            if not hasattr(made, part):
                setattr(made, part, type(part, (), {}))
            made = getattr(made, part)
    versions.load_vllm.cache_clear()
    yield sys.modules
    versions.load_vllm.cache_clear()


def test_a_name_that_moved_is_refused_by_name(fake_vllm):
    delattr(fake_vllm["vllm.model_executor.model_loader.reload"], "finalize_layerwise_reload")
    with pytest.raises(ResourceError, match=r"vllm: 0.32.0 has no vllm\..*\.finalize_layerwise_reload; install"):
        versions.load_vllm()


def test_a_vllm_that_does_not_import_is_refused_with_the_reason(installed, monkeypatch):
    installed("0.32.0")
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", None)
    versions.load_vllm.cache_clear()
    with pytest.raises(ResourceError, match="does not import"):
        versions.load_vllm()


def test_logs_are_quiet_unless_asked_for(monkeypatch):
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    with versions.quiet_logs():
        assert os.environ["VLLM_LOGGING_LEVEL"] == "ERROR"
    assert "VLLM_LOGGING_LEVEL" not in os.environ
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    with versions.quiet_logs():
        assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"


# --- settings -----------------------------------------------------------------------------------------------


def test_a_token_of_the_cache_is_keys_and_values_of_all_layers():
    config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3, hidden_size=32)
    assert kv_token_bytes(config, width=4, ranks=1) == 2 * 3 * 2 * 8 * 4
    assert kv_token_bytes(config, width=2, ranks=2) == 2 * 3 * 1 * 8 * 2
    assert kv_token_bytes(SimpleNamespace(), width=4, ranks=1) == 0
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "num_hidden_layers": 3}
    gemma = AutoConfig.for_model("gemma4_text", **sizes, head_dim=8, global_head_dim=16)
    assert kv_token_bytes(gemma, width=4) == 2 * 2 * (8 + 8 + 16) * 4, "the last layer has wider heads"


def test_the_cpu_cache_holds_every_sequence_unless_that_is_too_much():
    free = 100 << 30
    assert settings.cpu_kv_bytes(spec(max_num_seqs=8), 1024, 1024, free) == max(CPU_KV_MINIMUM, 8 * (1024 + 32) * 1024)
    assert settings.cpu_kv_bytes(spec(max_num_seqs=4096), 1 << 20, 1024, free) == CPU_KV_BYTES
    assert settings.cpu_kv_bytes(spec(max_num_seqs=1), 1, 32, free) == CPU_KV_MINIMUM


@pytest.mark.parametrize(("on_cpu", "given", "told"), [(False, None, None), (False, 8, 8), (True, None, 256)])
def test_the_number_of_sequences_is_vllms_own_unless_it_is_given(on_cpu, given, told):
    arguments = settings.engine_arguments(
        spec(max_num_seqs=given), on_cpu=on_cpu, limit=64, kv_bytes=1 << 20, executor="uni"
    )
    assert arguments.get("max_num_seqs") == told


def test_vllm_takes_the_budgets_of_its_offline_class(monkeypatch):
    """Those of a server, its default, hold a prefill to 2,048 tokens on an H100."""

    class Arguments:
        def __init__(self, **arguments):
            pass

        def create_engine_config(self, usage_context):
            raise ConfigError(f"asked with {usage_context}")

    vllm = SimpleNamespace(EngineArgs=Arguments, UsageContext=SimpleNamespace(LLM_CLASS="LLM_CLASS"))
    monkeypatch.setattr(start, "arguments_for", lambda *_, **__: {})
    with pytest.raises(ConfigError, match="asked with LLM_CLASS"):
        start.start(vllm, spec(), None, on_cpu=False)


def test_little_memory_makes_a_small_cache_that_still_holds_one_sequence():
    small = settings.cpu_kv_bytes(spec(memory_share=0.5), 1 << 10, 1024, 1 << 30)
    assert small == int((1 << 30) * 0.5 * 0.25)
    one = settings.cpu_kv_bytes(spec(max_model_len=4096), 1 << 16, 4096, 1 << 30)
    assert one == (4096 + 32) << 16


def arguments(on_cpu=True, **changes):
    return settings.engine_arguments(
        spec(**changes), on_cpu=on_cpu, limit=512, kv_bytes=1 << 20 if on_cpu else None, executor="uni"
    )


def test_on_a_cpu_prompts_are_never_cut_and_blocks_are_small():
    told = arguments(max_model_len=512)
    assert (told["enable_chunked_prefill"], told["block_size"], told["enforce_eager"]) == (False, 32, True)
    assert told["max_num_batched_tokens"] >= 512
    assert told["kv_cache_memory_bytes"] == 1 << 20
    assert "enable_sleep_mode" not in told


@pytest.mark.parametrize(
    ("types", "on_cpu", "kept"),
    [
        ((), True, True),
        (["full_attention", "sliding_attention"], True, True),
        (["linear_attention", "full_attention"], True, False),
        (["linear_attention", "full_attention"], False, True),
    ],
)
def test_prefixes_of_states_are_not_kept_where_prompts_are_never_cut(types, on_cpu, kept):
    """vLLM refuses a hybrid model with a prefix cache and without chunked prefill."""
    told = settings.engine_arguments(
        spec(), on_cpu=on_cpu, limit=512, kv_bytes=1 << 20, executor="uni", layer_types=types
    )
    assert told["enable_prefix_caching"] == kept


def test_on_a_gpu_vllm_sizes_its_cache_and_may_sleep():
    told = arguments(on_cpu=False, memory_share=0.4, sleep=True)
    assert (told["gpu_memory_utilization"], told["enable_sleep_mode"], told["enforce_eager"]) == (0.4, True, False)
    assert not {"block_size", "enable_chunked_prefill", "kv_cache_memory_bytes"} & set(told)


def test_the_users_arguments_win_in_either_spelling():
    told = arguments(engine_kwargs={"block-size": 64, "seed": 9})
    assert (told["block_size"], told["seed"]) == (64, 9)


@pytest.mark.parametrize(("rank", "held"), [(1, 1), (2, 8), (8, 8), (9, 16), (257, 320), (4096, 512)])
def test_ranks_are_rounded_up_to_what_vllm_knows(rank, held):
    assert versions.lora_rank_at_least(rank) == held


def test_processes_of_vllm_get_the_cores_and_devices_of_the_spec(monkeypatch):
    two = {"tensor_parallel_size": 2}
    bound = start.environment(spec(cores=(4, 5, 6, 7), **two), "mp")
    assert bound["VLLM_CPU_OMP_THREADS_BIND"] == "4,5|6,7"
    assert start.environment(spec(cores=(4,), **two), "mp")["VLLM_CPU_OMP_THREADS_BIND"] == "4|4"
    assert start.environment(spec(cores=(4,)), "uni")["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    on_gpu = spec(devices=("cuda:2", "cuda:3"), **two)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert start.environment(on_gpu, "mp")["CUDA_VISIBLE_DEVICES"] == "2,3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,5,7")
    assert start.environment(on_gpu, "mp")["CUDA_VISIBLE_DEVICES"] == "5,7"
    assert start.environment(on_gpu, "mp")["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ValueError("To serve at least one request, 1 GiB KV cache is needed"), ResourceError, "--vllm_max_model_len"),
        (torch.OutOfMemoryError("CUDA out of memory"), ResourceError, "--vllm_gpu_memory_utilization"),
        (
            ValueError(
                "Free memory on device cuda:0 (1/80 GiB) on startup is less than desired GPU memory utilization"
            ),
            ResourceError,
            "; lower --vllm_gpu_memory_utilization to the share that is free",
        ),
        (AssertionError("Expandable segments are not compatible with memory pool"), ConfigError, "; unset it"),
        (RuntimeError("create shm in SHMManager failed. errno: 17"), ResourceError, "remove /dev/shm/*-cpushm_*"),
        (ValueError("head size"), ConfigError, "--model: m: vLLM refuses it (head size)"),
        (AttributeError("no init_cpu_memory_env"), EngineError, "did not start (AttributeError"),
    ],
)
def test_a_failure_to_start_is_told_apart(error, kind, words):
    told = start._start_error(spec(), error)
    assert type(told) is kind and words in str(told)
    assert_every_mode_has_the_flags_of(told)


def test_a_failed_check_of_vllms_settings_is_told_with_its_reason():
    class Wrong(ValueError):
        """As pydantic's: its text begins with the number of errors."""

        def errors(self):
            return [{"msg": "Value error, head size 7"}]

    told = start._start_error(spec(), Wrong("1 validation error for VllmConfig\n  Value error, head size 7"))
    assert "vLLM refuses it (Value error, head size 7)" in str(told)


# --- what an update must bring ------------------------------------------------------------------------------


def checkpoint(folder, tensors, *, tied=False, model_class=None):
    save_file(tensors, folder / "model.safetensors")
    return ExpectedWeights.of_checkpoint(folder, model_class=model_class, tied=tied)


def infos(**shapes):
    return [TensorInfo(name.replace("__", "."), "float32", shape) for name, shape in shapes.items()]


def test_an_update_names_what_is_missing_unknown_or_of_another_shape(tmp_path):
    expected = checkpoint(tmp_path, {"a.weight": torch.zeros(2, 3), "b.weight": torch.zeros(4)})
    assert expected.check(infos(a__weight=(2, 3), b__weight=(4,))) == []
    assert expected.check(infos(a__weight=(2, 3), b__weight=(4,)) * 2)[0] == "a.weight comes twice"
    assert expected.check(infos(a__weight=(3, 2), c__weight=(1,))) == [
        "a.weight has shape [3, 2], the engine's [2, 3]",
        "c.weight is not one of the model's (nearest: b.weight)",
        "b.weight is missing",
    ]


def test_the_tied_head_may_come_or_not(tmp_path):
    expected = checkpoint(tmp_path, {"model.embed_tokens.weight": torch.zeros(7, 3)}, tied=True)
    with_head = infos(model__embed_tokens__weight=(7, 3), lm_head__weight=(7, 3))
    assert (expected.check(with_head), expected.lacks_head(with_head)) == ([], False)
    assert (expected.check(with_head[:1]), expected.lacks_head(with_head[:1])) == ([], True)
    assert expected.check(infos(model__embed_tokens__weight=(7, 3), lm_head__weight=(3, 7))) != []
    assert expected.numbers == 21


def test_an_untied_head_must_come(tmp_path):
    expected = checkpoint(
        tmp_path, {"model.embed_tokens.weight": torch.zeros(7, 3), "lm_head.weight": torch.zeros(7, 3)}
    )
    assert expected.check(infos(model__embed_tokens__weight=(7, 3))) == ["lm_head.weight is missing"]


def test_the_decoders_prefix_may_be_written_or_not(tmp_path):
    """GPT-2's first checkpoints have `wte.weight`, those that transformers saves `transformer.wte.weight`."""
    model_class = SimpleNamespace(base_model_prefix="transformer")
    expected = checkpoint(tmp_path, {"wte.weight": torch.zeros(7, 3)}, tied=True, model_class=model_class)
    assert expected.check(infos(transformer__wte__weight=(7, 3))) == []
    assert expected.is_embedding("transformer.wte.weight")


def test_tensors_that_no_model_reads_are_not_asked_for(tmp_path):
    model_class = SimpleNamespace(base_model_prefix="model", _keys_to_ignore_on_load_unexpected=[r"^mtp\."])
    tensors = {"a.weight": torch.zeros(2), "x.rotary_emb.inv_freq": torch.zeros(2), "mtp.weight": torch.zeros(2)}
    assert checkpoint(tmp_path, tensors, model_class=model_class).check(infos(a__weight=(2,))) == []


def test_a_folder_without_safetensors_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no safetensors files"):
        ExpectedWeights.of_checkpoint(tmp_path, model_class=None, tied=False)


def test_of_several_sets_of_files_the_index_counts(tmp_path):
    save_file({"a.weight": torch.zeros(2)}, tmp_path / "model-00001-of-00001.safetensors")
    save_file({"other": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    index = '{"weight_map": {"a.weight": "model-00001-of-00001.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert set(ExpectedWeights.of_checkpoint(tmp_path, model_class=None, tied=False).shapes) == {"a.weight"}


def test_an_adapter_must_belong_to_the_model(tmp_path):
    expected = checkpoint(tmp_path, {"q.weight": torch.zeros(6, 4), "experts.0.up.weight": torch.zeros(2, 2)})

    def problems(**tensors):
        named = {f"base_model.model.{name.replace('__', '.')}": torch.zeros(shape) for name, shape in tensors.items()}
        return expected.check_adapter(AdapterWeights({"r": 2}, named))

    assert problems(q__lora_A__weight=(2, 4), q__lora_B__weight=(6, 2), experts__lora_A__weight=(9, 9)) == []
    assert "belongs to no layer" in problems(k__lora_A__weight=(2, 4))[0]
    assert "has shape [2, 5], its layer [6, 4]" in problems(q__lora_A__weight=(2, 5))[0]
    assert "the only thing that vLLM takes" in problems(q__modules_to_save__weight=(6, 4))[0]


def test_the_rank_of_an_adapter_is_its_largest():
    tensors = {
        "x.lora_A.weight": torch.zeros(4, 9),
        "y.lora_A.weight": torch.zeros(7, 9),
        "x.lora_B.weight": torch.zeros(9, 4),
    }
    assert adapter_rank(AdapterWeights({"r": 4}, tensors)) == 7


# --- the process --------------------------------------------------------------------------------------------


def test_the_environment_is_afterwards_what_it_was(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    set_num_threads = torch.set_num_threads
    with same_environment({"VLLM_X": "1"}):
        assert os.environ["VLLM_X"] == "1"
        os.environ["LOCAL_WORLD_SIZE"] = "1"
        os.environ["LD_PRELOAD_X"] = "y"
        torch.set_num_threads = None
    assert (os.environ["LOCAL_WORLD_SIZE"], torch.set_num_threads) == ("2", set_num_threads)
    assert not {"VLLM_X", "LD_PRELOAD_X"} & set(os.environ)


def test_groups_end_with_the_last_engine_and_a_trainers_group_stays(monkeypatch):
    destroyed, exists = [], True
    monkeypatch.setattr("swift.rollout.engines.vllm.start.default_group_exists", lambda: exists)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda group=None: destroyed.append(group))
    shared = SharedGroups()
    own = SimpleNamespace()

    def destroy():
        torch.distributed.destroy_process_group(own)
        torch.distributed.destroy_process_group()

    shared.enter()
    shared.enter()
    shared.leave(destroy)
    assert destroyed == []
    shared.leave(destroy)
    assert destroyed == [own]
    exists = False
    shared.enter()
    shared.leave(destroy)
    assert destroyed == [own, own, None]


def test_only_the_named_segments_are_removed():
    from pathlib import Path

    folder = Path("/dev/shm")
    if not folder.is_dir():
        pytest.skip("no shared memory folder")
    mine, other = (folder / f"swift-test-{os.getpid()}-{name}-tp-cpushm_0" for name in ("a", "b"))
    try:
        mine.touch()
        other.touch()
        remove_segments([f"swift-test-{os.getpid()}-a"])
        assert (mine.exists(), other.exists()) == (False, True)
    finally:
        mine.unlink(missing_ok=True)
        other.unlink(missing_ok=True)
