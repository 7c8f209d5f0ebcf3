"""A model of one's own, trained with Lightning."""

import lightning
import torch
from torch import nn

from linrope import LinearAttention, Rotary


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.attention = LinearAttention(32, 4, rotary=Rotary(), causal=False)
        self.head = nn.Linear(32, 2)

    def training_step(self, batch, _):
        x, label = batch
        return nn.functional.cross_entropy(self.head(self.attention(x).mean(1)), label)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


data = torch.utils.data.TensorDataset(torch.randn(8, 50, 32), torch.randint(0, 2, (8,)))
lightning.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False).fit(
    Classifier(), torch.utils.data.DataLoader(data, batch_size=4)
)
