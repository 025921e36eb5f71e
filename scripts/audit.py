"""Looks up the installed packages in PyPI's advisories: pip install pip-audit; python scripts/audit.py

The exit code is 1 if a package has a known vulnerability. pip-audit by itself reports success if it cannot reach any
advisory; this script then says that nothing was audited.
"""

import json
import subprocess
import sys
import sysconfig
from typing import Any


def summary(packages: list[dict[str, Any]]) -> tuple[str, int]:
    """A sentence about the findings of pip-audit, and the exit code."""
    audited = [package for package in packages if "vulns" in package]
    if not audited:
        return f"WARNING: no advisory could be reached, so none of {len(packages)} packages was audited.", 0
    lines = [
        f"{package['name']} {package['version']}: {found['id']}, mended in {', '.join(found['fix_versions']) or 'none'}"
        for package in audited
        for found in package["vulns"]
    ]
    count = len(lines)
    lines.append(f"{len(audited)} of {len(packages)} packages were audited, with {count} known vulnerabilities.")
    return "\n".join(lines), int(count > 0)


def main() -> None:
    options = ["--path", sysconfig.get_path("purelib"), "--format", "json", "--progress-spinner", "off"]
    command = [sys.executable, "-m", "pip_audit", *options]
    audit = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    try:
        text, code = summary(json.loads(audit.stdout)["dependencies"])
    except ValueError:
        text, code = "WARNING: pip-audit failed, so that nothing was audited; its message stands above.", 0
    print(text)
    sys.exit(code)


if __name__ == "__main__":
    main()
