"""From logits to tokens: the public functions.

Logits are (batch, vocab), or (vocab,) for one row; float16, bfloat16 or float32; NumPy or CuPy;
rows may be any stride apart. Every parameter is a scalar or one value per row. A scalar, or an
array on the host, that is out of range is a ValueError, and a temperature there above 2**100 counts
as 2**100; an array on the device is never read back, and its values are clamped: temperature to [0,
inf), top_k to [1, vocab], top_p, min_p and typical_p to [0, 1], NaN to the lowest; tokens and rows
that do not fit into int32 to the nearest that do, which is out of range. While a CUDA graph is
captured, arrays on the host are a ValueError.

A row that holds a NaN or +inf is bad: it gives token -1 and results of NaN, and leaves the other
rows alone. A row of nothing but -inf gives token -1 and probabilities of 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from cuattn import _sampling_spec as spec
from cuattn._arrays import check_given, check_out
from cuattn._backend import backend, on_their_gpu, temporaries
from cuattn._errors import explain_errors
from cuattn._repeat import repeated
from cuattn._typing import (
    Array,
    FilterOptions,
    Integers,
    Numbers,
    NumPyArray,
    PenaltyOptions,
    SampleOptions,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "apply_penalties",
    "beam_step",
    "filter_logits",
    "greedy",
    "logprobs",
    "sample",
    "softmax",
    "speculative_sample",
    "speculative_sample_tree",
    "top_k",
]


@overload
def softmax(logits: NDArray[Any], *, temperature: Numbers = 1.0) -> NDArray[np.float32]: ...


@overload
def softmax(logits: Array, *, temperature: Numbers = 1.0) -> Any: ...


@explain_errors
@on_their_gpu
def softmax(logits: Any, *, temperature: Any = 1.0) -> Any:
    """Probabilities of the tokens.

    Parameters
    ----------
    logits : array (batch, vocab) or (vocab,)
        float16, bfloat16 or float32.
    temperature : float or array (batch,)
        Divides the logits; 0 gives the first of the largest the probability 1.

    Returns
    -------
    array of float32, of the shape of `logits`
        Rows sum to 1, save that an all -inf row is 0, and one with a NaN or +inf is NaN.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message names it.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> cuattn.sampling.softmax(np.zeros((1, 4), np.float32))
    array([[0.25, 0.25, 0.25, 0.25]], dtype=float32)
    """
    name = "sampling.softmax"
    xp, logits, shape, _ = spec.given_logits(name, logits)
    temperature = spec.row_values(name, xp, "temperature", temperature, len(logits))
    return _shaped(backend(xp, "sampling").softmax(logits, temperature), shape)


@overload
def greedy(logits: NDArray[Any]) -> NDArray[np.int32]: ...


@overload
def greedy(logits: Array) -> Any: ...


@explain_errors
@on_their_gpu
def greedy(logits: Any) -> Any:
    """The likeliest token of each row, the first of equals.

    Parameters
    ----------
    logits : array (batch, vocab) or (vocab,)
        float16, bfloat16 or float32.

    Returns
    -------
    array (batch,) of int32, or () for a single row
        -1 for a row without a finite logit, or with a NaN or +inf.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message names it.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> cuattn.sampling.greedy(np.array([[1, 7, 7, 3]], np.float32))
    array([1], dtype=int32)
    """
    xp, logits, shape, _ = spec.given_logits("sampling.greedy", logits)
    return _shaped(backend(xp, "sampling").greedy(logits), shape[:-1])


@overload
def top_k(logits: NumPyArray, k: int) -> tuple[NumPyArray, NDArray[np.int32]]: ...


@overload
def top_k(logits: Array, k: int) -> tuple[Any, Any]: ...


@explain_errors
@on_their_gpu
def top_k(logits: Any, k: int) -> tuple[Any, Any]:
    """The k largest logits of each row, in descending order, equals by index.

    Parameters
    ----------
    logits : array (batch, vocab) or (vocab,)
        float16, bfloat16 or float32.
    k : int
        From 1 to vocab.

    Returns
    -------
    values : array (batch, k)
        Of the dtype of `logits`; NaN in a row with a NaN or +inf.
    indices : array (batch, k) of int32
        -1 in such a row.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message names it.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> cuattn.sampling.top_k(np.array([[1, 7, 7, 3]], np.float32), 3)
    (array([[7., 7., 3.]], dtype=float32), array([[1, 2, 3]], dtype=int32))
    """
    name = "sampling.top_k"
    xp, logits, shape, _ = spec.given_logits(name, logits)
    k = spec.integer(name, "k", k, 1, logits.shape[1])
    values, indices = backend(xp, "sampling").top_k(logits, k)
    return _shaped(values, (*shape[:-1], k)), _shaped(indices, (*shape[:-1], k))


@overload
def filter_logits(
    logits: NDArray[Any], **options: Unpack[FilterOptions]
) -> NDArray[np.float32]: ...


@overload
def filter_logits(logits: Array, **options: Unpack[FilterOptions]) -> Any: ...


@explain_errors
@on_their_gpu
def filter_logits(
    logits: Any,
    *,
    temperature: Any = 1.0,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    typical_p: Any = None,
) -> Any:
    """Logits over temperature of the tokens that the filters leave, -inf for the others.

    The filters act in the order of the parameters, each on what is left. Equal logits rank by
    index, the lower first.

    Parameters
    ----------
    logits : array (batch, vocab) or (vocab,)
        float16, bfloat16 or float32.
    temperature : float or array (batch,)
        Divides the logits; 0 leaves the first of the largest alone.
    top_k : int or array (batch,), optional
        How many of the largest are kept.
    top_p : float or array (batch,), optional
        The shortest descending run of tokens whose probability reaches `top_p` is kept, the token
        that crosses it included [1]_. At least one token stays.
    min_p : float or array (batch,), optional
        Tokens with at least `min_p` times the largest probability are kept [2]_.
    typical_p : float or array (batch,), optional
        Tokens are ranked by how far ``-log p`` is from the entropy, and the shortest run whose
        probability reaches `typical_p` is kept [3]_.

    Returns
    -------
    array of float32, of the shape of `logits`
        A row with a NaN or +inf is NaN.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message names it.

    References
    ----------
    .. [1] Holtzman et al., "The Curious Case of Neural Text Degeneration", ICLR 2020.
    .. [2] Nguyen et al., "Turning Up the Heat: Min-p Sampling", 2024.
    .. [3] Meister et al., "Locally Typical Sampling", TACL 2023.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    >>> cuattn.sampling.softmax(cuattn.sampling.filter_logits(logits, top_p=0.7)).round(3)
    array([0.625, 0.375, 0.   , 0.   ], dtype=float32)
    """
    name = "sampling.filter_logits"
    xp, logits, shape, _ = spec.given_logits(name, logits)
    filters = spec.filters(name, xp, logits.shape, temperature, top_k, top_p, min_p, typical_p)
    return _shaped(backend(xp, "sampling").filter_logits(logits, filters), shape)


@overload
def sample(logits: NDArray[Any], **options: Unpack[SampleOptions]) -> NDArray[np.int32]: ...


@overload
def sample(logits: Array, **options: Unpack[SampleOptions]) -> Any: ...


@repeated(seeds=("seed", "offset"), fresh="seed", tokens=())
@explain_errors
@on_their_gpu
def sample(
    logits: Any,
    *,
    temperature: Any = 1.0,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    typical_p: Any = None,
    seed: Any = None,
    offset: Any = 0,
    tokens: Any = None,
    repetition: Any = 1.0,
    frequency: Any = 0.0,
    presence: Any = 0.0,
    logit_bias: Any = None,
    allowed: Any = None,
) -> Any:
    """Draw a token from each row, distributed exactly as ``softmax(filter_logits(logits, ...))``,
    after :func:`apply_penalties` where penalties are given.

    The draw is Gumbel-max: the kept token with the largest ``logit / temperature -
    log(-log1p(-u))``, with ``u`` from Philox4x32-10 [1]_ at (seed, offset, token). With an array of
    seeds it depends on the row's own logits, parameters, seed and offset alone, not on the batch or
    the place in it. NumPy and GPU draw the same tokens. Advance `offset` by one for each token of a
    sequence.

    Parameters
    ----------
    logits, temperature, top_k, top_p, min_p, typical_p
        As in :func:`filter_logits`.
    seed : int or array (batch,) of integers, optional
        None draws anew at each call, from the system's entropy. An int is reproducible and gives
        each row a stream of its own: row ``i`` draws as with the seed ``seed + i *
        0x9E3779B97F4A7C15``, modulo 2**64. An array has each row's own seed. At most 64 bits. While
        a CUDA graph is captured None is a ValueError, since every replay would draw the same.
    offset : int or array (batch,) of integers
        At most 64 bits. Arrays on the device may change between replays of a captured graph.
    tokens, repetition, frequency, presence, logit_bias, allowed
        As in :func:`apply_penalties`: the token is that of ``sample(apply_penalties(logits, ...),
        ...)``. No penalized copy of the logits is made without filters, nor of many rows by an int
        `top_k` up to 256, if there are neither a dense bias nor a mask. `tokens` is needed for
        `repetition`, `frequency` and `presence` alone.

    Returns
    -------
    array (batch,) of int32, or () for a single row
        -1 for a row without a finite logit, or with a NaN or +inf.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message names it.

    References
    ----------
    .. [1] Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> logits = np.array([[0.0, 5.0, -np.inf]], np.float32)
    >>> cuattn.sampling.sample(logits, temperature=0)
    array([1], dtype=int32)
    """
    name = "sampling.sample"
    penalized = tokens is not None or logit_bias is not None or allowed is not None
    arrays = spec.penalty_arrays(name, tokens, logit_bias, allowed) if penalized else {}
    xp, logits, shape, brought = spec.given_logits(name, logits, **arrays)
    filters = spec.filters(name, xp, logits.shape, temperature, top_k, top_p, min_p, typical_p)
    penalties = None
    if penalized:
        penalties = spec.penalties(name, xp, logits.shape, brought, repetition, frequency, presence)
    else:
        spec.check_no_penalty(name, repetition, frequency, presence)
    seed = spec.seeds(name, xp, seed, len(logits))
    offset = spec.offsets(name, xp, offset, len(logits))
    result = backend(xp, "sampling").sample(logits, filters, seed, offset, penalties)
    return _shaped(result, shape[:-1])


@overload
def apply_penalties(
    logits: NumPyArray,
    tokens: Array,
    *,
    out: Array | None = None,
    **options: Unpack[PenaltyOptions],
) -> NumPyArray: ...


@overload
def apply_penalties(
    logits: Array, tokens: Array, *, out: Array | None = None, **options: Unpack[PenaltyOptions]
) -> Any: ...


@explain_errors
@on_their_gpu
def apply_penalties(
    logits: Any,
    tokens: Any,
    *,
    repetition: Any = 1.0,
    frequency: Any = 0.0,
    presence: Any = 0.0,
    logit_bias: Any = None,
    allowed: Any = None,
    out: Any = None,
) -> Any:
    """Logits with each row's penalties for its own earlier tokens, biases, and a mask of allowed
    tokens, in this order.

    Parameters
    ----------
    logits : array (batch, vocab) or (vocab,)
        float16, bfloat16 or float32.
    tokens : array (batch, length) or (length,) of int32
        Each row's earlier tokens, padded with -1. What is no token of the vocabulary counts for
        nothing.
    repetition : float or array (batch,)
        Divides positive and multiplies negative logits of tokens that occurred [1]_; positive.
    frequency, presence : float or array (batch,)
        Subtracted for each occurrence, and once for a token that occurred.
    logit_bias : array (vocab,) or (batch, vocab), or (row, token, value), optional
        Added. The triple of arrays names single logits; what is out of range of the logits is left
        out, what is double adds up.
    allowed : array, optional
        Boolean (vocab,) or (batch, vocab), or 32 tokens a word, the lowest bit first, as int32 or
        uint32 (ceil(vocab / 32),) or (batch, ceil(vocab / 32)). What is not allowed becomes -inf.
    out : array, optional
        Written to and returned; may be `logits`.

    Returns
    -------
    array of the shape and dtype of `logits`

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message names it.

    References
    ----------
    .. [1] Keskar et al., "CTRL", 2019.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> logits, tokens = np.array([2.0, -1.0, 3.0], np.float32), np.array([0, 1], np.int32)
    >>> cuattn.sampling.apply_penalties(logits, tokens, repetition=2)
    array([ 1., -2.,  3.], dtype=float32)
    """
    name = "sampling.apply_penalties"
    check_given(name, logits=logits, tokens=tokens)
    arrays = spec.penalty_arrays(name, tokens, logit_bias, allowed)
    xp, rows, shape, (*brought, out) = spec.given_logits(name, logits, **arrays, out=out)
    penalties = spec.penalties(name, xp, rows.shape, brought, repetition, frequency, presence)
    if out is None:
        return _shaped(backend(xp, "sampling").apply_penalties(rows, penalties), shape)
    check_out(name, out, shape, rows.dtype)
    with temporaries(xp):
        result = backend(xp, "sampling").apply_penalties(rows, penalties)
    out[...] = result.reshape(shape)
    return out


@overload
def speculative_sample(
    draft_tokens: NDArray[Any],
    draft_probs: NDArray[Any],
    target_probs: NDArray[Any],
    *,
    seed: Integers | None = None,
    offset: Integers = 0,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]: ...


@overload
def speculative_sample(
    draft_tokens: Array,
    draft_probs: Array,
    target_probs: Array,
    *,
    seed: Integers | None = None,
    offset: Integers = 0,
) -> tuple[Any, Any]: ...


@explain_errors
@on_their_gpu
def speculative_sample(
    draft_tokens: Any, draft_probs: Any, target_probs: Any, *, seed: Any = None, offset: Any = 0
) -> tuple[Any, Any]:
    """Accept a run of draft tokens and add one token, distributed exactly as the target alone would
    draw them [1]_.

    Parameters
    ----------
    draft_tokens : array (batch, drafts) of int32
        A chain of tokens, padded with -1 at the end.
    draft_probs : array (batch, drafts, vocab) of float32
        What each was drawn from. A negative probability is a ValueError on the host, and counts as
        0 on the device, here and in `target_probs`.
    target_probs : array (batch, drafts + 1, vocab) of float32
        The target's probabilities before each draft token, and after the last.
    seed, offset : int or array (batch,) of integers
        Decide a row's draws, as in :func:`sample`. With a seed given, the next call of a row needs
        another offset, and so does a draft that :func:`sample` drew with that seed.

    Returns
    -------
    tokens : array (batch, drafts + 1) of int32
        The accepted tokens, the added one, and -1.
    num_accepted : array (batch,) of int32
        How many draft tokens were accepted.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message names it.

    References
    ----------
    .. [1] Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> certain = np.eye(4, dtype=np.float32)[None]  # probability 1 for token 0, then 1, 2 and 3
    >>> drafts = np.array([[0, 1, 1]], np.int32)
    >>> cuattn.sampling.speculative_sample(drafts, certain[:, [0, 1, 1]], certain)
    (array([[ 0,  1,  2, -1]], dtype=int32), array([2], dtype=int32))
    """
    name = "sampling.speculative_sample"
    return _speculative(name, draft_tokens, draft_probs, target_probs, None, seed, offset)


@overload
def speculative_sample_tree(
    draft_tokens: NDArray[Any],
    parents: NDArray[Any],
    draft_probs: NDArray[Any],
    target_probs: NDArray[Any],
    *,
    seed: Integers | None = None,
    offset: Integers = 0,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]: ...


@overload
def speculative_sample_tree(
    draft_tokens: Array,
    parents: Array,
    draft_probs: Array,
    target_probs: Array,
    *,
    seed: Integers | None = None,
    offset: Integers = 0,
) -> tuple[Any, Any]: ...


@explain_errors
@on_their_gpu
def speculative_sample_tree(
    draft_tokens: Any,
    parents: Any,
    draft_probs: Any,
    target_probs: Any,
    *,
    seed: Any = None,
    offset: Any = 0,
) -> tuple[Any, Any]:
    """Accept a path of a tree of draft tokens and add one token, distributed exactly as the target
    draws [1]_.

    Siblings are tried in order, each drawn on its own from its `draft_probs`. A rejection subtracts
    those from the target's probabilities, and the rest, normalised, is the target of the next.

    Parameters
    ----------
    draft_tokens : array (batch, drafts) of int32
        The tree's tokens, each after its parent; -1 for none.
    parents : array (batch, drafts) of int32
        Index of each token's parent, which comes before it, -1 for the root. Another is a
        ValueError on the host; on the device such a token is never accepted.
    draft_probs, target_probs, seed, offset
        As in :func:`speculative_sample`; ``target_probs[:, i + 1]`` is the target after draft token
        ``i``.

    Returns
    -------
    tokens, num_accepted
        As in :func:`speculative_sample`.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message names it.

    References
    ----------
    .. [1] Miao et al., "SpecInfer", ASPLOS 2024.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> certain = np.eye(4, dtype=np.float32)[None, [1, 2, 3, 3]]  # tokens 1, 3 and 3 in the end
    >>> drafts, parents = np.array([[0, 1, 3]], np.int32), np.array([[-1, -1, 1]], np.int32)
    >>> draft_probs = np.eye(4, dtype=np.float32)[None, [0, 1, 3]]
    >>> cuattn.sampling.speculative_sample_tree(drafts, parents, draft_probs, certain)
    (array([[ 1,  3,  3, -1]], dtype=int32), array([2], dtype=int32))
    """
    name = "sampling.speculative_sample_tree"
    check_given(name, parents=parents)
    return _speculative(name, draft_tokens, draft_probs, target_probs, parents, seed, offset)


@overload
def logprobs(
    logits: NDArray[Any], tokens: Array | None = None, *, top_n: int = 0
) -> tuple[NDArray[np.float32] | None, NDArray[np.float32] | None, NDArray[np.int32] | None]: ...


@overload
def logprobs(
    logits: Array, tokens: Array | None = None, *, top_n: int = 0
) -> tuple[Any, Any, Any]: ...


@explain_errors
@on_their_gpu
def logprobs(logits: Any, tokens: Any = None, *, top_n: int = 0) -> tuple[Any, Any, Any]:
    """Log-probabilities of chosen tokens and of the likeliest ones.

    Parameters
    ----------
    logits : array (batch, vocab)
        float16, bfloat16 or float32.
    tokens : array (batch,) or (batch, n) of int32, optional
        Chosen tokens.
    top_n : int
        How many of the likeliest tokens to give.

    Returns
    -------
    chosen : array of float32, of the shape of `tokens`, or None
        NaN for a token out of range.
    values, indices : arrays (batch, top_n) of float32 and int32, or None
        Log-probabilities in descending order, and their tokens.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message names it.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> logits = np.log(np.array([[0.5, 0.3, 0.2]], np.float32))
    >>> chosen, values, tokens = cuattn.sampling.logprobs(logits, np.array([2], np.int32), top_n=2)
    >>> np.exp(chosen).round(3), np.exp(values).round(3), tokens
    (array([0.2], dtype=float32), array([[0.5, 0.3]], dtype=float32), array([[0, 1]], dtype=int32))
    """
    name = "sampling.logprobs"
    xp, logits, shape, (tokens,) = spec.given_logits(name, logits, tokens=tokens)
    batch, vocab = logits.shape
    top_n = spec.integer(name, "top_n", top_n, 0, vocab)
    wanted = None
    if tokens is not None:
        if tokens.ndim not in (1, 2) or len(tokens) != batch:
            raise ValueError(
                f"{name}: tokens must be ({batch},) or ({batch}, n) as logits are, has shape "
                f"{tokens.shape}"
            )
        rows = tokens if tokens.ndim == 2 else tokens[:, None]
        wanted = spec.token_rows(name, xp, rows, batch)
    chosen, values, indices = backend(xp, "sampling").logprobs(logits, wanted, top_n)
    if chosen is not None:
        chosen = chosen.reshape(tokens.shape)
    if values is not None:
        values, indices = (a.reshape(*shape[:-1], top_n) for a in (values, indices))
    return chosen, values, indices


@overload
def beam_step(
    logits: NDArray[Any], scores: NDArray[Any]
) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.int32]]: ...


@overload
def beam_step(logits: Array, scores: Array) -> tuple[Any, Any, Any]: ...


@explain_errors
@on_their_gpu
def beam_step(logits: Any, scores: Any) -> tuple[Any, Any, Any]:
    """One step of beam search: the best continuations of each row's beams.

    Parameters
    ----------
    logits : array (batch, beams, vocab)
        Of the next token of each beam.
    scores : array (batch, beams) of float32
        Log-probability of each beam so far; -inf for one that does not exist, as all but the first
        at the start.

    Returns
    -------
    scores : array (batch, beams) of float32
        Of the best continuations, descending; equals by beam, then by token.
    tokens, parents : arrays (batch, beams) of int32
        The token that each adds, and the beam that it continues; -1 where there is none.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message names it.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> logits = np.log(np.array([[[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]], np.float32))
    >>> scores = np.log(np.array([[0.6, 0.4]], np.float32))
    >>> best, tokens, parents = cuattn.sampling.beam_step(logits, scores)
    >>> np.exp(best).round(3), tokens.tolist(), parents.tolist()
    (array([[0.32, 0.3 ]], dtype=float32), [[2, 0]], [[1, 0]])
    """
    name = "sampling.beam_step"
    xp, logits, scores = spec.given_beams(name, logits, scores)
    return backend(xp, "sampling").beam_step(logits, scores)


def _speculative(
    name: str,
    draft_tokens: Any,
    draft_probs: Any,
    target_probs: Any,
    parents: Any,
    seed: Any,
    offset: Any,
) -> tuple[Any, Any]:
    xp, drafts = spec.drafts(name, draft_tokens, draft_probs, target_probs, parents)
    batch = len(drafts.target_probs)
    seed = spec.seeds(name, xp, seed, batch)
    return backend(xp, "sampling").speculative_sample(
        drafts, seed, spec.offsets(name, xp, offset, batch)
    )


def _shaped(rows: Any, shape: tuple[int, ...]) -> Any:
    """Results of rows in the shape of what was given: a single row loses its axis."""
    return rows if rows.shape == shape else rows.reshape(shape)
