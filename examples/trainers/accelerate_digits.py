"""A Keras classifier in Hugging Face accelerate: clipped and accumulated gradients, a checkpoint, and training resumed.

torchrun --nproc-per-node 2 -m examples.trainers.accelerate_digits /tmp/digits
"""

import sys

import torch
import torch.distributed.nn  # before there is a group, which its default arguments would keep alive
from accelerate import Accelerator, PartialState
from torch.nn.functional import cross_entropy

from examples.trainers import digits


def fit(epochs: int, precision: str, saved: str, resume: bool = False) -> float:
    """Train, perhaps on from a checkpoint, save another, and return the accuracy."""
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    model = digits.classifier()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, *digits.loaders())
    if resume:
        accelerator.load_state(saved)
    for _ in range(epochs):
        model.train()
        for images, labels in train:
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model(images), labels))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    accelerator.save_state(saved)
    model.eval()
    with torch.no_grad():
        found = [(model(images).argmax(1) == labels).float().mean() for images, labels in test]
    return accelerator.gather(torch.stack(found)).mean().item()


def main(saved: str, precision: str = "no") -> None:
    torch.manual_seed(0)
    print(f"{precision}: accuracy {fit(3, precision, saved):.3f}")
    print(f"{precision}: accuracy {fit(2, precision, saved, resume=True):.3f} after two epochs more")
    PartialState().destroy_process_group()  # joins its threads, which abort a Python that ends under them


if __name__ == "__main__":
    main(*sys.argv[1:])
