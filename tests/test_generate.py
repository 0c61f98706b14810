"""examples/generate.py and its modules: on a small random model against float64, and on the real
one."""

from __future__ import annotations

import json
import pathlib
import re
import sys

import ml_dtypes
import numpy as np
import pytest

import cuattn
from tests.programs import ROOT, run_example

gguf = pytest.importorskip("gguf", reason="needs the extra 'examples'")
pytest.importorskip("jinja2", reason="needs the extra 'examples'")
pytest.importorskip("tokenizers", reason="needs the extra 'examples'")

sys.path.insert(0, str(ROOT / "examples"))
import engine  # noqa: E402
import generate  # noqa: E402
import llama  # noqa: E402
from engine import Engine, Text  # noqa: E402

LAYERS, HEADS, HEADS_KV, HEAD_DIM, HIDDEN, FFN = 2, 4, 2, 16, 64, 96
EPS, ROPE_BASE = 1e-5, 500.0
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONTROLS = ["<|end|>", "<|user|>", "<|assistant|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "i n", "Ã ¼"]
VOCABULARY = [*CONTROLS, *llama.BYTES, *(merge.replace(" ", "") for merge in MERGES)]


def generate_text(*arguments: object, stdin: str = "") -> tuple[str, list[list[int]]]:
    """Run generate.py greedily; its text, and the token ids of each reply."""
    greedily = ("--temperature", 0, "--show-ids")
    run = run_example("examples/generate.py", *greedily, *arguments, stdin=stdin)
    assert run.returncode == 0, run.stderr
    assert re.search(r"tokens (read|written) at [\d.]+ tokens/s", run.stderr)
    assert re.search(r"prefix hits \d+ of \d+ pages", run.stderr)
    *pieces, end = re.split(r"^(\[[\d, ]*\])\n", run.stdout, flags=re.MULTILINE)
    assert end == ""
    return "".join(pieces[::2]), [json.loads(ids) for ids in pieces[1::2]]


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model(request, tmp_path, rng) -> tuple[pathlib.Path, dict[str, np.ndarray]]:
    """A GGUF file of random weights in several formats, and its weights in float64."""
    path = tmp_path / "random.gguf"
    kinds = gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS_KV)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3] * len(CONTROLS) + [1] * (len(VOCABULARY) - len(CONTROLS)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)

    weights = {}

    def add(name: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> None:
        weight = rng.standard_normal(shape, dtype=np.float32)
        if len(shape) == 2:
            weight *= 2 / np.sqrt(shape[1])
        data = gguf.quantize(weight, kind)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
        weights[name] = gguf.dequantize(data, kind).astype(np.float64)

    add("token_embd", (len(VOCABULARY), HIDDEN), kinds.Q8_0)
    add("output_norm", (HIDDEN,), kinds.F32)
    if not request.param:
        add("output", (len(VOCABULARY), HIDDEN), kinds.F16)
    for i in range(LAYERS):
        add(f"blk.{i}.attn_norm", (HIDDEN,), kinds.F32)
        add(f"blk.{i}.attn_q", (HEADS * HEAD_DIM, HIDDEN), kinds.Q4_1)
        add(f"blk.{i}.attn_k", (HEADS_KV * HEAD_DIM, HIDDEN), kinds.Q4_0)
        add(f"blk.{i}.attn_v", (HEADS_KV * HEAD_DIM, HIDDEN), kinds.BF16)
        add(f"blk.{i}.attn_output", (HIDDEN, HEADS * HEAD_DIM), kinds.Q4_1)
        add(f"blk.{i}.ffn_norm", (HIDDEN,), kinds.F32)
        add(f"blk.{i}.ffn_gate", (FFN, HIDDEN), kinds.Q4_1)
        add(f"blk.{i}.ffn_up", (FFN, HIDDEN), kinds.Q4_1)
        add(f"blk.{i}.ffn_down", (HIDDEN, FFN), kinds.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, weights


def logits_of_all(weights: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """Logits after each of `ids`, in float64, by loops and without a cache."""

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weights[name]

    def rotate(x):
        out = np.empty_like(x)
        for position in range(len(x)):
            for pair in range(HEAD_DIM // 2):
                angle = position * ROPE_BASE ** (-2 * pair / HEAD_DIM)
                turn = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
                out[position, 2 * pair : 2 * pair + 2] = turn @ x[position, 2 * pair : 2 * pair + 2]
        return out

    x = weights["token_embd"][ids]
    future = np.triu(np.ones((len(ids), len(ids)), bool), 1)
    for i in range(LAYERS):
        y = norm(x, f"blk.{i}.attn_norm")
        q, k, v = (
            np.split(y @ weights[f"blk.{i}.attn_{name}"].T, heads, axis=1)
            for name, heads in (("q", HEADS), ("k", HEADS_KV), ("v", HEADS_KV))
        )
        heads = []
        for head in range(HEADS):
            kv = head // (HEADS // HEADS_KV)
            score = rotate(q[head]) @ rotate(k[kv]).T / np.sqrt(HEAD_DIM)
            weight = np.exp(np.where(future, -np.inf, score - score.max()))
            heads.append(weight @ v[kv] / weight.sum(1, keepdims=True))
        x = x + np.concatenate(heads, 1) @ weights[f"blk.{i}.attn_output"].T
        y = norm(x, f"blk.{i}.ffn_norm")
        gate, up = (y @ weights[f"blk.{i}.ffn_{name}"].T for name in ("gate", "up"))
        x = x + gate / (1 + np.exp(-gate)) * up @ weights[f"blk.{i}.ffn_down"].T
    return norm(x, "output_norm") @ weights.get("output", weights["token_embd"]).T


def assert_greedy(
    weights: dict[str, np.ndarray], prompt: list[int], reply: list[int], precision: float = 1e-4
) -> None:
    """Each id of the reply is the likeliest, or within the precision's reach of it."""
    logits = logits_of_all(weights, prompt + reply)[len(prompt) - 1 : -1]
    chosen = logits[np.arange(len(reply)), reply]
    assert (chosen >= logits.max(1) - precision * logits.std()).all()


def ids_of(text: str) -> list[int]:
    """Ids of a text that is made of single bytes, merges and controls, told apart by spaces."""
    return [VOCABULARY.index(token) for token in text.split(" ")]


def test_greedy_ids_follow_the_float64_model(model):
    path, weights = model
    text, (reply,) = generate_text(
        "--model", path, "--device", "cpu", "--prompt", "the in ü", "--max-new-tokens", 40
    )
    prompt = ids_of("t he Ġ in Ġ Ã¼")
    assert 0 < len(reply) <= 40
    assert len(reply) == 40 or reply[-1] == 0
    assert_greedy(weights, prompt, reply)
    visible = "".join(VOCABULARY[i] for i in reply if i >= len(CONTROLS))
    expected = b"".join(llama.BYTES[char] for char in visible).decode(errors="replace")
    assert text.split() == expected.split()


@pytest.mark.gpu
@pytest.mark.not_emulated("cuBLAS")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_greedy_ids_on_the_gpu(model, dtype):
    """The likeliest, or within what rounding to the same dtype moves a logit by in NumPy."""
    path, _ = model
    _, (reply,) = generate_text(
        *("--model", path, "--device", "gpu", "--cache-dtype", dtype, "--prompt", " the in")
    )
    prompt = ids_of("Ġthe Ġ in")
    network, weights = read_model(model)
    cache, ids = network.cache(512, dtype), prompt + reply
    logits = network(cache, [cache.add_sequence()], [ids], [len(ids)])
    expected = logits_of_all(weights, ids)
    error = np.abs(logits - expected).max() / expected.std()
    assert_greedy(weights, prompt, reply, error + 1e-5)


def test_conversation_keeps_what_it_has_read(model):
    path, weights = model
    _, replies = generate_text(
        *("--model", path, "--device", "cpu", "--chat", "--max-new-tokens", 8),
        stdin="in the\n the\nin\n",
    )
    assert len(replies) == 3
    tokenizer = llama.Tokenizer(llama.read_gguf(path)[0])
    messages = []
    for line, reply in zip(("in the", "the", "in"), replies, strict=True):
        messages.append({"role": "user", "content": line})
        assert_greedy(weights, tokenizer.encode_chat(messages), reply)
        content = tokenizer.utf8(reply).decode(errors="replace")
        messages.append({"role": "assistant", "content": content})
    assert tokenizer.encode_chat([{"role": "user", "content": "in"}]) == ids_of(
        "<|user|> in <|end|> <|assistant|>"
    )


def test_prompts_together_and_alone(model):
    path, _ = model
    common = ("--model", path, "--device", "cpu", "--chat", "--system", "the in the in" * 9)
    prompts = ["the", "in the", "ü"]
    together = [f"--prompt={prompt}" for prompt in prompts]
    _, (first, *others) = generate_text(*common, *together, "--max-new-tokens", 20)
    assert len(others) == 2
    for prompt, reply in zip(prompts, (first, *others), strict=True):
        _, alone = generate_text(*common, "--prompt", prompt, "--max-new-tokens", 20, "--draft", 3)
        assert alone == [reply]


@pytest.mark.parametrize(
    "option",
    [
        *("top-k=0", "top-p=2", "min-p=nan", "temperature=-1", "temperature=inf", "draft=x"),
        *("seed=-1", f"seed={2**64}"),
    ],
)
def test_options_out_of_range(option, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["generate.py", f"--{option}"])
    with pytest.raises(SystemExit):
        generate.parse_arguments()
    assert f"argument --{option.partition('=')[0]}: " in capsys.readouterr().err


def read_model(model, xp=np) -> tuple[llama.Llama, dict[str, np.ndarray]]:
    path, weights = model
    if xp is np:
        return llama.Llama(*llama.read_gguf(path)), weights
    from graphs import GraphLlama

    return GraphLlama(*llama.read_gguf(path)), weights


def run(engine: Engine) -> None:
    while engine.waiting or engine.running:
        engine.step()
    assert len(engine.cache) == 0


def some_texts(rng, count: int, limit: int = 25) -> list[Text]:
    """Prompts of many lengths, every other one with the same beginning of two pages."""
    shared = rng.integers(3, len(VOCABULARY), 2 * llama.PAGE_SIZE).tolist()
    prompts = [rng.integers(3, len(VOCABULARY), n).tolist() for n in rng.integers(1, 30, count)]
    return [
        Text((shared if i % 2 else []) + prompt, limit, seed=int(rng.integers(2**63)))
        for i, prompt in enumerate(prompts)
    ]


def copies(texts: list[Text]) -> list[Text]:
    return [Text(text.ids[: text.prompt], text.limit, text.seed) for text in texts]


def test_prompt_read_in_parts(model):
    network, weights = read_model(model)
    cache = network.cache(64)
    ids = list(range(40))
    expected = logits_of_all(weights, ids)
    sequence = cache.add_sequence()
    for start, stop, wanted in ((0, 1, 1), (1, 17, 0), (17, 18, 1), (18, 40, 5)):
        logits = network(cache, [sequence], [ids[start:stop]], [wanted])
        error = np.abs(logits - expected[stop - wanted : stop])
        assert error.shape == (wanted, len(VOCABULARY))
        assert error.max(initial=0) < 1e-4 * expected.std()


class OneArray:
    """A cache of one sequence without pages: an array of keys and one of values for each layer."""

    def __init__(self, dtype: str) -> None:
        self.dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
        self.k, self.v = np.full((2, LAYERS, 1, 99, HEADS_KV, HEAD_DIM), np.nan, self.dtype)
        self.new = slice(0, 0)

    def extend(self, _sequences, counts, tokens):
        self.new = slice(self.new.stop, self.new.stop + counts[0])

    def page_table(self, _sequences):
        return None

    def seq_lens(self, _sequences):
        return np.array([self.new.stop], np.int32)

    def write(self, layer, _sequences, k, v):
        self.k[layer, 0, self.new], self.v[layer, 0, self.new] = k, v

    def pages(self, layer):
        return self.k[layer], self.v[layer]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_pages_give_what_one_array_gives(model, rng, monkeypatch, dtype):
    """To the bit, since both round the same numbers: 16 bits may move ids, pages move none."""
    network, _ = read_model(model)
    first, second = rng.integers(3, len(VOCABULARY), (2, 20)).tolist()
    writer = Engine(network, network.cache(6 * llama.PAGE_SIZE, dtype), -1, temperature=0)
    for prompt in (first, second):  # the second gets pages here and there
        text = writer.add(Text(prompt, 40))
        run(writer)

    def attention(q, k, v, _page_table, seq_lens, cu_seqlens_q):
        return cuattn.flash_decode(q[None], k, v, seq_lens)[0]

    monkeypatch.setattr(cuattn, "paged_attention", attention)
    cache, ids, new = OneArray(dtype), list(second), second
    for _ in range(40):
        new = [int(network(cache, [0], [new], [1]).argmax())]
        ids += new
    assert text.ids == ids


def check_texts_that_come_and_go(network, weights, rng, chunk, draft) -> None:
    """Greedy texts of a batch that changes at every step, in which drafts and parts of prompts
    are read together, against a plain loop of the float64 model."""
    passes = []

    def model(cache, sequences, new, wanted):
        passes.append(sum(map(len, new)))
        return network(cache, sequences, new, wanted)

    model.xp = network.xp
    writer = Engine(model, network.cache(4096), 0, draft=draft, max_batch=5, temperature=0)
    texts = some_texts(rng, 12)
    sizes = set()
    for text in texts:
        writer.add(text)
        writer.step()
        sizes.add(len(writer.running))
    run(writer)
    assert len(sizes) > 1
    assert max(passes) <= chunk + 5 * draft
    for text in texts:
        assert len(text.reply) == 25 or text.reply[-1] == 0
        assert 0 not in text.reply[:-1]
        assert_greedy(weights, text.ids[: text.prompt], text.reply)
    # Six have two pages in common: one writes them, and each that comes after that finds them.
    assert writer.cache.hit_pages >= (10 if chunk > len(texts[-1].ids) else 2)
    assert draft or not writer.counts["proposed"]


def test_texts_join_at_once_unless_one_reads_what_they_begin_with(model, rng):
    network, _ = read_model(model)
    writer = Engine(network, network.cache(4096), -1, temperature=0, max_batch=9)
    texts = some_texts(rng, 10)  # five of them with two pages in common
    for i in (1, 0, 2, 3, 4, 5, 6, 7, 8, 9):
        writer.add(texts[i])
    writer.step()
    assert writer.running == [texts[1], texts[0], texts[2]]
    writer.step()
    assert len(writer.running) == 9
    assert writer.cache.hit_pages == 2 * 3


@pytest.mark.parametrize("chunk", [7, 2048])
@pytest.mark.parametrize("draft", [0, 4])
def test_texts_that_come_and_go(model, rng, monkeypatch, chunk, draft):
    monkeypatch.setattr(engine, "CHUNK", chunk)
    check_texts_that_come_and_go(*read_model(model), rng, chunk, draft)


@pytest.mark.gpu
@pytest.mark.not_emulated("cuBLAS")
def test_texts_on_the_gpu(model, rng, monkeypatch):
    """As on the CPU; sampled ones are the CPU's."""
    import cupy

    network, weights = read_model(model, cupy)
    options = {"temperature": 0.7, "top_p": 0.9, "repetition": 1.2, "draft": 2}
    both = []
    for side in (network, read_model(model)[0]):
        writer = Engine(side, side.cache(4096), 0, **options)
        texts = [writer.add(text) for text in copies(both[0] if both else some_texts(rng, 6))]
        run(writer)
        assert side is not network or network.passes[writer.cache]  # some were captured
        both.append(texts)
    assert [text.reply for text in both[0]] == [text.reply for text in both[1]]

    monkeypatch.setattr(engine, "CHUNK", 7)
    check_texts_that_come_and_go(network, weights, rng, 7, 4)


def test_steps_that_fail_are_taken_again(model, rng, monkeypatch):
    """Some while the cache is extended, some between two layers: the texts are what they would have
    been, also those that then find in the cache what others wrote."""
    network, weights = read_model(model)
    texts = some_texts(rng, 8)
    cache = network.cache(4096)
    writer = Engine(network, cache, 0, draft=3, temperature=0, max_batch=3)
    fails = iter(range(2, 10_000))
    until_next = next(fails)

    def failing(method):
        def call(*args, **options):
            nonlocal until_next
            until_next -= 1
            if until_next == 0:
                until_next = next(fails)
                raise InterruptedError
            return method(*args, **options)

        return call

    for name in ("extend", "write"):
        monkeypatch.setattr(cache, name, failing(getattr(cache, name)))
    for text in texts:
        writer.add(text)
    failed = 0
    while writer.waiting or writer.running:
        try:
            writer.step()
        except InterruptedError:
            failed += 1
            assert [cache.num_tokens(t.sequence) for t in writer.running] == [
                t.cached for t in writer.running
            ]
    assert failed > 5
    assert cache.hit_pages
    for text in texts:
        assert_greedy(weights, text.ids[: text.prompt], text.reply)


@pytest.mark.parametrize("options", [{}, {"repetition": 1.3, "top_k": 20, "top_p": 0.9}])
def test_a_text_does_not_depend_on_what_is_around_it(model, rng, options):
    """Of sampled texts too: not on the batch, on drafts, or on room in the cache."""
    network, _ = read_model(model)
    options = {"temperature": 0.7, **options}
    texts = some_texts(rng, 6)
    for text in texts:
        writer = Engine(network, network.cache(256), 0, **options)
        writer.add(text)
        run(writer)
    assert len({tuple(text.reply) for text in texts}) > 3  # one in 150 ends with its first token

    for pages, draft, max_batch in ((256, 0, 6), (256, 4, 6), (9, 2, 6), (9, 0, 2)):
        cache = network.cache(pages * llama.PAGE_SIZE)
        writer = Engine(network, cache, 0, draft=draft, max_batch=max_batch, **options)
        again = [writer.add(text) for text in copies(texts)]
        run(writer)
        assert [text.reply for text in again] == [text.reply for text in texts]

    prompt, seed = texts[0].ids[: texts[0].prompt], texts[0].seed
    others = [writer.add(Text(prompt, 25, seed + n)) for n in range(1, 4)]
    run(writer)
    assert any(other.reply != texts[0].reply for other in others)


@pytest.mark.parametrize("model", [True], ids=["tied"], indirect=True)
def test_drafts_that_are_accepted(model, rng):
    """They end where the text does, and leave its draws alone."""
    network, _ = read_model(model)
    for layer in network.layers:  # what is left finds each token likely to follow itself
        layer.attn_output[:] = 0
        layer.ffn_down[:] = 0
    network.output_norm[:] = 1

    def write(texts, limit, draft, eos=-1):
        options = {"temperature": 2, "repetition": 1.05}
        writer = Engine(network, network.cache(8192), eos, draft=draft, **options)
        texts = [writer.add(Text(text.ids[: text.prompt], limit, text.seed)) for text in texts]
        run(writer)
        return [text.reply for text in texts], writer.counts

    texts = some_texts(rng, 8)
    replies, _ = write(texts, 60, draft=0)
    for limit in (1, 2, 3, 60):
        again, counts = write(texts, limit, draft=4)
        assert again == [reply[:limit] for reply in replies]
    assert 20 < counts["accepted"] < counts["proposed"] - 20
    for text, reply in zip(texts, replies, strict=True):
        text.ids += reply[:30]  # all that follows may be proposed
        text.prompt += 30
        for eos in set(reply[30:36]):
            ((again,), _) = write([text], 30, draft=4, eos=eos)
            assert again == reply[30 : 31 + reply[30:].index(eos)]


def test_penalty_of_tokens_that_occurred(model, rng):
    network, weights = read_model(model)
    writer = Engine(network, network.cache(256), 0, repetition=1.8, temperature=0, draft=3)
    text = writer.add(Text(rng.integers(3, len(VOCABULARY), 9).tolist(), 25))
    run(writer)
    logits = logits_of_all(weights, text.ids)
    for i in range(text.prompt, len(text.ids)):
        row, seen = logits[i - 1].copy(), sorted(set(text.ids[:i]))
        row[seen] = np.where(row[seen] > 0, row[seen] / 1.8, row[seen] * 1.8)
        assert row[text.ids[i]] >= row.max() - 1e-4 * row.std()


def test_a_text_too_long_for_the_cache(model):
    network, _ = read_model(model)
    writer = Engine(network, network.cache(2 * llama.PAGE_SIZE), 0, temperature=0)
    writer.add(Text(list(range(3, 43)), 5))
    with pytest.raises(MemoryError, match="3 more pages are needed"):
        writer.step()


def test_a_full_cache_is_asked_for_little_more(model, rng):
    network, _ = read_model(model)
    calls, steps = [], 0

    def asked(*arguments):
        calls.append(arguments)
        return network(*arguments)

    asked.xp = network.xp
    writer = Engine(asked, network.cache(6 * llama.PAGE_SIZE), 0, temperature=0)
    for text in some_texts(rng, 40, limit=10):
        writer.add(text)
    while writer.waiting or writer.running:
        writer.step()
        steps += 1
    assert steps < len(calls) <= 2 * steps + 40


def test_drafts_continue_what_stood_before(rng):
    for length in (0, 1, 2, 3, 10, 50):
        for count in (0, 1, 6):
            ids = rng.integers(0, 4, length).tolist()
            expected = []
            for i in range(len(ids) - engine.NGRAM - 1, -1, -1):
                after = i + engine.NGRAM
                if ids[i:after] == ids[-engine.NGRAM :]:
                    longer = list(ids)
                    for j in range(count):  # may go on into what it has copied itself
                        longer.append(longer[after + j])
                    expected = longer[len(ids) :]
                    break
            assert engine.look_up(ids, count) == expected


def test_saved_checkpoint_loads_as_it_was(model, tmp_path):
    metadata, weights = llama.read_gguf(model[0])
    llama.save(tmp_path / "saved", metadata, weights)
    loaded_metadata, loaded = llama.load(tmp_path / "saved")
    assert loaded_metadata == metadata
    assert loaded.keys() == weights.keys()
    for name, weight in weights.items():
        assert np.array_equal(loaded[name], weight)
        assert loaded[name].strides == weight.strides


def test_other_models_are_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    run = run_example("examples/generate.py", "--model", tmp_path / "other.gguf")
    assert run.returncode == 1
    assert "other.gguf: architecture 'mamba'; this example knows 'llama'" in run.stderr
    assert "Traceback" not in run.stderr
    with pytest.raises(ValueError, match="'llama'"):
        llama.Tokenizer({"tokenizer.ggml.model": "llama"})


# ------------------------------------------------------------------------------ the real model

#: Greedy ids that transformers 5.23 (torch 2.13, float32, CPU) gives for the same GGUF file.
TRANSFORMERS = {
    "": [29, 1195, 29, 6693, 29, 271, 29, 81, 29, 6693, 29, 1141],
    "Once upon a time": [28, 260, 2240, 282, 23324, 27108, 436, 253, 15114, 39228, 28, 351],
    "def fibonacci(n):\n    ": [753, 3987, 46477, 24, 94, 727, 466, 585, 304, 1758, 216, 32],
    "x  =  12   and    34": [256, 198, 504, 2988, 314, 42, 216, 33, 34, 198, 198, 504],
    "Grüße aus München, schöne Straße": [28, 198, 50, 1145, 266, 5320, 81, 28, 389, 2832, 264, 28],
    "👋🌍🚀 emoji ": [33, 32, 198, 10813, 235, 235, 10813, 230, 231, 10813, 244, 218],
    "The old lighthouse stood at the edge of the world. " * 180: [198, 504, 1573, 33059, 9318, 418],
}


@pytest.fixture(scope="module")
def smollm2(say):
    """The real model, from the user's cache folder, or fetched into it as the example does."""
    if not (generate.cache_folder() / f"{generate.GGUF}.float32").exists():
        say(f"fetching SmolLM2-135M-Instruct (93 MB), to keep in {generate.cache_folder()}")
    try:
        return generate.smollm2()
    except SystemExit as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(("dtype", "draft"), [("float32", 0), ("float32", 3), ("float16", 0)])
def test_real_model_writes_what_transformers_writes(smollm2, dtype, draft):
    tokenizer = llama.Tokenizer(smollm2[0])
    network = llama.Llama(*smollm2)
    writer = Engine(network, network.cache(4096, dtype), -1, draft=draft, temperature=0)
    # The long prompt is read once in float32: with drafts, which change nothing of how it is read.
    replies = {
        prompt: reply
        for prompt, reply in TRANSFORMERS.items()
        if len(prompt) < 100 or draft or dtype != "float32"
    }
    texts = {
        prompt: writer.add(Text(tokenizer.encode(prompt), len(expected)))
        for prompt, expected in replies.items()
    }
    run(writer)
    for prompt, expected in replies.items():
        assert texts[prompt].reply == expected, prompt


@pytest.mark.usefixtures("smollm2")
def test_real_model_answers():
    text, (reply,) = generate_text("--chat", "--prompt", "What is the capital of France?")
    assert text == "The capital of France is Paris.\n"
    assert reply == [504, 3575, 282, 4649, 314, 7042, 30, 2]


def test_an_int8_cache_writes_what_a_16_bit_cache_writes(smollm2):
    """Greedily, on the README's prompts."""
    tokenizer, network = llama.Tokenizer(smollm2[0]), llama.Llama(*smollm2)
    short = {"role": "system", "content": "Answer in one sentence."}
    chats = [[{"role": "user", "content": "Why is the sky blue?"}]] + [
        [short, {"role": "user", "content": question}]
        for question in ("What is a tide?", "Why is the sky blue?", "What is a prime number?")
    ]
    replies = []
    for kv in (None, "int8"):
        cache = network.cache(1024, "float16", generate.FORMATS.get(kv))
        writer = Engine(network, cache, -1, temperature=0)
        texts = [writer.add(Text(tokenizer.encode_chat(chat), 32)) for chat in chats]
        run(writer)
        replies.append([text.reply for text in texts])
    assert replies[0] == replies[1]


@pytest.mark.usefixtures("smollm2")
def test_kv_quantization(tmp_path):
    """The table of a few tokens: a quantised cache is near float32's, whatever is added to keys."""
    plot = tmp_path / "plot.png"
    options = "--tokens", 24, "--only", "k8v4", "--plot", plot, "--device", "cpu"
    lines = run_example("examples/kv_quantization.py", *options).stdout.splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| k8v4")]
    assert [row[0] for row in rows] == [
        "k8v4",
        "k8v4, groups of 32",
        "k8v4",
        "k8v4 with its offset",
    ]
    assert all(float(row[3]) < 0.05 for row in rows[:2] + rows[3:])
    assert plot.stat().st_size > 1000
