#!/usr/bin/env bash
# Lint, format, types of the layers that need no JAX, and tests, on the CPU.
#
#   bash scripts/test.sh [pytest arguments]         all but what is marked long or gpu
#   bash scripts/test.sh --all [pytest arguments]   what is marked long (minutes: clients, meshes)
#   bash scripts/test.sh --clients [pytest arguments]   other people's clients, in an environment of their own
#   bash scripts/test.sh --ray [pytest arguments]   jobs and servers on a Ray cluster, in an environment of their own
#
#   JAXINFER_TEST_ASSETS   folder with assets/ for the tests that need it; ../shared where that exists. Without it they skip.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

for name in clients ray; do
  [[ ${1:-} == --"$name" ]] || continue
  shift
  JAXINFER_VENV=.venv-$name bash scripts/setup.sh "$name"
  folder=tests/$name
  [[ $name != ray ]] || folder=tests/cluster
  JAX_PLATFORMS=cpu exec ".venv-$name/bin/python" -m pytest "$folder" "$@"
done

marks="not (long or gpu)"
all=
if [[ ${1:-} == --all ]]; then
  shift
  all=yes
  marks="long and not gpu"
fi
if [[ -z ${JAXINFER_TEST_ASSETS:-} && -d ../shared ]]; then
  JAXINFER_TEST_ASSETS=$(cd ../shared && pwd)
  export JAXINFER_TEST_ASSETS
fi

bash scripts/setup.sh test
# The tests that compile for a GPU need the CUDA plugin, which must not be beside the others: 2.3 GB of its own.
[[ -z $all ]] || JAXINFER_VENV=.venv-capture bash scripts/setup.sh capture
.venv/bin/ruff check
.venv/bin/ruff format --check
.venv/bin/pyright

# loadfile: the tests of a file run in one worker, so that an engine that a file compiles once for all of its tests is
# compiled once. loadscope would part the classes of a file, and the default spreads its tests over all workers.
export JAX_PLATFORMS=cpu
exec .venv/bin/python -m pytest -m "$marks" -n "$(getconf _NPROCESSORS_ONLN)" --dist loadfile "$@"
