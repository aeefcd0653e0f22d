"""A training state on disk: small enough to be carried between machines, in files of one model's size each."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from training.optimizer import MasterMuon
from training.schedule import Schedule

POSITION = "position.json"


def save(directory: Path, optimizer: MasterMuon, schedule: Schedule) -> None:
    """Write the state; bfloat16 throughout, so that eight bits of each average and sixteen of each weight survive."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, tensors in optimizer.tensors():
        save_file(
            {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, directory / f"{name}.safetensors"
        )
    position = {**schedule.position, "remembered": optimizer.remembered}
    (directory / POSITION).write_text(json.dumps(position) + "\n")


def load(directory: Path, optimizer: MasterMuon, schedule: Schedule) -> None:
    """Take up a state that `save` wrote.

    Raises:
        ValueError: there is none, or it belongs to a model of other sizes.
    """
    if not (directory / POSITION).is_file():
        raise ValueError(f"{directory} holds no training state: it has no {POSITION}")
    position = json.loads((directory / POSITION).read_text())
    schedule.resume(position)
    files = {path.stem: load_file(path) for path in directory.glob("*.safetensors")}
    shapes = {name: tuple(tensor.shape) for name, tensor in files["weights"].items()}
    if shapes != {name: tuple(m.shape) for name, m in zip(optimizer.names, optimizer.masters, strict=True)}:
        raise ValueError(f"the state in {directory} is of a model of other sizes: give the same --pairs and --hidden")
    optimizer.restore(files, schedule.step, position.get("remembered", 0))
