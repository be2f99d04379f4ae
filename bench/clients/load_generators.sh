#!/usr/bin/env bash
# Two load generators, unmodified, against a running inferd: `vllm bench serve` and guidellm.
#
#   bench/clients/load_generators.sh URL MODEL TOKENIZER_FOLDER
#
# Uses the commands named by VLLM and GUIDELLM (default: those on the PATH) and runs only what is there.
# Fails if either reports a request that failed. Short runs: they show that it works, not how fast it is.
set -euo pipefail

url=${1:?the server\'s address, like http://127.0.0.1:8000}
model=${2:?the model\'s name}
tokenizer=$(realpath "${3:?the folder of its tokenizer}")
vllm=${VLLM:-vllm} guidellm=${GUIDELLM:-guidellm}
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

vllm_bench() { # backend, endpoint
  "$vllm" bench serve --backend "$1" --endpoint "$2" --base-url "$url" --model "$model" --tokenizer "$tokenizer" \
    --dataset-name random --random-input-len 64 --random-output-len 32 --num-prompts 24 --max-concurrency 8 \
    --ignore-eos --save-result --result-dir "$out" --result-filename "$1.json" --disable-tqdm |
    grep -E "requests:|tokens:|throughput|Mean|P99" || true
  python3 - "$out/$1.json" "$1 $2" <<'PY'
import json, sys
result = json.load(open(sys.argv[1]))
print(f"vllm bench serve, {sys.argv[2]}: {result['completed']} of 24 completed, "
      f"{result['failed']} failed, {result['total_output_tokens']} tokens of 768")
sys.exit(result["completed"] != 24 or result["failed"] != 0 or result["total_output_tokens"] != 768)
PY
}

guidellm_run() { # request format
  (cd "$out" && "$guidellm" run --backend "kind=openai_http,target=$url,model=$model,request_format=$1" \
    --profile kind=concurrent,streams=4 --constraint kind=max_requests,count=24 \
    --data kind=synthetic_text,prompt_tokens=64,output_tokens=32 --tokenizer "kind=huggingface_auto,model=$tokenizer" \
    --output kind=json,path="$out/guidellm.json" --disable-progress >"$out/guidellm.log" 2>&1) ||
    { tail -30 "$out/guidellm.log"; return 1; }
  python3 - "$out/guidellm.json" "$1" <<'PY'
import json, sys
(benchmark,) = json.load(open(sys.argv[1]))["benchmarks"]
totals = benchmark["metrics"]["request_totals"]
print(f"guidellm, {sys.argv[2]}: {totals['successful']} of 24 succeeded, "
      f"{totals['errored']} errors, {totals['incomplete']} incomplete")
sys.exit(totals["successful"] != 24 or totals["errored"] != 0)
PY
}

if command -v "$vllm" >/dev/null; then
  vllm_bench openai /v1/completions
  vllm_bench openai-chat /v1/chat/completions
else
  echo "vllm: not here, not run"
fi
if command -v "$guidellm" >/dev/null; then
  guidellm_run /v1/chat/completions
  guidellm_run /v1/completions
else
  echo "guidellm: not here, not run"
fi
