"""NeMo Gym: environments behind HTTP that score completions, or have them made by agents.

    verify   engine -> completion -> POST {resources server}/verify -> reward
    run      POST {agent}/run -> agent <-> policy server (`swift rollout`) -> turns with token ids, reward

Both are ways to play a trajectory (`swift.rollout.sources.multi_turn`). A failed call leaves the sample out of
training, with the reason; it is never a reward of 0.
"""
