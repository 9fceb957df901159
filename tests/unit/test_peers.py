"""The float32 peer of local steps is Algorithm 1 of Douillard et al. 2023."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed")
DiLoCo = pytest.importorskip("benchmarks.peers").DiLoCo


@pytest.mark.parametrize(("lr", "beta"), [(0.7, 0.9), (1.0, 0.0)])
def test_the_outer_step_is_nesterovs_on_the_mean_of_what_workers_moved(lr, beta):
    def average(tensors):  # the other worker has moved three times as far
        for tensor in tensors:
            tensor.mul_(2)

    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = DiLoCo(torch.optim.SGD([weight], lr=0.5), 2, average, lr=lr, momentum=beta)
    anchor, momentum = weight.detach().clone(), torch.zeros(2)
    for _ in range(3):
        for _ in range(2):
            optimizer.zero_grad()
            weight.grad = torch.tensor([0.1, 0.2])
            optimizer.step()
        moved = 2 * (2 * 0.5 * torch.tensor([0.1, 0.2]))  # the mean of the two workers
        momentum = beta * momentum + moved
        anchor = anchor - lr * (moved + beta * momentum)
        torch.testing.assert_close(weight.detach(), anchor)


def test_between_exchanges_each_worker_is_on_its_own():
    def average(tensors):
        raise AssertionError("no round has ended")

    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = DiLoCo(torch.optim.SGD([weight], lr=1.0), 4, average)
    for step in range(1, 4):
        weight.grad = torch.ones(3)
        optimizer.step()
        assert weight.tolist() == [-step] * 3
