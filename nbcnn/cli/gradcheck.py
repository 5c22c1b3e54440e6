"""`python -m nbcnn gradcheck` checks every op of every row against the float64 reference and by the dot-product gradient check."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace

from nbcnn.cli.errors import OK, RUNTIME, guarded
from nbcnn.cli.flags import MODES, Parser, flag, one_of
from nbcnn.cli.saying import to_stderr, to_stdout

SUMMARY = "Check every kernel against the float64 reference and every gradient against its forward; exit 1 if one fails."
EXAMPLES = (
    "python -m nbcnn gradcheck                    every mode that can run on this machine",
    "python -m nbcnn gradcheck --mode im2col      one mode",
    "python -m nbcnn gradcheck --op conv_*        some ops: seconds",
    "python -m nbcnn gradcheck --failures         print only what fails",
)


def parser() -> Parser:
    made = Parser("python -m nbcnn gradcheck", SUMMARY, EXAMPLES)
    group = made.add_argument_group("kernels")
    flag(group, "--mode", one_of(*MODES), "check only this mode", "every mode that can run here")
    flag(group, "--op", str, "check only these ops: conv_fprop, conv_*, several with commas", "all", metavar="NAME,…")
    group = made.add_argument_group("output")
    flag(group, "--failures", bool, "print only the checks that fail", "off")
    flag(group, "--json", bool, "print one line of JSON instead of the table", "off")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Print the worst finding of every (row, op, check) and return 1 if any check failed, else 0."""
    flags = parser().parse_args(argv)
    return guarded(lambda: _check(flags))


def _check(flags: SimpleNamespace) -> int:
    from nbcnn.check.gradcheck import check, left_out, ops_of, worst
    from nbcnn.run.rows import choose_mode

    def say(text: str) -> None:
        to_stderr(text)

    if flags.mode:
        choose_mode(flags.mode, None)
    elif skipped := left_out():
        say(f"not checked: {skipped}")
    findings, mode = [], ""
    for finding in check(flags.mode, ops_of(flags.op) if flags.op else None):
        if f"{finding.mode} {finding.precision}" != mode:
            mode = f"{finding.mode} {finding.precision}"
            say(f"checking {mode} …")
        findings.append(finding)
        if not finding.ok:
            where = f"{finding.mode} {finding.precision} {finding.op} [{finding.label}] {finding.check}"
            say(f"FAILED {where}: {finding.error:.2e} > {finding.bound:.2e}")
    failed = [f for f in findings if not f.ok]
    rows = [f for f in worst(findings) if not (flags.failures and f.ok)]
    if flags.json:
        to_stdout(json.dumps({"checks": len(findings), "failed": len(failed), "rows": [vars(f) | {"ok": f.ok} for f in rows]}))
    else:
        to_stdout(f"{'mode':11}{'':6}{'op':22}{'check':24}{'worst case':34}{'error':>10}{'bound':>10}")
        for f in rows:
            to_stdout(f"{f.mode:11}{f.precision:6}{f.op:22}{f.check:24}{f.label:34}{f.error:10.1e}{f.bound:10.1e}{'' if f.ok else '  FAILED'}")
        to_stdout(f"{len(findings)} checks, {len(failed)} failed")
    return RUNTIME if failed else OK
