"""Writes text with the model of a work directory.

    python -m experiments.generate runs/gpt --prompt="I like" --num_tokens=60

The same seed gives the same text.
"""

import argparse
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dataeff_jax import data, training


@functools.partial(nnx.jit, static_argnames=("temperature", "top_k"))
def _next_token(model, window, last, key, *, temperature, top_k):
    """Samples the token behind position ``last`` of ``window`` int32[1, S]."""
    logits = model(window)[0, last]
    if temperature == 0.0:
        return jnp.argmax(logits)
    best, tokens = jax.lax.top_k(logits / temperature, min(top_k, logits.size))
    return tokens[jax.random.categorical(key, best)]


def generate(
    model: Any,
    prompt,
    *,
    num_tokens: int,
    end_of_text: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> list[int]:
    """Continues ``prompt`` until ``num_tokens`` more or the end of the text.

    The model sees the last ``max_length`` tokens, filled up on the right, so that one
    compilation serves every position: a causal model does not look there.

    Args:
      model: a causal language model.
      prompt: token ids, without the leading ``end_of_text``.
      num_tokens: how many tokens to add at the most.
      end_of_text: the token that separates documents.
      temperature: 0 takes the likeliest token.
      top_k: how many of the likeliest tokens to draw from.
      seed: of the draws; token i has the key ``fold_in(key(seed), i)``.

    Returns:
      The ids of prompt and continuation.

    Raises:
      ValueError: for a model that is not causal, or arguments out of range.
    """
    if not getattr(model, "causal", False):
        raise ValueError(
            f"{type(model).__name__} is not causal and cannot continue a text; "
            "give the work directory of a GPT"
        )
    if num_tokens < 1 or not temperature >= 0 or top_k < 1:
        raise ValueError(
            f"{num_tokens=} and {top_k=} must be at least 1, {temperature=} at least 0"
        )
    ids = [end_of_text, *map(int, prompt)]
    key = jax.random.key(seed)
    for i in range(num_tokens):
        seen = ids[-model.max_length :]
        window = np.full((1, model.max_length), end_of_text, np.int32)
        window[0, : len(seen)] = seen
        token = int(
            _next_token(
                model,
                window,
                len(seen) - 1,
                jax.random.fold_in(key, i),
                temperature=temperature,
                top_k=top_k,
            )
        )
        if token == end_of_text:
            break
        ids.append(token)
    return ids[1:]


def main(argv: list[str] | None = None) -> None:
    """Parses the flags and prints the text."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("workdir", type=pathlib.Path)
    parser.add_argument("--prompt", default="", help="text to continue")
    parser.add_argument("--num_tokens", type=int, default=60)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top_k", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step", type=int, help="checkpoint; the newest if not given")
    flags = parser.parse_args(argv)
    try:
        model = training.restore(flags.workdir, step=flags.step)
        tokenizer = data.load_tokenizer(flags.workdir / "tokenizer.json")
        ids = generate(
            model,
            tokenizer.encode(flags.prompt),
            num_tokens=flags.num_tokens,
            end_of_text=tokenizer.end_of_text,
            temperature=flags.temperature,
            top_k=flags.top_k,
            seed=flags.seed,
        )
    except (OSError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    print(tokenizer.decode(ids))


if __name__ == "__main__":
    main()
