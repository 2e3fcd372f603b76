"""A Keras classifier in Lightning's `Trainer`: clipped and accumulated gradients, a checkpoint, and training resumed.

python -m examples.trainers.lightning_digits
"""

import sys
import tempfile

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import cross_entropy

from examples.trainers import digits


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = digits.classifier()

    def training_step(self, batch, number):
        images, labels = batch
        return cross_entropy(self.model(images), labels)

    def validation_step(self, batch, number):
        images, labels = batch
        self.log("accuracy", (self.model(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)


def fit(epochs: int, folder: str, resume: str | None = None, **options) -> tuple[lightning.Trainer, Classifier]:
    """Train, from a checkpoint if there is one."""
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    model = Classifier()
    trainer.fit(model, *digits.loaders(), ckpt_path=resume)
    return trainer, model


def main(precision: str = "32-true") -> None:
    with tempfile.TemporaryDirectory() as folder:
        fit(3, folder, precision=precision)
        trainer, _ = fit(5, folder, f"{folder}/last.ckpt", precision=precision)
    print(f"{precision}: accuracy {trainer.callback_metrics['accuracy']:.3f} after {trainer.global_step} updates")


if __name__ == "__main__":
    main(*sys.argv[1:])
