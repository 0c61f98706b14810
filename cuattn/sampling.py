"""From logits to tokens: the public functions.

Logits are (batch, vocab), or (vocab,) for one row; float16, bfloat16 or float32; NumPy or CuPy;
rows may be any stride apart. Every parameter is a scalar or one value per row. A scalar, or an
array on the host, that is out of range is a ValueError; an array on the device is never read back,
and its values are clamped: temperature to [0, inf), top_k to [1, vocab], top_p, min_p and typical_p
to [0, 1], NaN to the lowest. While a CUDA graph is captured, arrays of the host's are a ValueError.

A row that holds a NaN or +inf is bad: it gives token -1 and results of NaN, and leaves the other
rows alone. A row of nothing but -inf gives token -1 and probabilities of 0.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from cuattn._arrays import as_arrays, check_given, check_out, on_gpu
from cuattn._backend import (
    backend,
    contiguous,
    contiguous_last_axis,
    on_their_gpu,
    reshaped,
    temporaries,
)
from cuattn.reference import sampling as reference

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

_LOGIT_DTYPES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32))
_MAX_ROW = 1 << 30


@on_their_gpu
def softmax(logits: Any, *, temperature: Any = 1.0) -> Any:
    """Probabilities of the tokens.

    Parameters
    ----------
    logits : array (batch, vocab) or (vocab,)
        float16, bfloat16 or float32.
    temperature : float or array (batch,)
        Divides the logits; 0 puts all of the mass on the first of the largest.

    Returns
    -------
    array of float32, of the shape of `logits`
        Rows sum to 1, save that an all -inf row is 0 and a bad row NaN.

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
    xp, logits, shape = _logits(name, logits)
    temperature = _row_values(name, xp, "temperature", temperature, len(logits))
    return _shaped(backend(xp, "sampling").softmax(logits, temperature), shape)


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
    """
    xp, logits, shape = _logits("sampling.greedy", logits)
    return _shaped(backend(xp, "sampling").greedy(logits), shape[:-1])


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
        Of the dtype of `logits`; NaN in a bad row.
    indices : array (batch, k) of int32
        -1 in a bad row.

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
    xp, logits, shape = _logits(name, logits)
    k = _integer(name, "k", k, 1, logits.shape[1])
    values, indices = backend(xp, "sampling").top_k(logits, k)
    return _shaped(values, (*shape[:-1], k)), _shaped(indices, (*shape[:-1], k))


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
        A bad row is NaN.

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
    xp, logits, shape = _logits(name, logits)
    filters = _filters(name, xp, logits, temperature, top_k, top_p, min_p, typical_p)
    return _shaped(backend(xp, "sampling").filter_logits(logits, filters), shape)


@on_their_gpu
def sample(
    logits: Any,
    *,
    temperature: Any = 1.0,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    typical_p: Any = None,
    seed: Any = 0,
    offset: Any = 0,
    tokens: Any = None,
    repetition: Any = 1.0,
    frequency: Any = 0.0,
    presence: Any = 0.0,
    logit_bias: Any = None,
    allowed: Any = None,
) -> Any:
    """One token a row, drawn from exactly ``softmax(filter_logits(logits, ...))``, the logits after
    :func:`apply_penalties` if any are given.

    The draw takes the kept token with the largest ``logit / temperature - log(-log1p(-u))``, with
    ``u`` from Philox4x32-10 [1]_ at (seed, offset, token). It depends on the row's own logits,
    parameters, seed and offset and on nothing else: not on the batch, the place in it or the side.
    Advance `offset` by one for each token of a sequence.

    Parameters
    ----------
    logits, temperature, top_k, top_p, min_p, typical_p
        As in :func:`filter_logits`.
    seed, offset : int or array (batch,) of integers
        64 bits of each count. Arrays on the device may change between replays of a captured graph.
    tokens, repetition, frequency, presence, logit_bias, allowed
        As in :func:`apply_penalties`: the token is that of ``sample(apply_penalties(logits, ...),
        ...)``. No penalised copy of the logits is made without filters, nor of many rows by an int
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
    xp, logits, shape = _logits(name, logits)
    filters = _filters(name, xp, logits, temperature, top_k, top_p, min_p, typical_p)
    seed = _words(name, xp, "seed", seed, len(logits))
    offset = _words(name, xp, "offset", offset, len(logits))
    penalties = None
    if tokens is not None or logit_bias is not None or allowed is not None:
        penalties = _penalties(
            name, logits, tokens, repetition, frequency, presence, logit_bias, allowed
        )
    else:
        for parameter, given, off in (
            ("repetition", repetition, 1),
            ("frequency", frequency, 0),
            ("presence", presence, 0),
        ):
            if not isinstance(given, (int, float)) or given != off:
                raise ValueError(f"{name}: {parameter} is given, and tokens are not")
    result = backend(xp, "sampling").sample(logits, filters, seed, offset, penalties)
    return _shaped(result, shape[:-1])


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
        Each row's earlier tokens, padded with -1.
    repetition : float or array (batch,)
        Divides positive and multiplies negative logits of tokens that occurred [1]_; positive.
    frequency, presence : float or array (batch,)
        Subtracted for each occurrence, and once for a token that occurred.
    logit_bias : array (vocab,) or (batch, vocab), or (row, token, value), optional
        Added. The triple of arrays names single logits; what is out of range is left out, what is
        double adds up.
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
    xp, (logits, out) = as_arrays(name, logits=logits, out=out)
    shape = logits.shape
    xp, rows, _ = _logits(name, logits)
    penalties = _penalties(name, rows, tokens, repetition, frequency, presence, logit_bias, allowed)
    if out is not None:
        check_out(name, out, shape, rows.dtype)
    if out is None:
        return backend(xp, "sampling").apply_penalties(rows, penalties).reshape(shape)
    with temporaries(xp):
        result = backend(xp, "sampling").apply_penalties(rows, penalties)
    out[...] = result.reshape(shape)
    return out


@on_their_gpu
def speculative_sample(
    draft_tokens: Any, draft_probs: Any, target_probs: Any, *, seed: Any = 0, offset: Any = 0
) -> tuple[Any, Any]:
    """Accept a run of draft tokens and add one token, distributed exactly as the target alone would
    draw them [1]_.

    Parameters
    ----------
    draft_tokens : array (batch, drafts) of int32
        A chain of tokens, padded with -1 at the end.
    draft_probs : array (batch, drafts, vocab) of float32
        What each was drawn from.
    target_probs : array (batch, drafts + 1, vocab) of float32
        The target's probabilities before each draft token, and after the last.
    seed, offset : int or array (batch,) of integers
        Decide a row's draws. The next call of a row needs another offset.

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
    """
    name = "sampling.speculative_sample"
    return _speculative(name, draft_tokens, draft_probs, target_probs, None, seed, offset)


@on_their_gpu
def speculative_sample_tree(
    draft_tokens: Any,
    parents: Any,
    draft_probs: Any,
    target_probs: Any,
    *,
    seed: Any = 0,
    offset: Any = 0,
) -> tuple[Any, Any]:
    """Accept a path of a tree of draft tokens and add one token, distributed exactly as the target
    draws [1]_.

    Siblings are tried in order, each drawn on its own from its `draft_probs`; a rejection takes
    that proposal's mass out of what the next is judged by.

    Parameters
    ----------
    draft_tokens : array (batch, drafts) of int32
        The tree's tokens, each after its parent; -1 for none.
    parents : array (batch, drafts) of int32
        Index of each token's parent, -1 for the root.
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
    """
    name = "sampling.speculative_sample_tree"
    check_given(name, parents=parents)
    return _speculative(name, draft_tokens, draft_probs, target_probs, parents, seed, offset)


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
        How many of the likeliest are wanted.

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
    """
    name = "sampling.logprobs"
    xp, (logits, tokens) = as_arrays(name, logits=logits, tokens=tokens)
    xp, logits, shape = _logits(name, logits)
    batch, vocab = logits.shape
    top_n = _integer(name, "top_n", top_n, 0, vocab)
    wanted = None
    if tokens is not None:
        if tokens.ndim not in (1, 2) or len(tokens) != batch:
            raise ValueError(
                f"{name}: tokens must be ({batch},) or ({batch}, n) as logits are, has shape "
                f"{tokens.shape}"
            )
        wanted = _token_rows(name, tokens.reshape(batch, -1), batch, xp)
    chosen, values, indices = backend(xp, "sampling").logprobs(logits, wanted, top_n)
    if chosen is not None:
        chosen = chosen.reshape(tokens.shape)
    if values is not None:
        values, indices = (a.reshape(*shape[:-1], top_n) for a in (values, indices))
    return chosen, values, indices


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
    """
    name = "sampling.beam_step"
    check_given(name, logits=logits, scores=scores)
    xp, (logits, scores) = as_arrays(name, logits=logits, scores=scores)
    if logits.ndim != 3:
        raise ValueError(f"{name}: logits must be (batch, beams, vocab), has shape {logits.shape}")
    rows = contiguous_last_axis(xp, logits)
    rows = reshaped(xp, rows, (-1, logits.shape[-1]))
    _logits(name, rows)
    if scores.shape != logits.shape[:2]:
        raise ValueError(
            f"{name}: scores must be {logits.shape[:2]} as logits are, has shape {scores.shape}"
        )
    return backend(xp, "sampling").beam_step(
        rows.reshape(logits.shape), contiguous(xp, scores, np.float32)
    )


def _logits(name: str, logits: Any) -> tuple[ModuleType, Any, tuple[int, ...]]:
    """Side, logits as rows with a contiguous vocabulary, and their shape as given."""
    check_given(name, logits=logits)
    xp, (logits,) = as_arrays(name, logits=logits)
    if logits.dtype not in _LOGIT_DTYPES:
        raise TypeError(
            f"{name}: logits has dtype {logits.dtype}, must be float16, bfloat16 or float32"
        )
    if logits.ndim not in (1, 2) or not 1 <= logits.shape[-1] < _MAX_ROW:
        raise ValueError(
            f"{name}: logits must be (batch, vocab) or (vocab,) with vocab from 1 to "
            f"{_MAX_ROW - 1}, "
            f"has shape {logits.shape}"
        )
    rows = logits[None] if logits.ndim == 1 else logits
    return xp, contiguous_last_axis(xp, rows), logits.shape


def _shaped(rows: Any, shape: tuple[int, ...]) -> Any:
    """Results of rows in the shape of what was given: a single row loses its axis."""
    return rows if rows.shape == shape else rows.reshape(shape)


#: Of each parameter: lowest value, highest value, whether the lowest itself is valid, dtype.
_RANGES: dict[str, tuple[float, float, bool, type]] = {
    "temperature": (0.0, np.inf, True, np.float32),
    "top_k": (1, np.inf, True, np.int32),
    "top_p": (0.0, 1.0, True, np.float32),
    "min_p": (0.0, 1.0, True, np.float32),
    "typical_p": (0.0, 1.0, True, np.float32),
    "repetition": (0.0, np.inf, False, np.float32),
    "frequency": (-np.inf, np.inf, False, np.float32),
    "presence": (-np.inf, np.inf, False, np.float32),
}


def _filters(
    name: str,
    xp: ModuleType,
    logits: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    typical_p: Any,
) -> reference.Filters:
    batch, vocab = logits.shape

    def values(parameter: str, given: Any, off: float) -> Any:
        return _row_values(name, xp, parameter, off if given is None else given, batch, vocab)

    return reference.Filters(
        values("temperature", temperature, 1.0),
        values("top_k", top_k, vocab),
        values("top_p", top_p, 1.0),
        values("min_p", min_p, 0.0),
        values("typical_p", typical_p, 1.0),
    )


def _penalties(
    name: str,
    logits: Any,
    tokens: Any,
    repetition: Any,
    frequency: Any,
    presence: Any,
    logit_bias: Any,
    allowed: Any,
) -> reference.Penalties:
    triple = isinstance(logit_bias, (tuple, list))
    if triple and (len(logit_bias) != 3 or any(item is None for item in logit_bias)):
        got = ", ".join(type(item).__name__ for item in logit_bias)
        raise ValueError(
            f"{name}: logit_bias must be an array or three, (row, token, value), got ({got})"
        )
    where, token, value = logit_bias if triple else (None, None, logit_bias)
    xp, (logits, tokens, where, token, value, allowed) = as_arrays(
        name,
        logits=logits,
        tokens=tokens,
        **{"logit_bias row": where, "logit_bias token": token, "logit_bias": value},
        allowed=allowed,
    )
    batch, vocab = logits.shape
    if tokens is None:
        tokens = xp.empty((batch, 0), np.int32)
    if triple:
        shapes = [array.shape for array in (where, token, value)]
        if len(set(shapes)) != 1 or where.ndim != 1:
            raise ValueError(
                f"{name}: logit_bias's row, token and value must be (n,) each, have shapes {shapes}"
            )
        dtypes = (np.int32, np.int32, np.float32)
        bias: Any = tuple(map(contiguous, [xp] * 3, (where, token, value), dtypes))
    elif value is None:
        bias = None
    else:
        bias = _broadcast_rows(name, "logit_bias", value, batch, vocab, xp, np.float32)
    if allowed is not None:
        packed = allowed.dtype in (np.dtype(np.int32), np.dtype(np.uint32))
        if not packed and allowed.dtype != np.bool_:
            raise TypeError(
                f"{name}: allowed has dtype {allowed.dtype}, must be bool, int32 or uint32"
            )
        width = -(-vocab // 32) if packed else vocab
        allowed = _broadcast_rows(name, "allowed", allowed, batch, width, xp)
    return reference.Penalties(
        _token_rows(name, tokens, batch, xp),
        _row_values(name, xp, "repetition", repetition, batch),
        _row_values(name, xp, "frequency", frequency, batch),
        _row_values(name, xp, "presence", presence, batch),
        bias,
        allowed,
    )


def _row_values(
    name: str, xp: ModuleType, parameter: str, given: Any, batch: int, vocab: int = 0
) -> Any:
    """A parameter as an array (batch,) on the side of the logits; for the GPU, a scalar stays a
    Python number."""
    if isinstance(given, (int, float, np.number)):
        number = _number(name, parameter, given, vocab)
        return np.full(batch, number, _RANGES[parameter][-1]) if xp is np else number
    if (array := _on_their_device(name, xp, parameter, given)) is not None:
        return contiguous(xp, _per_row(name, parameter, array, batch), _RANGES[parameter][-1])
    if isinstance(given, np.ndarray) and given.ndim == 0:
        return _row_values(name, xp, parameter, given[()], batch, vocab)
    rows = _per_row(name, parameter, _in_range(name, parameter, given, vocab), batch)
    return rows if xp is np else _uploaded(name, xp, parameter, rows)


@functools.lru_cache(maxsize=4096, typed=True)  # checking takes as long as a launch
def _number(name: str, parameter: str, given: Any, vocab: int) -> Any:
    """A scalar, checked, as a Python number."""
    return _in_range(name, parameter, given, vocab).item()


def _in_range(name: str, parameter: str, given: Any, vocab: int) -> np.ndarray:
    """A scalar or an array of the host's, checked, in the parameter's dtype."""
    low, high, closed, dtype = _RANGES[parameter]
    values = np.asarray(given)
    integral = dtype is np.int32
    if values.dtype.kind not in ("iu" if integral else "iuf"):
        wanted = "an integer or integers" if integral else "a number or numbers"
        raise TypeError(f"{name}: {parameter} must be {wanted}, got {given!r}")
    inside = (values >= low if closed else values > low) & (values <= high)
    if high == np.inf and values.dtype.kind == "f":
        inside &= np.isfinite(values)
    if not inside.all():
        bracket = "[" if closed else "("
        raise ValueError(f"{name}: {parameter} must be in {bracket}{low}, {high}], got {given!r}")
    if integral:
        values = np.minimum(values, vocab)
    return values.astype(dtype)


def _words(name: str, xp: ModuleType, parameter: str, given: Any, batch: int) -> Any:
    """Seeds or offsets as uint64: an array (batch,), or on the GPU an int."""
    if isinstance(given, (int, np.integer)) and not isinstance(given, bool):
        word = int(given) & 0xFFFFFFFFFFFFFFFF
        return np.full(batch, word, np.uint64) if xp is np else word
    if (array := _on_their_device(name, xp, parameter, given)) is not None:
        _check_integers(name, parameter, array)
        rows = _per_row(name, parameter, array, batch)
        return contiguous(xp, rows, None if rows.itemsize == 8 else np.uint64).view(np.uint64)
    values = np.asarray(given)
    if values.dtype.kind not in "iu":
        raise TypeError(f"{name}: {parameter} must be an integer or integers, got {given!r}")
    rows = _per_row(name, parameter, values, batch).astype(np.uint64)
    return rows if xp is np else _uploaded(name, xp, parameter, rows)


def _on_their_device(name: str, xp: ModuleType, parameter: str, given: Any) -> Any:
    """A parameter that is on the logits' GPU; None for one of the host's."""
    array = on_gpu(given)
    if array is None:
        return None
    if xp is np:
        raise ValueError(f"{name}: {parameter} is on a GPU, and logits are not")
    if array.device.id != (current := xp.cuda.runtime.getDevice()):
        raise ValueError(
            f"{name}: {parameter} is on GPU {array.device.id}, and logits are on GPU {current}"
        )
    return array


def _per_row(name: str, parameter: str, values: Any, batch: int) -> Any:
    if values.shape != (batch,):
        raise ValueError(
            f"{name}: {parameter} must be a scalar or of shape ({batch},), has shape {values.shape}"
        )
    return values


def _uploaded(name: str, xp: ModuleType, parameter: str, values: np.ndarray) -> Any:
    """An array of the host's on the device: a graph would copy from the host's memory again at each
    replay, whatever is there by then."""
    if backend(xp, "memory").capturing():
        raise ValueError(
            f"{name}: {parameter} is an array on the host, must be on the device (or a scalar) "
            "while a graph is captured"
        )
    return xp.asarray(values)


def _integer(name: str, parameter: str, given: Any, low: int, high: int) -> int:
    if isinstance(given, bool) or not isinstance(given, (int, np.integer)):
        raise TypeError(f"{name}: {parameter} must be an int, got {given!r}")
    if not low <= given <= high:
        raise ValueError(f"{name}: {parameter} must be from {low} to {high}, got {given}")
    return int(given)


def _token_rows(name: str, tokens: Any, batch: int, xp: ModuleType) -> Any:
    _check_integers(name, "tokens", tokens)
    rows = tokens[None] if tokens.ndim == 1 else tokens
    if rows.ndim != 2 or len(rows) != batch:
        raise ValueError(
            f"{name}: tokens must be ({batch}, length) as logits are, has shape {tokens.shape}"
        )
    return contiguous(xp, rows, np.int32)


def _check_integers(name: str, parameter: str, array: Any) -> None:
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name}: {parameter} must be integers, has dtype {array.dtype}")


def _broadcast_rows(
    name: str,
    parameter: str,
    values: Any,
    batch: int,
    width: int,
    xp: ModuleType,
    dtype: Any = None,
) -> Any:
    if values.shape not in ((width,), (1, width), (batch, width)):
        raise ValueError(
            f"{name}: {parameter} must be ({width},) or ({batch}, {width}), has shape "
            f"{values.shape}"
        )
    return xp.broadcast_to(contiguous_last_axis(xp, values, dtype), (batch, width))


def _speculative(
    name: str,
    draft_tokens: Any,
    draft_probs: Any,
    target_probs: Any,
    parents: Any,
    seed: Any,
    offset: Any,
) -> tuple[Any, Any]:
    check_given(name, draft_tokens=draft_tokens, draft_probs=draft_probs, target_probs=target_probs)
    xp, (draft_tokens, draft_probs, target_probs, parents) = as_arrays(
        name,
        draft_tokens=draft_tokens,
        draft_probs=draft_probs,
        target_probs=target_probs,
        parents=parents,
    )
    if target_probs.ndim != 3 or not target_probs.shape[1] or not target_probs.shape[2]:
        raise ValueError(
            f"{name}: target_probs must be (batch, drafts + 1, vocab) with a vocab of at least 1, "
            f"has shape {target_probs.shape}"
        )
    batch, nodes, vocab = target_probs.shape
    drafts = nodes - 1
    if draft_probs.shape != (batch, drafts, vocab):
        raise ValueError(
            f"{name}: draft_probs must be ({batch}, {drafts}, {vocab}) with target_probs "
            f"{target_probs.shape}, has shape {draft_probs.shape}"
        )
    for parameter, array in (("draft_probs", draft_probs), ("target_probs", target_probs)):
        if array.dtype != np.float32:
            raise TypeError(f"{name}: {parameter} has dtype {array.dtype}, must be float32")
    integers = {"draft_tokens": draft_tokens, "parents": parents}
    for parameter, array in integers.items():
        if parameter == "parents" and array is None:
            continue
        _check_integers(name, parameter, array)
        if array.shape != (batch, drafts):
            raise ValueError(
                f"{name}: {parameter} must be ({batch}, {drafts}), has shape {array.shape}"
            )
        integers[parameter] = contiguous(xp, array, np.int32)
    seed, offset = (_words(name, xp, n, v, batch) for n, v in (("seed", seed), ("offset", offset)))
    return backend(xp, "sampling").speculative_sample(
        integers["draft_tokens"],
        contiguous(xp, draft_probs),
        contiguous(xp, target_probs),
        integers["parents"],
        seed,
        offset,
    )
