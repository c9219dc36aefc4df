"""Pretrain a GPT or Qwen3-MoE model on sequences of very different lengths.

torchrun --nproc-per-node 4 scripts/pretrain_gpt.py --recipe recipes/tiny_cpu.yaml --data-path PREFIX
"""

import os
import shlex
import sys
import warnings

from megaring.errors import UserError
from megaring.failure import fail
from megaring.preflight import preflight
from megaring.recipe import parse

PROGRAM = "pretrain_gpt.py"


def main() -> None:
    """Check everything that can be checked without torch, then train."""
    try:
        if "RANK" not in os.environ and not {"-h", "--help"} & set(sys.argv):
            raise UserError(f"start it with torchrun: torchrun --nproc-per-node 4 {shlex.join(sys.argv)}")
        run = preflight(parse(sys.argv[1:]), world_size=int(os.environ.get("WORLD_SIZE", "1")))
    except Exception as error:  # the same on every rank, so one of them says it
        fail(PROGRAM, error, quiet=os.environ.get("LOCAL_RANK", "0") != "0")
    try:
        # Missing optional packages and deprecations of its own, once per rank: 'megaring doctor' says it better.
        warnings.filterwarnings("ignore", module="megatron")
        # Megatron has torch read a checkpoint without torch.distributed on purpose; torch supposes a mistake.
        warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")
        # A barrier takes the current device, which each rank has set before it joined its peers.
        warnings.filterwarnings("ignore", message=r"barrier\(\): using the device under current context")
        warnings.filterwarnings("ignore", message="invalid escape sequence", category=SyntaxWarning)
        warnings.filterwarnings("ignore", message="Please use DTensor", category=FutureWarning)
        from megaring.megatron.pretrain import pretrain

        pretrain(run)
    except Exception as error:
        fail(PROGRAM, error)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # torchrun passes it on to every rank
        if os.environ.get("RANK", "0") == "0":
            resumes = "with the same --output-dir it resumes from its newest checkpoint, if it has saved one"
            print(f"{PROGRAM}: interrupted; {resumes}", file=sys.stderr, flush=True)
        os._exit(130)  # not sys.exit: peers must not wait for this rank in an exit handler
