"""Linear attention in torch's own encoder, with the encoder's weights."""

import torch
from torch import nn

from linrope import FavorPlus
from linrope.integrations.torch import replace_attention

torch.manual_seed(0)
encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, nhead=4, dropout=0.0, batch_first=True), num_layers=2)
x = torch.randn(2, 100, 64)
padding = torch.arange(100).expand(2, -1) >= 90
softmax = encoder.eval()(x, src_key_padding_mask=padding)[:, :90]

replace_attention(encoder, feature_map=lambda d: FavorPlus(d, num_features=1024))  # softmax's kernel, on average
linear = encoder(x, src_key_padding_mask=padding)[:, :90]
elsewhere = encoder(x.masked_fill(padding[..., None], 9.0), src_key_padding_mask=padding)[:, :90]
assert torch.allclose(elsewhere, linear, atol=1e-5)  # what padding holds does not matter
assert (linear - softmax).norm() / softmax.norm() < 0.05
