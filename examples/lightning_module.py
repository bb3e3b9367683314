"""A compiled step inside a LightningModule: manual optimization, one call per batch. Needs `pip install lightning`."""

import argparse

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import wholestep as ws


class Classifier(L.LightningModule):
    """A small network that tells whether the sum of its inputs is positive."""

    def __init__(self, compiled: bool = True):
        super().__init__()
        self.automatic_optimization = not compiled
        self.network = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 2))
        self.losses: list[torch.Tensor] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.network.parameters(), lr=1e-2)

    def on_train_start(self) -> None:
        """Here the model is on its device, its optimizer exists and a checkpoint has been loaded."""
        if not self.automatic_optimization:
            example = [t.to(self.device) for t in next(iter(self.trainer.train_dataloader))]
            self.step = ws.compile(self.network, nn.functional.cross_entropy, self.optimizers().optimizer, example)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        if self.automatic_optimization:
            loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        else:
            # Through Lightning's optimizer, so that it counts the step; no gradient is left for the optimizer to use.
            self.optimizers().step(lambda: self.step(*batch))
            loss = self.step.last.loss
        self.losses.append(loss.detach())
        self.log("loss", loss)
        return loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--eager", action="store_true", help="Lightning's automatic optimization instead")
    args = parser.parse_args()
    L.seed_everything(0, verbose=False)
    x = torch.randn(256, 8)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=32)
    module = Classifier(compiled=not args.eager)
    trainer = L.Trainer(max_epochs=args.epochs, accelerator="auto", devices=1, logger=False, enable_checkpointing=False)
    trainer.fit(module, loader)
    losses = torch.stack(module.losses).tolist()
    for number in range(0, len(losses), 8):
        print(f"step {number:4d}  loss {losses[number]:.4f}")
    print(f"{trainer.global_step} steps, last loss {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
