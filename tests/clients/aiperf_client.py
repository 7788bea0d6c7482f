# /// script
# dependencies = ["aiperf==0.13.0"]
# ///
"""NVIDIA's AIPerf against the server at URL, streams of both endpoints: python aiperf_client.py URL."""

import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

TOKENIZER = Path(__file__).parents[2] / "eagle_server" / "assets" / "demo" / "target"
LOAD = "--request-count 12 --concurrency 3 --synthetic-input-tokens-mean 40 --output-tokens-mean 24 --random-seed 1"


def profile(endpoint: str, folder: str) -> dict[str, object]:
    command = [str(Path(sys.executable).with_name("aiperf")), "profile", "--model", "demo", "--url", sys.argv[1]]
    command += ["--endpoint-type", endpoint, "--streaming", "--tokenizer", str(TOKENIZER), *LOAD.split()]
    command += ["--extra-inputs", "ignore_eos:true", "--ui", "none", "--artifact-dir", folder]
    subprocess.run(command, check=True, stdout=sys.stderr)
    report = json.loads((Path(folder) / "profile_export_aiperf.json").read_text())
    names = ("request_count", "error_request_count", "output_sequence_length", "time_to_first_token")
    return {name: report[name]["avg"] if report.get(name) else 0 for name in names}


with tempfile.TemporaryDirectory() as folder:
    runs = {endpoint: profile(endpoint, f"{folder}/{endpoint}") for endpoint in ("chat", "completions")}
print(json.dumps({"version": version("aiperf"), **runs}))
