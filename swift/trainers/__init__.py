"""Trainers: thin shells around transformers.Trainer and TRL that are fed by the pipeline."""
