"""What pip-audit found, as lines to print and an exit status: python .ci/audit.py <its report as JSON>."""

import json
import sys
from pathlib import Path


def judged(report: str) -> tuple[list[str], int]:
    """A vulnerability that another version mends fails the check. One without is said and fails nothing.

    There is nothing to install against it, and a check that fails whatever one does is soon ignored. Where the database
    was not reached, or knows none of the packages (which pip-audit calls no vulnerabilities), nothing was checked.
    """
    packages = json.loads(report)["dependencies"] if report else []
    checked = [package for package in packages if "vulns" in package]
    if not checked:
        return ["pip-audit: SKIPPED, its database cannot be reached from here; no dependency was checked"], 0
    unknown = ", ".join(package["name"] for package in packages if package not in checked)
    lines = [f"pip-audit: {len(checked)} packages checked" + (f"; not in its database: {unknown}" if unknown else "")]
    failed = 0
    for package in checked:
        for found in package["vulns"]:
            mended = ", ".join(found["fix_versions"])
            failed |= bool(mended)
            way_out = f"use {mended}" if mended else "no version without it yet: not a failure"
            lines.append(f"{package['name']} {package['version']}: {found['id']}, {way_out}")
    return lines, int(failed)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    lines, status = judged(file.read_text(encoding="utf-8") if file.exists() else "")
    print("\n".join(lines))
    sys.exit(status)
