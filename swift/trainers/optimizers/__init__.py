"""Optimizers of our own, registered in `swift.plugin.registry.optimizers`; one file each."""
