"""`python -m nbcnn gradcheck`: every op of every row against the float64 reference and the dot-product gradient check."""

from __future__ import annotations

import argparse
import json
import sys

SUMMARY = "check every kernel against the float64 reference and every gradient against its forward"

_EPILOG = """examples:
  python -m nbcnn gradcheck                    every row that can run on this machine
  python -m nbcnn gradcheck --mode im2col      one mode
  python -m nbcnn gradcheck --failures         print only what fails

exit codes: 0 everything within its bound · 1 a check failed · 2 usage · 4 no usable GPU"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m nbcnn gradcheck", description=SUMMARY, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--mode", default=None, help="check only this mode (default: every mode that can run here)")
    made.add_argument("--failures", action="store_true", help="print only the checks that fail")
    made.add_argument("--json", action="store_true", help="one line of JSON on stdout instead of the table")
    return made


def main(argv: list[str]) -> int:
    """Print the worst finding of every (row, op, check) and return 1 if any check failed, else 0."""
    args = parser().parse_args(argv)
    from nbcnn.gradcheck import check, worst
    from nbcnn.net import choose_mode

    if args.mode:
        choose_mode(args.mode, None)
    findings = []
    for finding in check(args.mode):
        findings.append(finding)
        if not finding.ok:
            print(f"FAILED {finding.mode} {finding.op} [{finding.label}] {finding.check}: {finding.error:.2e} > {finding.bound:.2e}", file=sys.stderr)
    failed = [f for f in findings if not f.ok]
    rows = [f for f in worst(findings) if not (args.failures and f.ok)]
    if args.json:
        print(json.dumps({"checks": len(findings), "failed": len(failed), "rows": [vars(f) | {"ok": f.ok} for f in rows]}))
    else:
        print(f"{'mode':8}{'op':20}{'check':24}{'worst case':34}{'error':>10}{'bound':>10}")
        for f in rows:
            print(f"{f.mode:8}{f.op:20}{f.check:24}{f.label:34}{f.error:10.1e}{f.bound:10.1e}{'' if f.ok else '  FAILED'}")
        print(f"{len(findings)} checks, {len(failed)} failed")
    return 1 if failed else 0
