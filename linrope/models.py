"""A language model over bytes, with attention to choose."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from linrope.feature_maps import redraw_feature_maps
from linrope.layers import LinearAttention
from linrope.rotary import inv_freq

NUM_BYTES = 256


def default_attention(d_model: int) -> LinearAttention:
    """Linear attention with elu(x) + 1 and heads of 32."""
    return LinearAttention(d_model, max(1, d_model // 32))


class ByteTransformer(nn.Module):
    """A pre-norm Transformer decoder over raw bytes.

    Args:
        num_layers: Number of blocks.
        d_model: Width.
        attention: Factory that gets d_model and makes a block's attention: any module with
            ``layer(x)``, and with ``layer.stream(x, state) -> (x, state)`` where ``state.position`` is
            the position of the next token, if the model is to stream.
        positions: Absolute positions added to the byte embeddings: None, ``"learned"`` (up to
            ``seq_len``) or ``"sinusoidal"``. A rotation is the attention's own affair.
        seq_len: Largest number of tokens that learned positions know; no limit otherwise.
        mlp_ratio: Width of the hidden layer of each block's MLP, in d_model.
        dropout: Probability of dropping an activation that a block adds.

    Raises:
        ValueError: A size below 1, an unknown ``positions``, an odd width with sinusoidal positions.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        d_model: int,
        attention: Callable[[int], nn.Module] = default_attention,
        positions: Literal["learned", "sinusoidal"] | None = None,
        seq_len: int = 1024,
        mlp_ratio: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        for name, size in (("num_layers", num_layers), ("d_model", d_model), ("seq_len", seq_len)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if positions not in (None, "learned", "sinusoidal"):
            raise ValueError(f"positions must be None, 'learned' or 'sinusoidal', got {positions!r}")
        if positions == "sinusoidal" and d_model % 2:
            raise ValueError(f"sinusoidal positions need an even d_model, got {d_model}")
        self.positions, self.seq_len = positions, seq_len
        self.embedding = nn.Embedding(NUM_BYTES, d_model)
        self.position_embedding = nn.Embedding(seq_len, d_model) if positions == "learned" else None
        self.blocks = nn.ModuleList(Block(d_model, attention(d_model), mlp_ratio, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, NUM_BYTES, bias=False)
        self._initialize()
        redraw_feature_maps(self, step=0)

    def _initialize(self) -> None:
        """torch's defaults, but GPT-2's for embeddings, N(0, 0.02²), and for what blocks add, narrower by √(2·layers).

        Source: Radford et al. 2019 (GPT-2), section 2.3.
        """
        nn.init.normal_(self.embedding.weight, std=0.02)
        if self.position_embedding is not None:
            nn.init.normal_(self.position_embedding.weight, std=0.02)
        for block in self.blocks:
            assert isinstance(block, Block)
            for linear in (getattr(block.attention, "out", None), block.mlp[-1]):
                if isinstance(linear, nn.Linear):
                    nn.init.normal_(linear.weight, std=0.02 / (2 * len(self.blocks)) ** 0.5)

    def forward(self, tokens: Int[Tensor, "b n"]) -> Float[Tensor, "b n 256"]:
        """Logits of the byte that follows each of ``tokens``, raw bytes 0…255.

        Raises:
            ValueError: ``tokens`` are not ``(b, n)`` integers, or more than learned positions know.
        """
        _check_tokens(tokens)
        self._check_length(tokens.shape[-1])
        x = self._embed(tokens, torch.arange(tokens.shape[-1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def stream(
        self, tokens: Int[Tensor, "b n"], states: Sequence[Any] | None = None
    ) -> tuple[Float[Tensor, "b n 256"], tuple[Any, ...]]:
        """Logits of the next tokens, given the ``states`` that the call before returned (one a layer).

        Raises:
            ValueError: As in :meth:`forward`.
        """
        _check_tokens(tokens)
        positions = torch.arange(tokens.shape[-1], device=tokens.device)
        if states is not None:
            positions = states[0].position[:, None] + positions
        if self.position_embedding is not None and positions.numel():
            self._check_length(int(positions.max()) + 1)
        x = self._embed(tokens, positions)
        new_states = []
        for block, state in zip(self.blocks, states or [None] * len(self.blocks), strict=True):
            x, state = block.stream(x, state)  # type: ignore[operator]
            new_states.append(state)
        return self.head(self.norm(x)), tuple(new_states)

    def generate(
        self,
        prompt: Int[Tensor, "b n"],
        num_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        top_p: float | None = None,
    ) -> Int[Tensor, "b n+num_tokens"]:
        """Continue ``prompt`` byte by byte, in memory that does not grow if the attention's state does not.

        Args:
            prompt: Raw bytes, at least one.
            num_tokens: Bytes to add.
            temperature: Divides the logits; 0 takes the likeliest byte.
            top_k: Draw from the k likeliest bytes alone.
            generator: Source of randomness, on the device of ``prompt``.
            top_p: Draw from the likeliest bytes that together have this probability, at least one.

        Returns:
            The prompt and what follows it, int64.

        Raises:
            ValueError: An empty prompt, a negative ``temperature`` or ``num_tokens``, ``top_k`` below 1, or ``top_p``
                outside (0, 1].
        """
        if num_tokens < 0:
            raise ValueError(f"num_tokens must not be negative, got {num_tokens}")
        following = self.continuation(prompt, temperature, top_k, generator, top_p)
        return torch.cat([prompt.long(), *(token[:, None] for token in itertools.islice(following, num_tokens))], dim=1)

    def continuation(
        self,
        prompt: Int[Tensor, "b n"],
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        top_p: float | None = None,
    ) -> Iterator[Int[Tensor, " b"]]:
        """What follows ``prompt``, byte by byte and without end; arguments and errors as in :meth:`generate`."""
        if prompt.ndim != 2 or prompt.shape[1] < 1:
            raise ValueError(f"prompt must be (b, n) with n of at least 1, got {tuple(prompt.shape)}")
        _check_tokens(prompt)
        check_sampling(temperature, top_k, top_p)
        return self._follow(prompt, lambda logits: sample(logits, temperature, top_k, generator, top_p))

    def _follow(self, tokens: Tensor, choose: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
        states = None
        while True:
            with torch.no_grad():  # not around the yield: what is done between two bytes is not ours
                logits, states = self.stream(tokens, states)
                token = choose(logits[:, -1])
            yield token
            tokens = token[:, None]

    def _check_length(self, n: int) -> None:
        if self.position_embedding is not None and n > self.seq_len:
            raise ValueError(f"learned positions know {self.seq_len} tokens, got {n}")

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(tokens.long())
        if self.position_embedding is not None:
            x = x + self.position_embedding(positions)
        elif self.positions == "sinusoidal":
            x = x + sinusoids(positions, x.shape[-1]).to(x.dtype)
        return x


def _check_tokens(tokens: Tensor) -> None:
    if tokens.ndim != 2 or tokens.is_floating_point() or tokens.is_complex():
        raise ValueError(f"tokens must be (b, n) integers, got {tokens.dtype} of shape {tuple(tokens.shape)}")


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, d_model: int, attention: nn.Module, mlp_ratio: int, dropout: float) -> None:
        super().__init__()
        self.attention = attention
        self.attention_norm, self.mlp_norm = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(
            nn.Linear(d_model, mlp_ratio * d_model), nn.GELU(), nn.Linear(mlp_ratio * d_model, d_model)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "b n d_model"]) -> Float[Tensor, "b n d_model"]:
        """Mix tokens, then features."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))

    def stream(self, x: Float[Tensor, "b n d_model"], state: Any) -> tuple[Float[Tensor, "b n d_model"], Any]:
        """:meth:`forward` for the next tokens, with the attention's state in and out."""
        attended, state = self.attention.stream(self.attention_norm(x), state)  # type: ignore[operator]
        x = x + self.dropout(attended)
        return x + self.dropout(self.mlp(self.mlp_norm(x))), state


def sinusoids(positions: Int[Tensor, "*b n"], width: int) -> Float[Tensor, "*b n width"]:
    """sin and cos of position times frequency, interleaved, in float64 (so exact at large positions).

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.5.
    """
    angle = positions.to(torch.float64)[..., None] * inv_freq(width, 10_000.0, device=positions.device)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)


def sample(
    logits: Float[Tensor, "b v"],
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    top_p: float | None = None,
) -> Int[Tensor, " b"]:
    """Draw one token from each row of ``logits``; arguments as in :meth:`ByteTransformer.generate`."""
    check_sampling(temperature, top_k, top_p)
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        kept = logits.topk(top_k)  # by index: of equal logits no more than k are kept
        logits = torch.full_like(logits, -torch.inf).scatter(-1, kept.indices, kept.values)
    probability = logits.softmax(-1)
    if top_p is not None:
        ordered, index = probability.sort(dim=-1, descending=True, stable=True)
        superfluous = ordered.cumsum(-1) - ordered >= top_p  # those before it have enough without it
        probability = probability.masked_fill(superfluous.gather(-1, index.argsort(-1)), 0.0)
    return torch.multinomial(probability, 1, generator=generator)[:, 0]


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Refuse what no token can be drawn by.

    Raises:
        ValueError: As in :meth:`ByteTransformer.generate`.
    """
    if not temperature >= 0:
        raise ValueError(f"temperature must not be negative, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must keep at least 1 token, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")
