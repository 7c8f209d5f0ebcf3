"""Every code block of the README and of the site, and every example, does what it says."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tasks.compare.plan import read_plan
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


@pytest.mark.parametrize("words", commands())
def test_modules_and_flags_exist(words, monkeypatch, capsys):
    """Flags are known to the module's help; settings of a training are parsed, classes and all."""
    monkeypatch.chdir(ROOT)
    module, *arguments = words
    if module in ("pytest", "build"):
        return
    if module == "tasks.enwik8":
        arguments = [re.sub(r"^runs/.*/config\.yaml$", TINY[0].split("=")[1], word) for word in arguments]
        if "mymaps.Softplus" in " ".join(arguments):
            arguments = [word.replace("mymaps.", "linrope.") for word in arguments]
        with pytest.raises(SystemExit) as exit:
            importlib.import_module("tasks.enwik8.__main__").main([*arguments, "--print_config"])
        assert not exit.value.code, capsys.readouterr().err
        return
    name = f"{module}.__main__" if (ROOT / module.replace(".", "/")).is_dir() else module
    with pytest.raises(SystemExit):
        importlib.import_module(name).main(["--help"])
    known = set(re.findall(r"--[\w.]+", capsys.readouterr().out))
    of_training = re.compile(r"--(data|trainer|model|config)\b")  # handed on
    unknown = [
        word for word in arguments if word.startswith("--") and not of_training.match(word) and word not in known
    ]
    assert not unknown


@pytest.mark.parametrize("code", blocks("yaml"))
def test_yaml_is_a_config(code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    if "arms" in yaml.safe_load(code):
        path = ROOT / "configs/compare" / ".of_a_page.yaml"  # its bases are beside it
        try:
            path.write_text(code)
            assert len(read_plan(path).arms) == 2
        finally:
            path.unlink()
        return
    path = tmp_path / "overlay.yaml"
    path.write_text(code)
    with pytest.raises(SystemExit) as exit:
        importlib.import_module("tasks.enwik8.__main__").main(["fit", TINY[0], f"--config={path}", "--print_config"])
    assert not exit.value.code
    assert "num_features: 64" in capsys.readouterr().out


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
