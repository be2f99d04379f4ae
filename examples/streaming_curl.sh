#!/bin/sh
# Watch the server-sent events of an answer. Start a server first: inferd serve
curl --no-buffer "${1:-http://127.0.0.1:8000}/v1/chat/completions" \
  -H 'content-type: application/json' \
  -d '{"model": "demo", "messages": [{"role": "user", "content": "What is inferd?"}], "stream": true}'
