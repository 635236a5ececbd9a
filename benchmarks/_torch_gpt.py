"""The same GPT in PyTorch, timed on request; run by `train_step.py` as a child.

Reads one JSON line {"piece": name, "repeats": n} at a time from standard input and
answers with a JSON list of seconds, [by the wall, by the CPU clock] a repeat.
"""

import json
import math
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        batch, size, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, size, 3, self.num_heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, size, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, vocab_size, max_length, num_layers, width, num_heads):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(max_length, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.final_norm = nn.LayerNorm(width)
        for name, p in self.named_parameters():
            if p.ndim > 1:
                narrow = name.endswith(("out.weight", "down.weight"))
                scale = 1 / math.sqrt(2 * num_layers) if narrow else 1.0
                nn.init.normal_(p, std=0.02 * scale)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions.weight[None, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.final_norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def decayed(model):
    plain = [p for n, p in model.named_parameters() if p.ndim < 2 or "positions" in n]
    rest = [
        p for n, p in model.named_parameters() if p.ndim > 1 and "positions" not in n
    ]
    return [{"params": rest}, {"params": plain, "weight_decay": 0.0}]


def make_step(c, compiled):
    torch.manual_seed(0)
    names = ("vocab_size", "max_length", "num_layers", "width", "num_heads")
    model = GPT(**{name: c[name] for name in names})
    forward = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(
        decayed(model), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    shape = (c["batch_size"], c["max_length"])
    tokens, targets = (torch.randint(c["vocab_size"], shape) for _ in range(2))

    def step():
        optimizer.zero_grad(set_to_none=True)
        forward(tokens, targets).backward()
        optimizer.step()

    return step, optimizer


def backward_of(function, *arrays):
    """A call of `function` and the gradients of all its arguments."""
    arrays = [a.clone().requires_grad_() for a in arrays]
    with torch.no_grad():
        cotangent = torch.ones_like(function(*arrays))

    def run():
        torch.autograd.grad(function(*arrays), arrays, cotangent)

    return run


def make_pieces(c):
    width, heads, layers = c["width"], c["num_heads"], c["num_layers"]
    tokens = c["batch_size"] * c["max_length"]
    rand = torch.randn

    def matmuls(x, y, *kernels):
        wide = [F.linear(x, k) for k in kernels[:3]]
        return wide[0].sum() + wide[1].sum() + wide[2].sum() + (y @ kernels[3].T).sum()

    kernels = [rand(3 * width, width), rand(width, width), rand(4 * width, width)]
    kernels.append(rand(width, 4 * width))
    one_layer = backward_of(
        matmuls, rand(tokens, width), rand(tokens, 4 * width), *kernels
    )
    shape = (c["batch_size"], heads, c["max_length"], width // heads)
    attend = backward_of(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        *(rand(shape) for _ in range(3)),
    )
    targets = torch.randint(c["vocab_size"], (tokens,))
    head = backward_of(
        lambda x, e: F.cross_entropy(F.linear(x, e), targets),
        rand(tokens, width),
        rand(c["vocab_size"], width) * 0.02,
    )
    return {
        "matmuls": lambda: [one_layer() for _ in range(layers)],
        "attention": lambda: [attend() for _ in range(layers)],
        "head": head,
    }


def main():
    c = json.loads(sys.stdin.readline())
    torch.set_num_threads(c["threads"])
    eager, optimizer = make_step(c, compiled=False)
    pieces = {"eager": eager, "optimizer": optimizer.step, **make_pieces(c)}
    if c["compile"]:
        pieces["compiled"] = make_step(c, compiled=True)[0]
    for piece in pieces.values():
        piece(), piece()
    print(
        json.dumps({"version": torch.__version__, "pieces": list(pieces)}), flush=True
    )
    for line in sys.stdin:
        request = json.loads(line)
        seconds = []
        for _ in range(request["repeats"]):
            wall, cpu = time.perf_counter(), time.process_time()
            pieces[request["piece"]]()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            seconds.append((wall, cpu))
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
