"""The C kernel: that it is built where it can be, gives way where it cannot, and touches no memory that is not its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linrope import Rotary, State, linear_attention, stream_linear_attention
from linrope.attention.backends import choose
from linrope.attention.build import SOURCE, cache_folder
from linrope.attention.native import _TENSORS, CHUNK, attend
from tests.cases import has_compiler, randn

pytestmark = pytest.mark.skipif(not has_compiler(), reason="no C compiler: set CC to name one")

TRY = """
import torch
from linrope import Rotary, linear_attention
torch.manual_seed(0)
query, key, value = torch.rand(1, 2, 40, 6), torch.rand(1, 2, 40, 6), torch.randn(1, 2, 40, 5)
outputs = [linear_attention(query, key, value, rotary=Rotary(), backend=name) for name in ({names})]
torch.testing.assert_close(outputs[0], outputs[1])
from linrope.attention.backends import choose
print("chosen", choose("auto", torch.float32, "cpu"))
"""


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, from the root of the project."""
    root = str(Path(__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": root, **environment},
    )


def script(path: Path, body: str) -> str:
    """An executable that plays compiler."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false", "'unclosed"])
def test_without_a_working_compiler_torch_takes_over_and_says_so_once(tmp_path, compiler):
    done = python(TRY.format(names="'auto', 'reference', 'auto'"), CC=compiler, LINROPE_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "chosen chunked" in done.stdout
    said = [line for line in done.stderr.splitlines() if "linrope computes with plain torch" in line]
    assert len(said) == 1
    assert compiler in said[0]


def test_asked_for_by_name_a_kernel_that_cannot_be_had_is_an_error(tmp_path):
    done = python(TRY.format(names="'native', 'auto'"), CC="no-such-compiler", LINROPE_CACHE=str(tmp_path))
    assert done.returncode == 1
    assert (
        "RuntimeError: the native backend cannot be had: no C compiler found (looked for no-such-compiler"
        in done.stderr
    )


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    occupied = tmp_path / "file"
    occupied.write_text("")
    done = python(TRY.format(names="'native', 'auto'"), LINROPE_CACHE=str(occupied / "below"))
    assert f"cannot write to {occupied / 'below'}" in done.stderr
    assert "set LINROPE_CACHE" in done.stderr


@pytest.mark.slow
def test_a_compiler_that_says_strange_things_is_still_a_compiler(tmp_path):
    noisy = script(tmp_path / "noisy", "printf '\\377\\376' >&2; exec cc \"$@\"")
    done = python(TRY.format(names="'native', 'reference'"), CC=noisy, LINROPE_CACHE=str(tmp_path / "a b"))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_compiler_without_openmp_builds_for_one_thread(tmp_path):
    plain = script(
        tmp_path / "plain", 'case "$*" in *-fopenmp*) echo "error: no OpenMP" >&2; exit 1;; esac; exec cc "$@"'
    )
    done = python(TRY.format(names="'native', 'reference'"), CC=plain, LINROPE_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_what_was_linked_must_be_the_kernel(tmp_path):
    other = script(tmp_path / "other", 'case "$*" in *-shared*) for x in "$@"; do [ "$last" = -o ] && out=$x; last=$x; done; '
                   'echo "int nothing;" | cc -shared -x c - -o "$out"; exit;; esac; exec cc "$@"')  # fmt: skip
    done = python(TRY.format(names="'auto', 'reference'"), CC=other, LINROPE_CACHE=str(tmp_path))
    assert "chosen chunked" in done.stdout
    assert "undefined symbol: forward" in done.stderr


@pytest.mark.parametrize("name", ["native", "chunked", "reference"])
def test_the_environment_forces_a_backend(name, monkeypatch):
    monkeypatch.setenv("LINROPE_BACKEND", name)
    assert choose("auto", torch.float32, "cpu") == name
    assert choose("chunked", torch.float32, "cpu") == "chunked"
    monkeypatch.setenv("LINROPE_BACKEND", "")
    assert choose("auto", torch.float32, "cpu") == "native"


def test_an_unknown_backend_is_refused(monkeypatch):
    query, key, value = (randn(1, 1, 4, 2) for _ in range(3))
    with pytest.raises(ValueError, match=r"backend must be .*'native'.*, got 'fast'"):
        linear_attention(query, key, value, backend="fast")
    monkeypatch.setenv("LINROPE_BACKEND", "quick")
    with pytest.raises(ValueError, match=r"LINROPE_BACKEND must be .*native.*, got 'quick'"):
        linear_attention(query, key, value)


def test_the_kernel_is_for_the_cpu_and_wide_floats():
    with pytest.raises(RuntimeError, match="it is for the CPU, the tensors are on meta"):
        choose("native", torch.float32, "meta")
    assert choose("auto", torch.float32, "meta") == "chunked"


@pytest.mark.slow
def test_a_kernel_is_built_once_by_many_processes_and_then_kept(tmp_path):
    code = TRY.format(names="'native', 'reference'")
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "LINROPE_CACHE": str(tmp_path), "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    several = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for process in several:
        _, stderr = process.communicate()
        assert process.returncode == 0, stderr
    (built,) = tmp_path.iterdir()  # nothing is left of what was written aside
    assert built.name.startswith("native-float-")
    before = built.stat().st_mtime_ns
    assert python(code, LINROPE_CACHE=str(tmp_path)).returncode == 0
    assert built.stat().st_mtime_ns == before
    whole = built.read_bytes()
    for damaged in (b"no library", whole[:8000], whole + b"x"):  # code that is cut short would take the process down
        built.write_bytes(damaged)
        assert python(code, LINROPE_CACHE=str(tmp_path)).returncode == 0
        assert built.read_bytes() == whole


def test_the_cache_is_the_users_own(monkeypatch, tmp_path):
    monkeypatch.delenv("LINROPE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "linrope"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "linrope"
    monkeypatch.setenv("LINROPE_CACHE", "~/here")
    assert cache_folder() == Path.home() / "here"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LINROPE_CACHE", ".")
    assert cache_folder() == tmp_path


def test_the_source_is_in_the_package_and_agrees_on_the_chunk():
    assert f"CHUNK = {CHUNK}," in SOURCE.read_text()


def test_python_and_c_agree_on_the_order_of_tensors():
    (fields,) = re.findall(r"struct \{\n((?: +tensor .*\n)+) +\};\n +tensor all\[(?:\d+)\]", SOURCE.read_text())
    names = [name for line in re.findall(r"tensor (.*);", fields) for name in line.split(", ")]
    assert tuple(names) == _TENSORS
    assert f"tensor all[{len(names)}]" in SOURCE.read_text()


def arguments(scaled: bool, turned: bool, divides: bool = True):
    """Of the operator, at a length that is no multiple of anything."""
    b, h, n, m, e = 2, 3, 37, 6, 5
    query, key = (randn(b, h, n, m, dtype=torch.float32).abs().requires_grad_() for _ in "qk")
    value = randn(b, h, n, e, dtype=torch.float32, grad=True)
    turns = Rotary().turns(query, None).expand(b, h, -1, -1) if turned else None
    log_scale = randn(b, h, n, dtype=torch.float32, grad=True) if scaled else None
    kv, key_sum = torch.zeros(b, h, m, e, requires_grad=True), torch.zeros(b, h, m, requires_grad=True)
    scale = torch.full((b, h), -5.0 if scaled else 0.0)
    return query, key, value, turns, turns, log_scale, kv, key_sum, scale, divides, True


@pytest.mark.parametrize(
    ("scaled", "turned", "divides"), [(False, True, True), (True, False, True), (False, True, False)]
)
def test_the_operator_keeps_torchs_rules(scaled, turned, divides):
    torch.library.opcheck(attend, arguments(scaled, turned, divides))


def differentiate_twice(y, x):
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    return torch.autograd.grad(grad.square().sum(), x)


def test_twice_differentiated_is_refused():
    query, key, value = (randn(1, 1, 8, 4).abs().requires_grad_() for _ in range(3))
    for backend in ("native", "chunked"):
        output = linear_attention(query, key, value, backend=backend)
        with pytest.raises(RuntimeError):
            differentiate_twice(output.sum(), query)


def test_a_second_derivative_around_a_first_is_refused():
    """A decay is a factor outside too, whose derivative is no more than a part of the whole."""
    query, key, value = (randn(1, 1, 8, 4).abs() for _ in range(3))
    log_decay = torch.tensor([-0.3], dtype=torch.float64, requires_grad=True)
    for backend in ("native", "chunked"):
        output = linear_attention(query, key, value, backend=backend, log_decay=log_decay)
        with pytest.raises(RuntimeError):
            differentiate_twice(output.square().sum(), log_decay)


fast = pytest.mark.parametrize("backend", ["native", "chunked"])


@fast
@pytest.mark.parametrize("name", ["kv", "key_sum", "position", "log_scale"])
def test_a_state_of_other_shapes_is_refused(backend, name):
    x = torch.rand(2, 3, 5, 4)
    _, state = stream_linear_attention(x, x, x, backend=backend)
    for wrong in (getattr(state, name)[:1], getattr(state, name)[..., None]):
        with pytest.raises(ValueError, match=rf"state\.{name} must be \("):
            stream_linear_attention(x, x, x, state._replace(**{name: wrong}), backend=backend)


def test_forward_mode_is_refused_and_not_silently_zero():
    x = torch.rand(1, 1, 4, 2)
    with pytest.raises(NotImplementedError, match="use backend='auto'"):
        torch.func.jvp(lambda v: linear_attention(x, x, v, backend="native"), (x,), (x,))


@fast
def test_inputs_that_overlap_themselves(backend):
    x = torch.rand(1, 1, 109).unfold(-1, 70, 1).requires_grad_()  # (1, 1, 40, 70), two strides of 1
    for role in range(3):
        inputs = [torch.rand(1, 1, 40, 70) for _ in range(3)]
        inputs[role] = x
        output, expected = (linear_attention(*inputs, backend=name) for name in (backend, "reference"))
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
        grad, wanted = (torch.autograd.grad(y.square().sum(), x)[0] for y in (output, expected))
        torch.testing.assert_close(grad, wanted, rtol=1e-3, atol=1e-4)


@fast
def test_backward_within_autocast(backend):
    x = torch.rand(1, 1, 8, 4).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        linear_attention(x, x, x, backend=backend).square().sum().backward()
    inside, x.grad = x.grad, None
    linear_attention(x, x, x, backend="reference").square().sum().backward()
    torch.testing.assert_close(inside, x.grad, rtol=1e-4, atol=1e-5)


class TwiceAsFast(Rotary):
    """A rotation of its own, in the guise of another."""

    def forward(self, features, positions=None):
        return super().forward(features, 2 * torch.arange(features.shape[2]) if positions is None else 2 * positions)


@fast
def test_a_rotation_that_derives_from_rotary_is_itself(backend):
    query, key, value = (randn(1, 2, 40, 4).abs() for _ in range(3))
    output, expected = (
        linear_attention(query, key, value, rotary=TwiceAsFast(), backend=name) for name in (backend, "reference")
    )
    torch.testing.assert_close(output, expected)


@fast
@pytest.mark.parametrize("scaled", [False, True])
def test_training_goes_on_from_a_state_of_inference(backend, scaled):
    x, c = torch.rand(1, 1, 5, 4), torch.rand(1, 1, 5) if scaled else None
    with torch.inference_mode():
        _, state = stream_linear_attention(x, x, x, backend=backend, key_log_scale=c)
    y = torch.rand(1, 1, 5, 4).requires_grad_()
    output, _ = stream_linear_attention(y, y, y, state, backend=backend, key_log_scale=c)
    output.sum().backward()
    inside, y.grad = y.grad, None
    stream_linear_attention(y, y, y, state, backend="reference", key_log_scale=c)[0].sum().backward()
    torch.testing.assert_close(inside, y.grad, rtol=1e-4, atol=1e-5)


@fast
def test_a_log_scale_of_the_state_has_no_gradient(backend):
    x, c = torch.rand(1, 1, 5, 4), torch.rand(1, 1, 5, requires_grad=True)
    _, state = stream_linear_attention(x, x, x, backend=backend, key_log_scale=c)
    state = state._replace(kv=state.kv.detach(), key_sum=state.key_sum.detach(), log_scale=c[..., 0])
    stream_linear_attention(x, x, x, state, backend=backend, key_log_scale=c.detach())


@pytest.mark.parametrize("backend", ["native", "chunked"])
def test_long_sums_of_small_numbers_do_not_stall(backend):
    """A third, added 100,000 times in float32 one by one, comes to 0.8% less than it should."""
    n = 100_000
    thirds = torch.full((1, 1, n, 2), 1 / 3)
    output, state = stream_linear_attention(thirds, thirds, torch.ones(1, 1, n, 1), backend=backend)
    torch.testing.assert_close(state.key_sum, torch.full((1, 1, 2), n / 3), rtol=1e-4, atol=0)
    torch.testing.assert_close(state.kv, torch.full((1, 1, 2, 1), n / 3), rtol=1e-4, atol=0)
    torch.testing.assert_close(output, torch.ones(1, 1, n, 1), rtol=1e-4, atol=0)


FUZZ = st.fixed_dictionaries(
    {
        "b": st.integers(1, 3),
        "h": st.integers(1, 3),
        "n": st.integers(1, 100),
        "m": st.integers(1, 70),
        "e": st.integers(1, 70),
        "layout": st.sampled_from(["whole", "heads last", "every other", "expanded", "backwards"]),
        "rotation": st.sampled_from([None, "all", "part", "half"]),
        "masked": st.booleans(),
        "scaled": st.booleans(),
        "begins": st.booleans(),
        "normalizer": st.sampled_from(["features", "rms"]),
        "moved": st.booleans(),
        "seed": st.integers(0, 10_000),
    }
)


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same kind of numbers, in memory as callers may have them."""
    b, h, n, m = x.shape
    if layout == "heads last":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "every other":
        return torch.stack((x, x + 1), dim=-1).flatten(-2)[..., ::2]
    if layout == "expanded":
        return x[:1, :1].expand(b, h, n, m)
    return x.mT.contiguous().mT if layout == "backwards" else x


def compare(case: dict, backend: str) -> None:
    """Outputs, gradients and state of a backend are those of the reference."""
    torch.manual_seed(case["seed"])
    b, h, n, m, e = (case[letter] for letter in "bhnme")
    query, key = (laid_out(torch.rand(b, h, n, m, dtype=torch.float64) + 0.1, case["layout"]) for _ in "qk")
    value = laid_out(randn(b, h, n, e), case["layout"])
    log_scale = 5 * randn(b, h, n) if case["scaled"] else None
    inputs = [x.detach().requires_grad_() for x in (query, key, value, log_scale) if x is not None]
    state = None
    if case["begins"]:
        kv, key_sum = randn(b, h, m, e, grad=True), torch.rand(b, h, m, dtype=torch.float64, requires_grad=True)
        scale = randn(b, h) if case["scaled"] else torch.zeros(b, h, dtype=torch.float64)
        state = State(kv, key_sum, torch.randint(1000, (b,)), scale)
        inputs += [kv, key_sum]
    rotary = None
    if case["rotation"] and m > 1:
        fraction = 1.0 if case["rotation"] != "part" else 0.5
        rotary = Rotary(fraction=fraction, pairing="half" if case["rotation"] == "half" else "interleaved")
        rotary = rotary.for_width(m) if round(fraction * m) > 1 else None
    mask = torch.rand(b, n) > 0.3 if case["masked"] else None
    positions = torch.randint(100, (b, n)) if case["moved"] else None

    def run(backend):
        query, key, value = inputs[:3]
        scale = inputs[3] if case["scaled"] else None
        options = {"rotary": rotary, "key_mask": mask, "key_log_scale": scale, "normalizer": case["normalizer"]}
        output, new = stream_linear_attention(
            query, key, value, state, query_positions=positions, backend=backend, **options
        )
        loss = (output * weights).sum() + (new.kv * kv_weights).sum() + new.key_sum.sum()
        return output, *new, *torch.autograd.grad(loss, inputs)

    weights, kv_weights = randn(b, h, n, e), randn(b, h, m, e)
    for found, expected in zip(run(backend), run("reference"), strict=True):
        # An exact 0 comes out as rounding of terms of size 1.
        size = max(1.0, expected.abs().max().item())
        torch.testing.assert_close(found.to(expected.dtype), expected, rtol=1e-8, atol=1e-9 * size)


@given(case=FUZZ)
@settings(max_examples=150)
@pytest.mark.parametrize("backend", ["native", "chunked"])
def test_any_shape_stride_and_mask_gives_what_the_reference_gives(backend, case):
    compare(case, backend)


SANITIZED = """
import random, sys
sys.path.insert(0, {root!r})
from tests.test_native import compare
draw = random.Random(0)
for seed in range(40):
    case = dict(b=draw.randint(1, 2), h=draw.randint(1, 3), n=draw.randint(1, 80), m=draw.randint(1, 40), e=draw.randint(1, 40))
    case |= dict(layout=draw.choice(["whole", "heads last", "every other"]), rotation=draw.choice([None, "all", "part"]))
    case |= {{k: draw.random() < 0.5 for k in ("masked", "scaled", "begins", "moved")}}
    compare(case | dict(normalizer="features", seed=seed), "native")
print("clean")
"""


@pytest.mark.slow
def test_the_kernel_stays_within_its_memory(tmp_path):
    """Under AddressSanitizer and UndefinedBehaviorSanitizer, over shapes, strides and masks."""
    library = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not os.path.isabs(library):
        pytest.skip("gcc has no AddressSanitizer here")
    done = python(
        SANITIZED.format(root=str(Path(__file__).parents[1])),
        CC="gcc -g -fsanitize=address,undefined -fno-sanitize-recover=all",
        LD_PRELOAD=library,
        ASAN_OPTIONS="detect_leaks=0",
        LINROPE_CACHE=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "clean"
