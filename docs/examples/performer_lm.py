"""A PerformerLM whose random features neither look ahead nor count padding."""

import torch
from performer_pytorch import PerformerLM

from linrope.integrations.performer_pytorch import replace_attention

torch.manual_seed(0)
model = PerformerLM(num_tokens=256, max_seq_len=64, dim=32, depth=2, heads=2, causal=True).eval()
tokens = torch.randint(0, 256, (1, 64))
theirs = model(tokens)

replace_attention(model)  # projections and random rows stay
ours = model(tokens)
assert (ours - theirs).norm() / theirs.norm() < 0.01  # their epsilon, which ours does without

later = tokens.clone()
later[:, 40:] = 0
assert torch.allclose(model(later)[:, :40], ours[:, :40], atol=1e-5)
