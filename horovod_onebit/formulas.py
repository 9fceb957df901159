"""Formulas of one element: what rules and codecs bring, and how each backend takes them over.

A formula is a plain function of numbers, made of arithmetic, of the names below, and of other such functions. As it
stands, NumPy runs it over whole arrays; ``bound`` makes the same of it for a backend that runs it element by element.
Arithmetic is float32, operation by operation in the order written, so that all backends round alike.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import numpy as np

Number = Any
"""One number, or, for NumPy, an array of them."""
Formula = Callable[..., Any]

f32, u32 = np.float32, np.uint32
TINY, ZERO = np.finfo(np.float32).tiny, f32(0)
LARGEST_ROOT = f32(2.0**64)
"""That of float32's largest number."""

absolute, maximum, minimum, sign, sqrt, where = np.abs, np.maximum, np.minimum, np.sign, np.sqrt, np.where
NAMES = ("absolute", "maximum", "minimum", "sign", "sqrt", "where")
"""What formulas may call besides each other; NaN in the first argument of ``maximum`` and ``minimum`` stays NaN."""


def _maximum(a: Number, b: Number) -> Number:
    return b if b > a else a


def _minimum(a: Number, b: Number) -> Number:
    return b if b < a else a


def _sign(a: Number) -> Number:
    return f32(1) if a > f32(0) else (f32(-1) if a < f32(0) else a)


def _where(condition: Any, a: Number, b: Number) -> Number:
    return a if condition else b


OF_ONE: dict[str, Formula] = {"maximum": _maximum, "minimum": _minimum, "sign": _sign, "where": _where}
"""Those of ``NAMES`` that compilers do not know, for one element."""


def denominator(p: Any, v: Number) -> Number:
    """``D``: what Adam divides by, the bias of ``v`` corrected, never zero. One of the two epsilons in ``p`` is 0."""
    return maximum(sqrt(v * p.correction + p.eps_inside) + p.eps, TINY)


def multiplier(p: Any, v: Number) -> Number:
    """``D``, to multiply by: finite, even if the correction of ``v`` overflows."""
    return minimum(denominator(p, v), LARGEST_ROOT)


def rests(formula: Formula) -> Formula:
    """Says of a contribution, by a rule that divides by a second moment, that elements rest which are not
    ``alive``: what they would send stays in their residuals, and the rule's motion leaves them where they are
    (``moving``)."""
    formula.rests = True  # type: ignore[attr-defined]
    return formula


def forgets(formula: Formula) -> Formula:
    """As ``rests``; and of elements that move, what compression loses is not kept. Their residuals are neither read nor
    written."""
    formula.forgets = True  # type: ignore[attr-defined]
    return rests(formula)


def resting(formula: Formula) -> bool:
    """Whether elements rest: see ``rests``."""
    return getattr(formula, "rests", False)


def forgetting(formula: Formula) -> bool:
    """Whether nothing is kept of what compression loses: see ``forgets``."""
    return getattr(formula, "forgets", False)


def alive(v: Number) -> Any:
    """Whether an element with this second moment does not rest. Smaller ones than ``TINY`` are 0 on threads that flush
    such numbers, as TensorFlow's do."""
    return v >= TINY


def moving(x: Number, v: Number) -> Number:
    """The mean ``x`` of an element that does not rest, else 0: what other workers have sent of it means nothing."""
    return where(alive(v), x, ZERO)


def clipped(p: Any, u: Number) -> Number:
    """``u`` within ``[-p.clip, p.clip]``; NaN stays NaN."""
    return minimum(maximum(u, -p.clip), p.clip)


def _part(*_: Number) -> Any:
    """Stands in a template for the formula that it is made of."""
    raise NotImplementedError


motion = predict = _part


def _innovation(p: Any, x: Number, m: Number, v: Number, w: Number, a: Number) -> Any:
    return motion(p, x + predict(p, x, m, v, w, a), m, v, w, a)


def _remainder(p: Any, g: Number, m: Number, v: Number, w: Number, a: Number) -> Any:
    return None, None, w - predict(p, g, m, v, w, a)


@cache
def of_innovation(motion: Formula, predict: Formula) -> Formula:
    """``motion`` where what comes is the mean less what ``predict`` gives, which takes the same scalars."""
    return _made(_innovation, f"{motion.__qualname__}_beyond_{label(predict)}", motion=motion, predict=predict)


@cache
def remainder(predict: Formula) -> Formula:
    """Takes from the weight what ``predict`` gives."""
    return _made(_remainder, f"less_{predict.__qualname__}", predict=predict)


def _made(template: Any, name: str, **parts: Any) -> Formula:
    """``template`` of ``parts``, as a formula of the file that the first of them is of."""
    found = FunctionType(template.__code__, {**template.__globals__, **parts}, name)
    found.__module__, found.__qualname__ = next(iter(parts.values())).__module__, name
    return found


def label(formula: Formula) -> str:
    """A name for what is compiled of ``formula``, unlike that of any other formula."""
    return f"{formula.__module__}_{formula.__qualname__}".replace(".", "_")


def bound(
    formula: Formula,
    names: Mapping[str, Any],
    compile: Callable[[Formula], Any],
    rewrite: ast.NodeTransformer | None = None,
) -> Any:
    """``formula`` as ``compile`` makes it, its ``NAMES`` being ``names``, and so for all functions that it calls.

    ``rewrite`` may change its source first.
    """
    code, known = formula.__code__, formula.__globals__
    if rewrite is not None:
        code = _rewritten(formula, rewrite)
    globals_: dict[str, Any] = dict(names)
    for name in set(code.co_names) & set(known) - set(NAMES):
        value = known[name]
        globals_[name] = bound(value, names, compile, rewrite) if isinstance(value, FunctionType) else value
    return compile(named(code, globals_, label(formula)))


def named(code: CodeType, globals_: dict[str, Any], name: str) -> FunctionType:
    """A function of ``code``; Numba tells functions of one file apart, and what it keeps of them, by ``name``."""
    function = FunctionType(code.replace(co_name=name, co_qualname=name), globals_, name)
    function.__module__ = __name__
    return function


def _rewritten(formula: Formula, rewrite: ast.NodeTransformer) -> CodeType:
    tree = rewrite.visit(ast.parse(textwrap.dedent(inspect.getsource(formula))))
    module = compile(ast.fix_missing_locations(tree), inspect.getfile(formula), "exec", dont_inherit=True)
    return next(constant for constant in module.co_consts if isinstance(constant, CodeType))


class Multiplications(ast.NodeTransformer):
    """Every ``a * b`` becomes ``mul(a, b)``: for compilers that fuse it with an addition, which rounds otherwise."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Mult):
            return node
        called = ast.Name("mul", ast.Load())
        return ast.copy_location(ast.Call(called, [node.left, node.right], []), node)
