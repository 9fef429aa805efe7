"""The mathematics of reinforcement learning on completions: tensors in, tensors out.

Rewards become advantages (`advantages`), a loss (`losses`, one file each) gives every token its objective, and the
exact counts of a global batch (`global_batch`) give it its weight. `objective.policy_loss` composes these.

Nothing here does I/O or depends on a trainer, an engine or an arguments object. Sequences are packed: the tokens of all
sequences of a micro-batch are one stream, `Segments` names the sequence of each token. This file imports
nothing, because `swift.rl.arguments` is read without torch.
"""
