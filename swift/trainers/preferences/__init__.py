"""Preference methods: pairs or verdicts of answers become rows, and rows TRL's trainers' batches."""
