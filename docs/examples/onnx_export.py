"""Export a layer for sequences of any length, and run it with ONNX Runtime."""

import onnxruntime
import torch

from linrope import FavorPlus, LinearAttention, Rotary

layer = LinearAttention(64, num_heads=4, feature_map=FavorPlus, rotary=Rotary()).eval()
x = torch.randn(1, 100, 64)
lengths = ({1: torch.export.Dim("n", min=2, max=65_536)},)

program = torch.onnx.export(layer, (x,), dynamic_shapes=lengths, dynamo=True)
session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())

for n in (10, 100, 1000):
    x = torch.randn(1, n, 64)
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), layer(x).detach(), rtol=1e-4, atol=1e-4)
