# Shared by the other scripts (source it): go to the checkout, find a Python, make .venv, install into it.
# shellcheck shell=bash

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"

say() { printf '== %s\n' "$*"; }

# A Python of at least 3.11: $PYTHON if set, else the first on the path that is new enough.
find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.11 python3.12 python3.13 python3.14 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      printf '%s' "$candidate"
      return
    fi
  done
  echo "coldkv needs Python 3.11 or newer; install one or set PYTHON=/path/to/python" >&2
  return 2
}

# install SPEC: make .venv if there is none, and install this checkout (editable), e.g. install '.[test]'.
# Skipped if the same spec was installed for the same pyproject.toml before.
install() {
  local stamp=.venv/coldkv-installed wanted
  wanted="$1 $(cksum <pyproject.toml)"
  if [ ! -x .venv/bin/python ]; then
    say "making .venv"
    "$(find_python)" -m venv .venv
  fi
  if ! grep -qxF "$wanted" "$stamp" 2>/dev/null; then
    say "installing $1 into .venv (torch is large: this can take minutes)"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable "$1"
    echo "$wanted" >>"$stamp"
  fi
}
