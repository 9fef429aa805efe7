"""Rollouts: which prompts are sampled when, by which engine, and what comes back.

`scheduler` decides (pure), `engines` sample, `pipeline` joins them with rewards and advantages and hands
global batches to the trainer. Sampling is counter-based (`seeds`): the order in which things finish never
changes what is sampled.
"""
