"""Atropos as a source of rollouts: environments sample with the policy server, and training takes what they scored.

environments -> message API -> AtroposSource -> rounds, rewards, batches as with every engine
      |
      +-> `swift rollout`, whose weights the trainer keeps up to date
"""
