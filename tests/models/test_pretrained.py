"""Weights in Hugging Face's layout: names, orientation, and what is refused."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from dataeff_jax import models

WIDTH, HEADS, LAYERS, VOCAB, LENGTH, FFW = 8, 2, 2, 12, 6, 24
SIZES = {
    "vocab_size": VOCAB,
    "max_length": LENGTH,
    "num_layers": LAYERS,
    "width": WIDTH,
    "num_heads": HEADS,
    "ffw_width": FFW,
}
TOKENS = np.array([[1, 5, 2, 11], [3, 3, 0, 7]], np.int32)


def draw(shapes, seed=0):
    random = np.random.default_rng(seed)
    return {
        name: (0.3 * random.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def linear(name, outputs, inputs):
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def bert_file():
    """A file as `BertForMaskedLM` writes it, with the parts that are left out."""
    norm = {"LayerNorm.weight": (WIDTH,), "LayerNorm.bias": (WIDTH,)}
    shapes = {
        "bert.embeddings.word_embeddings.weight": (VOCAB, WIDTH),
        "bert.embeddings.position_embeddings.weight": (LENGTH, WIDTH),
        "bert.embeddings.token_type_embeddings.weight": (2, WIDTH),
        **{f"bert.embeddings.{n}": s for n, s in norm.items()},
        **linear("bert.pooler.dense", WIDTH, WIDTH),
        **linear("cls.predictions.transform.dense", WIDTH, WIDTH),
        **{f"cls.predictions.transform.{n}": s for n, s in norm.items()},
        "cls.predictions.bias": (VOCAB,),
    }
    for layer in range(LAYERS):
        at = f"bert.encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            shapes |= linear(f"{at}.attention.self.{part}", WIDTH, WIDTH)
        shapes |= linear(f"{at}.attention.output.dense", WIDTH, WIDTH)
        shapes |= {f"{at}.attention.output.{n}": s for n, s in norm.items()}
        shapes |= linear(f"{at}.intermediate.dense", FFW, WIDTH)
        shapes |= linear(f"{at}.output.dense", WIDTH, FFW)
        shapes |= {f"{at}.output.{n}": s for n, s in norm.items()}
    return draw(shapes)


def gpt2_file():
    """A file as the released GPT-2 is: kernels [in, out], no prefix, mask buffers."""
    shapes = {"wte.weight": (VOCAB, WIDTH), "wpe.weight": (LENGTH, WIDTH)}
    names = ["ln_f"]
    for layer in range(LAYERS):
        at = f"h.{layer}"
        names += [f"{at}.ln_1", f"{at}.ln_2"]
        shapes[f"{at}.attn.bias"] = (1, 1, LENGTH, LENGTH)
        for part, inputs, outputs in (
            ("attn.c_attn", WIDTH, 3 * WIDTH),
            ("attn.c_proj", WIDTH, WIDTH),
            ("mlp.c_fc", WIDTH, FFW),
            ("mlp.c_proj", FFW, WIDTH),
        ):
            shapes[f"{at}.{part}.weight"] = (inputs, outputs)
            shapes[f"{at}.{part}.bias"] = (outputs,)
    for name in names:
        shapes |= {f"{name}.weight": (WIDTH,), f"{name}.bias": (WIDTH,)}
    return draw(shapes)


def norm(x, w, name, epsilon):
    y = x - x.mean(-1, keepdims=True)
    y = y / np.sqrt((y * y).mean(-1, keepdims=True) + epsilon)
    return y * w[f"{name}.weight"] + w[f"{name}.bias"]


def softmax_heads(q, k, v, causal):
    split = [
        x.reshape(*x.shape[:2], HEADS, -1).transpose(0, 2, 1, 3) for x in (q, k, v)
    ]
    scores = split[0] @ split[1].transpose(0, 1, 3, 2) / math.sqrt(WIDTH // HEADS)
    if causal:
        scores = np.where(np.tri(scores.shape[-1], dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return (p @ split[2]).transpose(0, 2, 1, 3).reshape(q.shape)


def exact_gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def bert_in_numpy(w, tokens, types):
    """BERT's forward pass from the paper, float64: hidden states and logits."""
    w = {n.removeprefix("bert."): v.astype(np.float64) for n, v in w.items()}

    def dense(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    x = w["embeddings.word_embeddings.weight"][tokens]
    x = x + w["embeddings.position_embeddings.weight"][: tokens.shape[1]]
    x = x + w["embeddings.token_type_embeddings.weight"][types]
    x = norm(x, w, "embeddings.LayerNorm", 1e-12)
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}"
        parts = (
            dense(x, f"{at}.attention.self.{n}") for n in ("query", "key", "value")
        )
        y = dense(softmax_heads(*parts, causal=False), f"{at}.attention.output.dense")
        x = norm(x + y, w, f"{at}.attention.output.LayerNorm", 1e-12)
        y = dense(
            exact_gelu(dense(x, f"{at}.intermediate.dense")), f"{at}.output.dense"
        )
        x = norm(x + y, w, f"{at}.output.LayerNorm", 1e-12)
    y = exact_gelu(dense(x, "cls.predictions.transform.dense"))
    y = norm(y, w, "cls.predictions.transform.LayerNorm", 1e-12)
    words = w["embeddings.word_embeddings.weight"]
    return x, y @ words.T + w["cls.predictions.bias"]


def gpt2_in_numpy(w, tokens):
    w = {n: v.astype(np.float64) for n, v in w.items()}

    def conv1d(x, name):
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["wte.weight"][tokens] + w["wpe.weight"][: tokens.shape[1]]
    for layer in range(LAYERS):
        at = f"h.{layer}"
        qkv = conv1d(norm(x, w, f"{at}.ln_1", 1e-5), f"{at}.attn.c_attn")
        y = softmax_heads(*np.split(qkv, 3, axis=-1), causal=True)
        x = x + conv1d(y, f"{at}.attn.c_proj")
        y = conv1d(norm(x, w, f"{at}.ln_2", 1e-5), f"{at}.mlp.c_fc")
        y = 0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + conv1d(y, f"{at}.mlp.c_proj")
    return norm(x, w, "ln_f", 1e-5) @ w["wte.weight"].T


def write(tensors, directory, config=None):
    file = directory / "model.safetensors"
    safetensors.numpy.save_file(tensors, file)
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    return file


def test_bert_equals_a_numpy_transcription(tmp_path):
    tensors = bert_file()
    write(tensors, tmp_path, {"num_attention_heads": HEADS})
    model = models.load_safetensors(tmp_path)
    types = np.array([[0, 0, 1, 1], [0, 1, 1, 1]], np.int32)
    hidden, logits = bert_in_numpy(tensors, TOKENS, types)
    ours = jax.jit(lambda t, k: model.hidden_states(t, token_types=k))(TOKENS, types)
    np.testing.assert_allclose(ours, hidden, atol=1e-4)
    ours = jax.jit(lambda t, k: model(t, token_types=k))(TOKENS, types)
    np.testing.assert_allclose(ours, logits, atol=1e-4)


def test_gpt2_equals_a_numpy_transcription(tmp_path):
    tensors = gpt2_file()
    file = write(tensors, tmp_path)
    model = models.load_safetensors(file, num_heads=HEADS)
    np.testing.assert_allclose(
        jax.jit(model)(TOKENS), gpt2_in_numpy(tensors, TOKENS), atol=1e-4
    )


@pytest.mark.parametrize("name", ["GPT", "BERT"])
def test_a_saved_model_comes_back_bit_for_bit(name, tmp_path):
    model = getattr(models, name)(**SIZES, rngs=nnx.Rngs(3))
    models.save_safetensors(model, tmp_path / "new" / "folder")
    again = models.load_safetensors(tmp_path / "new" / "folder", layers="unroll")
    assert type(again) is type(model) and again.layers == "unroll"
    a, b = (nnx.to_flat_state(nnx.state(m, nnx.Param)) for m in (model, again))
    for (path, x), (other, y) in zip(a, b, strict=True):
        assert path == other
        np.testing.assert_array_equal(x[...], y[...], err_msg=str(path))


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_names_written_are_those_read(family, tmp_path):
    tensors = gpt2_file() if family == "gpt2" else bert_file()
    heads = {"n_head": HEADS, "num_attention_heads": HEADS}
    write(tensors, tmp_path, heads)
    models.save_safetensors(models.load_safetensors(tmp_path), tmp_path / "out")
    written = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    left_out = {n for n in tensors if "pooler" in n or n.endswith(".attn.bias")}
    assert set(written) == set(tensors) - left_out
    for name, value in written.items():
        np.testing.assert_array_equal(value, tensors[name], err_msg=name)


def test_all_that_does_not_fit_is_in_one_message(tmp_path):
    tensors = gpt2_file()
    del tensors["h.1.ln_2.bias"], tensors["ln_f.weight"]
    tensors["h.0.extra"] = np.zeros(3, np.float32)
    tensors["h.1.mlp.c_proj.weight"] = tensors["h.1.mlp.c_proj.weight"].T.copy()
    write(tensors, tmp_path, {"n_head": HEADS})
    with pytest.raises(ValueError) as error:
        models.load_safetensors(tmp_path)
    assert str(error.value) == (
        "the tensors do not fit the model: missing h.1.ln_2.bias, ln_f.weight; "
        "unexpected h.0.extra; mis-shaped h.1.mlp.c_proj.weight is [8, 24], not [24, 8]"
    )


def test_tied_and_prefixed_tensors_are_understood(tmp_path):
    tensors = {f"transformer.{n}": v for n, v in gpt2_file().items()}
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].copy()
    write(tensors, tmp_path, {"n_head": HEADS})
    models.load_safetensors(tmp_path)
    tensors["lm_head.weight"][0, 0] += 1
    write(tensors, tmp_path)
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from wte\.weight"):
        models.load_safetensors(tmp_path)


def test_sixteen_bit_tensors_become_float32(tmp_path):
    tensors = gpt2_file()
    half = {n: v.astype(jnp.bfloat16) for n, v in tensors.items()}
    file = write(half, tmp_path)
    model = models.load_safetensors(file, num_heads=HEADS)
    table = model.token_embedding.embedding[...]
    assert table.dtype == jnp.float32
    np.testing.assert_allclose(table, tensors["wte.weight"], rtol=1e-2)


def test_what_cannot_be_read_or_written_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no \.safetensors"):
        models.load_safetensors(tmp_path)
    file = write(gpt2_file(), tmp_path)
    with pytest.raises(ValueError, match="pass num_heads="):
        models.load_safetensors(file)
    write(gpt2_file(), tmp_path, {"n_head": HEADS, "activation_function": "relu"})
    with pytest.raises(ValueError, match="activation_function='relu'"):
        models.load_safetensors(tmp_path)
    write({"weight": np.zeros(2, np.float32)}, tmp_path, {"n_head": HEADS})
    with pytest.raises(ValueError, match="neither GPT-2's nor BERT's"):
        models.load_safetensors(tmp_path)
    rotary = models.GPT(**SIZES, positions="rope", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="only positions='learned'"):
        models.save_safetensors(rotary, tmp_path)
