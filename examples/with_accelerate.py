"""A loop with accelerate, without Horovod (pip install accelerate):

    torchrun --standalone --nproc-per-node 2 examples/with_accelerate.py

On GPUs ``accelerate launch --num_processes 2 examples/with_accelerate.py`` does the same.
"""

import accelerate
import torch
from torch.nn.functional import cross_entropy

import horovod_onebit.torch as onebit


def main():
    accelerator = accelerate.Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    x = torch.randn(8192, 64)
    data = torch.utils.data.TensorDataset(x, (x @ torch.randn(64, 10)).argmax(1))
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    model.to(accelerator.device)
    optimizer = onebit.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        named_parameters=model.named_parameters(),
        model=model,  # prepare() puts it into DistributedDataParallel, whose averaging is then switched off
        warmup_steps=20,
    )
    onebit.broadcast_parameters(model.state_dict(), root_rank=0)
    loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(3):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        accelerator.print(f"epoch {epoch}: loss {float(loss.detach()):.3f}")
    accelerator.print(optimizer.optimizer.stats())
    accelerator.end_training()


if __name__ == "__main__":
    main()
