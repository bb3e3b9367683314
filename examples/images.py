"""Trains a small ResNet on drawn shapes. Its eager twin differs from it in one line: `step = ...`."""

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import ResNetConfig, ResNetForImageClassification

import wholestep as ws


def drawn_shapes(count: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy pictures of a disc (0), a square (1) or a cross (2), anywhere and of any colour."""
    labels = torch.arange(count) % 3
    x, y = (torch.arange(size) - size * (0.3 + 0.4 * torch.rand(count, 1)) for _ in range(2))
    x, y, radius = x[:, None, :].abs(), y[:, :, None].abs(), size * 0.2
    kinds = (x * x + y * y < radius**2, torch.maximum(x, y) < radius, torch.minimum(x, y) < radius / 3)
    masks = torch.stack(kinds)[labels, torch.arange(count)]
    images = masks[:, None] * torch.rand(count, 3, 1, 1) + 0.2 * torch.randn(count, 3, size, size)
    return images, labels


def loss_fn(model, images, labels):
    return torch.nn.functional.cross_entropy(model(images).logits, labels)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    torch.manual_seed(0)
    widths = [args.width, 2 * args.width]
    config = ResNetConfig(
        embedding_size=args.width, hidden_sizes=widths, depths=[1, 1], layer_type="basic", num_labels=3
    )
    model = ResNetForImageClassification(config).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

    data = TensorDataset(*(t.to(args.device) for t in drawn_shapes(20 * args.batch, args.size)))
    loader = DataLoader(data, args.batch, shuffle=True, drop_last=True)
    example = next(iter(loader))
    print(f"{model.num_parameters():,} parameters on {args.device}, batches of {list(example[0].shape)} pixels")

    def train_step(images, labels):
        optimizer.zero_grad()
        loss = loss_fn(model, images, labels)
        loss.backward()
        optimizer.step()
        return loss

    step = ws.compile(model, loss_fn, optimizer, example)

    history = ws.fit(step, loader, epochs=None, max_steps=args.steps, scheduler=scheduler)
    for number in range(0, args.steps, max(1, args.steps // 10)):
        print(f"step {number:4d}  loss {history.losses[number]:.4f}")
    print(f"last step  loss {history.losses[-1]:.4f}")


if __name__ == "__main__":
    main()
