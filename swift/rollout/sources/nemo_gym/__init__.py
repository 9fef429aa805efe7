"""NeMo Gym: HTTP environments that score completions, or run agents that sample them.

    verify   engine -> completion -> POST {resources server}/verify -> reward
    run      POST {agent}/run -> agent <-> policy server (`swift rollout`) -> turns with token ids, reward

Both play a trajectory (`swift.rollout.sources.multi_turn`). A failed call excludes the sample from training, with the
reason; it does not give a reward of 0.
"""
