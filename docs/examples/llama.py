"""A Llama with linear attention: its own rotation moved behind the feature map, into the numerator."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from linrope import FavorPlus
from linrope.integrations.transformers import replace_attention

config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config).eval()
prompt = torch.tensor([list(b"The city of ")])
softmax = model(prompt).logits

replace_attention(model, feature_map=FavorPlus, rotary_placement="numerator")  # the projections stay
linear = model(prompt).logits
assert linear.shape == softmax.shape

text = model.generate(prompt, max_new_tokens=8, do_sample=False)
assert torch.equal(text[:, 12], linear[:, -1].argmax(-1))
