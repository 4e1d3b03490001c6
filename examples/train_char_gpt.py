"""Trains a small GPT on the letters of this repository's documents in three ways: eager, compiled model, compiled step.

    python examples/train_char_gpt.py --steps 200 --output gpt.png

All three use the same initial weights, the same batches and, with the option exact_rng, the same dropout masks, so their losses agree. The
picture shows the three curves, and the distances of the compiled ones from the eager one.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import matplotlib
import torch
from torch import nn
from torch.nn import functional as F

import dynaxla

ROOT = Path(__file__).parents[1]
OPTIONS = {"exact_rng": True}


class Block(nn.Module):
    """Attention and a network for each letter, each with a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.attend(self.first_norm(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.project(attended.transpose(1, 2).reshape(batch, length, width)), self.dropout, self.training)
        return x + self.mlp(self.second_norm(x))


class GPT(nn.Module):
    """Maps letters to the logits of the next letter."""

    def __init__(self, letters: int, length: int, width: int = 96, layers: int = 3, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters, bias=False)
        self.head.weight = self.letters.weight
        for embedding in (self.letters, self.places):
            nn.init.normal_(embedding.weight, std=0.05)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(self.letters(x) + places)))


def corpus() -> tuple[torch.Tensor, str]:
    """Returns the documents as numbers of letters, and the letters."""
    text = "\n".join(path.read_text() for path in [ROOT / "LICENSE", ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))])
    letters = "".join(sorted(set(text)))
    number = {letter: index for index, letter in enumerate(letters)}
    return torch.tensor([number[letter] for letter in text]), letters


def batches(text: torch.Tensor, length: int, batch: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields passages, and the same passages shifted by one letter. Shape: (batch, length)."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - length, (batch,), generator=generator)
        yield tuple(torch.stack([text[start + shift : start + shift + length] for start in starts.tolist()]) for shift in (0, 1))


def training_step(way: str, model: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    network = torch.compile(model, backend="dynaxla", options=OPTIONS) if way == "compiled model" else model

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(network(x).flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return dynaxla.compile_step(step, options=OPTIONS) if way == "compiled step" else step


WAYS = ("eager", "compiled model", "compiled step")


def train(way: str, model: nn.Module, text: torch.Tensor, steps: int, length: int = 64, batch: int = 16) -> tuple[list[float], float]:
    """Returns the losses, and the seconds of a step, without the first two steps."""
    step = training_step(way, model)
    torch.manual_seed(1)
    losses, started = [], time.perf_counter()
    for number, (x, y) in zip(range(steps), batches(text, length, batch, seed=2), strict=False):
        losses.append(step(x, y).item())
        if number == 1:
            started = time.perf_counter()
    return losses, (time.perf_counter() - started) / max(steps - 2, 1)


def draw(curves: dict[str, list[float]], path: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(7, 6), sharex=True, height_ratios=[3, 2], layout="constrained")
    for (way, losses), style in zip(curves.items(), ("-", "--", ":"), strict=False):
        above.plot(losses, style, label=way, linewidth=2)
        if way != "eager":
            below.plot(differences(losses, curves["eager"]), style, label=way, linewidth=2, color=above.lines[-1].get_color())
    above.set(ylabel="loss (nats per letter)", title="A small GPT, trained in three ways")
    above.legend()
    below.set(ylabel="distance from eager, relative", xlabel="step", yscale="log")
    figure.savefig(path, dpi=120)


def differences(losses: list[float], reference: list[float]) -> list[float]:
    return [abs(loss - reference_loss) / reference_loss for loss, reference_loss in zip(losses, reference, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("gpt.png"), help="the picture")
    arguments = parser.parse_args()
    text, letters = corpus()
    torch.manual_seed(0)
    model = GPT(len(letters), 64, layers=arguments.layers)
    curves: dict[str, list[float]] = {}
    for way in WAYS:
        curves[way], seconds = train(way, copy.deepcopy(model), text, arguments.steps)
        distance = max(differences(curves[way], curves["eager"]))
        print(f"{way:15} last loss {curves[way][-1]:.4f}, {1000 * seconds:.1f} ms a step, at most {distance:.1e} from eager, relative")
    draw(curves, arguments.output)


if __name__ == "__main__":
    main()
