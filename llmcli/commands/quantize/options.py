"""The option groups of `llmcli quantize`."""

from typing import Annotated

import typer

from llmcli.commands.command_line import panels
from llmcli.commands.options.groups import option_group
from llmcli.workflows.certification.certify import VerifySettings
from llmcli.workflows.quantization.method_settings import MethodSettings
from llmcli.workflows.quantization.size_request import SizeRequest
from llmcli.workflows.quantization.type_overrides import TensorTypeSettings
from quant.allocation import defaults
from quant.methods import METHODS

_METHODS = "; ".join(f"{name}: {method.help}" for name, method in METHODS.items())

SplitMaxSize = Annotated[
    str | None,
    typer.Option(
        metavar="N(M|G)",
        rich_help_panel=panels.SIZE,
        help="Write shards NAME-00001-of-0000N.gguf with at most this size of tensors each.",
    ),
]
MethodOptions = Annotated[
    MethodSettings,
    option_group(
        panels.METHOD,
        method=typer.Option(
            metavar="NAME", help=f"How codes are chosen. {_METHODS}.", show_default=True
        ),
        imatrix=typer.Option(
            metavar="FILE",
            help="Importance matrix for the rounding, as written by llama-imatrix.",
        ),
        moments=typer.Option(
            metavar="FILE",
            help="Second moments, as written by calibrate --moments; they include an imatrix. "
            "Statistics that a method or fold needs are collected from the built-in text, and "
            "kept.",
        ),
        sequential=typer.Option(
            "--sequential",
            help="With --method gptq: quantize block by block, each with second moments collected "
            "behind the blocks that are already quantized. Reads the text once per block.",
        ),
        calibration=typer.Option(
            metavar="FILE",
            help="UTF-8 text to collect statistics from, instead of the built-in text; repeatable.",
        ),
        calibration_chunks=typer.Option(
            metavar="N", min=1, help="Collect from at most N chunks of the text."
        ),
        fold=typer.Option(
            metavar="KINDS",
            help="Rescale and reorder channels exactly, so that quantization loses less: awq "
            "(important channels get more of a block's range), smooth (moves the activations' "
            "range into the weights), deal (distributes channels over blocks), several separated "
            "by commas; auto: the kinds that were found to help. Chosen with --imatrix or "
            "--moments; a fold is kept only where it lowers the error.",
            show_default=True,
        ),
    ),
]
TensorTypeOptions = Annotated[
    TensorTypeSettings,
    option_group(
        panels.TYPES,
        tensor_type=typer.Option(
            "--tensor-type",
            metavar="REGEX=TYPE",
            help="Type of the tensors whose name matches; repeatable.",
        ),
        output_tensor_type=typer.Option(metavar="TYPE", help="Type of output.weight."),
        token_embedding_type=typer.Option(metavar="TYPE", help="Type of token_embd.weight."),
        leave_output_tensor=typer.Option(
            "--leave-output-tensor", help="Do not quantize output.weight."
        ),
        pure=typer.Option(
            "--pure", help="One type for all matrices instead of the recipe's mixture."
        ),
    ),
]
SizeOptions = Annotated[
    SizeRequest,
    option_group(
        panels.SIZE,
        target_bpw=typer.Option(
            metavar="X",
            help="Choose a type for each tensor so that the file has at most X bits per weight.",
        ),
        target_size=typer.Option(
            metavar="SIZE", help="Like --target-bpw, for at most SIZE: 90M, 0.5G, or bytes."
        ),
        fit=typer.Option(
            "--fit", help="Like --target-bpw, for the largest file that fits into free memory."
        ),
        types=typer.Option(
            metavar="LIST", help="With a target: the types to choose from, as q4_k,q6_k,q8_0."
        ),
        text=typer.Option(
            metavar="FILE", help="With a target: text to measure on; default: the built-in text."
        ),
        probe=typer.Option(
            help=f"With a target: what is measured at a time, default {defaults.PROBE_UNIT}; "
            "group joins q with k, and gate with up."
        ),
        probe_chunks=typer.Option(
            min=1,
            help="With a target: chunks of 512 tokens in each measurement, default "
            f"{defaults.PROBE_CHUNKS}.",
        ),
        swaps=typer.Option(
            min=0,
            help="With a target: alternative mixes to try on held-out text, default "
            f"{defaults.SWAPS}.",
        ),
        quick=typer.Option(
            "--quick", help="With a target: use only the error of the weights; no model is run."
        ),
        sensitivity=typer.Option(
            "--sensitivity",
            help="With a target: print a table of every tensor's SpQR-style sensitivity.",
        ),
        plan_out=typer.Option(
            metavar="FILE", help="Write the type of every tensor to a plan file."
        ),
        plan=typer.Option(metavar="FILE", help="Give every tensor its type from this plan file."),
    ),
]
VerifyOptions = Annotated[
    VerifySettings,
    option_group(
        panels.CHECK,
        verify=typer.Option(
            "--verify",
            help="Evaluate the finished file against SRC and write a certificate into it.",
        ),
        verify_text=typer.Option(
            metavar="FILE",
            help="UTF-8 text to verify with; default: the beginning of the built-in text.",
        ),
        verify_chunks=typer.Option(
            metavar="N", min=1, help="Chunks of 512 tokens to verify with; default: 32."
        ),
    ),
]
