"""The derivative of a function of single numbers, as the text of another such function: forward differentiation of its syntax tree.

Every variable that depends on the argument gets a second one, its slope; an assignment also assigns the slope, a `return` returns it, and branches
and loops stay as they are. So the derivative is compiled, simulated and run on arrays as a function that somebody wrote.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import linecache
import math
import textwrap
from collections.abc import Iterable
from types import FunctionType
from typing import Any

from nbcnn.files.errors import UsageError
from nbcnn.gpu.language import Function, jit

SLOPE = "_slope"
_SIGN = "(1.0 if {0} > 0.0 else -1.0 if {0} < 0.0 else 0.0 * {0})"
"""The sign of a number; NaN stays NaN."""
_RULES: dict[str, tuple[str, ...]] = {
    "exp": ("math.exp({0})",),
    "expm1": ("math.exp({0})",),
    "log": ("(1.0 / {0})",),
    "log1p": ("(1.0 / (1.0 + {0}))",),
    "log2": ("(1.4426950408889634 / {0})",),
    "log10": ("(0.4342944819032518 / {0})",),
    "sqrt": ("(0.5 / math.sqrt({0}))",),
    "sin": ("math.cos({0})",),
    "cos": ("(-math.sin({0}))",),
    "tan": ("(1.0 + math.tan({0}) * math.tan({0}))",),
    "sinh": ("math.cosh({0})",),
    "cosh": ("math.sinh({0})",),
    "tanh": ("(1.0 - math.tanh({0}) * math.tanh({0}))",),
    "asin": ("(1.0 / math.sqrt(1.0 - {0} * {0}))",),
    "acos": ("(-1.0 / math.sqrt(1.0 - {0} * {0}))",),
    "atan": ("(1.0 / (1.0 + {0} * {0}))",),
    "asinh": ("(1.0 / math.sqrt(1.0 + {0} * {0}))",),
    "erf": ("(1.1283791670955126 * math.exp(-{0} * {0}))",),
    "erfc": ("(-1.1283791670955126 * math.exp(-{0} * {0}))",),
    "fabs": (_SIGN,),
    "pow": ("({1} * math.pow({0}, {1} - 1.0))", "(math.log({0}) * math.pow({0}, {1}))"),
    "hypot": ("({0} / math.hypot({0}, {1}))", "({1} / math.hypot({0}, {1}))"),
    "atan2": ("({1} / ({0} * {0} + {1} * {1}))", "(-{0} / ({0} * {0} + {1} * {1}))"),
    "floor": ("",),
    "ceil": ("",),
    "trunc": ("",),
}
"""By function of the module math, its derivatives by its arguments; an empty one is 0."""


def derivative(function: FunctionType, by: int = 0, times: str = "") -> FunctionType:
    """The function of the same arguments that returns the derivative by argument number `by`.

    times  the name of a further first argument, by which what is returned is multiplied.

    Raises UsageError, with the line, for a statement or a function whose derivative is not known.
    """
    return _Forward(function, by, times).made()


class _Forward:
    def __init__(self, function: FunctionType, by: int, times: str) -> None:
        self.function, self.times = function, times
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        except (OSError, SyntaxError) as error:
            raise UsageError(f"the derivative of {function.__name__} is made of its source, which is not to be had: {error}") from error
        assert isinstance(tree, ast.FunctionDef)
        self.tree = tree
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self.known: dict[str, Any] = {**function.__globals__, **{name: cell.cell_contents for name, cell in cells}, "math": math}
        self.arguments = [each.arg for each in tree.args.args]
        self.active = {self.arguments[by]}
        while self._reach():
            pass

    def made(self) -> FunctionType:
        name = f"{self.function.__name__}{SLOPE}"
        arguments = [*([self.times] if self.times else []), *self.arguments]
        first = [f"{self._twin(each)} = 1.0" for each in self.arguments if each in self.active]
        lines = [f"def {name}({', '.join(arguments)}):", *textwrap.indent("\n".join([*first, *self._block(self.tree.body)]), "    ").split("\n")]
        text = "\n".join(lines) + "\n"
        # Named by its content, so that the simulator's and the compilers' tables tell two of them apart.
        file = f"<{name} {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
        linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
        space: dict[str, Any] = {}
        exec(compile(text, file, "exec"), self.known, space)  # noqa: S102 - the text is made here, of a function that the caller runs anyway
        made: FunctionType = space[name]
        made.__module__ = self.function.__module__
        return made

    # -- what depends on the argument

    def _reach(self) -> bool:
        """Add the variables that are assigned something active; whether there was one."""
        before = len(self.active)
        for node in ast.walk(self.tree):
            pairs: Iterable[tuple[ast.expr, ast.expr]] = ()
            if isinstance(node, ast.Assign):
                pairs = [pair for target in node.targets for pair in _pairs(target, node.value)]
            elif isinstance(node, ast.AugAssign | ast.AnnAssign) and node.value is not None:
                pairs = [(node.target, node.value)]
            self.active |= {target.id for target, value in pairs if isinstance(target, ast.Name) and self._depends(value)}
        return len(self.active) > before

    def _depends(self, node: ast.AST) -> bool:
        return any(isinstance(each, ast.Name) and each.id in self.active for each in ast.walk(node))

    # -- statements

    def _block(self, statements: list[ast.stmt]) -> list[str]:
        return [line for each in statements for line in self._statement(each)] or ["pass"]

    def _statement(self, node: ast.stmt) -> list[str]:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return []
        if isinstance(node, ast.Return) and node.value is not None:
            slope = self._slope(node.value) or "0.0"
            return [f"return {self.times} * {slope}" if self.times else f"return {slope}"]
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            value = ast.copy_location(ast.BinOp(ast.Name(node.target.id), node.op, node.value), node)
            return self._assigned([(node.target, value)], node)
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            return self._assigned(list(_pairs(node.targets[0], node.value)), node)
        if isinstance(node, ast.If | ast.While | ast.For):
            head = ast.unparse(node).split("\n")[0]
            if isinstance(node, ast.For) and self._depends(node.target):
                raise self._unknown(node)
            lines = [head, *_indented(self._block(node.body))]
            return [*lines, "else:", *_indented(self._block(node.orelse))] if node.orelse else lines
        if isinstance(node, ast.Pass | ast.Break | ast.Continue):
            return [ast.unparse(node)]
        raise self._unknown(node)

    def _assigned(self, pairs: list[tuple[ast.expr, ast.expr]], node: ast.stmt) -> list[str]:
        """All slopes and values at once: each is made of the values before."""
        targets, values = [], []
        for target, value in pairs:
            if not isinstance(target, ast.Name):
                raise self._unknown(node)
            if target.id in self.active:
                targets.append(self._twin(target.id))
                values.append(self._slope(value) or "0.0")
            targets.append(target.id)
            values.append(ast.unparse(value))
        return [f"{', '.join(targets)} = {', '.join(values)}"]

    # -- expressions

    def _twin(self, name: str) -> str:
        return f"{name}{SLOPE}"

    def _slope(self, node: ast.expr) -> str:
        """The derivative of an expression, an operand of any product; empty where it is 0."""
        if isinstance(node, ast.Compare | ast.BoolOp) or not self._depends(node):
            return ""
        if isinstance(node, ast.Name):
            return self._twin(node.id)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            inner = self._slope(node.operand)
            return f"(-{inner})" if inner and isinstance(node.op, ast.USub) else inner
        if isinstance(node, ast.IfExp):
            return f"({self._slope(node.body) or '0.0'} if {ast.unparse(node.test)} else {self._slope(node.orelse) or '0.0'})"
        if isinstance(node, ast.BinOp):
            return self._of_operator(node)
        if isinstance(node, ast.Call) and not node.keywords:
            return self._of_call(node)
        raise self._unknown(node)

    def _of_operator(self, node: ast.BinOp) -> str:
        a, b, da, db = _operand(node.left), _operand(node.right), self._slope(node.left), self._slope(node.right)
        if isinstance(node.op, ast.Add):
            return _sum(da, db)
        if isinstance(node.op, ast.Sub):
            return _sum(da, f"(-{db})" if db else "")
        if isinstance(node.op, ast.Mult):
            return _sum(_times(da, b), _times(a, db))
        if isinstance(node.op, ast.Div):
            above = _sum(da, f"(-({a} / {b}) * {db})" if db else "")
            return f"({above} / {b})" if above else ""
        if isinstance(node.op, ast.Pow):
            exponent = node.right.value if isinstance(node.right, ast.Constant) else None
            power = a if exponent == 2 else f"{a} ** {exponent - 1}" if isinstance(exponent, int) else f"{a} ** ({b} - 1.0)"
            return _sum(f"({b} * {power} * {da})" if da else "", f"(math.log({a}) * {a} ** {b} * {db})" if db else "")
        raise self._unknown(node)

    def _of_call(self, node: ast.Call) -> str:
        arguments, slopes = [_operand(each) for each in node.args], [self._slope(each) for each in node.args]
        called = node.func
        if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and self.known.get(called.value.id) is math:
            rules = _RULES.get(called.attr)
            if rules is None or len(rules) != len(arguments):
                raise self._unknown(node)
            return _sum(*(_times(rule.format(*arguments), slope) for rule, slope in zip(rules, slopes, strict=True) if rule))
        if not isinstance(called, ast.Name):
            raise self._unknown(node)
        inner = self.known.get(called.id)
        if isinstance(inner, Function):
            parts = []
            for at, slope in enumerate(slopes):
                if slope:
                    name = f"{called.id}{SLOPE}_{at}"
                    self.known[name] = jit(device=True)(derivative(inner.py_func, at))
                    parts.append(_times(f"{name}({', '.join(arguments)})", slope))
            return _sum(*parts)
        if called.id == "abs" and len(arguments) == 1:
            return _times(_SIGN.format(*arguments), slopes[0])
        if called.id == "float" and len(arguments) == 1:
            return slopes[0]
        if called.id == "int":
            return ""
        if called.id in ("min", "max") and len(arguments) == 2:
            (a, b), (da, db) = arguments, slopes
            return f"({db or '0.0'} if {b} {'<' if called.id == 'min' else '>'} {a} else {da or '0.0'})"
        raise self._unknown(node)

    def _unknown(self, node: ast.stmt | ast.expr) -> UsageError:
        code = self.function.__code__
        line = code.co_firstlineno + node.lineno - 1
        return UsageError(
            f"{self.function.__name__} has no derivative that can be made of its text: {code.co_filename}, line {line}: "
            f"{ast.unparse(node).splitlines()[0]}; declare it with one, a function of the same arguments"
        )


def _pairs(target: ast.expr, value: ast.expr) -> Iterable[tuple[ast.expr, ast.expr]]:
    """What is assigned what."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return zip(target.elts, value.elts, strict=True)
    return [(target, value)]


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _operand(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if isinstance(node, ast.Name | ast.Call | ast.Constant) else f"({text})"


def _times(one: str, other: str) -> str:
    """A product of which one factor is empty where it is 0."""
    return f"({one} * {other})" if one and other else ""


def _sum(*parts: str) -> str:
    there = [each for each in parts if each]
    return there[0] if len(there) == 1 else f"({' + '.join(there)})" if there else ""
