#!/usr/bin/env bash
# Runs tests with the oldest and the newest releases that pyproject.toml admits; tests/results/versions.csv is the table.
#   bash scripts/versions.sh                           every row, with the tests chosen below
#   bash scripts/versions.sh oldest-3.10 newest-3.13   these rows
#   bash scripts/versions.sh --whole oldest-3.10       these rows with the whole suite
# It needs uv (pip install uv), which fetches Pythons that are not on PATH. PyPI's torch brings CUDA along, some GB that
# the environments in .versions/ share; with UV_TORCH_BACKEND=cpu uv takes torch's CPU builds from PyTorch's own index.
# The exit code is 1 if a test failed. PYTEST_ADDOPTS="-n 2" runs the tests in two processes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD"

suite=chosen
# All model types trained by one process and by two, resuming, the collator and the data.
tests=(tests/test_model_types.py tests/test_resume.py tests/test_data.py)
if [[ "${1:-}" == --whole ]]; then
  suite=whole
  tests=(tests)
  shift
fi
commit="$(git rev-parse --short=7 HEAD)$(git diff --quiet HEAD -- . ':!tests/results' || echo -dirty)"
failed=0

oldest() { # the oldest minor release of a package that pyproject.toml admits, as a requirement
  echo "$1==$(sed -nE "s/^  \"$1>=([0-9]+\.[0-9]+).*/\1/p" pyproject.toml).*"
}

# huggingface_hub has no row of its own: transformers decides on it, and the oldest is in the rows oldest-*.
options() { # of uv for a row
  case "$1" in
    newest-*) echo --resolution highest --python-version "${1#newest-}" ;;
    oldest-3.*) echo --resolution lowest-direct --python-version "${1#oldest-}" ;;
    oldest-*) echo --resolution highest --python-version 3.11 "$(oldest "${1#oldest-}")" ;;
  esac
}

run() {
  local row="$1" folder=".versions/$1" chosen python
  read -ra chosen <<< "$(options "$row")"
  echo "== $row: ${chosen[*]}"
  if [[ ! -e "$folder/complete" ]]; then
    uv venv --quiet --clear --seed --python "${chosen[3]}" "$folder"
    uv pip install --quiet --python "$folder/bin/python" -r pyproject.toml --extra test "${chosen[@]}"
    touch "$folder/complete"
  fi
  python="$folder/bin/python"
  rm -f "$folder/$suite.xml"
  "$python" -m pytest -q -p no:cacheprovider --junitxml "$folder/$suite.xml" "${tests[@]}" || failed=1
  "$python" - "$row" "$suite" "$commit" "$folder/$suite.xml" tests/results/versions.csv << 'PYTHON'
import csv, datetime, platform, sys
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version
from pathlib import Path

row, suite, commit, results, path = sys.argv[1:]
table = Path(path)
cases = list(ElementTree.parse(results).iter("testcase"))
failed = [c.get("name") for c in cases if c.find("failure") is not None or c.find("error") is not None]
skipped = sum(c.find("skipped") is not None for c in cases)
values = {"row": row, "tests": suite, "date": datetime.date.today().isoformat(), "commit": commit}
values |= {"python": platform.python_version()}
values |= {name: version(name) for name in ("torch", "transformers", "accelerate", "datasets", "huggingface_hub", "numpy")}
values |= {"passed": len(cases) - len(failed) - skipped, "skipped": skipped, "failed": len(failed), "failures": " ".join(failed)}
rows = {(r["row"], r["tests"]): r for r in csv.DictReader(table.open(newline=""))} if table.exists() else {}
rows[row, suite] = values
table.parent.mkdir(exist_ok=True)
with table.open("w", newline="") as file:
    writer = csv.DictWriter(file, list(values), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows[key] for key in sorted(rows))
PYTHON
}

if [[ $# -eq 0 ]]; then
  set -- newest-3.{10,11,12,13} oldest-3.{10,12} oldest-{transformers,accelerate,datasets,torch}
fi
for row in "$@"; do
  run "$row"
done
exit "$failed"
