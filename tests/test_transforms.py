"""Layers that are copied, transformed by torch.func, recomputed, compiled and exported."""

from __future__ import annotations

import copy
import io
import pickle

import onnxruntime
import pytest
import torch
from torch.func import functional_call, grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

import linrope.attention
from linrope import KernelAttention, LinearAttention, Rotary, State, redraw_feature_maps
from tests.cases import CORE, MAPS, PLACEMENTS, attention_options, close, mostly_slow, randn

D_MODEL, HEADS, N = 16, 2, 37
LAYERS = mostly_slow(f"{name}-{placement}" for name in MAPS for placement in PLACEMENTS)
every_layer = pytest.mark.parametrize("which", LAYERS)


def layer(which: str, dtype: torch.dtype = torch.float64, **options) -> LinearAttention:
    name, _, placement = which.rpartition("-")
    torch.manual_seed(0)
    made = LinearAttention(D_MODEL, HEADS, **attention_options(name, placement), **options)
    redraw_feature_maps(made, step=0)
    return made.to(dtype).eval()


# ---- plain tensor operations, held to the truth ----


@pytest.fixture
def plainly(monkeypatch):
    """Everything goes the way that transforms and exporters go."""
    monkeypatch.setattr(linrope.attention, "is_transformed", lambda: True)


def kernel(name: str, placement: str, backend: str, c: int) -> KernelAttention:
    torch.manual_seed(0)
    options = attention_options(name, placement, Rotary(fraction=0.5))
    return KernelAttention(4, 3, **options, backend=backend, chunk_size=c).double()


@pytest.mark.usefixtures("plainly")
@pytest.mark.parametrize("placement", ["none", "numerator"])
@pytest.mark.parametrize("name", CORE)
@pytest.mark.parametrize(("n", "c"), [(2, 64), (7, 3), (64, 64), (65, 64), (129, 16)])
def test_outputs_gradients_and_state_are_those_of_the_reference(name, placement, n, c):
    given = [randn(2, 3, n, width, grad=True) for width in (4, 4, 5)]
    key_mask = torch.rand(2, n) > 0.2
    made = {}
    for backend in ("chunked", "reference"):
        attention, outputs, state = kernel(name, placement, backend, c), [], None
        for part in (slice(n // 3), slice(n // 3, n)):
            tokens = [x[:, :, part] for x in given]
            output, state = attention.stream(*tokens, state, key_mask=key_mask[:, part])
            outputs.append(output)
        output = torch.cat(outputs, dim=2)
        sums = sum((x / x.detach().abs().max()).square().sum() for x in (state.kv, state.key_sum))
        grads = torch.autograd.grad(output.cos().sum() + sums, given)
        made[backend] = (output, *state, *grads)
    for actual, expected in zip(made["chunked"], made["reference"], strict=True):
        close(actual, expected, 1e-10)


@pytest.mark.usefixtures("plainly")
@pytest.mark.parametrize("name", CORE)
def test_what_comes_later_changes_no_bit(name):
    attention = kernel(name, "numerator", "chunked", 3)
    given = [randn(2, 3, 8, width) for width in (4, 4, 5)]
    before = attention(*given)
    for t in range(8):
        query, key, value = (x.clone() for x in given)
        key[:, :, t + 1 :] *= 30
        value[:, :, t + 1 :] = 7
        assert torch.equal(attention(query, key, value)[:, :, : t + 1], before[:, :, : t + 1])


# ---- torch.func ----


def loss_of(made: LinearAttention):
    """The loss of a batch as a function of the layer's parameters."""
    buffers = dict(made.named_buffers())
    return lambda parameters, x: functional_call(made, (parameters, buffers), (x,)).square().sum()


@every_layer
def test_gradients_of_functions_and_of_each_sample(which):
    made, x = layer(which), randn(3, N, D_MODEL)
    parameters, loss = dict(made.named_parameters()), loss_of(made)
    whole = grad(loss)(parameters, x)
    each = vmap(grad(loss), in_dims=(None, 0))(parameters, x[:, None])
    for i in range(3):
        made.zero_grad()
        made(x[i : i + 1]).square().sum().backward()
        for name, parameter in made.named_parameters():
            close(each[name][i], parameter.grad, 1e-9)
    for name, total in whole.items():
        close(total, each[name].sum(0), 1e-9)


@every_layer
def test_a_layer_is_mapped_over_an_axis(which):
    made, x = layer(which), randn(2, 3, N, D_MODEL)
    close(vmap(made, in_dims=1, out_dims=1)(x), torch.stack([made(x[:, i]) for i in range(3)], dim=1), 1e-10)


@every_layer
def test_forward_mode_is_the_transpose_of_backward_mode(which):
    made = layer(which)
    x, tangent, cotangent = (randn(2, N, D_MODEL) for _ in range(3))
    x.requires_grad_()
    _, forward = jvp(made, (x,), (tangent,))
    (backward,) = torch.autograd.grad(made(x), x, cotangent)
    close((forward * cotangent).sum(), (backward * tangent).sum(), 1e-9)


@pytest.mark.parametrize("which", ["EluPlusOne-numerator", "FavorPlus-before"])
def test_second_derivatives(which):
    """The Hessian times a vector, beside that of the reference."""
    x, vector = randn(1, 9, D_MODEL), randn(1, 9, D_MODEL)
    products = []
    for backend in ("auto", "reference"):
        made = layer(which, backend=backend)
        products.append(jvp(grad(lambda x, made=made: made(x).cos().sum()), (x,), (vector,))[1])
    close(*products, 1e-9)


@pytest.mark.slow
def test_a_compiled_transform():
    made, x = layer("EluPlusOne-numerator"), randn(3, N, D_MODEL)
    parameters, loss = dict(made.named_parameters()), loss_of(made)
    each = vmap(grad(loss), in_dims=(None, 0))
    compiled = torch.compile(each, backend="aot_eager")(parameters, x[:, None])
    for name, expected in each(parameters, x[:, None]).items():
        close(compiled[name], expected, 1e-9)


# ---- copies, and activations that are computed again ----


@every_layer
def test_copies_compute_the_same_and_share_nothing(which):
    made, x = layer(which), randn(2, N, D_MODEL)
    expected = made(x)
    _, state = made.stream(x)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(other(x), expected)
        with torch.no_grad():
            other.value.weight.zero_()
        assert torch.equal(made(x), expected)
    state = State(*(x.detach() for x in state))
    for other in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert isinstance(other, State)
        assert torch.equal(made.stream(x, other)[0], made.stream(x, state)[0])


@every_layer
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations_give_the_same_gradients(which, reentrant):
    made, gradients = layer(which), []
    for recompute in (False, True):
        torch.manual_seed(1)
        x = randn(2, N, D_MODEL, grad=True)
        made.zero_grad()
        output = checkpoint(made, x, use_reentrant=reentrant) if recompute else made(x)
        output.square().sum().backward()
        gradients.append([x.grad, *(p.grad.clone() for p in made.parameters() if p.grad is not None)])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


# ---- export ----

# Exporting takes seconds a layer.
every_map = pytest.mark.parametrize(
    "which",
    ["EluPlusOne-numerator"]
    + [pytest.param(f"{name}-numerator", marks=pytest.mark.slow) for name in MAPS if name != "EluPlusOne"]
    + [pytest.param("FavorPlus-16-before", marks=pytest.mark.slow)],
)
LENGTHS = (2, N, 63, 64, 65, 128, 200)


def of_any_length(maximum: int = 4096):
    return torch.export.Dim("n", min=2, max=maximum)


@every_map
def test_an_exported_layer_takes_any_length(which):
    made = layer(which)
    program = torch.export.export(made, (randn(2, N, D_MODEL),), dynamic_shapes=({1: of_any_length()},))
    stored = io.BytesIO()
    torch.export.save(program, stored)
    stored.seek(0)
    exported = torch.export.load(stored).module()
    for n in LENGTHS:
        x = randn(2, n, D_MODEL)
        close(exported(x), made(x), 1e-10)


def onnx_session(module, example, dynamic_shapes=None):
    program = torch.onnx.export(module, example, dynamo=True, dynamic_shapes=dynamic_shapes, verbose=False)
    assert program is not None
    return onnxruntime.InferenceSession(program.model_proto.SerializeToString())


def run(session, *tensors):
    given = {x.name: tensor.detach().numpy() for x, tensor in zip(session.get_inputs(), tensors, strict=True)}
    return [torch.from_numpy(x) for x in session.run(None, given)]


class Step(torch.nn.Module):
    """One token, with the state's tensors as inputs and outputs."""

    def __init__(self, made):
        super().__init__()
        self.made = made

    def forward(self, x, kv, key_sum, position, log_scale):
        y, state = self.made.stream(x, State(kv, key_sum, position, log_scale))
        return (y, *state)


@every_map
def test_onnx_runs_the_parallel_form_and_the_stream(which):
    made = layer(which, torch.float32)
    # Rotated terms cancel, and a division by what is left magnifies the rounding.
    tolerance = 1e-4 if made.kernel.normalizer == "features" else 1e-3
    session = onnx_session(made, (torch.randn(2, N, D_MODEL),), ({1: of_any_length()},))
    for n in LENGTHS:
        x = torch.randn(2, n, D_MODEL)
        (output,) = run(session, x)
        close(output, made(x), tolerance)

    x = torch.randn(2, 5, D_MODEL)
    _, state = made.stream(x[:, :1])
    session = onnx_session(Step(made).eval(), (x[:, 1:2], *state))
    for t in range(1, 5):
        output, *new = run(session, x[:, t : t + 1], *state)
        expected, state = made.stream(x[:, t : t + 1], state)
        close(output, expected, tolerance)
        for actual, wanted in zip(new, state, strict=True):
            assert actual.dtype == wanted.dtype
            close(actual, wanted, tolerance)
