#!/usr/bin/env bash
# Writes requirements/*.txt: every package that the project may install, with its version and hashes.
#
#   bash scripts/lock.sh             what pyproject.toml asks for, keeping the versions of uv.lock where there is one
#   bash scripts/lock.sh --upgrade   the newest versions that pyproject.toml allows
#
# Needs uv: that of .venv, or one on the PATH, or $UV. The files hold no index address, so that any mirror serves them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

uv=${UV:-}
for candidate in .venv/bin/uv "$(command -v uv || true)"; do
  if [[ -z $uv && -n $candidate ]] && "$candidate" --version >/dev/null 2>&1; then uv=$candidate; fi
done
if [[ -z $uv ]]; then
  echo "lock: no uv found; run scripts/setup.sh first, or set UV to one" >&2
  exit 1
fi

"$uv" lock "$@"

# name: what `uv export` is asked for. test is demo and more, so that one environment can serve both.
write() {
  local name=$1
  shift
  "$uv" export --locked --quiet --no-emit-project --no-header --no-annotate --no-default-groups "$@" \
    --output-file "requirements/$name.txt"
  echo "requirements/$name.txt: $(grep -c '==' "requirements/$name.txt") packages"
}

write uv --only-group uv
write build --only-group build
write demo --extra demo
write test --extra demo --extra test --extra agent --extra plot --extra dev
write clients --extra demo --extra test --extra clients
write ray --extra demo --extra test --extra ray
write capture --extra demo --extra test --extra capture
write cuda12 --extra demo --extra cuda12
write cuda13 --extra demo --extra cuda13

if grep -nE '[a-z]+://|--(extra-)?index-url|--find-links' requirements/*.txt; then
  echo "lock: the lines above hold an address; requirements must not" >&2
  exit 1
fi
