"""The runs of `sick_runs.py`: what is wrong with each, by settings, by a plugin, or by its data or template.

The task is to add or subtract small numbers; a tiny model answers `<think>...</think><answer>7</answer>`, right in half
of the cases; easy prompts are a number that it repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HEALTHY = "healthy"


@dataclass(frozen=True)
class Case:
    """A run. cause: the id that `swift doctor` should tell first, or "healthy". how: what makes it so.

    flags: added to the usual ones, of which they replace those of the same name. plugin: source of --external_plugins.
    data: of `sick_runs.DATA`. model: of `sick_runs.MODELS`. processes: that train.
    """

    cause: str
    how: str
    flags: str = ""
    plugin: str = ""
    data: str = "sums"
    model: str = "tuned"
    processes: int = 1

    @property
    def name(self) -> str:
        """Unique among the cases; changes with them."""
        import hashlib

        text = repr((self.flags, self.plugin, self.data, self.model, *[self.processes] * (self.processes > 1)))
        return f"{self.cause}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def reward(body: str, name: str = "own", setup: str = "") -> str:
    """A plugin with a reward function; `body` is an expression of text, truth and prompt."""
    return (
        f"import random, re, time\nfrom swift.plugin import orms\n{setup}\n"
        f"def {name}(completions, solution, **kwargs):\n"
        f"    return [float({body}) for text, truth in zip(completions, solution)]\n"
        f"orms['{name}'] = {name}\n"
    )


OWN = "--reward_funcs own"
SEES = reward("f'>{truth}<' in text")
DRAW = "import time\nfrom swift.rollout.engines.transformers.sampling import BatchSampler as cls\ndraw = cls.draw\n"


def drawn(logits: str) -> str:
    """A plugin that changes the logits from which the engine draws; the trainer does not know."""
    return f"{DRAW}cls.draw = lambda self, logits, *more, **named: draw(self, {logits}, *more, **named)\n"


BROKEN = (
    "from swift.plugin import losses\nfrom swift.rl.losses import TOKEN_MEAN, Loss, Objective\ncalls = [0]\n"
    "def objective(inputs, config):\n"
    "    calls[0] += 1\n"
    "    return Objective(-inputs.ratio_T * inputs.advantages_T * (float('nan') if calls[0] % 4 == 3 else 1.0))\n"
    "losses['broken'] = Loss('broken', 'unclipped', objective, TOKEN_MEAN)\n"
)
STILL = "import torch\ntorch.optim.AdamW.step = lambda self, closure=None: None\n"
LEAK = (
    "import threading, time\nkept = []\n"
    "def leak():\n    while True:\n        kept.append(b'x' * 2_000_000 + bytes(len(kept)))\n        time.sleep(0.05)\n"
    "threading.Thread(target=leak, daemon=True).start()\n"
)
LORA = "--tuner_type lora --learning_rate 2e-3"
BACKEND = (
    "import os, time\nimport torch\nfrom swift.plugin import inference_backends\n"
    "from swift.rollout.engines.transformers import TransformersEngine, build\nclass Own(TransformersEngine):\n"
    "{body}"
    "def own(spec):\n    engine = build(spec)\n    engine.__class__ = Own\n    return engine\n"
    "inference_backends['own'] = own\n"
)
"""A plugin with an engine whose methods are `body`."""
ACTORS = "--infer_backend own --vllm_mode dedicated"
DIES = (
    "    def advance(self):\n        self.steps = getattr(self, 'steps', 0) + 1\n"
    "        if self.steps > {limit}:\n            os._exit(1)\n        return super().advance()\n"
)
FORGETS = (
    "    def update(self, stream):\n        before = [one.detach().clone() for one in self.model.parameters()]\n"
    "        ack = super().update(stream)\n"
    "        for one, old in zip(self.model.parameters(), before):\n            one.data.copy_(old)\n"
    "        return ack\n"
)
SLEEPS = "import os, time\nif os.environ.get('RANK') == '{rank}':\n    {where}\n"
"""A plugin in one rank alone."""
IN_LOSS = (
    "import swift.trainers.grpo.step as step; usual = step.policy_loss; "
    "step.policy_loss = lambda *more, **named: (time.sleep({seconds}), usual(*more, **named))[1]"
)
IN_ENGINE = (
    "from swift.rollout.engines.transformers.sampling import BatchSampler as cls; draw = cls.draw; "
    "cls.draw = lambda *more, **named: (time.sleep({seconds}), draw(*more, **named))[1]"
)

SICK = (
    Case("reward_constant", "plugin", OWN, reward("1.0")),
    Case("reward_constant", "plugin", OWN, reward("len(truth) / 10")),
    Case("reward_constant", "data", data="one solution"),
    Case("reward_unparsed", "plugin", OWN, reward("text.strip().endswith('ANSWER ' + truth)")),
    Case("reward_unparsed", "plugin", f"{OWN} format", reward("re.findall(r'boxed{(.*?)}', text) == [truth]")),
    Case("reward_unparsed", "data", OWN, reward("re.findall('<answer>(.*?)<', text) == [truth]"), data="units"),
    Case("reward_failing", "plugin", OWN, reward("1 / (random.random() > 0.4) and f'>{truth}<' in text")),
    Case("reward_failing", "plugin", OWN, reward("float('nan') if len(text) % 3 == 0 else f'>{truth}<' in text")),
    Case("reward_failing", "plugin", f"{OWN} --reward_timeout 1 --max_steps 12",
         reward("(time.sleep(3) if random.random() < 0.05 else 0) or f'>{truth}<' in text")),
    Case("reward_failing", "data", OWN, reward("int(truth) == int(text[-11:-9])"), data="some empty"),
    Case("reward_failing", "plugin", OWN, reward("f'>{truth}<' in text and 1 // (truth[0] != '1')")),
    Case("reward_constant", "data", OWN, SEES, data="the question as solution"),
    Case("reward_constant", "data", OWN, SEES, data="no solution"),
    Case("reward_unparsed", "data", OWN, reward("re.findall('<answer>(.*?)<', text) == [truth]"), data="decimals"),
    Case("reward_unparsed", "data", OWN, SEES, data="boxed"),
    Case("reward_failing", "data", OWN, reward("f'>{truth.strip()}<' in text"), data="some null"),
    Case("zero_variance_hard", "data", data="in words"),
    Case("truncation", "data", "--max_length 24 --truncation_strategy left", data="long"),
    Case("truncation", "data", "--max_length 24 --truncation_strategy right --beta 0.02", data="long"),
    Case("template_wrong", "data", data="with an end"),
    Case("template_wrong", "template", model="texts left out"),
    Case("data_repeated", "data", data="no task"),
    Case("reward_hacked", "plugin", "--reward_funcs accuracy own --reward_weights 0 1", reward("text.count('7') / 10")),
    Case("reward_hacked", "plugin", OWN, reward("text.count('1') / 5")),
    Case("reward_hacked", "plugin", f"{OWN} accuracy --reward_weights 1 0.1", reward("'9</answer>' in text")),
    Case("rewards_cancel", "plugin", "--reward_funcs accuracy own", reward("f'>{truth}<' not in text")),
    Case("rewards_cancel", "plugin", "--reward_funcs own accuracy", reward("-1.5 * (f'>{truth}<' in text)")),
    Case("rewards_cancel", "settings", "--reward_funcs accuracy format --reward_weights -1 0.2"),
    Case("zero_variance_easy", "data", "--learning_rate 1e-5 --temperature 0.6", data="easy"),
    Case("zero_variance_easy", "settings", "--reward_funcs format"),
    Case("zero_variance_hard", "data", data="hard"),
    Case("zero_variance_hard", "data", "--reward_funcs accuracy --loss_type dr_grpo --temperature 0.8", data="hard"),
    Case("learning_rate_high", "settings", "--learning_rate 3e-2"),
    Case("learning_rate_high", "settings", "--learning_rate 3e-4", data="easy"),
    Case("learning_rate_high", "settings", "--learning_rate 1e-2 --beta 0.01"),
    Case("learning_rate_high", "settings", "--tuner_type lora --learning_rate 1e-1"),
    Case("learning_rate_low", "settings", "--learning_rate 1e-8"),
    Case("learning_rate_low", "settings", "--tuner_type lora --learning_rate 1e-7 --beta 0.04"),
    Case("learning_rate_low", "settings", "--learning_rate 1e-7 --beta 0.02 --reward_funcs accuracy format"),
    Case("dead_adapter", "plugin", f"{LORA} --beta 0.04", STILL),
    Case("dead_adapter", "plugin", f"{LORA} --save_strategy steps --save_steps 20", STILL),
    Case("entropy_collapse", "settings", "--temperature 0.1"),
    Case("entropy_collapse", "settings", "--temperature 0.2 --reward_funcs accuracy format"),
    Case("length_hacking", "plugin", f"{OWN} --max_completion_length 64", reward("len(text) / 50")),
    Case("length_hacking", "plugin", f"{OWN} accuracy --reward_weights 1 0.2", reward("min(len(text), 90) / 30")),
    Case("truncation", "settings", "--max_completion_length 7"),
    Case("truncation", "settings", "--max_completion_length 8 --reward_funcs accuracy format"),
    Case("never_stops", "template", model="no end"),
    Case("never_stops", "template", "--max_completion_length 40 --reward_funcs accuracy format", model="no end"),
    Case("template_wrong", "template", model="no generation prompt"),
    Case("template_wrong", "template", model="double bos"),
    Case("template_wrong", "template", model="open roles"),
    Case("template_wrong", "template", model="another role"),
    Case("sampler_mismatch", "plugin", "--parity_check off", drawn("logits * 1.5")),
    Case("sampler_mismatch", "plugin", "--parity_check off", drawn("logits + 0.6 * (logits * 91).sin()")),
    Case("reference_drift", "settings", "--beta 5"),
    Case("reference_drift", "settings", "--beta 0.5 --ref_model {untuned}"),
    Case("data_repeated", "data", data="two prompts"),
    Case("data_repeated", "data", "--reward_funcs accuracy format", data="three rows many times"),
    Case("non_finite", "plugin", "--loss_type broken", BROKEN),
    Case("slow_reward", "plugin", f"{OWN} --max_steps 20", reward("(time.sleep(0.05) or f'>{truth}<' in text)")),
    Case("slow_reward", "plugin", f"{OWN} --max_steps 20", reward("sum(range(3_000_000)) * 0 + text.count(truth)")),
    Case("slow_engine", "plugin", "--max_steps 20", drawn("(time.sleep(0.15), logits)[1]")),
    Case("memory_growth", "plugin", "", LEAK),
    Case("slow_rank", "plugin", "--max_steps 20", SLEEPS.format(rank=1, where=IN_ENGINE.format(seconds=0.1)),
         processes=2),
    Case("slow_rank", "plugin", "--max_steps 20", SLEEPS.format(rank=0, where=IN_LOSS.format(seconds=1)), processes=2),
    Case("engine_flapping", "plugin", f"{ACTORS} --engine_restarts 1000 --max_steps 30",
         BACKEND.format(body=DIES.format(limit=100))),
    Case("stale_weights", "plugin", "--infer_backend own --vllm_mode colocate --parity_check off",
         BACKEND.format(body=FORGETS)),
    Case("stale_weights", "settings", "--infer_backend transformers --vllm_mode dedicated --async_generate true "
         "--prefetch_depth 8 --vllm_sync_interval 4 --learning_rate 1e-3"),
)  # fmt: skip

CLOSE = reward("max([0] + [1 - abs(int(truth) - int(one)) / 5 for one in re.findall('<answer>(-?[0-9]{1,4})<', text)])")
"""The nearer the answer, the higher."""

OK = (
    Case(HEALTHY, "settings"),
    Case(HEALTHY, "settings", "--learning_rate 5e-5"),
    Case(HEALTHY, "settings", "--reward_funcs accuracy format"),
    Case(HEALTHY, "settings", "--beta 0.04"),
    Case(HEALTHY, "settings", LORA),
    Case(HEALTHY, "settings", f"{LORA} --beta 0.01 --reward_funcs accuracy format"),
    Case(HEALTHY, "settings", "--loss_type dr_grpo --scale_rewards none"),
    Case(HEALTHY, "settings", "--loss_type gspo --importance_sampling_level sequence"),
    Case(HEALTHY, "settings", "--advantage_estimator rloo"),
    Case(HEALTHY, "settings", "--num_iterations 2"),
    Case(HEALTHY, "settings", "--num_generations 4"),
    Case(HEALTHY, "settings", "--num_generations 16 --temperature 0.9"),
    Case(HEALTHY, "settings", "--dynamic_sample true"),
    Case(HEALTHY, "settings", "--seed 7 --data_seed 7"),
    Case(HEALTHY, "settings", "--lr_scheduler_type cosine --warmup_ratio 0.1 --learning_rate 2e-4"),
    Case(HEALTHY, "settings", "--reward_funcs accuracy soft_overlong --soft_cache_length 8"),
    Case(HEALTHY, "settings", "--reward_funcs accuracy repetition format --reward_weights 1 0.2 0.2"),
    Case(HEALTHY, "settings", "--max_completion_length 48 --steps_per_generation 2 --per_device_train_batch_size 16"),
    Case(HEALTHY, "plugin", OWN, CLOSE),
    Case(HEALTHY, "plugin", "--reward_funcs accuracy own --reward_weights 1 0.5", CLOSE),
    Case(HEALTHY, "plugin", f"{OWN} --learning_rate 1e-3", reward("sum(c in 'aeiou' for c in text)"), model="untuned"),
    Case(HEALTHY, "plugin", OWN, reward("f'<answer>{truth}</answer>' in text")),
    Case(HEALTHY, "data", data="mixed"),
    Case(HEALTHY, "data", "--reward_funcs accuracy format --learning_rate 5e-5", data="mixed"),
    Case(HEALTHY, "settings", "--per_device_train_batch_size 16", processes=2),
    Case(HEALTHY, "settings", "--infer_backend transformers --vllm_mode dedicated --async_generate true"),
)  # fmt: skip

TELLS_BADLY = reward("1 - 2 * (f'<answer>{truth}</answer>' in text)")
SHORT = reward("__import__('math').sqrt(38 - len(text)) >= 0 and f'>{truth}<' in text")
KEEPS = reward("(kept.append(b'x' * 400_000 + bytes(len(kept))) or f'>{truth}<' in text)", setup="kept = []")

BLIND = (
    Case("reward_constant", "plugin", OWN, reward("len(truth) % 2")),
    Case("reward_unparsed", "plugin", OWN, reward("text.split('####')[-1].strip() == truth")),
    Case("reward_failing", "plugin", OWN, SHORT),
    Case("reward_hacked", "plugin", "--reward_funcs accuracy own --reward_weights 0.1 1", reward("text.count('1')")),
    Case("rewards_cancel", "plugin", "--reward_funcs accuracy own", TELLS_BADLY),
    Case("zero_variance_easy", "data", "--learning_rate 1e-5 --temperature 0.5 --num_generations 4", data="easy"),
    Case("zero_variance_hard", "data", "--num_generations 4 --beta 0.02", data="hard"),
    Case("learning_rate_high", "settings", "--learning_rate 2e-2 --reward_funcs accuracy format"),
    Case("learning_rate_high", "settings", "--learning_rate 5e-2 --loss_type dr_grpo --scale_rewards none"),
    Case("learning_rate_low", "settings", "--learning_rate 3e-8 --temperature 0.9"),
    Case("learning_rate_low", "settings", "--learning_rate 5e-8 --lr_scheduler_type cosine --warmup_ratio 0.05"),
    Case("dead_adapter", "plugin", f"{LORA} --beta 0.02 --reward_funcs accuracy format", STILL),
    Case("entropy_collapse", "settings", "--temperature 0.15 --beta 0.01"),
    Case("length_hacking", "plugin", f"{OWN} --max_completion_length 96", reward("len(text) / 150")),
    Case("truncation", "settings", "--max_completion_length 6 --num_generations 4"),
    Case("never_stops", "template", f"{LORA} --max_completion_length 32", model="no end"),
    Case("template_wrong", "template", "--reward_funcs accuracy format", model="open roles"),
    Case("sampler_mismatch", "plugin", "--parity_check off --temperature 0.9", drawn("logits / 1.6")),
    Case("sampler_mismatch", "plugin", "--parity_check off", drawn("logits + 0.3 * logits.roll(1, -1)")),
    Case("reference_drift", "settings", "--beta 8 --learning_rate 5e-5"),
    Case("data_repeated", "data", "--num_generations 16 --reward_funcs accuracy format", data="two prompts"),
    Case("non_finite", "plugin", f"{LORA} --loss_type broken", BROKEN),
    Case("slow_reward", "plugin", f"{OWN} accuracy --max_steps 20", reward("(time.sleep(0.1), 0.1 * len(text))[1]")),
    Case("slow_engine", "plugin", "--max_steps 20 --beta 0.04", drawn("(time.sleep(0.25), logits)[1]")),
    Case("memory_growth", "plugin", OWN, KEEPS),
    Case("template_wrong", "template", "--beta 0.02", model="opened twice"),
    Case("template_wrong", "data", data="in a template"),
    Case("reward_unparsed", "data", "--reward_funcs accuracy format", data="marked"),
    Case("entropy_collapse", "settings", "--top_p 0.1"),
    Case("data_repeated", "data", "--num_generations 4 --beta 0.02", data="three rows many times"),
    Case("rewards_cancel", "plugin", "--reward_funcs accuracy own --reward_weights 1 2",
         reward("-0.5 * (f'>{truth}<' in text)")),
    Case("reward_hacked", "plugin", OWN, reward("min(3, text.count('7')) / 3")),
    Case("slow_engine", "plugin", "--max_steps 20", drawn("(time.sleep(0.15), logits)[1]"), processes=2),
    Case(HEALTHY, "settings", "--loss_type dapo --epsilon_high 0.28 --overlong_filter true"),
    Case(HEALTHY, "settings", "--loss_type bnpo --learning_rate 7e-5"),
    Case(HEALTHY, "settings", "--loss_type cispo --epsilon_high 5"),
    Case(HEALTHY, "settings", "--loss_type sapo --seed 3"),
    Case(HEALTHY, "settings", "--temperature 1.2"),
    Case(HEALTHY, "settings", "--temperature 0.8 --num_generations 4"),
    Case(HEALTHY, "settings", "--torch_dtype bfloat16"),
    Case(HEALTHY, "settings", f"{LORA} --lora_rank 32 --seed 5"),
    Case(HEALTHY, "settings", "--top_entropy_quantile 0.5"),
    Case(HEALTHY, "settings", "--entropy_coef 0.001"),
    Case(HEALTHY, "settings", "--scale_rewards batch --beta 0.01"),
    Case(HEALTHY, "settings", "--beta 0.02 --sync_ref_model true --ref_model_sync_steps 10"),
    Case(HEALTHY, "settings", "--max_steps 80 --learning_rate 5e-5"),
    Case(HEALTHY, "settings", "--split_dataset_ratio 0.1 --eval_strategy steps --eval_steps 10"),
    Case(HEALTHY, "plugin", OWN, reward("1 if f'>{truth}<' in text else -1")),
    Case(HEALTHY, "plugin", OWN, reward("(f'>{truth}<' in text) + 0.05 * random.random()")),
)  # fmt: skip
"""Written after the rules; a rule that is changed because of one of them makes it no longer blind."""

CASES: Sequence[Case] = (*SICK, *OK, *BLIND)
