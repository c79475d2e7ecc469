#!/usr/bin/env bash
# From a fresh clone to an answer: makes .venv, and lets the embedded model (SmolLM2-135M) answer a prompt on the CPU.
#
#   bash scripts/demo.sh ["a prompt of your own"]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

prompt=${1:-"Write one sentence about the moon."}

bash scripts/setup.sh demo
echo
echo "jaxinfer generate --chat --prompt \"$prompt\""
echo
.venv/bin/jaxinfer generate --model smollm2-135m --chat --prompt "$prompt" --max-tokens 64 --temperature 0 --stats
cat <<'TEXT'

To serve it over the OpenAI API:

  .venv/bin/jaxinfer serve --model smollm2-135m --port 8000

and in another terminal:

  curl -s http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \
    -d '{"model": "smollm2-135m", "messages": [{"role": "user", "content": "What is a page table?"}], "max_tokens": 64}'
TEXT
