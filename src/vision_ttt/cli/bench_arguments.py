"""The flags of `vision-ttt bench`."""

from vision_ttt.bench.contenders import TINY
from vision_ttt.bench.flash_linear_attention import NAME as PEER
from vision_ttt.bench.problems import OPS
from vision_ttt.cli.main import CommandParser

DTYPES = ("float32", "bfloat16", "float16")


def add_op_arguments(parser: CommandParser) -> None:
    """Declare the op, the backends and the shapes of `bench ops`."""
    parser.add_argument("--op", choices=tuple(OPS), default="ttt_linear", help="what to time")
    parser.add_argument(
        "--backends",
        type=str,
        nargs="+",
        default=None,
        help=f"default: all that serve the shape; on cuda {PEER} too. Where it takes part all heads"
        " scan forwards and all tokens share one learning rate, which is what it can compute",
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
        "--lengths", type=int, nargs="+", default=None, help="several T in place of the shape's"
    )
    parser.add_argument("--mini-batch-size", type=int, default=16, help="tokens per gradient step")


def add_model_arguments(parser: CommandParser) -> None:
    """Declare the models and images of `bench models` and `bench train`."""
    parser.add_argument(
        "--models",
        type=str,
        nargs="+",
        default=None,
        help="timm names; models with attention are measured with fused and with plain attention,"
        " 'NAME (fused attention)' picks one. Default: those registered of " + ", ".join(TINY),
    )
    parser.add_argument(
        "--resolutions", type=int, nargs="+", default=[224], help="pixels along a side"
    )
    parser.add_argument("--batch-size", type=int, default=1, help="images per call")


def add_measuring_arguments(parser: CommandParser, what: str) -> None:
    """Declare how to measure and what to do with the rows."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to compute")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of weights and inputs; when training, of autocast over float32 weights",
    )
    parser.add_argument(
        "--compile", type=bool, default=False, help="run every contender by torch.compile"
    )
    parser.add_argument("--repeats", type=int, default=5, help="timed turns of each contender")
    parser.add_argument(
        "--max-seconds",
        type=float,
        default=None,
        help="a contender whose call takes longer is not timed, at that size and larger ones",
    )
    parser.add_argument(
        "--threads", type=int, default=None, help="of the CPU; default: torch's own choice"
    )
    parser.add_argument(
        "--baseline", type=str, default=None, help="the contender that ratios refer to"
    )
    parser.add_argument(
        "--output",
        type=str,
        default=None,
        help=f"CSV file to append to; default: benchmarks/results/{what}-DEVICE.csv",
    )
    parser.add_argument(
        "--figure", type=str, default=None, help="picture of cost against size to write"
    )
    add_exponent_argument(parser)
    parser.add_argument("--json", type=bool, default=False, help="print JSON, not a table")


def add_exponent_argument(parser: CommandParser) -> None:
    """Declare between which sizes the exponent of time is fitted."""
    parser.add_argument(
        "--exponent",
        type=int,
        nargs=2,
        default=None,
        metavar=("FROM", "TO"),
        help="fit time ~ tokens^s between these sizes (pixels along a side; ops: tokens), tell s",
    )


def add_table_arguments(parser: CommandParser) -> None:
    """Declare the rows of `bench table` and where they go."""
    parser.add_argument("file", type=str, help="CSV file that `vision-ttt bench` wrote")
    parser.add_argument(
        "--baseline", type=str, default=None, help="the contender that ratios refer to"
    )
    add_exponent_argument(parser)
    parser.add_argument(
        "--readme",
        type=str,
        default=None,
        help="page to put the table into, between <!-- bench:NAME --> and <!-- /bench -->",
    )
    parser.add_argument(
        "--name", type=str, default=None, help="NAME of the place; default: the file's, no suffix"
    )
    parser.add_argument(
        "--figure",
        type=str,
        default=None,
        help="picture of cost against size to write, of the rows that share the last row's"
        " batch size, dtype and machine",
    )
