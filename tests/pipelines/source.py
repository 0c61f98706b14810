"""What the models take from the CUDA sources: constants, sizes and numbers of arrivals, and the
skeleton of what the roles do."""

from __future__ import annotations

import ast
import functools
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from cuattn.gpu import compiler, dispatch

#: What each model was written after.
SKELETONS = {
    f"{kernel}.cu": pathlib.Path(__file__).with_name(f"{kernel.partition('/')[2]}.txt")
    for kernel in (
        *("attention/forward_sm90", "attention/forward_codes_sm90"),
        "attention/forward_team_codes_sm90",
        *("decoding/decode_sm90", "decoding/decode_sm80"),
        *("gradients/backward_sm90", "gradients/backward_keys_sm90"),
        *("gradients/backward_192_sm90", "gradients/backward_queries_sm90"),
        "sampling/softmax",
    )
}
for kernel in ("decode_sm90", "decode_80_sm90", "decode_few_sm90", "decode_codes_sm90"):
    SKELETONS[f"mla/{kernel}.cu"] = pathlib.Path(__file__).with_name(f"mla_{kernel}.txt")

#: Functions that models repeat whole: how decoding shares out its work, and who merges what.
WHOLE = frozenset(
    {
        *("plan_merge", "merges_for_later", "slot", "merged_slot", "merge_list", "part_at"),
        *("partition", "first_step", "group_of", "here", "place_of"),
    }
)

WORD = re.compile(r"[A-Za-z_]\w*")


@functools.cache
def text(kernel: str) -> str:
    """A kernel's source with what it includes but the wrappers of instructions, without comments
    and preprocessor lines."""
    parts = re.split(r'^#line \d+ "([^"]+)"\n', compiler.resolve(kernel), flags=re.MULTILINE)
    own = (
        part
        for path, part in zip(parts[1::2], parts[2::2], strict=True)
        if not path.startswith("ptx/")
    )
    whole = re.sub(r"//[^\n]*|/\*.*?\*/", "", "".join(own), flags=re.DOTALL)
    return re.sub(r"^\s*#[^\n]*$", "", whole, flags=re.MULTILINE)


class Constants(Mapping):
    """The value of every ``constexpr`` number of a source for one Config, computed when asked."""

    def __init__(self, source: str, config: Any) -> None:
        self.config = config
        self.expressions = dict(
            re.findall(r"\bconstexpr\s+(?:int|bool|unsigned)\s+(\w+)\s*=\s*([^;]+);", source)
        )

    def __getitem__(self, name: str) -> int:
        return self.value(self.expressions[name])

    def __iter__(self):
        return iter(self.expressions)

    def __len__(self) -> int:
        return len(self.expressions)

    def value(self, expression: str) -> int:
        """The value of a C++ expression of constants and fields of Config, of a variant with the
        contract's scores."""
        expression = re.sub(r"tile::IsContract<.*>::value", "true", expression)
        # Fields that the Configs of some kernels alone have.
        given = lambda m: repr(getattr(self.config, m[1], 0))  # noqa: E731
        expression = re.sub(r"\bCodeOptions<Config>::(\w+)", given, expression)
        python = re.sub(r"\bConfig::(\w+)", lambda m: repr(getattr(self.config, m[1])), expression)
        python = _conditional(python)
        python = python.replace("&&", " and ").replace("||", " or ")
        python = re.sub(r"!(?!=)", " not ", python)
        python = re.sub(r"\btrue\b", "True", re.sub(r"\bfalse\b", "False", python))
        python = re.sub(r"(?<![/])/(?![/])", "//", python)
        names = {
            node.id for node in ast.walk(ast.parse(python.strip(), mode="eval"))
            if isinstance(node, ast.Name)
        }  # fmt: skip
        return int(eval(python.strip(), {}, {name: self[name] for name in names}))


def _conditional(expression: str) -> str:
    """``a ? b : c`` as Python writes it, in parentheses too."""
    inner = re.search(r"\(([^()]*)\)", expression)
    if inner:
        head, tail = expression[: inner.start()], expression[inner.end() :]
        held = f"\0{len(head)}\0"
        return _conditional(head + held + tail).replace(held, f"({_conditional(inner[1])})")
    test, question, rest = expression.partition("?")
    if not question:
        return expression
    depth = at = 0
    while depth or rest[at] != ":":
        depth += {"?": 1, ":": -1}.get(rest[at], 0)
        at += 1
    return f"({_conditional(rest[:at])}) if ({test}) else ({_conditional(rest[at + 1 :])})"


def constants_of_variants(kernel: str) -> Iterator[Constants]:
    """The constants of each variant of a kernel for sm_90a."""
    for variant in dispatch.variants("sm_90a"):
        if variant.source == kernel:
            yield Constants(text(kernel), variant.config)


def barrier_name(expression: str) -> str:
    """``smem.full_k[i]`` -> ``full_k``; ``score_rows(smem, i).full`` -> ``rows.full``."""
    expression = re.sub(r"(?:\w+_)?(\w+)\(smem, \w+\)", r"\1", re.sub(r"\[.*?\]", "", expression))
    return expression.removeprefix("smem.")


def arrivals(source: str, constants: Constants) -> dict[str, int]:
    """How many arrivals each mbarrier is initialised with."""
    found = re.findall(r"mbarrier_init\(((?:[^()]|\([^()]*\))*?),\s*([^;]*)\);", source)
    return {barrier_name(name): constants.value(count) for name, count in found}


#: What processes do to each other, and where they are in rings.
PRIMITIVES = re.compile(
    r"\b(mbarrier_(?!init)\w+|bar_(sync|arrive)|cluster_(arrive|wait|barrier)\w*|__syncthreads\w*"
    r"|tma_load|bulk_(?!commit)\w+|store_async|wgmma_wait_group|load_acquire|store_release"
    r"|load_relaxed|store_relaxed|atomic\w+|cp_async_wait\w*|advance|PipelineState<)"
)
EXITS = re.compile(r"\b(return|continue|break)\b|\^= 1$")
CONTROL = re.compile(
    r"\b(if|while|for)\b(?: constexpr)? \(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)"
)


def skeleton(source: str) -> list[str]:
    """The functions that processes affect each other through, cut down to the statements that do,
    the conditions and loops around these, and what changes the variables of these conditions: what
    a model has to say in its own words.

    A statement counts if it names a primitive, or a function or lambda of the same source that
    counts.
    """
    counts: set[str] = set()
    variables: set[str] = set()
    while True:
        lines, found = _skeleton(source, counts, variables)
        conditions = (CONTROL.search(line) for line in lines)
        named = {
            word for match in conditions if match and match[1] != "for"
            for word in WORD.findall(match[2])
        }  # fmt: skip
        if found <= counts and named <= variables:
            return lines
        counts |= found
        variables |= named


def _skeleton(source: str, counts: set[str], variables: set[str]) -> tuple[list[str], set[str]]:
    def matters(statement: str) -> bool:
        called = set(re.findall(r"([A-Za-z_]\w*)\s*(?:<[^;()]*>)?\(", statement))
        return bool(PRIMITIVES.search(statement) or called & counts)

    def function(header: str) -> str:
        """The name of the function or lambda that begins here; empty where none does."""
        if CONTROL.search(header):
            return ""
        name = re.search(r"(\w+) = \[|(\w+)\((?:[^()]|\([^()]*\))*\)(?: const)?$", header)
        return (name[1] or name[2]) if name else ""

    def accompanies(statement: str) -> bool:
        """Whether it is kept within a block that is kept."""
        assigned = set(re.findall(r"([A-Za-z_]\w*) (?:[-+^|&]?=) ", statement))
        assigned |= set(re.findall(r"(?:--|\+\+)(\w+)", statement))
        return bool(EXITS.search(statement) or assigned & variables)

    lines: list[str] = []
    found: set[str] = set()
    opened: list[tuple[str, int, bool, bool]] = []  # blocks: header, line, whether kept, whole
    start = depth = 0
    for at, letter in enumerate(source):
        depth += {"(": 1, ")": -1, "[": 1, "]": -1}.get(letter, 0)
        if depth or letter not in ";{}":
            continue
        statement, start = " ".join(source[start:at].split()), at + 1
        if letter == "{":
            whole = function(statement) in WHOLE or bool(opened and opened[-1][3])
            opened.append((statement, len(lines), whole or matters(statement), whole))
            lines.append("  " * (len(opened) - 1) + statement + " {")
            continue
        kept = bool(statement) and matters(statement)
        if opened and kept:
            opened[-1] = (*opened[-1][:2], True, opened[-1][3])
        if kept or (opened and statement and (opened[-1][3] or accompanies(statement))):
            lines.append("  " * len(opened) + statement + ";")
        if letter == "}" and opened:
            header, line, kept, _ = opened.pop()
            control = CONTROL.search(header) or header == "else"
            if control and opened and len(lines) > line + 1 and not kept:
                lines.append("  " * len(opened) + "}")  # goes with what is around it
            elif not kept:
                del lines[line:]
            else:
                lines.append("  " * len(opened) + "}")
                if opened:
                    opened[-1] = (*opened[-1][:2], True, opened[-1][3])
                if function(header) and function(header) not in WHOLE:
                    found.add(function(header))
    return lines, found
