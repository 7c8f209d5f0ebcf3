"""What a comparison file asks for: arms × seeds, each a list of configs for the training command."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_KEYS = ("name", "base", "settings", "seeds", "baseline", "against", "arms", "cpus", "gpus")
_OURS = ("--config", "--seed_everything", "--run_dir")  # a comparison sets these itself


class PlanError(Exception):
    """A comparison cannot be run as asked; the message says what is wrong, where, and what to do."""


@dataclass(frozen=True)
class Arm:
    """One variant: its name, the folder it runs in, and its configs, the later overriding the earlier."""

    label: str
    folder: str
    configs: tuple[Path, ...]


@dataclass(frozen=True)
class Plan:
    """A checked comparison file.

    Attributes:
        source: The file.
        name: Folder of the experiment.
        flags: Its settings, as arguments of the training command.
        seeds: Run for every arm, so that differences are paired.
        baseline: Label of the arm that the others are compared with.
        against: For some arms, another arm that they are compared with instead.
        arms: In the order of the file; their configs begin with the common base.
        cpus: Cores that one run asks a cluster for.
        gpus: GPUs, likewise; may be a fraction.
    """

    source: Path
    name: str
    flags: tuple[str, ...]
    seeds: tuple[int, ...]
    baseline: str
    against: dict[str, str]
    arms: tuple[Arm, ...]
    cpus: int = 1
    gpus: float = 0


def read_plan(path: str | Path, name: str | None = None) -> Plan:
    """Read and check a comparison file.

    Args:
        path: YAML with ``arms`` (name: list of configs), ``baseline`` (one of them), ``seeds``, and if
            wanted ``base`` (configs of every arm), ``settings`` (dotted keys), ``against`` (arm: its own
            baseline), ``cpus`` and ``gpus`` of a run, and ``name``. Paths are relative to the file.
        name: Overrides the file's.

    Raises:
        PlanError: The file cannot be read, or something in it is missing, unknown or contradictory.
    """
    source = Path(path)

    def refuse(message: str) -> PlanError:
        return PlanError(f"{source}: {message}")

    def configs(value: Any, key: str) -> tuple[Path, ...]:
        if not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise refuse(f"{key} must be a list of config files, got {value!r}")
        files = tuple(Path(os.path.normpath(source.parent / item)) for item in value)
        if missing := [str(file) for file in files if not file.is_file()]:
            raise refuse(f"{key} names {', '.join(missing)}: no such file (paths are relative to {source})")
        return files

    content = _load(source)
    if not isinstance(content, dict):
        raise refuse(f"expected keys and values ({', '.join(_KEYS)}), got {content!r}")
    if unknown := [str(key) for key in content if key not in _KEYS]:
        raise refuse(f"unknown key {', '.join(unknown)}; known are {', '.join(_KEYS)}")
    if absent := [key for key in ("seeds", "baseline", "arms") if key not in content]:
        raise refuse(f"no {', no '.join(absent)}")

    seeds, arms, settings = content["seeds"], content["arms"], content.get("settings", {})
    # type(), because a bool is an int to isinstance and `seeds: [no, yes]` is YAML for two of them.
    if not (isinstance(seeds, list) and seeds and all(type(s) is int and s >= 0 for s in seeds)):
        raise refuse(f"seeds must be a list of whole numbers ≥ 0, got {seeds!r}")
    if len(set(seeds)) < len(seeds):
        raise refuse(f"seeds must differ, got {seeds}")
    if not (isinstance(arms, dict) and arms and all(isinstance(label, str) for label in arms)):
        raise refuse(f"arms must map at least one name (text) to its list of configs, got {arms!r}")
    if content["baseline"] not in arms:
        raise refuse(f"baseline {content['baseline']!r} is none of the arms: {'; '.join(arms)}")
    against = content.get("against", {})
    if not (isinstance(against, dict) and all(one in arms and other in arms for one, other in against.items())):
        raise refuse(f"against must map arms to arms, got {against!r}; arms are {'; '.join(arms)}")
    if not (isinstance(settings, dict) and all(isinstance(key, str) for key in settings)):
        raise refuse(f"settings must map dotted keys to values, got {settings!r}")
    cpus, gpus = content.get("cpus", 1), content.get("gpus", 0)
    if not (type(cpus) is int and cpus >= 1 and type(gpus) in (int, float) and gpus >= 0):
        raise refuse(f"cpus must be a whole number ≥ 1 and gpus a number ≥ 0, got {cpus!r} and {gpus!r}")
    name = name if name is not None else str(content.get("name", source.stem))
    if name != Path(name).name or name in ("", ".", ".."):
        raise PlanError(f"name {name!r} is not the name of one folder")

    base = configs(content.get("base", []), "base")
    folders: dict[str, str] = {}
    for label in arms:
        other = folders.setdefault(slug(label).casefold(), label)  # some disks do not tell A from a
        if other != label or not slug(label):
            raise refuse(f"arms {other!r} and {label!r} need different folders, both would be {slug(label)!r}")
    return Plan(
        source=source,
        name=name,
        flags=check_flags([f"--{key}={_written(value)}" for key, value in settings.items()], str(source)),
        seeds=tuple(seeds),
        baseline=content["baseline"],
        against=against,
        arms=tuple(Arm(one, slug(one), base + configs(files, f"arm {one!r}")) for one, files in arms.items()),
        cpus=cpus,
        gpus=gpus,
    )


def check_flags(flags: Sequence[str], origin: str) -> tuple[str, ...]:
    """Refuse flags that would take a comparison's own decisions out of its hands.

    Raises:
        PlanError: One of them sets a config, the seed or the folder, or the first is no flag.
    """
    if flags and not flags[0].startswith("--"):
        raise PlanError(f"{origin}: unexpected argument {flags[0]!r}; flags for every run begin with --")
    if taken := [flag for flag in flags if flag.split("=")[0] in _OURS or flag == "-c"]:
        raise PlanError(f"{origin}: {taken[0]} is set by the comparison itself; name configs and seeds in its file")
    return tuple(flags)


def slug(label: str) -> str:
    """Make an arm's name fit for a folder: ``elu+1, none`` becomes ``elu+1-none``."""
    return re.sub(r"[^\w.+=-]+", "-", label).strip("-.")


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)  # JSON is YAML: true, null, [1, 2]


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key given twice, where plain YAML drops the first without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build one mapping, after looking for duplicates in it."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := [key for index, key in enumerate(keys) if key in keys[:index]]:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _load(path: Path) -> Any:
    try:
        return yaml.load(path.read_text(), _Loader)
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}; expected a comparison file (YAML)") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
