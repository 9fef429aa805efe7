"""Preference methods: rows of paired or unpaired answers, for the trainers of TRL."""
