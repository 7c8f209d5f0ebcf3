"""The single runs of a comparison, and the record that tells later whether a folder holds this very run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.compare.plan import Arm, Plan, PlanError


@dataclass(frozen=True)
class Job:
    """One run to be made: an arm with a seed.

    Attributes:
        arm: What is varied.
        seed: Everything random follows from it.
        directory: Where the run lies.
        arguments: For the training command.
        configs: Text of each config, by the path under which the arguments name it: as it was when the comparison
            began, whatever happens to the file meanwhile.
        record: What ``arm.json`` keeps, to tell later whether a folder holds this very run.
    """

    arm: Arm
    seed: int
    directory: Path
    arguments: tuple[str, ...]
    configs: dict[Path, str]
    record: dict[str, Any]


def jobs(plan: Plan, root: str | Path, flags: Sequence[str] = ()) -> list[Job]:
    """List every run of a plan, seed by seed, so that all arms of a seed exist before the next seed.

    Args:
        plan: What to compare.
        root: Folder of experiments.
        flags: Further arguments for every run; they override the plan's settings.
    """
    home = Path(root) / plan.name
    texts = {path: path.read_text() for arm in plan.arms for path in arm.configs}
    digests = {path: hashlib.sha256(text.encode()).hexdigest() for path, text in texts.items()}
    copies = {path: home / ".configs" / f"{path.stem}-{digest[:8]}.yaml" for path, digest in digests.items()}
    listed = []
    for seed in plan.seeds:
        for arm in plan.arms:
            directory = home / arm.folder / f"seed-{seed}"
            chosen = [argument for path in arm.configs for argument in ("--config", str(copies[path]))]
            own = ["--seed_everything", str(seed), "--run_dir", str(directory)]
            arguments = ("fit", *chosen, *own, *plan.flags, *flags)
            record = {
                "label": arm.label,
                "seed": seed,
                "settings": list(plan.flags),
                "flags": list(flags),
                "configs": [{"path": str(path), "sha256": digests[path]} for path in arm.configs],
                "argv": list(arguments),
            }
            configs = {copies[path]: texts[path] for path in arm.configs}
            listed.append(Job(arm, seed, directory, arguments, configs, record))
    return listed


def recorded(directory: Path) -> dict[str, Any] | None:
    """What ``arm.json`` in a run folder says; None when there is none.

    Raises:
        PlanError: It cannot be read.
    """
    path = directory / "arm.json"
    try:
        content = json.loads(path.read_text())
        return content if isinstance(content, dict) else {}
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise PlanError(f"{path}: cannot be read as JSON: {error}") from None


def check_same(job: Job) -> None:
    """Refuse to take a folder for a run that it does not hold.

    Compared are the arguments, and each config by its content: a moved or renamed file is still
    the same config, an edited one is not.

    Raises:
        PlanError: The folder holds a run with other arguments or configs, or one of unknown origin.
    """
    old = recorded(job.directory)
    if old is None:
        if not any((job.directory / file).exists() for file in ("run.json", "metrics.csv")):
            return
        differences = ["it was not started by a comparison (no arm.json)"]
    else:
        differences = [
            f"{key}: {_listed(old.get(key))} then, {_listed(job.record[key])} now"
            for key in ("seed", "settings", "flags")
            if old.get(key) != job.record[key]
        ]
        try:
            then, now = ([(c["path"], c["sha256"]) for c in r.get("configs", [])] for r in (old, job.record))
        except (TypeError, KeyError) as error:
            raise PlanError(f"{job.directory / 'arm.json'} is not what a comparison writes: {error!r}") from None
        if [digest for _, digest in then] != [digest for _, digest in now]:
            if [path for path, _ in then] == [path for path, _ in now]:
                edited = [path for (path, was), (_, is_) in zip(then, now, strict=True) if was != is_]
                differences.append(f"edited since: {', '.join(edited)}")
            else:
                before, after = (_listed([path for path, _ in pairs]) for pairs in (then, now))
                differences.append(f"configs: {before} then, {after} now")
    if differences:
        raise PlanError(
            f"{job.directory} holds another run than {job.arm.label!r}, seed {job.seed}, would be:\n"
            + "\n".join(f"  {difference}" for difference in differences)
            + "\nGive this comparison another --name, or delete that folder."
        )


def _listed(value: Any) -> str:
    return (" ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)
