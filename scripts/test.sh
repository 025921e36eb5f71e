#!/usr/bin/env bash
# Runs the tests in the project's own environment; arguments go to pytest:
#   bash scripts/test.sh                 every test that needs no GPU
#   bash scripts/test.sh -m gpu -n 6 -v  the tests that need some, two at least, and which ran
#   bash scripts/test.sh tests/test_contrastive.py -k sigmoid
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
export OMP_NUM_THREADS=1 # the tests start processes of their own: more threads only get in each other's way
unset PYTHONDONTWRITEBYTECODE # with it, each of these processes would compile the package again
# The tests would wait for the disk at each of their checkpoints: where there is room, their files are in memory.
room=$(df --output=avail /dev/shm 2>/dev/null | tail -n 1) || room=0 # in KiB
if ((room > 4000000)) && ! grep -q ' /dev/shm .*noexec' /proc/mounts; then
  files=$(mktemp -d /dev/shm/hf_infcl.XXXXXX)
  trap 'rm -rf "$files"' EXIT
  set -- --basetemp "$files/tests" "$@"
fi
python -m pytest -n 4 --dist worksteal "$@"
