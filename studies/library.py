"""Networks as the library ``transformers`` has them: pip install -r requirements/studies.txt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def resnet(channels: int = 1) -> Any:
    """ResNet-18 (He et al. 2015) of a quarter of its width, for 32x32 images."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        num_channels=channels, embedding_size=16, hidden_sizes=[16, 32, 64, 128], depths=[2, 2, 2, 2],
        layer_type="basic", num_labels=10,
    )  # fmt: skip
    return _logits(ResNetForImageClassification(config))


def vit(channels: int = 1) -> Any:
    """A vision transformer (Dosovitskiy et al. 2020) of 64 patches of 4x4."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=32, patch_size=4, num_channels=channels, hidden_size=96, num_hidden_layers=4, num_attention_heads=3,
        intermediate_size=384, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return _logits(ViTForImageClassification(config))


LIBRARY: dict[str, Callable[[int], Any]] = {"resnet": resnet, "vit": vit}
"""By the name of the task."""


def _logits(model: Any) -> Any:
    """``model``, which gives logits and nothing else."""
    from torch import nn

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Any) -> Any:
            return self.model(x).logits

    return Logits()
