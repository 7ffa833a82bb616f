"""The arguments of `python -m studies bench lm`."""

from typing import Literal

import jsonargparse

from studies.bench.names import (
    LANGUAGE_MODELS,
    LANGUAGE_SIZES,
    LANGUAGE_VARIANTS,
    LEARNING,
    READING,
)
from vision_ttt.cli.checks import LARGEST_BATCH, check_range, flag, shortened
from vision_ttt.cli.parser import CommandParser
from vision_ttt.errors import UserError

# More than these is a typing error, and would need hours or all memory.
LONGEST_CONTEXT = 2**20  # tokens
MOST_WORDS = 2**20
MOST_LAYERS = 1_000


def add_language_arguments(parser: CommandParser) -> None:
    """Declare the models and contexts of `bench lm`."""
    described = "; ".join(f"{name} ({summary})" for name, summary in LANGUAGE_MODELS.items())
    variants = "; ".join(f"{n}: {', '.join(own)}" for n, own in LANGUAGE_VARIANTS.items())
    parser.add_argument(
        "--readers",
        type=str,
        nargs="+",
        default=list(READING),
        help=f"models of prefill and decode: {described}. NAME:VARIANT is one of {variants}."
        " for_inference packs the products; dual runs every op in PyTorch's matrix products;"
        " static packs, and decodes by a cache that is allocated once for all tokens",
    )
    parser.add_argument(
        "--learners", type=str, nargs="+", default=list(LEARNING), help="models of training steps"
    )
    parser.add_argument(
        "--size", type=Literal[LANGUAGE_SIZES], default="125m", help="size of all models"
    )
    parser.add_argument(
        "--num_layers", type=int, default=None, help="number of blocks, instead of the size's"
    )
    parser.add_argument("--vocab_size", type=int, default=32_000, help="vocabulary of all models")
    parser.add_argument(
        "--contexts", type=int, nargs="*", default=[8192, 32768], help="tokens of prefill"
    )
    parser.add_argument(
        "--decode_contexts", type=int, nargs="*", default=[8192], help="tokens before decode"
    )
    parser.add_argument("--decode_tokens", type=int, default=32, help="tokens that a call decodes")
    parser.add_argument(
        "--train_contexts", type=int, nargs="*", default=[4096], help="tokens of training steps"
    )
    parser.add_argument(
        "--batch_size",
        type=int,
        nargs="+",
        default=[1],
        help="sequences per call; several: each is measured, and the largest throughput is told",
    )


def check_language(arguments: jsonargparse.Namespace) -> None:
    """Refuse lengths and models that cannot be measured."""
    lengths = ("contexts", "decode_contexts", "train_contexts")
    given = {name: (1, LONGEST_CONTEXT) for name in lengths if arguments[name]}
    if not given:
        raise UserError(f"nothing is measured: name lengths by {', '.join(map(flag, lengths))}")
    check_range(arguments, batch_size=(1, LARGEST_BATCH), **given)
    check_range(arguments, vocab_size=(2, MOST_WORDS), decode_tokens=(1, LONGEST_CONTEXT))
    if arguments.num_layers is not None:
        check_range(arguments, num_layers=(1, MOST_LAYERS))
    if arguments.compile:
        raise UserError("bench lm measures without --compile")
    if arguments.dtype == "float16":
        raise UserError("bench lm measures float32 and bfloat16, got --dtype float16")
    packed = (":for_inference", ":static", ":for_training")
    on_a_cpu = [x for x in (*arguments.readers, *arguments.learners) if x.endswith(packed)]
    if arguments.device != "cpu" and on_a_cpu:
        raise UserError(
            f"{shortened(on_a_cpu[0])!r} packs products on a CPU; with --device {arguments.device}"
            " name --readers and --learners without such a variant"
        )
    named = [name for name in arguments.learners if name.endswith((":for_inference", ":static"))]
    if arguments.train_contexts and named:
        raise UserError(f"{shortened(named[0])!r} does not train; name its modules: those without")
