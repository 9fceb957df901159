"""The float32 peer of local steps is Algorithm 1 of Douillard et al. 2023."""

import pytest

pytest.importorskip("torch.nn")
torch = pytest.importorskip("torch")
pytest.importorskip("horovod.torch")
diloco = pytest.importorskip("benchmarks.diloco")


class Average:
    """In place of Horovod: the other worker has moved three times as far."""

    Average = "average"

    @staticmethod
    def allreduce_async_(tensor, name, op):
        assert op == "average"
        return tensor.mul_(2)

    @staticmethod
    def synchronize(handle):
        return handle


def test_the_outer_step_is_nesterovs_on_the_mean_of_what_workers_moved(monkeypatch):
    monkeypatch.setattr(diloco, "hvd", Average)
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = diloco.DiLoCo(torch.optim.SGD([weight], lr=0.5), every=2, lr=0.7, momentum=0.9)
    anchor, momentum = weight.detach().clone(), torch.zeros(2)
    for _ in range(3):
        for _ in range(2):
            optimizer.zero_grad()
            weight.grad = torch.tensor([0.1, 0.2])
            optimizer.step()
        moved = 2 * (2 * 0.5 * torch.tensor([0.1, 0.2]))  # the mean of the two workers
        momentum = 0.9 * momentum + moved
        anchor = anchor - 0.7 * (moved + 0.9 * momentum)
        torch.testing.assert_close(weight.detach(), anchor)


def test_between_two_exchanges_only_the_inner_optimizer_moves(monkeypatch):
    monkeypatch.setattr(diloco, "hvd", None)
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = diloco.DiLoCo(torch.optim.SGD([weight], lr=1.0), every=4)
    for step in range(1, 4):
        weight.grad = torch.ones(3)
        optimizer.step()
        assert weight.tolist() == [-step] * 3
