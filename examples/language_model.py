"""Trains a small GPT-2 on the bytes of its own source. Its eager twin differs from it in one line: `step = ...`."""

import argparse
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import wholestep as ws


def loss_fn(model, tokens):
    return model(input_ids=tokens, labels=tokens).loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=args.layers, n_embd=args.width, n_head=max(1, args.width // 32), n_positions=args.length,
        vocab_size=256, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

    source = torch.tensor(list(Path(__file__).with_name("language_model.py").read_bytes()))  # a byte is a token
    windows = source.unfold(0, args.length, 1).to(args.device)
    loader = DataLoader(windows, args.batch, shuffle=True, drop_last=True)
    example = next(iter(loader))
    print(f"{model.num_parameters():,} parameters on {args.device}, batches of {list(example.shape)} tokens")

    def train_step(tokens):
        optimizer.zero_grad()
        loss = loss_fn(model, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    step = ws.compile(model, loss_fn, optimizer, example, clip_norm=1.0)

    history = ws.fit(step, loader, epochs=None, max_steps=args.steps, scheduler=scheduler)
    for number in range(0, args.steps, max(1, args.steps // 10)):
        print(f"step {number:4d}  loss {history.losses[number]:.4f}")
    print(f"last step  loss {history.losses[-1]:.4f}")


if __name__ == "__main__":
    main()
