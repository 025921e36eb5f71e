# Sourced by scripts/test.sh, scripts/demo.sh and .ci/run, from the repository root: creates .venv, installs the
# package into it and activates it. A second call finds everything in place and takes no time. The demo sets
# `extras=demo`, which needs less than the tests do.

python="${PYTHON:-python3}"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
  echo "hf_infcl needs Python 3.10 or newer, but $python is $("$python" --version 2>&1): set PYTHON=/path/to/python3" >&2
  exit 1
}

# Written only after a complete install, so an interrupted one is done again.
extras="${extras:-test,demo}"
stamp=".venv/hf_infcl${extras/test,demo/}.stamp"
wanted="$(cat pyproject.toml constraints.txt tests/open_clip.txt tests/object_stores.txt | cksum) $PWD"
if [[ "$(cat "$stamp" 2>/dev/null)" != "$wanted" && "$(cat .venv/hf_infcl.stamp 2>/dev/null)" != "$wanted" ]]; then
  echo "== Installing into .venv (a few minutes, once)"
  "$python" -m venv .venv
  .venv/bin/python -m pip install --no-compile -c constraints.txt -e ".[$extras]"
  if [[ "$extras" == *test* ]]; then
    # Apart from the other packages, since the project has to work without torchvision, and without what these depend
    # on, since torchvision would bring another torch.
    .venv/bin/python -m pip install --no-compile --upgrade --no-deps --target .venv/open_clip -r tests/open_clip.txt
    .venv/bin/python -m pip install --no-compile --upgrade --no-deps --target .venv/object_stores -r tests/object_stores.txt
  fi
  # pip compiles on one core. One file that is left out needs Python 3.12, others are many and hardly used.
  .venv/bin/python -m compileall -q -j 0 -x 'py312_intrinsics|/object_stores/' .venv ||
    echo "== Some packages could not be compiled: see above. Python compiles them when it imports them." >&2
  echo "$wanted" > "$stamp"
fi
source .venv/bin/activate
