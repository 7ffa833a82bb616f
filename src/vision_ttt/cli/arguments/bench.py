"""The arguments of `vision-ttt bench ops|models|train`."""

import math
from collections.abc import Sequence
from typing import Literal

import jsonargparse

from vision_ttt.bench.names import DEPLOYED, OPS, RUNTIMES, TINY, TRAINED
from vision_ttt.cli.checks import LARGEST_BATCH, check_range, check_renewed_file
from vision_ttt.cli.parser import CommandParser
from vision_ttt.errors import UserError, shortened

KINDS = {
    "ops": "time the backends of an op, relative to the machine's rate of matrix products",
    "models": "time inference of models against the resolution",
    "train": "time training steps (forward and backward) of models against the resolution",
}
DTYPES = ("float32", "bfloat16", "float16")

# More than these is a typing error, and would need hours or all memory.
LARGEST_SHAPE = 2**31  # numbers in one of an op's tensors
LARGEST_SIDE = 8_192  # pixels
MOST_PIXELS = 2**30  # of a batch
MOST_REPEATS = 10_000
MOST_THREADS = 1_024
MOST_MEMORY_RUNS = 100

_EPILOG = """Examples:

  vision-ttt bench models --resolutions 224 512 1280
  vision-ttt bench models --dtype bfloat16 --models deit_tiny_patch16_224:openvino \\
      vittt_tiny_patch16_224:for_inference
  vision-ttt bench ops --op ttt_mlp --lengths 196 6400

`vision-ttt bench WHAT --help` explains the flags of each."""


def add_arguments(parser: CommandParser) -> None:
    """Declare what to do; each has flags of its own."""
    parser.epilog = _EPILOG
    summaries = "; ".join(f"{kind}: {summary}" for kind, summary in KINDS.items())
    parser.add_argument("what", type=Literal[tuple(KINDS)], help=summaries)


def parse(parser: CommandParser, argv: Sequence[str]) -> jsonargparse.Namespace:
    """Parse `argv`: what to do, then its own flags."""
    what = parser.parse_command(argv[:1]).what
    own = CommandParser(f"{parser.prog} {what}", KINDS[what])
    if what == "ops":
        add_op_arguments(own)
    else:
        add_model_arguments(own, what)
    add_measuring_arguments(own, f"benchmarks/results/{what}-DEVICE.csv")
    arguments = own.parse_command(argv[1:])
    arguments.what = what
    return arguments


def check(arguments: jsonargparse.Namespace) -> None:
    """Refuse what can be known to fail before hours of measuring."""
    check_measuring(arguments)
    if arguments.what == "ops":
        check_ops(arguments)
    else:
        check_range(arguments, batch_size=(1, LARGEST_BATCH), resolutions=(1, LARGEST_SIDE))
        check_range(arguments, memory_runs=(0, MOST_MEMORY_RUNS))
        _check_runtimes(arguments)
        pixels = arguments.batch_size * max(arguments.resolutions) ** 2
        if pixels > MOST_PIXELS:
            raise UserError(f"a batch has {pixels:,} pixels; it must have at most {MOST_PIXELS:,}")
        if arguments.dtype == "float16" and arguments.device == "cpu":
            raise UserError("dtype float16 is for cuda; accepted on cpu: float32, bfloat16")


def check_measuring(arguments: jsonargparse.Namespace) -> None:
    """Check what `add_measuring_arguments` declares."""
    check_range(arguments, repeats=(1, MOST_REPEATS), threads=(1, MOST_THREADS))
    if arguments.max_seconds is not None and not arguments.max_seconds > 0:
        raise UserError(f"--max-seconds is {arguments.max_seconds:g}; it must be above 0")
    check_renewed_file("--output", arguments.output)


def _check_runtimes(arguments: jsonargparse.Namespace) -> None:
    deployed = [name for name in arguments.models or () if ":" in name]
    for wanted, off in (
        ("bench models", arguments.what == "train"),
        ("--device cpu", arguments.device != "cpu"),
        ("models without --compile", arguments.compile),
    ):
        if deployed and off:
            raise UserError(f"{shortened(deployed[0])!r} names a runtime, which is for {wanted}")


def check_ops(arguments: jsonargparse.Namespace) -> None:
    """Refuse shapes of `bench ops` that cannot be measured."""
    batch, tokens, heads, dim = arguments.shape
    sizes = {"batch": batch, "heads": heads, "dim": dim}
    named = [*sizes.items(), ("mini-batch-size", arguments.mini_batch_size)]
    named += [("tokens", length) for length in arguments.lengths or [tokens]]
    for name, size in named:
        if size < 1:
            raise UserError(f"{name} is {shortened(size)}; it must be at least 1")
    longest = max(arguments.lengths or [tokens])
    largest = {
        "q": (batch, longest, heads, dim),
        "w1": (heads, dim, 4 * dim),
        "the products of a mini-batch's tokens": (
            *(batch, heads, math.ceil(longest / arguments.mini_batch_size)),
            *(arguments.mini_batch_size, arguments.mini_batch_size),
        ),
    }
    for name, shape in largest.items():
        if math.prod(shape) > LARGEST_SHAPE:
            raise UserError(
                f"{name} would have {shortened(math.prod(shape))} numbers; at most"
                f" {LARGEST_SHAPE:,} are measured"
            )


def add_op_arguments(parser: CommandParser) -> None:
    """Declare the op, the backends and the shapes of `bench ops`."""
    parser.add_argument("--op", type=Literal[OPS], default="ttt_linear", help="op to time")
    parser.add_argument(
        "--backends",
        type=str,
        nargs="+",
        default=None,
        help="default: all that support the shape",
    )
    parser.add_argument(
        "--shape",
        type=int,
        nargs=4,
        default=[1, 6400, 6, 64],
        metavar=("B", "T", "H", "d"),
        help="batch, tokens, heads (half of them scan backwards) and head dimension",
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=None, help="several T instead of the shape's"
    )
    parser.add_argument(
        "--mini_batch_size",
        type=int,
        default=16,
        help="tokens per gradient step; of selective_scan: numbers of a channel's state",
    )


def add_model_arguments(parser: CommandParser, what: str) -> None:
    """Declare the models and images of `bench models` and `bench train`."""
    names = (
        "timm names; models with attention are measured with fused and with plain attention,"
        " 'NAME (fused attention)' selects one. 'NAME (for_training)' is a Vittt, Vim or Mamba-Reg"
        " by composite ops, as the recipes train it."
    )
    default = f" Default: {', '.join(TINY)}"
    if what == "models":
        runtimes = "; ".join(f"{name} ({summary})" for name, summary in RUNTIMES.items())
        names += (
            " NAME:RUNTIME is the model as one deploys it on a CPU, computing in --dtype, compared"
            f" with its modules before it is timed; RUNTIME is one of: {runtimes}. The last four"
            " require pip install 'vision-ttt[bench]'; the two with this package's kernels also"
            " require make openvino or make onnxruntime in a checkout. Missing ones are named and"
            " left out."
        )
        default += f"; on cpu also {', '.join(DEPLOYED)}"
    else:
        default += f"; also {', '.join(TRAINED)}"
    parser.add_argument("--models", type=str, nargs="+", default=None, help=names + default)
    parser.add_argument(
        "--resolutions", type=int, nargs="+", default=[224], help="pixels along a side"
    )
    parser.add_argument("--batch_size", type=int, default=1, help="images per call")
    parser.add_argument(
        "--memory_runs",
        type=int,
        default=3,
        help="fresh processes that measure the memory of a model's second call on a CPU; the result"
        " is their median. 0: not measured",
    )


def add_measuring_arguments(parser: CommandParser, output: str) -> None:
    """Declare how to measure and what to do with the rows.

    Args:
        output: what help says of the file that rows are appended to by default.
    """
    parser.add_argument(
        "--device", type=Literal["cpu", "cuda"], default="cpu", help="device of the contenders"
    )
    parser.add_argument(
        "--dtype",
        type=Literal[DTYPES],
        default="float32",
        help="dtype of weights and inputs; in training, of autocast with float32 weights",
    )
    parser.add_argument(
        "--compile", type=bool, default=False, help="run every contender by torch.compile"
    )
    parser.add_argument("--repeats", type=int, default=5, help="timed turns of each contender")
    parser.add_argument(
        "--max_seconds",
        type=float,
        default=None,
        help="longest time of a call; a slower contender is not timed at this and larger sizes",
    )
    parser.add_argument(
        "--threads", type=int, default=None, help="threads on the CPU; default: PyTorch's"
    )
    parser.add_argument(
        "--output", type=str, default=None, help=f"CSV file to append to; default: {output}"
    )
    add_baseline(parser)
    parser.add_argument("--json", type=bool, default=False, help="print JSON instead of a table")


def add_baseline(parser: CommandParser) -> None:
    """Declare what rows are compared with."""
    parser.add_argument(
        "--baseline",
        type=str,
        default=None,
        help="the contender that ratios refer to; default for ops: dual, for models: the fastest"
        " other model of the same size, then its modules with fused and with plain attention",
    )
