"""Training with a trainer of TRL or transformers: the frame around it, and what each method puts into the frame."""
