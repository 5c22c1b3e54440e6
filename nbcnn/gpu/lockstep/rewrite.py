"""A kernel's source, rewritten so that a statement runs once for all lanes.

Expressions become calls of `numbers`; an assignment under an `if` keeps the old value in the lanes that are not there (`put`); `if`, `for`, `while`,
`return`, `break` and `continue` become what `lanes` has for them. Lines stay those of the source, so a traceback shows the kernel's own. A kernel
uses the part of Python that Numba compiles for a GPU; what is not in it is refused with the line.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType
from typing import Any

from nbcnn.gpu.lockstep import lanes, numbers

OPERATORS = {
    ast.Add: "add",
    ast.Sub: "subtract",
    ast.Mult: "multiply",
    ast.Div: "divide",
    ast.FloorDiv: "floor_divide",
    ast.Mod: "modulo",
    ast.BitAnd: "and_",
    ast.BitOr: "or_",
    ast.BitXor: "xor",
    ast.LShift: "shift_left",
    ast.RShift: "shift_right",
    ast.Pow: "power",
}
_FROM_LANES = ("now", "split", "Loop", "Returns", "over", "both", "either", "choose", "negated")
_FROM_NUMBERS = (*OPERATORS.values(), "put", "select", "element")
PREFIX = "lockstep_"
RUNTIME: dict[str, Any] = {PREFIX + name: getattr(lanes, name) for name in _FROM_LANES}
RUNTIME |= {PREFIX + name: getattr(numbers, name) for name in _FROM_NUMBERS}
"""What rewritten code names beside what its source names."""

HARMLESS = {"min", "max", "abs", "i4", "u4", "f4", "i8", "f8", "u8", "int", "float"}
"""Calls that touch no memory: they need no mask."""


class Refused(SyntaxError):
    """A kernel has a statement that no GPU compiler takes, or that cannot be run in step."""


_known: dict[tuple[str, CodeType, bool], CodeType] = {}


def rewritten(function: Any, is_kernel: bool) -> CodeType:
    """The code that stands in for that of a kernel or device function. Raises Refused, or OSError where the source is not to be had."""
    code = function.__code__
    key = (code.co_filename, code, is_kernel)
    if key not in _known:
        tree = _source(code)
        made = _Function(tree, code.co_filename, is_kernel).made()
        # Names of an enclosing function are that function's, also in what stands in for it.
        free = [ast.arg(name) for name in code.co_freevars]
        outer = ast.FunctionDef("outer", ast.arguments([], free, None, [], [], None, []), [made], [])
        ast.copy_location(outer, tree)
        module = ast.fix_missing_locations(ast.Module([outer], []))
        whole = compile(module, code.co_filename, "exec")
        _known[key] = _inner(_inner(whole, "outer"), tree.name)
    return _known[key]


def _inner(code: CodeType, name: str) -> CodeType:
    return next(each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == name)


def _source(code: CodeType) -> ast.FunctionDef:
    """The definition of a function."""
    first = code.co_firstlineno
    last = max(end for _, end, _, _ in code.co_positions() if end is not None)
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename)[first - 1 : last]
    if not lines:
        raise OSError(f"the source of {code.co_name} is not to be had: {code.co_filename} has no line {first}")
    indented = lines[0][:1] in " \t"
    tree = ast.parse(("if 1:\n" if indented else "") + "".join(lines))
    ast.increment_lineno(tree, first - (2 if indented else 1))
    body = tree.body[0].body if indented else tree.body  # type: ignore[attr-defined]
    found = body[0]
    if not isinstance(found, ast.FunctionDef):
        raise Refused(f"{code.co_filename}:{first}: a kernel is a function defined by `def`")
    return found


def _leaves(nodes: Sequence[ast.stmt], loops: bool = True) -> bool:
    """True if a statement of `nodes` may end before its end for some lanes: a return, or (outside of loops of its own) a break or continue."""
    for node in nodes:
        if isinstance(node, ast.Return) or (loops and isinstance(node, ast.Break | ast.Continue)):
            return True
        if isinstance(node, ast.If) and (_leaves(node.body, loops) or _leaves(node.orelse, loops)):
            return True
        if isinstance(node, ast.For | ast.While) and _leaves(node.body, False):
            return True
    return False


def _outlives(nodes: Iterable[ast.AST], own: frozenset[str]) -> Iterator[str]:
    """Names that are read outside of the loops that count with them; `own` are those of the loops around."""
    for node in nodes:
        if isinstance(node, ast.For) and isinstance(node.target, ast.Name):
            yield from _outlives([node.iter], own)
            yield from _outlives(node.body, own | {node.target.id})
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load) and node.id not in own:
                yield node.id
        else:
            yield from _outlives(ast.iter_child_nodes(node), own)


def _returns(nodes: Sequence[ast.stmt]) -> bool:
    return _leaves(nodes, False)


class _Function:
    """Rewrites one function."""

    def __init__(self, tree: ast.FunctionDef, file: str, is_kernel: bool) -> None:
        self.tree, self.file, self.is_kernel, self.count = tree, file, is_kernel, 0
        body = tree.body
        self.outlive = set(_outlives(tree.body, frozenset()))
        self.early = _returns(body[:-1]) or (bool(body) and not isinstance(body[-1], ast.Return) and _returns(body[-1:]))

    # -- small parts

    def _at(self, node: Any, like: ast.AST) -> Any:
        """Give `node` and what is new in it the line of `like`."""
        if isinstance(node, ast.expr | ast.stmt):
            if hasattr(node, "lineno"):
                return node
            ast.copy_location(node, like)
        for each in ast.iter_child_nodes(node):
            self._at(each, like)
        return node

    def _fresh(self) -> str:
        self.count += 1
        return f"{PREFIX}{self.count}"

    @staticmethod
    def _name(name: str) -> ast.Name:
        return ast.Name(name, ast.Load())

    def _call(self, name: str, *args: ast.expr) -> ast.Call:
        return ast.Call(self._name(PREFIX + name), list(args), [])

    def _method(self, of: str, name: str, *args: ast.expr) -> ast.Call:
        return ast.Call(ast.Attribute(self._name(of), name, ast.Load()), list(args), [])

    def _set(self, name: str, value: ast.expr) -> ast.Assign:
        return ast.Assign([ast.Name(name, ast.Store())], value)

    def _mask(self, ctx: Any = None) -> ast.Attribute:
        return ast.Attribute(self._name(PREFIX + "now"), "mask", ctx or ast.Load())

    def _whole(self) -> ast.expr:
        """All lanes of the call that have not returned are active."""
        return ast.Compare(self._mask(), [ast.Is()], [self._name(PREFIX + "top")])

    def _refuse(self, node: Any, what: str) -> Refused:
        return Refused(f"{self.file}:{node.lineno}: {what}")

    # -- expressions

    def _pure(self, node: ast.expr) -> bool:
        """True if an expression touches no memory and calls nothing that may: it may be computed for lanes that do not need it."""
        for each in ast.walk(node):
            if isinstance(each, ast.Subscript | ast.NamedExpr):
                return False
            if isinstance(each, ast.Call):
                name = each.func.id if isinstance(each.func, ast.Name) else ""
                of_math = isinstance(each.func, ast.Attribute) and isinstance(each.func.value, ast.Name) and each.func.value.id == "math"
                if name not in HARMLESS and not of_math:
                    return False
        return True

    def _later(self, node: ast.expr) -> ast.Lambda:
        return ast.Lambda(ast.arguments([], [], None, [], [], None, []), self.expression(node))

    def expression(self, node: ast.expr) -> Any:
        return self._at(self._expression(node), node)

    def _expression(self, node: ast.expr) -> ast.expr:
        go = self.expression
        match node:
            case ast.Constant() | ast.Name():
                return node
            case ast.BinOp(left, op, right):
                if isinstance(left, ast.Constant) and isinstance(right, ast.Constant):
                    return node
                if type(op) not in OPERATORS:
                    raise self._refuse(node, f"kernels have no operator {type(op).__name__}")
                return self._call(OPERATORS[type(op)], go(left), go(right))
            case ast.UnaryOp(op, operand):
                return self._call("negated", go(operand)) if isinstance(op, ast.Not) else ast.UnaryOp(op, go(operand))
            case ast.Compare(left, [op], [right]):
                return ast.Compare(go(left), [op], [go(right)])
            case ast.Compare(left, ops, comparators):
                parts, first = [], go(left)
                for i, (op, right) in enumerate(zip(ops, comparators, strict=True)):
                    second = go(right)
                    if i + 1 < len(ops) and not isinstance(right, ast.Name | ast.Constant):
                        name = self._fresh()
                        parts.append(ast.Compare(first, [op], [ast.NamedExpr(ast.Name(name, ast.Store()), second)]))
                        first = self._name(name)
                    else:
                        parts.append(ast.Compare(first, [op], [second]))
                        first = second
                whole: ast.expr = parts[0]
                for part in parts[1:]:
                    whole = self._call("and_", whole, part)
                return whole
            case ast.BoolOp(op, values):
                made = go(values[0])
                for value in values[1:]:
                    later = ast.Lambda(ast.arguments([], [], None, [], [], None, []), go(value))
                    made = self._call("both" if isinstance(op, ast.And) else "either", made, later)
                return made
            case ast.IfExp(test, body, orelse):
                if self._pure(body) and self._pure(orelse):
                    return self._call("select", go(test), go(body), go(orelse))
                return self._call("choose", go(test), self._later(body), self._later(orelse))
            case ast.Call(func, args, keywords):
                return ast.Call(go(func), [go(arg) for arg in args], [ast.keyword(each.arg, go(each.value)) for each in keywords])
            case ast.Starred(value, ctx):
                return ast.Starred(go(value), ctx)
            case ast.Attribute(value, attr, ctx):
                return ast.Attribute(go(value), attr, ctx)
            case ast.Subscript(value, index, ctx) if not isinstance(index, ast.Slice):
                if isinstance(index, ast.Name) and isinstance(value, ast.Name):
                    return self._call("element", value, index)
                return ast.Subscript(go(value), go(index), ctx)
            case ast.Subscript(value, ast.Slice(lower, upper, None), ctx):
                # Of a tuple: an array in a kernel has no slices.
                bounds = [go(each) if each is not None else None for each in (lower, upper)]
                return ast.Subscript(go(value), ast.Slice(*bounds), ctx)
            case ast.Tuple(elements, ctx):
                return ast.Tuple([go(each) for each in elements], ctx)
        raise self._refuse(node, f"kernels have no {type(node).__name__}")

    # -- statements

    def made(self) -> ast.FunctionDef:
        """The definition that stands in for the function."""
        tree = self.tree
        names = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
        given = {arg.arg for arg in [*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs]}
        body: list[ast.stmt] = []
        missing = sorted(names - given)
        if missing:
            body.append(ast.Assign([ast.Name(name, ast.Store()) for name in missing], ast.Constant(None)))
        body.append(ast.Assign([ast.Name(PREFIX + "base", ast.Store()), ast.Name(PREFIX + "top", ast.Store())], self._mask()))
        if self.early:
            body.append(self._set(PREFIX + "returns", self._call("Returns", ast.Constant(self.is_kernel))))
        body += self._block(tree.body, top=True)
        if self.early:
            body.append(ast.Assign([self._mask(ast.Store())], self._name(PREFIX + "base")))
            body.append(ast.Return(ast.Attribute(self._name(PREFIX + "returns"), "value", ast.Load())))
        for each in body:
            self._at(each, tree)
        named: list[Any] = [None] * len(tree.args.kwonlyargs)
        args = ast.arguments(tree.args.posonlyargs, tree.args.args, tree.args.vararg, tree.args.kwonlyargs, named, tree.args.kwarg, [])
        for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, [args.vararg, args.kwarg])]:
            arg.annotation = None
        # Defaults are the function's, not the code's.
        return ast.copy_location(ast.FunctionDef(tree.name, args, body, []), tree)

    def _block(self, nodes: Sequence[ast.stmt], top: bool = False, loop: str = "") -> list[ast.stmt]:
        """The statements of a block. `top`: all lanes of the call that have not returned are here. `loop`: the name of the loop around it."""
        made: list[ast.stmt] = []
        for i, node in enumerate(nodes):
            for each in self._statement(node, top, loop):
                made.append(self._at(each, node))
            if _leaves([node]):
                if top:
                    made.append(self._at(self._set(PREFIX + "top", self._mask()), node))
                rest = nodes[i + 1 :]
                if rest:
                    somebody = ast.Compare(self._mask(), [ast.IsNot()], [ast.Attribute(self._name(PREFIX + "now"), "empty", ast.Load())])
                    made.append(self._at(ast.If(somebody, self._block(rest, top, loop), []), node))
                break
        return made

    def _statement(self, node: ast.stmt, top: bool, loop: str) -> Iterator[ast.stmt]:
        match node:
            case ast.Pass():
                yield node
            case ast.Expr(value):
                if not isinstance(value, ast.Constant):
                    yield ast.Expr(self.expression(value))
            case ast.Assign(targets, value):
                made = self.expression(value)
                if len(targets) > 1:
                    name = self._fresh()
                    yield self._set(name, made)
                    made = self._name(name)
                for target in targets:
                    yield from self._assign(target, made, top)
            case ast.AnnAssign(target, _, value) if value is not None:
                yield from self._assign(target, self.expression(value), top)
            case ast.AugAssign(target, op, value):
                yield from self._augmented(target, op, value, top)
            case ast.If(test, body, orelse):
                yield from self._if(test, body, orelse, loop)
            case ast.For(target, values, body, []):
                yield from self._for(target, values, body, top)
            case ast.While(test, body, []):
                name = self._fresh()
                yield self._set(name, self._loop(body))
                inner = self._block(body, loop=name)
                inner.append(ast.Expr(self._method(name, "again")))
                yield ast.While(self._method(name, "goes_on", self.expression(test)), inner, [])
                yield ast.Expr(self._method(name, "end"))
            case ast.Return(value):
                yield from self._return(value, top)
            case ast.Break() if loop:
                yield ast.Expr(self._method(loop, "leave"))
            case ast.Continue() if loop:
                yield ast.Expr(self._method(loop, "next"))
            case _:
                raise self._refuse(node, f"kernels have no {type(node).__name__}")

    def _assign(self, target: ast.expr, value: ast.expr, top: bool) -> Iterator[ast.stmt]:
        """target = value, an expression that is rewritten already."""
        match target:
            case ast.Name(name):
                if top:
                    yield ast.Assign([target], value)
                    return
                fresh = self._fresh()
                yield self._set(fresh, value)
                kept = self._call("put", self._name(name), self._name(fresh))
                yield ast.Assign([target], ast.IfExp(self._whole(), self._name(fresh), kept))
            case ast.Subscript(array, index, ctx) if not isinstance(index, ast.Slice):
                yield ast.Assign([ast.Subscript(self.expression(array), self.expression(index), ctx)], value)
            case ast.Tuple(targets):
                names = [self._fresh() for _ in targets]
                yield ast.Assign([ast.Tuple([ast.Name(name, ast.Store()) for name in names], ast.Store())], value)
                for each, name in zip(targets, names, strict=True):
                    yield from self._assign(each, self._name(name), top)
            case _:
                raise self._refuse(target, f"kernels do not assign to a {type(target).__name__}")

    def _augmented(self, target: ast.expr, op: ast.operator, value: ast.expr, top: bool) -> Iterator[ast.stmt]:
        name = OPERATORS[type(op)]
        if isinstance(target, ast.Name):
            yield from self._assign(target, self._call(name, self._name(target.id), self.expression(value)), top)
            return
        if not isinstance(target, ast.Subscript) or isinstance(target.slice, ast.Slice):
            raise self._refuse(target, f"kernels do not add to a {type(target).__name__}")
        array, index = self._fresh(), self._fresh()
        yield self._set(array, self.expression(target.value))
        yield self._set(index, self.expression(target.slice))
        old = ast.Subscript(self._name(array), self._name(index), ast.Load())
        yield ast.Assign([ast.Subscript(self._name(array), self._name(index), ast.Store())], self._call(name, old, self.expression(value)))

    def _if(self, test: ast.expr, body: list[ast.stmt], orelse: list[ast.stmt], loop: str) -> Iterator[ast.stmt]:
        name = self._fresh()
        yield self._set(name, self._call("split", self.expression(test)))
        yield ast.If(ast.Attribute(self._name(name), "yes", ast.Load()), self._block(body, loop=loop), [])
        if orelse:
            yield ast.If(self._method(name, "other"), self._block(orelse, loop=loop), [])
        yield ast.Expr(self._method(name, "join" if orelse else "skip"))

    def _loop(self, body: list[ast.stmt]) -> ast.expr:
        return self._call("Loop", *([self._name(PREFIX + "returns")] if self.early and _returns(body) else []))

    def _for(self, target: ast.expr, values: ast.expr, body: list[ast.stmt], top: bool) -> Iterator[ast.stmt]:
        of_range = isinstance(values, ast.Call) and isinstance(values.func, ast.Name) and values.func.id == "range"
        bounds = [self.expression(bound) for bound in values.args] if isinstance(values, ast.Call) and of_range else []
        name = ""
        if _leaves(body):
            name = self._fresh()
            yield self._set(name, self._loop(body))
            sequence = self._method(name, "over", *bounds) if of_range else self._method(name, "each", self.expression(values))
        else:
            sequence = self._call("over", *bounds) if of_range else self.expression(values)
        inner = self._block(body, loop=name)
        if isinstance(target, ast.Name) and (top or target.id not in self.outlive):
            yield ast.For(target, sequence, inner, [])
            return
        each = self._fresh()
        taken = [self._at(statement, target) for statement in self._assign(target, self._name(each), False)]
        yield ast.For(ast.Name(each, ast.Store()), sequence, [*taken, *inner], [])

    def _return(self, value: ast.expr | None, top: bool) -> Iterator[ast.stmt]:
        made = self.expression(value) if value is not None else ast.Constant(None)
        if not self.early:
            yield ast.Return(made)
            return
        name, returns = self._fresh(), PREFIX + "returns"
        yield self._set(name, made)
        back = ast.Assign([self._mask(ast.Store())], self._name(PREFIX + "base"))
        merged = self._set(name, self._method(returns, "last", self._name(name)))
        yield ast.If(self._whole(), [merged, back, ast.Return(self._name(name))], [])
        yield ast.Expr(self._method(returns, "give", self._name(name)))
