"""Training with a trainer of TRL or transformers: the run around it, and one `Method` per training method."""
