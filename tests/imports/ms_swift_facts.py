"""Flags of published scripts of ms-swift, and of bare ones, and the settings that ms-swift 4.6.0 makes of them.

Facts. `lora_dropout` is 0 where its trainer switches dropout off, in all preference methods.
"""

SCRIPTS = {  # path -> variables, mode, flags
    "grpo/internal/transformers": (
        "",
        "rlhf",
        "--rlhf_type grpo --model Qwen/Qwen2.5-7B --reward_funcs accuracy format --tuner_type lora --lora_rank 8 "
        "--lora_alpha 32 --target_modules all-linear --torch_dtype bfloat16 --dataset 'AI-MO/NuminaMath-TIR#1000' "
        "--load_from_cache_file true --max_completion_length 1024 --num_train_epochs 1 "
        "--per_device_train_batch_size 4 --per_device_eval_batch_size 4 --learning_rate 1e-5 "
        "--gradient_accumulation_steps 1 --eval_steps 100 --save_steps 100 --save_total_limit 2 --logging_steps 5 "
        "--max_length 2048 --output_dir output --warmup_ratio 0.05 --dataloader_num_workers 4 --dataset_num_proc "
        "4 --num_generations 4 --temperature 0.9 --system examples/train/grpo/prompt.txt --log_completions true",
    ),
    "grpo/internal/gspo": (
        "NPROC_PER_NODE=8",
        "rlhf",
        "--rlhf_type grpo --model Qwen/Qwen2.5-7B-Instruct --dataset 'AI-MO/NuminaMath-TIR#10000' "
        "--load_from_cache_file true --torch_dtype bfloat16 --beta 0.0 --epsilon 3e-4 --epsilon_high 4e-4 "
        "--steps_per_generation 32 --importance_sampling_level sequence --num_train_epochs 1 "
        "--per_device_train_batch_size 2 --gradient_accumulation_steps 8 --num_generations 16 --tuner_type full "
        "--reward_funcs accuracy --use_vllm true --vllm_mode colocate --vllm_gpu_memory_utilization 0.6 "
        "--vllm_max_model_len 16384 --max_completion_length 8192 --offload_optimizer true --offload_model true "
        "--sleep_level 1 --save_steps 1000 --learning_rate 1e-6 --save_total_limit 2 --logging_steps 5 "
        "--warmup_ratio 0.05 --dataloader_num_workers 4 --deepspeed zero3 --log_completions true",
    ),
    "grpo/external/grpo_7b": (
        "NPROC_PER_NODE=6",
        "rlhf",
        "--rlhf_type grpo --model Qwen/Qwen2.5-7B-Instruct --reward_funcs accuracy --use_vllm true --vllm_mode "
        "server --vllm_server_host 127.0.0.1 --vllm_server_port 8000 --tuner_type full --torch_dtype bfloat16 "
        "--dataset 'AI-MO/NuminaMath-TIR#1000' --load_from_cache_file true --split_dataset_ratio 0 "
        "--max_completion_length 2048 --num_train_epochs 3 --per_device_train_batch_size 2 --learning_rate 1e-6 "
        "--gradient_accumulation_steps 2 --save_total_limit 2 --logging_steps 1 --warmup_ratio 0.05 "
        "--dataloader_num_workers 4 --dataset_num_proc 4 --num_generations 8 --temperature 1.0 --top_p 0.9 "
        "--top_k 50 --deepspeed zero2 --log_completions true --num_iterations 1 --report_to tensorboard wandb "
        "--beta 0.04",
    ),
    "rlhf/dpo/lora": (
        "",
        "rlhf",
        "--rlhf_type dpo --model Qwen/Qwen2.5-7B-Instruct --tuner_type lora --dataset "
        "hjh0119/shareAI-Llama3-DPO-zh-en-emoji --load_from_cache_file true --split_dataset_ratio 0.01 "
        "--torch_dtype bfloat16 --num_train_epochs 1 --per_device_train_batch_size 1 --per_device_eval_batch_size "
        "1 --learning_rate 1e-4 --lora_rank 8 --lora_alpha 32 --target_modules all-linear "
        "--gradient_accumulation_steps 16 --eval_steps 50 --save_steps 50 --save_total_limit 2 --logging_steps 5 "
        "--max_length 2048 --output_dir output --warmup_ratio 0.05 --dataloader_num_workers 4 --rpo_alpha 0.1 "
        "--dataset_num_proc 4",
    ),
    "rlhf/dpo/full": (
        "NPROC_PER_NODE=4",
        "rlhf",
        "--rlhf_type dpo --model Qwen/Qwen2.5-7B-Instruct --tuner_type full --dataset "
        "hjh0119/shareAI-Llama3-DPO-zh-en-emoji --load_from_cache_file true --split_dataset_ratio 0.01 "
        "--torch_dtype bfloat16 --num_train_epochs 1 --per_device_train_batch_size 4 --per_device_eval_batch_size "
        "4 --learning_rate 1e-5 --gradient_accumulation_steps 1 --eval_steps 100 --save_steps 100 "
        "--save_total_limit 2 --logging_steps 5 --max_length 8192 --output_dir output --warmup_ratio 0.05 "
        "--save_only_model true --dataloader_num_workers 4 --dataset_num_proc 4 --deepspeed zero3 --rpo_alpha 0.1",
    ),
    "rlhf/simpo": (
        "NPROC_PER_NODE=2",
        "rlhf",
        "--rlhf_type simpo --model Qwen/Qwen2.5-3B-Instruct --tuner_type full --dataset "
        "hjh0119/shareAI-Llama3-DPO-zh-en-emoji --load_from_cache_file true --split_dataset_ratio 0.01 "
        "--torch_dtype bfloat16 --num_train_epochs 1 --per_device_train_batch_size 1 --per_device_eval_batch_size "
        "1 --learning_rate 1e-5 --gradient_accumulation_steps 8 --eval_steps 100 --save_steps 100 "
        "--save_total_limit 2 --logging_steps 5 --max_length 2048 --output_dir output --warmup_ratio 0.05 "
        "--dataloader_num_workers 4 --deepspeed zero2 --dataset_num_proc 4",
    ),
    "rlhf/cpo": (
        "NPROC_PER_NODE=2",
        "rlhf",
        "--rlhf_type cpo --model Qwen/Qwen2.5-7B-Instruct --tuner_type lora --dataset "
        "hjh0119/shareAI-Llama3-DPO-zh-en-emoji --load_from_cache_file true --split_dataset_ratio 0.01 "
        "--torch_dtype bfloat16 --num_train_epochs 1 --per_device_train_batch_size 1 --per_device_eval_batch_size "
        "1 --learning_rate 1e-4 --lora_rank 8 --lora_alpha 32 --target_modules all-linear "
        "--gradient_accumulation_steps 8 --eval_steps 100 --save_steps 100 --save_total_limit 2 --logging_steps 5 "
        "--max_length 2048 --output_dir output --warmup_ratio 0.05 --dataloader_num_workers 4 --deepspeed zero2 "
        "--dataset_num_proc 4",
    ),
    "lora_sft": (
        "",
        "sft",
        "--model Qwen/Qwen2.5-7B-Instruct --tuner_type lora --dataset 'AI-ModelScope/alpaca-gpt4-data-zh#500' "
        "'AI-ModelScope/alpaca-gpt4-data-en#500' 'swift/self-cognition#500' --torch_dtype bfloat16 "
        "--num_train_epochs 1 --per_device_train_batch_size 1 --per_device_eval_batch_size 1 --learning_rate 1e-4 "
        "--lora_rank 8 --lora_alpha 32 --target_modules all-linear --gradient_accumulation_steps 16 --eval_steps "
        "50 --save_steps 50 --save_total_limit 2 --logging_steps 5 --max_length 2048 --output_dir output --system "
        "'You are a helpful assistant.' --warmup_ratio 0.05 --dataset_num_proc 4 --dataloader_num_workers 4 "
        "--model_author swift --model_name swift-robot",
    ),
    "full/train": (
        "",
        "sft",
        "--model Qwen/Qwen2.5-7B-Instruct --tuner_type full --dataset 'AI-ModelScope/alpaca-gpt4-data-zh#500' "
        "'AI-ModelScope/alpaca-gpt4-data-en#500' 'swift/self-cognition#500' --torch_dtype bfloat16 "
        "--num_train_epochs 1 --per_device_train_batch_size 1 --per_device_eval_batch_size 1 --learning_rate 1e-5 "
        "--gradient_accumulation_steps 16 --eval_steps 100 --save_steps 100 --save_total_limit 2 --logging_steps "
        "5 --max_length 2048 --output_dir output --system 'You are a helpful assistant.' --warmup_ratio 0.05 "
        "--dataloader_num_workers 4 "
        "--model_author swift --model_name swift-robot",
    ),
    "early_stop/lora_sft": (
        "",
        "sft",
        "--model Qwen/Qwen2.5-7B-Instruct --tuner_type lora --dataset 'AI-ModelScope/alpaca-gpt4-data-zh#500' "
        "'AI-ModelScope/alpaca-gpt4-data-en#500' 'swift/self-cognition#500' --split_dataset_ratio 0.1 "
        "--torch_dtype bfloat16 --num_train_epochs 1 --per_device_train_batch_size 1 --per_device_eval_batch_size "
        "1 --learning_rate 1e-4 --lora_rank 8 --lora_alpha 32 --early_stop_interval 3 --target_modules all-linear "
        "--gradient_accumulation_steps 16 --eval_steps 50 --save_steps 50 --save_total_limit 2 --logging_steps 5 "
        "--max_length 2048 --output_dir output --system 'You are a helpful assistant.' --warmup_ratio 0.05 "
        "--dataloader_num_workers 4 --metric_for_best_model loss "
        "--model_author swift --model_name swift-robot",
    ),
    "bare/grpo": (
        "",
        "rlhf",
        "--rlhf_type grpo --model Qwen/Qwen2.5-7B-Instruct --dataset 'AI-MO/NuminaMath-TIR#1000' --reward_funcs "
        "accuracy --per_device_train_batch_size 8",
    ),
    "bare/grpo_full": (
        "NPROC_PER_NODE=8",
        "rlhf",
        "--rlhf_type grpo --model Qwen/Qwen2.5-7B-Instruct --dataset 'AI-MO/NuminaMath-TIR#1000' --reward_funcs "
        "accuracy --tuner_type full",
    ),
    "bare/dpo": (
        "NPROC_PER_NODE=2",
        "rlhf",
        "--rlhf_type dpo --model Qwen/Qwen2.5-7B-Instruct --dataset hjh0119/shareAI-Llama3-DPO-zh-en-emoji "
        "--per_device_train_batch_size 3",
    ),
    "bare/simpo": (
        "",
        "rlhf",
        "--rlhf_type simpo --model Qwen/Qwen2.5-7B-Instruct --dataset hjh0119/shareAI-Llama3-DPO-zh-en-emoji",
    ),
    "bare/cpo": (
        "",
        "rlhf",
        "--rlhf_type cpo --model Qwen/Qwen2.5-7B-Instruct --dataset hjh0119/shareAI-Llama3-DPO-zh-en-emoji",
    ),
    "bare/orpo": (
        "",
        "rlhf",
        "--rlhf_type orpo --model Qwen/Qwen2.5-7B-Instruct --dataset hjh0119/shareAI-Llama3-DPO-zh-en-emoji "
        "--save_strategy epoch --split_dataset_ratio 0.1",
    ),
    "bare/kto": (
        "NPROC_PER_NODE=2",
        "rlhf",
        "--rlhf_type kto --model Qwen/Qwen2.5-7B-Instruct --dataset "
        "'AI-ModelScope/ultrafeedback-binarized-preferences-cleaned-kto#10000' --per_device_train_batch_size 2",
    ),
    "bare/rm": (
        "",
        "rlhf",
        "--rlhf_type rm --model Qwen/Qwen2.5-7B-Instruct --dataset hjh0119/shareAI-Llama3-DPO-zh-en-emoji",
    ),
    "bare/sft": (
        "NPROC_PER_NODE=8",
        "sft",
        "--model Qwen/Qwen2.5-7B-Instruct --dataset 'AI-ModelScope/alpaca-gpt4-data-en#500' --eval_steps 50 "
        "--seed 7",
    ),
    "bare/pt": (
        "NPROC_PER_NODE=32",
        "pt",
        "--model Qwen/Qwen2.5-7B --dataset swift/chinese-c4 --tuner_type full",
    ),
}  # fmt: skip

TRAINED = [
    (SCRIPTS, {
        "gradient_accumulation_steps": (16, {
            "grpo/internal/transformers": 1, "grpo/internal/gspo": 8, "grpo/external/grpo_7b": 2,
            "rlhf/dpo/full": 1, "rlhf/simpo": 8, "rlhf/cpo": 8, "bare/grpo": 1, "bare/grpo_full": 1, "bare/dpo":
            3, "bare/kto": 4, "bare/sft": 2, "bare/pt": 1,
        }),
        "per_device_train_batch_size": (1, {
            "grpo/internal/transformers": 4, "grpo/internal/gspo": 2, "grpo/external/grpo_7b": 2,
            "rlhf/dpo/full": 4, "bare/grpo": 8, "bare/dpo": 3, "bare/kto": 2,
        }),
        "learning_rate": (0.0001, {
            "grpo/internal/transformers": 1e-05, "grpo/internal/gspo": 1e-06, "grpo/external/grpo_7b": 1e-06,
            "rlhf/dpo/full": 1e-05, "rlhf/simpo": 1e-05, "full/train": 1e-05, "bare/grpo_full": 1e-05,
            "bare/pt": 1e-05,
        }),
        "lr_scheduler_type": ("cosine", {}),
        "warmup_ratio": (0.05, {
            "bare/grpo": 0.0, "bare/grpo_full": 0.0, "bare/dpo": 0.0, "bare/simpo": 0.0, "bare/cpo": 0.0,
            "bare/orpo": 0.0, "bare/kto": 0.0, "bare/rm": 0.0, "bare/sft": 0.0, "bare/pt": 0.0,
        }),
        "weight_decay": (0.1, {}),
        "adam_beta1": (0.9, {}),
        "adam_beta2": (0.95, {}),
        "adam_epsilon": (1e-08, {}),
        "max_grad_norm": (1.0, {}),
        "optim": ("adamw_torch_fused", {}),
        "num_train_epochs": (3.0, {
            "grpo/internal/transformers": 1.0, "grpo/internal/gspo": 1.0, "rlhf/dpo/lora": 1.0, "rlhf/dpo/full":
            1.0, "rlhf/simpo": 1.0, "rlhf/cpo": 1.0, "lora_sft": 1.0, "full/train": 1.0, "early_stop/lora_sft":
            1.0,
        }),
        "max_steps": (-1, {}),
        "seed": (42, {"bare/sft": 7}),
        "data_seed": (42, {}),
        "dataset_shuffle": (True, {}),
        "split_dataset_ratio": (0.0, {
            "rlhf/dpo/lora": 0.01, "rlhf/dpo/full": 0.01, "rlhf/simpo": 0.01, "rlhf/cpo": 0.01,
            "early_stop/lora_sft": 0.1, "bare/orpo": 0.1,
        }),
        "eval_strategy": ("no", {
            "rlhf/dpo/lora": "steps", "rlhf/dpo/full": "steps", "rlhf/simpo": "steps", "rlhf/cpo": "steps",
            "early_stop/lora_sft": "steps", "bare/orpo": "epoch",
        }),
        "save_strategy": ("steps", {"bare/orpo": "epoch"}),
        "save_steps": (500, {
            "grpo/internal/transformers": 100, "grpo/internal/gspo": 1000, "rlhf/dpo/lora": 50, "rlhf/dpo/full":
            100, "rlhf/simpo": 100, "rlhf/cpo": 100, "lora_sft": 50, "full/train": 100, "early_stop/lora_sft":
            50,
        }),
        "tuner_type": ("lora", {
            "grpo/internal/gspo": "full", "grpo/external/grpo_7b": "full", "rlhf/dpo/full": "full",
            "rlhf/simpo": "full", "full/train": "full", "bare/grpo_full": "full", "bare/pt": "full",
        }),
        "gradient_checkpointing": (True, {}),
    }),
    (("rlhf/dpo/lora", "rlhf/dpo/full", "rlhf/simpo", "rlhf/cpo", "early_stop/lora_sft"), {
        "eval_steps": (100, {"rlhf/dpo/lora": 50, "early_stop/lora_sft": 50}),
    }),
    ((
        "grpo/internal/transformers", "rlhf/dpo/lora", "rlhf/cpo", "lora_sft", "early_stop/lora_sft",
        "bare/grpo", "bare/dpo", "bare/simpo", "bare/cpo", "bare/orpo", "bare/kto", "bare/rm", "bare/sft",
    ), {
        "lora_rank": (8, {}),
        "lora_alpha": (32.0, {}),
        "lora_dropout": (0.0, {
            "grpo/internal/transformers": 0.05, "lora_sft": 0.05, "early_stop/lora_sft": 0.05, "bare/grpo":
            0.05, "bare/sft": 0.05,
        }),
        "target_modules": (["all-linear"], {}),
        "use_rslora": (False, {}),
        "use_dora": (False, {}),
        "init_weights": ("true", {}),
    }),
    (("lora_sft", "full/train", "early_stop/lora_sft", "bare/sft", "bare/pt"), {
        "packing": (False, {}),
        "router_aux_loss_coef": (0.0, {}),
    }),
    ((
        "grpo/internal/transformers", "rlhf/dpo/lora", "rlhf/dpo/full", "rlhf/simpo", "rlhf/cpo", "lora_sft",
        "full/train", "early_stop/lora_sft",
    ), {
        "max_length": (2048, {"rlhf/dpo/full": 8192}),
    }),
    (("grpo/internal/transformers", "grpo/internal/gspo", "grpo/external/grpo_7b", "bare/grpo", "bare/grpo_full"), {
        "truncation_strategy": ("left", {}),
        "temperature": (0.9, {"grpo/external/grpo_7b": 1.0}),
        "top_p": (1.0, {"grpo/external/grpo_7b": 0.9}),
        "top_k": (-1, {"grpo/external/grpo_7b": 50}),
        "repetition_penalty": (1.0, {}),
        "max_completion_length": (512, {
            "grpo/internal/transformers": 1024, "grpo/internal/gspo": 8192, "grpo/external/grpo_7b": 2048,
        }),
        "num_generations": (8, {"grpo/internal/transformers": 4, "grpo/internal/gspo": 16}),
        "steps_per_generation": (1, {"grpo/internal/gspo": 32, "grpo/external/grpo_7b": 2}),
        "num_iterations": (1, {}),
        "epsilon": (0.2, {"grpo/internal/gspo": 0.0003}),
        "epsilon_high": (0.2, {"grpo/internal/gspo": 0.0004}),
        "advantage_estimator": ("grpo", {}),
        "scale_rewards": ("group", {}),
        "kl_in_reward": (False, {}),
        "importance_sampling_level": ("token", {"grpo/internal/gspo": "sequence"}),
        "overlong_filter": (False, {}),
        "dynamic_sample": (False, {}),
        "rollout_importance_sampling_mode": ("none", {}),
    }),
    (("lora_sft", "full/train", "early_stop/lora_sft", "bare/sft"), {
        "loss_scale": ("default", {}),
    }),
    ((
        "grpo/internal/transformers", "grpo/internal/gspo", "grpo/external/grpo_7b", "rlhf/dpo/lora",
        "rlhf/dpo/full", "rlhf/cpo", "bare/grpo", "bare/grpo_full", "bare/dpo",
        "bare/cpo", "bare/kto",
    ), {
        "loss_type": ("grpo", {
            "rlhf/dpo/lora": ["sigmoid"], "rlhf/dpo/full": ["sigmoid"], "rlhf/cpo":
            "sigmoid", "bare/dpo": ["sigmoid"], "bare/cpo": "sigmoid", "bare/kto": "kto",
        }),
    }),
    ((
        "grpo/internal/transformers", "grpo/internal/gspo", "grpo/external/grpo_7b", "rlhf/dpo/lora",
        "rlhf/dpo/full", "rlhf/simpo", "rlhf/cpo", "bare/grpo", "bare/grpo_full", "bare/dpo", "bare/simpo",
        "bare/cpo", "bare/orpo", "bare/kto",
    ), {
        "beta": (0.1, {
            "grpo/internal/transformers": 0.04, "grpo/internal/gspo": 0.0, "grpo/external/grpo_7b": 0.04,
            "rlhf/simpo": 2.0, "bare/grpo": 0.04, "bare/grpo_full": 0.04, "bare/simpo": 2.0,
        }),
    }),
    (("rlhf/simpo", "rlhf/cpo", "bare/simpo", "bare/cpo"), {
        "cpo_alpha": (1.0, {}),
        "simpo_gamma": (1, {}),
    }),
    (("rlhf/dpo/lora", "rlhf/dpo/full", "rlhf/simpo", "rlhf/cpo", "bare/dpo", "bare/simpo", "bare/cpo"), {
        "label_smoothing": (0, {}),
    }),
    (("rlhf/dpo/lora", "rlhf/dpo/full", "bare/dpo"), {
        "rpo_alpha": (0.1, {"bare/dpo": None}),
    }),
    (("bare/kto",), {
        "desirable_weight": (1.0, {}),
        "undesirable_weight": (1.0, {}),
    }),
    (("bare/rm",), {
        "center_rewards_coefficient": (None, {}),
    }),
]  # fmt: skip
"""Scripts, and their settings: the usual value, and that of those that differ."""
