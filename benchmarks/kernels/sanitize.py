"""compute-sanitizer over the kernels, by way of their tests at small sizes. Needs a CUDA GPU and the CUDA toolkit.

    python -m benchmarks.kernels.sanitize [--tools memcheck,racecheck] [--limit SECONDS]

memcheck: accesses outside allocations (torch's caching allocator is off, so that neighbours do not hide them) and
misaligned ones. racecheck: hazards in shared memory. Prints each tool's summary; exits with 1 when one finds anything.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = ("tests/gpu/test_gpu_ops.py", "tests/gpu/test_moe_kernels.py")
# Without CUDA graphs (they need the caching allocator), one of each kernel and form.
CHOSEN = (
    "(test_attention_small and bfloat16 and not float32) or hopper or (test_rope and bfloat16) or test_rows or norms "
    "or (test_linear and 2880) or test_sample or (one_launch and float32) or test_pairs or test_one_product or combine"
    " or (test_experts_equal and (silu or oss) and (small or rows or 16))"
)


def find() -> str:
    """The tool's path. Raises SystemExit when it is nowhere."""
    places = sorted(Path("/usr/local").glob("cuda*/bin"), reverse=True)
    found = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *map(str, places)]))
    if found is None:
        raise SystemExit("compute-sanitizer is not installed here: it comes with the CUDA toolkit")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", default="memcheck,racecheck")
    parser.add_argument("--limit", type=float, default=600, help="seconds for each tool")
    parser.add_argument("--chosen", default=CHOSEN, help="which tests, as pytest's -k")
    args = parser.parse_args()
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *TESTS]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    bad = False
    for tool in args.tools.split(","):
        command = [find(), "--tool", tool, "--kernel-regex-exclude", "kns=at::", "--error-exitcode", "77", *tests]
        try:
            done = subprocess.run(
                [*command, "-k", args.chosen], env=environment, capture_output=True, text=True, timeout=args.limit
            )
            output, code = done.stdout + done.stderr, done.returncode
        except subprocess.TimeoutExpired as late:
            output, code = (late.stdout or b"").decode(errors="replace"), None
        lines = [line for line in output.splitlines() if "=====" in line or " passed" in line or " failed" in line]
        print(f"{tool}: {'stopped at the limit' if code is None else f'exit status {code}'}", *lines[-25:], sep="\n")
        bad |= code != 0
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
