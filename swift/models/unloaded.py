"""Tensors that training does not load, in full checkpoints: other programs expect them there."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from swift.models.multimodal import NOT_LOADED
from swift.models.source import is_adapter, weight_files


def keep_unloaded(model: Path, folder: Path) -> None:
    """Copies the tensors of `NOT_LOADED` from a model's files to a full checkpoint of it, unless it is an adapter."""
    if is_adapter(folder):
        return
    begins = tuple(f"{name}." for name in NOT_LOADED)
    kept: list[Path] = []
    for file in weight_files(model):
        with safe_open(file, framework="pt") as tensors:
            found = {name: tensors.get_tensor(name) for name in tensors.keys() if name.startswith(begins)}  # noqa: SIM118
        if found:
            kept.append(folder / f"model-unloaded-{len(kept) + 1}.safetensors")
            save_file(found, kept[-1], {"format": "pt"})
    if not kept:
        return
    if (single := folder / "model.safetensors").exists():  # which is preferred to an index
        single.rename(folder / "model-trained.safetensors")
    names: dict[str, str] = {}
    for file in (files := sorted({*weight_files(folder), *kept})):
        with safe_open(file, framework="pt") as tensors:
            names |= dict.fromkeys(tensors.keys(), file.name)
    index = {"metadata": {"total_size": sum(file.stat().st_size for file in files)}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
