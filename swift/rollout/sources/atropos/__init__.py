"""Atropos as a source of rollouts: environments sample with the policy server; their scored groups are trained on.

environments -> message API -> AtroposSource -> rounds, rewards, batches as with every engine
      |
      +-> `swift rollout`, which receives the weights of the trainer
"""
