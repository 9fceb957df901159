"""The tasks' networks."""

from __future__ import annotations

import torch
from torch import nn

VGG16 = (1, 1, "pool", 2, 2, "pool", 4, 4, 4, "pool", 8, 8, 8, "pool", 8, 8, 8, "pool")


def build(task: str, width: int, channels: int, classes: int) -> nn.Module:
    """The network of ``task``: (n, channels, height, width) or (n, length) in, logits out."""
    if task == "digits":
        return digits(width, channels, classes)
    if task == "vgg":
        return vgg(width, channels, classes)
    if task == "mlp":
        return mlp(width, channels, classes)
    return CharacterModel(classes, width)


def digits(width: int, channels: int, classes: int) -> nn.Module:
    """A small convolutional network for 8x8 images.

    GroupNorm, because it has no running averages that workers would have to share.
    """
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.GroupNorm(8, width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.GroupNorm(8, 2 * width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1),
        nn.GroupNorm(8, 2 * width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * width, 4 * width),
        nn.ReLU(),
        nn.Linear(4 * width, classes),
    )


def mlp(width: int, channels: int, classes: int) -> nn.Module:
    """Two wide layers for 8x8 images: many parameters and little to compute."""
    layers = [nn.Flatten(), nn.Linear(64 * channels, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, classes))


def vgg(width: int, channels: int, classes: int) -> nn.Module:
    """VGG16 (Simonyan and Zisserman 2015, column D) for 32x32 images; ``width`` 64 is the original. No norm layers."""
    layers: list[nn.Module] = []
    for item in VGG16:
        if item == "pool":
            layers.append(nn.MaxPool2d(2))
            continue
        out = int(item) * width
        convolution = nn.Conv2d(channels, out, 3, padding=1)
        nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
        nn.init.zeros_(convolution.bias)
        layers += [convolution, nn.ReLU(inplace=True)]
        channels = out
    head = [nn.Flatten(), nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, channels), nn.ReLU()]
    return nn.Sequential(*layers, *head, nn.Linear(channels, classes))


class CharacterModel(nn.Module):
    """A small GPT: learned positions, pre-norm blocks, output weights tied to the embedding."""

    def __init__(self, letters: int, width: int, layers: int = 3, heads: int = 4, length: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(letters, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        h = self.embedding(x) + self.position[:length]
        for block in self.blocks:
            h = block(h, src_mask=self.mask[:length, :length], is_causal=True)
        return self.norm(h) @ self.embedding.weight.T
