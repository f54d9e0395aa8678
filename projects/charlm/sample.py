#!/usr/bin/env python
"""Let a trained model continue a text.

::

    python -m projects.charlm.sample --weights output/charlm/model_best.pth --prompt "def "
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from projects.charlm.corpus import UNKNOWN, decode, encode
from projects.charlm.data import WINDOW
from trainkit.config import ConfigError, get_cfg
from trainkit.engine import DefaultPredictor, user_errors_exit


def generate(
    predictor: Callable[[dict[str, Tensor]], Tensor],
    prompt: str,
    length: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[str]:
    """Draw the characters that follow a prompt, one after the other.

    Args:
        predictor: returns the logits of the next character after each token, such as a `DefaultPredictor`.
        temperature: logits are divided by it; below 1, likely characters become even more likely.
        top_k: draw only from this many of the likeliest characters; None: from all.

    Raises:
        ValueError: the prompt is empty, or a number is not positive.
    """
    if not prompt:
        raise ConfigError("prompt is empty; give at least one character, such as a line break")
    for name, value in (("temperature", temperature), ("top_k", top_k)):
        if value is not None and value <= 0:
            raise ConfigError(f"{name} must be > 0, got {value}")
    tokens = torch.from_numpy(encode(prompt)).long()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(length):
        of_window = predictor({"tokens": tokens[-WINDOW:]})
        logits = of_window[-1].float().cpu()
        token = _draw(logits / temperature, top_k, generator)
        tokens = torch.cat([tokens, token])
        yield decode(token.tolist())


def _draw(logits: Tensor, top_k: int | None, generator: torch.Generator) -> Tensor:
    logits[UNKNOWN] = -torch.inf
    if top_k is not None:
        likeliest = logits.topk(min(top_k, len(logits))).values
        logits[logits < likeliest[-1]] = -torch.inf
    probabilities = logits.softmax(0)
    return torch.multinomial(probabilities, 1, generator=generator)


def main(arguments: list[str] | None = None) -> None:
    """Run with the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--weights",
        type=Path,
        default="output/charlm/model_best.pth",
        help="a checkpoint, with config.yaml beside it",
    )
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--length", type=int, default=500, help="characters")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    with user_errors_exit():
        cfg = get_cfg()
        cfg.merge_from_file(str(args.weights.with_name("config.yaml")))
        cfg.MODEL.WEIGHTS = str(args.weights)
        options = {"temperature": args.temperature, "top_k": args.top_k, "seed": args.seed}
        characters = generate(DefaultPredictor(cfg), args.prompt, args.length, **options)
        print(args.prompt, end="")
        for character in characters:
            print(character, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
