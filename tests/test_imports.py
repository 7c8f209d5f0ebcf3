"""Who may import whom, read off the sources, and what ``import linrope`` leaves behind."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Rooms from the ground up: a room may use itself, its own floor and those below.
FLOORS = {
    "linrope.precision": -1,
    "linrope.transforms": -1,
    "linrope.rotary": 0,
    "linrope.decay": 0,
    "linrope.feature_maps": 0,
    "linrope.attention": 0,
    "linrope.layers": 1,
    "linrope.models": 2,
    "linrope.diagnostics": 3,
    "linrope.distillation": 3,
    "linrope.integrations": 3,
    "linrope": 4,
    "plots": 5,
    "tasks": 6,
}
FORBIDDEN = {
    "linrope": {"lightning", "pytorch_lightning", "matplotlib", "tasks", "plots", "performer_pytorch", "tests"},
    "plots": {"tasks", "lightning", "pytorch_lightning", "tests"},
    "tasks": {"tests"},
}
# The layers inside other people's models need those people's code.
ALLOWED = {"linrope.integrations": {"performer_pytorch", "transformers"}}
THIRD_PARTIES_OF_LINROPE = {"torch", "einops", "jaxtyping"}


def sources():
    for package in ("linrope", "tasks", "plots"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imported(module: str, path: Path) -> set[str]:
    """Full names of all that a file imports, at any depth of its code."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            # A name may be a module of its own: both are looked at.
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            names |= {arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)}
    return names


def room(name: str) -> str | None:
    """The longest room that holds ``name``."""
    holding = [r for r in FLOORS if name == r or name.startswith(r + ".")]
    return max(holding, key=len) if holding else None


FILES = dict(sources())
every_file = pytest.mark.parametrize("module", FILES)


def test_the_walk_sees_the_packages():
    assert {"linrope", "linrope.rotary", "linrope.attention", "linrope.layers", "linrope.models"} <= FILES.keys()
    assert "linrope.attention.state" in imported("linrope.attention.chunked", FILES["linrope.attention.chunked"])


def test_every_file_of_linrope_has_a_floor():
    for module in FILES:
        assert module == "linrope" or room(module) not in (None, "linrope"), f"{module} needs a floor in FLOORS"


@every_file
def test_imports_go_down(module):
    own = room(module)
    for name in imported(module, FILES[module]):
        # `from linrope import X` is the whole house, `linrope.rotary` one room of it.
        target = room(name)
        if target is None or (target == "linrope" and name != "linrope"):
            continue
        assert FLOORS[target] <= FLOORS[own], f"{module} imports {name}"


def test_no_two_rooms_import_each_other():
    edges = {(room(m), room(name)) for m, path in FILES.items() for name in imported(m, path)}
    edges = {(a, b) for a, b in edges if a != b and b is not None}
    assert not [(a, b) for a, b in edges if (b, a) in edges and "linrope" not in (a, b)]


@every_file
def test_packages_keep_to_what_they_may_use(module):
    package = module.split(".")[0]
    roots = {name.split(".")[0] for name in imported(module, FILES[module])}
    assert not roots & FORBIDDEN[package] - ALLOWED.get(room(module), set()), module


@pytest.mark.parametrize("module", [m for m in FILES if m.split(".")[0] == "linrope"])
def test_linrope_needs_torch_einops_and_jaxtyping_alone(module):
    roots = {name.split(".")[0] for name in imported(module, FILES[module])}
    outside = roots - set(sys.stdlib_module_names) - {"linrope"} - THIRD_PARTIES_OF_LINROPE
    assert room(module) == "linrope.integrations" or not outside, outside


SCRIPT = """
import json, locale, os, random, signal, sys, warnings
import torch, einops, jaxtyping

def snapshot():
    return {
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "rng": torch.get_rng_state().tolist(),
        "random": repr(random.getstate()),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "grad": torch.is_grad_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "warnings": repr(warnings.filters),
        "environment": dict(os.environ),
        "path": list(sys.path),
        "directory": os.getcwd(),
        "recursion": sys.getrecursionlimit(),
        "locale": locale.setlocale(locale.LC_ALL),
        "hook": repr(sys.excepthook),
        "interrupt": repr(signal.getsignal(signal.SIGINT)),
        "print": repr(torch._tensor_str.PRINT_OPTS),
    }

before, loaded = snapshot(), set(sys.modules)
import linrope
after = snapshot()
print(json.dumps({
    "changed": [name for name in before if before[name] != after[name]],
    "new": sorted(set(sys.modules) - loaded),
    "all": sorted(sys.modules),
    "file": linrope.__file__,
    "missing": [name for name in linrope.__all__ if not hasattr(linrope, name)],
}))
"""


@pytest.fixture(scope="module")
def fresh():
    run = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stderr == ""
    *printed, report = run.stdout.splitlines()
    assert not printed, "importing linrope prints"
    return json.loads(report)


def test_a_fresh_process_imports_this_linrope(fresh):
    assert Path(fresh["file"]).is_relative_to(ROOT)
    assert not fresh["missing"]


def test_importing_linrope_changes_nothing_global(fresh):
    assert not fresh["changed"]


def test_importing_linrope_loads_nothing_else(fresh):
    roots = {name.split(".")[0] for name in fresh["all"]}
    assert not roots & (FORBIDDEN["linrope"] | {"transformers", "jsonargparse", "pandas", "scipy"})
    # Beside itself and the standard library: at most parts of its three dependencies not loaded before.
    new = {name.split(".")[0] for name in fresh["new"]} - set(sys.stdlib_module_names)
    assert new <= {"linrope"} | THIRD_PARTIES_OF_LINROPE
