"""Keys of published configurations of Axolotl, TRL and ms-swift: what is in them is a fact, not a text."""

AXOLOTL_GRPO = {  # its page on GRPO, quick start
    "base_model": "Qwen/Qwen2.5-1.5B-Instruct", "rl": "grpo", "chat_template": "tokenizer_default",
    "vllm": {"host": "0.0.0.0", "port": 8000, "gpu_memory_utilization": 0.85, "dtype": "auto", "max_model_len": 2048},
    "adapter": "lora", "lora_r": 32, "lora_alpha": 64, "lora_target_linear": True,
    "trl": {
        "use_vllm": True, "use_data_producer": True, "vllm_server_host": "0.0.0.0", "vllm_server_port": 8000,
        "vllm_server_timeout": 300, "vllm_lora_sync": True, "num_generations": 8, "max_completion_length": 512,
        "temperature": 0.7, "reward_funcs": ["rewards.accuracy_reward", "rewards.format_reward"],
        "reward_weights": [1.0, 0.5],
    },
    "datasets": [{"path": "openai/gsm8k", "name": "main", "type": "rewards.prompt_transform", "split": "train"}],
    "skip_prepare_dataset": True, "val_set_size": 0.0, "sequence_len": 512, "micro_batch_size": 2,
    "gradient_accumulation_steps": 4, "max_steps": 200, "learning_rate": 5.0e-6, "optimizer": "adamw_torch_fused",
    "lr_scheduler": "cosine", "warmup_steps": 10, "bf16": True, "attn_implementation": "flash_attention_2",
    "gradient_checkpointing": True, "special_tokens": {"pad_token": "<|endoftext|>"},
    "output_dir": "./grpo-output", "logging_steps": 1,
}  # fmt: skip

GRPO_PAGE = {  # what the other examples of that page have beside the quick start, in the block `trl`
    "multi_objective_aggregation": "normalize_then_sum", "reward_num_workers": 4, "vllm_sync_interval": 2,
    "async_prefetch": True, "prefetch_depth": 1, "streaming_partial_batch": True, "streaming_min_groups": 1,
    "skip_zero_advantage_batches": True, "replay_buffer_size": 100, "replay_recompute_logps": True,
    "reroll_start_fraction": 0.5, "reroll_max_groups": 1, "vllm_importance_sampling_correction": True,
    "importance_sampling_level": "token", "off_policy_mask_threshold": 0.5, "num_iterations": 1, "epsilon": 0.2,
    "epsilon_high": 0.28, "loss_type": "dr_grpo", "scale_rewards": True, "mask_truncated_completions": False,
    "generation_kwargs": {"stop_token_ids": [7]}, "chat_template_kwargs": {"enable_thinking": False},
    "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_cap": 2.0,
    "use_bias_correction_kl": True, "sync_ref_model": True, "ref_model_mixup_alpha": 0.9, "ref_model_sync_steps": 64,
    "log_completions": True, "num_completions_to_print": 2, "use_liger_loss": True, "vllm_enable_sleep_mode": True,
    "generation_batch_size": 16, "top_p": 1.0, "top_k": 50, "min_p": 0.05, "repetition_penalty": 1.1, "beta": 0.01,
    "vllm_guided_decoding_regex": "[0-9]+", "rollout_func": "rollouts.play", "vllm_mode": "server",
}  # fmt: skip

_AXOLOTL = {
    "load_in_8bit": False, "load_in_4bit": False, "sample_packing": False, "pad_to_sequence_len": True,
    "wandb_project": None, "wandb_entity": None, "wandb_watch": None, "wandb_name": None, "wandb_log_model": None,
    "num_epochs": 1, "lr_scheduler": "cosine", "learning_rate": 0.0002, "bf16": "auto", "tf32": False,
    "gradient_checkpointing": True, "resume_from_checkpoint": None, "logging_steps": 1, "flash_attention": True,
    "warmup_steps": 10, "weight_decay": 0.0,
}  # fmt: skip
_OLD = {
    "strict": False, "train_on_inputs": False, "group_by_length": False, "fp16": None, "xformers_attention": None,
    "local_rank": None, "early_stopping_patience": None, "debug": None, "deepspeed": None, "fsdp": None,
    "fsdp_config": None, "eval_sample_packing": False, "saves_per_epoch": 1,
}  # fmt: skip
AXOLOTL = {
    "llama-3/lora-1b.yml": {
        **_AXOLOTL, **_OLD, "base_model": "NousResearch/Llama-3.2-1B", "sample_packing": True,
        "eval_sample_packing": True, "datasets": [{"path": "teknium/GPT4-LLM-Cleaned", "type": "alpaca"}],
        "dataset_prepared_path": "last_run_prepared", "val_set_size": 0.1, "output_dir": "./outputs/lora-out",
        "adapter": "lora", "lora_model_dir": None, "sequence_len": 2048, "lora_r": 16, "lora_alpha": 32,
        "lora_dropout": 0.05, "lora_fan_in_fan_out": None, "gradient_accumulation_steps": 2, "micro_batch_size": 2,
        "lora_target_modules": ["gate_proj", "down_proj", "up_proj", "q_proj", "v_proj", "k_proj", "o_proj"],
        "optimizer": "adamw_8bit", "loss_watchdog_threshold": 5.0, "loss_watchdog_patience": 3, "evals_per_epoch": 4,
        "special_tokens": {"pad_token": "<|end_of_text|>"},
    },
    "llama-3/instruct-dpo-lora-8b.yml": {
        **_AXOLOTL, "base_model": "meta-llama/Meta-Llama-3-8B-Instruct", "model_type": "LlamaForCausalLM",
        "tokenizer_type": "AutoTokenizer", "load_in_8bit": True, "chat_template": "llama3", "rl": "dpo",
        "datasets": [{
            "path": "fozziethebeat/alpaca_messages_2k_dpo_test", "type": "chat_template.default",
            "field_messages": "conversation", "field_chosen": "chosen", "field_rejected": "rejected",
            "message_property_mappings": {"role": "role", "content": "content"}, "roles": {"user": ["user"]},
        }],
        "val_set_size": 0.05, "output_dir": "./outputs/lora-out", "sequence_len": 4096, "adapter": "lora",
        "lora_r": 32, "lora_alpha": 16, "lora_dropout": 0.05, "lora_target_linear": True, "num_epochs": 4,
        "gradient_accumulation_steps": 4, "micro_batch_size": 2, "optimizer": "adamw_bnb_8bit",
        "evals_per_epoch": 4, "saves_per_epoch": 1,
    },
    "llama-3/qlora-1b-kto.yaml": {
        **_AXOLOTL, **_OLD, "base_model": "meta-llama/Llama-3.2-1B", "load_in_4bit": True, "rl": "kto", "rl_beta": 0.5,
        "kto_desirable_weight": 0.2, "adapter": "qlora", "lora_r": 32, "lora_alpha": 64, "lora_target_linear": True,
        "datasets": [{
            "path": "argilla/ultrafeedback-binarized-preferences-cleaned-kto", "type": "llama3.ultra", "split": "train",
        }],
        "remove_unused_columns": False, "sequence_len": 2048, "micro_batch_size": 2, "optimizer": "adamw_8bit",
        "gradient_checkpointing_kwargs": {"use_reentrant": False}, "output_dir": "./outputs/qlora-out",
        "eval_max_new_tokens": 128, "eval_table_size": None,
    },
    "gemma2/reward-model.yaml": {
        **_AXOLOTL, **_OLD, "base_model": "google/gemma-2-2b", "model_type": "AutoModelForSequenceClassification",
        "num_labels": 1, "reward_model": True, "chat_template": "gemma", "optimizer": "adamw_bnb_8bit",
        "datasets": [{"path": "argilla/distilabel-intel-orca-dpo-pairs", "type": "bradley_terry.chat_template"}],
        "sequence_len": 2048, "micro_batch_size": 2, "warmup_ratio": 0.1, "warmup_steps": None, "tf32": True,
    },
    "qwen2/prm.yaml": {
        **_AXOLOTL, **_OLD, "base_model": "Qwen/Qwen2.5-0.5B", "model_type": "AutoModelForTokenClassification",
        "num_labels": 2, "process_reward_model": True, "chat_template": None, "optimizer": "adamw_torch",
        "datasets": [{"path": "trl-lib/math_shepherd", "type": "stepwise_supervised"}], "sequence_len": 2048,
        "micro_batch_size": 8, "val_set_size": 0.0, "output_dir": "./outputs/out",
    },
    "gkd/qwen3-0.6B-gkd.yaml": {
        "base_model": "Qwen/Qwen3-0.6B", "plugins": ["axolotl.integrations.gkd.GKDPlugin"], "gkd_trainer": True,
        "gkd_teacher": "Qwen/Qwen3-4B", "gkd_lmbda": 1.0, "gkd_beta": 0.5, "gkd_temperature": 0.9,
        "gkd_max_new_tokens": 256, "chat_template": "qwen3", "sample_packing": False, "train_on_inputs": False,
        "datasets": [{
            "path": "mlabonne/FineTome-100k", "type": "chat_template", "split": "train[:2000]",
            "field_messages": "conversations", "message_property_mappings": {"role": "from", "content": "value"},
        }],
        "val_set_size": 0.0, "sequence_len": 2048, "output_dir": "./outputs/gkd-qwen3-out", "micro_batch_size": 1,
        "gradient_accumulation_steps": 4, "num_epochs": 1, "optimizer": "adamw_torch_fused", "lr_scheduler": "cosine",
        "learning_rate": 1.0e-5, "bf16": "auto", "gradient_checkpointing": True, "flash_attention": True,
        "logging_steps": 1, "warmup_ratio": 0.03, "wandb_project": None,
    },
}  # fmt: skip

TRL = {
    "trl/examples/cli_configs/example_config.yaml": {
        "model_name_or_path": "Qwen/Qwen2.5-0.5B", "dataset_name": "stanfordnlp/imdb", "report_to": "none",
        "learning_rate": 0.0001, "lr_scheduler_type": "cosine",
    },
    "open-r1/recipes/Qwen2.5-1.5B-Instruct/grpo/config_demo.yaml": {
        "model_name_or_path": "Qwen/Qwen2.5-1.5B-Instruct", "model_revision": "main", "torch_dtype": "bfloat16",
        "attn_implementation": "flash_attention_2", "dataset_name": "AI-MO/NuminaMath-TIR", "dataset_configs": ["all"],
        "num_processes": 7, "bf16": True, "use_vllm": True, "vllm_device": "auto", "vllm_gpu_memory_utilization": 0.7,
        "do_eval": True, "eval_strategy": "steps", "eval_steps": 100, "gradient_accumulation_steps": 16,
        "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "hub_model_id": "Qwen2.5-1.5B-Open-R1-GRPO", "hub_strategy": "every_save", "learning_rate": 2.0e-5,
        "log_completions": True, "log_level": "info", "logging_first_step": True, "logging_steps": 1,
        "logging_strategy": "steps", "lr_scheduler_type": "cosine", "max_prompt_length": 512,
        "max_completion_length": 1024, "max_steps": -1, "num_generations": 7, "num_train_epochs": 1,
        "output_dir": "data/Qwen2.5-1.5B-Open-R1-GRPO", "overwrite_output_dir": True,
        "per_device_eval_batch_size": 32, "per_device_train_batch_size": 16, "push_to_hub": True,
        "report_to": ["wandb"], "save_strategy": "epoch", "save_total_limit": 1, "seed": 42, "warmup_ratio": 0.1,
    },
    "alignment-handbook/recipes/zephyr-7b-beta/dpo/config_full.yaml": {
        "model_name_or_path": "alignment-handbook/zephyr-7b-sft-full", "torch_dtype": None,
        "dataset_mixture": {
            "datasets": [
                {"id": "HuggingFaceH4/ultrafeedback_binarized", "config": "default", "split": split, "weight": 1.0,
                 "columns": ["chosen", "rejected"]}
                for split in ("train_prefs", "test_prefs")
            ],
            "test_split_size": 2000, "seed": 0,
        },
        "dataset_num_proc": 12, "bf16": True, "beta": 0.01, "do_eval": True, "eval_strategy": "steps",
        "eval_steps": 100, "gradient_accumulation_steps": 2, "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False}, "hub_model_id": "zephyr-7b-dpo-full",
        "learning_rate": 5.0e-7, "log_level": "info", "logging_steps": 10, "lr_scheduler_type": "cosine",
        "max_length": 1024, "max_prompt_length": 512, "num_train_epochs": 1, "optim": "adamw_torch",
        "output_dir": "data/zephyr-7b-dpo-full", "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8,
        "push_to_hub": True, "save_strategy": "steps", "save_steps": 100, "save_total_limit": 1, "seed": 42,
        "warmup_ratio": 0.1,
    },
}  # fmt: skip

_SWIFT_EVERYWHERE = "--torch_dtype bfloat16 --learning_rate 1e-4 --save_total_limit 2 --warmup_ratio 0.05"
MS_SWIFT = {  # path -> variables, mode, flags
    "grpo/internal/gspo.sh": (
        "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 NPROC_PER_NODE=8",
        "rlhf",
        "--rlhf_type grpo --model Qwen/Qwen2.5-7B-Instruct --dataset AI-MO/NuminaMath-TIR#10000 --torch_dtype bfloat16"
        " --num_train_epochs 1 --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --num_generations 16"
        " --train_type full --reward_funcs accuracy --use_vllm true --vllm_mode colocate"
        " --vllm_gpu_memory_utilization 0.6 --vllm_max_model_len 16384 --max_completion_length 8192"
        " --offload_optimizer true --offload_model true --sleep_level 1 --save_steps 1000 --learning_rate 1e-6"
        " --save_total_limit 2 --logging_steps 5 --warmup_ratio 0.05 --dataloader_num_workers 4 --deepspeed zero3"
        " --log_completions true",
    ),
    "grpo/external/grpo_7b.sh": (
        "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5 NPROC_PER_NODE=6",
        "rlhf",
        "--rlhf_type grpo --model Qwen/Qwen2.5-7B-Instruct --reward_funcs accuracy --use_vllm true --vllm_mode server"
        " --vllm_server_host xxx --vllm_server_port 8000 --train_type full --torch_dtype bfloat16 --dataset"
        " AI-MO/NuminaMath-TIR#1000 --max_completion_length 2048 --num_train_epochs 3 --per_device_train_batch_size 2"
        " --per_device_eval_batch_size 4 --learning_rate 1e-6 --gradient_accumulation_steps 2 --save_total_limit 2"
        " --logging_steps 1 --warmup_ratio 0.05 --dataloader_num_workers 4 --dataset_num_proc 4 --num_generations 8"
        " --temperature 1.0 --top_p 0.9 --top_k 50 --deepspeed zero2 --log_completions true --num_iterations 1"
        " --report_to tensorboard wandb --beta 0.04",
    ),
    "grpo/internal/transformers.sh": (
        "CUDA_VISIBLE_DEVICES=0",
        "rlhf",
        f"--rlhf_type grpo --model Qwen/Qwen2.5-7B --reward_funcs accuracy format --train_type lora {_SWIFT_EVERYWHERE}"
        " --lora_rank 8 --lora_alpha 32 --target_modules all-linear --dataset 'AI-MO/NuminaMath-TIR#1000'"
        " --load_from_cache_file true --max_completion_length 1024 --per_device_train_batch_size 4"
        " --per_device_eval_batch_size 4 --max_length 2048 --num_generations 4 --temperature 0.9 --system"
        " 'examples/train/grpo/prompt.txt' --log_completions true",
    ),
    "demo.sh": (
        "CUDA_VISIBLE_DEVICES=0",
        "sft",
        "--model Qwen/Qwen2.5-7B-Instruct --train_type lora --dataset AI-ModelScope/alpaca-gpt4-data-zh#500"
        f" AI-ModelScope/alpaca-gpt4-data-en#500 swift/self-cognition#500 {_SWIFT_EVERYWHERE} --max_length 2048"
        " --system 'You are a helpful assistant.' --model_author swift --model_name swift-robot --output_dir output",
    ),
    "rlhf/dpo/lora.sh": (
        "CUDA_VISIBLE_DEVICES=6",
        "rlhf",
        "--rlhf_type dpo --model Qwen/Qwen2.5-7B-Instruct --train_type lora --dataset"
        f" hjh0119/shareAI-Llama3-DPO-zh-en-emoji --load_from_cache_file true --split_dataset_ratio 0.01"
        f" --rpo_alpha 0.1 {_SWIFT_EVERYWHERE} --max_length 2048 --dataset_num_proc 4",
    ),
    "rlhf/rm.sh": (
        "CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=2",
        "rlhf",
        "--rlhf_type rm --model Qwen/Qwen2.5-7B-Instruct --train_type lora --dataset"
        f" hjh0119/shareAI-Llama3-DPO-zh-en-emoji {_SWIFT_EVERYWHERE} --gradient_accumulation_steps $(expr 16 / 2)"
        " --deepspeed zero2",
    ),
}  # fmt: skip
