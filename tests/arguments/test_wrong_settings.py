"""Wrong flags and configs: what each must say. All problems come together, one line each."""

import pytest
from command_lines import RLHF, problems, refused

from swift.arguments import parse
from swift.errors import ConfigError

GYM = "--rollout_source nemo_gym --reward_funcs environment"
SERVED = f"{GYM} --nemo_gym_multi_turn true --vllm_server_base_url http://127.0.0.1:1"
FLAGS = [
    # what is typed after a good command line, and what the one error line must contain
    ("--num_generation 4", ["--num_generation: 4: unknown flag", "nearest: num_generations"]),
    ("--num_gen 4", ["--num_gen: 4: unknown flag"]),
    ("--top_p 1.5", ["--top_p: 1.5: out of range", "above 0 and at most 1"]),
    ("--top_p 0", ["--top_p: 0: out of range"]),
    ("--top_p nan", ["--top_p: nan: not a finite number"]),
    ("--top_k -2", ["--top_k: -2: out of range", "at least -1"]),
    ("--top_k 1.5", ["--top_k: 1.5: not a whole number"]),
    ("--min_p 2", ["--min_p: 2: out of range"]),
    ("--temperature 0", ["--temperature: 0: out of range", "at least 0.01"]),
    ("--repetition_penalty 5e-324", ["--repetition_penalty: 5e-324: out of range; valid: at least 0.001"]),
    ("--temperature hot", ["--temperature: hot: not a number"]),
    ("--beta -0.1", ["--beta: -0.1: out of range", "at least 0"]),
    ("--num_generations 0", ["--num_generations: 0: out of range", "at least 1"]),
    ("--num_generations 1", ["--num_generations: 1: the rewards of a prompt's completions", "at least 2"]),
    (
        "--num_generations 1 --teacher_model t",
        ["--num_generations: 1: the rewards of a prompt's", "use at least 2, or --reward_weights 0 to measure"],
    ),
    (
        "--teacher_model t --loss_type gspo",
        ["--teacher_model: t: teaches token by token, and --loss_type gspo", "sequence_token, or another --loss_type"],
    ),
    (
        "--teacher_model t --reward_weights 0 --dynamic_sample true",
        ["--teacher_model: t: without --reward_funcs it teaches alone, and --dynamic_sample true replaces groups"],
    ),
    (
        "--teacher_model t --reward_weights 0 --kl_in_reward true",
        ["--teacher_model: t: without --reward_funcs it teaches alone, and --kl_in_reward true lowers rewards"],
    ),
    ("--teacher_model t --teacher_kl_coef 0", ["--teacher_kl_coef: 0: out of range", "above 0"]),
    (
        "--offload_teacher_model true",
        ["--offload_teacher_model: true: known in ms-swift", "--offload_model takes it to the host"],
    ),
    ("--num_generations", ["--num_generations: none: no value"]),
    ("--num_generations 4 8", ["--num_generations: 4 8: a list of 2 values where one is expected"]),
    ("--max_completion_length 0", ["--max_completion_length: 0: out of range"]),
    ("--learning_rate 0", ["--learning_rate: 0: out of range", "above 0"]),
    ("--save_steps 0", ["--save_steps: 0: out of range", "above 0"]),
    ("--save_steps 2.5", ["--save_steps: 2.5: not a whole number", "below 1"]),
    ("--lora_rank 0", ["--lora_rank: 0: out of range"]),
    ("--lora_dropout 1", ["--lora_dropout: 1: out of range", "below 1"]),
    ("--epsilon x", ["--epsilon: x: not a number"]),
    ("--strict maybe", ["--strict: maybe: not a boolean", "true, false"]),
    ("--loss_type dabo", ["--loss_type: dabo: not a choice", "nearest: dapo"]),
    ("--loss_type real", ["--loss_type: real: known in ms-swift, not supported here", "valid: bnpo, cispo"]),
    ("--rlhf_type grop", ["--rlhf_type: grop: not a choice; nearest: grpo"]),
    ("--rlhf_type ppo", ["--rlhf_type: ppo: known in ms-swift, not supported here", "valid: grpo"]),
    (
        "--tuner_type adalora",
        ["--tuner_type: adalora: known in ms-swift, not supported here", "valid: lora, full, vera"],
    ),
    ("--tuner_type qlora", ["--tuner_type: qlora: not a choice", "lora"]),
    ("--torch_dtype float16 --fsdp full_shard", ["--torch_dtype: float16: its loss scaling does not go with --fsdp"]),
    ("--weight_bridge legacy", ["--weight_bridge: legacy: not a choice; valid: none, shared_vllm, lora_only"]),
    ("--weight_bridge lora_only", ["--weight_bridge: lora_only: no engine of its own", "give --vllm_server_host"]),
    ("--weight_bridge lora_only --use_vllm true --tuner_type full", ["--vllm_enable_lora: true:"]),
    ("--weight_bridge shared_vllm", ["--weight_bridge: shared_vllm: weights that are merged", "--tuner_type full"]),
    (
        "--weight_bridge shared_vllm --tuner_type full --vllm_restart_interval 3",
        ["--vllm_sync_interval: 3: --weight_bridge shared_vllm is --vllm_sync_interval 1; leave one"],
    ),
    (
        "--weight_bridge shared_vllm --tuner_type full --vllm_server_host a",
        ["--weight_bridge: shared_vllm: servers have a copy of their own"],
    ),
    (
        "--weight_bridge none --vllm_server_host a --vllm_lora_sync true",
        ["--vllm_enable_lora: true: --weight_bridge none is --vllm_enable_lora false; leave one of them out"],
    ),
    ("--force_restart", ["--force_restart: true: only servers with --weight_bridge lora_restart"]),
    ("--fp16 true --deepspeed zero2", ["does not go with --deepspeed zero2 here; use --torch_dtype bfloat16"]),
    ("--fp16 true --torch_dtype bfloat16", ["--torch_dtype: --fp16 float16, --torch_dtype bfloat16: the same setting"]),
    ("--elastic true --deepspeed zero2 --optim sgd", ["--deepspeed zero2 cuts the state of --optim sgd once"]),
    ("--elastic true --save_only_model true", ["--elastic: true: --save_only_model true leaves nothing to continue"]),
    ("--warmup_steps 1.5", ["--warmup_steps: 1.5: neither a number of steps nor a share below 1"]),
    ("--eval_dataset d", ["--eval_dataset: d: ms-swift's name: benchmarks", "--val_dataset"]),
    ("--wandb_project p", ["--wandb_project: p: Axolotl's name; set the variable WANDB_PROJECT"]),
    ("--model_init_kwargs {", ["--model_init_kwargs: {: TRL's name: {: not a map; write JSON"]),
    ("--model_name a b c", ["--model_name: a b c: 3 names; give one, or a Chinese and an English one"]),
    ("--torch_dtype int8", ["--torch_dtype: int8: not a choice", "float16"]),
    ("--optim adam", ["--optim: adam: not a choice", "nearest:"]),
    (
        "--master_weights bf16_stochastic --tuner_type full --torch_dtype float16",
        ["--master_weights: bf16_stochastic: --torch_dtype float16: only bfloat16 weights are rounded so"],
    ),
    ("--master_weights bf16_stochastic --bf16 true", ["--tuner_type lora trains float32 weights", "use full"]),
    (
        "--master_weights bf16_stochastic --tuner_type full --bf16 true --optim adamw_cpu",
        ["--optim adamw_cpu may need all masters at once; use adamw_torch_fused"],
    ),
    (
        "--master_weights bf16_stochastic --tuner_type full --bf16 true --fsdp full_shard",
        ["--master_weights: bf16_stochastic: --fsdp full_shard shards weights in float32"],
    ),
    (
        "--master_weights bf16_stochastic --tuner_type full --bf16 true --deepspeed zero2",
        ["--master_weights: bf16_stochastic: --deepspeed zero2 has float32 masters of its own"],
    ),
    (
        "--autocast bfloat16 --torch_dtype bfloat16",
        ["--autocast: bfloat16: casts float32 weights", "float32, or leave"],
    ),
    ("--autocast bfloat16 --fsdp full_shard", ["--autocast: bfloat16: --fsdp has float32 weights of its own"]),
    (
        "--autocast bfloat16 --quant_method bnb --quant_bits 4",
        ["--quant_method: bnb: --autocast bfloat16"],
    ),
    ("--optim adamw_cpu --deepspeed zero2", ["--optim: adamw_cpu: --deepspeed zero2 keeps", "use --optim adamw with"]),
    ("--optim adamw_cpu --fsdp full_shard", ["--optim: adamw_cpu: --fsdp full_shard shards", "zero2_offload"]),
    ("--preset dabo", ["--preset: dabo: not a choice; nearest:", "dapo"]),
    ("--sleep_level 3", ["--sleep_level: 3: not a choice", "valid: 0, 1, 2"]),
    ("--columns answer", ["--columns: answer: not JSON"]),
    ("--columns [1]", ["--columns: [1]: JSON, but not a map"]),
    ("--report_to none wandb", ["--report_to: none wandb: none excludes the others"]),
    (
        "--train_type lora --tuner_type full",
        ["--tuner_type:", "--train_type lora", "--tuner_type full", "same setting"],
    ),
    ("-beta 0.1", ["-beta: one dash", "--beta"]),
    ("--loss_type cispo", ["--epsilon_high: none: cispo needs", "cap on the ratio itself", "5.0"]),
    ("--loss_type cispo --epsilon_high 0.28", ["--epsilon_high: 0.28:", "cap on the ratio itself"]),
    ("--loss_type cispo --epsilon_high 5 --delta 7", ["--delta: 7: loss_type cispo has no clip"]),
    ("--beta 0 --sync_ref_model true", ["--sync_ref_model: true: there is no reference with --beta 0"]),
    ("--beta 0 --kl_bias_correction true", ["--kl_bias_correction: true: there is no KL with --beta 0"]),
    (
        "--old_logprobs sampler --rollout_importance_sampling_mode token_mask",
        ["--old_logprobs: sampler: the ratio compares with the sampler already"],
    ),
    ("--use_adaptive_entropy true --entropy_coef 2", ["--entropy_coef: 2: the controller starts there"]),
    ("--streaming true --max_steps 4 --save_strategy epoch", ["--save_strategy: epoch: a stream has no epochs"]),
    ("--kl_in_reward true --beta 0.1 --repetition_penalty 1.2", ["--kl_in_reward: true", "--repetition_penalty 1.2"]),
    ("--scale_rewards gdpo --advantage_estimator rloo", ["--scale_rewards: gdpo", "--advantage_estimator grpo"]),
    (
        '--router_aux_loss_coef 0.1 --gradient_checkpointing_kwargs {"use_reentrant":true}',
        ["--router_aux_loss_coef: 0.1: use_reentrant of --gradient_checkpointing_kwargs hides router logits"],
    ),
    (
        "--router_aux_loss_coef none --sequence_parallel_size 2",
        ["--router_aux_loss_coef: none: ranks of --sequence_parallel_size 2 have parts of a forward pass"],
    ),
    (
        "--router_aux_loss_coef 0.1 --streaming_partial_batch true",
        ["--streaming_partial_batch: true: the load-b"],
    ),
    ("--moe_router_replay R4", ["--moe_router_replay: R4: not a choice"]),
    ("--moe_router_replay rollout --vllm_server_host a", ["--moe_router_replay: rollout: servers of `swift rollout`"]),
    ("--moe_router_replay rollout --use_lmdeploy true", ["--moe_router_replay: rollout: LMDeploy returns no experts"]),
    (
        "--moe_router_replay rollout --rollout_func f.py:f",
        ["--moe_router_replay: rollout: --rollout_func: f.py:f puts completions together from several requests"],
    ),
    (
        "--router_replay_mode R3 --use_vllm true --vllm_enable_prefix_caching false",
        ["--moe_router_replay: rollout: vLLM needs its prefix cache"],
    ),
    (
        "--moe_router_replay rollout --async_generate true --in_flight_updates true --use_vllm true",
        ["--moe_router_replay: rollout: the experts of tokens before a weight sync are lost"],
    ),
    ("--moe_router_replay R2 --old_logprobs sampler", ["--moe_router_replay: trainer: --old_logprobs sampler leaves"]),
    (
        "--moe_router_replay R2 --sequence_parallel_size 2",
        ["--moe_router_replay: trainer: ranks of --sequence"],
    ),
    (
        "--rlhf_type ebft --moe_router_replay R3",
        ["--moe_router_replay: R3: not an option", "it has been tried with GRPO only"],
    ),
    ("--streaming_partial_batch true --loss_type bnpo", ["--streaming_partial_batch: true: --loss_type bnpo"]),
    (
        "--streaming_partial_batch true --scale_rewards batch",
        ["--streaming_partial_batch: true:", "scale_rewards batch"],
    ),
    (
        "--dynamic_sample true --async_generate true --reward_model m",
        ["--dynamic_sample: true", "--async_generate false"],
    ),
    ("--infer_backend transformers --use_vllm true", ["--infer_backend: transformers: contradicts --use_vllm"]),
    ("--delta 1.2 --epsilon_high 0.28", ["--delta: 1.2: must be above 1 + epsilon_high = 1.28"]),
    ("--scale_rewards group --multi_objective_aggregation normalize_then_sum", ["contradicts --scale_rewards group"]),
    ("--reward_weights 1 1 1", ["--reward_weights: 1 1 1: 3 weights for 1 rewards", "need 1: accuracy"]),
    ("--reward_weights one", ["--reward_weights: one: not a number"]),
    ("--reward_adapters a b", ["--reward_adapters: a b: 2 values for 0 reward models"]),
    ("--use_lmdeploy true --vllm_enable_lora true", ["--vllm_enable_lora: true: LMDeploy"]),
    ("--reward_funcs soft_overlong", ["--soft_cache_length: none: soft_overlong needs it", "--soft_max_length 512"]),
    (
        "--reward_funcs soft_overlong --soft_cache_length 512",
        ["--soft_cache_length: 512: ", "below --soft_max_length 512"],
    ),
    ("--streaming true", ["--max_steps: -1: a stream has no known end"]),
    ("--split_dataset_ratio 1", ["--split_dataset_ratio: 1: out of range"]),
    ("--parity_check every:0", ["--parity_check: every:0: not a choice", "start, every:N, warn, off"]),
    ("--parity_check sometimes", ["--parity_check: sometimes: not a choice"]),
    ("--use_vllm false --vllm_mode server", ["--use_vllm: false: contradicts --vllm_mode"]),
    ("--use_vllm true --use_lmdeploy true", ["--use_lmdeploy: true: excludes --use_vllm true"]),
    ("--use_vllm true --ds3_gather_for_generation false", ["--ds3_gather_for_generation: false:"]),
    ("--use_vllm true --tuner_type full --vllm_enable_lora true", ["--vllm_enable_lora: true:", "trains no adapter"]),
    (
        "--use_vllm true --lora_rank 32 --vllm_enable_lora true --vllm_max_lora_rank 16",
        ["--vllm_max_lora_rank: 16: below the rank 32"],
    ),
    ("--vllm_mode dedicated --infer_backend transformers --vllm_tensor_parallel_size 2", ["one device; --use_vllm"]),
    (
        "--use_vllm true --top_p 0.9 --rollout_importance_sampling_mode sequence_mask",
        ["--rollout_importance_sampling_mode: sequence_mask:", "--top_p 0.9; a token mode"],
    ),
    (
        "--repetition_penalty 1.1 --rollout_importance_sampling_mode sequence_truncate",
        ["--rollout_importance_sampling_mode: sequence_truncate:", "--repetition_penalty 1.1"],
    ),
    ("--load_best_model_at_end true", ["--load_best_model_at_end: true: nothing is evaluated"]),
    (
        "--load_best_model_at_end true --val_dataset v --save_steps 30 --eval_steps 20",
        ["--save_steps: 30: not a multiple of --eval_steps 20"],
    ),
    (
        "--load_best_model_at_end true --val_dataset v --save_steps 0.5 --eval_steps 20",
        ["--save_steps: 0.5: not a multiple of --eval_steps 20"],
    ),
    ("--quant_method bnb", ["--quant_bits: missing: --quant_method bnb has two sizes; give --quant_bits 4 or 8"]),
    ("--quant_method bnb --quant_bits 3", ["--quant_bits: 3: not a choice; valid: 4, 8"]),
    ("--quant_method gptq", ["--quant_method: gptq: not a choice; valid: bnb"]),
    ("--quant_method bnb --quant_bits 4 --bnb_4bit_quant_type nf8", ["--bnb_4bit_quant_type: nf8: not a choice"]),
    ("--quant_method bnb --quant_bits 4 --tuner_type full", ["--quant_method: bnb: quantised weights do not learn"]),
    ("--quant_method bnb --quant_bits 4 --tuner_type ia3", ["--quant_method: bnb:", "use --tuner_type lora"]),
    (
        "--quant_method bnb --quant_bits 8 --init_weights pissa",
        ["--init_weights: pissa: changes weights that are quant"],
    ),
    ("--quant_method bnb --quant_bits 8 --fsdp full_shard", ["--quant_method: bnb: --fsdp shards only 4-bit weights"]),
    (
        "--quant_method bnb --quant_bits 8 --deepspeed zero3",
        ["--quant_method: bnb: --deepspeed shards only"],
    ),
    (
        "--quant_method bnb --quant_bits 4 --fsdp full_shard --use_dora true",
        ["--use_dora: true: is computed from whole"],
    ),
    (
        "--quant_method bnb --quant_bits 4 --fsdp full_shard --torch_dtype bfloat16 --bnb_4bit_quant_storage uint8",
        ["--bnb_4bit_quant_storage: uint8: --fsdp needs the type of --torch_dtype"],
    ),
    ("--init_weights eva", ["--init_weights: eva: not a choice; valid: true, false, gaussian"]),
    ("--init_weights orthogonal --lora_rank 3", ["--lora_rank: 3: --init_weights orthogonal halves it"]),
    ("--init_weights olora --deepspeed zero2", ["--init_weights: olora: is computed from whole weights"]),
    ('--rank_pattern {"q_proj":0}', ["--rank_pattern: q_proj: 0: not a whole number above 0"]),
    ('--alpha_pattern {"q_proj":"x"}', ["--alpha_pattern: q_proj: x: not a number above 0"]),
    ('--alpha_pattern {"q_(":1}', ["--alpha_pattern: q_(: no regular expression"]),
    (
        "--use_vllm true --vllm_enable_lora true --modules_to_save norm",
        ["--modules_to_save: norm: vLLM takes low-rank"],
    ),
    ("--target_regex q_(proj", ["--target_regex: q_(proj: no regular expression"]),
    ("--target_regex .*q_proj --target_modules v_proj", ["--target_regex: .*q_proj: excludes --target_modules"]),
    ("--tuner_type boft --boft_block_num 2", ["--boft_block_num: 2: together with --boft_block_size 4"]),
    ("--tuner_type full --freeze_parameters_ratio 2", ["--freeze_parameters_ratio: 2: out of range", "at most 1"]),
    ("--use_vllm true --vllm_enable_lora true --use_dora true", ["--vllm_enable_lora: true: engines do not compute"]),
    ('--generation_kwargs {"temperature":0}', ["--generation_kwargs: temperature: 0: out of range; valid: at least"]),
    ('--generation_kwargs {"top_p":"high"}', ["--generation_kwargs: top_p: high: not a number"]),
    (
        '--generation_kwargs {"presense_penalty":1}',
        ["--generation_kwargs: presense_penalty: the engine transformers has no such setting; nearest: presence_"],
    ),
    (
        '--generation_kwargs {"presence_penalty":3}',
        ["--generation_kwargs: presence_penalty: 3: out of range; valid: -2 to 2"],
    ),
    ('--generation_kwargs {"frequency_penalty":"a"}', ['--generation_kwargs: frequency_penalty: "a": not a number']),
    ('--generation_kwargs {"min_tokens":-1}', ["--generation_kwargs: min_tokens: -1: not a count"]),
    ('--generation_kwargs {"stop_token_ids":"x"}', ['--generation_kwargs: stop_token_ids: "x": no list of token ids']),
    ('--generation_kwargs {"n":4}', ["--generation_kwargs: n: is set by swift itself; use --num_generations"]),
    (
        '--generation_kwargs {"guided_regex":"a"}',
        ["--generation_kwargs: guided_regex: is set by swift itself; use --vllm_guided_decoding_regex"],
    ),
    ('--generation_kwargs {"logprobs":5}', ["--generation_kwargs: logprobs: is set by swift itself"]),
    (
        '--generation_kwargs {"max_tokens":5,"max_new_tokens":7}',
        ["--generation_kwargs: max_tokens 5, max_new_tokens 7: the same setting with different values; give one"],
    ),
    ('--generation_kwargs {"stop":["a"],"stop_words":["b"]}', ['--generation_kwargs: stop ["a"], stop_words ["b"]']),
    (
        '--generation_kwargs {"min_tokens":1,"top_k":3,"min_new_tokens":2}',
        ["--generation_kwargs: min_tokens 1, min_new_tokens 2"],
    ),
    (
        "--vllm_guided_decoding_regex (a",
        ["--vllm_guided_decoding_regex: (a: not a regular expression (missing )"],
    ),
    ("--vllm_guided_decoding_regex a(?=b)", ["--vllm_guided_decoding_regex: a(?=b): (?= looks at text around it"]),
    ("--vllm_guided_decoding_regex a(?<!b)", ["--vllm_guided_decoding_regex: a(?<!b): (?<! looks at text around it"]),
    ("--vllm_guided_decoding_regex (a)\\1", ["--vllm_guided_decoding_regex: (a)\\1: \\1 refers to an earlier group"]),
    (
        "--vllm_guided_decoding_regex (?P<x>a)(?P=x)",
        ["--vllm_guided_decoding_regex: (?P<x>a)(?P=x): (?P= refers to an earlier group"],
    ),
    ("--vllm_guided_decoding_regex \\bword", ["--vllm_guided_decoding_regex: \\bword: \\b looks at text around it"]),
    ("--rollout_func f.py:g --fsdp full_shard", ["--rollout_func: f.py:g:", "samples on all ranks in step"]),
    ("--rollout_func f.py:g --deepspeed zero3", ["--rollout_func: f.py:g:", "samples on all ranks in step"]),
    (
        "--rollout_func f.py:g --vllm_mode dedicated --async_generate true --in_flight_updates true",
        ["--rollout_func: f.py:g: weights cannot change in the middle of a call; --in_flight_updates"],
    ),
    ("--interleave_prob 0.5", ["--interleave_prob: 0.5: adds up to 0.5"]),
    ("--curriculum_column c --streaming true --max_steps 4", ["--curriculum_column: c: a stream is not known"]),
    ("--interleave_prob 0.5 0.3 0.2 --dataset a b", ["--interleave_prob: 0.5 0.3 0.2: 3 shares for 2 entries"]),
    ('--columns {"a":1}', ['--columns: {"a": 1}: a must be renamed to a name']),
    ("--vllm_quantization fp8", ["--vllm_quantization: fp8: known in ms-swift, not supported here"]),
    ("--chord_mu_peak 3", ["--chord_mu_peak: 3: known in ms-swift, not supported here"]),
    ("--rollout_tools a b --gym_env math_env", ["--gym_env: math_env: together with --rollout_tools: a b"]),
    ("--rollout_tools a --tool_parser hermse", ["--tool_parser: hermse: not a choice; valid: hermes"]),
    ("--rollout_tools a --rollout_func f --deepspeed zero3 --use_vllm true", ["--rollout_func: f: together with"]),
    (
        "--multi_turn_func math_tip_trick --rollout_tools a",
        ["--multi_turn_scheduler: math_tip_trick: together with --rollout_tools: a"],
    ),
    ("--reward_funcs reward_env", ["--reward_funcs: reward_env: nothing rewards", "--rollout_source, --gym_env"]),
    (f"{GYM} --reward_funcs accuracy", ["--rollout_source: nemo_gym: no reward function takes", "environment"]),
    (f"{GYM} --gym_env math_env", ["--rollout_source: nemo_gym: together with --gym_env: math_env"]),
    (f"{GYM} --nemo_gym_mode run", ["--nemo_gym_mode: run: agents sample with a policy server", "swift rollout"]),
    (f"{SERVED} --top_k 20", ["--top_k: 20: agents receive temperature, top_p"]),
    (f"{SERVED} --stop_words x", ["--stop_words: ['x']: agents receive temperature, top_p"]),
    (f"{GYM} --nemo_gym_mode verfy", ["--nemo_gym_mode: verfy: not a choice; valid: verify, run"]),
    (f"{GYM} --nemo_gym_verify_timeout 0", ["--nemo_gym_verify_timeout: 0: out of range; valid: above 0"]),
    (f"{GYM} --nemo_gym_config_paths a.yaml", ["--nemo_gym_config_paths: nothing is started", "auto_start true"]),
    (f"{GYM} --nemo_gym_command it's", ["--nemo_gym_command: it's: No closing quotation; correct the quotation marks"]),
    (f"{GYM} --nemo_gym_command ng_run --nemo_gym_head http://gym", ["--nemo_gym_head: http://gym: ng_run is started"]),
    (f"{GYM} --nemo_gym_command ng_run --nemo_gym_head http://h:abc", ["--nemo_gym_head: http://h:abc: ng_run is"]),
    (f"{GYM} --nemo_gym_datasets a.jsonl", ["--nemo_gym_datasets: a.jsonl: not JSON"]),
    (f'{GYM} --nemo_gym_datasets {{"file":"a"}}', ["--nemo_gym_datasets: {'file': 'a'}: names no file"]),
    (
        f'{GYM} --nemo_gym_datasets {{"path":"a","server_name":"x"}} {{"path":"b","server_name":"y"}}',
        ["--nemo_gym_datasets: server_name x, y: rows of several servers", '"agent_ref"'],
    ),
    (f"{GYM} --max_excluded_frac 1.5", ["--max_excluded_frac: 1.5: out of range; valid: at least 0 and at most 1"]),
    ("--max_turns 3", ["--max_turns: 3: no effect with one answer per completion"]),
    (
        "--reward_funcs accuracy environment",
        ["--reward_funcs: environment: nothing rewards", "give --rollout_source, --gym_env"],
    ),
    ("--reward_funcs environment --rollout_func f.py:g", ["--reward_funcs: environment: nothing rewards"]),
    ("--packing_length 8", ["--packing_length: 8: not a flag of swift rlhf; a flag of: sft, sft --task_type"]),
    ("--result_path x.jsonl", ["--result_path: x.jsonl: not a flag of swift rlhf", "infer"]),
    *(
        (f"--optim {name}", [f"--optim: {name}: not a choice"])
        for name in ("galore_adamw_layerwise", "apollo_adamw_layerwise", "lomo", "adalomo", "schedule_free_adamw")
    ),
    (
        "--vllm_importance_sampling_correction false --vllm_importance_sampling_mode token_mask",
        ["--vllm_importance_sampling_correction: false: contradicts --rollout_importance_sampling_mode token_mask"],
    ),
    *((f"--profile_steps {steps}", [f"--profile_steps: {steps}: not FIRST:LAST"]) for steps in ("3", "5:3", "0:2")),
    ("--device_groups a", ["--device_groups: a: known in ms-swift, not supported here"]),
    ("--predict_with_generate true", ["--predict_with_generate: true: not a flag of swift rlhf; a flag of: sft"]),
    (
        "--eval_use_evalscope true --eval_limit 10",
        ["--eval_use_evalscope: true: known in ms-swift, not supported here"],
    ),
    ("--use_galore true --galore_rank 64", ["--use_galore: true: gradients are not projected here"]),
    ("--optim muon --deepspeed zero2", ["--optim: muon: needs whole matrices, which --deepspeed cuts"]),
    ("--optimizer muonclip", ["--optimizer: muonclip", "this optimizer of ms-swift is not here"]),
    ("--acc_strategy seq", ["--acc_strategy: seq: known in ms-swift, not supported here"]),
    ("--device_map auto", ["--device_map: auto: known in ms-swift, not supported here"]),
    ("--vllm_max_model_lengt 9", ["--vllm_max_model_lengt: 9: unknown flag", "nearest: vllm_max_model_len"]),
    ("--config run.txt", ["--config: run.txt: not a config file"]),
]


@pytest.mark.parametrize(("words", "fragments"), FLAGS, ids=[words for words, _ in FLAGS])
def test_a_wrong_flag_earns_one_line(words, fragments):
    lines = refused(*words.split())
    assert len(lines) == 1
    for fragment in fragments:
        assert fragment in lines[0]


MODES = [
    ("rlhf", "--model m --dataset d --reward_funcs accuracy", "--rlhf_type: missing: required; valid: grpo"),
    ("rlhf", "--rlhf_type grpo --dataset d --reward_funcs accuracy", "--model: missing"),
    ("rlhf", "--rlhf_type grpo --model m --reward_funcs accuracy", "--dataset: missing"),
    ("rlhf", "--rlhf_type grpo --model m --dataset d", "--reward_funcs or --reward_model"),
    ("sft", "--model m", "--dataset: missing"),
    (
        "infer",
        "--model m --temperature 5e-324",
        "--temperature: 4.94066e-324: out of range; valid: 0, or at least 0.01",
    ),
    ("infer", "--model m --temperature 1e-310", "--temperature: 1e-310: out of range; valid: 0, or at least 0.01"),
    ("sft", "--model m --dataset d --curriculum_column c", "--curriculum_column: c: not a flag of swift sft"),
    (
        "sft",
        "--model m --dataset d --torch_dtype float16 --optim adamw_cpu",
        "--optim: adamw_cpu: cannot undo the loss",
    ),
    ("sft", "--model m --dataset d --torch_dtype float16 --tuner_type full", "--torch_dtype: float16: its loss"),
    ("sft", "--model m --dataset d --eval_on_start true", "--eval_on_start: true: nothing is evaluated"),
    (
        "sft",
        "--model m --dataset d --lr_scheduler_type reduce_lr_on_plateau",
        "--lr_scheduler_type: reduce_lr_on_plateau: follows evaluations, and nothing is evaluated",
    ),
    ("sft", "--model m --dataset d --num_generations 4", "--num_generations: 4: not a flag of swift sft"),
    ("sft", "--model m --dataset d --beta 0.04", "--beta: 0.04: not a flag of swift sft"),
    ("sft", "--model m --dataset d --max_completion_length 512", "--max_completion_length: 512: not a flag of"),
    ("infer", "--val_dataset d", "--model: missing"),
    ("infer", "--model m --infer_backend lmdeploy", "--infer_backend: lmdeploy: not a choice"),
    ("infer", "--model m --infer_backend vllm --quant_method bnb --quant_bits 4", "--quant_method: bnb: vLLM gets"),
    ("infer", '--model m --generation_kwargs {"max_tokens":5,"max_new_tokens":7}', "max_tokens 5, max_new_tokens 7"),
    ("export", "--merge_lora true", "--adapters: missing"),
    ("export", "--adapters a", "--merge_lora: false"),
    ("reward-test", "--reward_funcs accuracy", "--dataset: missing"),
    ("reward-test", "--reward_funcs accuracy --dataset d --min_gold 2", "--min_gold: 2: out of range"),
    ("rollout", "--model m --host 0.0.0.0", "--host: 0.0.0.0: reachable by others without a key"),
    ("rollout", "--model m --port 70000", "--port: 70000: out of range"),
    ("config-schema", "--mode rlfh", "nearest: rlhf"),
    ("rlfh", "", "mode: rlfh: unknown mode; nearest: rlhf"),
]


@pytest.mark.parametrize(("mode", "words", "fragment"), MODES)
def test_each_mode_says_what_it_misses(mode, words, fragment):
    lines = problems(mode, *words.split())
    assert len(lines) == 1
    assert fragment in lines[0]


BASE = "rlhf_type: grpo\nmodel: m\ndataset: d.jsonl\nreward_funcs: accuracy\n"

CONFIGS = [
    (BASE + "num_generation: 4\n", "run.yaml:5: num_generation: 4: unknown flag; nearest: num_generations"),
    (BASE + "beta: 1\nepsilon: 1\nbeta: 2\n", "run.yaml:7: beta: duplicate key, first on line 5"),
    (BASE + "top_p: 1.5\n", "run.yaml:5: top_p: 1.5: out of range"),
    (BASE + "train_type: lora\ntuner_type: full\n", "--tuner_type:"),
    (BASE + "strict: maybe\n", "run.yaml:5: strict: maybe: not a boolean"),
    (BASE + "beta: null\n", "run.yaml:5: beta: null: nothing where a number is expected"),
    (BASE + "beta: [1, 2]\n", "run.yaml:5: beta: 1 2: a list of 2 values where one is expected"),
    (BASE + "beta: {a: 1}\n", "run.yaml:5: beta:"),
    (BASE + "stop_words: [[a]]\n", "run.yaml:5: stop_words: a: a list where a text is expected"),
    (BASE + "ENV: [A]\n", "run.yaml:5: ENV: not a map"),
    (BASE + "ENV:\n  A: [1]\n", "run.yaml:6: ENV: not a text"),
    (BASE + "vllm_quantization: fp8\n", "run.yaml:5: vllm_quantization: fp8: known in ms-swift, not supported here"),
    (BASE + "beta: 'x\n", "run.yaml:6: not YAML"),
    (BASE + "\tbeta: 1\n", "run.yaml:5: not YAML"),
    ("- a\n- b\n", "run.yaml: config file: not a map of settings"),
    (BASE + "ENV: {USE_HF: maybe}\n", "USE_HF: maybe: not a boolean"),
]


@pytest.mark.parametrize(("text", "fragment"), CONFIGS)
def test_a_wrong_config_names_file_and_line(text, fragment, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(text)
    lines = problems("rlhf", "run.yaml")
    assert len(lines) == 1
    assert fragment in lines[0]


@pytest.mark.parametrize(
    ("argv", "fragment"),
    [
        (["run.json"], "run.json:3: not JSON: "),
        (["missing.yaml"], "missing.yaml: config file: cannot be read (No such file or directory)"),
        (["config.toml", *RLHF], "config.toml: neither a flag nor a config file"),
        (["a.yaml", "--config", "b.yaml"], "a second config file beside a.yaml"),
        (["grpo", *RLHF], "grpo: neither a flag nor a config file"),
    ],
)
def test_a_config_that_cannot_be_read(argv, fragment, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(BASE)
    (tmp_path / "run.json").write_text('{\n "beta": 1,\n}')
    lines = problems("rlhf", *argv)
    assert len(lines) == 1
    assert fragment in lines[0]


def test_all_problems_are_listed_together_and_none_twice():
    words = "--rlhf_type grop --top_p 2 --num_generation 4 --model m --dataset d"
    subjects = sorted(line.split(":")[0] for line in problems("rlhf", *words.split()))
    assert subjects == ["--num_generation", "--reward_funcs", "--rlhf_type", "--top_p"]


@pytest.mark.parametrize("task", ["embedding", "reranker", "generative_reranker"])
def test_a_kind_of_model_that_is_not_trained_is_refused_in_one_line(task):
    words = f"--model m --dataset d --task_type {task} --label_names labels --loss_type infonce --num_labels 1"
    with pytest.raises(ConfigError) as refused_:
        parse("sft", words.split(), {})
    (line,) = refused_.value.problems
    assert line.startswith(f"--task_type: {task}: ") and "not trained here" in line
