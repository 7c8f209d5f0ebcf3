"""Networks, out of the checkpoints that runs left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser
from torch import nn

from plots.runs import RunError


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Load a checkpoint's tensors and plain values; no code in it is run.

    Raises:
        RunError: The file is cut short, or no checkpoint.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RunError(f"{path} is not a whole checkpoint: {first}") from error


def load_network(path: Path) -> nn.Module:
    """Rebuild the network that a checkpoint of ``tasks.enwik8`` holds, with its weights, ready to be evaluated.

    The checkpoint is read as data; the classes that it names are imported, and those of others' checkpoints are code
    of others.

    Raises:
        RunError: The file is no whole checkpoint, or does not say how its network was made.
    """
    checkpoint = load_checkpoint(path)
    made = checkpoint.get("hyper_parameters", {}).get("network")
    if made is None:
        raise RunError(f"{path} does not say how its network was made; was it written by tasks.enwik8 fit?")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(nn.Module, "network", fail_untyped=False)  # as in training: PerformerLM has no types
    network = parser.instantiate(parser.parse_object({"network": made}))["network"]
    weights = {k.removeprefix("network."): v for k, v in checkpoint["state_dict"].items() if k.startswith("network.")}
    network.load_state_dict(weights)
    return network.eval()


def run_name(checkpoint: Path) -> str:
    """Experiment, arm and seed of the run that left a checkpoint, as far as its path tells."""
    return "/".join(checkpoint.parts[:-2][-3:]) or checkpoint.name


def real_text(path: Path | None, sequences: int, tokens: int) -> torch.Tensor:
    """Windows of a file, spread evenly over it: ``(sequences, tokens)`` bytes.

    Args:
        path: The file; None: the help texts that every Python brings along.
        sequences: How many windows.
        tokens: Bytes of each.

    Raises:
        OSError: The file cannot be read.
        ValueError: Sizes below 1, or the text is shorter than a window.
    """
    if sequences < 1 or tokens < 1:
        raise ValueError(f"there must be at least 1 sequence of 1 byte, got {sequences} of {tokens}")
    if path is None:
        from pydoc_data.topics import topics

        text = "\n".join(topics.values()).encode()
    else:
        text = path.read_bytes()
    if len(text) < tokens:
        raise ValueError(f"the text has {len(text)} bytes, fewer than the {tokens} of a window")
    starts = torch.linspace(0, len(text) - tokens, sequences).long().tolist()
    return torch.stack([torch.tensor(list(text[start : start + tokens])) for start in starts])
