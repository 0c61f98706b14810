"""Writing many texts at once: continuous batching, sampling, and drafts by prompt lookup.

A module of generate.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit(f"{__doc__}\nRun generate.py instead; --help lists its options.")

import collections
import dataclasses
import itertools
import time
from typing import Any, NamedTuple

import llama
import numpy as np

import cuattn

CHUNK = 2048  # tokens of prompts that a pass reads at most: it bounds the memory a pass takes
NGRAM = 2  # so many last tokens are looked up in what is before them


@dataclasses.dataclass(eq=False)
class Text:
    """A prompt and what has been written after it."""

    ids: list[int]
    limit: int  # how many tokens may be written, at least 1
    seed: int = 0
    sequence: int | None = None  # its id in the cache, while it is in the batch
    cached: int = 0  # how many of its tokens are in the cache
    prompt: int = dataclasses.field(init=False)  # how many of its tokens were given

    def __post_init__(self) -> None:
        self.ids = list(self.ids)
        self.prompt = len(self.ids)

    @property
    def reply(self) -> list[int]:
        return self.ids[self.prompt :]


class Turn(NamedTuple):
    """A text's part in a pass of the model."""

    text: Text
    new: list[int]  # tokens that are not in the cache: the text's own, then the draft
    draft: list[int]
    wanted: int  # of how many of the last of `new` the model is to say what follows


class Engine:
    """Writes texts, many in each pass of the model.

    A text joins at any step and leaves when it ends. In the same pass the prompts of some are read,
    and others go on by a token, or by several: a draft is proposed, and kept as far as the model
    would have written it itself, so that drafts change the speed and nothing else.

    Parameters
    ----------
    model, cache
        A model, and a cache of its making.
    eos : int
        The token that ends a text.
    draft : int
        How many tokens to propose.
    max_batch : int
        How many texts may be in the batch.
    **sampling
        For ``cuattn.sampling.sample``: `temperature`, `top_k`, `top_p`, `min_p`, `repetition`.
    """

    def __init__(
        self,
        model: llama.Llama,
        cache: cuattn.PagedKVCache,
        eos: int,
        *,
        draft: int = 0,
        max_batch: int = 64,
        **sampling: Any,
    ) -> None:
        self.model, self.cache, self.eos = model, cache, eos
        self.sampling, self.draft, self.max_batch = sampling, draft, max_batch
        self.waiting: collections.deque[Text] = collections.deque()
        self.running: list[Text] = []
        self.room = max_batch  # how many texts may run, as far as the cache lets them
        self.counts: collections.Counter[str] = collections.Counter()  # tokens and seconds

    def add(self, text: Text) -> Text:
        """Let a text join as soon as there is room."""
        self.waiting.append(text)
        return text

    def step(self) -> list[tuple[Text, list[int]]]:
        """One pass of the model. Returns what was written: texts, each with its new tokens."""
        start = time.perf_counter()
        while self.waiting and len(self.running) < self.room:
            if self.pays_to_wait(self.waiting[0]):
                break
            self.join(self.waiting.popleft())
        while True:
            turns = self.turns()
            texts, new, _, wanted = zip(*turns, strict=True)
            try:
                logits = self.model(self.cache, [text.sequence for text in texts], new, wanted)
                break
            except MemoryError:  # the last to come waits until others have left
                if len(self.running) == 1:
                    raise
                self.waiting.appendleft(self.running[-1])
                self.leave(self.running[-1])
                self.room = len(self.running)
        self.room = min(self.room + 1, self.max_batch)
        reading = any(len(turn.new) > turn.wanted for turn in turns)
        chosen = iter(self.choose(logits, turns))
        written = [self.keep(turn, [next(chosen) for _ in range(turn.wanted)]) for turn in turns]
        seconds = time.perf_counter() - start
        if reading:  # prompts, whatever else was written meanwhile
            tokens = sum(len(turn.new) - turn.wanted for turn in turns)
            self.counts.update(read=tokens, read_seconds=seconds)
        else:
            self.counts.update(written=sum(map(len, written)), written_seconds=seconds)
        return [(text, tokens) for text, tokens in zip(texts, written, strict=True) if tokens]

    def pays_to_wait(self, text: Text) -> bool:
        """Whether another text is about to read a page that this one can then find in the cache."""
        size = self.cache.page_size
        for other in self.running:
            end = other.cached // size * size + size
            if end < len(text.ids) and text.ids[:end] == other.ids[:end]:
                return True
        return False

    def join(self, text: Text) -> None:
        """Take a text into the batch, with what the cache has of its beginning."""
        text.sequence = self.cache.add_sequence(text.ids)
        text.cached = self.cache.num_tokens(text.sequence)
        self.running.append(text)

    def leave(self, text: Text) -> None:
        """Take a text out of the batch. Its pages stay in the cache as long as there is room."""
        self.cache.remove(text.sequence)
        self.running.remove(text)
        text.sequence, text.cached = None, 0

    def turns(self) -> list[Turn]:
        """What each text reads in the next pass: those with the least to read first."""
        turns, room = [], CHUNK
        for text in sorted(self.running, key=lambda text: len(text.ids) - text.cached):
            new, draft, wanted = text.ids[text.cached :][:room], [], 0
            if text.cached + len(new) == len(text.ids):
                left = text.limit - len(text.reply)
                draft = look_up(text.ids, min(self.draft, left - 1))
                wanted = 1 + len(draft)
            if new:
                turns.append(Turn(text, new + draft, draft, wanted))
                room -= len(new)
        return turns

    def choose(self, logits: Any, turns: list[Turn]) -> list[int]:
        """The token after each of the wanted ones. A text's seed and the token's place decide the
        draw, whatever the batch around it and the draft."""
        before = [turn.text.ids + turn.draft[:i] for turn in turns for i in range(turn.wanted)]
        if not before:
            return []
        tokens = None
        if self.sampling.get("repetition", 1) != 1:
            padded = itertools.zip_longest(*before, fillvalue=-1)
            tokens = self.model.xp.asarray(np.array([*padded], np.int32).T)
        seeds = [turn.text.seed for turn in turns for _ in range(turn.wanted)]
        places = [len(ids) for ids in before]
        return cuattn.sampling.sample(
            logits, **self.sampling, seed=np.array(seeds), offset=np.array(places), tokens=tokens
        ).tolist()

    def keep(self, turn: Turn, chosen: list[int]) -> list[int]:
        """Let a text go on by as much of its draft as was chosen too, and by the token after
        that."""
        text, draft = turn.text, turn.draft
        text.cached += len(turn.new)
        if not chosen:
            return []
        same = [proposed == token for proposed, token in zip(draft, chosen, strict=False)]
        accepted = [*same, False].index(False)
        self.counts.update(proposed=len(draft), accepted=accepted)
        if accepted < len(draft):
            text.cached -= len(draft) - accepted
            self.cache.truncate(text.sequence, text.cached)
        new = chosen[: accepted + 1]
        if self.eos in new:
            new = new[: new.index(self.eos) + 1]
        text.ids += new
        if new[-1] == self.eos or len(text.reply) == text.limit:
            self.leave(text)
        return new


def look_up(ids: list[int], count: int) -> list[int]:
    """A draft: the tokens that followed the last NGRAM of `ids` where they stood the time
    before."""
    if count < 1 or len(ids) <= NGRAM:
        return []
    before = np.array(ids)
    same = [before[i : i - NGRAM] == ids[i - NGRAM] for i in range(NGRAM)]
    (found,) = np.nonzero(np.logical_and.reduce(same))
    if not found.size:
        return []
    start = int(found[-1]) + NGRAM
    period = len(ids) - start  # a text that repeats itself is taken to go on so
    return [ids[start + i % period] for i in range(count)]
