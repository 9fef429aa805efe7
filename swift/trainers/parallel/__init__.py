"""Models that are sharded over ranks: DeepSpeed and FSDP2."""
