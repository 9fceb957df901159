"""The tasks' networks, of the same shapes as those of the PyTorch job."""

from __future__ import annotations

import keras
from keras import layers

VGG16 = (1, 1, "pool", 2, 2, "pool", 4, 4, 4, "pool", 8, 8, 8, "pool", 8, 8, 8, "pool")


def build(task: str, width: int, shape: tuple[int, ...], classes: int) -> keras.Model:
    """The network of ``task`` for examples of ``shape``: (height, width, channels) or (length,); logits out."""
    if task == "digits":
        return digits(width, shape, classes)
    if task == "vgg":
        return vgg(width, shape, classes)
    if task == "mlp":
        return mlp(width, shape, classes)
    return character_model(classes, width, shape[0])


def digits(width: int, shape: tuple[int, ...], classes: int) -> keras.Model:
    """A small convolutional network for 8x8 images; GroupNormalization has no averages that workers would share."""
    x = inputs = layers.Input(shape)
    for out, pool in ((width, False), (2 * width, True), (2 * width, True)):
        x = layers.Conv2D(out, 3, padding="same")(x)
        x = layers.Activation("relu")(layers.GroupNormalization(8)(x))
        x = layers.MaxPooling2D(2)(x) if pool else x
    x = layers.Dense(4 * width, activation="relu")(layers.Flatten()(x))
    return keras.Model(inputs, layers.Dense(classes)(x))


def mlp(width: int, shape: tuple[int, ...], classes: int) -> keras.Model:
    """Two wide layers for 8x8 images: many parameters and little to compute."""
    x = inputs = layers.Input(shape)
    x = layers.Flatten()(x)
    for _ in range(2):
        x = layers.Dense(width, activation="relu")(x)
    return keras.Model(inputs, layers.Dense(classes)(x))


def vgg(width: int, shape: tuple[int, ...], classes: int) -> keras.Model:
    """VGG16 (Simonyan and Zisserman 2015, column D) for 32x32 images; ``width`` 64 is the original. No norm layers."""
    x = inputs = layers.Input(shape)
    for item in VGG16:
        if item == "pool":
            x = layers.MaxPooling2D(2)(x)
        else:
            x = layers.Conv2D(item * width, 3, padding="same", activation="relu", kernel_initializer="he_normal")(x)
    x = layers.Flatten()(x)
    for _ in range(2):
        x = layers.Dense(8 * width, activation="relu")(x)
    return keras.Model(inputs, layers.Dense(classes)(x))


def character_model(letters: int, width: int, length: int, depth: int = 3, heads: int = 4) -> keras.Model:
    """A small GPT: learned positions, pre-norm blocks, output weights tied to the embedding."""
    inputs = layers.Input((length,), dtype="int32")
    embedding = layers.Embedding(letters, width, embeddings_initializer=keras.initializers.RandomNormal(stddev=0.02))
    positions = layers.Embedding(length, width, embeddings_initializer="zeros")
    x = embedding(inputs) + positions(keras.ops.arange(length)[None])
    for _ in range(depth):
        h = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(heads, width // heads)(h, h, use_causal_mask=True)
        h = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(width)(h)
    return keras.Model(inputs, _Tied(embedding)(layers.LayerNormalization()(x)))


class _Tied(layers.Layer):
    """Logits as products with the rows of an embedding."""

    def __init__(self, embedding: layers.Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def call(self, x):
        return keras.ops.matmul(x, keras.ops.transpose(self.embedding.embeddings))
