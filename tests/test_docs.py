"""Every code block of the README and of the site, and every example, does what it says."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tasks.compare.plan import PlanError, read_plan
from tests.test_enwik8_cli import ROOT, TINY
from tests.test_enwik8_cli import fit as train

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs/pages").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "docs/examples").glob("*.py"))
LONG = ("onnx_export", "llama")


def blocks(language: str, pages=PAGES):
    """The blocks of all pages, each with the name of its page."""
    for page in pages:
        for code in re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
            if "--8<--" not in code:  # a file of its own, tested below
                yield pytest.param(code, id=f"{page.stem}: {code.strip().splitlines()[0][:40]}")


def commands(pages=PAGES):
    """The ``python -m …`` of all pages, each as a list of words."""
    for page in pages:
        for code in re.findall(r"^```sh\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
            for line in code.replace("\\\n", " ").splitlines():
                for part in line.split("&&"):
                    words = shlex.split(part, comments=True)
                    if len(words) > 2 and words[0].endswith("python") and words[1] == "-m":
                        yield pytest.param(words[2:], id=f"{page.stem}: {' '.join(words[2:])[:60]}")


@pytest.mark.parametrize("code", blocks("python"))
def test_python_runs(code):
    exec(compile(code, "a page", "exec"), {"__name__": "a_page"})


@pytest.mark.parametrize(
    "example",
    [pytest.param(x, id=x.stem, marks=[pytest.mark.slow] if x.stem in LONG else []) for x in EXAMPLES],
)
def test_examples_run_and_are_short(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(example), run_name="__main__")
    code = [line for line in example.read_text().splitlines() if line.strip()]
    docstring = ast.get_docstring(ast.parse(example.read_text()))
    assert docstring
    assert len(code) - len(docstring.splitlines()) <= 20, example


def test_every_example_is_shown():
    shown = {name for page in PAGES for name in re.findall(r'--8<-- "(.+?)"', page.read_text())}
    assert shown == {path.name for path in EXAMPLES}


class Parsed(Exception):
    """A command's arguments were understood; what it would do now is left out."""


def parsed_as_training(arguments):
    """Settings of a training are parsed, classes and all."""
    with pytest.raises(SystemExit) as exit:
        importlib.import_module("tasks.enwik8.__main__").main([*arguments, "--print_config"])
    assert not exit.value.code


def understand(words, monkeypatch):
    """Parse the arguments as the command does, and stop there."""
    monkeypatch.chdir(ROOT)
    module, *arguments = words
    if module in ("pytest", "build"):
        return
    if module == "tasks.enwik8":
        arguments = [re.sub(r"^runs/.*/config\.yaml$", TINY[0].split("=")[1], word) for word in arguments]
        parsed_as_training([word.replace("mymaps.", "linrope.") for word in arguments])  # the reader's own file
        return
    name = f"{module}.__main__" if (ROOT / module.replace(".", "/")).is_dir() else module
    main = importlib.import_module(name).main
    if module == "tasks.compare":
        handed_on = []
        for flag in ("--data.", "--trainer.", "--model."):
            while at := next((i for i, word in enumerate(arguments) if word.startswith(flag)), None):
                handed_on += arguments[at : at + 2]
                del arguments[at : at + 2]
        if handed_on:
            parsed_as_training(["fit", TINY[0], *handed_on])
        if arguments[0].endswith(".yaml"):
            assert read_plan(arguments[0]).arms
    parse = argparse.ArgumentParser.parse_known_args

    def stop(self, *given, **options):
        _, unknown = parse(self, *given, **options)
        assert not unknown
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
    with pytest.raises(Parsed):
        main(arguments)


@pytest.mark.parametrize("words", commands())
def test_commands_are_understood(words, monkeypatch, capsys):
    understand(words, monkeypatch)


@pytest.mark.parametrize(
    "line",
    [
        "tasks.compare configs/compare/nowhere.yaml",
        "tasks.compare configs/compare/rope.yaml --data.korpus enwik8",
        "plots.rotary_decay --width abc",
        "plots.rotary_decay stray",
        "tasks.generate --prompt x",
        "tasks.enwik8 fit --config configs/enwik8/nowhere.yaml",
    ],
)
def test_commands_with_mistakes_are_not(line, monkeypatch, capsys):
    with pytest.raises((PlanError, AssertionError, SystemExit)):
        understand(line.split(), monkeypatch)


@pytest.mark.parametrize("code", blocks("yaml"))
def test_yaml_is_a_plan_or_an_overlay_that_trains(code, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    path = tmp_path / "configs/compare/of_a_page.yaml"
    path.write_text(code)
    content = yaml.safe_load(code)
    if "arms" in content:
        assert len(read_plan(path).arms) == len(content["arms"])
        return
    assert train(tmp_path / "arm" / "seed-0", base=[TINY[0], f"--config={path}", *TINY[1:]]) == 0


@pytest.mark.slow
def test_the_guide_to_training_works_from_start_to_end(tmp_path, monkeypatch):
    """Its commands, one after the other, with a network and a number of steps that take seconds."""
    monkeypatch.chdir(ROOT)
    for (words,) in (parameter.values for parameter in commands([ROOT / "docs/pages/guides/train.md"])):
        module, *arguments = [word.replace("runs/mine", f"{tmp_path}/runs/mine") for word in words]
        if arguments[0] == "fit":
            run_dir = Path(arguments[arguments.index("--run_dir") + 1])
            given = arguments[1 : arguments.index("--run_dir")] + arguments[arguments.index("--run_dir") + 2 :]
            assert train(run_dir, base=[*given, *TINY[1:]]) == 0
            continue
        if "--out" in arguments:
            arguments[-1] = str(tmp_path / arguments[-1])
        done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "diagnostics.png").is_file()
    assert (tmp_path / "rotary_decay.svg").is_file()
