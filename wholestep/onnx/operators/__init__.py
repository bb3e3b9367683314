"""The operators of ONNX as step ops: one rule per operator, registered by name.

    @operator("Add")
    def add(c, x, y):
        return c.b.add(x.value, y.value)

**What a rule gets.** `c` is the Context of the node; then one argument per input of the operator's schema, in order: a
`Tensor`, `Items` (a sequence, a list of tensors), or None where an optional input is not given. Inputs that a version
of the operator does not have are not passed at all, so a rule over several versions gives them the default None.
Variadic inputs are simply many arguments.

Before a rule runs, the node has been checked against the schema of its version: number of inputs, their element types,
names and kinds of attributes, required attributes. Defaults of attributes are filled in. Shapes have not been checked.

- `x.value`: the step value. `x.shape`, `x.rank`, `x.size`, `x.element` (step), `x.dtype` (torch), `x.type` (ONNX).
- `x.constant`: the torch tensor (CPU) where it is known now, else None. `c.ints(x, "shape")`, `c.number(x, "ratio")`,
  `c.known(x, "pads")` give known values and raise a good error where there is none. Asking for `.value` of a constant
  makes it part of the program; do not ask for it where only the numbers are needed.
- `c.attribute("axis")`; strings are str, tensors torch tensors, subgraphs GraphProto; None where there is none.
- `c.version`: the opset in which the present form of the operator appeared (13 for Clip in opset 15); `c.opset`.
- `c.training`: True or False by model.train() or model.eval(), None where the node decides (mode="as written").
  `c.wants(i)`, `c.outputs`: which outputs somebody named.
- `c.random(...)`, `c.opaque("aten....", ...)`, `c.update(x, value)` and `c.is_state(x)` (running statistics),
  `c.subgraph(graph, inputs)`: see context.py.

**What it gives back.** One output, or a tuple or list with one entry per output: a step `Value`, a `Tensor`
(`c.constant(torch_tensor)` for what is known now, `c.tensor(value, type)`), `Items` for a sequence (never a plain list:
that means several outputs), None for an output that is absent. Outputs beyond those that the node names may be given or
left out. The ONNX type of a Value is that of the input with the same type letter in the schema ("T"), else the one that
its element type says: so int4 and float8, which are *carried* by int8 and float32 (dtypes.py), pass through operators
that only move elements. Where an output's ONNX type does not fit the value's element type, the import fails loudly.

**Constants.** A node whose inputs are all known is computed at import, by this same rule in a little program of its
own; a rule never needs to care. `Shape` and the like return `c.constant(...)`; a rule may do so whenever it knows its
result. Tensors of a size that the file says must be made by step ops (`b.full`, `b.iota`), whose sizes are checked
before anything runs.

**Text.** Strings are known at import, as `Text` (text.py), and never part of the program. A node that takes some runs
its rule with `text=True`, or, where it only moves elements (`walk.MOVES_ELEMENTS`), its ordinary rule on numbers.

**What it may not do.** Guess. Where a case is not covered: `raise c.unsupported("what is not supported", "what to try
instead")`. Where the node is wrong: `raise c.wrong("its ...")`. ValueError, TypeError and the like that the builder
raises (shapes that do not broadcast) become such errors with the node's name. A wrong number is the one unforgivable
outcome.

An operator without a rule whose schema has a function body (Gelu, Celu, ...) is imported through that body.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from ..context import Rule


@dataclass(frozen=True, slots=True)
class Registered:
    """A rule and the versions of its operator that it covers."""

    rule: Rule
    since: int
    until: int | None
    folds: bool
    text: bool

    def covers(self, version: int) -> bool:
        return self.since <= version and (self.until is None or version <= self.until)


RULES: dict[tuple[str, str], list[Registered]] = {}


def operator(
    *names: str, since: int = 1, until: int | None = None, domain: str = "", folds: bool = True, text: bool = False
) -> Callable[[Rule], Rule]:
    """Registers a rule for operators of these names.

    It covers the versions of the operator (see `c.version`) from `since` to `until`, both included. `folds=False` says
    that the rule runs even where all inputs are known: for operators with subgraphs, and for random ones.
    `text=True`: the rule is for nodes that take text; it computes now and gives `c.text(array)` or constants.
    """

    def register(rule: Rule) -> Rule:
        for name in names:
            listed = RULES.setdefault((domain, name), [])
            new = Registered(rule, since, until, folds, text)
            if any(r.text is text and (r.covers(since) or new.covers(r.since)) for r in listed):
                raise ValueError(f"two rules for {domain or 'ai.onnx'}.{name}")
            listed.append(new)
        return rule

    return register


@cache
def load_all() -> None:
    """Imports every file of this package, which registers its rules."""
    for found in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{found.name}")


def rule_for(domain: str, name: str, version: int, text: bool = False) -> Registered | None:
    """The rule of a version of an operator, for numbers or for text."""
    load_all()
    return next((r for r in RULES.get((domain, name), ()) if r.text is text and r.covers(version)), None)


def nearest(name: str) -> str:
    """The operator with a rule whose name is most like this one; empty where none is."""
    load_all()
    found = difflib.get_close_matches(name, sorted({n for _, n in RULES}), 1, cutoff=0.5)
    return found[0] if found else ""
