"""What Horovod's examples import or download and is not here: small data, and a small network for a large one."""

import importlib.machinery
import sys
import types

import numpy as np

CLASSES, EXAMPLES = 10, 512


def images(seed, size, channels, count=EXAMPLES):
    """Images that can be told apart: a pattern for each class, and noise. ``(count, size, size, channels)``, bytes."""
    patterns = np.random.default_rng(0).integers(0, 128, (CLASSES, size, size, channels))
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, CLASSES, count)
    noise = generator.integers(0, 128, (count, size, size, channels))
    return (patterns[labels] + noise).astype(np.uint8), labels


def torchvision():
    """Datasets that are tensors already, transforms that do nothing, a ResNet of one block."""
    import torch

    class Images(torch.utils.data.TensorDataset):
        def __init__(self, seed, size, channels):
            x, y = images(seed, size, channels)
            super().__init__(torch.from_numpy(x).permute(0, 3, 1, 2) / 255.0 - 0.5, torch.from_numpy(y))

    class MNIST(Images):
        def __init__(self, root, train=True, download=False, transform=None):
            super().__init__(1 if train else 2, 28, 1)

    class ImageFolder(Images):
        def __init__(self, root, transform=None):
            super().__init__(1 if "train" in root else 2, 32, 3)

    class Bottleneck(torch.nn.Module):
        def __init__(self, wide, narrow):
            super().__init__()
            sizes = [(wide, narrow, 1), (narrow, narrow, 3), (narrow, wide, 1)]
            layers = []
            for inputs, outputs, kernel in sizes:
                convolution = torch.nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
                layers += [convolution, torch.nn.BatchNorm2d(outputs), torch.nn.ReLU()]
            self.layers = torch.nn.Sequential(*layers[:-1])

        def forward(self, x):
            return torch.relu(x + self.layers(x))

    def resnet50():
        stem = torch.nn.Conv2d(3, 64, 7, stride=4, padding=3, bias=False)
        pool, last = torch.nn.AdaptiveAvgPool2d(1), torch.nn.Linear(64, 1000)
        return torch.nn.Sequential(stem, torch.nn.BatchNorm2d(64), Bottleneck(64, 32), pool, torch.nn.Flatten(), last)

    nothing = lambda *args, **kwargs: None  # noqa: E731
    names = ["Compose", "ToTensor", "Normalize", "RandomResizedCrop", "RandomHorizontalFlip", "Resize", "CenterCrop"]
    return {
        "datasets": types.SimpleNamespace(MNIST=MNIST, ImageFolder=ImageFolder),
        "transforms": types.SimpleNamespace(**dict.fromkeys(names, nothing)),
        "models": types.SimpleNamespace(resnet50=resnet50),
    }


class Progress:
    """``tqdm.tqdm`` as far as it is used."""

    def __init__(self, **options):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def set_postfix(self, values):
        pass

    def update(self, number):
        pass


def install(framework):
    """Put the stubs where the examples find them."""
    if framework == "tf":
        import tensorflow as tf

        def load_data(path):
            x, y = images(int(path[len("mnist-") : -len(".npz")]), 28, 1, 1024)
            return (x[..., 0], y), (x[..., 0], y)

        tf.keras.datasets.mnist.load_data = load_data
        return
    for name, contents in {"torchvision": torchvision(), "tqdm": {"tqdm": Progress}}.items():
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(sys.modules[name]).update(contents)
