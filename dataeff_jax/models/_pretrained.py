"""Weights in Hugging Face's layout: GPT-2 and BERT, from and to safetensors files.

Each of our parameters is described by the names it has there. A name with `{}` exists
once per layer, and the layers are stacked with one stack a parameter. GPT-2 keeps
kernels as [in, out] like ours; BERT keeps [out, in], and three tensors for what is one
`qkv` kernel here.
"""

import json
import os
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx

from dataeff_jax.models import _transformer


class _Source(NamedTuple):
    """Where a parameter comes from: names to join on the last axis, their layout."""

    names: tuple[str, ...]
    transposed: bool = False


def _norm(ours, theirs):
    return {
        f"{ours}.scale": _Source((f"{theirs}.weight",)),
        f"{ours}.bias": _Source((f"{theirs}.bias",)),
    }


def _linear(ours, *theirs, transposed):
    return {
        f"{ours}.kernel": _Source(tuple(f"{n}.weight" for n in theirs), transposed),
        f"{ours}.bias": _Source(tuple(f"{n}.bias" for n in theirs)),
    }


def _embedding(ours, theirs):
    return {f"{ours}.embedding": _Source((f"{theirs}.weight",))}


_GPT2 = {
    **_embedding("token_embedding", "wte"),
    **_embedding("position_embedding", "wpe"),
    **_norm("blocks.norm1", "h.{}.ln_1"),
    **_linear("blocks.qkv", "h.{}.attn.c_attn", transposed=False),
    **_linear("blocks.out", "h.{}.attn.c_proj", transposed=False),
    **_norm("blocks.norm2", "h.{}.ln_2"),
    **_linear("blocks.up", "h.{}.mlp.c_fc", transposed=False),
    **_linear("blocks.down", "h.{}.mlp.c_proj", transposed=False),
    **_norm("final_norm", "ln_f"),
}

_LAYER = "encoder.layer.{}"
_SELF = f"{_LAYER}.attention.self"
_BERT = {
    **_embedding("token_embedding", "embeddings.word_embeddings"),
    **_embedding("position_embedding", "embeddings.position_embeddings"),
    **_embedding("type_embedding", "embeddings.token_type_embeddings"),
    **_norm("embedding_norm", "embeddings.LayerNorm"),
    **_linear(
        "blocks.qkv",
        *(f"{_SELF}.{n}" for n in ("query", "key", "value")),
        transposed=True,
    ),
    **_linear("blocks.out", f"{_LAYER}.attention.output.dense", transposed=True),
    **_norm("blocks.norm1", f"{_LAYER}.attention.output.LayerNorm"),
    **_linear("blocks.up", f"{_LAYER}.intermediate.dense", transposed=True),
    **_linear("blocks.down", f"{_LAYER}.output.dense", transposed=True),
    **_norm("blocks.norm2", f"{_LAYER}.output.LayerNorm"),
}
_BERT_HEAD = {
    **_linear("head", "cls.predictions.transform.dense", transposed=True),
    **_norm("head_norm", "cls.predictions.transform.LayerNorm"),
    "head_bias": _Source(("cls.predictions.bias",)),
}

# Buffers and parts that the models here do not have, and copies of tied tensors.
_IGNORED = {
    "gpt2": (".attn.bias", ".attn.masked_bias"),
    "bert": (
        "embeddings.position_ids",
        "pooler.dense.weight",
        "pooler.dense.bias",
        "cls.seq_relationship.weight",
        "cls.seq_relationship.bias",
    ),
}
_TIED = {
    "lm_head.weight": "wte.weight",
    "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}


def load_safetensors(
    path: str | os.PathLike,
    *,
    num_heads: int | None = None,
    rngs: nnx.Rngs | None = None,
    **kwargs: Any,
) -> _transformer.GPT | _transformer.BERT:
    """Builds a GPT or BERT from safetensors with the names of Hugging Face's classes.

    Sizes are read from the tensors; the number of heads, which no tensor shows, from
    `config.json` in the same directory or from `num_heads`. BERT's pooler and
    next-sentence classifier are left out. 16-bit tensors become float32.

    Args:
        path: A `.safetensors` file, or a directory with one or with numbered parts.
        num_heads: H, needed where there is no `config.json`.
        rngs: Draws BERT's masked-language head where a file holds the encoder alone;
            None makes its absence an error.
        **kwargs: Further arguments of the model: dtype, remat, layers, dropout_rate.

    Returns:
        The model, a `GPT` or a `BERT`.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: With all missing, unexpected and mis-shaped tensors in one message,
            or what the configuration asks for that the models here do not have.

    Example:
        >>> import tempfile
        >>> model = _transformer.GPT(vocab_size=16, max_length=8, num_layers=2, width=8,
        ...                          num_heads=2, rngs=nnx.Rngs(0))
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     save_safetensors(model, directory)
        ...     type(load_safetensors(directory)).__name__
        'GPT'
    """
    path = pathlib.Path(path)
    tensors = _clean_names(_read(path))
    family = "bert" if any(n.startswith("encoder.layer.") for n in tensors) else "gpt2"
    config = _read_config(path)
    _check_config(family, config)
    sizes = _sizes_of(family, tensors)
    sizes["num_heads"] = _heads(family, config, num_heads, path)
    tensors = _drop_ignored(family, tensors)
    build = _transformer.GPT if family == "gpt2" else _transformer.BERT
    if family == "bert":
        kwargs.setdefault("epsilon", config.get("layer_norm_eps", 1e-12))
    names = dict(_GPT2) if family == "gpt2" else _BERT | _BERT_HEAD
    fresh = family == "bert" and not any(n.startswith("cls.") for n in tensors)
    if fresh and rngs is not None:
        model = build(**sizes, **kwargs, rngs=rngs)
        names = dict(_BERT)
    else:
        model = nnx.eval_shape(lambda: build(**sizes, **kwargs, rngs=nnx.Rngs(0)))
    return _fill(model, names, tensors, headless=fresh and rngs is None)


def save_safetensors(
    model: _transformer.GPT | _transformer.BERT, directory: str | os.PathLike
) -> None:
    """Writes `model.safetensors` and `config.json` with Hugging Face's names.

    Args:
        model: A GPT with learned positions, or a BERT.
        directory: Is made where it does not exist; files of the same name are replaced.

    Raises:
        ValueError: If the model has no counterpart there (rotary positions).

    Example:
        >>> import tempfile
        >>> model = _transformer.GPT(vocab_size=16, max_length=8, num_layers=2,
        ...                          width=8, num_heads=2, rngs=nnx.Rngs(0))
        >>> directory = tempfile.mkdtemp()
        >>> save_safetensors(model, directory)
        >>> sorted(os.listdir(directory))
        ['config.json', 'model.safetensors']
    """
    bert = isinstance(model, _transformer.BERT)
    if not bert and model.positions != "learned":
        raise ValueError(
            f"a GPT with positions={model.positions!r} has no counterpart in GPT-2's "
            "layout; only positions='learned' can be saved."
        )
    names = _BERT | _BERT_HEAD if bert else _GPT2
    params = _flat(nnx.state(model, nnx.Param))
    tensors = {}
    for path, source in names.items():
        tensors |= _to_theirs(source, np.asarray(params[path], np.float32))
    if bert:
        # As `BertForMaskedLM` names them: the encoder has a prefix, the head has not.
        tensors = {
            name if name.startswith("cls.") else f"bert.{name}": value
            for name, value in tensors.items()
        }
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    content = safetensors.numpy.save(tensors, metadata={"format": "pt"})
    _write(directory / "model.safetensors", content)
    config = _bert_config(model) if bert else _gpt2_config(model)
    _write(directory / "config.json", json.dumps(config, indent=1).encode())


def _write(path, content):
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def _read(path):
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        if (path / "model.safetensors") in files:
            files = [path / "model.safetensors"]
    else:
        files = [path] if path.exists() else []
    if not files:
        raise FileNotFoundError(f"{path} holds no .safetensors file.")
    tensors = {}
    for file in files:
        # The flax reader knows bfloat16, which the NumPy one does not.
        with jax.default_device(jax.devices("cpu")[0]):
            with safetensors.safe_open(file, framework="flax") as opened:
                for name in opened.keys():
                    tensors[name] = np.asarray(opened.get_tensor(name))
    return tensors


def _read_config(path):
    directory = path if path.is_dir() else path.parent
    file = directory / "config.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def _check_config(family, config):
    required = {
        "gpt2": {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5},
        "bert": {"hidden_act": "gelu", "position_embedding_type": "absolute"},
    }[family]
    wrong = [
        f"{name}={config[name]!r} (only {value!r} is supported)"
        for name, value in required.items()
        if config.get(name, value) != value
    ]
    if wrong:
        raise ValueError(f"config.json asks for {', '.join(wrong)}.")


def _clean_names(tensors):
    """Names without the prefix of the class that saved them, norms by today's names."""
    renamed = {}
    for name, value in tensors.items():
        for prefix in ("transformer.", "bert."):
            name = name.removeprefix(prefix)
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight")
        name = name.replace("LayerNorm.beta", "LayerNorm.bias")
        renamed[name] = value
    return renamed


def _drop_ignored(family, tensors):
    kept = {}
    for name, value in tensors.items():
        if name.endswith(_IGNORED[family]):
            continue
        twin = tensors.get(_TIED.get(name, ""))
        if twin is not None:
            if not np.array_equal(twin, value):
                raise ValueError(
                    f"{name} differs from {_TIED[name]}; the models here tie them."
                )
            continue
        kept[name] = value
    return kept


def _sizes_of(family, tensors):
    """Arguments of the model that the shapes of the tensors show."""
    layer = "h." if family == "gpt2" else "encoder.layer."
    place = layer.count(".")
    indices = [int(n.split(".")[place]) for n in tensors if n.startswith(layer)]
    wanted = {
        "gpt2": ("wte.weight", "wpe.weight", "h.0.mlp.c_fc.bias"),
        "bert": (
            "embeddings.word_embeddings.weight",
            "embeddings.position_embeddings.weight",
            "encoder.layer.0.intermediate.dense.bias",
            "embeddings.token_type_embeddings.weight",
        ),
    }[family]
    missing = [name for name in wanted if name not in tensors]
    if missing:
        raise ValueError(
            f"the file is neither GPT-2's nor BERT's: it lacks {', '.join(missing)} "
            f"and holds {_listed(tensors)}."
        )
    shapes = [tensors[name].shape for name in wanted]
    sizes = {
        "vocab_size": shapes[0][0],
        "width": shapes[0][1],
        "max_length": shapes[1][0],
        "ffw_width": shapes[2][0],
        "num_layers": max(indices) + 1,
    }
    if family == "bert":
        sizes["type_vocab_size"] = shapes[3][0]
    return sizes


def _heads(family, config, num_heads, path):
    name = "n_head" if family == "gpt2" else "num_attention_heads"
    num_heads = config.get(name) if num_heads is None else num_heads
    if num_heads is None:
        raise ValueError(
            f"no config.json with {name!r} beside {path}; pass num_heads=, which no "
            "tensor shows."
        )
    return num_heads


def _fill(model, names, tensors, *, headless):
    graphdef, state = nnx.split(model)
    params = _flat(state)
    problems = _problems(names, tensors, params, headless)
    if problems:
        raise ValueError("the tensors do not fit the model: " + "; ".join(problems))
    for path, source in names.items():
        params[path] = jnp.asarray(_to_ours(source, tensors, params[path].shape))
    filled = nnx.from_flat_state(
        [(tuple(path.split(".")), nnx.Param(value)) for path, value in params.items()]
    )
    return nnx.merge(graphdef, filled)


def _flat(state):
    return {
        ".".join(str(part) for part in path): variable.get_value()
        for path, variable in nnx.to_flat_state(state)
    }


def _problems(names, tensors, params, headless):
    expected = {}
    for path, source in names.items():
        expected |= _shapes(source, params[path].shape)
    missing = [n for n in expected if n not in tensors]
    unexpected = [n for n in tensors if n not in expected]
    shaped = [
        f"{n} is {list(tensors[n].shape)}, not {list(shape)}"
        for n, shape in expected.items()
        if n in tensors and tensors[n].shape != shape
    ]
    problems = []
    if missing:
        problems.append(f"missing {_listed(missing)}")
    if headless:
        problems.append("pass rngs= to draw the masked-language head that is not there")
    if unexpected:
        problems.append(f"unexpected {_listed(unexpected)}")
    if shaped:
        problems.append(f"mis-shaped {', '.join(shaped)}")
    return problems


def _listed(names):
    return ", ".join(sorted(names)) or "nothing"


def _shapes(source, shape):
    """Their name -> shape of every tensor that makes up a parameter of ours."""
    stacked = "{}" in source.names[0]
    layers, own = (shape[0], shape[1:]) if stacked else (1, shape)
    own = (*own[:-1], own[-1] // len(source.names))
    own = own[::-1] if source.transposed else own
    return {name.format(layer): own for layer in range(layers) for name in source.names}


def _to_ours(source, tensors, shape):
    def one(layer):
        parts = [tensors[name.format(layer)] for name in source.names]
        parts = [part.T if source.transposed else part for part in parts]
        return np.concatenate(parts, axis=-1).astype(np.float32)

    if "{}" not in source.names[0]:
        return one(0)
    return np.stack([one(layer) for layer in range(shape[0])])


def _to_theirs(source, value):
    stacked = "{}" in source.names[0]
    tensors = {}
    for layer, own in enumerate(value if stacked else value[None]):
        parts = np.split(own, len(source.names), axis=-1)
        for name, part in zip(source.names, parts, strict=True):
            part = part.T if source.transposed else part
            tensors[name.format(layer)] = np.ascontiguousarray(part)
    return tensors


def _gpt2_config(model):
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": model.vocab_size,
        "n_positions": model.max_length,
        "n_layer": model.num_layers,
        "n_embd": model.width,
        "n_head": model.num_heads,
        "n_inner": model.ffw_width,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    }


def _bert_config(model):
    return {
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_length,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.width,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.ffw_width,
        "type_vocab_size": model.type_vocab_size,
        "hidden_act": "gelu",
        "layer_norm_eps": model.epsilon,
        "tie_word_embeddings": True,
    }
