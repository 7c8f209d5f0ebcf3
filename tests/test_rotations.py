"""What is promised of rotations, of every kind: C2, C3, C4, C5, C6 and C10."""

import copy
from functools import partial

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from linrope import (
    ALiBi,
    AxialRotary,
    ByteTransformer,
    DynamicNTKScaling,
    FavorPlus,
    LearnedRotary,
    LinearAttention,
    LinearScaling,
    Llama3Scaling,
    LongRoPE,
    NTKScaling,
    Rotary,
    SoftmaxAttention,
    YaRN,
    linear_attention,
    stream_linear_attention,
)
from linrope.rotary import half_order, kept
from linrope.rotary import rotation as rotation_module
from tasks.optimizers import split_parameters
from tests.cases import CAUSAL_PATHS, CORE_ROTATIONS, DYNAMIC, PATHS, ROTATIONS, close, randn, true_turn, truth

B, H, N, M, E = 2, 3, 13, 8, 5
FAR = torch.cat((torch.arange(4097), torch.tensor([65_536, 2**20])))
STREAMED = [name for name in ROTATIONS if name not in DYNAMIC]


def mostly_slow(names):
    return [pytest.param(name, marks=[] if name in CORE_ROTATIONS else pytest.mark.slow) for name in names]


every_rotation = pytest.mark.parametrize("name", mostly_slow(ROTATIONS))
every_streamed = pytest.mark.parametrize("name", mostly_slow(STREAMED))
# One path of each kind; tests/test_attention.py goes them all.
KINDS_OF_PATH = ("native", "native-noncausal", "chunked-3", "reference")
few_paths = pytest.mark.parametrize("path", [p for p in PATHS if p.name in KINDS_OF_PATH], ids=lambda path: path.name)
few_causal_paths = pytest.mark.parametrize(
    "path", [p for p in CAUSAL_PATHS if p.name in KINDS_OF_PATH], ids=lambda path: path.name
)


def features(n=N, grad=False):
    """φ(q), φ(k) and values."""
    return [
        *((randn(B, H, n, M).abs() + 0.1).requires_grad_(grad) for _ in range(2)),
        randn(B, H, n, E).requires_grad_(grad),
    ]


def parameters(rotary):
    return list(rotary.parameters())


@every_rotation
@pytest.mark.parametrize("batched", [False, True])
def test_a_rotation_is_a_complex_product(name, batched):
    x, rotary = randn(B, H, N, M), ROTATIONS[name]()
    positions = torch.randint(0, 1000, (B, N) if batched else (N,))
    close(rotary(x, positions), true_turn(rotary, x, positions), 1e-12)


SCALINGS = {
    "none": None,
    "linear": LinearScaling(4.0),
    "NTK": NTKScaling(4.0),
    "dynamic NTK": DynamicNTKScaling(4),
    "YaRN": YaRN(4.0, 16, beta_fast=2.0),
    "Llama3": Llama3Scaling(4.0, 16),
    "LongRoPE": LongRoPE((1.0, 1.5), (2.0, 3.0), 4),
}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize("base", [100.0, (10.0, 100.0, 1000.0)], ids=["base", "bases"])
def test_every_combination(base, pairing, fraction, scaling):
    """C2, C3, C4, C6 and C10 of all settings at once."""
    if scaling == "LongRoPE" and fraction == 1.0:
        scaling = LongRoPE((1.0, 1.5, 2.0, 2.5), (2.0, 3.0, 4.0, 5.0), 4)
    else:
        scaling = SCALINGS[scaling]
    rotary, inputs = Rotary(base, fraction, pairing, scaling), features()
    rotate, whole = partial(true_turn, rotary), linear_attention(*inputs, rotary=rotary)
    close(whole, truth(*inputs, rotate=rotate).output, 1e-10)
    zeros = torch.zeros(N, dtype=torch.long)
    close(linear_attention(*inputs, rotary=rotary, query_positions=zeros), linear_attention(*inputs), 1e-12)
    close(linear_attention(*inputs, rotary=rotary, query_positions=torch.arange(N) + 1000), whole, 1e-9)
    close(whole[:, :, 0], inputs[2][:, :, 0], 1e-12)
    if not rotary.is_dynamic:
        first, state = stream_linear_attention(*(x[:, :, :5] for x in inputs), rotary=rotary)
        rest, _ = stream_linear_attention(*(x[:, :, 5:] for x in inputs), state, rotary=rotary)
        close(torch.cat((first, rest), dim=2), whole, 1e-10)
    far, ones = torch.tensor([0, 4096, 65_536, 2**20]), torch.ones(1, H, 4, M)
    assert (rotary.bfloat16()(ones, far).double() - rotate(ones, far)).abs().max() < 2e-6
    positions = torch.randint(0, 50, (B, N))
    rows = linear_attention(*inputs, rotary=rotary, query_positions=positions)
    louder = [torch.cat((x[:1], 100 * x[1:])) for x in inputs]
    close(linear_attention(*louder, rotary=rotary, query_positions=positions)[:1], rows[:1], 1e-12)
    alone = linear_attention(*(x[:1] for x in inputs), rotary=rotary, query_positions=positions[:1])
    close(alone, rows[:1], 1e-12)


# C2, for every path, with gradients also of what is learned.
@every_rotation
@few_paths
@pytest.mark.parametrize("batched", [False, True])
def test_every_path_is_the_reference(path, name, batched):
    rotary, inputs = ROTATIONS[name](), features(grad=True)
    positions = torch.randint(0, 50, (B, N)) if batched else None
    output = linear_attention(
        *inputs,
        rotary=rotary,
        causal=path.causal,
        query_positions=positions,
        key_positions=positions,
        **path.options,
    )
    rotate = partial(true_turn, rotary)
    expected = truth(*inputs, rotate=rotate, causal=path.causal, query_positions=positions, key_positions=positions)
    close(output, expected.output, 1e-10)
    g = randn(*output.shape)
    wanted = [*inputs, *parameters(rotary)]
    for actual, right in zip(
        torch.autograd.grad(output, wanted, g), torch.autograd.grad(expected.output, wanted, g), strict=True
    ):
        close(actual.double(), right.double(), 1e-10 if actual.dtype == torch.float64 else 1e-6)


# C3
@every_rotation
@few_paths
def test_all_positions_zero_is_no_rotation(path, name):
    inputs, options = features(), {"causal": path.causal, **path.options}
    rotated = linear_attention(
        *inputs,
        rotary=ROTATIONS[name](),
        query_positions=torch.zeros(N).long(),
        key_positions=torch.zeros(N).long(),
        **options,
    )
    close(rotated, linear_attention(*inputs, **options), 1e-12)


@every_rotation
@few_paths
def test_a_shift_of_all_positions_changes_nothing(path, name):
    rotary, inputs, positions = ROTATIONS[name](), features(), torch.arange(N)
    shift = 1000 * rotary.columns if isinstance(rotary, AxialRotary) else 1000  # whole rows
    near, far = (
        linear_attention(
            *inputs, rotary=rotary, causal=path.causal, query_positions=at, key_positions=at, **path.options
        )
        for at in (positions, positions + shift)
    )
    close(far, near, 1e-9)


def test_a_shift_of_columns_changes_nothing():
    """Images of four rows of three, in a grid that is ten wide."""
    inputs, rotary = features(12), AxialRotary(10)
    line, column = torch.arange(12) // 3, torch.arange(12) % 3
    first, second = (
        linear_attention(*inputs, rotary=rotary, causal=False, query_positions=at, key_positions=at)
        for at in (line * 10 + column, (line + 5) * 10 + column + 7)
    )
    close(second, first, 1e-12)
    other = line * 10 + (column * 2)
    assert (linear_attention(*inputs, rotary=rotary, causal=False, query_positions=other, key_positions=other) - first).abs().max() > 1e-3  # fmt: skip


@every_rotation
def test_the_normalizer_is_the_unrotated_sum(name):
    query, key, _ = features()
    ones = torch.ones(B, H, N, 1, dtype=torch.float64)
    numerator = linear_attention(query, key, ones, rotary=ROTATIONS[name](), normalizer=None)
    ratio = linear_attention(query, key, ones, rotary=ROTATIONS[name]())
    close(numerator / ratio, truth(query, key, ones).normalizer[..., None], 1e-9)


@every_rotation
@few_causal_paths
def test_the_first_output_is_the_first_value(path, name):
    query, key, value = features()
    output = linear_attention(query, key, value, rotary=ROTATIONS[name](), **path.options)
    close(output[:, :, 0], value[:, :, 0], 1e-12)


# C4
@every_streamed
@few_causal_paths
def test_any_split_is_the_whole(path, name):
    rotary, inputs = ROTATIONS[name](), features()
    whole = linear_attention(*inputs, rotary=rotary, **path.options)
    for split in (0, 1, 7, 12):
        first, state = stream_linear_attention(*(x[:, :, :split] for x in inputs), rotary=rotary, **path.options)
        rest, state = stream_linear_attention(*(x[:, :, split:] for x in inputs), state, rotary=rotary, **path.options)
        close(torch.cat((first, rest), dim=2), whole, 1e-10)
    state, steps = None, []
    for t in range(N):
        y, state = stream_linear_attention(*(x[:, :, t : t + 1] for x in inputs), state, rotary=rotary, **path.options)
        steps.append(y)
    close(torch.cat(steps, dim=2), whole, 1e-10)


@pytest.mark.parametrize("name", DYNAMIC)
def test_a_stream_of_changing_frequencies_is_refused(name):
    rotary = ROTATIONS[name]()
    with pytest.raises(ValueError, match="frequencies that change with the length"):
        stream_linear_attention(*features(), rotary=rotary)
    for placement in ("numerator", "before"):
        with pytest.raises(ValueError, match="frequencies that change with the length"):
            LinearAttention(H * M, H, rotary=rotary, rotary_placement=placement).stream(torch.randn(1, 3, H * M))
    with pytest.raises(ValueError, match="frequencies that change with the length"):
        SoftmaxAttention(H * M, H, rotary=rotary).stream(torch.randn(1, 3, H * M))


LAYERS = {
    "numerator": partial(LinearAttention, rotary_placement="numerator"),
    "before": partial(LinearAttention, rotary_placement="before"),
    "FAVOR+ before": partial(
        LinearAttention, feature_map=partial(FavorPlus, num_features=M), rotary_placement="before"
    ),
    "softmax": SoftmaxAttention,
}


def layer_of(kind, name):
    return LAYERS[kind](H * M, H, rotary=ROTATIONS[name]()).double().eval()


@pytest.mark.parametrize("kind", LAYERS)
@every_streamed
def test_any_split_of_a_layer_is_the_whole(kind, name):
    layer, x = layer_of(kind, name), randn(B, N, H * M)
    whole = layer(x)
    for split in (1, 7, 12):
        first, state = layer.stream(x[:, :split])
        rest, _ = layer.stream(x[:, split:], state)
        close(torch.cat((first, rest), dim=1), whole, 1e-10)


# C5
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("layout", ["left", "right", "interior"])
@every_rotation
def test_pads_do_not_exist(kind, name, layout):
    layer, x, n = layer_of(kind, name), randn(B, 16, H * M), 16
    real = {
        "left": torch.arange(8, n),
        "right": torch.arange(8),
        "interior": torch.tensor([0, 1, 2, 3, 12, 13, 14, 15]),
    }
    real = real[layout]
    mask = torch.zeros(B, n, dtype=torch.bool).index_fill(1, real, True)
    x = x.masked_fill(~mask[..., None], 1e4)
    close(layer(x, key_mask=mask)[:, real], layer(x[:, real], positions=real), 1e-6)


# C6
def cast_to_bfloat16(rotary, x):
    return rotary.bfloat16()(x, FAR)


def under_autocast(rotary, x):
    with torch.autocast("cpu", torch.bfloat16):
        return rotary(x, FAR)


def after_a_low_precision_call(rotary, x):
    rotary(x.half(), FAR)
    return rotary(x, FAR)


@every_rotation
@pytest.mark.parametrize("call", [cast_to_bfloat16, under_autocast, after_a_low_precision_call])
def test_tables_are_exact_far_away(name, call):
    rotary = ROTATIONS[name]()
    ones = torch.ones(1, H, len(FAR), M)
    turned = call(rotary, ones)
    assert turned.dtype == torch.float32
    # Pairs (1, 1) turn into (cos - sin, cos + sin), each with the error of two numbers of the table.
    assert (turned.double() - true_turn(rotary, ones, FAR)).abs().max() < 2e-6


@every_rotation
def test_inference_mode_before_training_and_short_long_short(name):
    rotary, x = ROTATIONS[name](), randn(B, H, N, M, grad=True)
    positions = torch.arange(N)
    with torch.inference_mode():
        rotary(x, positions)
        first = rotary(x[:, :, :5]).clone()
    turned = rotary(x, positions)
    (grad,) = torch.autograd.grad(turned.square().sum(), x)
    close(grad, 2 * x.detach(), 1e-12)  # a rotation keeps the norm
    assert torch.equal(rotary(x[:, :, :5]).detach(), first)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@every_rotation
def test_the_output_has_the_dtype_of_the_input(name, dtype):
    rotary, x = ROTATIONS[name](), randn(B, H, N, M).to(dtype)
    turned = rotary(x)
    assert turned.dtype == dtype
    close(turned.double(), true_turn(rotary, x, torch.arange(N)), torch.finfo(dtype).eps + 1e-6)


# C10
@pytest.mark.parametrize("kind", LAYERS)
@every_rotation
def test_items_are_alone(kind, name):
    layer, x, positions = layer_of(kind, name), randn(B, N, H * M), torch.randint(0, 50, (B, N))
    louder = torch.cat((x[:1], 100 * x[1:]))
    close(layer(louder, positions=positions)[:1], layer(x[:1], positions=positions[:1]), 1e-12)


@every_rotation
def test_heads_are_alone(name):
    rotary, inputs = ROTATIONS[name](), features()
    louder = [torch.cat((x[:, :1], 100 * x[:, 1:]), dim=1) for x in inputs]
    close(linear_attention(*louder, rotary=rotary)[:, 0], linear_attention(*inputs, rotary=rotary)[:, 0], 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["numerator", "softmax"])
@every_rotation
def test_compiled_equals_eager(kind, name):
    torch._dynamo.reset()
    layer = layer_of(kind, name).float()
    compiled = torch.compile(layer, fullgraph=True)
    for n in (33, 65):
        x = torch.randn(B, n, H * M)
        close(compiled(x), layer(x), 1e-5)


# Tables
@pytest.mark.parametrize("given", [False, True])
@every_rotation
def test_layers_of_one_forward_share_a_table(name, given, monkeypatch):
    """Queries and keys of four layers ask for one table; only learned frequencies make each their own."""
    monkeypatch.setattr(kept, "_tables", ())
    made = []
    once = rotation_module.Rotation._make
    monkeypatch.setattr(rotation_module.Rotation, "_make", lambda self, *args: made.append(1) or once(self, *args))
    rotary, x, positions = ROTATIONS[name](), randn(1, 17, H * M), torch.arange(17) + 3 if given else None
    layers = [LinearAttention(H * M, H, rotary=copy.deepcopy(rotary)).double() for _ in range(4)]
    for layer in layers:
        layer(x, positions=positions)
    dynamic = rotary.is_dynamic and given  # the length of given positions is read off them anew
    assert len(made) == 1 or isinstance(rotary, LearnedRotary) or dynamic


def test_given_positions_that_are_changed_or_gone_make_tables_anew():
    rotary, x, positions = Rotary(), randn(1, 1, N, M), torch.arange(N)
    first = rotary(x, positions)
    positions += 5
    close(rotary(x, positions), true_turn(rotary, x, torch.arange(N) + 5), 1e-12)
    del positions
    close(rotary(x), first, 1e-14)
    for shift in range(8):  # new tensors may lie where old ones lay
        close(rotary(x, torch.arange(N) + shift), true_turn(rotary, x, torch.arange(N) + shift), 1e-12)


@pytest.mark.parametrize("write", ["numpy", "data", "replaced"])
def test_positions_that_are_written_to_behind_torchs_back(write):
    numbers = numpy.arange(N)
    positions = torch.from_numpy(numbers)
    x, rotary = randn(1, 1, N, M), Rotary()
    rotary(x, positions)
    if write == "numpy":
        numbers += 5
    elif write == "data":
        positions.data.add_(5)
    else:
        positions.data = torch.arange(N) + 5
    close(rotary(x, positions), true_turn(rotary, x, torch.arange(N) + 5), 1e-12)


def test_frequencies_that_are_asked_for_are_the_askers_own():
    x, rotary = randn(1, 1, N, M), Rotary(55.0)
    rotary.inv_freq(M).zero_()
    with torch.device("meta"):
        Rotary(56.0).inv_freq(M)
    with FakeTensorMode():
        Rotary(57.0).inv_freq(M)
        Rotary(57.0)(torch.randn(1, 1, N, M), torch.arange(N))
    for base in (55.0, 56.0, 57.0):
        close(Rotary(base)(x, torch.arange(N)), true_turn(Rotary(base), x, torch.arange(N)), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_heads", [None, H])
def test_learned_frequencies_stay_wide(dtype, num_heads):
    """And are not those that a lower precision would have left."""
    layer = LinearAttention(H * M, H, rotary=LearnedRotary(num_heads=num_heads))
    layer.to(dtype)
    assert layer.query.weight.dtype == dtype
    assert layer.rotary.log_inv_freq.dtype == torch.float32
    x = torch.ones(1, H, 5, M)
    positions = torch.tensor([0, 1, 256, 1000, 4096])
    assert (layer.rotary(x, positions).double() - true_turn(Rotary(), x, positions)).abs().max() < 1e-3
    assert layer.double().rotary.log_inv_freq.dtype == torch.float64


@pytest.mark.parametrize("num_heads", [None, H])
def test_learned_frequencies_are_no_matrix(num_heads):
    """Muon would make their updates orthogonal, and weight decay would draw them all to 1 rad."""
    model = ByteTransformer(
        num_layers=1,
        d_model=H * M,
        attention=lambda d: LinearAttention(d, H, rotary=LearnedRotary(num_heads=num_heads)),
    )
    _, _, others = split_parameters(model)
    assert any(p is model.blocks[0].attention.rotary.log_inv_freq for p in others)


# Pairings
@pytest.mark.parametrize("width", [2, 8, 14])
def test_half_order_relates_the_pairings(width):
    x = randn(2, 3, 5, width)
    half = Rotary(pairing="half")(x[..., half_order(width)])
    close(half, Rotary()(x)[..., half_order(width)], 1e-14)


# Learned frequencies
def test_learned_frequencies_begin_as_the_fixed_ones():
    x = randn(B, H, N, M)
    close(LearnedRotary(100.0, num_features=M)(x), Rotary(100.0)(x), 1e-5)  # parameters are float32
    close(LearnedRotary(100.0, num_features=M).double()(x), Rotary(100.0)(x), 1e-5)
    close(LearnedRotary(100.0, num_heads=H, num_features=M)(x), Rotary(100.0)(x), 1e-5)


@pytest.mark.parametrize("num_heads", [None, H])
def test_each_layer_learns_frequencies_of_its_own(num_heads):
    settings = LearnedRotary(num_heads=num_heads)
    model = ByteTransformer(num_layers=2, d_model=H * M, attention=lambda d: LinearAttention(d, H, rotary=settings))
    learned = {name: p for name, p in model.named_parameters() if "log_inv_freq" in name}
    assert len(learned) == 2
    assert {tuple(p.shape) for p in learned.values()} == {(M // 2,) if num_heads is None else (H, 1, M // 2)}
    tokens = torch.randint(0, 256, (2, 9))
    model(tokens).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in learned.values())
    other = ByteTransformer(num_layers=2, d_model=H * M, attention=lambda d: LinearAttention(d, H, rotary=settings))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(tokens), model(tokens))


def test_learned_frequencies_move_to_those_of_the_data():
    """Keys and queries that were turned faster are turned back by frequencies that learn to."""
    torch.manual_seed(0)
    x, at = randn(1, 1, 12, 4), torch.arange(12)
    wanted = Rotary(5.0)(x, at)
    learned = LearnedRotary(20.0, num_features=4).double()
    optimizer = torch.optim.Adam(learned.parameters(), lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        (learned(x, at) - wanted).square().mean().backward()
        optimizer.step()
    close(learned.log_inv_freq.exp().detach(), Rotary(5.0).inv_freq(4), 1e-3)


# Axial
def test_axial_positions_are_rows_and_columns():
    """By hand: one pair an axis, token 7 in rows of 3 lies in row 2, column 1."""
    x = torch.tensor([[1.0, 0.0, 1.0, 0.0]], dtype=torch.float64)
    turned = AxialRotary(3)(x, torch.tensor([7]))
    row, column = torch.tensor(2.0).double(), torch.tensor(1.0).double()
    close(turned[0], torch.stack((row.cos(), row.sin(), column.cos(), column.sin())), 1e-15)


def test_an_axial_layer_of_odd_width_turns_a_multiple_of_four():
    layer = LinearAttention(30, 3, rotary=AxialRotary(3), causal=False).double()
    assert round(layer.rotary.fraction * 10) == 8


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: AxialRotary(0), "columns must be at least 1, got 0"),
        (lambda: AxialRotary(3, base=0.0), "base must be positive, got 0.0"),
        (lambda: AxialRotary(3)(randn(5, 6)), "a width that is a multiple of 4, got 6"),
        (lambda: AxialRotary(3).for_width(3), "at least 4 features, got 3"),
        (lambda: LearnedRotary(base=-1.0), "base must be positive, got -1.0"),
        (lambda: LearnedRotary(num_heads=0), "num_heads must be at least 1, got 0"),
        (lambda: LearnedRotary(num_features=3), "even width, got 3"),
        (lambda: LearnedRotary()(randn(5, 6)), "no frequencies yet"),
        (lambda: LearnedRotary(num_features=8)(randn(5, 6)), "for 8 features that turn, got 6"),
        (lambda: LearnedRotary(num_features=8).for_width(6), "for 8 features that turn, got 6"),
        (lambda: Rotary(base=(10.0, 0.0)), r"base must be positive, got \(10.0, 0.0\)"),
        (lambda: Rotary(base=()), r"base must be positive, got \(\)"),
        (lambda: Rotary(base=(10.0, 20.0))(randn(1, 3, 5, 8)), "of the 2 heads that have frequencies, got"),
        (lambda: Rotary(base=(10.0, 20.0))(randn(5, 8)), "of the 2 heads that have frequencies, got"),
        (lambda: LinearAttention(12, 3, rotary=Rotary(base=(10.0, 20.0))), "frequencies for 2 heads, the layer has 3"),
        (lambda: SoftmaxAttention(12, 3, rotary=Rotary(base=(10.0, 20.0))), "frequencies for 2 heads, the layer has 3"),
        (lambda: LinearAttention(8, 2, rotary=Rotary), "rotary must be a linrope.Rotation or None, got <class"),
        (lambda: SoftmaxAttention(8, 2, rotary="rope"), "rotary must be a linrope.Rotation or None, got 'rope'"),
        (lambda: SoftmaxAttention(8, 2, position_bias=ALiBi), "position_bias must be a linrope.PositionBias or None"),
        (lambda: Rotary()(torch.ones(5, 8, dtype=torch.long)), "features must be floating, got torch.int64"),
        (lambda: Rotary()(randn(5, 8), torch.ones(5, dtype=torch.bool)), "positions must be numbers of tokens"),
        (
            lambda: SoftmaxAttention(8, 2, rotary=Rotary(scaling=DynamicNTKScaling(2)))(
                torch.randn(1, 3, 8), key_mask=torch.ones(1, 3)
            ),
            "key_mask must be bool",
        ),
        (
            lambda: LinearAttention(8, 2, rotary=Rotary(scaling=DynamicNTKScaling(4, 2.0)), rotary_placement="before")(
                torch.randn(1, 6, 8), offsets=torch.tensor([0, 2, 6])
            ),
            "packed sequences have a length each",
        ),
    ],
)
def test_a_mistake_is_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()


@pytest.mark.parametrize("name", DYNAMIC)
def test_packed_sequences_have_lengths_of_their_own(name):
    rotary, offsets = ROTATIONS[name](), torch.tensor([0, 3, 3, 13])
    layer = LinearAttention(H * M, H, rotary=rotary).double()
    x = randn(1, 13, H * M)
    packed = layer(x, offsets=offsets)
    close(packed[:, :3], layer(x[:, :3]), 1e-12)
    close(packed[:, 3:], layer(x[:, 3:]), 1e-12)
    assert (layer(x)[:, :3] - packed[:, :3]).abs().max() > 1e-4


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", DYNAMIC)
def test_cross_attention_takes_one_length_for_both(kind, name):
    rotary = ROTATIONS[name]()
    layer = LAYERS[kind](H * M, H, rotary=rotary, causal=False).double()
    fixed = LAYERS[kind](H * M, H, rotary=rotary, causal=False).double()
    fixed.load_state_dict(layer.state_dict())
    # At a length of 13 for both.
    turn = partial(true_turn, seq_len=13.0)
    x, context = randn(B, 3, H * M), randn(B, 13, H * M)
    query, key, value = (
        f(y).unflatten(-1, (H, M)).transpose(1, 2)
        for f, y in ((layer.query, x), (layer.key, context), (layer.value, context))
    )
    if kind == "softmax":
        q, k = turn(rotary, query, torch.arange(3)), turn(rotary, key, torch.arange(13))
        factor = rotary.attention_factor**2 / M**0.5
        expected = (factor * q @ k.mT).softmax(-1) @ value
    else:
        if kind != "numerator":
            query, key = turn(rotary, query, torch.arange(3)), turn(rotary, key, torch.arange(13))
        phi = layer.feature_map
        rotate = partial(turn, rotary) if kind == "numerator" else None
        expected = truth(phi.map_query(query), phi.map_key(key), value, rotate=rotate, causal=False).output
    close(layer(x, context), layer.out(expected.transpose(1, 2).flatten(-2)), 1e-9)


def test_a_softmax_factor_sharpens_softmax_alone():
    """YaRN's temperature multiplies logits; in the numerator it would multiply outputs, so there it is left out."""
    rotary = ROTATIONS["YaRN"]()
    layer, x = SoftmaxAttention(H * M, H, rotary=rotary).double(), randn(B, N, H * M)
    query, key, value = (f(x).unflatten(-1, (H, M)).transpose(1, 2) for f in (layer.query, layer.key, layer.value))
    q, k = (true_turn(rotary, y, torch.arange(N)) for y in (query, key))
    logits = rotary.scaling.attention_factor**2 * q @ k.mT / M**0.5
    future = torch.ones(N, N, dtype=torch.bool).triu(1)
    expected = logits.masked_fill(future, -torch.inf).softmax(-1) @ value
    close(layer(x), layer.out(expected.transpose(1, 2).flatten(-2)), 1e-10)
