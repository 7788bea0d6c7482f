"""Another engine as a child process: one JSON request per line of stdin, one answer per line of stdout.

`bench.peers` runs this file with the Python of the environment that has the engine, so it imports nothing of this
package. Decoding is greedy, ignores the end of sequence, and caches no prefixes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]], int], list[list[int]]]  # prompts and the number of new tokens -> new tokens

CONTEXT = 2048


def vllm(target: str, draft: str | None, steps: int, threads: int) -> Generate:
    """vLLM on a CPU, in bfloat16. It takes its threads from its environment variables."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    speculative = {"method": "eagle3", "model": draft, "num_speculative_tokens": steps} if draft else None
    limits: dict[str, Any] = {"max_model_len": CONTEXT, "max_num_seqs": 16, "enable_prefix_caching": False}
    model = LLM(target, dtype="bfloat16", speculative_config=speculative, **limits)

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        results = model.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]

    return generate


def openvino(target: str, draft: str | None, steps: int, threads: int) -> Generate:
    """OpenVINO GenAI's paged pipeline; target and draft are exported models."""
    import numpy as np
    import openvino as ov  # type: ignore[import-not-found]
    import openvino_genai as genai  # type: ignore[import-not-found]

    options = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": threads}
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching = 1, False  # GiB
    speculative = {"draft_model": genai.draft_model(draft, "CPU", **options)} if draft else {}
    pipeline = genai.LLMPipeline(target, "CPU", scheduler_config=scheduler, **options, **speculative)

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = tokens, True
        config.do_sample = config.apply_chat_template = False
        if draft:
            config.num_assistant_tokens = steps
        ids = np.array(prompts, dtype=np.int64)
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        return [list(tokens) for tokens in pipeline.generate(inputs, config).tokens]

    return generate


def main() -> None:
    """Load the engine, then answer until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=["vllm", "openvino"])
    parser.add_argument("target")
    parser.add_argument("--draft")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engines print must not mix with the answers
    load = {"vllm": vllm, "openvino": openvino}[arguments.engine]
    generate = load(arguments.target, arguments.draft, arguments.steps, arguments.threads)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            request = json.loads(line)
            answer: dict[str, Any] = {"tokens": generate(request["prompts"], request["tokens"])}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": repr(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
