"""The evaluation harness says the same of a model behind inferd as of the model in its own process.

    python bench/clients/lm_eval_parity.py [FOLDER] [--chat FOLDER] --lm-eval /path/to/lm-eval

Serves the checkpoint with inferd in float32, runs the tasks beside this file with the unmodified
``lm-eval`` command, once through ``local-completions`` (and ``local-chat-completions`` for a checkpoint
with a chat template) and once with its in-process ``hf`` model, and compares sample by sample: the
log-likelihoods, whether each was the greedy choice, and the generated texts. No hub is asked.

Needs an environment with ``lm-eval[api]``, ``torch`` and ``transformers``; see README.md here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TASKS = Path(__file__).resolve().parent / "tasks"
SCORED = ("inferd_choice", "inferd_ending", "inferd_rolling")
LIMIT = 1e-3

Samples = dict[tuple[str, int], Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="checkpoint for the log-likelihood and generation tasks")
    parser.add_argument("--chat", type=Path, help="checkpoint with a chat template for the chat task")
    parser.add_argument("--lm-eval", default="lm-eval", help="the lm-eval command of the other environment")
    parser.add_argument("--batch-size", type=int, default=4, help="prompts per request to inferd")
    args = parser.parse_args()
    if args.folder is None and args.chat is None:
        parser.error("name a folder, or one with --chat")
    right = True
    if args.folder is not None:
        right = compare_completions(args.lm_eval, args.folder.resolve(), args.batch_size)
    if args.chat is not None:
        right = compare_chat(args.lm_eval, args.chat.resolve()) and right
    return 0 if right else 1


def compare_completions(lm_eval: str, folder: Path, batch_size: int) -> bool:
    tasks = [*SCORED, "inferd_story"]
    length = json.loads((folder / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
    with served(folder) as url:
        model = f"model={folder.name},base_url={url}/v1/completions,tokenizer={folder},tokenizer_backend=huggingface"
        model += f",add_bos_token=True,max_length={length},num_concurrent=2"
        ours = evaluate(lm_eval, "local-completions", model, tasks, ["--batch_size", str(batch_size)])
    hf = f"pretrained={folder},dtype=float32,add_bos_token=True"
    theirs = evaluate(lm_eval, "hf", hf, tasks, ["--device", "cpu"])
    right = True
    for task in SCORED:
        right = report_scores(f"{folder.name} {task}", _of(ours, task), _of(theirs, task)) and right
    return report_texts(f"{folder.name} inferd_story", _of(ours, "inferd_story"), _of(theirs, "inferd_story")) and right


def compare_chat(lm_eval: str, folder: Path) -> bool:
    extra = ["--apply_chat_template"]
    with served(folder) as url:
        model = f"model={folder.name},base_url={url}/v1/chat/completions,num_concurrent=2"
        ours = evaluate(lm_eval, "local-chat-completions", model, ["inferd_chat"], extra)
    # The template writes every special token that the model wants.
    hf = f"pretrained={folder},dtype=float32,add_bos_token=False"
    theirs = evaluate(lm_eval, "hf", hf, ["inferd_chat"], [*extra, "--device", "cpu"])
    return report_texts(f"{folder.name} inferd_chat", ours, theirs)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """inferd serving the folder in float32, by this interpreter; the server's address."""
    command = [sys.executable, "-m", "inferd", "serve", str(folder), "--name", folder.name]
    command += ["--port", "0", "--dtype", "float32", "--no-access-log"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            ready = next((line for line in server.stdout if "is ready at" in line), None)
            if ready is None:
                raise SystemExit("inferd did not start.")
            yield re.findall(r"http://\S+", ready)[0]
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()


def evaluate(lm_eval: str, kind: str, model_args: str, tasks: list[str], extra: list[str] | None = None) -> Samples:
    """Every sample's responses by task and document, as ``lm-eval run`` logs them."""
    with tempfile.TemporaryDirectory() as out:
        command = [lm_eval, "run", "--model", kind, "--model_args", model_args, "--tasks", ",".join(tasks)]
        command += ["--include_path", str(TASKS), "--output_path", out, "--log_samples", *(extra or ())]
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        print("$", " ".join(command), flush=True)
        done = subprocess.run(
            command, cwd=TASKS, env={**os.environ, **offline}, text=True, capture_output=True, check=False
        )
        if done.returncode:
            raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
        print("\n".join(line for line in done.stdout.splitlines() if line.startswith("|")), flush=True)
        samples: Samples = {}
        for path in Path(out).rglob("samples_*.jsonl"):
            task = re.sub(r"^samples_|_\d{4}-.*$", "", path.stem)
            for line in path.read_text(encoding="utf-8").splitlines():
                sample = json.loads(line)
                samples[task, sample["doc_id"]] = sample["resps"]
    return samples


def _of(samples: Samples, task: str) -> Samples:
    return {key: value for key, value in samples.items() if key[0] == task}


def report_scores(title: str, ours: Samples, theirs: Samples) -> bool:
    """Print the largest difference of log-likelihoods; false if it is too large or a greedy flag differs."""
    assert ours, f"{title}: no samples"
    assert ours.keys() == theirs.keys(), title
    largest, flags, num = 0.0, 0, 0
    for key, mine in ours.items():
        for (our_score, our_flag), (their_score, their_flag) in zip(_pairs(mine), _pairs(theirs[key]), strict=True):
            largest = max(largest, abs(our_score - their_score))
            flags += our_flag != their_flag
            num += 1
    print(f"{title}: {num} log-likelihoods, largest difference {largest:.2e}, {flags} greedy flags differ", flush=True)
    return largest < LIMIT and flags == 0


def _pairs(responses: Any) -> list[tuple[float, bool]]:
    """Log-likelihood and greedy flag of each request of a sample; a rolling one has no flag."""
    pairs = []
    for (response,) in responses:
        score, flag = response if isinstance(response, list) else (response, False)
        pairs.append((float(score), str(flag) == "True"))
    return pairs


def report_texts(title: str, ours: Samples, theirs: Samples) -> bool:
    """Print how many generated texts are the same; show those that are not."""
    assert ours, f"{title}: no samples"
    assert ours.keys() == theirs.keys(), title
    # The harness decodes its own model's continuation alone, and a sentencepiece decoder then drops the space
    # at its beginning; a server that continues a text has to keep it.
    spaced = [key for key in ours if ours[key] == [[" " + theirs[key][0][0]]]]
    different = [key for key in ours if ours[key] != theirs[key] and key not in spaced]
    characters = sum(len(text) for ((text,),) in ours.values())
    print(
        f"{title}: {len(ours) - len(different)} of {len(ours)} texts equal, {characters} characters "
        f"({len(spaced)} of them but for a first space that the in-process decoder drops)",
        flush=True,
    )
    for key in different:
        print(f"  {key[1]}: inferd {ours[key]!r}\n     hf     {theirs[key]!r}")
    return not different


if __name__ == "__main__":
    sys.exit(main())
