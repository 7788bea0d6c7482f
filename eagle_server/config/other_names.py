"""Options and commands of other servers with another name here, or none. A close spelling would mislead."""

# By name without dashes in front: what to do here.
OTHER_NAMES = {
    "model": "it is --model-path here",
    "max-model-len": "it is --context-length here",
    "tensor-parallel-size": "it is --tp-size here",
    "tp": "it is --tp-size here",
    "max-num-seqs": "it is --max-running-requests here",
    "max-num-batched-tokens": "it is --chunked-prefill-size here",
    "max-prefill-tokens": "it is --chunked-prefill-size here",
    "gpu-memory-utilization": "it is --mem-fraction-static here",
    "num-speculative-tokens": "it is --speculative-num-steps here",
    "speculative-config": "it is the options --speculative-... here",
    "speculative-model": "it is --speculative-draft-model-path here",
    "enable-prefix-caching": "the prefix cache is on; --disable-radix-cache turns it off",
    "kv-cache-dtype": "KV has the dtype of --dtype",
    "enable-auto-tool-choice": "calls are recognized where the chat template has a format, see --tool-call-parser",
    "disable-log-requests": "--log-level warning leaves them out",
    "trust-remote-code": "code of checkpoints is never run",
    "root-path": "all links of this server are relative, so it needs no prefix",
    "seed": "each request has its own seed",
}

_SERVE_OR_CHAT = "eagle-server serve MODEL serves a model, eagle-server chat MODEL talks to one"
# Commands of Ollama and vLLM.
OTHER_COMMANDS = {
    "run": _SERVE_OR_CHAT,
    "start": _SERVE_OR_CHAT,
    "complete": "eagle-server chat continues texts where the model has no chat template",
}
